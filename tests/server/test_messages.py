"""Anthropic's Messages API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from proof.fake_backend import FakeBackend, FakeTokenizer, Script
from sidestream.config import ReasoningMarks
from sidestream.errors import QueueFull
from sidestream.types import CachedTokens

from .serving import HI, Served, accepts, serving

TOOL = {"name": "f", "description": "d", "input_schema": {"properties": {"x": {"type": "integer"}}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
ANSWER = f"<think>hm</think>\n\nLet me see.\n{CALL}\n{CALL.replace('1', '2')}"
CREATED = {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0}
THINK = {"type": "enabled", "budget_tokens": 1024}


@contextmanager
def _answering(text: str = ANSWER, **script: Any) -> Iterator[Served]:
    backend = FakeBackend(Script(text, cached=CachedTokens(device=1, host=2, disk=3), **script))
    options = ("tools", "tool", "tool_calls", "enable_thinking", "reasoning_effort")
    backend.tokenizer = FakeTokenizer(options, "<tool_call> </think>")
    with serving(backend) as served:
        yield served


def _post(served: Served, path: str = "/v1/messages", headers: Any = None, **fields: Any) -> Any:
    return served.http.post(path, json={"model": "fake", "max_tokens": 1000, "messages": HI} | fields, headers=headers)


def _message(served: Served, **fields: Any) -> Any:
    reply = _post(served, **fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def _events(served: Served, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream. Each must be named as its type."""
    events = []
    for text in _post(served, stream=True, **fields).text.removesuffix("\n\n").split("\n\n"):
        name, data = text.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def _accumulated(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of the events."""
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [start["index"] for start in starts] == list(range(len(starts)))
    for event in events:
        if event["type"] == "content_block_delta":
            block, (_, (name, text)) = starts[event["index"]]["content_block"], event["delta"].items()
            block[name] = block.get(name, "") + text
    blocks = [start["content_block"] for start in starts]
    for block in blocks:
        if "partial_json" in block:
            block["input"] = json.loads(block.pop("partial_json"))
    return {**events[0]["message"], "content": blocks, **events[-2]["delta"], "usage": events[-2]["usage"]}


def test_a_complete_message_has_thinking_text_and_tool_uses() -> None:
    with _answering() as served:
        message = _message(served, tools=[TOOL], thinking=THINK)
        ((_, options),) = served.backend.tokenizer.chats
    assert message["id"].startswith("msg_") and len({block.pop("id") for block in message["content"][2:]}) == 2
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "fake")
    thinking, text, *calls = message["content"]
    assert thinking == {"type": "thinking", "thinking": "hm", "signature": ""}
    assert text == {"type": "text", "text": "\n\nLet me see.\n"}
    assert calls == [{"type": "tool_use", "name": "f", "input": {"x": x}} for x in (1, 2)]
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    function = {"name": "f", "description": "d", "parameters": TOOL["input_schema"]}
    assert options == {"tools": [{"type": "function", "function": function}], "enable_thinking": True}


def test_the_parts_of_usage_sum_to_the_prompt() -> None:
    with _answering("Hello") as served:
        usage = _message(served)["usage"]
        counted = _post(served, "/v1/messages/count_tokens", max_tokens=None).json()
        start = _events(served)[0]["message"]["usage"]
    assert counted == {"input_tokens": len("user: hi\nassistant: ")}
    cached = {"cache_read_input_tokens": 6, "cached_tokens_by_tier": {"device": 1, "host": 2, "disk": 3}}
    none = {"cache_creation_input_tokens": 0, "cache_creation": CREATED}
    parts = {"input_tokens": 20 - 6, **cached, **none}
    assert (start, usage) == ({**parts, "output_tokens": 1}, {**parts, "output_tokens": 5})


@pytest.mark.parametrize("token_bytes", [1, 7, 1000])
def test_a_stream_accumulates_to_the_complete_message(token_bytes: int) -> None:
    with _answering(token_bytes=token_bytes) as served:
        whole = _message(served, tools=[TOOL], thinking=THINK)
        events = _events(served, tools=[TOOL], thinking=THINK)
    streamed = _accumulated(events)
    for block in [*whole["content"], whole, *streamed["content"], streamed]:
        block.pop("id", None)
    assert streamed == whole
    kinds = [event["type"].removeprefix("content_block_") for event in events]
    kinds = [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if not kind == before == "delta"]
    assert kinds == ["message_start", *["start", "delta", "stop"] * 4, "message_delta", "message_stop"]


def test_white_space_alone_makes_no_text_block() -> None:
    with _answering("\n\n") as served:
        assert _message(served)["content"] == _accumulated(_events(served))["content"] == []


def test_stop_sequences_and_lengths_are_told_apart() -> None:
    with _answering("One. END", token_bytes=1000) as served:
        stopped = _message(served, stop_sequences=["ND", "END", "x"])
        streamed = _accumulated(_events(served, stop_sequences=["END"]))
        assert served.backend.params[-1].stop == ("END",) and served.backend.params[-1].include_stop
        cut, ended = _message(served, max_tokens=3), _message(served)
    for message in (stopped, streamed):
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")
        assert message["content"] == [{"type": "text", "text": "One. "}]
    assert (cut["stop_reason"], cut["content"][0]["text"], ended["stop_reason"]) == ("max_tokens", "One", "end_turn")


def test_a_conversation_becomes_the_messages_of_a_chat() -> None:
    hint = {"cache_control": {"type": "ephemeral"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "42"}], "is_error": True}
    thinking = {"type": "thinking", "thinking": "hm", "signature": ""}
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}
    history = [
        {"role": "user", "content": [{"type": "text", "text": "a", **hint}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [thinking, {"type": "text", "text": "Yes"}, use]},
        {"role": "user", "content": [{**result, **hint}, {"type": "text", "text": "go on"}]},
        {"role": "user", "content": "now"},
    ]
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1"}
    with _answering() as served:
        headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219"}
        fields = {"messages": history, "metadata": {"user_id": "me"}, "tools": [TOOL], "top_k": 5, "temperature": 0.5}
        system = [billing, {"type": "text", "text": "Be kind.", **hint}]
        assert _post(served, "/v1/messages?beta=true", headers, system=system, **fields).status_code == 200
        messages, options = served.backend.tokenizer.chats[0]
        (params,) = served.backend.params
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    texts = [(message["role"][0], message.pop("content")) for message in messages]
    assert texts == [("s", "Be kind."), ("u", "a\nb"), ("a", "Yes"), ("t", "42"), ("u", "go on\nnow")]
    assert messages[2] == {"role": "assistant", "reasoning_content": "hm", "tool_calls": [call]}
    assert messages[3] == {"role": "tool", "tool_call_id": "t1"}
    assert options["enable_thinking"] is False
    assert (params.max_tokens, params.top_k, params.temperature, params.stop) == (1000, 5, 0.5, ())


def test_thinking_is_left_out_unless_it_is_enabled_and_shown() -> None:
    with _answering("<think>hm</think>Yes") as served:
        for thinking in (None, {"type": "disabled"}, {**THINK, "display": "omitted"}):
            assert _message(served, thinking=thinking)["content"] == [{"type": "text", "text": "Yes"}]
        _message(served, thinking={"type": "adaptive"}, output_config={"effort": "low"})
        assert served.backend.tokenizer.chats[-1][1] == {"enable_thinking": True, "reasoning_effort": "low"}


def test_a_budget_of_thinking_reaches_the_engine_with_the_markers() -> None:
    budget = {"type": "enabled", "budget_tokens": 7}
    marks = ReasoningMarks(tuple(b"<think>"), tuple(b"</think>"))
    with _answering() as served:
        _message(served, thinking=budget)
        chat = served.chat(thinking_token_budget=0)
        assert chat.json()["choices"][0]["message"]["reasoning"] == "hm"
        ours, theirs = served.backend.params
        assert (ours.thinking_token_budget, ours.reasoning) == (7, marks)
        assert (theirs.thinking_token_budget, theirs.reasoning) == (0, marks)
        assert served.chat(thinking_token_budget=-1).json()["error"]["param"] == "thinking_token_budget"
        refused = _post(served, thinking={"type": "enabled", "budget_tokens": -1}).json()["error"]["message"]
        assert refused.startswith("thinking.budget_tokens is -1: it must be a whole number")
    with serving(FakeBackend()) as served:  # the format of its reasoning is unknown
        _message(served, thinking=budget)
        assert served.backend.params[0].thinking_token_budget is None
        error = served.chat(thinking_token_budget=5).json()["error"]
        assert error["param"] == "thinking_token_budget"
        assert "the format of this model's reasoning is unknown or switched off" in error["message"]


def test_an_assistants_last_message_is_continued() -> None:
    with _answering() as served:
        _message(served, messages=[*HI, {"role": "assistant", "content": "Hel"}])
    assert served.backend.prompts == ["user: hi\nassistant: Hel"]


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, CALL, "so"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, CALL, "so"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}, "{}", "so"),
    ],
)
def test_forced_tools_and_forms_of_output_are_enforced(fields: dict[str, Any], right: str, wrong: str) -> None:
    with _answering(CALL) as served:
        _message(served, **fields)
    wanted = served.backend.params[-1].structured_outputs
    assert wanted is not None and (accepts(wanted, right), accepts(wanted, wrong)) == (True, False)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "", "a": 1}]}]}, "content[0].a"),
        ({"messages": [*HI, {"role": "assistant", "content": ""}]}, "messages[1]"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "no tool has this name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temprature": 1}, "temperature"),
    ],
)
def test_bad_fields_are_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with _answering() as served:
        reply = _post(served, **fields)
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
    assert named in reply.json()["error"]["message"]


def test_errors_have_anthropics_format_before_and_during_a_stream() -> None:
    with _answering(refuse=QueueFull("full")) as served:
        full, unknown = _post(served, stream=True), _post(served, model="other")
    assert (full.status_code, full.json()["type"], full.json()["error"]["type"]) == (429, "error", "rate_limit_error")
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
    with _answering("abc", fail_after=2) as served:
        *_, last = _events(served)
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")


def test_a_threads_error_lets_anthropics_client_send_all_messages_itself() -> None:
    with _answering() as served:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            reply = _post(served, path, thread={"type": "create"})
            details = {"error_code": "thread_unsupported_request"}  # the client reads this code
            assert (reply.status_code, reply.json()["error"]["details"]) == (400, details)


def test_the_servers_key_may_come_as_x_api_key() -> None:
    with serving(api_key="secret") as served:
        headers = [{"authorization": "", "x-api-key": key} for key in ("secret", "wrong", "")]
        assert [_post(served, headers=one).status_code for one in headers] == [200, 401, 401]


def test_anthropics_client_reads_messages_and_streams() -> None:
    import anthropic  # a tenth of the time to collect all tests

    ask: dict[str, Any] = {"model": "fake", "max_tokens": 1000, "messages": HI, "tools": [TOOL], "thinking": THINK}
    with _answering() as served, anthropic.Anthropic(base_url=served.running.url, api_key="none") as client:
        whole = client.messages.create(**ask)
        with client.messages.stream(**ask) as stream:
            streamed = stream.get_final_message()
    assert [block.type for block in streamed.content] == [block.type for block in whole.content]
    assert streamed.usage == whole.usage and whole.usage.cache_read_input_tokens == 6
    assert whole.usage.cache_creation is not None and whole.usage.cache_creation.ephemeral_5m_input_tokens == 0


def _marked(text: str, ttl: str = "5m") -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral", "ttl": ttl}}


def _pinned(served: Served, count: int) -> dict[str, tuple[float | None, bool]]:
    served.backend.wait_until(lambda fake: len(fake.pinned) == count)
    return {text: (one.ttl_s, one.hint) for text, one in served.backend.pinned.items()}


def test_marked_prefixes_are_pinned_in_whole_blocks_and_counted_as_written() -> None:
    """The fake has blocks of 4 tokens, one byte each, and 6 tokens of each prompt are cached."""
    system = [_marked("Be kind, and brief.", "1h"), {"type": "text", "text": "Now."}]
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, _marked("word"), _marked("last one")]}]
    with _answering("Hello") as served:
        usage = _message(served, system=system, messages=[*messages, {"role": "user", "content": "b"}])["usage"]
        prompt = "system: Be kind, and brief.\nNow.\nuser: a\nword\nlast one\nb\nassistant: "
        assert served.backend.prompts == [prompt]
        long, short = prompt[:28], prompt[: prompt.index("b\nassistant") // 4 * 4]
        assert _pinned(served, 2) == {long: (3600.0, True), short: (300.0, True)}
    created = {"ephemeral_1h_input_tokens": len(long) - 6, "ephemeral_5m_input_tokens": len(short) - len(long)}
    assert usage["cache_creation"] == created
    assert usage["cache_creation_input_tokens"] == sum(created.values())
    counted = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert sum(usage[name] for name in counted) == len(prompt)


def test_a_mark_of_a_tool_an_answer_or_the_whole_request_pins_up_to_it() -> None:
    hint = {"cache_control": {"type": "ephemeral"}}
    history = [*HI, {"role": "assistant", "content": [_marked("Hello, you there")]}, {"role": "user", "content": "go"}]
    head = "user: hi\nassistant: Hello, you there\nuse"  # what a message begins with is the same for all texts
    with _answering("Hello") as served:
        _message(served, messages=history)
        assert list(_pinned(served, 1)) == [head]
        served.backend.pinned.clear()
        _message(served, **hint)
        assert list(_pinned(served, 1)) == ["user: hi\nassistant: "]
        served.backend.pinned.clear()
        _message(served, tools=[{**TOOL, **hint}], system="Be kind, and brief.")
        assert list(_pinned(served, 1)) == ["system: Be kind, and brief.\nuser"]
        result = {"type": "tool_result", "tool_use_id": "t", "content": [_marked("42, I think")]}
        use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
        conversation = [*HI, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        served.backend.pinned.clear()
        _message(served, messages=conversation)
        assert len(_pinned(served, 1)) == 1


def test_with_hints_switched_off_or_bounded_marks_pin_nothing_or_less_long() -> None:
    for bound, pins in ((0.0, {}), (60.0, {"user: hi ": (60.0, True)})):
        with serving(FakeBackend(Script("Hello")), max_hint_ttl_s=bound) as served:
            _message(served, messages=[{"role": "user", "content": [_marked("hi there")]}])
            if pins:
                assert list(_pinned(served, 1).values()) == list(pins.values())
            assert len(served.backend.pinned) == len(pins)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("yes", "cache_control is 'yes'"),
        ({"type": "forever"}, "cache_control.type"),
        ({"type": "ephemeral", "ttl": "2h"}, "cache_control.ttl"),
        ({"type": "ephemeral", "x": 1}, "cache_control.x"),
    ],
)
def test_a_bad_cache_control_is_refused_by_name(value: Any, said: str) -> None:
    with _answering() as served:
        block = {"type": "text", "text": "hi", "cache_control": value}
        reply = _post(served, messages=[{"role": "user", "content": [block]}])
        assert reply.status_code == 400 and said in reply.json()["error"]["message"], reply.text


def test_more_than_four_marks_are_refused_and_null_is_none() -> None:
    with _answering() as served:
        none = [{**_marked("a"), "cache_control": None}] * 5
        assert _post(served, messages=[{"role": "user", "content": none}]).status_code == 200
        reply = _post(served, messages=[{"role": "user", "content": [_marked("a")] * 5}])
        assert reply.status_code == 400 and "at most 4" in reply.json()["error"]["message"]
