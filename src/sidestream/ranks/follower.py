"""A rank other than 0, which follows rank 0: it runs the work of rank 0's messages on its own
device, and reports finished work.

It makes no decisions. A pass of its loop takes the messages that have come, enqueues their work, and polls the fences
of earlier work; it never blocks. Messages are taken in order. A message refers only to work that was sent before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from sidestream.errors import InvariantError, ModelError, SidestreamError
from sidestream.ranks.fences import FenceName
from sidestream.ranks.leader import ADAPTER_PUTS, ADAPTER_READS, COMPUTE
from sidestream.ranks.messages import (
    AdapterPut,
    AdapterRead,
    Copy,
    End,
    Failed,
    Passed,
    Ready,
    Step,
    StepDecoder,
    TierRead,
    TierWrite,
)
from sidestream.ranks.messages import ToLeader as Report
from sidestream.ranks.messages import ToRank as Message
from sidestream.runner.executor import Executor
from sidestream_kv.device.base import CopyBatch, Device, Memory, Stream, WakeUp
from sidestream_kv.offload.tiers.base import PersistentTier
from sidestream_kv.offload.tiers.index import Entry, WriteGrant
from sidestream_kv.offload.tiers.stack import HostTier, TierStack
from sidestream_kv.types import Access, Fence, LayerGates

if TYPE_CHECKING:  # importing transformers takes seconds
    from sidestream.models.lora import Adapter, Adapters

# Polling interval for host memory that is being pinned.
_GROWTH_POLL_S = 0.05
_UNGATED = LayerGates(())


class _Track:
    """A stream of this rank, and the fences of its unfinished work with the work's numbers in rank 0's messages."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        self.fences: deque[tuple[int, Fence]] = deque()
        self.last = 0


class Follower:
    """One rank.

    memory   the device's blocks, as on rank 0
    tiers    the rank's tiers, whose pools and indices are not used; None: no offload
    take     returns the next message of rank 0, or None if none has arrived
    report   sends a message to rank 0
    adapters its part of the LoRA adapters; None: the engine has no room for any
    """

    def __init__(
        self,
        *,
        device: Device,
        executor: Executor,
        memory: Memory,
        tiers: TierStack | None,
        take: Callable[[], Message | None],
        report: Callable[[Report], None],
        adapters: Adapters | None = None,
    ) -> None:
        self.ended = False
        """Whether the message `End` was taken."""
        self._device = device
        self.executor = executor
        self._memory = memory
        self._tiers = tiers
        self._take = take
        self._report = report
        self._decoder = StepDecoder()
        self._adapters = adapters
        self._adapter: Adapter | None = None  # was read, and is not put into a slot yet
        self._tracks: dict[str, _Track] = {COMPUTE: _Track(None), ADAPTER_PUTS: _Track(None)}
        self._ready = Ready(0, final=False)
        if tiers is None:
            self._ready = Ready(0, final=True)

    def turn(self) -> WakeUp:
        """Take the messages that have come, and report what is done. Returns the fences that cause the next turn."""
        self._take_messages()  # Messages come first: the other ranks wait for this rank in the step's collectives.
        self._report_ready()
        self._report_passed()
        fences = tuple(track.fences[0][1] for track in self._tracks.values() if track.fences)
        return WakeUp(fences, None if self._ready.final else self._device.now() + _GROWTH_POLL_S)

    @property
    def has_work(self) -> bool:
        """Whether some work may still be running."""
        return any(track.fences for track in self._tracks.values())

    def close(self) -> None:
        """Delete the captured graphs, and close the rank's persistent tiers. Call it when no work is left."""
        self.executor.close()
        if self._tiers is not None:
            self._tiers.close()

    # ------------------------------------------------------------------ messages

    def _take_messages(self) -> None:
        """Carry out the messages that have come.

        The inputs of a step stay in one of `MAX_STEPS` = 3 buffers until the step is done. Rank 0 launches step N after
        it has committed step N-2, whose collectives need this rank. So this rank has begun step N-2 by then, and has
        ended step N-3, whose buffer step N takes.
        """
        while (message := self._take()) is not None:
            self._apply(message)

    def _apply(self, message: Message) -> None:
        match message:
            case Step():
                self._launch(message)
            case Copy():
                self._copy(message)
            case TierWrite() | TierRead():
                self._move(message)
            case AdapterRead():
                stream = self._stream(ADAPTER_READS, self._device.worker)
                fence = stream.submit(lambda: self._read_adapter(message.path, message.digest), label="read adapter")
                self._submitted(ADAPTER_READS, message.number, fence)
            case AdapterPut():
                put = partial(self._room.put, message.slot, self._adapter)
                self._submitted(ADAPTER_PUTS, message.number, self.executor.enqueue(put, label="adapter"))
            case End():
                self.ended = True

    def _launch(self, message: Step) -> None:
        batch = self._decoder.decode(message)  # first, because it needs the messages of all steps in their order
        gates = _UNGATED
        if message.gates:
            gates = LayerGates(tuple(tuple(self._unfinished(names)) for names in message.gates))
        step = self.executor.launch(batch, after=tuple(self._unfinished(message.after)), gates=gates)
        step.drop()
        self._submitted(COMPUTE, message.number, step.fence)

    def _copy(self, message: Copy) -> None:
        host, device = self._host.memory, self._memory
        source, target = (device, host) if message.to_host else (host, device)
        sources, targets = (np.frombuffer(offsets, "<i8") for offsets in (message.sources, message.targets))
        batch = CopyBatch(source, target, sources.astype(np.int64), targets.astype(np.int64), message.size)
        stream = self._stream(message.stream, self._device.stream)
        for fence in self._unfinished(message.after):  # rule: copy-on-a-rank-waits-for-the-one-before
            stream.wait(fence)
        fence = stream.submit_copy(self._device.prepare(batch), 0, len(batch.source_starts), label=message.label)
        self._submitted(message.stream, message.number, fence)

    def _move(self, message: TierWrite | TierRead) -> None:
        host, entry = self._host, Entry(message.key, message.serial)
        assert self._tiers is not None
        tier, slot = self._tiers.persistent[message.tier], host.slot(message.slot)
        stream = self._stream(message.stream, self._device.worker)
        if isinstance(message, TierRead):
            for fence in self._unfinished(message.after):  # rule: read-on-a-rank-waits-for-its-slot
                stream.wait(fence)
            fence = stream.submit(
                lambda: tier.read(entry, slot),
                # rule: disk-read-of-a-rank-declares-its-slot
                lambda: self._slot_accesses(message.slot, write=True),
                label="read blocks",
            )
        else:
            victim = None if message.victim is None else Entry(*message.victim)
            fence = stream.submit(
                lambda: _write(tier, WriteGrant(entry, victim), slot),
                # rule: disk-write-of-a-rank-declares-its-slot
                lambda: self._slot_accesses(message.slot, write=False),
                label="write blocks",
            )
        self._submitted(message.stream, message.number, fence)

    def _read_adapter(self, path: str, digest: str) -> None:
        """Runs on a thread of its own, because steps go on. Raises ModelError."""
        self._adapter = self._room.read(path)
        if self._adapter.digest != digest:  # rule: ranks-read-the-same-adapter
            raise ModelError(f"{path} has other matrices than rank 0 has read: load it again")

    @property
    def _room(self) -> Adapters:
        if self._adapters is None:
            raise InvariantError("rank 0 has room for adapters, this rank has none")
        return self._adapters

    def _slot_accesses(self, slot: int, *, write: bool) -> list[Access]:
        return [Access(self._host.memory.name, *self._host.layout.span(slot), write=write)]

    @property
    def _host(self) -> HostTier:
        if self._tiers is None:
            raise InvariantError("rank 0 has tiers, this rank has none")
        return self._tiers.host

    # ------------------------------------------------------------------ fences

    def _stream(self, name: str, make: Callable[[str], Stream]) -> Stream:
        track = self._tracks.get(name)
        if track is None:
            track = self._tracks[name] = _Track(make(name))
        assert track.stream is not None
        return track.stream

    def _submitted(self, stream: str, number: int, fence: Fence) -> None:
        track = self._tracks[stream]
        if number != track.last + 1:
            raise InvariantError(f"work {number} of stream {stream} came after work {track.last}")
        track.last = number
        track.fences.append((number, fence))

    def _unfinished(self, names: Sequence[FenceName]) -> list[Fence]:
        """The fences with these names on this rank, without those that are done."""
        fences: list[Fence] = []
        for stream, number in names:
            track = self._tracks.get(stream)
            if track is None or number > track.last:
                raise InvariantError(f"a message names work {number} of stream {stream}, which was not sent")
            fences += [fence for at, fence in track.fences if at == number]  # rule: rank-waits-for-the-named-fence
        return fences

    def _report_passed(self) -> None:
        """Report what is done, as one message. A stream may finish work while later streams are polled, and their
        work may have waited for it: all streams are polled again until none has more.
        """
        passed: dict[str, int] = {}
        while newly := dict(self._newly_passed()):
            passed |= newly
        if passed:
            self._report(Passed(tuple(passed.items())))

    def _newly_passed(self) -> Iterator[FenceName]:
        for name, track in self._tracks.items():
            while track.fences and track.fences[0][1].poll():  # rule: rank-reports-only-what-is-done
                number, fence = track.fences.popleft()
                if (failure := fence.failure) is not None:  # rule: rank-reports-its-failures
                    self._report(Failed(name, number, _kind_of(failure), str(failure)))
                yield name, number

    def _report_ready(self) -> None:
        if self._ready.final:
            return
        memory = self._host.memory
        # Read before `ready_bytes`: if the memory does not grow, its bytes are final.
        final = not self._device.grows(memory)
        ready = Ready(self._device.ready_bytes(memory), final)
        if ready != self._ready:
            self._ready = ready
            self._report(ready)


def _write(tier: PersistentTier, grant: WriteGrant, slot: memoryview) -> None:
    tier.write(grant, slot)
    if not grant.written:
        raise InvariantError(f"the write of {grant.entry} to a tier returned, but the tier does not hold the entry")


def _kind_of(error: BaseException) -> str:
    return type(error).__name__ if isinstance(error, SidestreamError) else "DeviceError"
