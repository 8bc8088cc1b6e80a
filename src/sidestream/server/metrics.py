"""`/metrics`: an engine's metrics in the Prometheus text format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from sidestream_kv.metrics import METRICS, MetricsSnapshot
from sidestream_kv.metrics.counters import Declared, HistogramValue, Labels

__all__ = ["CONTENT_TYPE_LATEST", "render"]


def render(metrics: MetricsSnapshot, *, replica: str = "", model_name: str = "") -> bytes:
    """All declared metrics in the text format. Names get the prefix `sidestream_`. If `replica` is given, it is a label
    of every metric; if `model_name` is given, `model_info` has it.
    """
    if model_name:
        metrics = MetricsSnapshot({**metrics.values, "model_info": {(model_name,): 1}}, metrics.histograms)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(families(metrics, replica=replica))
    return generate_latest(registry)


def families(metrics: MetricsSnapshot, *, replica: str = "") -> Collector:
    """The same metrics as a collector of Prometheus' client. `collect` yields families of samples with names and
    labels.
    """
    return _Snapshot(metrics, {"replica": replica} if replica else {})


class _Snapshot(Collector):
    """A copy of all values at one moment, for one scrape."""

    def __init__(self, metrics: MetricsSnapshot, common: Mapping[str, str]) -> None:
        self._metrics = metrics
        self._common = common

    def collect(self) -> Iterator[Metric]:
        for name, declared in METRICS.items():
            if declared.kind == "histogram":
                yield _histogram(name, declared, self._metrics.histograms.get(name, {}), self._common)
            else:
                yield _single(name, declared, self._metrics.values.get(name, {}), self._common)


def _single(name: str, declared: Declared, series: Mapping[Labels, float], common: Mapping[str, str]) -> Metric:
    labels = (*common, *declared.labels)
    if declared.kind == "counter":
        family: CounterMetricFamily | GaugeMetricFamily = CounterMetricFamily(
            f"sidestream_{name}", declared.help, labels=labels
        )
    else:
        family = GaugeMetricFamily(f"sidestream_{name}", declared.help, labels=labels)
    # A metric without labels has one series. It is zero before the first write, because an absent series breaks rate().
    for values, value in (series or ({} if declared.labels else {(): 0.0})).items():
        family.add_metric((*common.values(), *values), value)
    return family


def _histogram(
    name: str, declared: Declared, series: Mapping[Labels, HistogramValue], common: Mapping[str, str]
) -> Metric:
    family = HistogramMetricFamily(f"sidestream_{name}", declared.help, labels=(*common, *declared.labels))
    empty = {} if declared.labels else {(): HistogramValue([0] * (len(declared.buckets) + 1))}
    bounds = [*(str(bound) for bound in declared.buckets), "+Inf"]
    for labels, value in (series or empty).items():
        buckets = list(zip(bounds, accumulate(value.counts), strict=True))
        family.add_metric((*common.values(), *labels), buckets, value.total)
    return family
