"""Streams, events and graphs of the simulated device. A fence is a position on a stream, like a CUDA event."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from sidestream_kv.device.base import CopyBatch, Memory, no_accesses, wait_in_capture
from sidestream_kv.errors import DeviceLost, InvariantError
from sidestream_kv.metrics import Timeline
from sidestream_kv.types import Access, Accesses, Fence, Tracer
from sidestream_order.sim.turns import Actor, Turns

# Number of operations in a CUDA stream's queue above which a submission blocks the thread (measured: 1,020).
QUEUE_LIMIT = 1020


class Guard(Protocol):
    """Limits running work to the memory that it has declared, and reports other accesses."""

    def allocate(self, name: str, num_bytes: int) -> npt.NDArray[np.uint8]:
        """New memory, filled with poison."""
        ...

    def enter(self, stream: str) -> None:
        """Work of this stream begins or goes on, and runs until `leave`; no other work runs meanwhile."""
        ...

    def leave(self, stream: str) -> None:
        """The work has ended, or another actor runs before the work goes on."""
        ...

    def poison(self, name: str, start: int, stop: int) -> None:
        """Overwrite bytes of a memory with poison, whether work runs or not."""
        ...

    def require(self, stream: str, access: Access) -> None:
        """Running work accesses a memory that does not consist of bytes: report the access if it was not declared."""
        ...


class StreamDevice(Protocol):
    """The members of `SimDevice` that its streams and threads use; described there."""

    turns: Turns
    records: Mapping[SimEvent, SimFence | None]

    @property
    def tracer(self) -> Tracer | None: ...
    @property
    def timeline(self) -> Timeline | None: ...
    @property
    def guard(self) -> Guard | None: ...
    @property
    def closed(self) -> bool: ...
    @property
    def lost(self) -> DeviceLost | None: ...
    def now(self) -> float: ...
    def wait_host(self, fence: Fence, *, reason: str) -> bool: ...
    def stall(self, reason: str) -> None: ...
    def accesses(self, *, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> Accesses: ...
    def check_ready(self, batch: CopyBatch) -> None: ...
    def implied_by(self, stream: SimStream) -> list[SimFence]: ...
    def failed(self, error: Exception, label: str) -> None: ...
    def passed(self) -> None: ...


class SimFence:
    """A position on one stream; done once the stream has passed it."""

    __slots__ = ("_device", "_failure", "_stream", "_tick", "done")

    def __init__(self, device: StreamDevice, stream: str, tick: int) -> None:
        self._device = device
        self._stream = stream
        self._tick = tick
        self._failure: BaseException | None = None
        self.done = False

    @property
    def device(self) -> StreamDevice:
        """The device of its stream."""
        return self._device

    @property
    def stream(self) -> str:
        """Name of the stream."""
        return self._stream

    @property
    def tick(self) -> int:
        """Position on the stream."""
        return self._tick

    @property
    def failure(self) -> BaseException | None:
        """The exception that the work raised."""
        return self._failure

    def poll(self) -> bool:
        """Whether the stream has passed this position. This is a point (see `SimStream`), but little virtual time
        passes, so a polling loop must sleep.
        """
        if not self.done:
            self._device.turns.point()
        if self._device.turns.watch is not None:
            self._device.turns.watch.polled(self._stream, self._tick, done=self.done)
        if self.done and self._device.tracer is not None and self._device.turns.at_host:
            self._device.tracer.observed(self)
        return self.done

    def fail(self, error: BaseException) -> None:
        """Set the failure. Clears the local variables in its traceback, which may hold tensors and leases."""
        traceback.clear_frames(error.__traceback__)
        self._failure = error

    def __repr__(self) -> str:
        return f"fence({self.stream}:{self.tick}{' done' if self.done else ''})"


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    run: Callable[[], object]
    accesses: Accesses
    label: str
    records: Mapping[SimEvent, SimFence | None] = field(default_factory=dict)
    """The last record of each event when the work was submitted. Graphs in the work wait for these records."""


@dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    fence: SimFence


@dataclass(frozen=True, slots=True, eq=False)
class _ExternalWait:
    event: SimEvent


class SimEvent:
    """An event as on CUDA. See `GraphEvent`."""

    def __init__(self, device: StreamDevice, name: str) -> None:
        self.name = name
        self.fence: SimFence | None = None
        self._device = device

    def record(self, stream: SimStream) -> SimFence:
        self.fence = stream.submit(lambda: None, lambda: (), label=f"record {self.name}")
        # A new dict, because work that was submitted before keeps the old dict.
        self._device.records = {**self._device.records, self: self.fence}
        return self.fence

    def query(self) -> bool:
        """Whether the last record is done; True if the event was never recorded, as on CUDA."""
        return self.fence is None or self.fence.poll()

    def synchronize(self) -> None:
        """Let the host wait for the last record, for the reason `"event"`; returns at once if there is none, as on
        CUDA.
        """
        if self.fence is not None:
            self._device.wait_host(self.fence, reason="event")


@dataclass(slots=True, eq=False)
class SimGraph:
    """Captured work."""

    nodes: tuple[_Work | _ExternalWait, ...]
    deleted: bool = False

    def delete(self) -> None:
        self.deleted, self.nodes = True, ()


class SimStream:
    """A stream of a simulated device. See `Stream`.

    At each *point*, other actors may run before the caller goes on (see `turns`). `submit` is a point; docstrings name
    the other points.
    """

    def __init__(self, device: StreamDevice, name: str, *, blocking: bool = False, on_host: bool = False) -> None:
        """`on_host`: its work stands for work of a host thread, which a lost device does not affect."""
        self.name = name
        self.blocking = blocking
        self._on_host = on_host
        self._device = device
        self._turns = device.turns
        self._queue: deque[tuple[_Work, SimFence] | _Wait] = deque()
        self._next_tick = 1
        self._last: SimFence | None = None
        self._capture: list[_Work | _ExternalWait] | None = None
        self._records: Mapping[SimEvent, SimFence | None] = {}
        self._copies = 0
        self._side_work: deque[Callable[[], None]] = deque()
        self.busy = False
        self._actor: Actor = device.turns.add(name, self._may_go_on, self._awaited, self._run)

    # ------------------------------------------------------------------ submission

    def submit(
        self,
        work: Callable[[], object],
        accesses: Accesses = no_accesses,
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        label: str = "",
    ) -> SimFence:
        """See `Stream.submit`. During a capture, the work goes into the graph, and its fence is never done.

        Instead of `accesses`, `reads` and `writes` may name tensors: see `SimDevice.accesses`.
        """
        if self._device.closed:
            raise InvariantError(f"stream {self.name} is closed: {label or 'work'} cannot be submitted")
        if self._device.lost is not None and not self._on_host:
            raise self._device.lost
        if reads or writes:
            if accesses is not no_accesses:
                raise InvariantError(f"{label or 'work'} has both accesses and tensors: give one of them")
            accesses = self._device.accesses(reads=reads, writes=writes)
        item = _Work(work, accesses, label or "work", self._device.records)
        if self._capture is not None:
            self._capture.append(item)
            return SimFence(self._device, self.name, 0)
        return self._enqueue(item)

    def wait(self, fence: Fence) -> None:
        if not isinstance(fence, SimFence) or fence.device is not self._device:
            raise InvariantError(f"stream {self.name} cannot wait for {fence!r}: it is not of this device")
        if fence.stream == self.name:
            pass  # the stream runs in order anyway
        elif self._capture is not None:
            raise wait_in_capture(self.name, fence)
        elif self._turns.current is self._actor:
            self._turns.block(lambda: fence.done, lambda: fence.stream)
            self._trace_wait(fence)
        else:
            self._make_room()
            self._queue.append(_Wait(fence))

    def wait_event(self, event: SimEvent) -> None:
        """Make later work wait for the last record of `event`; does nothing if it was never recorded, as on CUDA."""
        if event.fence is not None:
            self.wait(event.fence)

    @property
    def last(self) -> SimFence | None:
        """The fence of all work that was submitted; None: there was none."""
        return self._last

    def synchronize(self) -> None:
        """Let the host wait for all work that was submitted, for the reason `"stream"`."""
        if self._last is not None:
            self._device.wait_host(self._last, reason="stream")

    def touch(self, accesses: Accesses) -> None:
        """See `Stream.touch`. This is a point."""
        if self._turns.current is not self._actor:
            raise InvariantError(f"stream {self.name}: only its own work may declare what it touches")
        self._guard_ends()
        if self._device.tracer is not None:
            self._device.tracer.touched(self.name, accesses)
        self._turns.point()
        self._guard_begins()

    def copy(self, batch: CopyBatch) -> None:
        """Copy segment by segment, with a point between two segments. Every second copy of the stream begins with the
        last segment, because the order of segments is not guaranteed. A segment that is packed or unpacked is also
        written at a later point than it is read. See `Stream.copy`.
        """
        if batch.source.pageable or batch.target.pageable:
            self._device.stall("pageable copy")
        segments = list(batch.segments())
        if self._copies % 2:
            segments.reverse()
        self._copies += 1
        for index, (source, target) in enumerate(segments):
            if index:
                self._turns.point()
            if (converted := batch.converted(source)) is not source:
                self._turns.point()
            target.copy_(converted)

    def submit_copy(self, batch: CopyBatch, first: int, stop: int, *, label: str = "") -> SimFence:
        """See `Stream.submit_copy`. Raises InvariantError for host memory that is not ready."""
        part = batch.part(first, stop)
        self._device.check_ready(part)
        return self.submit(lambda: self.copy(part), part.accesses, label=label)

    def on_side_stream(self, work: Callable[[], None]) -> None:
        """Run the work at `join`, which is as late as the interface allows. See `Stream.on_side_stream`."""
        self._side_work.append(work)

    def join(self) -> None:
        """Run the side stream's work. See `Stream.join`."""
        while self._side_work:
            self._side_work.popleft()()

    def stamp(self, times: torch.Tensor) -> None:
        """Write virtual time. See `Stream.stamp`."""
        times[0] = round(1e9 * self._device.now())

    def deliver(self, values: torch.Tensor, memory: Memory, start: int | torch.Tensor, *, further: int = 0) -> None:
        """Write the values' bytes. See `Stream.deliver`."""
        flat = values.reshape(-1).view(torch.uint8)
        first = int(start) + further
        memory.data[first : first + flat.numel()].copy_(flat)

    # ------------------------------------------------------------------ graphs

    def capture(self, build: Callable[[], None], *, beside: SimGraph | None = None) -> SimGraph:
        self._capture = []
        try:
            build()
            return SimGraph(tuple(self._capture))
        finally:
            self._capture = None

    def wait_external(self, event: SimEvent) -> None:
        """See `Stream.wait_external`. Captured work may also call it when it runs."""
        if self._capture is not None:
            self._capture.append(_ExternalWait(event))
        elif self._turns.current is not self._actor:
            raise InvariantError(f"stream {self.name}: `wait_external` was called outside `capture`: call it inside")
        elif (fence := self._records.get(event)) is not None:
            self.wait(fence)

    def replay(self, graph: SimGraph, *, label: str = "") -> SimFence:
        """Submit the graph as a separate piece of work. The fence is done when the whole graph is done, including a
        wait at its end.
        """
        if graph.deleted:
            raise InvariantError(f"stream {self.name}: the graph was deleted")
        for node in graph.nodes:
            if isinstance(node, _ExternalWait):
                self.wait_event(node.event)
            else:
                fence = self._enqueue(_Work(node.run, node.accesses, f"{label}: {node.label}" if label else node.label))
        if not graph.nodes or isinstance(graph.nodes[-1], _ExternalWait):
            fence = self._enqueue(_Work(lambda: None, no_accesses, f"{label}: end" if label else "end"))
        return fence

    def enqueue(self, graph: SimGraph) -> None:
        """See `Stream.enqueue`. The end of each node is a point."""
        if graph.deleted:
            raise InvariantError(f"stream {self.name}: the graph was deleted")
        for node in graph.nodes:
            if isinstance(node, _Work):
                node.run()
                self._turns.point()
            else:
                self.wait_external(node.event)

    # ------------------------------------------------------------------ turns of the stream

    @property
    def idle(self) -> bool:
        """Whether all submitted work is done."""
        return not self._queue and not self.busy

    def _enqueue(self, work: _Work) -> SimFence:
        for other in self._device.implied_by(self):
            self.wait(other)
        self._make_room()
        fence = self._last = SimFence(self._device, self.name, self._next_tick)
        self._next_tick += 1
        if self._device.tracer is not None:
            self._device.tracer.submitted(fence, work.accesses, work.label)
        self._queue.append((work, fence))
        self._turns.point()
        return fence

    def _make_room(self) -> None:
        """Block the caller while the queue is full. Waits also take a place in the queue."""
        if len(self._queue) >= QUEUE_LIMIT:
            self._device.stall("queue full")
            self._turns.block(lambda: len(self._queue) < QUEUE_LIMIT, lambda: self.name)

    def _may_go_on(self) -> bool:
        if not self._queue:
            return False
        head = self._queue[0]
        return not isinstance(head, _Wait) or head.fence.done

    def _awaited(self) -> str | None:
        head = self._queue[0] if self._queue else None
        return head.fence.stream if isinstance(head, _Wait) else None

    def _run(self) -> None:
        while True:
            if isinstance(self._queue[0], _Wait):
                self._pass()
                if self._may_go_on():
                    continue
            else:
                self._do()
            self._turns.block(self._may_go_on, self._awaited)

    def _pass(self) -> None:
        head = self._queue.popleft()
        assert isinstance(head, _Wait)
        self._trace_wait(head.fence)

    def _do(self) -> None:
        """Run the first work of the queue. Drops its tensors and leases before its fence is done (hazard H24 in
        docs/glossary.md).
        """
        head = self._queue.popleft()
        assert not isinstance(head, _Wait)
        work, fence = head
        tracer, label, self.busy = self._device.tracer, work.label, True
        if tracer is not None:
            tracer.started(fence)
        start_s = self._turns.now_s
        self._records = work.records
        self._guard_begins()
        try:
            if self._device.lost is not None and not self._on_host:
                raise self._device.lost
            work.run()
            if self._side_work:
                raise InvariantError(f"{label} on stream {self.name} ends with work on the side stream: join it first")
        except Exception as error:
            self._side_work.clear()
            fence.fail(error)
            if not self._on_host:
                self._device.failed(error, label)
        self._guard_ends()
        self._turns.point()  # the bytes have moved, but the fence is not done yet
        if self._device.timeline is not None:
            self._device.timeline.record(self.name, label, int(start_s * 1e9), int(self._turns.now_s * 1e9))
        if tracer is not None:
            tracer.finished(fence)
        fence.done, self.busy = True, False
        self._device.passed()

    def _guard_begins(self) -> None:
        """From here on, the guard limits the running work to the memory that it has declared."""
        guard = self._device.guard
        if guard is not None:
            guard.enter(self.name)
            self._actor.enter, self._actor.leave = partial(guard.enter, self.name), partial(guard.leave, self.name)

    def _guard_ends(self) -> None:
        guard = self._device.guard
        if guard is not None:
            self._actor.enter = self._actor.leave = None
            guard.leave(self.name)

    def _trace_wait(self, fence: SimFence) -> None:
        if self._device.tracer is not None:
            self._device.tracer.waited(self.name, fence)
