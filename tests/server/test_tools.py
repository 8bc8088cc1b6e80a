"""Tool calls and reasoning of `/v1/chat/completions`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from proof.fake_backend import FakeBackend, FakeTokenizer, Script
from sidestream.errors import ConfigError
from sidestream.server import ServerOptions

from .serving import HI, Served, serving

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
ANSWER = f"<think>hm</think>Let me see.\n{CALL}\n{CALL.replace('1', '2')}"


@contextmanager
def _answering(text: str = ANSWER, *, template: str = "<tool_call> </think>", **options: Any) -> Iterator[Served]:
    backend = FakeBackend(Script(text))
    backend.tokenizer = FakeTokenizer(("tools", "tool", "tool_calls", "enable_thinking"), template)
    with serving(backend, **options) as served:
        yield served


def _message(reply: httpx.Response) -> dict[str, Any]:
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]  # type: ignore[no-any-return]


def test_a_complete_reply_has_calls_reasoning_and_content_apart() -> None:
    with _answering() as served:
        reply = served.chat(tools=[TOOL])
        ((_, options),) = served.backend.tokenizer.chats
    message = _message(reply)
    assert options == {"tools": [TOOL]}
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("Let me see.\n", "hm", "hm")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "f", "arguments": '{"x": 1}'},
        {"name": "f", "arguments": '{"x": 2}'},
    ]
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in message["tool_calls"])
    assert reply.json()["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("n", [1, 2])
def test_the_openai_client_accumulates_a_stream_to_the_complete_reply(n: int) -> None:
    with _answering() as served:
        ask: dict[str, Any] = {"model": "fake", "messages": HI, "tools": [TOOL], "n": n}
        with served.openai.chat.completions.stream(**ask) as stream:
            list(stream)
            streamed = stream.get_final_completion()
        whole = served.openai.chat.completions.create(**ask)
    for ours, theirs in zip(streamed.choices, whole.choices, strict=True):
        assert ours.finish_reason == theirs.finish_reason == "tool_calls"
        assert ours.message.content == theirs.message.content == "Let me see.\n"
        assert ours.message.model_extra["reasoning_content"] == "hm"  # type: ignore[index]
        assert ours.message.tool_calls and theirs.message.tool_calls
        assert [(call.type, call.function.name, call.function.arguments) for call in ours.message.tool_calls] == [
            (call.type, call.function.name, call.function.arguments)  # type: ignore[union-attr]
            for call in theirs.message.tool_calls
        ]


def test_the_first_delta_of_a_call_has_id_type_and_name() -> None:
    with _answering(CALL) as served:
        events = served.chat(tools=[TOOL], stream=True).text.split("\n\n")[:-2]
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events]
    first, *others = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert {**first, "id": ""} == {
        "index": 0, "id": "", "type": "function", "function": {"name": "f", "arguments": ""}
    }  # fmt: skip
    assert all(set(other) == {"index", "function"} for other in others)
    assert len(others) > 5  # one token of the fake is one character
    assert deltas[-1] == {}


def test_the_reply_can_be_sent_back_as_history() -> None:
    with _answering() as served:
        message = served.openai.chat.completions.create(model="fake", messages=HI, tools=[TOOL]).choices[0].message  # type: ignore[call-overload]
        call_id = message.tool_calls[0].id
        result = {"role": "tool", "tool_call_id": call_id, "content": "42"}
        assert served.chat(messages=[*HI, message.model_dump(), result], tools=[TOOL]).status_code == 200
        laid_out, _ = served.backend.tokenizer.chats[-1]
    assert laid_out[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert laid_out[1]["reasoning_content"] == "hm"
    assert laid_out[2] == result


@pytest.mark.parametrize("stream", [False, True])
def test_without_tools_and_reasoning_answers_stay_as_the_model_wrote_them(stream: bool) -> None:
    def plain(reply: str) -> list[Any]:
        texts = [line.removeprefix("data: ") for line in reply.split("\n") if line.startswith(("{", "data: {"))]
        return [json.loads(text)["choices"] for text in texts]

    with _answering() as served, _answering(template="") as other:
        replies = [one.chat(stream=stream, logprobs=True).text for one in (served, other)]
        assert plain(replies[0]) == plain(replies[1])
        assert _message(served.chat(tools=[TOOL], tool_choice="none", include_reasoning=None))["content"] == ANSWER
        assert served.backend.shown_tokens == [(), ()]


def test_options_of_reasoning_split_it_from_the_text() -> None:
    with _answering("<think>hm</think>Yes") as served:
        for fields in ({"reasoning_effort": "low"}, {"chat_template_kwargs": {"enable_thinking": True}}):
            message = _message(served.chat(**fields))
            assert (message["content"], message["reasoning"]) == ("Yes", "hm")
        message = _message(served.chat(include_reasoning=False))
        assert message["content"] == "Yes" and "reasoning" not in message


MESSAGES = "<|channel|>analysis<|message|> <|channel|>commentary json<|message|>"
THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"tools": [TOOL]}, {"reasoning_effort": "low"}])
def test_answers_of_messages_are_split_whatever_a_request_asks_for(fields: dict[str, Any]) -> None:
    with _answering(f"{THOUGHT}<|channel|>final<|message|>Yes", template=MESSAGES) as served:
        served.backend.tokenizer.options |= {"reasoning_effort"}
        reply = served.chat(**fields)
        (shown,) = served.backend.shown_tokens
        ((_, options),) = served.backend.tokenizer.chats
    assert {"<|start|>", "<|channel|>", "<|message|>", "<|end|>"} <= set(shown)
    assert options.get("reasoning_effort") == fields.get("reasoning_effort")
    if "stream" not in fields:
        assert (_message(reply)["content"], _message(reply)["reasoning"]) == ("Yes", "hm")
        return
    events = [json.loads(line.removeprefix("data: ")) for line in reply.text.splitlines() if line.startswith("data: {")]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "hm"
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes"


def test_a_call_in_messages_ends_the_answer_with_tool_calls() -> None:
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}'
    with _answering(THOUGHT + call, template=MESSAGES) as served:
        reply = served.chat(tools=[TOOL], tool_choice="required")
        form = served.backend.params[0].structured_outputs
    message = _message(reply)
    assert [one["function"] for one in message["tool_calls"]] == [{"name": "f", "arguments": '{"x": 1}'}]
    assert (message["content"], message["reasoning"]) == (None, "hm")
    assert reply.json()["choices"][0]["finish_reason"] == "tool_calls"
    assert form is not None and form.grammar is not None and "commentary to=functions." in form.grammar


def test_messages_stay_text_if_reasoning_is_switched_off() -> None:
    text = f"{THOUGHT}<|channel|>final<|message|>Yes"
    with _answering(text, template=MESSAGES, reasoning_parser="none") as served:
        assert _message(served.chat())["content"] == text


def test_the_prompts_last_message_tells_whether_a_continuation_is_inside() -> None:
    begun = [*HI, {"role": "assistant", "content": "<think>a"}]
    with _answering("b</think>Yes", reasoning_parser="qwen3") as served:
        message = _message(served.chat(messages=begun, continue_final_message=True))
        assert (message["content"], message["reasoning"]) == ("Yes", "b")
        assert _message(served.chat())["content"] == "b</think>Yes"


def test_parsers_can_be_named_and_switched_off() -> None:
    with _answering("[f(x=1)]", tool_call_parser="pythonic", reasoning_parser="none") as served:
        assert len(_message(served.chat(tools=[TOOL]))["tool_calls"]) == 1
    with _answering(tool_call_parser="none") as served:
        refused = served.chat(tools=[TOOL])
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
    with pytest.raises(ConfigError, match="no tool_call_parser herms; did you mean hermes"):
        ServerOptions(tool_call_parser="herms")


def test_the_formats_are_those_of_a_given_chat_template(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("<tool_call>")
    with _answering(CALL, template="", chat_template=str(tmp_path / "chat.jinja")) as served:
        assert len(_message(served.chat(tools=[TOOL]))["tool_calls"]) == 1
    with pytest.raises(ConfigError, match=r"chat_template is gone\.jinja: no such file"):
        ServerOptions(chat_template="gone.jinja")


def test_only_the_first_call_is_returned_without_parallel_calls() -> None:
    with _answering() as served:
        assert len(_message(served.chat(tools=[TOOL], parallel_tool_calls=False))["tool_calls"]) == 1


def test_stop_strings_lengths_and_log_probabilities_keep_working() -> None:
    with _answering(f"Ok{CALL}") as served:
        cut = served.chat(tools=[TOOL], max_tokens=48, logprobs=True).json()["choices"][0]
        assert (cut["finish_reason"], cut["message"]["content"]) == ("length", f"Ok{CALL}"[:48])
        assert "".join(token["token"] for token in cut["logprobs"]["content"]) == f"Ok{CALL}"[:48]
        served.chat(tools=[TOOL], stop=["</tool_call>"])
        assert served.backend.params[-1].stop == ("</tool_call>",)
        events = served.chat(tools=[TOOL], logprobs=True, stream=True).text.split("\n\n")[:-2]
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    tokens = [token["token"] for one in choices if one["logprobs"] for token in one["logprobs"]["content"]]
    assert "".join(tokens) == f"Ok{CALL}"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "f"}, "tools"),
        ({"tools": [TOOL] * 1025}, "tools"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [{**TOOL, "type": "search"}]}, "tools[0]"),
        ({"tools": [{**TOOL, "size": 1}]}, "tools[0].size"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}, "strict": True}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]}, "tools[0].function.parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ],
)
def test_bad_fields_of_tools_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with _answering() as served:
        reply = served.chat(**fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
