"""A transfer engine over real streams, pools and tiers, without an engine around it: the test is the scheduler and the compute stream.

The clock stands still unless a test moves it. `finish` brings named streams to their end and polls once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sidestream.device.cpu import CpuDevice, CpuFence, CpuStream
from sidestream.kv.layout import KVLayout
from sidestream.kv.pool import FencedPool, Lease
from sidestream.metrics import Metrics
from sidestream.testing.faults import FaultyTier, Hold
from sidestream.tiers.disk import DiskTier, entry_bytes
from sidestream.tiers.host import HostTier
from sidestream.transfer import CostModel, TransferEngine, TransferEvent
from sidestream.transfer.copy import BlockMemory
from sidestream.types import BatchPlan, Fence, Key, LoadPlan, PromotePlan, RowPlan, StorePlan

LAYOUT = KVLayout(num_layers=3, num_kv_heads=1, head_dim=2, block_tokens=4, dtype="float32")
DEADLINE_S = 10.0
_PATIENCE_S = 10.0


def key(name: object) -> Key:
    return hashlib.blake2b(str(name).encode(), digest_size=16).digest()


def keys(*names: object) -> tuple[Key, ...]:
    return tuple(key(name) for name in names)


def content(of: Key) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes that belong under a key."""
    return np.random.default_rng(int.from_bytes(of, "little")).integers(0, 256, LAYOUT.block_bytes, dtype=np.uint8)


class Clock:
    """Stands still, or goes on by `step_s` whenever it is looked at."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.step_s = 0.0

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


class Rig:
    def __init__(self, directory: Path | None = None, *, num_blocks: int = 16, num_slots: int = 8, disk_blocks: int = 64) -> None:
        self.device = CpuDevice(compute_threads=1)
        self.compute = self.device.stream("compute")
        self.blocks = FencedPool("device blocks", num_blocks)
        self.memory = BlockMemory(self.device.allocate("kv", num_blocks * LAYOUT.block_bytes), LAYOUT)
        self.host = HostTier(self.device.allocate_host("host", num_slots * LAYOUT.block_bytes), LAYOUT)
        self.disk: FaultyTier | None = None
        if directory is not None:
            capacity = disk_blocks * entry_bytes(LAYOUT)
            self.disk = FaultyTier(DiskTier.open(directory, layout=LAYOUT, fingerprint="rig", capacity_bytes=capacity))
        self.costs = CostModel(LAYOUT)
        self.metrics = Metrics()
        self.clock = self.device.now = Clock()  # type: ignore[method-assign]
        self.transfers = TransferEngine(
            device=self.device,
            blocks=self.blocks,
            memory=self.memory,
            host=self.host,
            disk=self.disk,
            costs=self.costs,
            metrics=self.metrics,
            load_deadline_s=DEADLINE_S,
        )
        self._holds: list[Hold] = []

    # ------------------------------------------------------------------ streams

    def stream(self, name: str) -> CpuStream:
        return self.device._streams[name]

    @property
    def stream_names(self) -> list[str]:
        return list(self.device._streams)

    def hold(self, name: str) -> Hold:
        hold = Hold(self.stream(name))
        self._holds.append(hold)
        return hold

    def drain(self, *names: str) -> None:
        """Let streams pass everything that they were given so far."""
        for name in names:
            fence = self.stream(name).submit(lambda: None)
            assert isinstance(fence, CpuFence)
            assert fence.block(_PATIENCE_S), f"stream {name} is stuck"

    def finish(self, *names: str) -> list[TransferEvent]:
        self.drain(*names)
        return self.transfers.poll()

    # ------------------------------------------------------------------ blocks and slots

    def fill(self, block_ids: Sequence[int], wanted: Sequence[Key]) -> Fence:
        """What a flight does: write the keys' bytes into the blocks, on the compute stream."""

        def flight() -> None:
            for block, of in zip(block_ids, wanted, strict=True):
                self.rows()[block] = torch.from_numpy(content(of))

        return self.compute.submit(flight)

    def rows(self) -> torch.Tensor:
        """The device's blocks, a row each."""
        return self.memory.memory.data.view(-1, LAYOUT.block_bytes)

    def block(self, block_id: int) -> bytes:
        return self.rows()[block_id].numpy().tobytes()

    def host_holds(self, wanted: Key) -> bool:
        """Whether the key is findable in the host tier, with its own bytes."""
        slot = self.host.pool.get(wanted)
        return slot is not None and bytes(self.host.slot(slot)) == content(wanted).tobytes()

    def taken(self, block_ids: Sequence[int]) -> Lease:
        """A lease of exactly these blocks."""
        everything = self.blocks.take(self.blocks.num_available)
        assert set(block_ids) <= set(everything.ids)
        wanted = self.blocks.share(block_ids)
        everything.release()
        wanted.after = everything.after
        return wanted

    # ------------------------------------------------------------------ plans

    def store(self, wanted: Sequence[Key], block_ids: Sequence[int], *after: Fence, prefix: Sequence[Key] = ()) -> None:
        self.transfers.submit([StorePlan(tuple(wanted), tuple(block_ids), after, tuple(prefix))])

    def stored(self, wanted: Sequence[Key], *, prefix: Sequence[Key] = ()) -> None:
        """Compute the keys' blocks, store them, and let the blocks go. With a disk, its writes are done too."""
        lease = self.blocks.take(len(wanted))
        fence = self.fill(lease.ids, wanted)
        self.store(wanted, lease.ids, fence, prefix=prefix)
        self.finish("compute", "store")
        lease.release()
        if self.disk is not None:
            self.finish("disk-write")

    def on_disk_only(self, wanted: Sequence[Key]) -> None:
        """Blocks that only the disk holds."""
        self.stored(wanted)
        self.host.pool.forget_all()
        assert self.transfers.locate(wanted) == ["disk"] * len(wanted)

    def load(self, wanted: Sequence[Key], block_ids: Sequence[int], *after: Fence, request_id: int = 1, epoch: int = 0) -> LoadPlan:
        plan = LoadPlan(request_id, epoch, tuple(wanted), tuple(block_ids), after)
        self.transfers.submit([plan])
        return plan

    def promote(self, wanted: Sequence[Key], *, request_id: int = 1, epoch: int = 0) -> None:
        self.transfers.submit([PromotePlan(request_id, epoch, tuple(wanted))])

    def counted(self, kind: str, outcome: str) -> int:
        return int(self.metrics.value("transfers_total", kind, outcome))

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        for hold in self._holds:
            hold.release()
        self.drain(*self.stream_names)
        self.transfers.poll()
        self.device.close()
        self.transfers.poll()
        self.transfers.close()

    def check_nothing_is_held(self) -> None:
        """Every lease that a transfer took has ended, and nobody waits."""
        self.clock.now_s += 1e6
        self.transfers.poll()
        assert not self.transfers.busy
        self.blocks.check()
        self.host.pool.check()
        assert self.host.pool.num_used == 0
        if self.disk is not None:
            assert len(self.disk.index._idle) == len(self.disk.index), "an entry on disk is still pinned"
            assert self.disk.index._leaving == 0
        assert self.device.host_waits() == {}


def flight_of(*members: tuple[int, int]) -> BatchPlan:
    """A batch of rows `(request id, epoch)`."""
    rows = [RowPlan(rid, row, epoch, 0, 1, None, (0,), True, 0) for row, (rid, epoch) in enumerate(members)]
    return BatchPlan(tuple(rows))
