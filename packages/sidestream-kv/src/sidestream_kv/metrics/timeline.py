"""Records the work on each stream over time, to write it as a Chrome/Perfetto trace with one track per stream, or to
read it while the engine works. Any thread may record.

Open the file at ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work on a track, in `[start_ns, stop_ns)` by `time.perf_counter_ns`."""

    track: str
    name: str
    start_ns: int
    stop_ns: int
    args: dict[str, int | float | str] = field(default_factory=dict)


_READ_FOR_NS = 2_000_000_000
"""After a read, a timeline that records on demand goes on for this time."""
_SLICE_NS = 250_000_000
_MAX_IN_SLICE = 500
"""Recording on demand stops for the rest of a slice after this number of spans, which bounds its cost."""


@dataclass(frozen=True, slots=True)
class Recent:
    """The newest spans of a timeline: track, name, start and stop of each.

    number   of spans recorded so far; the position for the next read
    now_ns   time of the read, by the clock of the spans
    """

    number: int
    now_ns: int
    spans: tuple[tuple[str, str, int, int], ...] = ()


class Timeline:
    """A record of at most `capacity` spans; the oldest spans are dropped.

    on_demand   record only for two seconds after each `read`, and at most 2,000 spans a second
    until_ns    `record` drops spans that end at this time or later, so callers may leave the call out
    """

    def __init__(self, capacity: int = 200_000, *, on_demand: bool = False) -> None:
        self._spans: deque[Span] = deque(maxlen=capacity)
        self._lock = threading.Lock()
        self._number = 0
        self.until_ns = 0 if on_demand else math.inf
        self._max_in_slice = _MAX_IN_SLICE if on_demand else math.inf
        self._slice_ends_ns = self._in_slice = 0

    def record(self, track: str, name: str, start_ns: int, stop_ns: int, **args: int | float | str) -> None:
        """Add one span, unless it ends too late."""
        if stop_ns >= self.until_ns:
            return
        with self._lock:
            if stop_ns >= self._slice_ends_ns:
                self._slice_ends_ns, self._in_slice = stop_ns + _SLICE_NS, 0
            self._in_slice += 1
            if self._in_slice <= self._max_in_slice:
                self._spans.append(Span(track, name, start_ns, stop_ns, args))
                self._number += 1

    def read(self, since: int) -> Recent:
        """The spans after position `since`, at most the newest 500. Keeps a timeline on demand recording."""
        now_ns = time.perf_counter_ns()
        with self._lock:
            if self.until_ns != math.inf:
                self.until_ns = now_ns + _READ_FOR_NS
            count = min(max(self._number - since, 0), len(self._spans), _MAX_IN_SLICE)
            newest = list(itertools.islice(reversed(self._spans), count))
            number = self._number
        spans = tuple((span.track, span.name, span.start_ns, span.stop_ns) for span in reversed(newest))
        return Recent(number, now_ns, spans)

    def spans(self) -> list[Span]:
        """A copy of all spans, in the order of recording."""
        with self._lock:
            return list(self._spans)

    def write(self, path: str | Path) -> Path:
        """Write the trace as JSON and return its path. The trace is written to a temporary file first, so the file at
        `path` is always complete.
        """
        target = Path(path)
        spans = self.spans()
        tracks = {name: index + 1 for index, name in enumerate(dict.fromkeys(span.track for span in spans))}
        origin = min((span.start_ns for span in spans), default=0)
        events: list[dict[str, object]] = [
            {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "sidestream"}}
        ]
        for name, tid in tracks.items():
            events.append({"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}})
            events.append({"ph": "M", "pid": 1, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
        for span in spans:
            events.append(
                {
                    "ph": "X",
                    "pid": 1,
                    "tid": tracks[span.track],
                    "name": span.name,
                    "ts": (span.start_ns - origin) / 1000,
                    "dur": (span.stop_ns - span.start_ns) / 1000,
                    "args": span.args,
                }
            )
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        partial.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
        partial.replace(target)
        return target
