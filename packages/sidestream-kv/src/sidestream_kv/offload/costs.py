"""Estimates whether loading KV from a tier (host memory or disk) is faster than computing it again.

A transfer from a tier takes latency + bytes / bandwidth. Both are medians of the tier's last measurements:

    bandwidth  rate of transfers of at least 16 MiB, and of smaller ones that were faster than the estimate
    latency    time of smaller transfers beyond bytes / bandwidth

Most of a small transfer's time is fixed, so it says little about the bandwidth. The assumption that a tier is healthy
counts as its first measurement, so that one slow transfer alone changes nothing. After 30 s without a measurement, the
tier counts as healthy again: otherwise a tier that was slow once would never be used, nor measured, again. The next
measurement then decides between the assumption and the last estimate.

The time to compute is tokens / prefill rate, a moving average. The offload worker records transfers, and the engine
thread reads the estimates.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median_high, median_low

from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.types import HOST

# Weight of a new measurement in the moving average of the prefill rate.
_WEIGHT = 0.2
# Number of measurements in a median.
_WINDOW = 5
# Transfers of at least this many bytes tell the bandwidth: at 20 GB/s they take 0.8 ms, much more than their start.
_LARGE_BYTES = 16 << 20
# Rates in bytes/s that are assumed for host memory and for other tiers until a transfer was measured. They are high on
# purpose: with low rates, a fast GPU would always compute, so no transfer would ever be measured.
_HEALTHY_HOST = 5e10
_HEALTHY_TIER = 2e9
# If the last measurement of a tier is older than this, the tier is assumed to be healthy again.
_STALE_S = 30.0


@dataclass(frozen=True, slots=True)
class _Estimate:
    """`measured_s`: time of the last measurement; infinite before the first one."""

    latency_s: float
    bytes_per_s: float
    measured_s: float = math.inf

    def seconds(self, num_bytes: int, *, num_transfers: int = 1) -> float:
        return num_transfers * self.latency_s + num_bytes / self.bytes_per_s


class _TierCosts:
    """The measurements of one tier. `estimate` is replaced as a whole, because another thread reads it."""

    def __init__(self, healthy: _Estimate) -> None:
        self._healthy = self.estimate = healthy
        self._begin(healthy)

    def _begin(self, *assumed: _Estimate) -> None:
        self._rates = deque((one.bytes_per_s for one in assumed), maxlen=_WINDOW)
        self._small = deque(((0, one.latency_s) for one in assumed), maxlen=_WINDOW)  # bytes and seconds

    def measured(self, num_bytes: int, seconds: float, now_s: float) -> None:
        if _is_stale(self.estimate, now_s):
            self._begin(self._healthy, self.estimate)
        rate = num_bytes / seconds
        if num_bytes >= _LARGE_BYTES or rate > self.estimate.bytes_per_s:
            self._rates.append(rate)
        if num_bytes < _LARGE_BYTES:
            self._small.append((num_bytes, seconds))
        bytes_per_s = median_high(self._rates)
        latency_s = median_low(max(0.0, taken_s - size / bytes_per_s) for size, taken_s in self._small)
        self.estimate = _Estimate(latency_s, bytes_per_s, now_s)


class CostModel:
    """Estimates of the transfer times of each tier, and of the prefill rate.

    prefill_rate   measured prompt tokens per second. None: not measured yet, and loading counts as faster
    """

    def __init__(self, layout: KVLayout, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._layout = layout
        self._clock = clock
        self._tiers: dict[str, _TierCosts] = {}
        self.prefill_rate: float | None = None

    def saw_transfer(self, tier: str, num_bytes: int, seconds: float) -> None:
        """Record that a transfer from `tier` moved `num_bytes` and occupied its stream for `seconds`."""
        if seconds > 0:
            if tier not in self._tiers:
                self._tiers[tier] = _TierCosts(_healthy(tier))
            self._tiers[tier].measured(num_bytes, seconds, self._clock())

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
        slower tiers are first read into host memory, one transfer for each, so both times add up.
        """
        size = self._layout.block_bytes
        promoted_s = sum(
            self._estimate(tier).seconds(count * size, num_transfers=count)
            for tier, count in blocks.items()
            if tier != HOST
        )
        return promoted_s + self.seconds_from_host(num_loaded, num_partial=num_partial)

    def seconds_from_host(self, num_blocks: int, *, num_partial: int = 0) -> float:
        """Expected time to load that many blocks from the host tier, `num_partial` of them without the layers with a
        sliding window.
        """
        layout = self._layout
        num_bytes = (num_blocks - num_partial) * layout.block_bytes + num_partial * layout.partial_bytes
        return self._estimate(HOST).seconds(num_bytes) if num_blocks else 0.0

    def _estimate(self, tier: str) -> _Estimate:
        """The estimate of a tier. If it is stale, it is not worse than that of a healthy tier."""
        costs = self._tiers.get(tier)
        if costs is None:
            return _healthy(tier)
        estimate = costs.estimate
        if _is_stale(estimate, self._clock()):
            return _Estimate(0.0, max(estimate.bytes_per_s, _healthy(tier).bytes_per_s))
        return estimate

    def compute_seconds(self, num_blocks: int) -> float:
        """Expected duration of the prefill of that many blocks; infinite until a prefill was measured."""
        return num_blocks * self._layout.block_tokens / self.prefill_rate if self.prefill_rate else float("inf")


def _healthy(tier: str) -> _Estimate:
    return _Estimate(0.0, _HEALTHY_HOST if tier == HOST else _HEALTHY_TIER)


def _is_stale(estimate: _Estimate, now_s: float) -> bool:
    """Whether the tier may have changed since its last measurement."""
    return now_s - estimate.measured_s > _STALE_S
