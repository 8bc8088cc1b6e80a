"""Streams that run on host threads; and host threads that call one function repeatedly and sleep in between.

Each stream runs its work in order on its own thread. torch and numpy release the GIL inside their kernels, so streams
run concurrently. `submit` appends to a queue and never blocks. All streams of the CPU device are such streams. The
streams of any device that read and write files are such streams, too.

A fence is a position on a stream, like a CUDA event. A bell wakes a sleeping thread (`channel.Bell`).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from sidestream_kv.device.base import CopyBatch, Memory, StreamFence, WakeUp, no_accesses, wait_in_capture
from sidestream_kv.device.channel import Bell
from sidestream_kv.errors import DeviceLost, InvariantError
from sidestream_kv.metrics import Metrics, Timeline
from sidestream_kv.types import Accesses, Fence, Tracer

# `wake` does not ring for a thread that sleeps for this time or less, because ringing takes the caller about 5 us.
_SHORT_SLEEP_S = 100e-6
# Shortest wait that the timeline shows.
_VISIBLE_WAIT_NS = 50_000


class HostFence(StreamFence["HostStream"]):
    """A position on one host stream; done when the stream's thread has passed it."""

    __slots__ = ()

    def block(self, timeout_s: float | None, bell: Bell | None = None) -> bool:
        """Block the calling thread until the fence is done; False after `timeout_s`, or when `bell` rings."""
        return self.owner.block_until(self.tick, timeout_s, bell)


@dataclass(frozen=True, slots=True)
class _Work:
    run: Callable[[], None]
    fence: HostFence
    label: str


@dataclass(frozen=True, slots=True)
class _Wait:
    fence: HostFence


@dataclass(slots=True, eq=False)
class HostGraph:
    """Captured work: functions that are called again, in order, at each replay."""

    nodes: tuple[Callable[[], None], ...]
    deleted: bool = False

    def delete(self) -> None:
        self.deleted, self.nodes = True, ()


class HostStream:
    """A thread that runs submitted work in order.

    done_tick   position of the last work that is done
    """

    def __init__(
        self,
        name: str,
        *,
        threads: int,
        timeline: Timeline | None,
        tracer: Tracer | None,
        on_pass: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the thread.

        threads   number of torch threads for the stream's kernels
        on_pass   function that is called on the stream's thread after each piece of work
        """
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
        self._bell: Bell | None = None  # bell of the thread in `block_until`, rung after each piece of work
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
        """Make later work wait for `fence`. See `Stream.wait`."""
        if not isinstance(fence, HostFence):
            raise InvariantError(f"stream {self.name} cannot wait for {fence!r}: it is of another kind of stream")
        if fence.owner is self:
            return  # the stream runs in order anyway
        if self._capture is not None:  # rule: no-wait-is-lost-in-a-capture
            raise wait_in_capture(self.name, fence)
        if threading.current_thread() is self._thread:
            self._wait_here(fence)
        elif not fence.poll():  # rule: cpu-stream-waits-for-other-streams
            with self._submit_lock:
                self._queue.put(_Wait(fence))

    def touch(self, accesses: Accesses) -> None:
        if self._tracer is not None:
            self._tracer.touched(self.name, accesses)

    def copy(self, batch: CopyBatch) -> None:
        """Copy the segments, on the calling thread. See `Stream.copy`."""
        if batch.converts:
            for source, target in batch.segments():
                target.copy_(batch.converted(source))
            return
        pairs = list(batch.runs())
        # One call copies all segments: with many calls, this thread would compete with the forward pass for the GIL.
        if pairs:
            sources, targets = zip(*pairs, strict=True)
            torch._foreach_copy_(targets, sources)

    def submit_copy(self, batch: CopyBatch, first: int, stop: int, *, label: str = "") -> Fence:
        """Enqueue a copy. See `Stream.submit_copy`."""
        part = batch.part(first, stop)
        return self.submit(lambda: self.copy(part), part.accesses, label=label)

    def capture(self, build: Callable[[], None], *, beside: HostGraph | None = None) -> HostGraph:
        self._capture = []
        try:
            build()
            return HostGraph(tuple(self._capture))
        finally:
            self._capture = None

    def enqueue(self, graph: HostGraph) -> None:
        """Run the graph's work on the calling thread. See `Stream.enqueue`."""
        if graph.deleted:
            raise InvariantError(f"stream {self.name}: the graph was deleted")
        for node in graph.nodes:
            node()

    def wait_external(self, event: object) -> None:
        """Raises InvariantError: a CPU has no events. See `Device.event`."""
        raise InvariantError(f"stream {self.name} cannot wait for an event: a CPU has none")

    def on_side_stream(self, work: Callable[[], None]) -> None:
        """Run the work at once, on the calling thread. See `Stream.on_side_stream`."""
        work()

    def join(self) -> None:
        """Does nothing: there is no side stream."""

    def stamp(self, times: torch.Tensor) -> None:
        """Write the system's monotonic clock. See `Stream.stamp`."""
        times[0] = time.monotonic_ns()

    def deliver(self, values: torch.Tensor, memory: Memory, start: int | torch.Tensor, *, further: int = 0) -> None:
        """Write the values' bytes, on the calling thread. See `Stream.deliver`."""
        flat = values.reshape(-1).view(torch.uint8)
        first = int(start) + further
        memory.data[first : first + flat.numel()].copy_(flat)

    def has_passed(self, fence: HostFence) -> bool:
        """Whether `fence`, of this stream, is done. If so, tells the tracer (a recorder of events, in tests) that the
        calling thread has observed it.
        """
        if self.done_tick < fence.tick:
            return False
        if self._tracer is not None:
            self._tracer.observed(fence)
        return True

    def block_until(self, tick: int, timeout_s: float | None, bell: Bell | None = None) -> bool:
        """Block the calling thread until `tick` is done; False after `timeout_s`, or when `bell` rings.

        Only one thread at a time may call this with a `bell`.
        """
        if self.done_tick >= tick:
            return True
        if bell is not None:
            self._bell = bell  # before the check below, so that no completion is missed
            if self.done_tick < tick:
                bell.wait(timeout_s)  # rule: host-sleeps-until-the-fence-or-a-ring
            self._bell = None
            return self.done_tick >= tick
        with self._passed:
            # rule: host-wait-ends-after-the-work
            return self._passed.wait_for(lambda: self.done_tick >= tick, timeout_s)

    def close(self) -> None:
        """Run all submitted work, then end the thread. Idempotent."""
        with self._submit_lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()  # rule: cpu-stream-closes-after-its-work

    def _start(self) -> None:
        """Start the thread with its own number of torch threads: one for copies, all cores for a forward pass.

        torch keeps this number for each thread. A thread that has never read its number gets the number that any thread
        set last. So the new thread reads its number before it sets it, and then the caller sets its own number again,
        for threads that start later.
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
            if self._timeline is not None and (stop_ns := time.perf_counter_ns()) < self._timeline.until_ns:
                self._timeline.record(self.name, item.label or "work", start_ns, stop_ns)
            if self._tracer is not None:
                self._tracer.finished(item.fence)
            tick = item.fence.tick
            del item  # before any thread can see the fence done, drop tensors and leases (H24 in docs/glossary.md)
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
        timeline = self._timeline
        if timeline is not None and stop_ns < timeline.until_ns and stop_ns - start_ns > _VISIBLE_WAIT_NS:
            timeline.record(self.name, f"wait for {fence.stream}", start_ns, stop_ns)


class TurnTaker:
    """A thread that calls `turn` repeatedly and sleeps in between. See `HostThread`.

    poll_s   interval at which the sleeping thread polls the fences of `WakeUp.fences`; None: it does not poll, and the
             device calls `wake_for_fences` when any fence is done
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[], WakeUp],
        *,
        clock: Callable[[], float],
        poll_s: float | None = None,
        prepare: Callable[[], None] = lambda: None,
        tracer: Tracer | None = None,
    ) -> None:
        """Start the thread; it calls `prepare` first."""
        self.name = name
        self.failure: BaseException | None = None
        self._turn = turn
        self._clock = clock
        self._poll_s = poll_s
        self._prepare = prepare
        self._tracer = tracer
        self._bell = Bell()
        self._woken = self._asleep = False
        self._waits_for_fences = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"sidestream-{name}", daemon=True)
        if tracer is not None:
            tracer.sent(f"start of {name}", 1)
        self._thread.start()

    def wake(self) -> None:
        if not self._woken:
            self._woken = True
            if self._asleep:  # otherwise the thread checks `_woken` before it sleeps
                self._bell.ring()

    def wake_for_fences(self) -> None:
        """Take another turn if the last turn asked to be woken by fences. Called after any fence is done."""
        if self._waits_for_fences:
            self.wake()

    def close(self) -> None:
        self._closing = True
        self._bell.ring()
        if threading.current_thread() is not self._thread:
            self._thread.join()  # rule: thread-closes-after-its-turn
            if self._tracer is not None:
                self._tracer.joined(self.name)

    def _run(self) -> None:
        if self._tracer is not None:
            self._tracer.own_timeline(self.name)
            self._tracer.received(f"start of {self.name}", 1)
        try:
            self._prepare()
            self._sleep(None)
            while not self._closing:
                self._woken = False
                # Set before the turn polls fences: a fence that completes during the turn then causes another turn.
                self._waits_for_fences = True
                wake_up = self._turn()
                self._waits_for_fences = bool(wake_up.fences)
                self._sleep(wake_up.until_s, wake_up.fences)
        except BaseException as error:
            self.failure = error  # rule: failure-of-a-turn-is-kept

    def _sleep(self, until_s: float | None, fences: Sequence[Fence] = ()) -> None:
        """Sleep until `wake`, `until_s`, or the completion of a fence.

        Polls the fences here and not in a turn, because polling takes a few microseconds and a turn takes fifty.
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
            self._asleep = timeout_s is None or timeout_s > _SHORT_SLEEP_S
            # Check `_woken` only after `_asleep` is set, so that no `wake` is lost: an earlier `wake` has set `_woken`,
            # and a later `wake` sees `_asleep` and rings.
            if self._woken or self._closing:
                break
            self._bell.wait(timeout_s)
            if self._poll_s is not None and _any_done(fences):
                break
        self._asleep = False


class HostSide:
    """The host's part of a device of this machine: the clock, the threads that take turns, and the count of waits."""

    def __init__(self, *, metrics: Metrics | None, tracer: Tracer | None) -> None:
        self.tracer = tracer
        self._metrics = metrics
        self._threads: list[TurnTaker] = []
        self._waits: Counter[str] = Counter()

    def host_waits(self) -> dict[str, int]:
        """See `Device.host_waits`."""
        return dict(self._waits)

    def now(self) -> float:
        """Seconds of the system's monotonic clock."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Block the calling thread."""
        time.sleep(seconds)

    def _count_wait(self, reason: str) -> None:
        self._waits[reason] += 1
        if self._metrics is not None:
            self._metrics.inc("host_waits_total", 1, reason)
        if self.tracer is not None:
            self.tracer.stalled(reason)

    def _passed(self) -> None:
        """A stream has passed a fence."""
        for thread in self._threads:
            thread.wake_for_fences()


def _any_done(fences: Sequence[Fence]) -> bool:
    try:
        return any(fence.poll() for fence in fences)  # rule: done-fence-wakes-the-thread
    except DeviceLost:
        return True  # the next turn handles the error
