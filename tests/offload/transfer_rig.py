"""A transfer engine over real streams, pools and tiers, without an engine around it: the test is the scheduler and the
compute stream.

The clock stands still unless a test moves it. The offload worker has no thread: it takes its turns inside `wake`,
`settle` and their callers, until there is nothing more to do. `finish` completes named streams and polls once.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from proof.faults import FaultyTier, Hold
from sidestream_kv.device.base import WakeUp
from sidestream_kv.device.cpu import CpuDevice
from sidestream_kv.device.host import HostFence, HostStream
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.kv.pool import FencedPool, Lease
from sidestream_kv.metrics import Metrics
from sidestream_kv.offload.connector import LoadReady, OffloadConnector, TransferEvent
from sidestream_kv.offload.loads import CostModel
from sidestream_kv.offload.tiers.base import TierStreams
from sidestream_kv.offload.tiers.disk import DiskTier, entry_bytes
from sidestream_kv.offload.tiers.stack import BlockMemory, HostTier, TierStack
from sidestream_kv.types import Fence, Key, LoadPlan, PromotePlan, StorePlan

LAYOUT = KVLayout(num_layers=3, num_kv_heads=1, head_dim=2, block_tokens=4, dtype="float32")
DEADLINE_S = 10.0
_PATIENCE_S = 10.0
# Far more than any test gives the offload worker to do: it must become idle by itself.
_MOST_TURNS = 1000
# A worker that sleeps no longer than this has more to do.
_MOMENT_S = 0.001
# Streams of a direction; a name stands for all of them.
_STREAMS = {kind: tuple(f"{kind}-{number}" for number in range(2)) for kind in ("store", "load")}


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


class HandThread:
    """A thread of the host whose turns are taken by whoever wakes it, until it has nothing to do. See `HostThread`."""

    def __init__(self, turn: Callable[[], WakeUp], clock: Callable[[], float]) -> None:
        self.failure: BaseException | None = None
        self._turn = turn
        self._clock = clock

    def wake(self) -> None:
        with contextlib.suppress(Exception):  # kept in `failure`
            self.settle()

    def settle(self) -> None:
        if self.failure is not None:
            return
        for _ in range(_MOST_TURNS):
            try:
                wake_up = self._turn()
            except Exception as error:
                self.failure = error
                raise
            if not any(fence.poll() for fence in wake_up.fences) and (
                wake_up.until_s is None or wake_up.until_s > self._clock() + _MOMENT_S
            ):
                return
        raise AssertionError("the offload worker does not become idle")

    def close(self) -> None:
        pass


class Rig:
    def __init__(
        self,
        directory: Path | None = None,
        *,
        num_blocks: int = 16,
        num_slots: int = 8,
        ready_slots: int | None = None,
        disk_blocks: int = 64,
        self_check: float = 0.0,
        write_policies: Mapping[str, str] | None = None,
        disk_streams: TierStreams = TierStreams(),  # noqa: B008 - a frozen value
        second_disk: Path | None = None,
    ) -> None:
        """`ready_slots` of the host tier can be used at first; None: all."""
        self.device = CpuDevice(compute_threads=1)
        self.compute = self.device.stream("compute")
        self.blocks = FencedPool("device blocks", num_blocks)
        self.memory = BlockMemory(self.device.allocate("kv", num_blocks * LAYOUT.block_bytes), LAYOUT)
        self.ready_slots = num_slots if ready_slots is None else ready_slots
        self.pins = self.ready_slots < num_slots
        self.device.ready_bytes = lambda memory: self.ready_slots * LAYOUT.block_bytes  # type: ignore[method-assign]
        self.device.grows = lambda memory: self.pins and self.ready_slots < num_slots  # type: ignore[method-assign]
        slab = self.device.allocate_host("host", num_slots * LAYOUT.block_bytes)
        self.host = HostTier(slab, LAYOUT, ready_bytes=self.device.ready_bytes(slab))
        self.disks: dict[str, FaultyTier] = {}
        for name, path in (("disk", directory), ("disk-2", second_disk)):
            if path is not None:
                capacity = disk_blocks * entry_bytes(LAYOUT)
                tier = DiskTier.open(path, layout=LAYOUT, fingerprint="rig", capacity_bytes=capacity)
                self.disks[name] = FaultyTier(tier, streams=disk_streams)
        self.disk = self.disks.get("disk")
        self.costs = CostModel(LAYOUT)
        self.metrics = Metrics()
        self.clock = self.device.now = Clock()  # type: ignore[method-assign]
        self.device.sleep = self._sleep  # type: ignore[method-assign]
        self.device.thread = self._start  # type: ignore[method-assign, assignment]
        make, streams = self.device.stream, self.device._streams
        self.device.stream = lambda name: streams.get(name) or make(name)  # type: ignore[method-assign]
        self.transfers = OffloadConnector(
            device=self.device,
            pools=[self.blocks],
            memory=self.memory,
            tiers=TierStack(self.host, self.disks),
            costs=self.costs,
            metrics=self.metrics,
            load_deadline_s=DEADLINE_S,
            self_check=self_check,
            write_policies=write_policies,
        )
        self.ready: list[tuple[int, int]] = []
        self._holds: list[Hold] = []

    # ------------------------------------------------------------------ streams

    def stream(self, name: str) -> HostStream:
        return self.device.stream(name)

    @property
    def stream_names(self) -> list[str]:
        """All that could have anything to do, a direction's first."""
        return ["store", "load", *(name for name in self.device._streams if name.partition("-")[0] not in _STREAMS)]

    def hold(self, name: str) -> Hold:
        """Keep a stream, or a direction's streams, from going on until released."""
        hold = Hold(*(self.stream(each) for each in _STREAMS.get(name, (name,))))
        self._holds.append(hold)
        return hold

    @contextlib.contextmanager
    def late(self) -> Iterator[None]:
        """The offload worker hears of nothing that is ordered meanwhile, until somebody lets it go on."""
        wake, self._thread.wake = self._thread.wake, lambda: None  # type: ignore[method-assign]
        try:
            yield
        finally:
            self._thread.wake = wake  # type: ignore[method-assign]

    def settle(self) -> None:
        """Let the offload worker do what it can."""
        self._thread.settle()

    def drain(self, *names: str) -> None:
        """Let streams pass everything that they are given, by the offload worker too."""
        for name in names:
            self.settle()
            for each in _STREAMS.get(name, (name,)):
                self.pass_through(each)
        self.settle()

    def pass_through(self, name: str) -> None:
        """Let one stream pass everything that it was given so far."""
        fence = self.stream(name).submit(lambda: None)
        assert isinstance(fence, HostFence)
        assert fence.block(_PATIENCE_S), f"stream {name} is stuck"

    def poll(self) -> list[TransferEvent]:
        """Messages to the engine thread once the offload worker has done all it can; ready loads go to `ready`."""
        self.settle()
        events = self.transfers.poll()
        self.ready += [(event.request_id, event.epoch) for event in events if isinstance(event, LoadReady)]
        return [event for event in events if not isinstance(event, LoadReady)]

    def finish(self, *names: str) -> list[TransferEvent]:
        self.drain(*names)
        return self.poll()

    def _sleep(self, seconds: float) -> None:
        time.sleep(0)  # let the streams' threads run
        self.settle()

    def _start(self, name: str, turn: Callable[[], WakeUp]) -> HandThread:
        self._thread = HandThread(turn, self.clock)
        return self._thread

    # ------------------------------------------------------------------ blocks and slots

    def fill(self, block_ids: Sequence[int], wanted: Sequence[Key]) -> Fence:
        """What a step does: write the keys' bytes into the blocks, on the compute stream."""

        def step() -> None:
            for block, of in zip(block_ids, wanted, strict=True):
                self.rows()[block] = torch.from_numpy(content(of))

        return self.compute.submit(step)

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

    def store(
        self,
        wanted: Sequence[Key],
        block_ids: Sequence[int],
        *after: Fence,
        prefix: Sequence[Key] = (),
        superseded: Sequence[Key] = (),
        returning: Sequence[Key] = (),
    ) -> None:
        plan = StorePlan(tuple(wanted), tuple(block_ids), after, tuple(prefix), tuple(superseded), frozenset(returning))
        self.transfers.submit([plan])

    def stored(self, wanted: Sequence[Key], **kept: Sequence[Key]) -> None:
        """Compute the keys' blocks, store them, and let the blocks go. With a disk, its writes are done too."""
        lease = self.blocks.take(len(wanted))
        fence = self.fill(lease.ids, wanted)
        self.store(wanted, lease.ids, fence, **kept)
        self.finish("compute", "store")
        self.let_go(lease)
        self.finish(*(f"{name}-write-0" for name in self.disks))

    def on_disk_only(self, wanted: Sequence[Key]) -> None:
        """Blocks that only the disk holds."""
        self.stored(wanted)
        self.host.pool.forget_all()
        assert self.transfers.locate(wanted) == ["disk"] * len(wanted)

    def load(
        self, wanted: Sequence[Key], block_ids: Sequence[int], *after: Fence, request_id: int = 1, epoch: int = 0
    ) -> LoadPlan:
        plan = LoadPlan(request_id, epoch, tuple(wanted), tuple(block_ids), after)
        self.transfers.submit([plan])
        return plan

    def let_go(self, lease: Lease) -> None:
        """What the scheduler does when a request ends: release its blocks, as far as transfers go."""
        lease.release(until=self.transfers.transfers_fence())

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
        self.transfers.close()

    def check_nothing_is_held(self) -> None:
        """Every lease that a transfer took has ended, and nobody waits."""
        self.clock.now_s += 1e6
        self.poll()
        assert not self.transfers.has_work
        self.blocks.check()
        self.host.pool.check()
        assert self.host.pool.num_used == 0
        for disk in self.disks.values():
            assert len(disk.index._idle) == len(disk.index), "an entry on disk is still pinned"
            assert disk.index._leaving == 0
        assert self.device.host_waits() == {}
