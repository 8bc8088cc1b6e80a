"""/metrics in the Prometheus text format, read by Prometheus' own parser."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from proof.fake_backend import FakeBackend
from sidestream.errors import ConfigError
from sidestream.server.metrics import render
from sidestream.server.options import ServerOptions
from sidestream_kv.metrics import METRICS, Metrics

from .serving import serving


def _samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_the_engines_values_are_served_with_their_labels() -> None:
    backend = FakeBackend()
    backend.metrics.inc("requests_total", 2, "stop")
    backend.metrics.set("blocks_free", 7)
    with serving(backend) as served:
        reply = served.http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=")
    samples = _samples(reply.text)
    assert samples["sidestream_requests_total", (("finish_reason", "stop"),)] == 2
    assert samples["sidestream_blocks_free", ()] == 7
    assert samples["sidestream_model_info", (("model_name", "fake"),)] == 1


def test_every_declared_metric_is_rendered_before_its_first_write() -> None:
    text = render(Metrics().snapshot()).decode()
    names = {family.name for family in text_string_to_metric_families(text)}
    assert names == {f"sidestream_{name.removesuffix('_total')}" for name in METRICS}
    assert _samples(text)["sidestream_steps_total", ()] == 0


def test_values_observed_together_equal_values_observed_one_by_one() -> None:
    at_once, one_by_one = Metrics(), Metrics()
    at_once.observe_all("itl_seconds", {0.002: 3, 0.3: 2, 1000.0: 1})
    for seconds in (0.002, 0.002, 0.002, 0.3, 0.3, 1000.0):
        one_by_one.observe("itl_seconds", seconds)
    assert _samples(render(at_once.snapshot()).decode()) == _samples(render(one_by_one.snapshot()).decode())


def test_histogram_buckets_are_cumulative() -> None:
    metrics = Metrics()
    for seconds in (0.001, 0.002, 0.3, 1000.0):
        metrics.observe("ttft_seconds", seconds)
    samples = _samples(render(metrics.snapshot()).decode())
    buckets = [value for (name, _), value in samples.items() if name == "sidestream_ttft_seconds_bucket"]
    assert buckets == sorted(buckets)
    assert samples["sidestream_ttft_seconds_bucket", (("le", "0.001"),)] == 1
    assert samples["sidestream_ttft_seconds_bucket", (("le", "0.5"),)] == 3
    assert (
        samples["sidestream_ttft_seconds_bucket", (("le", "+Inf"),)]
        == samples["sidestream_ttft_seconds_count", ()]
        == 4
    )
    assert samples["sidestream_ttft_seconds_sum", ()] == 1000.303


def test_the_replica_name_is_a_label_of_metrics_and_a_header_of_replies() -> None:
    backend = FakeBackend()
    backend.metrics.inc("requests_total", 2, "stop")
    backend.metrics.observe("ttft_seconds", 0.3)
    with serving(backend, replica="host1-gpu0") as served:
        reply, refused = served.http.get("/metrics"), served.http.get("/nowhere")
    samples = _samples(reply.text)
    assert all(dict(labels)["replica"] == "host1-gpu0" for _, labels in samples)
    assert samples["sidestream_requests_total", (("finish_reason", "stop"), ("replica", "host1-gpu0"))] == 2
    assert samples["sidestream_ttft_seconds_count", (("replica", "host1-gpu0"),)] == 1
    assert {reply.headers["x-sidestream-replica"], refused.headers["x-sidestream-replica"]} == {"host1-gpu0"}


@pytest.mark.parametrize("name", ["two words", 'quo"te', "ä", "x" * 129])
def test_a_replica_name_that_is_no_valid_header_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"replica is .*: give up to 128 letters, digits"):
        ServerOptions(replica=name)
