"""Spans of requests, as a collector over HTTP gets them."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from proof.fake_backend import QUEUE_S, FakeBackend, Script
from sidestream.errors import ConfigError
from sidestream.server import ServerOptions, bind, tracing
from sidestream.types import CachedTokens

from .serving import HI, serving

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector(http.server.ThreadingHTTPServer):
    """Keeps the spans that it gets; each answer waits for `going_on`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.resources: list[Any] = []
        self.spans: list[Any] = []
        self.asked, self.going_on = threading.Event(), threading.Event()
        self.going_on.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.asked.set()
        self.server.going_on.wait(20)
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.server.resources.append(values(group.resource.attributes))
            self.server.spans += [span for scope in group.scope_spans for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        try:
            yield found
        finally:
            found.going_on.set()
            found.shutdown()
            thread.join()


def values(attributes: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return [plain(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {one.key: plain(one.value) for one in attributes}


def test_each_request_has_a_span_with_its_tokens_and_times_below_its_parent(collector: Collector) -> None:
    backend = FakeBackend(Script(cached=CachedTokens(device=1, disk=2)))
    before = time.time_ns()
    with serving(backend, otlp_traces_endpoint=collector.url) as served:
        served.http.headers["traceparent"] = PARENT
        served.text(prompt="hi you", max_tokens=5, n=2, temperature=0.5, request_id="r1")
        del served.http.headers["traceparent"]
        served.chat(stream=True)
        served.http.post("/v1/messages", json={"model": "fake", "max_tokens": 3, "messages": HI})
        served.chat(model="other")
        served.http.get("/health")
    first, chat, message = collector.spans
    found = values(first.attributes)
    times = [found.pop(f"gen_ai.latency.{name}") for name in ("time_in_queue", "time_to_first_token", "e2e")]
    assert times[0] == QUEUE_S and 0 < times[1] <= times[2]
    assert found == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.id": "r1",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.n": 2,
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.prompt_tokens": 6,
        "gen_ai.usage.completion_tokens": 10,
        "gen_ai.usage.input_tokens": 6,
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "sidestream.cached_tokens.device": 1,
        "sidestream.cached_tokens.host": 0,
        "sidestream.cached_tokens.disk": 2,
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "url.path": "/v1/completions",
    }
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == tuple(PARENT.split("-")[1:3])
    assert before <= first.start_time_unix_nano < first.end_time_unix_nano <= time.time_ns()
    assert (first.name, first.kind, first.status.code) == ("llm_request", 2, 0)
    assert not chat.parent_span_id and values(message.attributes)["url.path"] == "/v1/messages"
    assert collector.resources[0]["service.name"] == "sidestream"


def test_a_failed_request_has_an_error_and_a_refused_one_no_span(collector: Collector) -> None:
    with serving(FakeBackend(Script(fail_after=1)), otlp_traces_endpoint=collector.url) as served:
        assert served.text().status_code == 500
        assert served.text(temperature=-1).status_code == 400
    (span,) = collector.spans
    assert span.status.code == 2 and values(span.attributes)["error.type"] == "internal_error"


def test_no_request_waits_for_a_collector_that_hangs_and_the_server_ends(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "_CLOSE_S", 0.1)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    collector.going_on.clear()
    with serving(otlp_traces_endpoint=collector.url) as served:
        served.text()
        assert collector.asked.wait(20)
        assert [served.text().status_code for _ in range(20)] == [200] * 20
    assert not served.thread.is_alive() and not collector.spans


@pytest.mark.parametrize("url", ["", "127.0.0.1:4317", "grpc://host:4317"])
def test_a_wrong_endpoint_is_an_error_before_the_server_starts(url: str) -> None:
    with pytest.raises(ConfigError, match="give the URL of a collector"):
        bind(ServerOptions(port=0, otlp_traces_endpoint=url))
