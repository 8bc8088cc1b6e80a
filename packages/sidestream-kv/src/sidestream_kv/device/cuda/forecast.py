"""Predicts when work on a stream will end, from earlier durations of work with the same label. Used by one thread."""

from __future__ import annotations

from collections import deque

# Number of labels that are kept; a label names a step's shape and size. The least recently used label is dropped first.
_MAX_LABELS = 256
_NUM_SAMPLES = 8


class Forecast:
    """Forecasts for one stream, whose work runs in order."""

    def __init__(self) -> None:
        self._seconds: dict[str, deque[float]] = {}
        self._last_end_s = 0.0

    def soonest_end_s(self, label: str, enqueued_s: float) -> float | None:
        """When the work will end if it takes the shortest of the last eight durations; None if the label is new."""
        seconds = self._seconds.get(label)
        return None if seconds is None else max(enqueued_s, self._last_end_s) + min(seconds)

    def ended(self, label: str, enqueued_s: float, now_s: float) -> None:
        """Record that the work has just ended."""
        seconds = self._seconds.pop(label, None) or deque(maxlen=_NUM_SAMPLES)
        seconds.append(now_s - max(enqueued_s, self._last_end_s))
        self._seconds[label] = seconds  # inserted again, so that the dict is in order of last use
        if len(self._seconds) > _MAX_LABELS:
            del self._seconds[next(iter(self._seconds))]
        self._last_end_s = now_s
