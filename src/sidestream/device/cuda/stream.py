"""A CUDA stream that we own, and the fences on it. Work is enqueued at once, by the thread that submits it; a pooled
event marks its end.

From any thread: what one submits as one piece lies together on the stream. Whoever polls a fence moves the whole
stream's knowledge on.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from sidestream.device.base import CopyBatch, Memory, no_accesses
from sidestream.device.cuda.copies import Grid, Place, plan, segments
from sidestream.device.cuda.driver import Driver, Event, Rows, Table, named
from sidestream.device.cuda.graphs import Capture, CudaEvent, CudaGraph
from sidestream.device.cuda.history import History
from sidestream.device.host import HostFence
from sidestream.errors import DeviceLost, InvariantError
from sidestream.metrics import Timeline
from sidestream.types import Access, Accesses, Fence, Tracer

# How often a wait with a deadline looks.
_LOOK_AGAIN_S = 20e-6


class Owner(Protocol):
    """What a stream needs of its device."""

    driver: Driver
    tracer: Tracer | None
    history: History | None
    timeline: Timeline | None
    lost: str | None

    def take_event(self) -> Event:
        """An event that nobody uses."""
        ...

    def give_event(self, event: Event) -> None:
        """It was passed, and nobody uses it any more."""
        ...

    def take_table(self) -> Table | None:
        """Mapped memory for the segments of a kernel's copy, int64 `[3 * n]`; None when all is in use."""
        ...

    def give_table(self, table: Table) -> None:
        """The kernel has read it."""
        ...

    def place(self, memory: Memory) -> Place:
        """Where the memory is."""
        ...

    def lose(self, error: BaseException) -> None:
        """Nothing on the device can be believed any more."""
        ...


class CudaFence:
    """A position on one stream; done once an event behind it was seen passed."""

    __slots__ = ("_failure", "_stream", "_tick")

    def __init__(self, stream: CudaStream, tick: int) -> None:
        self._stream = stream
        self._tick = tick
        self._failure: BaseException | None = None

    @property
    def stream(self) -> str:
        """Name of the stream."""
        return self._stream.name

    @property
    def tick(self) -> int:
        """Position on the stream; 0 of work that went into a graph: its fence is never done."""
        return self._tick

    @property
    def failure(self) -> BaseException | None:
        """What the work raised while it was enqueued."""
        return self._failure

    @property
    def owner(self) -> CudaStream:
        """The stream itself; two devices may use the same name."""
        return self._stream

    def poll(self) -> bool:
        """Whether the stream has passed this position. Never blocks. Raises DeviceLost when it never will."""
        return self._stream.has_passed(self)

    def fail(self, error: BaseException) -> None:
        """Keep what the work raised, without its frames' variables."""
        for raised in (error, error.__cause__):
            if raised is not None:
                traceback.clear_frames(raised.__traceback__)
        self._failure = error

    def block(self, timeout_s: float | None) -> bool:
        """Block the calling thread until done; False when `timeout_s` passed first. Raises DeviceLost."""
        return self._stream.block_until(self, timeout_s)

    def __repr__(self) -> str:
        return f"fence({self.stream}:{self.tick}{' done' if 0 < self.tick <= self._stream.done_tick else ''})"


@dataclass(slots=True, eq=False)
class _Enqueued:
    """One fence on its way. `waiters` threads block on its event: it cannot be used again before they woke up."""

    fence: CudaFence
    event: Event
    label: str
    enqueued_ns: int
    tables: list[Table] = field(default_factory=list)
    waiters: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """Where a stream's work goes that runs beside it: the driver's handle, torch's name for it, and what makes it
    current.
    """

    handle: int
    external: Any
    current: AbstractContextManager[Any]


class CudaStream:
    """One stream. `done_tick` is the last position that was seen passed; `external` is torch's name for the stream."""

    def __init__(self, name: str, handle: int, owner: Owner, on_close: Callable[[CudaStream], None]) -> None:
        self.name = name
        self.handle = handle
        self.done_tick = 0
        self._owner = owner
        self._driver = owner.driver
        self._on_close = on_close
        self.external = owner.driver.external(handle)
        self._current: AbstractContextManager[Any] = owner.driver.current(self.external)
        self._submitting = threading.RLock()
        self._running = False
        self._closed = False
        self._last_tick = 0
        self._tables: list[Table] = []
        self._capture: Capture | None = None
        self._side: _Side | None = None
        self._has_aside = False
        self._enqueued: deque[_Enqueued] = deque()  # ticks without a gap, the oldest first
        self._looking = threading.Lock()  # held for microseconds, by whoever looks at the enqueued

    # ------------------------------------------------------------------ the door

    def submit(self, work: Callable[[], None], accesses: Accesses = no_accesses, *, label: str = "") -> CudaFence:
        """Enqueue `work` now, with this stream current, and a mark behind it. See `Stream.submit`.

        Raises DeviceLost when the device is. While a graph is captured, the work goes into the graph.
        """
        return self._submit(lambda: self._enqueue(work), accesses, label)

    def submit_copy(self, batch: CopyBatch, first: int, stop: int, *, label: str = "") -> CudaFence:
        """Enqueue a copy; of a prepared batch without making the stream current, which only kernels need. See
        `Stream.submit_copy`.
        """
        rows = batch.prepared
        if rows is None or self._capture is not None:
            part = batch.part(first, stop)
            return self.submit(lambda: self.copy(part), part.accesses, label=label)

        def enqueue() -> None:
            if isinstance(rows, Rows):
                self._driver.copy_rows(rows, first, stop - first, self.handle)
            else:
                assert isinstance(rows, Grid)
                self._copy_grid(rows, rows.targets[first:stop], rows.sources[first:stop])

        return self._submit(enqueue, lambda: batch.part(first, stop).accesses(), label)

    def _submit(self, enqueue: Callable[[], None], accesses: Accesses, label: str) -> CudaFence:
        with self._submitting:
            if self._running:
                raise InvariantError(
                    f"stream {self.name} was given {label or 'work'} by its own work: submit it behind, not inside"
                )
            if self._closed:
                raise InvariantError(f"stream {self.name} is closed: {label or 'work'} cannot be submitted")
            self._check_alive()
            if self._capture is not None:
                self._capture.accesses.append(accesses)
                enqueue()
                return CudaFence(self, 0)
            fence = CudaFence(self, self._last_tick + 1)
            history = self._owner.history
            if history is not None:
                history.submitted(fence, accesses, label)
            self._last_tick = fence.tick
            try:
                enqueue()
            except BaseException as error:
                fence.fail(named(error))
            if isinstance(fence.failure, DeviceLost):
                raise self._lose(fence.failure)
            self._mark(fence, label)
            if fence.failure is not None and not isinstance(fence.failure, Exception):
                raise fence.failure  # the program was told to end, in the middle of the work
            return fence

    def wait(self, fence: Fence) -> None:
        """Order later work behind `fence`, on the device; while a graph is captured this does nothing. See
        `Stream.wait`.

        A fence of a worker must have been seen done: a GPU does not wait for threads of the host.
        """
        if isinstance(fence, HostFence):
            if not fence.poll():
                raise InvariantError(
                    f"stream {self.name} cannot wait for {fence!r}: work of the host must be seen done, not waited for"
                )
        elif not isinstance(fence, CudaFence) or not fence.owner.is_of(self._owner):
            raise InvariantError(f"stream {self.name} cannot wait for {fence!r}: it is not of this device")
        elif not fence.tick:
            raise InvariantError(f"stream {self.name} cannot wait for work of a graph: wait for a replay's fence")
        elif fence.owner is self:
            return  # a FIFO is behind its own past already
        elif self._capture is not None:
            self._capture.ignored_waits += 1
            return
        else:
            self._check_alive()
            fence.owner.hold_up(self.external, fence.tick)
        if self._owner.history is not None:
            self._owner.history.waited(self.name, fence)

    def wait_event(self, event: CudaEvent) -> None:
        """Order later work behind the last record of `event`; nothing at all if it was never recorded."""
        if event.fence is not None:
            self.wait(event.fence)

    def touch(self, accesses: Accesses) -> None:
        """Declare from inside work what it touches from here on. See `Stream.touch`."""
        if self._capture is not None:
            self._capture.accesses.append(accesses)
        elif self._owner.history is not None:
            self._owner.history.touched(self.name, accesses)

    def copy(self, batch: CopyBatch) -> None:
        """Enqueue the copies, by as few calls as the driver allows. See `Stream.copy`. Raises DeviceError, some of them
        enqueued.
        """
        if batch.source.pageable or batch.target.pageable:
            raise InvariantError(
                f"copy from {batch.source.name} to {batch.target.name}: pageable memory would stall this thread; pin it first"
            )
        source, target = self._owner.place(batch.source), self._owner.place(batch.target)
        calls = plan(batch, source, target, max_pitch=self._driver.max_pitch)
        if isinstance(calls, Grid):
            self._copy_grid(calls, calls.targets, calls.sources)
        elif not calls.table.shape[1]:
            return
        elif calls.by_kernel and self._capture is None:
            self._copy_by_kernel(calls.table, source, target)
        else:
            self._copy_by_engine(calls.table, source, target)

    def aside(self, work: Callable[[], None]) -> None:
        """Enqueue it on a stream of its own, whose kernels let those of this one go first; in a graph, as a branch. See
        `Stream.aside`.
        """
        if not self._running:
            raise InvariantError(f"stream {self.name} was told to enqueue something aside, but not by its work")
        if self._side is None:
            handle = self._driver.make_stream(high=False)
            external = self._driver.external(handle)
            self._side = _Side(handle, external, self._driver.current(external))
        fork = self._driver.event()
        fork.record(self.external)
        fork.wait(self._side.external)
        self._has_aside = True
        with self._side.current:
            work()

    def join(self) -> None:
        """Order what comes next behind what is aside. See `Stream.join`."""
        if self._side is not None and self._has_aside:
            joint = self._driver.event()
            joint.record(self._side.external)
            joint.wait(self.external)
            self._has_aside = False

    def stamp(self, times: torch.Tensor) -> None:
        """Have a kernel write the GPU's clock. See `Stream.stamp`."""
        from sidestream.device.cuda import kernels

        kernels.stamp(times.data_ptr())

    def deliver(self, values: torch.Tensor, memory: Memory, start: int | torch.Tensor, *, further: int = 0) -> None:
        """Have one program of a kernel write the bytes. See `Stream.deliver`."""
        if not values.is_contiguous():
            raise InvariantError(
                f"values of shape {tuple(values.shape)} with strides {values.stride()} are not contiguous: deliver a copy"
            )
        from sidestream.device.cuda import kernels

        num_bytes = values.numel() * values.element_size()
        if not num_bytes:
            return
        target = memory.data.data_ptr() + further
        if isinstance(start, torch.Tensor):
            kernels.deliver(target, values.data_ptr(), num_bytes, behind=start.data_ptr())
        else:
            kernels.deliver(target + start, values.data_ptr(), num_bytes)

    # ------------------------------------------------------------------ graphs

    def capture(self, build: Callable[[], None], *, beside: CudaGraph | None = None) -> CudaGraph:
        """What `build` submits to this stream, as a graph. See `Stream.capture`. What `build` raises is what this
        raises, by our name for it.
        """
        pool = None if beside is None else beside.graph.pool()
        with self._submitting:
            self._check_alive()
            graph, capture = torch.cuda.CUDAGraph(), Capture([], [])
            failure: BaseException | None = None
            try:
                with (
                    self._driver.current(self.external),  # a capture that fails to end leaves it current
                    # The other threads' calls go on: their streams are not captured.
                    torch.cuda.graph(graph, pool=pool, stream=self.external, capture_error_mode="thread_local"),
                ):
                    self._capture = capture
                    try:
                        build()
                    except BaseException as error:
                        failure = error  # the end of the capture may fail because of it, and says less
                        raise
            except BaseException as error:
                raise named(failure or error)  # noqa: B904 - its cause is what torch raised
            finally:
                self._capture = failure = (
                    None  # an error that its own frames know is collected late, with all that they hold
                )
            tell: Any = getattr(graph, "raw_cuda_graph_exec", None)
            return CudaGraph(
                graph,
                tuple(capture.accesses),
                tuple(capture.waits),
                capture.ignored_waits,
                None if tell is None else int(tell()),
            )

    def wait_external(self, event: CudaEvent) -> None:
        """Inside `capture`: a node that waits for the last record of `event` at the time of each replay."""
        if self._capture is None:
            raise InvariantError("an external wait is a node of a graph: capture one")
        if event.fence is None:
            raise InvariantError(
                f"event {event.name} was never recorded: the graph would have no node that waits for it"
            )
        event.event.wait(self.external)
        self._capture.waits.append(event)

    def replay(self, graph: CudaGraph, accesses: Accesses | None = None, *, label: str = "") -> CudaFence:
        """Enqueue everything in the graph. `accesses` are what it declared when it was captured, unless given."""

        def captured() -> list[Access]:
            return [access for said in graph.accesses for access in said()]

        with self._submitting:
            self._count_waits(graph)
            return self.submit(lambda: self._launch(graph), accesses or captured, label=label or "graph")

    def enqueue(self, graph: CudaGraph) -> None:
        """Replay it inside work of this stream, which says what it touches. See `Stream.enqueue`."""
        if not self._running:
            raise InvariantError(
                f"stream {self.name} was told to enqueue a graph, but not by its work: `replay` is for others"
            )
        self._count_waits(graph)
        self._launch(graph)

    def _launch(self, graph: CudaGraph) -> None:
        if graph.executable is None:
            graph.graph.replay()
        else:
            self._driver.launch_graph(graph.executable, self.handle)

    def _count_waits(self, graph: CudaGraph) -> None:
        """Say that the stream goes past the graph's waits: somewhere in it, at its beginning for whoever is told."""
        if self._owner.history is not None:
            for event in graph.waits:
                if event.fence is not None:
                    self._owner.history.waited(self.name, event.fence)

    # ------------------------------------------------------------------ fences

    def is_of(self, owner: Owner) -> bool:
        """Whether it is a stream of that device."""
        return self._owner is owner

    def has_passed(self, fence: CudaFence) -> bool:
        """Whether `fence`, of this stream, is done: then whoever asks has seen it. Raises DeviceLost."""
        tick = fence.tick
        if self.done_tick < tick:
            self._check_alive()
            self._look()
        if not 0 < tick <= self.done_tick:
            return False
        if self._owner.tracer is not None:
            self._owner.tracer.observed(fence)
        return True

    def hold_up(self, external: Any, tick: int) -> None:
        """Order what torch's stream `external` is given from now on behind `tick` of this one."""
        self._look()
        with self._looking:  # so that the event cannot be passed, given back and recorded anew in between
            if tick > self.done_tick:
                entry = self._enqueued[tick - self.done_tick - 1]
                try:
                    entry.event.wait(external)
                except RuntimeError as error:
                    raise self._lose(error) from error  # what was to be held up goes on unordered

    def launched(self, fence: CudaFence) -> tuple[str, float] | None:
        """Label of the work that `fence` ends, and when it was enqueued, in seconds of `time.perf_counter`; None: it is
        done.
        """
        with self._looking:
            if fence.tick <= self.done_tick:
                return None
            entry = self._enqueued[fence.tick - self.done_tick - 1]
            return entry.label, entry.enqueued_ns / 1e9

    def block_until(self, fence: CudaFence, timeout_s: float | None) -> bool:
        """Block the calling thread until `fence` is done; False when `timeout_s` passed first. Raises DeviceLost."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.has_passed(fence):
            if until is None:
                self._block_on_event(fence)
            elif time.monotonic() >= until:
                return False
            else:
                time.sleep(_LOOK_AGAIN_S)
        return True

    def drain(self) -> None:
        """Block until all that was submitted is done. Raises DeviceLost."""
        with self._looking:
            last = self._enqueued[-1].fence if self._enqueued else None
        if last is not None:
            self.block_until(last, None)

    def close(self) -> None:
        """Let go of the stream; what it was given still runs, and its fences tell. Idempotent."""
        with self._submitting:
            if not self._closed:
                self._closed = True
                self._on_close(self)

    @property
    def side_handle(self) -> int | None:
        """The driver's name for the stream beside this one; None: there was no work for one."""
        return None if self._side is None else self._side.handle

    # ------------------------------------------------------------------ inside

    def _check_alive(self) -> None:
        if self._owner.lost is not None:
            raise DeviceLost(self._owner.lost)

    def _lose(self, error: BaseException) -> DeviceLost:
        """Tell the device, and return what to raise."""
        self._owner.lose(error)
        lost = DeviceLost(self._owner.lost or str(error))
        lost.__cause__ = error
        return lost

    def _enqueue(self, work: Callable[[], None]) -> None:
        self._running = True
        try:
            with self._current:
                work()
            if self._has_aside:
                raise InvariantError(f"work on stream {self.name} ends while something is aside: join it first")
        except BaseException:
            with contextlib.suppress(RuntimeError):  # what failed is told
                self.join()  # the end of the work covers all that it has on its way
            raise
        finally:
            self._running = self._has_aside = False

    def _mark(self, fence: CudaFence, label: str) -> None:
        """Record an event behind everything enqueued so far: from here on there is a fence."""
        event = self._owner.take_event()
        try:
            event.record(self.external)
        except RuntimeError as error:
            raise self._lose(error) from error  # work is on its way that no fence will ever cover
        if self._owner.history is not None:
            self._owner.history.enqueued(fence)
        entry = _Enqueued(fence, event, label, time.perf_counter_ns(), self._tables)
        self._tables = []
        with self._looking:
            self._enqueued.append(entry)

    def _look(self) -> None:
        """Ask the oldest events whether they were passed, up to the first that was not."""
        enqueued, owner = self._enqueued, self._owner
        with self._looking:
            while enqueued and self._is_passed(enqueued[0].event):
                entry = enqueued.popleft()
                if owner.history is not None:
                    owner.history.done(entry.fence)
                if owner.timeline is not None:
                    owner.timeline.record(self.name, entry.label or "work", entry.enqueued_ns, time.perf_counter_ns())
                for table in entry.tables:
                    owner.give_table(table)
                if not entry.waiters:
                    owner.give_event(entry.event)
                self.done_tick = entry.fence.tick

    def _is_passed(self, event: Event) -> bool:
        try:
            return event.query()
        except RuntimeError as error:
            raise self._lose(error) from error

    def _block_on_event(self, fence: CudaFence) -> None:
        """Block on the event of `fence` itself, without the interpreter lock."""
        with self._looking:
            if fence.tick <= self.done_tick:
                return
            if not fence.tick:
                raise InvariantError(f"work of a graph on stream {self.name} has no fence: wait for a replay's")
            entry = self._enqueued[fence.tick - self.done_tick - 1]
            entry.waiters += 1
        try:
            entry.event.synchronize()
        except RuntimeError as error:
            raise self._lose(error) from error
        finally:
            with self._looking:
                entry.waiters -= 1
                if not entry.waiters and fence.tick <= self.done_tick:
                    self._owner.give_event(entry.event)

    def copy_as(self, batch: CopyBatch, way: Literal["call each", "kernel"], *, programs: int = 2) -> None:
        """Copy as somebody else would, to be measured beside `copy`: a call for each segment, or a kernel of any number
        of programs.
        """
        source, target = self._owner.place(batch.source), self._owner.place(batch.target)
        table = segments(batch, source, target)
        if way == "kernel":
            self._copy_by_kernel(table, source, target, programs=programs)
        else:
            self._driver.copy_each(table, self.handle)

    def _copy_grid(self, grid: Grid, targets: list[int], sources: list[int]) -> None:
        self._driver.copy_grid(
            targets,
            sources,
            self.handle,
            from_device=grid.from_device,
            to_device=grid.to_device,
            target_pitch=grid.target_pitch,
            source_pitch=grid.source_pitch,
            width=grid.width,
            height=grid.height,
        )

    def _copy_by_engine(self, table: Table, source: Place, target: Place) -> None:
        if self._driver.has_batch:
            self._driver.copy_batch(table, self.handle, from_device=source.on_device, to_device=target.on_device)
        else:
            self._driver.copy_each(table, self.handle)

    def _copy_by_kernel(self, table: Table, source: Place, target: Place, *, programs: int = 2) -> None:
        """By a kernel, as many segments at once as a table in mapped memory holds; by the copy engine when there is no
        table left.
        """
        from sidestream.device.cuda import kernels

        first, count = 0, table.shape[1]
        while first < count:
            mapped = self._owner.take_table()
            if mapped is None:
                self._copy_by_engine(table[:, first:].copy(), source, target)
                return
            self._tables.append(mapped)  # until the fence: the kernel reads it
            part = table[:, first : first + len(mapped) // 3]
            size = part.shape[1]
            mapped[: 3 * size] = part.ravel()
            kernels.copy_segments(mapped.ctypes.data, size, wide=not (part % 8).any(), programs=programs)
            first += size
