"""Whether waiting for a tier is worth it: bytes over measured bandwidth against tokens over the measured prefill rate.

Pure arithmetic on moving averages. Written and read by the engine thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sidestream.kv.layout import KVLayout

_WEIGHT = 0.2
# A healthy tier's rate. It is assumed until a transfer was measured: with less, a fast GPU would rather compute, so
# that nothing is ever loaded and nothing ever measured.
_HEALTHY = {"host": 5e10, "disk": 2e9}
# After this long without a transfer, a slow rate is no longer believed either.
_STALE_S = 30.0


class CostModel:
    """Moving averages of what loading and computing cost.

    prefill_rate   tokens a second; None until a prefill was measured: then loading is always worth it
    """

    def __init__(self, layout: KVLayout, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._layout = layout
        self._clock = clock
        self._bytes_per_s: dict[str, float] = {}  # of the tiers that were measured
        self._measured_s: dict[str, float] = {}
        self.prefill_rate: float | None = None

    def saw_transfer(self, tier: str, num_bytes: int, seconds: float) -> None:
        """A transfer from `tier` moved `num_bytes` in `seconds` of its stream's time."""
        if seconds > 0:
            self._measured_s[tier] = self._clock()
            rate = num_bytes / seconds
            before = self._bytes_per_s.get(tier, rate)
            self._bytes_per_s[tier] = before + _WEIGHT * (rate - before)

    def saw_prefill(self, num_tokens: int, seconds: float) -> None:
        """A step computed `num_tokens` prompt tokens in `seconds`."""
        if seconds > 0:
            rate = num_tokens / seconds
            self.prefill_rate = (
                rate if self.prefill_rate is None else self.prefill_rate + _WEIGHT * (rate - self.prefill_rate)
            )

    def load_seconds(self, *, host_blocks: int, disk_blocks: int, queued_disk_bytes: int = 0) -> float:
        """Expected time until that many blocks are on the device; those on disk pass through the host."""
        size = self._layout.block_bytes
        from_disk = (disk_blocks * size + queued_disk_bytes) / self._rate("disk")
        return from_disk + (host_blocks + disk_blocks) * size / self._rate("host")

    def _rate(self, tier: str) -> float:
        """Bytes a second: at least a healthy tier's if it was not measured lately, else a tier that once stalled stays
        unused.
        """
        if tier not in self._bytes_per_s:
            return _HEALTHY[tier]
        rate, age_s = self._bytes_per_s[tier], self._clock() - self._measured_s[tier]
        return max(rate, _HEALTHY[tier]) if age_s > _STALE_S else rate

    def compute_seconds(self, num_blocks: int) -> float:
        """Expected time to compute that many blocks; infinite until a prefill was measured."""
        return num_blocks * self._layout.block_tokens / self.prefill_rate if self.prefill_rate else float("inf")
