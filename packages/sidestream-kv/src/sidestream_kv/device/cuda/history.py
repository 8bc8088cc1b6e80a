"""Reports the events of a GPU to a tracer, as soon as fences prove that the events have happened. Used in tests.

A GPU reports neither when work starts nor when a wait ends. But when a fence (a position on a stream) is done, all
earlier work of its stream is done, and so is all work that the stream has waited for. So each stream has a log, and
`report_until` reports the log up to the fence.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from sidestream_kv.types import Access, Accesses, Fence, Tracer


@dataclass(frozen=True, slots=True)
class _Started:
    fence: Fence


@dataclass(frozen=True, slots=True)
class _Waited:
    fence: Fence


@dataclass(frozen=True, slots=True)
class _Accessed:
    accesses: Sequence[Access]


@dataclass(frozen=True, slots=True)
class _Finished:
    fence: Fence


_Entry = _Started | _Waited | _Accessed | _Finished


class History:
    """The logs of all streams of one device. Any thread may use it."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        # The thread that submits to a stream appends to its log; the thread that reports removes entries.
        self._logs: defaultdict[str, deque[_Entry]] = defaultdict(deque)
        self._reported_ticks: Counter[str] = Counter()  # by stream
        self._reporting = threading.Lock()

    def submitted(self, fence: Fence, accesses: Accesses, label: str) -> None:
        """Report, at once, that the host is about to enqueue work on `fence.stream`."""
        self._tracer.submitted(fence, accesses, label)
        self._logs[fence.stream].append(_Started(fence))

    def waited(self, stream: str, fence: Fence) -> None:
        """Log that later work of `stream` waits for `fence`."""
        self._logs[stream].append(_Waited(fence))

    def touched(self, stream: str, accesses: Accesses) -> None:
        """Log that the work that is being enqueued on `stream` has declared more accesses."""
        self._logs[stream].append(_Accessed(accesses()))

    def enqueued(self, fence: Fence) -> None:
        """Log that all work of the fence was enqueued, and the event after it."""
        self._logs[fence.stream].append(_Finished(fence))

    def report_until(self, fence: Fence) -> None:
        """Report everything that happened before `fence`, which is done. Call it before other threads can see that."""
        with self._reporting:
            self._report(fence)

    def _report(self, fence: Fence) -> None:
        stream, tracer = fence.stream, self._tracer
        # The recursion ends, because each wait is for a fence of work that was enqueued before the wait.
        while self._reported_ticks[stream] < fence.tick and self._logs[stream]:
            match self._logs[stream].popleft():
                case _Started(own):
                    tracer.started(own)
                case _Waited(other):
                    self._report(other)
                    tracer.waited(stream, other)
                case _Accessed(accesses):
                    tracer.touched(stream, _returning(accesses))
                case _Finished(own):
                    tracer.finished(own)
                    self._reported_ticks[stream] = own.tick


def _returning(accesses: Sequence[Access]) -> Accesses:
    return lambda: accesses
