"""A line in the log about what tiers did: once a minute, if there was anything."""

from __future__ import annotations

import logging

from sidestream.engine.parts import Parts
from sidestream_kv.types import HOST

logger = logging.getLogger(__name__)

PERIOD_S = 60.0


class TierLog:
    """What tiers did since the last line. Engine thread only."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._since_s = parts.device.now()
        self.due_s = self._since_s + PERIOD_S
        """When the next line is due."""
        self._before: dict[tuple[str, str], float] = {}

    def update(self, now_s: float) -> None:
        """Log a line. Call it when one is due."""
        since_s, self._since_s, self.due_s = self._since_s, now_s, now_s + PERIOD_S
        if self._parts.tiers is None:
            return
        told = [self._told(HOST, "store", "load")]
        told += [self._told(name, f"{name}-write", f"{name}-read") for name in self._parts.tiers.persistent]
        if any(told):
            logger.info("in %.0f s, %s", now_s - since_s, "; ".join(filter(None, told)))

    def _told(self, tier: str, writes: str, reads: str) -> str:
        written, read = self._grown("transfer_bytes_total", writes), self._grown("transfer_bytes_total", reads)
        saved, lost = self._grown("tier_saved_seconds_total", tier), self._grown("tier_lost_seconds_total", tier)
        if not (written or read or saved or lost):
            return ""
        waits = ""
        if saved or lost:
            waits = f", requests waited {saved:.1f} s less and {lost:.1f} s more than computing takes"
        return f"{tier}: {written / 1e6:,.0f} MB written, {read / 1e6:,.0f} MB read{waits}"

    def _grown(self, metric: str, label: str) -> float:
        value = self._parts.metrics.value(metric, label)
        before = self._before.get((metric, label), 0.0)
        self._before[metric, label] = value
        return value - before
