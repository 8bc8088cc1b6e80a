"""The routes: the OpenAI API over a `Backend`, health and metrics. All state is in the objects made here."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from sidestream.server.backend import Backend
from sidestream.server.body import read_body
from sidestream.server.edge import Edge, Record, RootPath, record_of
from sidestream.server.encode import JsonReply, to_json
from sidestream.server.errors import ApiError
from sidestream.server.fields import Call, parse_chat, parse_detokenize, parse_text, parse_tokenize
from sidestream.server.generation import generate_all
from sidestream.server.interruption import Interruption, Signal
from sidestream.server.metrics import CONTENT_TYPE_LATEST, render
from sidestream.server.options import ServerOptions
from sidestream.server.replies import WORDINGS, Json, Offsets
from sidestream.types import Delta, TokenLogprob
from sidestream.version import VERSION

_SHORT_BODY_BYTES = 8 << 10
"""So much is parsed and tokenised within 2 ms."""

_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the events otherwise
]


def create_app(backend: Backend, *, options: ServerOptions) -> Starlette:
    """The ASGI application. Setting `app.state.stopping` aborts every request that runs, each with an error reply."""
    stopping = Signal()
    model = _model(backend, options)

    async def models(request: Request) -> Response:
        return JsonReply({"object": "list", "data": [model]})

    async def one_model(request: Request) -> Response:
        if request.path_params["name"] != model["id"]:
            raise ApiError(
                404, f"no such model: this server serves {model['id']!r}", param="model", code="model_not_found"
            )
        return JsonReply(model)

    async def tokenize(request: Request) -> Response:
        body = await read_body(request, options)
        return JsonReply(await asyncio.to_thread(_tokenize, body, backend, model["id"]))

    async def detokenize(request: Request) -> Response:
        body = await read_body(request, options)
        return JsonReply(await asyncio.to_thread(_detokenize, body, backend, model["id"]))

    async def version(request: Request) -> Response:
        return JsonReply({"version": VERSION})

    async def health(request: Request) -> Response:
        state = backend.health()
        return JsonReply({"status": state.status, "detail": state.detail}, 200 if state.status == "ok" else 503)

    async def metrics(request: Request) -> Response:
        return Response(render(await backend.metrics_snapshot()), media_type=CONTENT_TYPE_LATEST)

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", Completions(backend, options, stopping, model, parse_chat), methods=["POST"]),
            Route("/v1/completions", Completions(backend, options, stopping, model, parse_text), methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
            Route("/version", version),
            Route("/health", health),
            Route("/ping", health, methods=["GET", "POST"]),
            Route("/metrics", metrics),
        ],
        middleware=[Middleware(RootPath, prefix=options.root_path), *_cors(options), Middleware(Edge, options=options)],
        exception_handlers={HTTPException: _to_edge},
    )
    app.router.redirect_slashes = False
    app.state.stopping = stopping
    return app


async def _to_edge(request: Request, failure: Exception) -> Response:
    """Starlette's own 404 and 405 are worded at the edge, like every other failure."""
    raise failure


def _cors(options: ServerOptions) -> list[Middleware]:
    """Outside the edge: a browser's preflight carries no API key, and an error must name the allowed origin to be
    readable.
    """
    if not options.cors_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after"),
        )
    ]


def _model(backend: Backend, options: ServerOptions) -> Json:
    return {
        "id": options.served_model_name or backend.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "sidestream",
        "max_model_len": backend.max_model_len,
    }


def _tokenize(body: bytes, backend: Backend, served_name: str) -> Json:
    """vLLM's reply to `/tokenize`. Runs on a worker thread, like all tokenising."""
    asked = parse_tokenize(body, tokenizer=backend.tokenizer, served_name=served_name)
    strings = backend.tokenizer.token_strings(asked.token_ids) if asked.with_strings else None
    counts = {"count": len(asked.token_ids), "max_model_len": backend.max_model_len}
    return {**counts, "tokens": asked.token_ids, "token_strs": strings}


def _detokenize(body: bytes, backend: Backend, served_name: str) -> Json:
    """vLLM's reply to `/detokenize`: special tokens are spelled out, so that tokenising the text gives the same ids."""
    token_ids = parse_detokenize(body, tokenizer=backend.tokenizer, served_name=served_name)
    return {"prompt": backend.tokenizer.decode(token_ids, skip_special_tokens=False)}


class Completions:
    """The endpoint of one of the two APIs; which one, `parse` says."""

    def __init__(
        self, backend: Backend, options: ServerOptions, stopping: Signal, model: Json, parse: Callable[..., Call]
    ) -> None:
        self._backend = backend
        self._options = options
        self._stopping = stopping
        self._model = model
        self._parse = parse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read, validate, generate, reply. Every failure goes up to the edge."""
        body = await read_body(Request(scope, receive), self._options)
        parse = functools.partial(
            self._parse,
            body,
            tokenizer=self._backend.tokenizer,
            served_name=self._model["id"],
            max_choices=self._options.max_choices,
        )
        # A thread for each of many short prompts that come at once would keep the event loop from the interpreter lock
        # for longer.
        call = parse() if len(body) <= _SHORT_BODY_BYTES else await asyncio.to_thread(parse)
        record = record_of(scope)
        record.request_id = call.request_id or record.request_id
        reply = _Reply(call, record, self._backend, self._model["id"])
        async with Interruption(scope, self._stopping):
            if call.stream:
                await reply.stream(send)
                return
            whole = await reply.whole()
        await JsonReply(whole)(scope, receive, send)


class _Reply:
    """One reply while it grows, whole or streamed. Lives on the event loop; deltas of several prompts may
    interleave.
    """

    def __init__(self, call: Call, record: Record, backend: Backend, model: str) -> None:
        self._call = call
        self._record = record
        self._backend = backend
        self._wording = WORDINGS[call.api]
        self._offsets = [Offsets(backend.tokenizer.detokenizer()) for _ in range(call.num_choices)]
        self._counted: set[int] = set()
        self._head = {
            "id": self._wording.id_prefix + record.request_id.removeprefix("req-"),
            "created": int(time.time()),
            "model": model,
        }

    async def whole(self) -> Json:
        """Generate everything, then the one JSON object."""
        choices = [_Choice() for _ in range(self._call.num_choices)]

        async def emit(index: int, delta: Delta) -> None:
            self._count(index, delta)
            choices[index].add(delta)

        await generate_all(self._backend, self._call, self._record.request_id, emit)
        worded = [
            self._wording.whole(
                index, "".join(choice.texts), self._logprobs(index, choice.logprobs), choice.finish_reason
            )
            for index, choice in enumerate(choices)
        ]
        return {
            **self._head,
            "object": self._wording.whole_object,
            "choices": worded,
            "usage": self._record.usage.json(),
        }

    async def stream(self, send: Send) -> None:
        """Send the deltas as events, as they come. The response starts with the first: a refusal before it is a plain
        HTTP error.
        """
        events = _EventStream(send)
        opened: set[int] = set()

        async def emit(index: int, delta: Delta) -> None:
            self._count(index, delta)
            chunks = []
            if index not in opened:
                opened.add(index)
                chunks.append(self._wording.opening(index))
            chunks.append(self._piece(index, delta))
            await events.write([self._chunk([chunk]) for chunk in chunks if chunk is not None])

        await generate_all(self._backend, self._call, self._record.request_id, emit)
        if self._call.include_usage:
            await events.write([{**self._chunk([]), "usage": self._record.usage.json()}])
        await events.done()

    def _count(self, index: int, delta: Delta) -> None:
        prompt = index // self._call.params.n
        if prompt not in self._counted:
            self._counted.add(prompt)
            self._record.usage.prompt(delta)
        self._record.usage.output_tokens += len(delta.token_ids)
        if delta.token_ids:
            self._record.token_came()

    def _piece(self, index: int, delta: Delta) -> Json | None:
        """The delta's chunk; None when there is no news: its text waits for the rest of a character or of a stop
        string.
        """
        logprobs = self._logprobs(index, delta.logprobs) if delta.logprobs else None
        if not (delta.text or logprobs or delta.finish_reason):
            return None
        return self._wording.piece(index, delta.text, logprobs, delta.finish_reason)

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = {**self._head, "object": self._wording.chunk_object, "choices": choices}
        if self._call.continuous_usage:
            return {**chunk, "usage": self._record.usage.json()}
        return {**chunk, "usage": None} if self._call.include_usage else chunk

    def _logprobs(self, index: int, tokens: list[TokenLogprob] | tuple[TokenLogprob, ...]) -> Json | None:
        if self._call.params.logprobs is None:
            return None
        return self._wording.logprobs(tokens, self._backend.tokenizer, self._offsets[index])


class _Choice:
    """One sample of a reply that is sent whole."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason = ""

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        self.finish_reason = delta.finish_reason or self.finish_reason


class _EventStream:
    """Server-sent events. Prompts of one call write to it in turns, so that the start of the response is always
    first.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._turn = asyncio.Lock()
        self._started = False

    async def write(self, events: list[Json]) -> None:
        """Send events; waits while the client is too slow to take them."""
        await self._write(b"".join(b"data: " + to_json(event) + b"\n\n" for event in events), more=True)

    async def done(self) -> None:
        """Send the end of the stream."""
        await self._write(b"data: [DONE]\n\n", more=False)

    async def _write(self, body: bytes, *, more: bool) -> None:
        async with self._turn:
            if not self._started:
                self._started = True
                await self._send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM.copy()})
            if body:
                await self._send({"type": "http.response.body", "body": body, "more_body": more})
