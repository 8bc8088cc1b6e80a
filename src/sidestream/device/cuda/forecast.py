"""When work that somebody waits for will end, by how long work of that name took before. Pure; used by the thread that
waits.
"""

from __future__ import annotations

from collections import deque

# Names are as many as there are sizes of steps; those that were not seen for long are forgotten.
_MOST_NAMES = 256
_MEMORY = 8


class Forecast:
    """Of the work of one stream, which runs one after another."""

    def __init__(self) -> None:
        self._seconds: dict[str, deque[float]] = {}
        self._last_end_s = 0.0

    def soonest_end_s(self, label: str, enqueued_s: float) -> float | None:
        """The soonest that it ended, of the last eight times; None: it is the first of its name."""
        seconds = self._seconds.get(label)
        return None if seconds is None else max(enqueued_s, self._last_end_s) + min(seconds)

    def ended(self, label: str, enqueued_s: float, now_s: float) -> None:
        """It was seen to have ended just now."""
        seconds = self._seconds.pop(label, None) or deque(maxlen=_MEMORY)
        seconds.append(now_s - max(enqueued_s, self._last_end_s))
        self._seconds[label] = seconds  # behind all others
        if len(self._seconds) > _MOST_NAMES:
            del self._seconds[next(iter(self._seconds))]
        self._last_end_s = now_s
