"""Threads of the host as streams: a FIFO of work on a thread of its own; and threads that take turns.

A stream is a thread, a fence is a position in it, and asynchrony is real: torch and numpy release the interpreter lock
inside their kernels. Submission is a queue append: it never blocks, however much is pending. All streams of the CPU
device are of this kind, and on every device those that read and write files.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from sidestream.device.base import CopyBatch, Memory, Rest, no_accesses
from sidestream.device.channel import Bell
from sidestream.errors import DeviceLost, InvariantError
from sidestream.metrics import Timeline
from sidestream.types import Accesses, Fence, Tracer

# A thread that looks again within so long is not woken.
_SOON_S = 100e-6
# A wait shorter than this is not worth a span of its own on the timeline.
_VISIBLE_WAIT_NS = 50_000


class HostFence:
    """A position on one stream; done once the stream's thread has passed it."""

    __slots__ = ("_failure", "_stream", "_tick")

    def __init__(self, stream: HostStream, tick: int) -> None:
        self._stream = stream
        self._tick = tick
        self._failure: BaseException | None = None

    @property
    def stream(self) -> str:
        """Name of the stream."""
        return self._stream.name

    @property
    def tick(self) -> int:
        """Position on the stream."""
        return self._tick

    def poll(self) -> bool:
        """Whether the stream has passed this position. Never blocks."""
        return self._stream.has_passed(self)

    @property
    def failure(self) -> BaseException | None:
        """What the work raised, once done."""
        return self._failure

    def fail(self, error: BaseException) -> None:
        """Keep what the work raised, without its frames' variables. Called by the stream's thread before the fence
        completes.
        """
        traceback.clear_frames(error.__traceback__)
        self._failure = error

    def is_of(self, stream: HostStream) -> bool:
        """Whether it was recorded on `stream`; two devices may use the same name."""
        return self._stream is stream

    def block(self, timeout_s: float | None, bell: Bell | None = None) -> bool:
        """Block the calling thread until done; False when `timeout_s` passed first, or somebody rang."""
        return self._stream.block_until(self._tick, timeout_s, bell)

    def __repr__(self) -> str:
        return f"fence({self.stream}:{self.tick}{' done' if self.poll() else ''})"


@dataclass(frozen=True, slots=True)
class _Work:
    run: Callable[[], None]
    fence: HostFence
    label: str


@dataclass(frozen=True, slots=True)
class _Wait:
    fence: HostFence


@dataclass(frozen=True, slots=True, eq=False)
class HostGraph:
    """Work that was captured, to run again as it is."""

    nodes: tuple[Callable[[], None], ...]


class HostStream:
    """One thread that runs what is submitted, in order."""

    def __init__(
        self,
        name: str,
        *,
        threads: int,
        timeline: Timeline | None,
        tracer: Tracer | None,
        on_pass: Callable[[], None] = lambda: None,
    ) -> None:
        """`threads` of torch for its kernels; `on_pass` is called by its thread after each piece of work."""
        self.name = name
        self._on_pass = on_pass
        self.done_tick = 0
        self._threads = threads
        self._timeline = timeline
        self._tracer = tracer
        self._queue: SimpleQueue[_Work | _Wait | None] = SimpleQueue()
        self._submit_lock = threading.Lock()
        self._next_tick = 1
        self._closed = False
        self._capture: list[Callable[[], None]] | None = None
        self._passed = threading.Condition()
        self._bell: Bell | None = None  # of the thread that waits for this stream and listens meanwhile
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"sidestream-{name}", daemon=True)
        self._start()

    def submit(self, work: Callable[[], None], accesses: Accesses = no_accesses, *, label: str = "") -> Fence:
        """Enqueue `work`; returns at once. See `Stream.submit`."""
        with self._submit_lock:
            if self._closed:
                raise InvariantError(f"stream {self.name} is closed: {label or 'work'} cannot be submitted")
            if self._capture is not None:
                self._capture.append(work)
                return HostFence(self, 0)
            fence = HostFence(self, self._next_tick)
            self._next_tick += 1
            if self._tracer is not None:
                self._tracer.submitted(fence, accesses, label)
            self._queue.put(_Work(work, fence, label))
        return fence

    def wait(self, fence: Fence) -> None:
        """Order later work behind `fence`. See `Stream.wait`."""
        if not isinstance(fence, HostFence):
            raise InvariantError(f"stream {self.name} cannot wait for {fence!r}: it is of another kind of stream")
        if fence.is_of(self):
            return  # a FIFO is behind its own past already
        if threading.current_thread() is self._thread:
            self._wait_here(fence)
        elif not fence.poll():
            with self._submit_lock:
                self._queue.put(_Wait(fence))

    def touch(self, accesses: Accesses) -> None:
        """Declare from inside work what it touches from here on. See `Stream.touch`."""
        if self._tracer is not None:
            self._tracer.touched(self.name, accesses)

    def copy(self, batch: CopyBatch) -> None:
        """Copy the segments, on the calling thread. See `Stream.copy`."""
        pairs = list(batch.runs())
        # one call: each copy by itself would compete for the interpreter lock with a forward pass that needs it for
        # each kernel
        if pairs:
            sources, targets = zip(*pairs, strict=True)
            torch._foreach_copy_(targets, sources)

    def submit_copy(self, batch: CopyBatch, first: int, stop: int, *, label: str = "") -> Fence:
        """Enqueue a copy. See `Stream.submit_copy`."""
        part = batch.part(first, stop)
        return self.submit(lambda: self.copy(part), part.accesses, label=label)

    def capture(self, build: Callable[[], None], *, beside: HostGraph | None = None) -> HostGraph:
        """What `build` submits to this stream, to run again; nothing runs. See `Stream.capture`."""
        self._capture = []
        try:
            build()
            return HostGraph(tuple(self._capture))
        finally:
            self._capture = None

    def enqueue(self, graph: HostGraph) -> None:
        """Run it, on the calling thread. See `Stream.enqueue`."""
        for node in graph.nodes:
            node()

    def aside(self, work: Callable[[], None]) -> None:
        """Run it at once, on the calling thread. See `Stream.aside`."""
        work()

    def join(self) -> None:
        """Nothing is aside."""

    def stamp(self, times: torch.Tensor) -> None:
        """Write the system's monotonic clock. See `Stream.stamp`."""
        times[0] = time.monotonic_ns()

    def deliver(self, values: torch.Tensor, memory: Memory, start: int | torch.Tensor, *, further: int = 0) -> None:
        """Write the values' bytes, on the calling thread. See `Stream.deliver`."""
        flat = values.reshape(-1).view(torch.uint8)
        first = int(start) + further
        memory.data[first : first + flat.numel()].copy_(flat)

    def has_passed(self, fence: HostFence) -> bool:
        """Whether `fence`, of this stream, is done: then whoever asks has seen it."""
        if self.done_tick < fence.tick:
            return False
        if self._tracer is not None:
            self._tracer.observed(fence)
        return True

    def block_until(self, tick: int, timeout_s: float | None, bell: Bell | None = None) -> bool:
        """Block the calling thread until `tick` has been passed; False when `timeout_s` passed first, or somebody rang:
        one thread may listen.
        """
        if self.done_tick >= tick:
            return True
        if bell is not None:
            self._bell = bell  # before it looks: the stream rings from here on
            if self.done_tick < tick:
                bell.wait(timeout_s)
            self._bell = None
            return self.done_tick >= tick
        with self._passed:
            return self._passed.wait_for(lambda: self.done_tick >= tick, timeout_s)

    def close(self) -> None:
        """Run what was submitted, then end the thread. Idempotent."""
        with self._submit_lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()

    def _start(self) -> None:
        """Start the thread with its own number of torch threads: copies stay on one core, the forward pass gets them
        all.

        Torch keeps the number by thread, but a thread that never asked takes the last one set by any thread: so the
        stream's thread asks before it sets, and the caller's number is set again afterwards, for threads still to come.
        """
        caller_threads = torch.get_num_threads()
        self._thread.start()
        self._ready.wait()
        torch.set_num_threads(caller_threads)

    def _run(self) -> None:
        torch.get_num_threads()
        torch.set_num_threads(self._threads)
        self._ready.set()
        while (item := self._queue.get()) is not None:
            if isinstance(item, _Wait):
                self._wait_here(item.fence)
                continue
            if self._tracer is not None:
                self._tracer.started(item.fence)
            start_ns = time.perf_counter_ns()
            try:
                item.run()
            except BaseException as error:
                item.fence.fail(error)
            if self._timeline is not None:
                self._timeline.record(self.name, item.label or "work", start_ns, time.perf_counter_ns())
            if self._tracer is not None:
                self._tracer.finished(item.fence)
            tick = item.fence.tick
            del item  # what the work held (tensors, leases) is gone before anybody learns that it is done (H24)
            with self._passed:
                self.done_tick = tick
                self._passed.notify_all()
            if (bell := self._bell) is not None:
                bell.ring()
            self._on_pass()

    def _wait_here(self, fence: HostFence) -> None:
        start_ns = time.perf_counter_ns()
        fence.block(None)
        stop_ns = time.perf_counter_ns()
        if self._tracer is not None:
            self._tracer.waited(self.name, fence)
        if self._timeline is not None and stop_ns - start_ns > _VISIBLE_WAIT_NS:
            self._timeline.record(self.name, f"wait for {fence.stream}", start_ns, stop_ns)


class TurnTaker:
    """A thread that calls `turn` again and again, and sleeps in between until there may be something to do.

    poll_s   how soon it looks at fences again that nobody announces; None: whoever passes one calls `wake_for_fences`
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[], Rest],
        *,
        clock: Callable[[], float],
        poll_s: float | None = None,
        prepare: Callable[[], None] = lambda: None,
        tracer: Tracer | None = None,
    ) -> None:
        """`prepare` is called first, on the thread."""
        self.name = name
        self.failure: BaseException | None = None
        self._turn = turn
        self._clock = clock
        self._poll_s = poll_s
        self._prepare = prepare
        self._tracer = tracer
        self._bell = Bell()
        self._woken = self._asleep = False
        self._resting_for_fences = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"sidestream-{name}", daemon=True)
        if tracer is not None:
            tracer.sent(f"start of {name}", 1)
        self._thread.start()

    def wake(self) -> None:
        """Have another turn soon. See `HostThread.wake`."""
        if not self._woken:
            self._woken = True
            if self._asleep:  # else it looks before it falls asleep
                self._bell.ring()

    def wake_for_fences(self) -> None:
        """A fence was passed, whichever: have another turn if the last one waits for any."""
        if self._resting_for_fences:
            self.wake()

    def close(self) -> None:
        """End behind the turn that runs now. See `HostThread.close`."""
        self._closing = True
        self._bell.ring()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            if self._tracer is not None:
                self._tracer.joined(self.name)

    def _run(self) -> None:
        if self._tracer is not None:
            self._tracer.apart(self.name)
            self._tracer.received(f"start of {self.name}", 1)
        try:
            self._prepare()
            self._sleep(None)
            while not self._closing:
                self._woken = False
                self._resting_for_fences = (
                    True  # before the turn looks at them: one that is passed behind its back wakes it again
                )
                rest = self._turn()
                self._resting_for_fences = bool(rest.fences)
                self._sleep(rest.until_s, rest.fences)
        except BaseException as error:
            self.failure = error

    def _sleep(self, until_s: float | None, fences: Sequence[Fence] = ()) -> None:
        """Until woken, or until that time, or until one of the fences is done: looking at them takes a few
        microseconds, a turn takes fifty.
        """
        timeout_s: float | None = None
        while True:
            if fences and self._poll_s is not None:
                timeout_s = self._poll_s
            if until_s is not None:
                left_s = until_s - self._clock()
                if left_s <= 0:
                    break
                timeout_s = left_s if timeout_s is None else min(timeout_s, left_s)
            # Who looks again so soon need not be woken, which takes some 5 us of the engine thread's.
            self._asleep = timeout_s is None or timeout_s > _SOON_S
            if (
                self._woken or self._closing
            ):  # behind the line above: whoever wakes it from here on sees that it is asleep
                break
            self._bell.wait(timeout_s)
            if self._poll_s is not None and _any_done(fences):
                break
        self._asleep = False


def _any_done(fences: Sequence[Fence]) -> bool:
    try:
        return any(fence.poll() for fence in fences)
    except DeviceLost:
        return True  # the next turn finds out
