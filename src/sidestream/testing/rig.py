"""A transfer engine without an engine around it: a device, its pools, and whoever uses it is the scheduler and the
compute stream.

For benchmarks and for tests on hardware. Used by one thread, which stands for the engine thread.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from threading import Event

import torch

from sidestream.device.base import Device, Memory
from sidestream.device.kinds import CUDA
from sidestream.errors import DeviceError
from sidestream.kv.layout import KVLayout
from sidestream.kv.pool import FencedPool, Lease
from sidestream.metrics import Metrics
from sidestream.offload.connector import LoadFailed, OffloadConnector
from sidestream.offload.copy import BlockMemory
from sidestream.offload.costs import CostModel
from sidestream.offload.tiers.host import HostTier
from sidestream.offload.tiers.stack import TierStack
from sidestream.types import Fence, Key, LoadPlan, StorePlan

# How often it looks whether transfers have ended though nobody told it.
_LOOK_AGAIN_S = 0.01
_PATIENCE_S = 60.0
# An H100 counts so many while it is busy; what is kept busy too long by a slower one is no harm.
_CYCLES_A_SECOND = 1.75e9


class Rig:
    """`num_blocks` device blocks and `num_slots` host slots, both given out in an order that a seed shuffles, so that
    neighbours lie apart.

    layered    the device's blocks lie in one tensor for each layer, as other engines have them; else in one for all
    together   those tensors are cut from one allocation, as far from each other as they are long
    """

    def __init__(
        self,
        device: Device,
        layout: KVLayout,
        *,
        num_blocks: int,
        num_slots: int,
        layered: bool = False,
        together: bool = False,
        seed: int = 0,
        name: str = "kv",
    ) -> None:
        self.device = device
        self.layout = layout
        if layered:
            size = num_blocks * layout.layer_bytes
            if together:
                all_layers = device.allocate(name, size * layout.num_layers).data
                parts = tuple(all_layers[layer * size : (layer + 1) * size] for layer in range(layout.num_layers))
            else:
                parts = tuple(device.allocate(f"{name} layer {layer}", size).data for layer in range(layout.num_layers))
            memory = Memory(name, parts, stripe=layout.layer_bytes)
        else:
            memory = device.allocate(name, num_blocks * layout.block_bytes)
        self.memory = BlockMemory(memory, layout)
        self.blocks = FencedPool("device blocks", num_blocks, tracer=device.tracer)
        slab = device.allocate_host("host", num_slots * layout.block_bytes, item_bytes=layout.block_bytes)
        while device.ready_bytes(slab) < slab.num_bytes:
            time.sleep(0.01)
        self.host = HostTier(slab, layout, tracer=device.tracer)
        self.host_memory = BlockMemory(slab, layout)
        if device.tracer is not None:
            device.tracer.backed(self.blocks.name, name, layout.block_bytes)
        rng = random.Random(seed)
        for pool in (self.blocks, self.host.pool):
            _shuffle(pool, rng)
        self.metrics = Metrics()
        self._notified = Event()
        self.failures: list[LoadFailed] = []
        self.transfers = OffloadConnector(
            device=device,
            blocks=self.blocks,
            memory=self.memory,
            tiers=TierStack(self.host),
            costs=CostModel(layout),
            metrics=self.metrics,
            load_deadline_s=_PATIENCE_S,
            notify=self._notified.set,
        )
        self._numbers = count()

    def new_keys(self, num: int) -> list[Key]:
        """Keys that nothing has had yet."""
        return [next(self._numbers).to_bytes(16, "little") for _ in range(num)]

    def store(self, keys: Sequence[Key], block_ids: Sequence[int], *after: Fence) -> Fence:
        """Order one store; done when every order up to it is."""
        self.transfers.submit([StorePlan(tuple(keys), tuple(block_ids), after)])
        return self._ordered()

    def load(self, keys: Sequence[Key], blocks: Lease) -> Fence:
        """Order one load, by a request that is nobody's; done when every order up to it is."""
        self.transfers.submit([LoadPlan(next(self._numbers), 0, tuple(keys), tuple(blocks.ids), blocks.after)])
        return self._ordered()

    def _ordered(self) -> Fence:
        fence = self.transfers.uses()
        assert fence is not None, "an order is not carried out before somebody polls"
        return fence

    def poll(self) -> None:
        """Take in the offload worker's events."""
        self._notified.clear()
        self.failures.extend(event for event in self.transfers.poll() if isinstance(event, LoadFailed))

    def until(self, done: Callable[[], bool], *, patience_s: float = _PATIENCE_S) -> None:
        """Poll until `done`. Raises DeviceError when that takes too long."""
        until_s = time.monotonic() + patience_s
        while not done():
            if time.monotonic() > until_s:
                raise DeviceError(f"transfers did not end within {patience_s:.0f} s")
            self.poll()
            if not done():
                self._notified.wait(_LOOK_AGAIN_S)  # as the engine thread does when it has nothing to compute

    def settle(self) -> None:
        """Poll until nothing is on its way."""
        self.until(lambda: not self.transfers.busy and not self.transfers.awaited)
        self.poll()

    def close(self) -> None:
        """End it, and the device."""
        self.transfers.flush(timeout_s=_PATIENCE_S)
        self.device.close()
        self.transfers.close()


def busy(device: Device, seconds: float) -> None:
    """Keep the current stream busy for about so long; not at all for 0. Inside work of it."""
    if not seconds:
        return
    if device.kind == CUDA:
        torch.cuda._sleep(int(seconds * _CYCLES_A_SECOND))  # type: ignore[no-untyped-call]
    else:
        time.sleep(seconds)


def in_groups(items: Sequence[Key], size: int) -> Iterator[Sequence[Key]]:
    """The items, `size` at a time."""
    return (items[first : first + size] for first in range(0, len(items), size))


def _shuffle(pool: FencedPool, rng: random.Random) -> None:
    leases = [pool.take(1) for _ in range(pool.size)]
    rng.shuffle(leases)
    for lease in leases:
        lease.release()
