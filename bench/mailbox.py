"""Time until the host sees a sampled token while a gigabyte of KV is being stored.

Two methods are compared. Mailbox: a kernel writes the tokens to pinned host memory, as in the engine. Copy engine: the
tokens are copied to the host by a device-to-host copy, which may queue behind the stores.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing

import numpy as np
import torch

from bench.gpu import QWEN3_8B_BLOCK, open_device, stamp
from proof.report import Figure, at_most
from proof.rig import Rig, busy
from sidestream_kv.device.base import Device
from sidestream_kv.offload.pacing import layers_batch
from sidestream_kv.types import Fence

_ROWS = 128
_STEP_S = 0.001


def measure(*, device: str, mib: int, tokens: int, on_progress: Callable[[str], None]) -> list[Figure]:
    """Latencies of the tokens of 128 rows, from the sampling on the device until the host sees them."""
    used = open_device(device)
    count = (mib << 20) // QWEN3_8B_BLOCK.block_bytes
    with closing(Rig(used, QWEN3_8B_BLOCK, num_blocks=2 * count, num_slots=3 * count)) as rig:
        box = _Box(used)
        on_progress("alone")
        alone = [box.latency_ms(box.deliver) for _ in range(tokens)]
        idle = [box.round_trip_ms(box.copy) for _ in range(tokens // 4)]
        on_progress("while storing")
        stored = _Stores(rig, count)
        under, paced, foreign = list[float](), list[float](), list[float]()
        start, before = time.perf_counter(), rig.metrics.value("transfer_bytes_total", "store")
        while len(under) < tokens:
            stored.top_up()
            under.append(box.latency_ms(box.deliver))
        stored.end()
        stored_gb_s = (
            (rig.metrics.value("transfer_bytes_total", "store") - before) / (time.perf_counter() - start) / 1e9
        )
        on_progress("the copy engine, with paced stores")
        while len(paced) < tokens // 4:
            stored.top_up()
            paced.append(box.latency_ms(box.copy))
            foreign.append(box.round_trip_ms(box.copy))
        stored.end()
        on_progress("the copy engine, with one unpaced store")
        unpaced = [_behind_everything(rig, box, count) for _ in range(5)]
    return [
        Figure("mailbox_ms_p99", _percentile(under, 0.99), "ms", at_most(0.2)),
        Figure("mailbox_ms_median", _percentile(under, 0.5), "ms"),
        Figure("mailbox_ms_max", max(under), "ms"),
        Figure("mailbox_alone_ms_p99", _percentile(alone, 0.99), "ms"),
        Figure("mailbox_alone_ms_median", _percentile(alone, 0.5), "ms"),
        Figure("foreign_copy_wait_ms", _percentile(foreign, 0.5) - _percentile(idle, 0.5), "ms", at_most(0.3)),
        Figure("foreign_copy_ms_median", _percentile(foreign, 0.5), "ms"),
        Figure("foreign_copy_ms_p99", _percentile(foreign, 0.99), "ms"),
        Figure("foreign_copy_alone_ms_median", _percentile(idle, 0.5), "ms"),
        Figure("foreign_copy_behind_kernel_ms_median", _percentile(paced, 0.5), "ms"),
        Figure("unpaced_copy_ms_median", _percentile(unpaced, 0.5), "ms"),
        Figure("stored_gb_s", stored_gb_s, "GB/s"),
        Figure("tokens", len(under), "tokens"),
    ]


class _Stores:
    """Keeps the offload worker busy: stores of at least half of `count` blocks are always pending."""

    def __init__(self, rig: Rig, count: int) -> None:
        self._rig = rig
        self._blocks = rig.blocks.take(count)
        self._half = count // 2
        self._last: Fence | None = None
        self._following: Fence | None = None

    def top_up(self) -> None:
        """Submit a store of half of the blocks when the older of the two pending stores has ended."""
        self._rig.poll()
        if self._last is None or self._last.poll():
            self._last, following = (
                self._following,
                self._rig.store(self._rig.new_keys(self._half), self._blocks.ids[: self._half]),
            )
            self._following = following

    def end(self) -> None:
        """Wait until all stores have ended."""
        self._rig.settle()


class _Box:
    """A mailbox, the compute stream, and the offset between the device's clock and the host's clock."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._compute = device.stream("compute")
        self._memory = device.allocate_host("mailbox", 8 * (_ROWS + 1))
        self._numbers = self._memory.data.view(torch.int64)
        self._seen = self._numbers.numpy()
        self._tokens = torch.arange(_ROWS, dtype=torch.int64, device=device.torch_device)
        self._apart_ns = self._compare_clocks()

    def deliver(self) -> None:
        """Write the tokens to the mailbox with a kernel, as the engine does."""
        self._compute.deliver(self._tokens, self._memory, 0)

    def copy(self) -> None:
        """Write the tokens to the mailbox through the copy engine."""
        self._numbers[:_ROWS].copy_(self._tokens, non_blocking=True)

    def latency_ms(self, bring: Callable[[], None]) -> float:
        """Time from the end of a step's computation on the device until the host sees the tokens. Like the engine, the
        host waits for the step's fence.

        bring   `deliver` or `copy`
        """

        def step() -> None:
            busy(self._device, _STEP_S)
            stamp(self._device, self._memory, 8 * _ROWS)
            bring()

        self._seen[:] = -1
        fence = self._compute.submit(step)
        self._device.wait_host(fence, reason="step")
        now_ns = time.perf_counter_ns()
        if self._seen[0] or self._seen[_ROWS - 1] != _ROWS - 1:
            raise RuntimeError("the tokens have not arrived after the fence")
        return float(now_ns - (self._seen[_ROWS] + self._apart_ns)) / 1e6

    def round_trip_ms(self, bring: Callable[[], None]) -> float:
        """Time from the launch of `bring` on an idle stream until the host sees that it is done."""
        start = time.perf_counter()
        fence = self._compute.submit(bring)
        while not fence.poll():
            pass
        return 1e3 * (time.perf_counter() - start)

    def _compare_clocks(self) -> int:
        """Host clock minus device clock, in ns. Of many round trips, uses the shortest, and assumes that the device
        read its clock in the middle of the round trip.
        """
        best = (1 << 62, 0)
        for _ in range(500):
            self._seen[_ROWS] = -1
            start = time.perf_counter_ns()
            self._compute.submit(lambda: stamp(self._device, self._memory, 8 * _ROWS))
            while self._seen[_ROWS] == -1:
                time.sleep(0)
            stop = time.perf_counter_ns()
            best = min(best, (stop - start, (start + stop) // 2 - int(self._seen[_ROWS])))
        return best[1]


def _behind_everything(rig: Rig, box: _Box, count: int) -> float:
    """Latency of a small copy that queues on the device behind a copy of all blocks in one piece (unpaced)."""
    ids = np.random.default_rng(0).permutation(count).tolist()
    batch = layers_batch(rig.memory, ids, rig.host_memory, ids, range(rig.layout.num_layers))
    bulk = rig.device.stream(f"unpaced {time.perf_counter_ns()}")
    fence = bulk.submit(lambda: bulk.copy(batch))
    taken = box.latency_ms(box.copy)
    rig.device.wait_host(fence, reason="benchmark")
    return taken


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
