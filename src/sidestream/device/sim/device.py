"""The simulated device: streams, events, graphs and memory as on CUDA, but a policy decides what runs when.

Everything that a fence, an event or the order of a stream does not forbid may happen, and with some seed it does. Work
runs on its stream's turn; between the moment its bytes have moved and the moment its fence is done, others may run.
Fresh memory is poison. Time is virtual: nothing is ever waited for in earnest.
"""

from __future__ import annotations

import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from sidestream.device.base import CopyBatch, Memory, Rest, no_accesses
from sidestream.device.channel import Bell
from sidestream.device.sim.policies import HOST, Policy
from sidestream.device.sim.turns import Actor, Turns
from sidestream.errors import InvariantError
from sidestream.metrics import Timeline
from sidestream.types import Accesses, Fence, Tracer

POISON = 0xA5
# Operations that a CUDA stream takes before the next submission blocks the thread (measured: 1,020).
QUEUE_LIMIT = 1020


class SimFence:
    """A position on one stream; done once the stream has passed it."""

    __slots__ = ("_device", "_failure", "_stream", "_tick", "done")

    def __init__(self, device: SimDevice, stream: str, tick: int) -> None:
        self._device = device
        self._stream = stream
        self._tick = tick
        self._failure: BaseException | None = None
        self.done = False

    @property
    def device(self) -> SimDevice:
        """Whose stream it is."""
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
        """What the work raised, once done."""
        return self._failure

    def poll(self) -> bool:
        """Whether the stream has passed this position. A point at which others may run, but time hardly passes: a loop
        must sleep.
        """
        if not self.done:
            self._device.turns.point()
        if self.done and self._device.tracer is not None and self._device.turns.at_host:
            self._device.tracer.observed(self)
        return self.done

    def fail(self, error: BaseException) -> None:
        """Keep what the work raised, without its frames' variables."""
        traceback.clear_frames(error.__traceback__)
        self._failure = error

    def __repr__(self) -> str:
        return f"fence({self.stream}:{self.tick}{' done' if self.done else ''})"


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    run: Callable[[], None]
    accesses: Accesses
    label: str
    records: Mapping[SimEvent, SimFence | None] = field(default_factory=dict)
    """What each event stood for when this was submitted: that is what a graph in it waits for."""


@dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    fence: SimFence


@dataclass(frozen=True, slots=True, eq=False)
class _ExternalWait:
    event: SimEvent


class SimEvent:
    """What CUDA calls an event: it stands for the last position at which it was recorded, and for nothing before the
    first.
    """

    def __init__(self, device: SimDevice, name: str) -> None:
        self.name = name
        self.fence: SimFence | None = None
        self._device = device

    def record(self, stream: SimStream) -> SimFence:
        """From now on, whoever waits for this event waits for what `stream` was given so far."""
        self.fence = stream.submit(lambda: None, label=f"record {self.name}")
        self._device.records = {
            **self._device.records,
            self: self.fence,
        }  # anew: work that was submitted keeps the one before
        return self.fence


@dataclass(frozen=True, slots=True, eq=False)
class SimGraph:
    """Work that was captured, to be replayed as it was: closures over the memory that they had then, and no wait of the
    host's.
    """

    nodes: tuple[_Work | _ExternalWait, ...]
    ignored_waits: int


class SimStream:
    """A FIFO of work on a simulated device."""

    def __init__(self, device: SimDevice, name: str) -> None:
        self.name = name
        self._device = device
        self._turns = device.turns
        self._queue: deque[tuple[_Work, SimFence] | _Wait] = deque()
        self._next_tick = 1
        self._capture: list[_Work | _ExternalWait] | None = None
        self._ignored_waits = 0
        self._records: Mapping[SimEvent, SimFence | None] = {}
        self._aside: deque[Callable[[], None]] = deque()
        self.busy = False
        self._actor: Actor = device.turns.add(name, self._may_go_on, self._awaited, self._run)

    # ------------------------------------------------------------------ the door

    def submit(self, work: Callable[[], None], accesses: Accesses = no_accesses, *, label: str = "") -> SimFence:
        """Enqueue `work`. A point at which others may run. See `Stream.submit`.

        While a graph is captured, the work goes into the graph; its fence is never done.
        """
        if self._device.closed:
            raise InvariantError(f"stream {self.name} is closed: {label or 'work'} cannot be submitted")
        item = _Work(work, accesses, label or "work", self._device.records)
        if self._capture is not None:
            self._capture.append(item)
            return SimFence(self._device, self.name, 0)
        return self._enqueue(item)

    def wait(self, fence: Fence) -> None:
        """Order later work behind `fence`; while a graph is captured this does nothing, as on CUDA. See
        `Stream.wait`.
        """
        if not isinstance(fence, SimFence) or fence.device is not self._device:
            raise InvariantError(f"stream {self.name} cannot wait for {fence!r}: it is not of this device")
        if self._capture is not None:
            self._ignored_waits += 1
        elif fence.stream == self.name:
            pass  # a FIFO is behind its own past already
        elif self._turns.current is self._actor:
            self._turns.block(lambda: fence.done, lambda: fence.stream)
            self._tell_waited(fence)
        else:
            self._make_room()
            self._queue.append(_Wait(fence))

    def wait_event(self, event: SimEvent) -> None:
        """Order later work behind the last record of `event`; nothing at all if it was never recorded, as on CUDA."""
        if event.fence is not None:
            self.wait(event.fence)

    def touch(self, accesses: Accesses) -> None:
        """Declare from inside work what it touches from here on. A point at which others may run. See
        `Stream.touch`.
        """
        if self._turns.current is not self._actor:
            raise InvariantError(f"stream {self.name} was told what its work touches, but not by its work")
        if self._device.tracer is not None:
            self._device.tracer.touched(self.name, accesses)
        self._turns.point()

    def copy(self, batch: CopyBatch) -> None:
        """Copy segment by segment; between two of them others may run. See `Stream.copy`."""
        if batch.source.pageable or batch.target.pageable:
            self._device.stall("pageable copy")
        for index, (source, target) in enumerate(batch.segments()):
            if index:
                self._turns.point()
            target.copy_(source)

    def submit_copy(self, batch: CopyBatch, first: int, stop: int, *, label: str = "") -> SimFence:
        """Enqueue a copy. See `Stream.submit_copy`. Raises InvariantError for host memory that is not ready."""
        part = batch.part(first, stop)
        self._device.check_ready(part)
        return self.submit(lambda: self.copy(part), part.accesses, label=label)

    def aside(self, work: Callable[[], None]) -> None:
        """Run it as late as may be, at `join`. See `Stream.aside`."""
        self._aside.append(work)

    def join(self) -> None:
        """Run what is aside. See `Stream.join`."""
        while self._aside:
            self._aside.popleft()()

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
        """What `build` submits to this stream, as a graph; nothing runs. See `Stream.capture`."""
        self._capture, self._ignored_waits = [], 0
        try:
            build()
            return SimGraph(tuple(self._capture), self._ignored_waits)
        finally:
            self._capture = None

    def wait_external(self, event: SimEvent) -> None:
        """Inside `capture`: a node that waits for the last record of `event` at the time of each replay.

        Inside captured work: the same, from here on in it.
        """
        if self._capture is not None:
            self._capture.append(_ExternalWait(event))
        elif self._turns.current is not self._actor:
            raise InvariantError("an external wait is a node of a graph: capture one")
        elif (fence := self._records.get(event)) is not None:
            self.wait(fence)

    def replay(self, graph: SimGraph, *, label: str = "") -> SimFence:
        """Enqueue everything in the graph; the fence covers all of it, a last wait too."""
        for node in graph.nodes:
            if isinstance(node, _ExternalWait):
                self.wait_event(node.event)
            else:
                fence = self._enqueue(_Work(node.run, node.accesses, f"{label}: {node.label}" if label else node.label))
        if not graph.nodes or isinstance(graph.nodes[-1], _ExternalWait):
            fence = self._enqueue(_Work(lambda: None, no_accesses, f"{label}: end" if label else "end"))
        return fence

    def enqueue(self, graph: SimGraph) -> None:
        """Run it as a part of the work that runs. A point at which others may run after each node. See
        `Stream.enqueue`.
        """
        for node in graph.nodes:
            if isinstance(node, _Work):
                node.run()
                self._turns.point()
            else:
                self.wait_external(node.event)

    # ------------------------------------------------------------------ the stream's own turns

    @property
    def idle(self) -> bool:
        """Whether everything submitted has been done."""
        return not self._queue and not self.busy

    def _enqueue(self, work: _Work) -> SimFence:
        self._make_room()
        fence = SimFence(self._device, self.name, self._next_tick)
        self._next_tick += 1
        if self._device.tracer is not None:
            self._device.tracer.submitted(fence, work.accesses, work.label)
        self._queue.append((work, fence))
        self._turns.point()
        return fence

    def _make_room(self) -> None:
        """Hold the caller up while the queue is full, waits included (P2)."""
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
        self._tell_waited(head.fence)

    def _do(self) -> None:
        """Run the first piece of work. What it held (tensors, leases) goes with this frame, before anybody learns that
        it is done (H24).
        """
        head = self._queue.popleft()
        assert not isinstance(head, _Wait)
        work, fence = head
        tracer, label, self.busy = self._device.tracer, work.label, True
        if tracer is not None:
            tracer.started(fence)
        start_s = self._turns.now_s
        self._records = work.records
        try:
            work.run()
            if self._aside:
                raise InvariantError(f"{label} on stream {self.name} ends while something is aside: join it first")
        except Exception as error:
            self._aside.clear()
            fence.fail(error)
        self._turns.point()  # the bytes have moved, and nobody knows
        if self._device.timeline is not None:
            self._device.timeline.record(self.name, label, int(start_s * 1e9), int(self._turns.now_s * 1e9))
        if tracer is not None:
            tracer.finished(fence)
        fence.done, self.busy = True, False
        self._device.passed()

    def _tell_waited(self, fence: SimFence) -> None:
        if self._device.tracer is not None:
            self._device.tracer.waited(self.name, fence)


class SimThread:
    """A thread of the host besides the one that drives the device. See `HostThread`."""

    def __init__(self, device: SimDevice, name: str, turn: Callable[[], Rest]) -> None:
        self.name = name
        self.failure: BaseException | None = None
        self._device = device
        self._turns = device.turns
        self._turn = turn
        self._rest = Rest()
        self._woken = self._busy = self._closed = False
        if device.tracer is not None:
            device.tracer.sent(f"start of {name}", 1)
        device.turns.add(name, self._may_go_on, self._awaited, self._run, is_host=True)

    def wake(self) -> None:
        """Have another turn soon. A point at which others may run."""
        self._woken = True
        self._turns.point()

    def close(self) -> None:
        """Let the turn that runs now come to its end; there is no other. Idempotent."""
        if not self._closed:
            self._turns.block(lambda: not self._busy, lambda: self.name)
            self._closed = True
            if self._device.tracer is not None:
                self._device.tracer.joined(self.name)

    def _may_go_on(self) -> bool:
        return not self._closed and (
            self._woken or any(isinstance(fence, SimFence) and fence.done for fence in self._rest.fences)
        )

    def _awaited(self) -> str | None:
        return next(
            (fence.stream for fence in self._rest.fences if isinstance(fence, SimFence) and not fence.done), None
        )

    def _run(self) -> None:
        if self._device.tracer is not None:
            self._device.tracer.apart(self.name)
            self._device.tracer.received(f"start of {self.name}", 1)
        while self.failure is None:
            self._woken, self._busy = False, True
            try:
                rest = self._turn()
                self._rest = Rest(tuple(rest.fences), rest.until_s)
            except Exception as error:
                self.failure, self._rest, self._closed = error, Rest(), True
            self._busy = False
            self._turns.block(self._may_go_on, self._awaited, wake_s=None if self._closed else self._rest.until_s)


class SimDevice:
    """Streams that a policy drives. Made, driven and closed by one thread, which is "the host".

    turns     who runs, and virtual time
    tracer   told of everything that ordering depends on
    pin_s     virtual seconds until all of a host memory of several items is ready, item after item; set before
              `allocate_host`
    """

    kind = "sim"
    torch_device = torch.device("cpu")
    segment_bytes = 64 << 10

    def __init__(self, policy: Policy, *, tracer: Tracer | None = None, timeline: Timeline | None = None) -> None:
        self.turns = Turns(policy)
        self.tracer = tracer
        self.timeline = timeline
        self.closed = False
        self.pin_s = 0.0
        self._pinned_from: dict[
            str, tuple[float, int]
        ] = {}  # of host memory that gets ready: since when, and bytes of an item
        self.records: Mapping[SimEvent, SimFence | None] = {}
        self._streams: dict[str, SimStream] = {}
        self._threads: list[SimThread] = []
        self._memories: dict[str, Memory] = {}
        self._waits: Counter[str] = Counter()
        self._dying: list[tuple[tuple[SimFence, ...], Memory, int, int]] = []

    def stream(self, name: str) -> SimStream:
        """A new stream."""
        if name in self._streams or name == HOST:
            raise InvariantError(f"stream {name} exists already")
        if self.closed:
            raise InvariantError(f"the device is closed: stream {name} cannot be made")
        stream = self._streams[name] = SimStream(self, name)
        return stream

    def worker(self, name: str) -> SimStream:
        """A stream like any other: what it runs may sleep."""
        return self.stream(name)

    def thread(self, name: str, turn: Callable[[], Rest]) -> SimThread:
        """A thread of the host that takes turns. See `Device.thread`."""
        thread = SimThread(self, name, turn)
        self._threads.append(thread)
        return thread

    def prepare(self, batch: CopyBatch) -> CopyBatch:
        """As it is."""
        return batch

    def allocate(self, name: str, num_bytes: int) -> Memory:
        """Device memory, all poison."""
        return self._add(Memory(name, (torch.full((num_bytes,), POISON, dtype=torch.uint8),)))

    def allocate_host(self, name: str, num_bytes: int, *, item_bytes: int = 1) -> Memory:
        """Host memory that streams may copy from and to, all poison. With `pin_s`, its first item is ready at first."""
        if self.pin_s and num_bytes > item_bytes:
            self._pinned_from[name] = self.now(), item_bytes
        return self.allocate(name, num_bytes)

    def mapped(self, memory: Memory) -> torch.Tensor:
        """The memory itself. See `Device.mapped`."""
        return memory.data

    def ready_bytes(self, memory: Memory) -> int:
        """All of it, or, with `pin_s`, as many items as that much virtual time makes ready."""
        if memory.name not in self._pinned_from:
            return memory.num_bytes
        start_s, item_bytes = self._pinned_from[memory.name]
        items = int(memory.num_bytes // item_bytes * (self.now() - start_s) / self.pin_s)
        return min(max(1, items) * item_bytes, memory.num_bytes)

    def grows(self, memory: Memory) -> bool:
        """Whether some of it is not ready yet."""
        return self.ready_bytes(memory) < memory.num_bytes

    def check_ready(self, batch: CopyBatch) -> None:
        """Raise InvariantError for a copy of host memory that is not ready: on a GPU it would stall, or fail."""
        for memory, starts in ((batch.source, batch.source_starts), (batch.target, batch.target_starts)):
            if memory.name in self._pinned_from and len(starts) and int(starts.max()) >= self.ready_bytes(memory):
                raise InvariantError(
                    f"a copy of {memory.name} at byte {int(starts.max())}: only {self.ready_bytes(memory)} are pinned"
                )

    def allocate_pageable(self, name: str, num_bytes: int) -> Memory:
        """Host memory of the ordinary kind: a copy from or to it stalls the host, which is an error."""
        return self._add(Memory(name, (torch.full((num_bytes,), POISON, dtype=torch.uint8),), pageable=True))

    def wait_host(self, fence: Fence, *, reason: str, timeout_s: float | None = None, bell: Bell | None = None) -> bool:
        """Let others run until `fence` is done, or one of them rings. See `Device.wait_host`. Raises Deadlock if it can
        never be.
        """
        if not isinstance(fence, SimFence) or fence.device is not self:
            raise InvariantError(f"cannot wait for {fence!r}: it is not of this device")
        if not fence.done:
            self.stall(reason)
            wake_s = None if timeout_s is None else self.turns.now_s + timeout_s
            self.turns.block(
                lambda: fence.done or (bell is not None and bell.rung), lambda: fence.stream, wake_s=wake_s
            )
            if bell is not None and not fence.done:
                bell.wait(0)  # it was heard, if it was rung
        if fence.done and self.tracer is not None:
            self.tracer.observed(fence)
        return fence.done

    def host_waits(self) -> dict[str, int]:
        """How often the host was held up, by reason."""
        return dict(self._waits)

    def stall(self, reason: str) -> None:
        """Count that the host is held up."""
        self._waits[reason] += 1
        if self.tracer is not None:
            self.tracer.stalled(reason)

    def now(self) -> float:
        """Virtual seconds."""
        return self.turns.now_s

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass; by the host, or by work in the place of something slow."""
        self.turns.sleep(seconds)

    def rest(self) -> None:
        """Nothing to give back."""

    def event(self, name: str) -> SimEvent:
        """A new event, never recorded."""
        return SimEvent(self, name)

    def poison(self, memory: str, start: int, stop: int, after: Sequence[Fence]) -> None:
        """Overwrite bytes that nobody may read any more, as soon as the last of their uses is done."""
        pending = tuple(fence for fence in after if isinstance(fence, SimFence) and not fence.done)
        if pending:
            self._dying.append((pending, self._memories[memory], start, stop))
        else:
            self._memories[memory].data.numpy()[start:stop] = POISON

    def passed(self) -> None:
        """A fence was done: what waited for it to become poison does so now, before anybody else runs."""
        if not self._dying:
            return
        left = []
        for pending, memory, start, stop in self._dying:
            if all(fence.done for fence in pending):
                np.asarray(memory.data)[start:stop] = POISON
            else:
                left.append((pending, memory, start, stop))
        self._dying = left

    def close(self) -> None:
        """Run what was submitted, then end streams and threads. Idempotent. Raises Deadlock when something can never
        run.
        """
        if not self.closed:
            for thread in self._threads:
                thread.close()
            self.turns.block(lambda: all(stream.idle for stream in self._streams.values()), self._unfinished)
        self.kill()

    def kill(self) -> None:
        """End at once, whatever is on its way; what did not run never will. Idempotent."""
        self.closed = True
        self.turns.end()

    def _unfinished(self) -> str | None:
        return next((stream.name for stream in self._streams.values() if not stream.idle), None)

    def _add(self, memory: Memory) -> Memory:
        if memory.name in self._memories:
            raise InvariantError(f"memory {memory.name} exists already")
        self._memories[memory.name] = memory
        return memory
