"""Counters, gauges and histograms, declared in one table (`METRICS`). Any thread may write; readers take a snapshot.

Knows nothing about Prometheus: `server/metrics.py` renders the snapshot.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

# Bounds of histogram buckets in seconds: for whole steps and requests, and for parts of a step.
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_STEP_PARTS = (0.0001, 0.00025, 0.0005, *_SECONDS)


@dataclass(frozen=True, slots=True)
class Declared:
    """A row of the table: kind, help text and label names of a metric, and the bucket bounds of a histogram."""

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


METRICS: Mapping[str, Declared] = {
    "requests_total": Declared("counter", "requests that ended, by finish reason", ("finish_reason",)),
    "prompt_tokens_total": Declared("counter", "tokens of submitted prompts"),
    "output_tokens_total": Declared("counter", "tokens emitted"),
    "cached_tokens_total": Declared(
        "counter", "prompt tokens not computed again, by the tier that held their KV", ("tier",)
    ),
    "prefill_measured_tokens_total": Declared(
        "counter", "tokens of steps that were mostly prefill and waited for no load"
    ),
    "prefill_measured_seconds_total": Declared(
        "counter", "seconds of these steps: with their tokens, the prefill rate"
    ),
    "preemptions_total": Declared("counter", "running requests preempted for lack of blocks, rows or priority"),
    "steps_total": Declared("counter", "steps launched"),
    "step_seconds": Declared("histogram", "time of a step on the device", (), _SECONDS),
    "queue_seconds": Declared("histogram", "time from the arrival of a request to its first step", (), _SECONDS),
    "e2e_seconds": Declared("histogram", "time from the arrival of a request to its last token", (), _SECONDS),
    "ttft_seconds": Declared("histogram", "time from the arrival of a request to its first token", (), _SECONDS),
    "itl_seconds": Declared("histogram", "time between two tokens of a request", (), _SECONDS),
    "draft_tokens_total": Declared("counter", "tokens drafted, by proposer", ("proposer",)),
    "accepted_tokens_total": Declared("counter", "drafts that the model accepted, by proposer", ("proposer",)),
    "accept_length": Declared(
        "histogram",
        "tokens that a request with drafts gains in a step",
        ("proposer",),
        tuple(float(count) for count in range(1, 18)),
    ),
    "draft_seconds": Declared("histogram", "device time of drafting in a step with drafts", ("proposer",), _STEP_PARTS),
    "verify_seconds": Declared(
        "histogram", "device time of the forward pass in a step with drafts", ("proposer",), _STEP_PARTS
    ),
    "draft_fallbacks_total": Declared("counter", "steps of requests without drafts, by reason", ("reason",)),
    "self_check_steps_total": Declared("counter", "steps whose forward pass ran twice for the self-check"),
    "self_check_tokens_total": Declared("counter", "tokens of the steps that ran twice"),
    "self_check_disagreements_total": Declared("counter", "rows of steps that ran twice and whose two runs differed"),
    "self_check_blocks_total": Declared(
        "counter", "blocks whose checksum was compared before they were loaded from host memory, by result", ("result",)
    ),
    "self_check_seconds_total": Declared(
        "counter", "seconds of the self-check: second runs on the device, checksums on the offload worker", ("part",)
    ),
    "transfers_total": Declared("counter", "transfers that ended, by kind and outcome", ("kind", "outcome")),
    "transfer_bytes_total": Declared("counter", "bytes of transfers that succeeded, by kind", ("kind",)),
    "transfer_seconds": Declared(
        "histogram", "time from submission to completion of a transfer, by kind", ("kind",), _SECONDS
    ),
    "load_fallbacks_total": Declared(
        "counter", "requests that recomputed instead of waiting for a load, by reason", ("reason",)
    ),
    "host_waits_total": Declared(
        "counter", "times a thread waited for a fence that was not done, by reason", ("reason",)
    ),
    "kv_event_batches_total": Declared("counter", "batches of KV events, by outcome", ("outcome",)),
    "early_prefix_breaks_total": Declared(
        "counter",
        "prompts that differed from earlier ones at an early place that was logged, with the same text behind",
    ),
    "log_lines_lost_total": Declared("counter", "lines that API processes did not log, because the log was not read"),
    "audit_lines_lost_total": Declared("counter", "lines of the audit log that could not be written"),
    "rate_limited_total": Declared("counter", "requests that an API key's limits refused", ("limit",)),
    "connections_refused_total": Declared("counter", "connections that the server closed, by reason", ("reason",)),
    "engine_ready_seconds": Declared("gauge", "time from the start of the process until its engine served"),
    "model_info": Declared("gauge", "1, with the name of the served model", ("model_name",)),
    "metrics_age_seconds": Declared("gauge", "age of all other values: above 0 while the engine does not answer"),
    "admission_paused": Declared("gauge", "1 while new requests wait until the server is resumed"),
    "requests_running": Declared("gauge", "running requests"),
    "requests_waiting": Declared("gauge", "requests that are queued or whose KV is being loaded"),
    "blocks_free": Declared("gauge", "free device blocks"),
    "blocks_cached": Declared("gauge", "device blocks that hold a reusable prefix and are used by no request"),
    "blocks_used": Declared("gauge", "device blocks in use"),
    "states": Declared("gauge", "recurrent states on the device: free, cached or used", ("status",)),
    "kv_memory_bytes": Declared("gauge", "bytes of the device that KV and recurrent states take, by part", ("part",)),
    "kv_token_bytes": Declared("gauge", "bytes of KV for one token of context"),
    "tier_bytes": Declared("gauge", "bytes held by a tier", ("tier",)),
    "tier_ready_bytes": Declared(
        "gauge", "bytes of a tier's memory that are ready; the rest is still being pinned", ("tier",)
    ),
    "tier_blocks": Declared("gauge", "blocks held by a tier", ("tier",)),
    "tier_saved_seconds_total": Declared(
        "counter", "computing that loads made unnecessary, as expected, less the time they took", ("tier",)
    ),
    "tier_lost_seconds_total": Declared(
        "counter", "time that loads took beyond that of computing, and of loads that failed", ("tier",)
    ),
    "tier_wait_seconds_total": Declared("counter", "time that loads from a tier took", ("tier",)),
    "tier_expected_seconds_total": Declared("counter", "time that these loads were expected to take", ("tier",)),
    "tier_loads_total": Declared("counter", "loads that paid (useful) or took too long (wasted)", ("tier", "outcome")),
    "tier_turned_down": Declared("gauge", "1 while a tier is hardly read, because its last loads lost time", ("tier",)),
    "kv_error": Declared("gauge", "relative error of KV that tiers hold in 8 bits: keys, values, latents", ("part",)),
    "tier_works": Declared("gauge", "1 if the last write to a persistent tier succeeded, else 0", ("tier",)),
}

Labels = tuple[str, ...]


@dataclass(slots=True)
class HistogramValue:
    """Number of observations per bucket (not cumulative), and sum and number of all observations."""

    counts: list[int]
    total: float = 0.0
    count: int = 0


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """Copies of all values at one moment, by name and labels. `values` has the counters and gauges."""

    values: Mapping[str, Mapping[Labels, float]]
    histograms: Mapping[str, Mapping[Labels, HistogramValue]]


class Metrics:
    """One engine's values of the declared metrics.

    Raises KeyError for an undeclared name, ValueError for a wrong kind or number of labels.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, dict[Labels, float]] = {}
        self._histograms: dict[str, dict[Labels, HistogramValue]] = {}

    def inc(self, name: str, value: float = 1, *labels: str) -> None:
        """Add to a counter."""
        self._check(name, "counter", labels)
        with self._lock:
            series = self._values.setdefault(name, {})
            series[labels] = series.get(labels, 0) + value

    def raise_to(self, name: str, value: float, *labels: str) -> None:
        """Raise a counter to `value`, if it is lower. For a value that another object counts."""
        self._check(name, "counter", labels)
        with self._lock:
            series = self._values.setdefault(name, {})
            series[labels] = max(series.get(labels, 0), value)

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge."""
        self._check(name, "gauge", labels)
        with self._lock:
            self._values.setdefault(name, {})[labels] = value

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Add one observation to a histogram."""
        self.observe_all(name, {value: 1}, *labels)

    def observe_all(self, name: str, values: Mapping[float, int], *labels: str) -> None:
        """Add observations to a histogram; `values` maps each value to its number of observations. Cheaper than a call
        of `observe` for each.
        """
        declared = self._check(name, "histogram", labels)
        if not values:
            return
        with self._lock:
            series = self._histograms.setdefault(name, {})
            histogram = series.get(labels)
            if histogram is None:
                histogram = series[labels] = HistogramValue([0] * (len(declared.buckets) + 1))
            for value, times in values.items():
                histogram.counts[bisect.bisect_left(declared.buckets, value)] += times
                histogram.total += value * times
                histogram.count += times

    def value(self, name: str, *labels: str) -> float:
        """Current value of a counter or gauge; 0 before the first write."""
        with self._lock:
            return self._values.get(name, {}).get(labels, 0)

    def values(self, series: Iterable[tuple[str, Labels]]) -> list[float]:
        """Current values of counters and gauges, by name and labels. Cheaper than a call of `value` for each."""
        with self._lock:
            return [self._values.get(name, {}).get(labels, 0) for name, labels in series]

    def snapshot(self) -> MetricsSnapshot:
        """Copies of all values."""
        with self._lock:
            values = {name: dict(series) for name, series in self._values.items()}
            histograms = {
                name: {labels: HistogramValue(list(h.counts), h.total, h.count) for labels, h in series.items()}
                for name, series in self._histograms.items()
            }
        return MetricsSnapshot(values, histograms)

    @staticmethod
    def _check(name: str, kind: str, labels: Labels) -> Declared:
        declared = METRICS[name]
        if declared.kind != kind or len(declared.labels) != len(labels):
            raise ValueError(
                f"metric {name} is a {declared.kind} with labels {declared.labels}, written as {kind} with {labels}"
            )
        return declared
