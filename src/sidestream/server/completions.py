"""The endpoints that generate: chats, completions, messages and responses, from the request to the last event."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from sidestream.client.beam_search import BeamSearch, run_search
from sidestream.client.front_end import FrontEnd
from sidestream.config import SamplingParams
from sidestream.errors import EngineStopped, InvariantError, SidestreamError
from sidestream.formats import (
    AnswerParser,
    CallBegun,
    CallEnded,
    Event,
    message_of,
)
from sidestream.server.anthropic_messages import MessagesReply, count_tokens, parse_messages
from sidestream.server.body import EVENT_STREAM, BodyReader, JsonResponse, Served, to_json
from sidestream.server.cache_explanation import FORGOTTEN, as_json
from sidestream.server.cache_fields import SESSION_HEADER
from sidestream.server.cache_marks import CacheHints
from sidestream.server.cache_prefixes import PARSERS
from sidestream.server.early_breaks import LEAST_PROMPT, EarlyBreaks
from sidestream.server.errors import ApiError, bad_request
from sidestream.server.fields import Api, Call, parse_chat, parse_detokenize, parse_text, parse_tokenize
from sidestream.server.middleware import (
    CallbackEvent,
    CancelOnDisconnect,
    RequestRecord,
    has_admin_key,
    request_record,
)
from sidestream.server.openai_responses import (
    ResponsesCall,
    ResponsesReply,
    parse_continued,
    parse_responses,
)
from sidestream.server.response_store import ResponseStore
from sidestream.server.responses import (
    CHAT_FORMAT,
    RESPONSE_FORMATS,
    Generate,
    Json,
    SpelledToken,
    TokenSpeller,
    answer_events,
    prompt_logprobs_json,
    spelled_prompt,
)
from sidestream.server.text_work import Handle, TextWork
from sidestream.text import TokenizerLike
from sidestream.types import CANCELLED, NO_TOKEN_LEFT, Delta, TokenLogprob

TIMEOUT_HEADER = "x-request-timeout"
_MOST_TIMEOUT_S = 1e6
_EXPLAIN_HEADER = "x-explain-cache"
_INLINE_BODY_BYTES = 8 << 10
"""Parsing and tokenising a body of this size takes up to 2 ms."""


def text_handle(tokenizer: TokenizerLike, served: Served) -> Handle:
    """The work of `TextWork`: parses and tokenises the bodies of this server. Any thread or process may call it."""
    parsers: dict[str, Callable[..., Any]] = {
        "chat": parse_chat,
        "text": parse_text,
        "messages": parse_messages,
        "count_tokens": count_tokens,
        "responses": parse_responses,
        "continued": parse_continued,
        "tokenize": _tokenize,
        "detokenize": _detokenize,
        **PARSERS,
    }
    return lambda kind, body: parsers[kind](body, tokenizer=tokenizer, served=served)


def _tokenize(body: bytes, *, tokenizer: TokenizerLike, served: Served) -> bytes:
    """vLLM's reply to `/tokenize`, as JSON."""
    request = parse_tokenize(body, tokenizer=tokenizer, served=served)
    strings = tokenizer.token_strings(request.token_ids) if request.with_strings else None
    counts = {"count": len(request.token_ids), "max_model_len": served.max_model_len}
    return to_json({**counts, "tokens": request.token_ids, "token_strs": strings})


def _detokenize(body: bytes, *, tokenizer: TokenizerLike, served: Served) -> bytes:
    """vLLM's reply to `/detokenize`, as JSON. Special tokens are kept: tokenising the text gives the same ids again."""
    token_ids = parse_detokenize(body, tokenizer=tokenizer, served=served)
    return to_json({"prompt": tokenizer.decode(token_ids, skip_special_tokens=False)})


@dataclass(eq=False)
class Completions:
    """The endpoint of one API: chat, completions, messages or responses."""

    _backend: FrontEnd
    _bodies: BodyReader
    _text: TextWork
    _handle: Handle
    _stopping: CallbackEvent
    _model_name: str
    _api: Api | Literal["messages", "responses"]
    _store: ResponseStore
    _breaks: EarlyBreaks
    _hints: CacheHints
    explains: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read, validate, generate, reply, until the request's deadline. RequestMiddleware replies to failures."""
        record = request_record(scope)
        seconds = _timeout_s(Headers(scope=scope), record)
        try:
            async with asyncio.timeout_at(None if seconds is None else record.started + seconds) as deadline:
                await self._serve(scope, receive, send, record)
        except TimeoutError:
            if not deadline.expired():
                raise
            message = f"the request did not end within {seconds:g} s, its deadline: ask for less, or give it more time"
            raise ApiError(504, message, kind="server_error", code="timeout") from None

    async def _serve(self, scope: Scope, receive: Receive, send: Send, record: RequestRecord) -> None:
        async with self._bodies.read(Request(scope, receive)) as body, CancelOnDisconnect(scope, self._stopping):
            call = await self._parse(body, record.owner)
        if record.grant is not None:
            call = record.grant.accept(call)
        headers = Headers(scope=scope)
        if call.params.cache is not None or SESSION_HEADER in headers:
            call = dataclasses.replace(call, params=self._hints.with_session(call.params, headers))
        record.request_id, record.params = call.request_id or record.request_id, call.params
        if call.explain_cache or _asks_for_explanation(headers):
            record.explains = "text" if has_admin_key(scope) else self.explains
            if record.explains == "off":
                message = "explanations are off: start the server with --explain-cache blocks, or leave this out"
                raise ApiError(403, message, kind="permission_error", param="explain_cache", code="explanations_off")
        reply = self._reply(call, record)
        async with CancelOnDisconnect(scope, self._stopping):
            if call.stream:
                await reply.stream(send)
                return
            response = await reply.complete()
            if call.hands_over:
                response["kv_transfer_params"] = await self._hand_over(call)
        await JsonResponse(response)(scope, receive, send)

    async def _hand_over(self, call: Call) -> Json:
        """What a proxy passes on to the replica that decodes."""
        hand_over = self._backend.hand_over_prefix
        stored = [await hand_over(prompt, cache_salt=call.cache_salt) for prompt in call.prompts]
        return {"do_remote_decode": False, "do_remote_prefill": True, "stored_tokens": sum(stored)}

    def _reply(self, call: Call, record: RequestRecord) -> _Reply | MessagesReply | ResponsesReply:
        generate = partial(generate_all, self._backend, call, record, breaks=self._breaks, hints=self._hints)
        if isinstance(call, ResponsesCall):
            return ResponsesReply(call, record, generate, self._store)
        if self._api == "messages":
            return MessagesReply(call, record, generate, call.params.adapter or self._model_name)
        return _Reply(call, record, self._backend.tokenizer, generate, call.params.adapter or self._model_name)

    async def _parse(self, body: bytearray, owner: str) -> Call:
        """The call. Short texts are parsed on the event loop, because handing them over would hold the interpreter lock
        for longer than parsing them. Chats are not: their template may run for any time.
        """
        if self._api == "text" and len(body) <= _INLINE_BODY_BYTES:
            return self._handle("text", body)  # type: ignore[no-any-return]
        call = await self._text.run(self._api, body)
        if isinstance(call, str):
            stored = await asyncio.to_thread(self._store.get, call, owner=owner, param="previous_response_id")
            both = bytearray(b"[%b,%b]" % (bytes(body), stored))
            with self._bodies.holding(both):
                call = await self._text.run("continued", both)
        return call  # type: ignore[no-any-return]


class _Reply:
    """Builds one reply, streamed or complete, from the deltas (new text and tokens) of its samples. Used on the event
    loop only. Deltas of several prompts may interleave.
    """

    def __init__(
        self, call: Call, record: RequestRecord, tokenizer: TokenizerLike, generate: Generate, model: str
    ) -> None:
        self._call = call
        self._record = record
        self._tokenizer = tokenizer
        self._generate = generate
        self._format = RESPONSE_FORMATS[call.api]
        self._spellers = [] if call.params.logprobs is None else [self._speller(i) for i in range(call.num_choices)]
        form = call.answer
        self._parsers = [] if form is None else [AnswerParser(form) for _ in range(call.num_choices)]
        self._calling: set[int] = set()  # samples with tool calls
        self._begun: set[int] = set()
        self._prompt_logprobs: dict[int, Sequence[TokenLogprob]] = {}  # by choice
        self._echoed: dict[int, list[SpelledToken]] = {}  # tokens of echoed prompts that no chunk has yet, by choice
        self._counted: set[int] = set()
        self._head = {
            "id": self._format.id_prefix + record.request_id.removeprefix("req-"),
            "created": int(time.time()),
            "model": model,
        }

    async def complete(self) -> Json:
        """Generate all samples; return the JSON object."""
        samples = [_Sample(self._echo(index)) for index in range(self._call.num_choices)]

        async def emit(index: int, delta: Delta) -> None:
            await self._begin(index, delta)
            delta = self._count(index, delta)
            samples[index].add(delta, self._spelled(index, delta))
            if self._parsers:
                samples[index].events += self._events(index, delta)

        await self._generate(emit)
        choices = [self._choice(index, sample) for index, sample in enumerate(samples)]
        ending = {"usage": self._record.usage.json(), **self._record.explanations}
        reply = {**self._head, "object": self._format.response_object, "choices": choices, **ending}
        if self._call.prompt_logprobs is not None:
            for index, owner in enumerate([reply] if self._call.api == "chat" else choices):
                owner["prompt_logprobs"] = await asyncio.to_thread(self._prompt_logprobs_json, index)
        return reply

    async def stream(self, send: Send) -> None:
        """Send each delta as an event. After a failure before the first event, the reply is a plain HTTP error."""
        events = _EventStream(send)
        started: set[int] = set()

        async def emit(index: int, delta: Delta) -> None:
            await self._begin(index, delta)
            delta = self._count(index, delta)
            chunks = []
            if index not in started:
                started.add(index)
                chunks.append(self._format.first_chunk(index, self._echo(index)))
            chunks += self._parsed_chunks(index, delta) if self._parsers else [self._delta_chunk(index, delta)]
            await events.write([self._chunk([chunk]) for chunk in chunks if chunk is not None])

        await self._generate(emit)
        ending = {"usage": self._record.usage.json()} if self._call.include_usage else {}
        if ending := {**ending, **self._record.explanations}:
            await events.write([{**self._chunk([]), **ending}])
        await events.done()

    def _echo(self, index: int) -> str:
        """The text with which the choice begins, before the model's text."""
        return self._call.echo[index // self._call.params.n] if self._call.echo else ""

    async def _begin(self, index: int, delta: Delta) -> None:
        """Keep what a choice's first delta says of its prompt. A thread spells the tokens, which may be very many."""
        if index in self._begun:
            return
        self._begun.add(index)
        self._prompt_logprobs[index] = delta.prompt_logprobs
        if self._spellers and self._call.echo and self._call.api == "text":
            prompt, top = self._call.prompts[index // self._call.params.n], self._call.params.logprobs or 0
            parts = prompt, delta.prompt_logprobs, top, self._echo(index), self._tokenizer
            self._echoed[index] = await asyncio.to_thread(spelled_prompt, *parts)

    def _prompt_logprobs_json(self, index: int) -> list[Any]:
        decode = partial(self._tokenizer.decode, skip_special_tokens=False)
        return prompt_logprobs_json(self._prompt_logprobs[index], self._call.prompt_logprobs or 0, decode)

    def _count(self, index: int, delta: Delta) -> Delta:
        """Count a sample's delta. Returns the part of it that the client gets."""
        if self._call.only_echo:
            reason = delta.finish_reason and "length"
            delta = msgspec.structs.replace(delta, text="", token_ids=(), logprobs=(), finish_reason=reason)
        prompt = index // self._call.params.n
        self._record.count(delta, is_first=prompt not in self._counted)
        self._counted.add(prompt)
        return delta

    def _delta_chunk(self, index: int, delta: Delta) -> Json | None:
        """The delta's choice. None if the delta has no text yet, because a character or a stop string may be
        incomplete.
        """
        tokens = self._spelled(index, delta)
        if not (delta.text or tokens or delta.finish_reason):
            return None
        return self._format.chunk(index, delta.text, self._logprobs(tokens) if tokens else None, delta.finish_reason)

    def _choice(self, index: int, sample: _Sample) -> Json:
        logprobs = self._logprobs(sample.tokens)
        if not self._parsers:
            return self._format.choice(index, "".join(sample.texts), logprobs, sample.finish_reason)
        message, reason = message_of(sample.events), sample.finish_reason
        message.content = self._echo(index) + message.content
        return CHAT_FORMAT.parsed_choice(
            index, message, logprobs, "tool_calls" if message.calls and reason == "stop" else reason
        )

    def _parsed_chunks(self, index: int, delta: Delta) -> list[Json]:
        """A choice for each part of the answer that the delta brings; log-probabilities come with the first one."""
        events: list[Event | None] = [event for event in self._events(index, delta) if not isinstance(event, CallEnded)]
        if any(isinstance(event, CallBegun) for event in events):
            self._calling.add(index)
        tokens, reason = self._spelled(index, delta), delta.finish_reason
        logprobs = self._logprobs(tokens) if tokens else None
        if reason == "stop" and index in self._calling:
            reason = "tool_calls"
        if reason is not None or (tokens and not events):
            events.append(None)
        last = len(events) - 1
        return [
            CHAT_FORMAT.parsed_chunk(
                index, event, logprobs if number == 0 else None, reason if number == last else None
            )
            for number, event in enumerate(events)
        ]

    def _events(self, index: int, delta: Delta) -> list[Event]:
        return answer_events(self._call, self._parsers[index], delta)

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = {**self._head, "object": self._format.chunk_object, "choices": choices}
        if self._call.continuous_usage:
            return {**chunk, "usage": self._record.usage.json()}
        return {**chunk, "usage": None} if self._call.include_usage else chunk

    def _speller(self, index: int) -> TokenSpeller:
        prompt = self._call.prompts[index // self._call.params.n]
        after = prompt if self._call.continues else ()
        start = len(self._echo(index)) if self._call.api == "text" else 0
        return TokenSpeller(self._tokenizer.detokenizer(after, self._shown), start=start)

    @property
    def _shown(self) -> Sequence[str] | None:
        return self._call.shown_tokens if self._call.params.skip_special_tokens else None

    def _spelled(self, index: int, delta: Delta) -> list[SpelledToken]:
        """The tokens whose log-probabilities the choice gets with this delta."""
        if not self._spellers:
            return []
        tokens = self._spellers[index].add(delta.logprobs, delta.text, ended=delta.finish_reason is not None)
        return self._echoed.pop(index, []) + tokens

    def _logprobs(self, tokens: list[SpelledToken]) -> Json | None:
        return self._format.logprobs(tokens, as_ids=self._call.tokens_as_ids) if self._spellers else None


class _Sample:
    """One sample of a complete reply.

    echo   the text with which it begins
    """

    def __init__(self, echo: str) -> None:
        self.texts = [echo]
        self.events: list[Event] = []
        self.tokens: list[SpelledToken] = []
        self.finish_reason = ""

    def add(self, delta: Delta, tokens: list[SpelledToken]) -> None:
        self.texts.append(delta.text)
        self.tokens += tokens
        self.finish_reason = delta.finish_reason or self.finish_reason


class _EventStream:
    """Server-sent events. The prompts of one call write concurrently. A lock orders their writes, so that the start of
    the response is sent before any event.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._lock = asyncio.Lock()
        self._started = False

    async def write(self, events: list[Json]) -> None:
        """Send events. Waits while the client reads too slowly."""
        await self._write(b"".join(b"data: " + to_json(event) + b"\n\n" for event in events), more=True)

    async def done(self) -> None:
        """Send the end of the stream."""
        await self._write(b"data: [DONE]\n\n", more=False)

    async def _write(self, body: bytes, *, more: bool) -> None:
        async with self._lock:
            if not self._started:
                self._started = True
                await self._send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM.copy()})
            if body:
                await self._send({"type": "http.response.body", "body": body, "more_body": more})


Emit = Callable[[int, Delta], Awaitable[None]]


class GenerationFailed(Exception):
    """The engine failed this request. The message goes to the log, not to the client."""


def _asks_for_explanation(headers: Headers) -> bool:
    value = headers.get(_EXPLAIN_HEADER, "0").strip().lower()
    if value not in ("0", "false", "1", "true"):
        raise bad_request(f"the header {_EXPLAIN_HEADER} is {value[:64]!r}: send 1, or leave it out", _EXPLAIN_HEADER)
    return value in ("1", "true")


def _timeout_s(headers: Headers, record: RequestRecord) -> float | None:
    """Seconds from the start of the request to its deadline: of its header, at most those of its key."""
    bound = None if record.grant is None else record.grant.key.deadline_s
    if (text := headers.get(TIMEOUT_HEADER)) is None:
        return bound
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _MOST_TIMEOUT_S:
        message = f"the header {TIMEOUT_HEADER} is {text[:64]!r}: give seconds above 0, at most {_MOST_TIMEOUT_S:g}"
        raise bad_request(message, TIMEOUT_HEADER)
    return seconds if bound is None else min(seconds, bound)


async def generate_all(
    backend: FrontEnd,
    call: Call,
    record: RequestRecord,
    emit: Emit,
    *,
    breaks: EarlyBreaks | None = None,
    hints: CacheHints | None = None,
) -> None:
    """Await `emit(choice, delta)` for each delta of all prompts, until all samples have finished. Then put the
    explanations into the record, if the request asks for them.

    breaks   gets the prompts that are long enough
    hints    gets the prompts with marks

    A cancellation, or a failure of one prompt or of `emit`, aborts all prompts. Raises the first failure.
    """

    name = record.request_id

    async def run(number: int, prompt: tuple[int, ...], request_name: str) -> None:
        running = set(range(call.params.n))
        is_compared = breaks is None or len(prompt) < LEAST_PROMPT
        is_pinned = hints is None or not call.marks
        running_deltas = _deltas_of(backend, call, prompt, request_name)
        async with aclosing(running_deltas) as deltas:
            async for delta in deltas:
                _raise_if_failed(delta)
                if breaks is not None and not is_compared:
                    is_compared = True
                    breaks.add(prompt, call.cache_salt, delta.cached.total)
                if hints is not None and not is_pinned:
                    is_pinned = True
                    hints.begin(prompt, call.marks, call.cache_salt)
                await emit(number * call.params.n + delta.index, delta)
                if delta.queue_s is not None:
                    record.queue_s = max(delta.queue_s, record.queue_s or 0.0)
                if delta.finish_reason is not None:
                    running.discard(delta.index)
                    record.finish_reasons.append(delta.finish_reason)
        if running:
            raise InvariantError(f"{request_name} ended before its samples {sorted(running)} did")

    if len(call.prompts) == 1:  # the usual case, without an extra task
        await run(0, call.prompts[0], name)
    else:
        try:
            async with asyncio.TaskGroup() as group:
                for number, prompt in enumerate(call.prompts):
                    group.create_task(run(number, prompt, f"{name} {number}"))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
    if record.explains != "off":
        names = [name] if len(call.prompts) == 1 else [f"{name} {number}" for number in range(len(call.prompts))]
        found = [await _explained(backend, *one, record.explains) for one in zip(names, call.prompts, strict=True)]
        record.explanations["cache_explanation"] = found[0] if len(found) == 1 else found


async def _explained(backend: FrontEnd, name: str, prompt: Sequence[int], level: str) -> Json:
    """The explanation of one prompt. A failure costs the explanation, not the answer."""
    try:
        found = await backend.explain_cache(name)
    except SidestreamError as failure:
        return {**FORGOTTEN, "meaning": f"the engine did not explain it: {failure}"}
    return as_json(found, prompt, backend.tokenizer, text=level == "text")


def _deltas_of(
    backend: FrontEnd, call: Call, prompt: tuple[int, ...], request_name: str
) -> AsyncGenerator[Delta, None]:
    """The deltas of the samples of one prompt; with a beam search, of its answers, which are complete."""

    def generate(ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Delta, None]:
        return backend.generate(
            ids,
            params,
            priority=call.priority,
            request_name=request_name,
            cache_salt=call.cache_salt,
            continues=call.continues,
            shown_tokens=call.shown_tokens,
        )

    if call.beams is None:
        return generate(prompt, call.params)
    params, tokenizer = call.params, backend.tokenizer
    room = max(1, backend.max_model_len - len(prompt))
    search = BeamSearch(
        prompt,
        width=call.beams.width,
        max_tokens=room if params.max_tokens is None else min(room, params.max_tokens),
        length_penalty=call.beams.length_penalty,
        end_ids={*params.stop_token_ids, *(() if params.ignore_eos else tokenizer.eos_ids)},
        param="best_of" if call.beams.width > params.n else "n",
    )

    async def watched(ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Delta, None]:
        async with aclosing(generate(ids, params)) as deltas:
            async for delta in deltas:
                _raise_if_failed(delta)
                yield delta

    async def answers() -> AsyncGenerator[Delta, None]:
        cached = await run_search(search, watched)
        shown = call.shown_tokens if params.skip_special_tokens else None
        after = prompt if call.continues else ()
        found = search.answers(tokenizer, after=after, shown=shown, include_stop=params.include_stop)
        for index, one in enumerate(found[: params.n]):
            yield Delta(index, one.text, one.token_ids, (), one.finish_reason, len(prompt), cached)

    return answers()


def _raise_if_failed(delta: Delta) -> None:
    if delta.error == NO_TOKEN_LEFT:
        raise ApiError(400, NO_TOKEN_LEFT)
    if delta.finish_reason == "error":
        raise GenerationFailed(delta.error or "the engine gave no reason")
    if delta.error == CANCELLED:
        raise ApiError(499, CANCELLED, code="request_cancelled")
    if delta.finish_reason == "abort":
        raise EngineStopped("the server stopped this request before it was complete: try again later")
