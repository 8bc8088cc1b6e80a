"""Estimates whether loading KV from a tier (host memory or disk) is faster than computing it again.

The time to load is bytes / measured bandwidth; the time to compute is tokens / measured prefill rate. Both rates are
moving averages. The offload worker writes the transfer rates, and the engine thread reads them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from sidestream.kv.layout import KVLayout
from sidestream.types import HOST

# Weight of a new measurement in a moving average.
_WEIGHT = 0.2
# Rates in bytes/s that are assumed for host memory and for other tiers until a transfer was measured. They are high on
# purpose: with low rates, a fast GPU would always compute, so no transfer would ever be measured.
_HEALTHY_HOST = 5e10
_HEALTHY_TIER = 2e9
# If the last measurement of a tier is older than this, the tier is assumed to be healthy again.
_STALE_S = 30.0


class CostModel:
    """Moving averages of the transfer rates and of the prefill rate.

    prefill_rate   measured prompt tokens per second. None: not measured yet, and loading counts as faster
    """

    def __init__(self, layout: KVLayout, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._layout = layout
        self._clock = clock
        self._bytes_per_s: dict[str, float] = {}  # by tier, for measured tiers only
        self._measured_s: dict[str, float] = {}
        self.prefill_rate: float | None = None

    def saw_transfer(self, tier: str, num_bytes: int, seconds: float) -> None:
        """Record that a transfer from `tier` moved `num_bytes` and occupied its stream for `seconds`."""
        if seconds > 0:
            self._measured_s[tier] = self._clock()
            rate = num_bytes / seconds
            before = self._bytes_per_s.get(tier, rate)
            self._bytes_per_s[tier] = before + _WEIGHT * (rate - before)

    def saw_prefill(self, num_tokens: int, seconds: float) -> None:
        """Record that a step computed `num_tokens` prompt tokens in `seconds`."""
        if seconds > 0:
            rate = num_tokens / seconds
            self.prefill_rate = (
                rate if self.prefill_rate is None else self.prefill_rate + _WEIGHT * (rate - self.prefill_rate)
            )

    def load_seconds(self, blocks: Mapping[str, int], *, num_loaded: int, num_partial: int = 0) -> float:
        """Expected time until `num_loaded` blocks are on the device, `num_partial` of them without the layers with a
        sliding window.

        `blocks` is the number of blocks to read from each tier, including reads that are queued already. Blocks of
        slower tiers are first read into host memory, so both times add up.
        """
        size = self._layout.block_bytes
        promoted_s = sum(count * size / self._rate(tier) for tier, count in blocks.items() if tier != HOST)
        return promoted_s + self.seconds_from_host(num_loaded, num_partial=num_partial)

    def seconds_from_host(self, num_blocks: int, *, num_partial: int = 0) -> float:
        """Expected time to load that many blocks from the host tier, `num_partial` of them without the layers with a
        sliding window.
        """
        layout = self._layout
        num_bytes = (num_blocks - num_partial) * layout.block_bytes + num_partial * layout.partial_bytes
        return num_bytes / self._rate(HOST)

    def _rate(self, tier: str) -> float:
        """Estimated bytes per second of a tier. If the last measurement is old, the estimate is at least the assumed
        rate: otherwise a tier that was slow once would never be used, nor measured, again.
        """
        healthy = _HEALTHY_HOST if tier == HOST else _HEALTHY_TIER
        if tier not in self._bytes_per_s:
            return healthy
        rate, age_s = self._bytes_per_s[tier], self._clock() - self._measured_s[tier]
        return max(rate, healthy) if age_s > _STALE_S else rate

    def compute_seconds(self, num_blocks: int) -> float:
        """Expected duration of the prefill of that many blocks; infinite until a prefill was measured."""
        return num_blocks * self._layout.block_tokens / self.prefill_rate if self.prefill_rate else float("inf")
