"""Blocks whose form in host memory is packed: sizes, order under every schedule, the measured error."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from sidestream_kv.device.eight_bit import pack, unpack
from sidestream_kv.errors import ConfigError
from sidestream_kv.kv.eight_bit import EightBitLayout, layout_in_tiers
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.kv.pool import FencedPool
from sidestream_kv.metrics import Metrics
from sidestream_kv.offload.connector import LoadReady, OffloadConnector
from sidestream_kv.offload.loads import CostModel
from sidestream_kv.offload.tiers.stack import BlockMemory, HostTier, TierStack
from sidestream_kv.types import Access, Fence, LoadPlan, StorePlan
from sidestream_order.checker import Checker
from sidestream_order.guard import Guard
from sidestream_order.sim import SimDevice, make_policy

PLAIN = KVLayout(num_layers=4, num_kv_heads=1, head_dim=8, block_tokens=2, dtype="float32")
PACKED = EightBitLayout(PLAIN)
KEYS = tuple(bytes([number]) * 16 for number in range(3))


def test_a_packed_block_has_about_half_the_bytes_and_ends_at_a_page() -> None:
    layout = EightBitLayout(KVLayout(30, 3, 64, 16, "bfloat16"))
    assert layout.num_layers * layout.layer_bytes == 30 * 2 * 16 * 3 * (64 + 4)
    assert layout.block_bytes == 48 * 4096 < 0.54 * layout.plain.block_bytes
    assert layout.plain.describe().items() < layout.describe().items()


def test_vectors_whose_scale_would_not_be_aligned_are_refused() -> None:
    assert layout_in_tiers(PLAIN, "auto") is PLAIN
    with pytest.raises(ConfigError, match=r"kv_dtype is int8, but the vectors .* have 6 elements, no multiple of 4"):
        layout_in_tiers(KVLayout(1, 1, 6, 16, "float32"), "int8")


class World:
    """A connector between four device blocks and three host slots of a simulated device."""

    def __init__(self, device: SimDevice) -> None:
        self.device = device
        self.kv = device.allocate("kv", 6 * PLAIN.block_bytes)
        self.blocks = FencedPool("device blocks", 6, tracer=device.tracer)
        if device.tracer is not None:
            device.tracer.backed(self.blocks.name, "kv", PLAIN.block_bytes)
        slab = device.allocate_host("host", len(KEYS) * PACKED.block_bytes, item_bytes=PACKED.block_bytes)
        self.host = HostTier(slab, PACKED, tracer=device.tracer)
        self.metrics = Metrics()
        self.compute = device.stream("compute")
        self.transfers = OffloadConnector(
            device=device,
            pools=[self.blocks],
            memory=BlockMemory(self.kv, PLAIN),
            tiers=TierStack(self.host),
            costs=CostModel(PACKED),
            metrics=self.metrics,
            load_deadline_s=10.0,
        )

    def rows(self) -> torch.Tensor:
        return self.kv.data.view(-1, PLAIN.block_bytes)

    def accesses(self, block_ids: Sequence[int], layers: range, *, write: bool) -> list[Access]:
        return [Access("kv", *PLAIN.layer_span(block, layers.start, layers.stop), write) for block in block_ids]

    def fill(self, block_ids: Sequence[int], contents: torch.Tensor) -> Fence:
        """Write blocks on the compute stream."""

        def step() -> None:
            self.rows()[list(block_ids)] = contents

        return self.compute.submit(step, lambda: self.accesses(block_ids, range(PLAIN.num_layers), write=True))

    def store(self, contents: torch.Tensor) -> None:
        """Store new blocks, and look at each as soon as it can be found."""
        lease = self.blocks.take(len(KEYS))
        fence = self.fill(lease.ids, contents)
        self.transfers.submit([StorePlan((KEYS[at],), (block,), (fence,)) for at, block in enumerate(lease.ids)])
        lease.release(until=self.transfers.transfers_fence())
        seen = set[bytes]()
        while len(seen) < len(KEYS):
            self.transfers.poll()
            for index, key in enumerate(KEYS):
                slot = self.host.pool.get(key)
                if slot is not None and key not in seen:
                    seen.add(key)
                    found = torch.frombuffer(self.host.slot(slot), dtype=torch.uint8)
                    assert torch.equal(found, pack(contents[index], PACKED.packed))
            self.device.sleep(1e-5)

    def load(self) -> torch.Tensor:
        """Load the blocks, and read them layer by layer on the compute stream, behind the gates of each layer."""
        lease = self.blocks.take(len(KEYS))
        self.transfers.submit([LoadPlan(1, 0, KEYS, tuple(lease.ids), lease.after)])
        while not any(isinstance(event, LoadReady) for event in self.transfers.poll()):
            self.device.sleep(1e-5)
        gates, read = self.transfers.gates([(1, 0)]), list[torch.Tensor]()
        for layer in range(PLAIN.num_layers):
            for fence in gates.by_layer[layer]:
                self.compute.wait(fence)
            span, layers = slice(*PLAIN.layer_span(0, layer, layer + 1)), range(layer, layer + 1)
            last = self.compute.submit(
                lambda span=span: read.append(self.rows()[list(lease.ids), span].clone()),  # type: ignore[misc]
                lambda layers=layers: self.accesses(lease.ids, layers, write=False),  # type: ignore[misc]
            )
        self.device.wait_host(last, reason="step")
        return torch.cat(read, dim=1)


@contextmanager
def world(seed: int, *, policy: str = "random") -> Iterator[tuple[World, Checker]]:
    checker = Checker()
    device = SimDevice(make_policy(policy, random.Random(seed)), tracer=checker, guard=Guard(checker))
    device.segment_bytes = PLAIN.layer_bytes  # loads are split by layers
    try:
        made = World(device)
        yield made, checker
        device.close()
        made.transfers.close()
    finally:
        device.kill()


def contents() -> torch.Tensor:
    numbers = torch.randn(len(KEYS), PLAIN.block_bytes // 4, generator=torch.Generator().manual_seed(1))
    return numbers.view(torch.uint8)


@pytest.mark.parametrize("policy", ["random", "late", "starve:store-0", "starve:load-0"])
def test_blocks_are_found_when_packed_and_read_when_unpacked(policy: str) -> None:
    wanted = torch.stack([unpack(pack(block, PACKED.packed), PACKED.packed) for block in contents()])
    for seed in range(10):
        with world(seed, policy=policy) as (made, checker):
            made.store(contents())
            assert torch.equal(made.load(), wanted)
        assert not checker.findings
        assert made.metrics.value("transfer_bytes_total", "store") == len(KEYS) * PACKED.block_bytes
        assert made.metrics.value("transfer_bytes_total", "load") == len(KEYS) * PACKED.block_bytes


def test_the_error_of_the_first_stores_is_logged_once_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    plain = contents()[0].view(torch.float32)
    back = unpack(pack(contents()[0], PACKED.packed), PACKED.packed).view(torch.float32)
    shape = (PLAIN.num_layers, 2, -1)
    keys, values = ((back - plain).view(shape).norm(dim=2) / plain.view(shape).norm(dim=2)).mean(dim=0).tolist()
    with caplog.at_level(logging.INFO), world(0) as (made, checker):
        made.store(contents())
        made.transfers.forget_all()
        made.store(contents())
    assert not checker.findings
    assert made.metrics.value("kv_error", "keys") == pytest.approx(keys)
    assert made.metrics.value("kv_error", "values") == pytest.approx(values)
    assert 0.001 < keys < 0.01
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"tiers hold KV in 8 bits: {PACKED.block_bytes / 2:.0f} bytes a token, not 256;")
    assert f"first stored block: keys {keys:.2%}, values {values:.2%}" in line
