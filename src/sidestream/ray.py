"""Replicas of a model on Ray Serve: engines behind an ingress. Ray's own routers choose the replica for each request.
Needs the extra `ray`.

`build_app` builds the application, for Ray's config files (`import_path: sidestream.ray:build_app`) and for
`serve.run`. An application has two deployments:

Engines   each replica has an engine in a separate process and, in front of it, the HTTP API of `sidestream serve`. It
          exchanges ASGI messages with the ingress
Ingress   takes requests from Ray's HTTP proxy, passes the request's session or prompt to the router, and replies with
          503 if the replica is lost or no replica takes the request in time

Ray's packages are imported on first use, so that the options can be checked without Ray.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from sidestream.config import EngineConfig, SpeculativeConfig
from sidestream.errors import ConfigError, EngineStopped
from sidestream.server.app import create_app
from sidestream.server.body import JsonResponse, to_json
from sidestream.server.errors import ApiError
from sidestream.server.metrics import families
from sidestream.server.options import ServerOptions
from sidestream_kv.config import OffloadConfig, unknown_name
from sidestream_kv.device.kinds import CPU, CUDA
from sidestream_kv.metrics import MetricsSnapshot

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle

_Made = TypeVar("_Made")

ROUTERS = {
    "session": "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter",
    # The public name, ray.serve.llm.request_router, cannot be imported without vLLM or SGLang.
    "prefix": "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter",
}
"""Ray's routers by short name. `session` routes by a session header, `prefix` by the longest known prefix of the
prompt.
"""

APP_NAME = "sidestream"
"""Name of the application that `serve_locally` runs."""

_OF_THE_PROXY = (
    "host",
    "port",
    "uds",
    "root_path",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_keyfile_password",
    "ssl_ca_certs",
    "replica",
    "page",
)
"""Server options that users cannot give. Ray's HTTP proxy has its own options for them; `replica` is set for each
replica, and there is no page, which shows one engine.
"""
_STORE_S = 30.0
"""Maximum time for an engine to store its KV in the tiers when its replica stops."""
_SCOPE = (
    "type",
    "asgi",
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "query_string",
    "headers",
    "client",
    "server",
)
"""Parts of a request's ASGI scope that the ingress sends to the engine."""
_DRAIN_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class RayOptions:
    """The options of an application; the fields are the `args` of a Ray config file.

    model            directory, hub id or name of the model, as for `LLM`
    engine           fields of EngineConfig, with `offload` and `speculative` as mappings. Replicas of a node share the
                     directory of a disk tier
    server           fields of ServerOptions except for address, TLS, `replica` and `page`: Ray's HTTP proxy has the
                     address, and replicas get their names from Ray
    router           `session`, `prefix`, `load` (Ray's default), or the import path of a request router
    session_header   with the router `session`, requests with the same value of this header go to the same replica
    queue_timeout_s  a request that no replica takes within this time gets a 503
    replicas         Ray's options of the deployment `Engines`, such as `num_replicas`, `autoscaling_config`,
                     `ray_actor_options`
    ingress          Ray's options of the deployment `Ingress`
    """

    model: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    server: Mapping[str, Any] = field(default_factory=dict)
    router: str = "session"
    session_header: str = "x-session-id"
    queue_timeout_s: float = 5.0
    replicas: Mapping[str, Any] = field(default_factory=dict)
    ingress: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.router not in (*ROUTERS, "load") and "." not in self.router:
            raise ConfigError(unknown_name("router", self.router, (*ROUTERS, "load")))
        if isinstance(self.queue_timeout_s, bool) or not 0 < self.queue_timeout_s <= 3600:
            raise ConfigError(f"queue_timeout_s is {self.queue_timeout_s!r}: give a number of seconds in (0, 3600]")
        for name in ("engine", "server", "replicas", "ingress"):
            if not isinstance(given := getattr(self, name), Mapping):
                raise ConfigError(f"{name} is {given!r}: give a mapping of options to values")
        for name in _OF_THE_PROXY:
            if name in self.server:
                raise ConfigError(
                    f"server has {name}: leave it out; address and TLS are options of Ray's HTTP proxy, and replicas "
                    "have no page"
                )
        self.engine_config()
        self.server_options("")

    @property
    def compares_prompts(self) -> bool:
        """Whether the router may read the prompt."""
        return self.router not in ("session", "load")

    @property
    def request_slots(self) -> int:
        """Maximum number of requests that an engine runs at once."""
        on_gpu = bool(self.replicas.get("ray_actor_options", {}).get("num_gpus"))
        config = self.engine_config()
        return config.sizes(CUDA if on_gpu and config.device != CPU else CPU).max_running

    @classmethod
    def of(cls, args: Mapping[str, Any]) -> RayOptions:
        """Make the options from the `args` of a config file. Raises ConfigError."""
        return _made(cls, "argument", args)

    def engine_config(self) -> EngineConfig:
        """The engine's configuration. Raises ConfigError."""
        given = dict(self.engine)
        if (offload := given.get("offload")) is not None:
            given["offload"] = _made(OffloadConfig, "offload option", offload)
        if (speculative := given.get("speculative")) is not None:
            given["speculative"] = _made(SpeculativeConfig, "speculative option", speculative)
        return _made(EngineConfig, "engine option", given)

    def server_options(self, replica: str) -> ServerOptions:
        """The options of the HTTP API. `replica`: name of the replica. Raises ConfigError."""
        return _made(ServerOptions, "server option", {**self.server, "replica": replica, "page": False})


def build_app(args: Mapping[str, Any]) -> Application:
    """The application for `serve.run`, or for `serve deploy` with a config file. `args` are the fields of RayOptions.

    Some of Ray's defaults do not suit replies that stream for minutes, so this function replaces them:
    `max_ongoing_requests` is twice the engine's request slots instead of 5, `graceful_shutdown_timeout_s` is the drain
    time plus the time to store KV, and Ray checks the health of engines every 2 s. Raises ConfigError, also if Ray is
    not installed.
    """
    options = RayOptions.of(args)
    serve = _ray_serve()
    from ray.serve.config import RequestRouterConfig

    drain_s = options.server_options("").drain_s
    router = {} if options.router == "load" else {"request_router_class": ROUTERS.get(options.router, options.router)}
    engines = {
        "max_ongoing_requests": 2 * options.request_slots,
        "graceful_shutdown_timeout_s": drain_s + _STORE_S,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 10.0,
        "request_router_config": RequestRouterConfig(**router),
    }
    ingress = {"max_ongoing_requests": 10_000, "graceful_shutdown_timeout_s": drain_s}
    replicas = serve.deployment(Engines).options(**{**engines, **options.replicas}).bind(options)
    return serve.deployment(Ingress).options(**{**ingress, **options.ingress}).bind(replicas, options)


@contextmanager
def serve_locally(args: Mapping[str, Any], *, port: int = 8000, num_cpus: int | None = None) -> Iterator[str]:
    """Serve an application on this machine only. A context manager that yields the URL: it starts Ray, and stops Ray at
    the end of the block.

    At the end of the block, new requests get a 503, running requests have `drain_s` to finish, and the engines store
    their KV. Enter the block before Ray is imported: then all of Ray's processes except for the replicas listen on
    127.0.0.1 only (docs/scale.md#network). The caller handles signals.

    args      fields of RayOptions
    port      port of the HTTP proxy on 127.0.0.1
    num_cpus  number of processors that Ray may give to replicas; None: all processors of the machine
    """
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # without a cluster, Ray's address is 127.0.0.1
    options = RayOptions.of(args)
    serve = _ray_serve()
    import ray

    ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False)
    try:
        # Serve starts no gRPC proxy, because it gets no gRPC services.
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
        ingress = serve.run(build_app(args), name=APP_NAME, route_prefix="/")
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            ingress.drain.remote(options.server_options("").drain_s).result()
            serve.shutdown()
    finally:
        ray.shutdown()


class Engines:
    """A replica: one engine, and in front of it an HTTP API without a socket. Ray makes and calls it."""

    def __init__(self, options: RayOptions) -> None:
        """Load the model; blocks until the engine serves."""
        from sidestream.async_llm import AsyncLLM  # imports torch, which the ingress does not need

        context = _ray_serve().get_replica_context()
        self._metrics = _NodeMetrics(context.replica_id.unique_id)
        server = options.server_options(context.replica_id.unique_id)
        self._llm = AsyncLLM(options.model, config=options.engine_config())
        self._app = create_app(self._llm, options=server)

    async def answer(self, call: Call) -> AsyncGenerator[list[Message], None]:
        """Yield the ASGI messages of one reply. The first item is an empty list: it tells the ingress that a replica
        has the request.

        An item holds all messages that are ready, so no message is delayed. Closing the generator aborts the request.
        """
        unsent: asyncio.Queue[Message | None] = asyncio.Queue()
        body = iter((call.body,))

        async def receive() -> Message:
            for piece in body:
                return {"type": "http.request", "body": piece, "more_body": False}
            await asyncio.Event().wait()  # wait for ever: when the client disconnects, this task is cancelled
            raise AssertionError

        async def run() -> None:
            try:
                await self._app(call.scope, receive, unsent.put)
            finally:
                unsent.put_nowait(None)

        yield []
        task = asyncio.create_task(run())
        try:
            while (message := await unsent.get()) is not None:
                messages = [message]
                while not unsent.empty() and (message := unsent.get_nowait()) is not None:
                    messages.append(message)
                yield messages
                if message is None:
                    break
            await task
        finally:
            task.cancel()

    async def check_health(self) -> None:
        """Ray calls this every 2 s. Raises EngineStopped if the engine does not serve any more; then Ray replaces the
        replica.

        Also passes the engine's metrics on to Ray.
        """
        health = self._llm.health()
        if health.status != "ok":
            raise EngineStopped(f"the engine is {health.status}: {health.detail}")
        self._metrics.write(await self._llm.metrics_snapshot())

    async def __del__(self) -> None:
        """Store KV in the tiers and end the engine. Ray calls this when a replica stops, after its last request."""
        if hasattr(self, "_llm"):
            await self._llm.close()


class _NodeMetrics:
    """Copies an engine's metrics to Ray. Ray's agent exports the metrics of all replicas of its node
    (`ray_sidestream_…`).

    All metrics become gauges, including a histogram's buckets, because a Ray counter cannot be set to a value.
    """

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self._gauges: dict[str, Any] = {}

    def write(self, snapshot: MetricsSnapshot) -> None:
        """Set all values. Never blocks."""
        from ray.util.metrics import Gauge

        for family in families(snapshot, replica=self._replica).collect():
            for name, labels, value, *_ in family.samples:
                if name not in self._gauges:
                    self._gauges[name] = Gauge(name, family.documentation, tag_keys=tuple(labels))
                self._gauges[name].set(value, tags=labels)


class Ingress:
    """Passes HTTP requests to the engines. Ray makes and calls it. Any number of replicas of the ingress may run."""

    def __init__(self, engines: DeploymentHandle[Engines], options: RayOptions) -> None:
        self._engines = engines.options(method_name="answer", stream=True)
        self._options = options
        self._draining = False
        self._running = 0

    def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Ray calls this with a new `user_config`. With `draining: true`, new requests get a 503."""
        self._draining = bool(user_config.get("draining", False))

    async def drain(self, timeout_s: float) -> bool:
        """Reject new requests with 503 and wait for the running ones; False after `timeout_s`.

        This call affects only one replica of the ingress; `user_config` reaches all of them.
        """
        self._draining = True
        deadline_s = time.monotonic() + timeout_s
        while self._running and time.monotonic() < deadline_s:
            await asyncio.sleep(_DRAIN_POLL_S)
        return not self._running

    async def __call__(self, request: Request) -> Response:
        """The reply of the replica that Ray's router chooses. If this replica is lost, the reply is a 503; if the reply
        has begun, its stream ends with an error event.
        """
        if self._draining:
            return _refusal(
                ApiError(503, "this service is shutting down: try again later", kind="server_error", code="draining")
            )
        scope = {name: request.scope[name] for name in _SCOPE if name in request.scope}
        body = await request.body()
        call = Call(scope, body, _prompt_of(body) if self._options.compares_prompts else "")
        session = request.headers.get(self._options.session_header)
        engines = self._engines.options(session_id=session) if session else self._engines
        messages: _Messages = engines.remote(call)
        self._running += 1
        begun = False
        try:
            await asyncio.wait_for(anext(messages), self._options.queue_timeout_s)
            start, *rest = await anext(messages)
            begun = True
            return _Reply(start, rest, messages, on_end=self._end)
        except Exception as failure:
            if (error := _as_error(failure)) is None:
                raise
            return _refusal(error)
        finally:
            if not begun:
                self._end(messages)

    def _end(self, messages: _Messages) -> None:
        """Abort the request, if it has not ended."""
        self._running -= 1
        messages.cancel()


class _Messages(Protocol):
    """ASGI messages of one reply, as they arrive from a replica: Ray's DeploymentResponseGenerator."""

    def __aiter__(self) -> AsyncIterator[list[Message]]: ...

    async def __anext__(self) -> list[Message]: ...

    def cancel(self) -> None: ...


class _Reply(StreamingResponse):
    """An engine's reply, after its first ASGI message. Calls `on_end` at its end, also if the client disconnects."""

    def __init__(
        self, start: Message, first: list[Message], messages: _Messages, *, on_end: Callable[[_Messages], None]
    ) -> None:
        super().__init__(self._pieces(first), status_code=start["status"])
        self.raw_headers = [header for header in start["headers"] if header[0] != b"x-request-id"]  # Ray adds its own
        self._messages = messages
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the reply."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end(self._messages)

    async def _pieces(self, first: list[Message]) -> AsyncGenerator[bytes, None]:
        """The pieces of the body. If the replica is lost, a stream of events ends with an error event."""
        try:
            if first:
                yield _joined(first)
            async for more in self._messages:
                yield _joined(more)
        except Exception as failure:
            error = _as_error(failure)
            if error is None or not self.headers.get("content-type", "").startswith("text/event-stream"):
                raise
            yield b"data: " + to_json(error.body()) + b"\n\n"


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request, as the ingress sends it to an engine.

    prompt   text that Ray's prefix-aware router compares: the body's prompt, or its messages as JSON
    """

    scope: Scope
    body: bytes
    prompt: str


def _prompt_of(body: bytes) -> str:
    """The text of a body's prompt or messages. Never empty, because Ray's router divides by the length of the text."""
    try:
        fields = json.loads(body)
    except ValueError:  # the body is no JSON: the engine's API rejects it later
        return "null"
    prompt = (fields.get("messages") or fields.get("prompt")) if isinstance(fields, dict) else None
    return prompt if isinstance(prompt, str) and prompt else json.dumps(prompt)


def _joined(messages: list[Message]) -> bytes:
    return b"".join(message.get("body", b"") for message in messages)


def _refusal(error: ApiError) -> Response:
    return JsonResponse(error.body(), error.status, {"Retry-After": "1"})


def _as_error(failure: Exception) -> ApiError | None:
    """The 503 for a failure of replicas or of their machines; None for an exception of Sidestream's code."""
    from ray.exceptions import RayError, RayTaskError
    from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

    match failure:
        case RayTaskError():
            return None
        case TimeoutError() | BackPressureError() | DeploymentUnavailableError():
            return ApiError(
                503, "no replica has room for this request: try again later", kind="server_error", code="no_replica"
            )
        case RayError():
            return ApiError(
                503, "the replica of this request was lost: send it again", kind="server_error", code="replica_lost"
            )
        case _:
            return None


def _made(kind: type[_Made], what: str, given: Mapping[str, Any]) -> _Made:
    """A dataclass `kind` with the fields of `given`. Raises ConfigError for unknown and missing fields."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{what}s are {given!r}: give a mapping of names to values")
    fields = {field.name: field for field in dataclasses.fields(cast(Any, kind))}
    for name in given:
        if name not in fields:
            raise ConfigError(unknown_name(what, name, fields))
    try:
        return kind(**given)
    except TypeError as error:
        raise ConfigError(f"{what}s are incomplete: {error}") from None


def _ray_serve() -> Any:
    try:
        from ray import serve
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"replicas on Ray need the package {missing.name}: pip install 'sidestream[ray]'"
        ) from missing
    return serve
