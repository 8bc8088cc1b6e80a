"""OpenAI's Responses API: translates a request to the fields of a chat, and a chat's deltas to responses and events.
(`responses.py` builds the replies of the other OpenAI endpoints.) `text_work.py` parses off the event loop; replies are
built on it.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import reprlib
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field
from starlette.types import Send

from sidestream.errors import RequestRejected
from sidestream.formats import (
    AnswerFormat,
    AnswerParser,
    Arguments,
    CallBegun,
    CallEnded,
    Content,
    Event,
    Reasoning,
)
from sidestream.server.body import EVENT_STREAM, Served, Strict, checked, event_lines, parse_json, parse_object, to_json
from sidestream.server.cache_fields import CacheFields
from sidestream.server.errors import ApiError, bad_request
from sidestream.server.fields import Body, Call, chat_call
from sidestream.server.middleware import RequestRecord
from sidestream.server.response_store import ResponseStore
from sidestream.server.responses import Generate, Json, answer_events, whole_answer
from sidestream.text import TokenizerLike
from sidestream.types import Delta

# Fields of requests without effect here, with their accepted values; None: all values.
_IDLE: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(("client_metadata", "prompt_cache_options")),
    **dict.fromkeys(("safety_identifier", "service_tier", "user")),
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "max_tool_calls": (),
    "prompt": (),
    "stream_options": ({}, {"include_obfuscation": False}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_IDLE_OF_ITEM = dict.fromkeys(("type", "id", "status", "phase", "internal_chat_message_metadata_passthrough"))
_IDLE_OF_PART = {"type": None, "annotations": None, "logprobs": None}
_IDLE_OF_TOOL = {"type": None, "defer_loading": (False,)}
_HINTS = {*CacheFields.model_fields} - {"prompt_cache_key", "prompt_cache_retention"}  # not in OpenAI's API
_Objects = Annotated[list[dict[str, Any]], FailFast()]
_SWITCHES = ("enable_thinking", "thinking")  # of reasoning, in chat templates
_TEXT_PARTS = ("input_text", "output_text", "text")
_ENCODED = "sidestream-reasoning:"  # begins encrypted_content; the reasoning follows in base64
# Fields of a chat, and where they are in this API
_PLACES = {"reasoning_effort": "reasoning.effort", "response_format": "text.format", "verbosity": "text.verbosity"}


class _Reasoning(Strict):
    effort: str | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None


class _Text(Strict):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class _Request(CacheFields, Strict):
    """The fields with their types. `chat_call` checks ranges."""

    model: str
    input: Any
    previous_response_id: str | None = None
    instructions: str | None = None
    tools: _Objects = Field(default=[])
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    store: bool = True
    metadata: dict[str, str] = Field(default={})
    include: list[Literal["reasoning.encrypted_content"]] = Field(default=[])
    reasoning: _Reasoning = _Reasoning()
    text: _Text = _Text()
    # not in OpenAI's API
    explain_cache: bool = False


class _Function(Strict):
    name: str
    description: str = ""
    parameters: dict[str, Any] = Field(default={})
    strict: bool = False


class _Namespace(Strict):
    name: str
    description: str = ""
    tools: _Objects


class _Message(Strict):
    role: Literal["user", "assistant", "system", "developer"]
    content: Any


class _FunctionCall(Strict):
    call_id: str
    name: str
    arguments: str
    namespace: str = ""


class _FunctionOutput(Strict):
    call_id: str
    output: Any


class _ReasoningItem(Strict):
    content: Any = ()
    encrypted_content: str = ""
    summary: Any = ()


class _TextPart(Strict):
    text: str


_ITEMS: dict[str, type[Strict]] = {
    "message": _Message,
    "function_call": _FunctionCall,
    "function_call_output": _FunctionOutput,
    "reasoning": _ReasoningItem,
}


@dataclass(frozen=True, slots=True)
class ResponsesCall(Call):
    """A request to `/v1/responses` as a call of a chat.

    head       the response's fields that repeat the request
    items      the input, including that of the response that it continues, as JSON; empty: do not store the response
    functions  namespace and name of the functions with a namespace, by the name that the model knows
    encodes    whether reasoning items get `encrypted_content`
    """

    head: Json = field(default_factory=dict)
    items: bytes = b""
    functions: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    encodes: bool = False


BODIES: Mapping[str, tuple[Body, ...]] = {"/v1/responses": ((_Request, _IDLE),)}
"""As `fields.BODIES`."""


def parse_responses(body: bytes | bytearray, *, tokenizer: TokenizerLike, served: Served) -> ResponsesCall | str:
    """The call of a request to `/v1/responses`; or the id of the response that the request continues.

    Raises ApiError or RequestError, naming the field at fault.
    """
    asked = checked(_Request, parse_object(body), _IDLE)
    previous = asked.previous_response_id
    return _call(asked, [], tokenizer, served) if previous is None else previous


def parse_continued(body: bytes | bytearray, *, tokenizer: TokenizerLike, served: Served) -> ResponsesCall:
    """The call of a request that continues a response. `body`: a JSON list of the request and the stored response."""
    fields, stored = parse_json(body.decode(), None)
    return _call(checked(_Request, fields, _IDLE), stored["input"] + stored["response"]["output"], tokenizer, served)


def response_of(stored: bytes, query: Mapping[str, str]) -> Json:
    """The reply to `GET /v1/responses/ID`. Raises ApiError."""
    if query.get("stream") == "true":
        raise bad_request("stream is true: a stored response is not streamed again; leave it out", "stream")
    response: Json = json.loads(stored)["response"]
    return response


def items_of(stored: bytes, query: Mapping[str, str]) -> Json:
    """The reply to `GET /v1/responses/ID/input_items`: all items, the last one first. Raises ApiError."""
    for name, value in query.items():
        if name != "order":
            raise bad_request(f"{name} is {value[:64]!r}: all items are in one reply; leave it out", name)
    items = [{"id": f"item_{at}", "type": "message", **item} for at, item in enumerate(json.loads(stored)["input"])]
    items = items if query.get("order") == "asc" else items[::-1]
    return {"object": "list", "data": items, "first_id": items[0]["id"], "last_id": items[-1]["id"], "has_more": False}


def _call(asked: _Request, history: list[Json], tokenizer: TokenizerLike, served: Served) -> ResponsesCall:
    items = [{"role": "user", "content": asked.input}] if isinstance(asked.input, str) else asked.input
    if not isinstance(items, list) or not items:
        raise bad_request(f"input is {reprlib.repr(items)}: it must be a string or a list of items", "input")
    items = history + items
    served.check_length(items, "input", "items")
    tools, functions = _tools(asked.tools)
    thinks = asked.reasoning.effort != "none"
    switches = _SWITCHES if asked.reasoning.effort is not None else ()
    fields = {
        **{name: getattr(asked, name) for name in ("model", "temperature", "top_p", "stream", "parallel_tool_calls")},
        **asked.model_dump(include={*CacheFields.model_fields}, exclude_none=True),
        "explain_cache": asked.explain_cache,
        "max_tokens": asked.max_output_tokens,
        "tools": tools,
        "tool_choice": _tool_choice(asked.tool_choice),
        "reasoning_effort": asked.reasoning.effort,
        "include_reasoning": True,
        "chat_template_kwargs": {name: thinks for name in switches if tokenizer.template_knows(name)},
        "response_format": _response_format(asked.text.format),
        "verbosity": asked.text.verbosity,
    }
    make = partial(_chat_call, fields, tokenizer, served)
    messages = _messages(asked.instructions, items, -len(history))
    try:
        call = make(messages)
    except RequestRejected as refusal:
        # Some templates refuse a system message behind the first other message, which Codex sends.
        in_order = _messages(asked.instructions, items, -len(history), late="user")
        if refusal.param != "messages" or in_order == messages:
            raise
        call = make(in_order)
    head = {
        **asked.model_dump(exclude={"input", "include", "stream", "explain_cache", *_HINTS}),
        "reasoning": {"effort": asked.reasoning.effort, "summary": None},
        "text": {"format": asked.text.format or {"type": "text"}},
        "truncation": "disabled",
    }
    return ResponsesCall(
        **{name.name: getattr(call, name.name) for name in dataclasses.fields(call)},
        head=head,
        items=to_json(items) if asked.store else b"",
        functions=functions,
        encodes=bool(asked.include),
    )


def _chat_call(fields: Json, tokenizer: TokenizerLike, served: Served, messages: list[Json]) -> Call:
    """The chat's call, with errors that name this API's fields."""
    fields, renamed = {**fields, "messages": messages}, {"max_tokens": "max_output_tokens"}
    try:
        return chat_call(fields, tokenizer=tokenizer, served=served, renamed=renamed)
    except (ApiError, RequestRejected) as fault:
        name = (fault.param or "").partition(".")[0]
        if name not in _PLACES:
            raise
        raise bad_request(str(fault).replace(name, _PLACES[name]), _PLACES[name]) from None


def _response_format(form: Json | None) -> Json | None:
    if form is None or form.get("type") != "json_schema":
        return form
    schema = {name: value for name, value in form.items() if name != "type" and value is not None}
    return {"type": "json_schema", "json_schema": schema}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {name: choice[name] for name in choice if name != "type"}}
    return choice


def _tools(tools: Sequence[Json]) -> tuple[list[Json], dict[str, tuple[str, str]]]:
    """The tools of a chat, and the `functions` of ResponsesCall."""
    found: list[Json] = []
    functions: dict[str, tuple[str, str]] = {}
    for number, tool in enumerate(tools):
        where, kind = f"tools[{number}]", tool.get("type")
        if kind == "namespace":
            space = checked(_Namespace, tool, _IDLE_OF_TOOL, where)
            for at, inner in enumerate(space.tools):
                function = _function(inner, f"{where}.tools[{at}]")
                name = _joined(space.name, function["name"])
                functions[name] = space.name, function["name"]
                found.append({**function, "name": name})
        elif kind == "web_search" and tool.get("external_web_access") is False:
            continue  # Codex offers it unasked
        else:
            found.append(_function(tool, where))
    return [{"type": "function", "function": function} for function in found], functions


def _function(tool: Json, where: str) -> Json:
    if tool.get("type") != "function":
        kind = reprlib.repr(tool.get("type"))
        hint = '; in Codex\'s config.toml, set web_search = "disabled"' if kind == "'web_search'" else ""
        reason = f"this server has no tools of its own, and calls functions only: leave it out{hint}"
        raise bad_request(f"{where}.type is {kind}: {reason}", f"{where}.type")
    return checked(_Function, tool, _IDLE_OF_TOOL, where).model_dump(exclude_unset=True)


def _joined(namespace: str, name: str) -> str:
    return f"{namespace}__{name}" if namespace else name


def _messages(instructions: str | None, items: list[Any], first: int, *, late: str = "system") -> list[Json]:
    """The messages of a chat. The texts for the system in front of the first other item are one message with the
    instructions; reasoning, text and calls of the assistant that follow each other are one message.

    first   number of the first item
    late    role of the other texts for the system
    """
    system, out = [instructions] if instructions else [], list[Json]()
    for number, fields in enumerate(items, first):
        where = f"input[{number}]"
        match _item(fields, where):
            case _Message(role="assistant", content=content):
                message = _assistant(out, without=())
                parts = [message["content"]] if "content" in message else []
                message["content"] = "\n".join([*parts, _text(content, f"{where}.content", "")])
            case _Message(role=role, content=content):
                text = _text(content, f"{where}.content", "\n")
                chat_role = "user" if role == "user" else late if out else "system"
                if chat_role == "system" and not out:
                    system.append(text)
                elif chat_role == "user" and out and out[-1]["role"] == "user":
                    out[-1]["content"] += "\n" + text
                else:
                    out.append({"role": chat_role, "content": text})
            case _ReasoningItem() as item:
                text = _text(item.content, f"{where}.content", "", ("reasoning_text", "text"))
                if text := text or _decoded(item.encrypted_content):
                    _assistant(out, without=("content", "tool_calls", "reasoning_content"))["reasoning_content"] = text
            case _FunctionCall() as item:
                function = {"name": _joined(item.namespace, item.name), "arguments": _arguments(item.arguments)}
                call = {"id": item.call_id, "type": "function", "function": function}
                _assistant(out, without=()).setdefault("tool_calls", []).append(call)
            case _FunctionOutput() as item:
                content = _text(item.output, f"{where}.output", "\n")
                out.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
    for message in out:
        if "tool_calls" not in message:
            message.setdefault("content", "")
    return [{"role": "system", "content": "\n\n".join(system)}, *out] if system else out


def _assistant(out: list[Json], *, without: Sequence[str]) -> Json:
    """The last message, if it is the assistant's and has none of these fields; else a new one."""
    if not out or out[-1]["role"] != "assistant" or any(name in out[-1] for name in without):
        out.append({"role": "assistant"})
    return out[-1]


def _item(fields: Any, where: str) -> Any:
    if not isinstance(fields, dict):
        raise bad_request(f"{where} is {reprlib.repr(fields)}: it must be an object", where)
    kind = fields.get("type") or "message"
    if not isinstance(kind, str) or kind not in _ITEMS:
        reason = f"this server reads items of type {', '.join(map(repr, _ITEMS))}"
        raise bad_request(f"{where}.type is {reprlib.repr(kind)}: {reason}", f"{where}.type")
    return checked(_ITEMS[kind], fields, _IDLE_OF_ITEM, where)


def _text(content: Any, where: str, separator: str, kinds: Sequence[str] = _TEXT_PARTS) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise bad_request(f"{where} is {reprlib.repr(content)}: it must be a string or a list of parts", where)
    texts = []
    for number, part in enumerate(content):
        at, kind = f"{where}[{number}]", part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            reason = f"this server reads parts of type {', '.join(map(repr, kinds))} here"
            raise bad_request(f"{at}.type is {reprlib.repr(kind)}: {reason}", f"{at}.type")
        texts.append(checked(_TextPart, part, _IDLE_OF_PART, at).text)
    return separator.join(texts)


def _arguments(text: str) -> Json:
    """A call's arguments. Malformed ones may be the model's own, sent back by its client."""
    try:
        value = parse_json(text or "{}", None)
    except ApiError:
        value = None
    return value if isinstance(value, dict) else {"malformed": text}


def _decoded(encrypted: str) -> str:
    """The reasoning in an item's `encrypted_content`; empty if this server has not made it."""
    try:
        return base64.b64decode(encrypted.removeprefix(_ENCODED)).decode() if encrypted.startswith(_ENCODED) else ""
    except ValueError:
        return ""


class ResponsesReply:
    """Builds one response, streamed or complete, from the deltas of its one sample. Used on the event loop only.

    generate   awaits its argument for each delta, until the sample has finished
    store      gets the response, unless the request excludes that
    """

    def __init__(self, call: ResponsesCall, record: RequestRecord, generate: Generate, store: ResponseStore) -> None:
        self._call = call
        self._record = record
        self._generate = generate
        self._store = store
        self._parser = AnswerParser(call.answer or AnswerFormat())
        self._output = _Output(call)
        self._has_prompt = False
        self._is_reasoning = call.answer is not None and call.answer.inside
        self._reasoning_tokens = 0
        self._is_cut = False
        self._head: Json = {
            "id": "resp_" + record.request_id.removeprefix("req-"),
            "object": "response",
            "created_at": int(time.time()),
            **call.head,
        }

    async def complete(self) -> Json:
        """Generate the sample; return the JSON object."""
        answer = await whole_answer(self._generate, self._read)
        parts: list[Event] = [Reasoning(answer.reasoning)] if answer.reasoning else []
        parts.append(Content(answer.content))
        for number, (call_id, name, arguments) in enumerate(answer.calls):
            parts += [CallBegun(number, call_id, name), Arguments(number, arguments), CallEnded(number)]
        for part in parts:
            self._output.add(part)
        return await self._finish()

    async def stream(self, send: Send) -> None:
        """Send each delta as events. After a failure before the first event, the reply is a plain HTTP error."""
        self._record.error_event = self._failed

        async def emit(index: int, delta: Delta) -> None:
            is_first, parts = not self._has_prompt, self._read(delta)
            if is_first:
                await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM.copy()})
                for kind in ("created", "in_progress"):
                    self._output.say(f"response.{kind}", response=self._response("in_progress"))
            for part in parts:
                self._output.add(part)
            if events := self._output.take():
                await send({"type": "http.response.body", "body": event_lines(events), "more_body": True})

        await self._generate(emit)
        response = await self._finish()
        self._output.say(f"response.{response['status']}", response=response)
        await send({"type": "http.response.body", "body": event_lines(self._output.take()), "more_body": False})

    def _read(self, delta: Delta) -> list[Event]:
        """Count a delta. Returns the parts of the answer that it brings."""
        self._record.count(delta, is_first=not self._has_prompt)
        self._has_prompt = True
        if delta.finish_reason is not None:
            self._is_cut = delta.finish_reason == "length"
        events = answer_events(self._call, self._parser, delta)
        if events:
            self._is_reasoning = isinstance(events[-1], Reasoning)
        self._reasoning_tokens += len(delta.token_ids) * self._is_reasoning
        return events

    async def _finish(self) -> Json:
        """End the last item; store and return the response."""
        status = "incomplete" if self._is_cut else "completed"
        self._output.close(status)
        response = self._response(status)
        if self._call.items:
            data = b'{"input":%b,"response":%b}' % (self._call.items, to_json(response))
            await asyncio.to_thread(self._store.put, response["id"], data, owner=self._record.owner)
        return response

    def _response(self, status: str, error: Json | None = None) -> Json:
        usage, is_over = self._record.usage, status != "in_progress"
        counts = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cached_tokens_by_tier": usage.cached_by_tier,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.output_tokens,
        }
        return {
            **self._head,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [item for item in self._output.items if item["status"] != "in_progress"],
            "usage": counts if is_over else None,
            **(self._record.explanations if is_over else {}),
        }

    def _failed(self, error: ApiError) -> bytes:
        fields = error.body()["error"]
        reason = {"code": "server_error", "message": fields["message"]}
        self._output.say("error", code=fields["code"], message=fields["message"], param=fields["param"])
        self._output.say("response.failed", response=self._response("failed", reason))
        return event_lines(self._output.take())


# Prefix of an item's id, and the name of its text in events, by the item's type
_SPELLING = {
    "message": ("msg", "output_text"),
    "reasoning": ("rs", "reasoning_text"),
    "function_call": ("fc", "function_call_arguments"),
}

_MORE: dict[str, Json] = {  # fields of events with the item's text
    "message": {"content_index": 0, "logprobs": []},
    "reasoning": {"content_index": 0},
    "function_call": {},
}


class _Output:
    """The items of a response's output, one after another, and their events. White space alone makes no message."""

    def __init__(self, call: ResponsesCall) -> None:
        self.items: list[Json] = []
        self._call = call
        self._events: list[Json] = []
        self._number = 0  # of the next event
        self._open = ""  # type of the last item, if it has not ended
        self._texts: list[str] = []
        self._space = ""  # the start of a message that is not open yet

    def say(self, kind: str, **fields: Any) -> None:
        """Add an event."""
        self._events.append({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1

    def take(self) -> list[Json]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def add(self, part: Event) -> None:
        """Add the next part of the answer."""
        match part:
            case Content(text) if self._open != "message" and not (self._space + text).strip():
                self._space += text
            case Content(text):
                text, self._space = self._space + text, ""
                self._piece("message", text, {"role": "assistant", "content": []})
            case Reasoning(text):
                self._piece("reasoning", text, {"summary": [], "content": [], "encrypted_content": None})
            case CallBegun(_, call_id, name):
                space, name = self._call.functions.get(name, ("", name))
                fields = {"call_id": call_id, "name": name, "arguments": ""}
                self._begin("function_call", fields | ({"namespace": space} if space else {}))
            case Arguments(_, text):
                self._piece("function_call", text, {})
            case CallEnded(_, malformed):
                self.close("incomplete" if malformed else "completed")

    def close(self, status: str) -> None:
        """End the open item, if there is one."""
        kind, self._open = self._open, ""
        if not kind:
            return
        item, text, name = self.items[-1], "".join(self._texts), _SPELLING[kind][1]
        item["status"] = status
        if kind == "function_call":
            item["arguments"] = text
            self._say(f"{name}.done", arguments=text, name=item["name"])
        else:
            part = _part(kind, text)
            item["content"] = [part]
            if kind == "reasoning" and self._call.encodes:
                item["encrypted_content"] = _ENCODED + base64.b64encode(text.encode()).decode()
            self._say(f"{name}.done", text=text, **_MORE[kind])
            self._say("content_part.done", content_index=0, part=part)
        self.say("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _begin(self, kind: str, fields: Json) -> None:
        self.close("completed")
        self._open, self._texts, self._space = kind, [], ""
        item = {"id": f"{_SPELLING[kind][0]}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **fields}
        self.items.append(item)
        self.say("response.output_item.added", output_index=len(self.items) - 1, item=item.copy())
        if kind != "function_call":
            self._say("content_part.added", content_index=0, part=_part(kind, ""))

    def _piece(self, kind: str, text: str, fields: Json) -> None:
        if self._open != kind:
            self._begin(kind, fields)
        self._texts.append(text)
        self._say(f"{_SPELLING[kind][1]}.delta", delta=text, **_MORE[kind])

    def _say(self, kind: str, **fields: Any) -> None:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        self.say(f"response.{kind}", **place, **fields)


def _part(kind: str, text: str) -> Json:
    part: Json = {"type": _SPELLING[kind][1], "text": text}
    return part | ({"annotations": [], "logprobs": []} if kind == "message" else {})
