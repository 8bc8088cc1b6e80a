"""What the connector has transferred, for vLLM's log and its /metrics."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from sidestream_kv.metrics import Metrics

# Name of vLLM's metric: metric of the transfer engine, its labels, documentation.
_COUNTERS = {
    "loaded_bytes": ("transfer_bytes_total", ("load",), "bytes of KV loaded from host memory"),
    "stored_bytes": ("transfer_bytes_total", ("store",), "bytes of KV stored to host memory"),
    "disk_read_bytes": ("transfer_bytes_total", ("disk-read",), "bytes of KV read from disk"),
    "disk_written_bytes": ("transfer_bytes_total", ("disk-write",), "bytes of KV written to disk"),
    "failed_loads": ("transfers_total", ("load", "failed"), "loads that failed, so the KV was computed"),
    "failed_stores": ("transfers_total", ("store", "failed"), "stores that failed, so the KV was not kept"),
}


class Stats(KVConnectorStats):  # type: ignore[misc]
    """Counts since the last step, by the names of `_COUNTERS`."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or {})
        self._before = [0.0] * len(_COUNTERS)

    def since(self, metrics: Metrics) -> Stats | None:
        """What was counted since the last call; None: nothing."""
        now = metrics.values((metric, labels) for metric, labels, _ in _COUNTERS.values())
        before, self._before = self._before, now
        if now == before:
            return None
        return Stats({name: value - old for name, value, old in zip(_COUNTERS, now, before, strict=True)})

    def reset(self) -> None:
        """Forget all counts."""
        self.data.clear()

    def aggregate(self, other: Any) -> Stats:
        """The sums."""
        names = {*self.data, *other.data}
        return Stats({name: self.data.get(name, 0) + other.data.get(name, 0) for name in names})

    def reduce(self) -> dict[str, int | float]:
        """For a line of the log."""
        return {name: int(value) for name, value in self.data.items() if value}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())


def prometheus_metrics(
    vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
) -> Any:
    """Counters `vllm:sidestream_*` for /metrics."""
    return _Prometheus(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class _Prometheus(KVConnectorPromMetrics):  # type: ignore[misc]
    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, (_, _, documentation) in _COUNTERS.items():
            counter = metric_types[Counter](f"vllm:sidestream_{name}", documentation, labelnames=labelnames)
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of one step."""
        for name, value in transfer_stats_data.items():
            if value > 0:
                self._counters[name][engine_idx].inc(value)
