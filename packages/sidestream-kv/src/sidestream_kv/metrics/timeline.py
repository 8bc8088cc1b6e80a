"""Records the work on each stream over time, and writes it as a Chrome/Perfetto trace with one track per stream. Any
thread may record.

Open the file at ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

import json
import os
import threading
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


class Timeline:
    """A record of at most `capacity` spans; the oldest spans are dropped."""

    def __init__(self, capacity: int = 200_000) -> None:
        self._spans: deque[Span] = deque(maxlen=capacity)
        self._lock = threading.Lock()

    def record(self, track: str, name: str, start_ns: int, stop_ns: int, **args: int | float | str) -> None:
        """Add one span."""
        with self._lock:
            self._spans.append(Span(track, name, start_ns, stop_ns, args))

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
