"""OpenTelemetry spans of requests, sent over OTLP/HTTP. Needs the packages of the extra `otel`.

A span has vLLM's attributes and those of the semantic conventions for generative AI. It is made when its request has
ended; a thread of the SDK sends it, or drops it if the collector is too slow.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from sidestream.errors import ConfigError
from sidestream.server.middleware import RequestRecord, route_of
from sidestream.version import VERSION

_SEND_S = 10.0
_CLOSE_S = 5.0


class Tracing:
    """Sends spans to a collector.

    endpoint   URL to which spans are posted, such as http://127.0.0.1:4318/v1/traces
    model      the served model's name
    """

    def __init__(self, endpoint: str, model: str) -> None:
        """Raises ConfigError if the packages are missing."""
        check_tracing(endpoint)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "sidestream"}
        resource = Resource.create({**named, "service.version": VERSION})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=_SEND_S)))
        self._tracer = self._provider.get_tracer("sidestream.server", VERSION)
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    def add(self, record: RequestRecord, scope: Scope) -> None:
        """Queue the span of a request that has ended, if the engine got it. Never blocks."""
        if record.params is None:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode

        ended_s, ended_ns = time.monotonic(), time.time_ns()
        found = self._attributes(record, scope, ended_s)
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(Headers(scope=scope)),
            kind=SpanKind.SERVER,
            start_time=ended_ns - int((ended_s - record.started) * 1e9),
            attributes={name: value for name, value in found.items() if value is not None},
        )
        if record.outcome != "ok":
            span.set_attribute("error.type", record.outcome)
            span.set_status(Status(StatusCode.ERROR))
        span.end(ended_ns)

    def close(self) -> None:
        """Send the spans that wait, at most five seconds."""
        thread = threading.Thread(target=self._provider.shutdown, name="sidestream-spans", daemon=True)
        thread.start()
        thread.join(_CLOSE_S)

    def _attributes(self, record: RequestRecord, scope: Scope, ended_s: float) -> dict[str, Any]:
        usage, params, path = record.usage, record.params, route_of(scope)
        assert params is not None
        return {
            "gen_ai.operation.name": "text_completion" if path == "/v1/completions" else "chat",
            "gen_ai.request.id": record.request_id,
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.n": params.n,
            "gen_ai.response.finish_reasons": record.finish_reasons,
            "gen_ai.usage.prompt_tokens": usage.prompt_tokens,
            "gen_ai.usage.completion_tokens": usage.output_tokens,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            **{f"sidestream.cached_tokens.{tier}": count for tier, count in usage.cached_by_tier.items()},
            "gen_ai.latency.time_in_queue": record.queue_s,
            "gen_ai.latency.time_to_first_token": record.first_token and record.first_token - record.started,
            "gen_ai.latency.e2e": ended_s - record.started,
            "http.request.method": scope["method"],
            "http.response.status_code": record.status,
            "url.path": path,
        }


def check_tracing(endpoint: str) -> None:
    """Raise ConfigError for a wrong URL, or if packages of the extra `otel` are missing."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        message = "give the URL of a collector, such as http://127.0.0.1:4318/v1/traces"
        raise ConfigError(f"otlp_traces_endpoint is {endpoint!r}: {message}")
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"otlp_traces_endpoint needs the package {missing.name}: pip install 'sidestream[otel]'"
        ) from missing
