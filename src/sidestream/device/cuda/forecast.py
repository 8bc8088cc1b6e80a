"""Forecasts the end of work on a stream from earlier durations of work with the same label. Called by one thread."""

from __future__ import annotations

from collections import deque

# Number of labels that are kept; a label names a step's shape and size. The least recently used label is dropped.
_MAX_LABELS = 256
_NUM_SAMPLES = 8


class Forecast:
    """The forecasts for one stream, whose work runs in order."""

    def __init__(self) -> None:
        self._seconds: dict[str, deque[float]] = {}
        self._last_end_s = 0.0

    def soonest_end_s(self, label: str, enqueued_s: float) -> float | None:
        """The end of the work if it takes the shortest of the last eight durations; None if no work had this label."""
        seconds = self._seconds.get(label)
        return None if seconds is None else max(enqueued_s, self._last_end_s) + min(seconds)

    def ended(self, label: str, enqueued_s: float, now_s: float) -> None:
        """Record that the work has just ended."""
        seconds = self._seconds.pop(label, None) or deque(maxlen=_NUM_SAMPLES)
        seconds.append(now_s - max(enqueued_s, self._last_end_s))
        self._seconds[label] = seconds  # the dict is ordered by last use
        if len(self._seconds) > _MAX_LABELS:
            del self._seconds[next(iter(self._seconds))]
        self._last_end_s = now_s
