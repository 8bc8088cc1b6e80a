"""Anthropic's Messages API: translates a request to the fields of a chat, and a chat's deltas to Anthropic's replies
and events. `text_work.py` parses off the event loop; replies are built on it.
"""

from __future__ import annotations

import dataclasses
import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field
from starlette.types import Send

from sidestream.formats import AnswerFormat, AnswerParser, Arguments, CallBegun, Content, Event, Reasoning
from sidestream.server.body import EVENT_STREAM, Served, Strict, checked, event_lines, parse_object, to_json
from sidestream.server.cache_marks import CacheControl, Cut, created, marks_of
from sidestream.server.errors import ApiError, bad_request
from sidestream.server.fields import Body, Call, chat_call
from sidestream.server.middleware import RequestRecord
from sidestream.server.responses import Generate, Json, answer_events, whole_answer
from sidestream.text import TokenizerLike
from sidestream.types import Delta

_BILLING = "x-anthropic-billing-header"  # Claude Code's first system block, which differs between its requests
# Fields of requests without effect here, with their accepted values; None: all values.
_IDLE: dict[str, tuple[Any, ...] | None] = {
    "context_management": None,  # asks the server to leave out old content, which the model then just reads
    "metadata": None,
    "service_tier": None,
}
_IDLE_OF_BLOCK = {"type": None, "cache_control": None, "citations": None, "caller": None}
_IDLE_OF_TOOL = {"type": ("custom",), "cache_control": None, "eager_input_streaming": None}
_Objects = Annotated[list[dict[str, Any]], FailFast()]
_SWITCHES = ("enable_thinking", "thinking")  # of reasoning, in chat templates
_NAMES = {"stop": "stop_sequences", "thinking_token_budget": "thinking.budget_tokens"}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}


class _Thinking(Strict):
    type: Literal["enabled", "adaptive", "disabled"] = "disabled"
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] = "summarized"


class _ToolChoice(Strict):
    type: Literal["auto", "none", "any", "tool"] = "auto"
    name: str = ""
    disable_parallel_tool_use: bool = False


class _OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class _OutputConfig(Strict):
    format: _OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class _Request(Strict):
    """The fields with their types. `chat_call` checks ranges."""

    model: str
    messages: _Objects
    max_tokens: int | None = None
    system: Any = ""
    tools: _Objects = Field(default=[])
    tool_choice: _ToolChoice = _ToolChoice()
    stop_sequences: Annotated[list[str], FailFast()] = Field(default=[])
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool = False
    thinking: _Thinking = _Thinking()
    output_config: _OutputConfig = _OutputConfig()
    cache_control: CacheControl | None = None
    # not in Anthropic's API
    explain_cache: bool = False


class _Tool(Strict):
    name: str
    description: str = ""
    input_schema: dict[str, Any] = Field(serialization_alias="parameters")
    strict: bool = False


class _Message(Strict):
    role: Literal["user", "assistant"]
    content: Any


class _TextBlock(Strict):
    text: str


class _ThinkingBlock(Strict):
    thinking: str
    signature: str = ""


class _ToolUse(Strict):
    id: str
    name: str
    input: dict[str, Any]


class _ToolResult(Strict):
    tool_use_id: str
    content: Any = ""
    is_error: bool = False


_TEXT_ONLY: dict[str, type[Strict]] = {"text": _TextBlock}
_BLOCKS: dict[str, dict[str, type[Strict]]] = {
    "user": {**_TEXT_ONLY, "tool_result": _ToolResult},
    "assistant": {**_TEXT_ONLY, "thinking": _ThinkingBlock, "tool_use": _ToolUse},
}


BODIES: Mapping[str, tuple[Body, ...]] = dict.fromkeys(
    ("/v1/messages", "/v1/messages/count_tokens"), ((_Request, _IDLE),)
)
"""As `fields.BODIES`."""


def parse_messages(body: bytes | bytearray, *, tokenizer: TokenizerLike, served: Served) -> Call:
    """The call of a request to `/v1/messages`. Raises ApiError or RequestError, naming the field at fault."""
    asked = _asked(body)
    if asked.max_tokens is None:
        raise bad_request("max_tokens is missing: it is required", "max_tokens")
    call, whole = _call(asked, tokenizer, served), Cut(asked.tools, asked.system, asked.messages)

    def lay_out(cut: Cut) -> Sequence[int]:
        """The prompt of a part of the request. Its last message is the user's."""
        part = {**cut._asdict(), "tool_choice": _ToolChoice(), "output_config": _OutputConfig()}
        return _call(asked.model_copy(update=part), tokenizer, served).prompts[0]

    marks = marks_of(whole, asked.cache_control, call.prompts[0], lay_out, served.block_tokens)
    return dataclasses.replace(call, marks=marks) if marks else call


def count_tokens(body: bytes | bytearray, *, tokenizer: TokenizerLike, served: Served) -> bytes:
    """The reply to `/v1/messages/count_tokens`, as JSON. Raises as `parse_messages` does."""
    call = _call(_asked(body), tokenizer, served)
    return to_json({"input_tokens": len(call.prompts[0])})


def _asked(body: bytes | bytearray) -> _Request:
    fields = parse_object(body)
    if fields.get("thread") is not None:  # with this code, Anthropic's client sends the whole conversation instead
        message = "thread is given, but this server holds no conversations: leave it out, and send all messages"
        raise ApiError(400, message, param="thread", code="thread_unsupported_request")
    return checked(_Request, fields, _IDLE)


def _call(asked: _Request, tokenizer: TokenizerLike, served: Served) -> Call:
    tools = [checked(_Tool, tool, _IDLE_OF_TOOL, f"tools[{at}]") for at, tool in enumerate(asked.tools)]
    thinks = asked.thinking.type != "disabled"
    system = [block.text for block in _blocks(asked.system, _TEXT_ONLY, "system")]
    system = [text for text in system if text and not text.startswith(_BILLING)]
    messages = [{"role": "system", "content": "\n".join(system)}] if system else []
    messages += _messages(asked.messages)
    continues = messages[-1]["role"] == "assistant"
    if continues and ("tool_calls" in messages[-1] or not messages[-1]["content"]):
        where = f"messages[{len(asked.messages) - 1}]"
        raise bad_request(f"{where} ends the conversation without a text to continue: add a user message", where)
    fields = {
        **{name: getattr(asked, name) for name in ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")},
        "explain_cache": asked.explain_cache,
        "messages": messages,
        "tools": [{"type": "function", "function": tool.model_dump(by_alias=True)} for tool in tools],
        "tool_choice": _tool_choice(asked.tool_choice),
        "response_format": _response_format(asked.output_config.format),
        "parallel_tool_calls": not asked.tool_choice.disable_parallel_tool_use,
        "stop": asked.stop_sequences,
        "include_stop_str_in_output": bool(asked.stop_sequences),  # tells which one was found
        "include_reasoning": thinks and asked.thinking.display != "omitted",
        "reasoning_effort": asked.output_config.effort,
        # A model without a known format of reasoning has none that the budget could bound.
        "thinking_token_budget": asked.thinking.budget_tokens if thinks and served.reasoning_format else None,
        "chat_template_kwargs": {name: thinks for name in _SWITCHES if tokenizer.template_knows(name)},
        "continue_final_message": continues,
    }
    return chat_call(fields, tokenizer=tokenizer, served=served, renamed=_NAMES)


def _tool_choice(choice: _ToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _response_format(form: _OutputFormat | None) -> Json | None:
    return None if form is None else {"type": "json_schema", "json_schema": {"schema": form.schema_}}


def _messages(messages: list[Json]) -> list[Json]:
    """The messages of a chat. Each result of a tool becomes a message, and neighbours of the user one message."""
    if not messages:
        raise bad_request("messages is []: it must be a list of one or more messages", "messages")
    out: list[Json] = []
    for number, fields in enumerate(messages):
        where = f"messages[{number}]"
        message = checked(_Message, fields, {}, where)
        blocks = _blocks(message.content, _BLOCKS[message.role], f"{where}.content")
        if not blocks:
            raise bad_request(f"{where}.content is []: it must be a string or a list of blocks", f"{where}.content")
        if message.role == "assistant":
            out.append(_assistant(blocks))
            continue
        for at, block in enumerate(blocks):
            if isinstance(block, _ToolResult):
                results = _blocks(block.content, _TEXT_ONLY, f"{where}.content[{at}].content")
                text = "\n".join(result.text for result in results)
                out.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
            elif out and out[-1]["role"] == "user":
                out[-1]["content"] += "\n" + block.text
            else:
                out.append({"role": "user", "content": block.text})
    return out


def _assistant(blocks: list[Any]) -> Json:
    uses = [block for block in blocks if isinstance(block, _ToolUse)]
    functions = [(use.id, {"name": use.name, "arguments": use.input}) for use in uses]
    calls = [{"id": call_id, "type": "function", "function": function} for call_id, function in functions]
    texts = [block.text for block in blocks if isinstance(block, _TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, _ThinkingBlock)]
    return {
        "role": "assistant",
        **({"content": "".join(texts)} if texts or not calls else {}),
        **({"reasoning_content": "".join(thoughts)} if thoughts else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def _blocks(content: Any, kinds: Mapping[str, type[Strict]], where: str) -> list[Any]:
    """The blocks of a content, each of one of these kinds."""
    if isinstance(content, str):
        return [_TextBlock(text=content)]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise bad_request(f"{where} is {reprlib.repr(content)}: it must be a string or a list of blocks", where)
    found = []
    for number, block in enumerate(content):
        at, kind = f"{where}[{number}]", block.get("type")
        if not isinstance(kind, str) or kind not in kinds:
            reason = f"this server reads blocks of type {', '.join(map(repr, kinds))} here"
            raise bad_request(f"{at}.type is {str(kind)[:100]!r}: {reason}", f"{at}.type")
        found.append(checked(kinds[kind], block, _IDLE_OF_BLOCK, at))
    return found


class MessagesReply:
    """Builds one reply, streamed or complete, from the deltas of its one sample. Used on the event loop only.

    generate   awaits its argument for each delta, until the sample has finished
    """

    def __init__(self, call: Call, record: RequestRecord, generate: Generate, model: str) -> None:
        self._call = call
        self._record = record
        self._generate = generate
        self._parser = AnswerParser(call.answer or AnswerFormat())
        self._has_prompt = False
        self._stop_sequence: str | None = None
        self._stop_reason: str | None = None
        name = "msg_" + record.request_id.removeprefix("req-")
        self._message: Json = {"id": name, "type": "message", "role": "assistant", "model": model}

    async def complete(self) -> Json:
        """Generate the sample; return the JSON object."""
        answer = await whole_answer(self._generate, self._read)
        content: list[Json] = []
        if answer.reasoning:
            content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
        if answer.content.strip():
            content.append({"type": "text", "text": answer.content})
        for call_id, name, arguments in answer.calls:
            content.append({"type": "tool_use", "id": call_id, "name": name, "input": json.loads(arguments)})
        return {**self._message, "content": content, **self._ending(bool(answer.calls)), **self._usage()}

    async def stream(self, send: Send) -> None:
        """Send each delta as events. After a failure before the first event, the reply is a plain HTTP error."""
        blocks = _BlockEvents()

        async def emit(index: int, delta: Delta) -> None:
            events: list[Json] = []
            is_first, parts = not self._has_prompt, self._read(delta)
            if is_first:
                await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM.copy()})
                message = {**self._message, "content": [], "stop_reason": None, "stop_sequence": None}
                events.append({"type": "message_start", "message": {**message, **self._usage()}})
            for part in parts:
                events += blocks.add(part)
            if events:
                await send({"type": "http.response.body", "body": event_lines(events), "more_body": True})

        await self._generate(emit)
        ending = {"type": "message_delta", "delta": self._ending(blocks.has_calls), **self._usage()}
        last = event_lines([*blocks.close(), ending, {"type": "message_stop"}])
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _read(self, delta: Delta) -> list[Event]:
        """Count a delta. Returns the parts of the answer that it brings, without the stop sequence."""
        text = delta.text
        self._record.count(delta, is_first=not self._has_prompt)
        self._has_prompt = True
        if delta.finish_reason is not None:
            self._stop_reason = _STOP_REASONS[delta.finish_reason]
        if delta.finish_reason == "stop":  # the last delta has the whole stop sequence: no part of it was sent before
            found = [stop for stop in self._call.params.stop if text.endswith(stop)]
            if found:
                self._stop_sequence, self._stop_reason = max(found, key=len), "stop_sequence"
                text = text.removesuffix(self._stop_sequence)
        shown = Delta(0, text, delta.token_ids, (), delta.finish_reason, delta.prompt_tokens, delta.cached)
        return answer_events(self._call, self._parser, shown)

    def _ending(self, has_calls: bool) -> Json:
        reason = "tool_use" if has_calls and self._stop_reason == "end_turn" else self._stop_reason
        return {"stop_reason": reason, "stop_sequence": self._stop_sequence}

    def _usage(self) -> Json:
        """The usage, and at the end the explanation of the cache; Anthropic's clients ignore fields that they do not
        know.
        """
        usage = self._record.usage
        fresh = created(self._call.marks, usage.cached_tokens)
        written = sum(fresh.values())
        counts = {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens - written,
            "cache_creation_input_tokens": written,
            "cache_creation": {f"ephemeral_{ttl}_input_tokens": count for ttl, count in fresh.items()},
            "cache_read_input_tokens": usage.cached_tokens,
            "cached_tokens_by_tier": usage.cached_by_tier,
            "output_tokens": usage.output_tokens,
        }
        return {"usage": counts, **self._record.explanations}


class _BlockEvents:
    """The events of a stream's content blocks, one after another. White space alone makes no text block."""

    def __init__(self) -> None:
        self.has_calls = False
        self._open = ""  # type of the open block
        self._number = -1
        self._space = ""  # the start of a text block that is not open yet

    def add(self, part: Event) -> list[Json]:
        """The events for the next part of the answer."""
        match part:
            case Content(text) if self._open != "text" and not (self._space + text).strip():
                self._space += text
                return []
            case Content(text):
                text, self._space = self._space + text, ""
                return self._piece({"type": "text", "text": ""}, {"type": "text_delta", "text": text})
            case Reasoning(text):
                start = {"type": "thinking", "thinking": "", "signature": ""}
                return self._piece(start, {"type": "thinking_delta", "thinking": text})
            case CallBegun(_, call_id, name):
                self.has_calls = True
                return self._begin({"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case Arguments(_, text):
                return self._piece({"type": "tool_use"}, {"type": "input_json_delta", "partial_json": text})
            case _:
                return self.close()

    def close(self) -> list[Json]:
        """The event that ends the open block, if there is one."""
        was_open, self._open = self._open, ""
        return [{"type": "content_block_stop", "index": self._number}] if was_open else []

    def _begin(self, start: Json) -> list[Json]:
        events, self._space = self.close(), ""
        self._number, self._open = self._number + 1, start["type"]
        return [*events, {"type": "content_block_start", "index": self._number, "content_block": start}]

    def _piece(self, start: Json, delta: Json) -> list[Json]:
        begun = [] if self._open == start["type"] else self._begin(start)
        return [*begun, {"type": "content_block_delta", "index": self._number, "delta": delta}]
