"""OpenAI's Responses API."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from proof.fake_backend import FakeBackend, FakeTokenizer, Script
from sidestream.errors import QueueFull, RequestRejected
from sidestream.server import ServerOptions, openai_responses
from sidestream.server.errors import ApiError
from sidestream.server.response_store import ResponseStore
from sidestream.types import CachedTokens

from .serving import Served, serving

FUNCTION = {"type": "function", "name": "f", "description": "d", "parameters": {"properties": {"x": {}}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
ANSWER = f"<think>hm</think>\n\nLet me see.\n{CALL}\n{CALL.replace('1', '2')}"
ENCODED = "sidestream-reasoning:aG0="
IDS = ("id", "call_id", "item_id", "created_at")

# What Codex CLI sends to a provider other than OpenAI, shortened (codex-rs: codex-api/src/common.rs, tools/src).
CODEX = {
    "model": "fake",
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "# AGENTS.md"}, {"type": "input_text", "text": "<environment>"}],
            "internal_chat_message_metadata_passthrough": {"turn_id": "t1"},
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list the files"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": ENCODED},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "name": "exec_command", "arguments": '{"cmd":"ls"}', "call_id": "c1"},
        {"type": "function_call", "name": "click", "namespace": "mcp__web", "arguments": "{", "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "a.txt"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "bad JSON"}]},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<mode>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go on"}]},
    ],
    "tools": [
        {**FUNCTION, "name": "exec_command", "strict": False},
        {"type": "namespace", "name": "mcp__web", "description": "Tools.", "tools": [{**FUNCTION, "name": "click"}]},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
    "client_metadata": {"x-codex-installation-id": "0199a213"},
    "text": {"verbosity": "medium"},
}


@contextmanager
def _answering(text: str = ANSWER, options: dict[str, Any] | None = None, **script: Any) -> Iterator[Served]:
    backend = FakeBackend(Script(text, cached=CachedTokens(device=1, host=2, disk=3), **script))
    known = ("tools", "tool", "tool_calls", "enable_thinking", "reasoning_effort")
    backend.tokenizer = FakeTokenizer(known, "<tool_call> </think>")
    with serving(backend, **options or {}) as served:
        yield served


def _post(served: Served, **fields: Any) -> Any:
    return served.http.post("/v1/responses", json={"model": "fake", "input": "hi"} | fields)


def _response(served: Served, **fields: Any) -> Any:
    reply = _post(served, **fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def _events(served: Served, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream. Each must be named as its type, and numbered."""
    events = []
    for text in _post(served, **{"stream": True, **fields}).text.removesuffix("\n\n").split("\n\n"):
        name, data = text.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def _without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_ids(inner) for name, inner in value.items() if name not in IDS}
    return [_without_ids(inner) for inner in value] if isinstance(value, list) else value


def _texts(output: list[dict[str, Any]]) -> list[str]:
    return [part["text"] for item in output for part in item.get("content", ())]


def _roles(served: Served) -> list[tuple[str, str]]:
    """Role and content of the last chat's messages."""
    return [(message["role"], message.get("content", "-")) for message in served.backend.tokenizer.chats[-1][0]]


def test_a_complete_response_has_reasoning_text_and_calls_and_repeats_the_request() -> None:
    with _answering() as served:
        response = _response(served, tools=[FUNCTION], metadata={"a": "b"}, temperature=0.5, instructions="Be kind.")
    fields = {"tools": [FUNCTION], "metadata": {"a": "b"}, "temperature": 0.5, "instructions": "Be kind."}
    fields |= {"object": "response", "status": "completed", "error": None, "incomplete_details": None, "store": True}
    fields |= {"parallel_tool_calls": True, "tool_choice": "auto", "model": "fake", "previous_response_id": None}
    assert response.items() >= fields.items()
    reasoning, message, *calls = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert (reasoning["summary"], reasoning["encrypted_content"]) == ([], None)
    part = {"type": "output_text", "text": "\n\nLet me see.\n", "annotations": [], "logprobs": []}
    assert (message["role"], message["content"]) == ("assistant", [part])
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [("f", {"x": 1}), ("f", {"x": 2})]
    assert {item["status"] for item in response["output"]} == {"completed"}
    assert len({item["id"] for item in response["output"]} | {call["call_id"] for call in calls}) == 6


@pytest.mark.parametrize("token_bytes", [1, 7, 1000])
def test_a_stream_has_openais_events_and_ends_with_the_complete_response(token_bytes: int) -> None:
    with _answering(token_bytes=token_bytes) as served:
        whole, events = _response(served, tools=[FUNCTION]), _events(served, tools=[FUNCTION])
    assert _without_ids(events[-1]["response"]) == _without_ids(whole)
    kinds = [event["type"].removeprefix("response.") for event in events]
    kinds = [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]
    begin, end = ["output_item.added", "content_part.added"], ["content_part.done", "output_item.done"]
    reasoning = [*begin, "reasoning_text.delta", "reasoning_text.done", *end]
    message = [*begin, "output_text.delta", "output_text.done", *end]
    arguments = [f"function_call_arguments.{what}" for what in ("delta", "done")]
    calls = ["output_item.added", *arguments, "output_item.done"] * 2
    assert kinds == ["created", "in_progress", *reasoning, *message, *calls, "completed"]
    pieces = ["".join(event.get("delta", "") for event in events if event.get("output_index") == at) for at in range(4)]
    assert pieces == ["hm", "\n\nLet me see.\n", *(item["arguments"] for item in whole["output"][2:])]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    begun = {event["item"]["status"] for event in events if event["type"] == "response.output_item.added"}
    assert (begun, events[0]["response"]["status"], events[0]["response"]["output"]) == (
        {"in_progress"},
        "in_progress",
        [],
    )


def test_white_space_alone_makes_no_message() -> None:
    with _answering("<think>hm</think>\n\n") as served:
        for output in (_response(served)["output"], _events(served)[-1]["response"]["output"]):
            assert _texts(output) == ["hm"]
    texts = ["hm", "\n\nYes"]
    with _answering("<think>hm</think>\n\nYes") as served:
        assert _texts(_events(served)[-1]["response"]["output"]) == _texts(_response(served)["output"]) == texts


def test_a_malformed_call_is_text_or_in_a_stream_incomplete() -> None:
    malformed = CALL.replace("1}}", "}")
    with _answering(malformed) as served:
        assert _texts(_response(served, tools=[FUNCTION])["output"]) == [malformed]
        call, *_ = _events(served, tools=[FUNCTION])[-1]["response"]["output"]
    assert (call["type"], call["status"]) == ("function_call", "incomplete")


def test_a_client_of_codex_gets_its_calls_and_gives_reasoning_back() -> None:
    answer = "<think>hm</think>" + CALL.replace('"f"', '"mcp__web__click"')
    with _answering(answer) as served:
        events = _events(served, **CODEX)
        ((messages, options),) = served.backend.tokenizer.chats
    assert [message["role"] for message in messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "system",
        "user",
    ]
    assert messages[0]["content"] == "You are a coding agent.\n\n<permissions>"
    assert messages[1]["content"] == "# AGENTS.md\n<environment>\nlist the files"
    calls = messages[2].pop("tool_calls")
    assert messages[2] == {"role": "assistant", "content": "I look.", "reasoning_content": "hm"}
    assert [call["function"]["arguments"] for call in calls] == [{"cmd": "ls"}, {"malformed": "{"}]
    assert messages[3:5] == [
        {"role": "tool", "tool_call_id": "c1", "content": "a.txt"},
        {"role": "tool", "tool_call_id": "c2", "content": "bad JSON"},
    ]
    names = [tool["function"]["name"] for tool in options["tools"]]
    assert names == ["exec_command", calls[1]["function"]["name"]] == ["exec_command", "mcp__web__click"]
    assert (options["reasoning_effort"], options["enable_thinking"]) == ("medium", True)
    reasoning, call = events[-1]["response"]["output"]
    assert reasoning["encrypted_content"] == ENCODED
    assert (call["namespace"], call["name"]) == ("mcp__web", "click")


def test_a_late_system_message_is_the_users_if_the_template_refuses_it() -> None:
    class _SystemFirst(FakeTokenizer):
        def chat(self, messages: Any, **options: Any) -> list[int]:
            if any(message["role"] == "system" for message in messages[1:]):
                raise RequestRejected("the template refuses these messages: system must be first", param="messages")
            return super().chat(messages, **options)

    texts = [("developer", "a"), ("user", "b"), ("developer", "c"), ("user", "d")]
    items = [{"role": role, "content": text} for role, text in texts]
    with _answering() as served:
        _response(served, input=items)
        assert _roles(served) == [("system", "a"), ("user", "b"), ("system", "c"), ("user", "d")]
        served.backend.tokenizer.__class__ = _SystemFirst
        _response(served, input=items)
        assert _roles(served) == [("system", "a"), ("user", "b\nc\nd")]


def test_reasoning_comes_back_from_its_text_and_not_from_other_servers() -> None:
    texts = {"content": [{"type": "reasoning_text", "text": "so"}], "encrypted_content": ENCODED, "summary": []}
    with _answering() as served:
        for fields, found in ((texts, "so"), ({"summary": [], "encrypted_content": "gAAAAAB"}, None)):
            answer = {"role": "assistant", "content": "Yes"}
            _response(served, input=[{"role": "user", "content": "a"}, {"type": "reasoning", **fields}, answer])
            assert served.backend.tokenizer.chats[-1][0][1].get("reasoning_content") == found


def test_effort_none_switches_thinking_off() -> None:
    with _answering() as served:
        _response(served, reasoning={"effort": "none"})
        _response(served)
    options = [options.get("enable_thinking") for _, options in served.backend.tokenizer.chats]
    assert options == [False, None]


def test_output_that_was_cut_is_incomplete() -> None:
    with _answering("<think>hm</think>Hello") as served:
        whole, *_, last = _response(served, max_output_tokens=20), *_events(served, max_output_tokens=20)
    for response in (whole, last["response"]):
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
        assert _texts(response["output"]) == ["hm", "Hel"]
    assert last["type"] == "response.incomplete"


def test_usage_counts_cached_and_reasoning_tokens() -> None:
    with _answering("<think>hmmm</think>Yes") as served:
        usage = _response(served)["usage"]
        assert _events(served)[-1]["response"]["usage"] == usage
    assert usage == {
        "input_tokens": len("user: hi\nassistant: "),
        "input_tokens_details": {
            "cached_tokens": 6,
            "cached_tokens_by_tier": {"device": 1, "host": 2, "disk": 3},
            "cache_write_tokens": 0,
        },
        "output_tokens": 22,
        "output_tokens_details": {"reasoning_tokens": len("hmmm</think>")},
        "total_tokens": 42,
    }


def test_a_response_is_continued_read_and_deleted() -> None:
    with _answering("<think>hm</think>Yes") as served:
        client = served.openai.responses
        first = client.create(model="fake", input="a", instructions="x")
        streamed = client.create(model="fake", input="b", previous_response_id=first.id, stream=True)
        second = next(event.response for event in streamed if event.type == "response.completed")
        client.create(model="fake", input="c", previous_response_id=second.id, instructions="y", store=False)
        texts = [
            ("system", "y"),
            ("user", "a"),
            ("assistant", "Yes"),
            ("user", "b"),
            ("assistant", "Yes"),
            ("user", "c"),
        ]
        assert _roles(served) == texts
        assert served.backend.tokenizer.chats[-1][0][2]["reasoning_content"] == "hm"
        bad = _post(served, input=[{"type": "x"}], previous_response_id=second.id)
        assert bad.json()["error"]["param"] == "input[0].type"
        assert client.retrieve(second.id) == second
        items = client.input_items.list(second.id, order="asc").data
        assert [item.type for item in items] == ["message", "reasoning", "message", "message"]
        client.delete(second.id)
        for gone in (lambda: client.retrieve(second.id), lambda: client.delete(second.id)):
            with pytest.raises(openai.NotFoundError, match="max_stored_responses"):
                gone()
        with pytest.raises(openai.BadRequestError, match="send the whole conversation") as refused:
            client.create(model="fake", input="d", previous_response_id=second.id)
    assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")


def test_a_response_is_not_stored_if_the_client_or_the_server_does_not_want_it() -> None:
    for options, fields in (({}, {"store": False}), ({"max_stored_responses": 0}, {})):
        with _answering(options=options) as served:
            name = _response(served, **fields)["id"]
            assert served.http.get(f"/v1/responses/{name}").status_code == 404


def test_a_continued_conversation_counts_as_a_body() -> None:
    with _answering("x" * 900, {"max_body_bytes": 1000}) as served:
        name = _response(served)["id"]
        assert _post(served, previous_response_id=name).status_code == 413


NAMES = [f"resp_{number:032x}" for number in range(5)]


def _kept(store: ResponseStore) -> list[int]:
    return [int(path.name[5:], 16) for path in sorted(Path(store._directory).iterdir())]


def test_the_store_removes_the_least_recently_used_response(tmp_path: Path) -> None:
    stores = [ResponseStore(ServerOptions(max_stored_responses=3), str(tmp_path)) for _ in range(2)]
    for number in range(3):
        stores[number % 2].put(NAMES[number], b"x")
        os.utime(tmp_path / NAMES[number], ns=(number, number))
    assert stores[1].get(NAMES[0]) == b"x"  # that the other store has put, and now the last one used
    stores[0].put(NAMES[3], b"x")
    assert _kept(stores[0]) == [0, 2, 3]


def test_the_store_bounds_its_bytes(tmp_path: Path) -> None:
    store = ResponseStore(ServerOptions(max_stored_bytes=10), str(tmp_path))
    for number in range(3):
        store.put(NAMES[number], b"12345")
        os.utime(tmp_path / NAMES[number], ns=(number, number))
    assert _kept(store) == [1, 2]
    store.put(NAMES[3], b"x" * 11)
    assert _kept(store) == []


def test_a_store_without_room_serves_on_and_logs_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = ResponseStore(ServerOptions(), str(tmp_path / "no" / "room"))
    store.put(NAMES[0], b"x")
    store.put(NAMES[0], b"x")
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1


@pytest.mark.parametrize("name", ["../secret", "", "resp_1", NAMES[0] + "\n", f".{NAMES[0]}"])
def test_other_files_are_no_responses(name: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / "stored").mkdir()
    (tmp_path / "stored" / f".{NAMES[0]}").write_text("x")
    with pytest.raises(ApiError, match="no response"):
        ResponseStore(ServerOptions(), str(tmp_path / "stored")).get(name)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [7]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 7}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "user", "content": "x", "a": 1}]}, "input[0].a"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "name": "apply_patch"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]}, "tools[0].tools[0].type"),
        ({"tools": [{**FUNCTION, "strict": True, "parameters": {"type": "x"}}]}, "tools[0].function.parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "x"}}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_bad_fields_are_refused_by_name(fields: dict[str, Any], named: str, refusing: Served) -> None:
    reply = _post(refusing, **fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, named)
    assert reply.json()["error"]["message"].count(named)


@pytest.fixture(scope="module")
def refusing() -> Iterator[Served]:
    with _answering() as served:
        yield served


def test_queries_that_are_not_supported_are_refused(refusing: Served) -> None:
    path = f"/v1/responses/{_response(refusing)['id']}"
    for query in ("?stream=true", "/input_items?after=x"):
        assert refusing.http.get(path + query).status_code == 400


def test_json_schemas_and_named_functions_reach_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    def chat_call(fields: dict[str, Any], **_: Any) -> Any:
        raise ApiError(418, json.dumps([fields["response_format"], fields["tool_choice"]]))

    monkeypatch.setattr(openai_responses, "chat_call", chat_call)
    schema = {"name": "n", "schema": {"type": "object"}, "strict": True}
    text, choice = {"format": {"type": "json_schema", **schema}}, {"type": "function", "name": "f"}
    with _answering() as served:
        asked = json.loads(_post(served, text=text, tool_choice=choice).json()["error"]["message"])
        monkeypatch.undo()
        _response(served, text=text)
        assert served.backend.params[-1].structured_outputs is not None
    assert asked == [{"type": "json_schema", "json_schema": schema}, {"type": "function", "function": {"name": "f"}}]


def test_failures_before_and_during_a_stream_are_told() -> None:
    with _answering(refuse=QueueFull("full")) as served:
        assert _post(served, stream=True).status_code == 429
    with _answering("abcdef", fail_after=4) as served:
        *_, error, failed = _events(served)
    assert (error["type"], error["code"]) == ("error", "internal_error")
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["output"] == []
    assert failed["response"]["error"] == {"code": "server_error", "message": error["message"]}


def test_openais_client_accumulates_a_stream() -> None:
    with _answering() as served:
        ask: dict[str, Any] = {"model": "fake", "input": "hi", "tools": [FUNCTION]}
        whole = served.openai.responses.create(**ask)
        with served.openai.responses.stream(**ask) as stream:
            streamed = stream.get_final_response()
    assert streamed.output_text == whole.output_text == "\n\nLet me see.\n"
    assert [item.type for item in streamed.output] == ["reasoning", "message", "function_call", "function_call"]
