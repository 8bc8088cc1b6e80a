"""Runs the offload connector and its worker without an engine: a `Rig` holds a device and its pools, and the caller
takes the place of the scheduler. For benchmarks and for tests on hardware. Used by one thread.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from threading import Event

import torch

from sidestream.errors import DeviceError
from sidestream_kv.device.base import Device, Memory
from sidestream_kv.device.kinds import CUDA
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.kv.pool import FencedPool, Lease
from sidestream_kv.metrics import Metrics
from sidestream_kv.offload.connector import LoadFailed, OffloadConnector
from sidestream_kv.offload.loads import CostModel
from sidestream_kv.offload.tiers.stack import BlockMemory, HostTier, TierStack
from sidestream_kv.types import Fence, Key, LoadPlan, StorePlan

# Longest wait between two polls for the end of transfers.
_LOOK_AGAIN_S = 0.01
_PATIENCE_S = 60.0
# Clock cycles per second of a busy H100. A GPU with a lower clock is busy for longer than asked, which is harmless.
_CYCLES_A_SECOND = 1.75e9


class Rig:
    """`num_blocks` device blocks and `num_slots` host slots. Both pools hand out their ids in a random order (`seed`),
    so that consecutive blocks of a transfer are not adjacent in memory.

    layered    True: the device's blocks are in one tensor per layer, as in vLLM; False: in one tensor for all layers
    together   with `layered`: the tensors are adjacent slices of one allocation
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
            memory = Memory(name, parts, (layout.layer_bytes,) * layout.num_layers)
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
            pools=[self.blocks],
            memory=self.memory,
            tiers=TierStack(self.host),
            costs=CostModel(layout),
            metrics=self.metrics,
            load_deadline_s=_PATIENCE_S,
            notify=self._notified.set,
        )
        self._numbers = count()

    def new_keys(self, num: int) -> list[Key]:
        """Keys that were never used."""
        return [next(self._numbers).to_bytes(16, "little") for _ in range(num)]

    def store(self, keys: Sequence[Key], block_ids: Sequence[int], *after: Fence) -> Fence:
        """Submit one store (device blocks to host slots), which begins after the fences `after`. The returned fence is
        done when this and all earlier transfers have ended.
        """
        self.transfers.submit([StorePlan(tuple(keys), tuple(block_ids), after)])
        return self._submitted()

    def load(self, keys: Sequence[Key], blocks: Lease) -> Fence:
        """Submit one load (host slots to device blocks) under an unused request id. The returned fence is done when
        this and all earlier transfers have ended.
        """
        self.transfers.submit([LoadPlan(next(self._numbers), 0, tuple(keys), tuple(blocks.ids), blocks.after)])
        return self._submitted()

    def _submitted(self) -> Fence:
        fence = self.transfers.transfers_fence()
        assert fence is not None, "no fence for the submitted transfer: it cannot settle before the next poll"
        return fence

    def poll(self) -> None:
        """Process the offload worker's events. Failed loads are added to `failures`."""
        self._notified.clear()
        self.failures.extend(event for event in self.transfers.poll() if isinstance(event, LoadFailed))

    def until(self, done: Callable[[], bool], *, patience_s: float = _PATIENCE_S) -> None:
        """Poll until `done()` is True. Raises DeviceError after `patience_s`."""
        until_s = time.monotonic() + patience_s
        while not done():
            if time.monotonic() > until_s:
                raise DeviceError(f"transfers did not end within {patience_s:.0f} s")
            self.poll()
            if not done():
                self._notified.wait(_LOOK_AGAIN_S)  # an idle engine thread waits in the same way

    def settle(self) -> None:
        """Poll until no transfer is running."""
        self.until(lambda: not self.transfers.has_work and not self.transfers.has_waiters)
        self.poll()

    def close(self) -> None:
        """Close the transfer engine and the device."""
        self.transfers.flush(timeout_s=_PATIENCE_S)
        self.device.close()
        self.transfers.close()


def busy(device: Device, seconds: float) -> None:
    """Keep the current stream busy for about `seconds`. Call it inside work of the stream."""
    if not seconds:
        return
    if device.kind == CUDA:
        torch.cuda._sleep(int(seconds * _CYCLES_A_SECOND))  # type: ignore[no-untyped-call]
    else:
        time.sleep(seconds)


def in_groups(items: Sequence[Key], size: int) -> Iterator[Sequence[Key]]:
    """Slices of `size` items; the last may be shorter."""
    return (items[first : first + size] for first in range(0, len(items), size))


def _shuffle(pool: FencedPool, rng: random.Random) -> None:
    leases = [pool.take(1) for _ in range(pool.size)]
    rng.shuffle(leases)
    for lease in leases:
        lease.release()
