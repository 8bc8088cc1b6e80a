"""What a tracer is told of a device that does not say when it does what: each stream's past, once a fence shows that it
is past.

A GPU reports neither when work starts nor when a wait is over. But when a fence is done, so is all before it on its
stream, and so is everything that was waited for in there; told in that order, as if it happened just then, a tracer
learns exactly what the fences prove.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from sidestream.types import Access, Accesses, Fence, Tracer


@dataclass(frozen=True, slots=True)
class _Started:
    fence: Fence


@dataclass(frozen=True, slots=True)
class _Waited:
    fence: Fence


@dataclass(frozen=True, slots=True)
class _Touched:
    accesses: Sequence[Access]


@dataclass(frozen=True, slots=True)
class _Finished:
    fence: Fence


_Entry = _Started | _Waited | _Touched | _Finished


class History:
    """Logs of all streams of one device, told to the tracer as far as their fences are done. From any thread."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._logs: defaultdict[str, deque[_Entry]] = defaultdict(
            deque
        )  # the stream's submitters add, whoever tells takes away
        self._told: Counter[str] = Counter()  # up to which tick, by stream
        self._telling = threading.Lock()

    def submitted(self, fence: Fence, accesses: Accesses, label: str) -> None:
        """The host is about to enqueue work on `fence.stream`: told at once."""
        self._tracer.submitted(fence, accesses, label)
        self._logs[fence.stream].append(_Started(fence))

    def waited(self, stream: str, fence: Fence) -> None:
        """What `stream` is given from now on comes behind `fence`."""
        self._logs[stream].append(_Waited(fence))

    def touched(self, stream: str, accesses: Accesses) -> None:
        """The work that `stream` is being given touches this from here on."""
        self._logs[stream].append(_Touched(accesses()))

    def enqueued(self, fence: Fence) -> None:
        """All of the fence's work was enqueued, and its mark behind it."""
        self._logs[fence.stream].append(_Finished(fence))

    def done(self, fence: Fence) -> None:
        """`fence` was seen done: tell what led to it. Before anybody else learns that it is."""
        with self._telling:
            self._tell(fence)

    def _tell(self, fence: Fence) -> None:
        stream, tracer = fence.stream, self._tracer
        # A fence that was waited for was made earlier, so what it waited for was, too: the logs lead back, never round
        # in a circle.
        while self._told[stream] < fence.tick and self._logs[stream]:
            match self._logs[stream].popleft():
                case _Started(own):
                    tracer.started(own)
                case _Waited(other):
                    self._tell(other)
                    tracer.waited(stream, other)
                case _Touched(accesses):
                    tracer.touched(stream, partial(_said, accesses))
                case _Finished(own):
                    tracer.finished(own)
                    self._told[stream] = own.tick


def _said(accesses: Sequence[Access]) -> Sequence[Access]:
    return accesses
