"""Fences of one CUDA stream. A fence is a position on the stream: the end of a piece of work, where an event from a
pool is recorded. Polling a fence polls its event.

Any thread may use fences. Polling any fence updates the known progress of the whole stream.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

from sidestream_kv.device.base import StreamFence
from sidestream_kv.device.cuda.driver import Event, Table
from sidestream_kv.device.cuda.history import History
from sidestream_kv.errors import DeviceLost, InvariantError
from sidestream_kv.metrics import Timeline
from sidestream_kv.types import Accesses, Tracer

# Polling interval of a wait with a deadline.
_POLL_S = 20e-6


class FenceDevice(Protocol):
    """The members of a device that `FenceQueue` uses."""

    tracer: Tracer | None
    history: History | None
    timeline: Timeline | None
    lost: str | None

    def take_event(self) -> Event:
        """An unused event."""
        ...

    def give_event(self, event: Event) -> None:
        """Return an event to the pool."""
        ...

    def give_table(self, table: Table) -> None:
        """Return a segment table to the pool."""
        ...

    def lose(self, error: BaseException) -> None:
        """Mark the device as lost."""
        ...


class CudaFence(StreamFence["FenceQueue"]):
    """A position on one CUDA stream. The fence is done when a poll has found its event, or a later event, completed.

    `failure` is an exception that was raised while the work was enqueued. A fence with tick 0 is never done: it stands
    for work inside a captured graph.
    """

    __slots__ = ()

    def block(self, timeout_s: float | None) -> bool:
        """Block the calling thread until done; False after `timeout_s`. Raises DeviceLost."""
        return self.owner.block_until(self, timeout_s)


@dataclass(slots=True, eq=False)
class _Pending:
    """An unfinished fence. `num_waiters` threads block on its event, which is reused only after they have woken up."""

    fence: CudaFence
    event: Event
    label: str
    enqueued_ns: int
    tables: list[Table] = field(default_factory=list)
    num_waiters: int = 0


class FenceQueue:
    """The fences of one stream, in order. `external` is torch's object for the stream.

    done_tick   last position that a poll has found done
    """

    def __init__(self, name: str, external: Any, device: FenceDevice) -> None:
        self.name = name
        self.device = device
        self.done_tick = 0
        self._external = external
        self._last_tick = 0
        self._pending: deque[_Pending] = deque()  # consecutive ticks, the oldest first
        self._lock = threading.Lock()  # guards _pending and done_tick; held for microseconds

    def begin(self, accesses: Accesses, label: str) -> CudaFence:
        """Return a fence for the work that the caller is about to enqueue."""
        fence = CudaFence(self, self._last_tick + 1)
        if self.device.history is not None:
            self.device.history.submitted(fence, accesses, label)
        self._last_tick = fence.tick
        return fence

    def record(self, fence: CudaFence, label: str, tables: list[Table]) -> None:
        """Record an event after everything that was enqueued so far. From now on, the fence can be polled.

        tables   segment tables that the work reads; they return to the device's pool when the fence is done
        """
        event = self.device.take_event()
        try:
            event.record(self._external)
        except RuntimeError as error:
            raise self.lose(error) from error  # without the event, no fence covers the work that is enqueued
        if self.device.history is not None:
            self.device.history.enqueued(fence)
        pending = _Pending(fence, event, label, time.perf_counter_ns(), tables)
        with self._lock:
            self._pending.append(pending)

    def has_passed(self, fence: CudaFence) -> bool:
        """Whether `fence`, of this stream, is done. If so, tells the tracer (a recorder of events, in tests) that the
        calling thread has observed it. Raises DeviceLost.
        """
        tick = fence.tick
        if self.done_tick < tick:
            self.check_alive()
            self._update()
        if not 0 < tick <= self.done_tick:
            return False
        if self.device.tracer is not None:
            self.device.tracer.observed(fence)
        return True

    def hold_up(self, external: Any, fence: CudaFence) -> None:
        """Make torch's stream `external` wait for `fence` before it runs work that is enqueued after this call."""
        self._update()
        with self._lock:  # without the lock, the event could complete, return to the pool and be recorded again
            if fence.tick > self.done_tick:
                try:
                    self._find(fence).event.wait(external)  # rule: gpu-stream-waits-for-a-fence
                except RuntimeError as error:
                    raise self.lose(error) from error  # otherwise the other stream would run on without the wait

    def launched(self, fence: CudaFence) -> tuple[str, float] | None:
        """Label and enqueue time (seconds of `time.perf_counter`) of the work of `fence`; None if the fence is done."""
        with self._lock:
            if fence.tick <= self.done_tick:
                return None
            pending = self._find(fence)
            return pending.label, pending.enqueued_ns / 1e9

    def block_until(self, fence: CudaFence, timeout_s: float | None) -> bool:
        """Block the calling thread until `fence` is done; False after `timeout_s`. Raises DeviceLost."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.has_passed(fence):
            if until is None:
                self._block_on_event(fence)
            elif time.monotonic() >= until:
                return False
            else:
                time.sleep(_POLL_S)
        return True

    def drain(self) -> None:
        """Block until all submitted work is done. Raises DeviceLost."""
        with self._lock:
            last = self._pending[-1].fence if self._pending else None
        if last is not None:
            self.block_until(last, None)

    def check_alive(self) -> None:
        """Raise DeviceLost if the device is lost."""
        if self.device.lost is not None:
            raise DeviceLost(self.device.lost)

    def lose(self, error: BaseException) -> DeviceLost:
        """Mark the device as lost, and return the exception to raise."""
        self.device.lose(error)
        lost = DeviceLost(self.device.lost or str(error))
        lost.__cause__ = error
        return lost

    def _find(self, fence: CudaFence) -> _Pending:
        """The entry of an unfinished fence. The caller holds the lock."""
        return self._pending[fence.tick - self.done_tick - 1]

    def _update(self) -> None:
        """Poll the events, oldest first, up to the first event that is not complete."""
        pending, device = self._pending, self.device
        with self._lock:
            while pending and self._is_complete(pending[0].event):
                first = pending.popleft()
                if device.history is not None:
                    device.history.report_until(first.fence)
                if device.timeline is not None and (now_ns := time.perf_counter_ns()) < device.timeline.until_ns:
                    device.timeline.record(self.name, first.label or "work", first.enqueued_ns, now_ns)
                for table in first.tables:
                    device.give_table(table)
                if not first.num_waiters:
                    device.give_event(first.event)
                self.done_tick = first.fence.tick

    def _is_complete(self, event: Event) -> bool:
        try:
            return event.query()
        except RuntimeError as error:
            raise self.lose(error) from error

    def _block_on_event(self, fence: CudaFence) -> None:
        """Block on the event of `fence`, with the GIL released."""
        with self._lock:
            if fence.tick <= self.done_tick:
                return
            if not fence.tick:
                raise InvariantError(f"work in a graph on stream {self.name} has no fence: wait for a replay's fence")
            pending = self._find(fence)
            pending.num_waiters += 1
        try:
            pending.event.synchronize()
        except RuntimeError as error:
            raise self.lose(error) from error
        finally:
            with self._lock:
                pending.num_waiters -= 1
                if not pending.num_waiters and fence.tick <= self.done_tick:
                    self.device.give_event(pending.event)
