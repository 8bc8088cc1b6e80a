"""A CUDA stream. The thread that submits work enqueues it at once, and an event marks the end of the work. A fence is
the position of such an event on the stream.

Any thread may submit. The work of one submission is contiguous on the stream.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import torch

from sidestream_kv.device.base import CopyBatch, Memory, no_accesses, wait_in_capture
from sidestream_kv.device.cuda.copier import Copier, CopyDevice
from sidestream_kv.device.cuda.copies import Staged
from sidestream_kv.device.cuda.driver import Driver, named
from sidestream_kv.device.cuda.fences import CudaFence, FenceDevice, FenceQueue
from sidestream_kv.device.cuda.graphs import Capture, CudaEvent, CudaGraph
from sidestream_kv.device.cuda.side import SideStream
from sidestream_kv.device.host import HostFence
from sidestream_kv.errors import DeviceLost, InvariantError
from sidestream_kv.types import Access, Accesses, Fence


class StreamDevice(CopyDevice, FenceDevice, Protocol):
    """The members of a device that `CudaStream` uses."""


class CudaStream:
    """One stream.

    handle     the driver's handle of the stream
    external   torch's object for the stream
    fences     fences of the stream, which also know the stream's progress
    """

    def __init__(self, name: str, handle: int, device: StreamDevice, on_close: Callable[[CudaStream], None]) -> None:
        self.name = name
        self.handle = handle
        self.external = device.driver.external(handle)
        self.fences = FenceQueue(name, self.external, device)
        self._history = device.history
        self._driver: Driver = device.driver
        self._on_close = on_close
        self._current: AbstractContextManager[Any] = device.driver.current(self.external)
        self._copier = Copier(device, handle)
        self._side = SideStream(device.driver, self.external)
        self._submitting = threading.RLock()
        self._running = False  # whether submitted work is being enqueued now
        self._closed = False
        self._capture: Capture | None = None

    # ------------------------------------------------------------------ submission

    def submit(self, work: Callable[[], None], accesses: Accesses = no_accesses, *, label: str = "") -> CudaFence:
        """Enqueue `work` now, with this stream as torch's current stream. See `Stream.submit`. Raises DeviceLost.

        While a graph is captured, the work goes into the graph, and its fence has tick 0.
        """
        return self._submit(lambda: self._run(work), accesses, label=label)

    def submit_copy(self, batch: CopyBatch, first: int, stop: int, *, label: str = "") -> CudaFence:
        """See `Stream.submit_copy`. Most prepared batches need no kernel, so torch's current stream is not changed."""
        prepared = batch.prepared
        if prepared is None or self._capture is not None:
            part = batch.part(first, stop)
            return self.submit(lambda: self.copy(part), part.accesses, label=label)
        submit = self.submit if isinstance(prepared, Staged) else self._submit
        return submit(
            lambda: self._copier.copy_prepared(prepared, first, stop),
            lambda: batch.part(first, stop).accesses(),
            label=label,
        )

    def _submit(self, enqueue: Callable[[], None], accesses: Accesses, *, label: str) -> CudaFence:
        with self._submitting:
            if self._running:
                raise InvariantError(
                    f"work on stream {self.name} submits {label or 'work'} to its own stream: submit it after the work"
                )
            if self._closed:
                raise InvariantError(f"stream {self.name} is closed: {label or 'work'} cannot be submitted")
            self.fences.check_alive()
            if self._capture is not None:
                self._capture.accesses.append(accesses)
                enqueue()
                return CudaFence(self.fences, 0)
            fence = self.fences.begin(accesses, label)
            try:
                enqueue()
            except BaseException as error:
                fence.fail(named(error))
            if isinstance(fence.failure, DeviceLost):  # rule: work-that-loses-the-gpu-raises
                raise self.fences.lose(fence.failure)
            self.fences.record(fence, label, self._copier.take_tables())
            # rule: interrupt-inside-work-is-raised
            if fence.failure is not None and not isinstance(fence.failure, Exception):
                raise fence.failure  # KeyboardInterrupt or SystemExit inside the work
            return fence

    def _run(self, work: Callable[[], None]) -> None:
        self._running = True
        try:
            with self._current:
                work()
            if self._side.active:
                raise InvariantError(f"work on stream {self.name} ends with work on the side stream: join it first")
        except BaseException:
            with contextlib.suppress(RuntimeError):  # report the first error
                # so that the work's fence covers the side stream
                self._side.join()  # rule: failed-work-joins-its-side-stream
            raise
        finally:
            self._running = self._side.active = False

    def wait(self, fence: Fence) -> None:
        """Make later work wait for `fence`, on the device. See `Stream.wait`.

        The fence of a host stream must be done already, because a GPU cannot wait for a host thread.
        """
        if isinstance(fence, HostFence):
            if not fence.poll():  # rule: gpu-does-not-wait-for-host-work
                raise InvariantError(
                    f"stream {self.name} cannot wait for {fence!r}: a GPU cannot wait for host work: poll it first"
                )
        elif not isinstance(fence, CudaFence) or fence.owner.device is not self.fences.device:
            raise InvariantError(f"stream {self.name} cannot wait for {fence!r}: it is not of this device")
        elif not fence.tick:
            raise InvariantError(f"stream {self.name} cannot wait for work of a graph: wait for a replay's fence")
        elif fence.owner is self.fences:
            return  # the stream runs in order anyway
        elif self._capture is not None:
            raise wait_in_capture(self.name, fence)
        else:
            self.fences.check_alive()
            fence.owner.hold_up(self.external, fence)
        if self._history is not None:
            self._history.waited(self.name, fence)

    def wait_event(self, event: CudaEvent) -> None:
        """Make later work wait for the last record of `event`. Does nothing if `event` was never recorded."""
        if event.fence is not None:
            self.wait(event.fence)  # rule: gpu-stream-waits-for-an-event

    def record_event(self, event: CudaEvent) -> CudaFence:
        """Record `event` after all work submitted so far. Use `CudaEvent.record`. This needs no kernel, so torch's
        current stream is not changed. Do not call it inside a capture of another stream: torch would record the event
        for that capture.
        """
        return self._submit(lambda: event.event.record(self.external), no_accesses, label=f"record {event.name}")

    def close(self) -> None:
        """Return the stream's handles to the driver. Submitted work still runs to its end. Idempotent."""
        with self._submitting:
            if not self._closed:
                self._closed = True
                self._on_close(self)

    @property
    def side_handle(self) -> int | None:
        """The driver's handle of the side stream; None if there is no side stream."""
        return self._side.handle

    # ------------------------------------------------------------------ for use inside work

    def touch(self, accesses: Accesses) -> None:
        if self._capture is not None:
            self._capture.accesses.append(accesses)
            self._capture.order.append(accesses)
        elif self._history is not None:
            self._history.touched(self.name, accesses)

    def copy(self, batch: CopyBatch) -> None:
        """See `Stream.copy`. After a DeviceError, some of the copies may be enqueued."""
        self._copier.copy(batch, capturing=self._capture is not None)

    def copy_as(self, batch: CopyBatch, way: Literal["call each", "kernel"], *, programs: int = 2) -> None:
        """Copy in another way, for benchmarks. See `Copier.copy_as`."""
        self._copier.copy_as(batch, way, programs=programs)

    def on_side_stream(self, work: Callable[[], None]) -> None:
        if not self._running:
            raise InvariantError(f"stream {self.name}: only its own work may use the side stream")
        self._side.enqueue(work)

    def join(self) -> None:
        self._side.join()  # rule: gpu-work-joins-its-side-stream

    def stamp(self, times: torch.Tensor) -> None:
        """Write the GPU's clock with a kernel. See `Stream.stamp`."""
        from sidestream_kv.device.cuda.kernels import stamp

        stamp(times.data_ptr())

    def deliver(self, values: torch.Tensor, memory: Memory, start: int | torch.Tensor, *, further: int = 0) -> None:
        """Write the bytes with a kernel of one program. See `Stream.deliver`."""
        if not values.is_contiguous():
            raise InvariantError(
                f"values of shape {tuple(values.shape)} with strides {values.stride()} are not contiguous: "
                "deliver a copy"
            )
        from sidestream_kv.device.cuda.kernels import deliver

        num_bytes = values.numel() * values.element_size()
        if not num_bytes:
            return
        target = memory.data.data_ptr() + further
        if isinstance(start, torch.Tensor):
            deliver(target, values.data_ptr(), num_bytes, offset_address=start.data_ptr())
        else:
            deliver(target + start, values.data_ptr(), num_bytes)

    # ------------------------------------------------------------------ graphs

    def capture(self, build: Callable[[], None], *, beside: CudaGraph | None = None) -> CudaGraph:
        """See `Stream.capture`. An error of `build` is raised as `driver.named` translates it."""
        pool = None if beside is None else beside.graph.pool()
        with self._submitting:
            self.fences.check_alive()
            graph, capture = torch.cuda.CUDAGraph(), Capture([], [])
            failure: BaseException | None = None
            try:
                with (
                    self._driver.current(self.external),  # restores torch's current stream if the capture fails to end
                    # Thread-local: other threads may call CUDA during the capture, and their streams are not captured.
                    torch.cuda.graph(graph, pool=pool, stream=self.external, capture_error_mode="thread_local"),
                ):
                    self._capture = capture
                    try:
                        build()
                    except BaseException as error:
                        failure = error  # kept, because the end of the capture may raise a less precise error
                        raise
            except BaseException as error:
                raise named(failure or error)  # noqa: B904 - its cause is torch's error
            finally:
                self._capture = None
                failure = None  # breaks a reference cycle with the frame, which would keep the capture's tensors alive
            executable: Any = getattr(graph, "raw_cuda_graph_exec", None)
            return CudaGraph(
                graph,
                tuple(capture.accesses),
                tuple(capture.waits),
                None if executable is None else int(executable()),
                tuple(capture.order),
            )

    def wait_external(self, event: CudaEvent) -> None:
        if self._capture is None:
            raise InvariantError(f"stream {self.name}: `wait_external` was called outside `capture`: call it inside")
        if event.fence is None:
            raise InvariantError(
                f"event {event.name} was never recorded: the graph would have no node that waits for it"
            )
        event.event.wait(self.external)  # rule: gpu-graph-waits-for-its-event
        self._capture.waits.append(event)
        self._capture.order.append(event)

    def replay(self, graph: CudaGraph, accesses: Accesses | None = None, *, label: str = "") -> CudaFence:
        """Submit the graph as a separate piece of work. `accesses` default to those that the captured work has
        declared.
        """

        def captured() -> list[Access]:
            return [access for declared in graph.accesses for access in declared()]

        with self._submitting:
            self._record_waits(graph)
            return self.submit(lambda: self._launch(graph), accesses or captured, label=label or "graph")

    def enqueue(self, graph: CudaGraph) -> None:
        """See `Stream.enqueue`. Reports waits and accesses of the captured work to the tracer, in their order."""
        if not self._running:
            raise InvariantError(f"stream {self.name}: only its own work may enqueue a graph; others call `replay`")
        if self._history is not None:
            for step in graph.order:
                if not isinstance(step, CudaEvent):
                    self._history.touched(self.name, step)
                elif step.fence is not None:
                    self._history.waited(self.name, step.fence)
        self._launch(graph)

    def _launch(self, graph: CudaGraph) -> None:
        if graph.deleted:
            raise InvariantError(f"stream {self.name}: the graph was deleted")
        if graph.executable is None:
            graph.graph.replay()
        else:
            self._driver.launch_graph(graph.executable, self.handle)

    def _record_waits(self, graph: CudaGraph) -> None:
        """Record the waits of the graph for the tracer, as if all of them were at its beginning."""
        if self._history is not None:
            for event in graph.waits:
                if event.fence is not None:
                    self._history.waited(self.name, event.fence)
