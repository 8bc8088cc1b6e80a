"""The ASGI application: the OpenAI API and Anthropic's Messages API over a `FrontEnd`, health and metrics."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sidestream.client.front_end import FrontEnd
from sidestream.formats import (
    REASONING_FORMATS,
    reasoning_format_of,
    tool_format_of,
)
from sidestream.processes.log_stream import lost_lines
from sidestream.server.api_keys import KeyFile
from sidestream.server.audit import AuditLog
from sidestream.server.body import BodyReader, JsonResponse, Served
from sidestream.server.cache_marks import CacheHints
from sidestream.server.cache_prefixes import cache_routes
from sidestream.server.cache_sessions import session_routes
from sidestream.server.completions import Completions, text_handle
from sidestream.server.early_breaks import EarlyBreaks
from sidestream.server.errors import ApiError
from sidestream.server.fields import Api
from sidestream.server.live import LiveStream
from sidestream.server.metrics import CONTENT_TYPE_LATEST, render
from sidestream.server.middleware import (
    HEALTH_PATHS,
    CallbackEvent,
    CancelOnDisconnect,
    RequestMiddleware,
    RootPathMiddleware,
    request_record,
)
from sidestream.server.openai_responses import (
    items_of,
    response_of,
)
from sidestream.server.openapi import document_routes
from sidestream.server.operations import operation_routes
from sidestream.server.options import ServerOptions
from sidestream.server.page_routes import page_routes
from sidestream.server.rate_limits import UNITS, RateLimits, limits_file
from sidestream.server.response_store import ResponseStore
from sidestream.server.responses import (
    Json,
)
from sidestream.server.text_work import TextWork
from sidestream.server.tracing import Tracing
from sidestream.version import VERSION

if TYPE_CHECKING:
    from sidestream.server.batches import Batches


def served_constants(backend: FrontEnd, options: ServerOptions) -> Served:
    """The constants against which requests are checked. Gives the tokenizer the chat template of the options."""
    if options.chat_template is not None:
        backend.tokenizer.use_chat_template(Path(options.chat_template))
    template, chosen = backend.tokenizer.chat_template, (options.tool_call_parser, options.reasoning_parser)
    tools, reasoning = chosen[0] or tool_format_of(template), chosen[1] or reasoning_format_of(template)
    row = REASONING_FORMATS.get(reasoning or "")
    return Served(
        options.served_model_name or backend.model_name,
        options.max_choices,
        backend.max_model_len,
        tool_format=None if tools == "none" else tools,
        reasoning_format=None if reasoning == "none" else reasoning,
        always_reasoning=options.reasoning_parser is not None or (row is not None and row.messages),
        block_tokens=backend.block_tokens,
        has_adapters=backend.adapters.room > 0,
    )


def health_reply(backend: FrontEnd, path: str = "/health") -> tuple[int, Json]:
    """Status and body of the reply to a health check with one of the paths `HEALTH_PATHS`. `/livez` asks whether the
    server must be restarted, `/readyz` whether it answers new requests soon, any other path whether its engine serves.
    """
    state = backend.health()
    good = {"/livez": ("ok", "draining")}.get(path, ("ok",))
    bad = state.status not in good or (path == "/readyz" and state.paused)
    return 503 if bad else 200, {"status": state.status, "detail": state.detail}


def create_app(
    backend: FrontEnd,
    *,
    options: ServerOptions,
    text: TextWork | None = None,
    store: ResponseStore | None = None,
    limits: int | None = None,
) -> Starlette:
    """The ASGI application. Setting `app.state.stopping` aborts all running requests; each gets an error reply. Setting
    `app.state.draining` ends the streams of live figures. The caller calls the functions of
    `app.state.at_start` on the event loop when it serves, of `at_stop` when it stops, and of `at_end` at the end.

    text   works on request bodies; None: threads of this process
    store  keeps responses; None: one for this application
    limits  descriptor of the file of `RateLimits`; None: one for this application
    """
    stopping, draining = CallbackEvent(), CallbackEvent()
    served = served_constants(backend, options)
    model = _model(served)
    handle = text_handle(backend.tokenizer, served)
    text = text or TextWork(handle, room=lambda: backend.room)
    bodies = BodyReader(options, served.max_model_len)
    store = store or ResponseStore(options)
    hints = CacheHints(backend, options.max_hint_ttl_s)
    breaks = EarlyBreaks(count=backend.count, tokenizer=backend.tokenizer, shows_text=options.explain_cache == "text")

    key_limits = _limits(backend, options, limits)
    batches = _batches(options)
    watchers = _watchers(backend, options, served)

    def completions(api: Api | Literal["messages", "responses"]) -> Completions:
        first = backend, bodies, text, handle, stopping, model["id"], api
        return Completions(*first, store, breaks, hints, explains=options.explain_cache)

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", completions("chat"), methods=["POST"]),
            Route("/v1/completions", completions("text"), methods=["POST"]),
            Route("/v1/messages", completions("messages"), methods=["POST"]),
            Route("/v1/responses", completions("responses"), methods=["POST"]),
            *_stored_responses(store),
            *_model_routes(model, backend),
            *_converting_routes(bodies, text, stopping),
            *_state_routes(backend, options, served),
            *_page(backend, options, served, draining),
            *operation_routes(backend, bodies, served.model_name),
            *session_routes(backend, bodies),
            *cache_routes(backend, bodies, text, shows_text=options.explain_cache == "text"),
            *document_routes(served.model_name, known_paths),
            *(batches.routes(bodies, options.allowed_origins) if batches else ()),
        ],
        middleware=[
            Middleware(RootPathMiddleware, prefix=options.root_path),
            *_cors(options),
            Middleware(
                RequestMiddleware, options=options, limits=key_limits, on_end=[watcher.add for watcher in watchers]
            ),
        ],
        exception_handlers={HTTPException: _reraise},
    )
    app.router.redirect_slashes = False
    app.state.stopping, app.state.draining = stopping, draining
    runner = batches.runner(backend, app, key_limits) if batches else None
    app.state.at_start, app.state.at_stop = [runner.start] if runner else [], [runner.stop] if runner else []
    app.state.at_end = [watcher.close for watcher in watchers]
    return app


def _converting_routes(bodies: BodyReader, text: TextWork, stopping: CallbackEvent) -> list[Route]:
    """Routes that need the tokenizer only."""

    def converting(kind: str) -> Callable[[Request], Awaitable[Response]]:
        async def convert(request: Request) -> Response:
            async with bodies.read(request) as body, CancelOnDisconnect(request.scope, stopping):
                return Response(await text.run(kind, body), media_type=JsonResponse.media_type)

        return convert

    kinds = {"/v1/messages/count_tokens": "count_tokens", "/tokenize": "tokenize", "/detokenize": "detokenize"}
    return [Route(path, converting(kind), methods=["POST"]) for path, kind in kinds.items()]


def _model_routes(model: Json, backend: FrontEnd) -> list[Route]:
    """Routes of the one model and its adapters."""

    async def served() -> list[Json]:
        names = await backend.adapters.names() if backend.adapters.room else []
        return [model, *({**model, "id": name, "parent": model["id"]} for name in names)]

    async def models(request: Request) -> Response:
        return JsonResponse({"object": "list", "data": await served()})

    async def one_model(request: Request) -> Response:
        for one in await served():
            if one["id"] == request.path_params["name"]:
                return JsonResponse(one)
        message = f"no such model: this server serves {model['id']!r}"
        raise ApiError(404, message, param="model", code="model_not_found")

    return [Route("/v1/models", models), Route("/v1/models/{name:path}", one_model)]


def _limits(backend: FrontEnd, options: ServerOptions, file: int | None) -> RateLimits | None:
    if options.api_keys is None:
        return None
    return RateLimits(KeyFile(options.api_keys), limits_file() if file is None else file, backend.count)


def _watchers(backend: FrontEnd, options: ServerOptions, served: Served) -> list[AuditLog | Tracing]:
    """Those that are told of the end of each request."""
    watchers: list[AuditLog | Tracing] = []
    if options.audit_log is not None:
        watchers.append(AuditLog(options.audit_log, served.model_name, backend.count))
    if options.otlp_traces_endpoint is not None:
        watchers.append(Tracing(options.otlp_traces_endpoint, served.model_name))
    return watchers


def _batches(options: ServerOptions) -> Batches | None:
    """The batches of the options' directory. Imports their modules only if there is one."""
    if options.batch_directory is None:
        return None
    from sidestream.server.batches import Batches

    return Batches(options.batch_directory, options.max_batch_directory_bytes)


def _page(backend: FrontEnd, options: ServerOptions, served: Served, draining: CallbackEvent) -> list[Route]:
    """Routes of the page and its live figures, unless they are off."""
    if not options.page:
        return []
    live = LiveStream(backend, draining, model_name=served.model_name, replica=options.replica)
    return [*page_routes(options.root_path), Route("/metrics/stream", live, methods=["GET"])]


def _state_routes(backend: FrontEnd, options: ServerOptions, served: Served) -> list[Route]:
    """Routes that say how the server is."""

    async def version(request: Request) -> Response:
        return JsonResponse({"version": VERSION})

    async def health(request: Request) -> Response:
        status, body = health_reply(backend, request.scope["path"].removeprefix(options.root_path))
        return JsonResponse(body, status)

    async def load(request: Request) -> Response:
        values = (await backend.metrics_snapshot()).values
        requests = sum(values.get(name, {}).get((), 0) for name in ("requests_running", "requests_waiting"))
        return JsonResponse({"server_load": int(requests)})

    async def metrics(request: Request) -> Response:
        if lost := lost_lines():
            backend.count("log_lines_lost_total", lost)
        return Response(
            render(await backend.metrics_snapshot(), replica=options.replica, model_name=served.model_name),
            media_type=CONTENT_TYPE_LATEST,
        )

    return [
        Route("/version", version),
        Route("/load", load),
        *(Route(path, health, methods=["GET", "POST"] if path == "/ping" else ["GET"]) for path in HEALTH_PATHS),
        Route("/metrics", metrics),
    ]


def _stored_responses(store: ResponseStore) -> list[Route]:
    """Routes that read and delete stored responses."""

    async def response(request: Request) -> Response:
        name, query, owner = request.path_params["name"], request.query_params, request_record(request.scope).owner
        if request.method == "DELETE":
            await asyncio.to_thread(store.delete, name, owner=owner)
            return JsonResponse({"id": name, "object": "response", "deleted": True})
        return JsonResponse(await asyncio.to_thread(lambda: response_of(store.get(name, owner=owner), query)))

    async def input_items(request: Request) -> Response:
        name, query, owner = request.path_params["name"], request.query_params, request_record(request.scope).owner
        return JsonResponse(await asyncio.to_thread(lambda: items_of(store.get(name, owner=owner), query)))

    return [
        Route("/v1/responses/{name}", response, methods=["GET", "DELETE"]),
        Route("/v1/responses/{name}/input_items", input_items),
    ]


async def _reraise(request: Request, failure: Exception) -> Response:
    """Let RequestMiddleware reply to Starlette's own 404 and 405, as to every other failure."""
    if isinstance(failure, HTTPException) and failure.status_code == HTTPStatus.NOT_FOUND:
        known = ", ".join(f"{method} {path}" for path, method in known_paths(request.app))
        raise ApiError(404, f"no such path; known: {known}", code="unknown_url")
    raise failure


def known_paths(app: Starlette) -> list[tuple[str, str]]:
    """Path and method of all endpoints. A path has the name of its parameter in braces."""
    return [
        (re.sub(r":\w+}", "}", route.path), method)
        for route in app.routes
        if isinstance(route, Route)
        for method in sorted(route.methods or ())
        if method != "HEAD"
    ]


def _cors(options: ServerOptions) -> list[Middleware]:
    """The CORS middleware. It is outside RequestMiddleware, because a preflight request has no API key, and because
    browsers hide an error reply without CORS headers.
    """
    if not options.allowed_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=(
                "x-request-id",
                "retry-after",
                "x-sidestream-replica",
                *(f"x-ratelimit-{word}-{unit}" for word in ("limit", "remaining", "reset") for unit in UNITS),
            ),
        )
    ]


def _model(served: Served) -> Json:
    return {
        "id": served.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "sidestream",
        "max_model_len": served.max_model_len,
    }
