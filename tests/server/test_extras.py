"""Fields beyond the API that common clients send: supported, accepted without effect, or refused with a 400."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from proof.fake_backend import FakeBackend, FakeTokenizer, Script
from sidestream.server.extras import EXTRAS, Extra

from .serving import HI, Served, serving

API_DOC = Path(__file__).resolve().parents[2] / "docs" / "api.md"

# What clients send by default or with one of their usual options; `{"model", "messages" or "prompt"}` come on top.
CLIENTS = {
    "LangChain": """
        "stream": false, "n": 1, "temperature": 0.7, "max_completion_tokens": 5, "seed": null,
        "logprobs": null, "parallel_tool_calls": null, "reasoning_effort": "low", "service_tier": "auto",
        "store": false, "metadata": {"run": "1"}, "user": "ann"
    """,
    "Open WebUI": """
        "stream": true, "stream_options": {"include_usage": true}, "max_tokens": 5,
        "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {},
        "response_format": {"type": "text"}, "chat_template_kwargs": {}
    """,
    "vLLM's serving benchmark": """
        "stream": true, "stream_options": {"include_usage": true}, "temperature": 0.0,
        "repetition_penalty": 1.0, "top_k": -1, "min_p": 0.0, "max_completion_tokens": 5,
        "ignore_eos": true, "include_stop_str_in_output": false, "skip_special_tokens": true,
        "spaces_between_special_tokens": true, "truncate_prompt_tokens": null, "use_beam_search": false,
        "request_id": "benchmark-0"
    """,
    "GuideLLM": """
        "stream": true, "stream_options": {"include_usage": true, "continuous_usage_stats": true},
        "max_tokens": 5, "max_completion_tokens": 5, "stop": null, "ignore_eos": true
    """,
    "the openai client with its newest options": """
        "modalities": ["text"], "verbosity": "medium", "tool_choice": "none", "tools": [],
        "prompt_cache_key": "k", "prompt_cache_retention": "24h", "safety_identifier": "s",
        "prediction": {"type": "content", "content": "hello"}
    """,
}


@pytest.mark.parametrize("fields", CLIENTS.values(), ids=CLIENTS)
def test_requests_of_common_clients_are_accepted(shared: Served, fields: str) -> None:
    reply = shared.chat(**json.loads(f"{{{fields}}}"))
    assert reply.status_code == 200, reply.text


def test_fields_of_completions_clients_are_accepted(shared: Served) -> None:
    reply = shared.text(
        best_of=1, echo=False, suffix=None, logit_bias={}, use_beam_search=False, top_k=-1, user="ann", logprobs=None
    )
    assert reply.status_code == 200, reply.text


def _send(served: Served, place: str, name: str, value: Any) -> tuple[Any, str]:
    """The reply to a request that has the field in this place, and the path that an error would name."""
    match place:
        case "chat":
            return served.chat(**{name: value}), name
        case "text":
            return served.text(**{name: value}), name
        case "message":
            return served.chat(messages=[{**HI[0], name: value}]), f"messages[0].{name}"
        case _:
            part = {"type": "text", "text": "hi", name: value}
            return served.chat(messages=[{"role": "user", "content": [part]}]), f"messages[0].content[0].{name}"


@pytest.mark.parametrize("extra", EXTRAS, ids=lambda extra: f"{extra.name} of {'+'.join(extra.places)}")
def test_extra_fields_without_effect_are_accepted_and_other_values_refused(shared: Served, extra: Extra) -> None:
    other = {"something": ["else"]}
    for place in extra.places:
        for value in (None, *((other, "x", True, 5) if extra.values is None else extra.values)):
            reply, _ = _send(shared, place, extra.name, value)
            assert reply.status_code == 200, reply.text
        if extra.values is not None:
            reply, path = _send(shared, place, extra.name, other)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, path)
            assert "which this server does not support: leave it out" in reply.json()["error"]["message"]


def test_the_documented_extra_fields_are_those_of_the_code() -> None:
    def row(extra: Extra) -> str:
        values = (
            "any"
            if extra.values is None
            else ", ".join(f"`{json.dumps(value)}`" for value in extra.values) or "only `null`"
        )
        return f"| `{extra.name}` | {', '.join(extra.places)} | {values} |"

    lines = API_DOC.read_text(encoding="utf-8").splitlines()
    first = lines.index("| field | where | values |") + 2
    assert lines[first : first + len(EXTRAS) + 1] == [*map(row, EXTRAS), ""]


def test_continuous_usage_is_in_every_chunk_and_grows_to_the_total(shared: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    with shared.openai.chat.completions.create(
        model="fake", messages=HI, stream=True, stream_options=options
    ) as stream:  # type: ignore[call-overload]
        chunks = list(stream)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[0], counts[-2:]) == (1, [12, 12])
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {len("user: hi\nassistant: ")}
    assert all(
        chunk.usage.total_tokens == chunk.usage.prompt_tokens + chunk.usage.completion_tokens for chunk in chunks
    )
    assert [len(chunk.choices) for chunk in chunks[-2:]] == [1, 0]


def test_continuous_usage_alone_adds_no_last_chunk(shared: Served) -> None:
    events = shared.text(stream=True, stream_options={"continuous_usage_stats": True}).text.split("\n\n")[:-2]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert all(chunk["choices"] and chunk["usage"]["completion_tokens"] for chunk in chunks)


def test_top_k_minus_1_means_off() -> None:
    with serving() as served:
        assert served.chat(top_k=-1).status_code == 200
        assert served.backend.params[0].top_k == 0


def test_a_given_request_id_is_used_in_reply_log_and_engine(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="sidestream.server")
    with serving() as served:
        reply = served.chat(request_id="bench-7/a:1")
        assert served.text(prompt=["a", "b"], request_id="two").status_code == 200
        assert served.backend.names[0] == "bench-7/a:1"
        assert sorted(served.backend.names[1:]) == ["two 0", "two 1"]
    assert reply.headers["x-request-id"] == "bench-7/a:1"
    assert reply.json()["id"] == "chatcmpl-bench-7/a:1"
    assert any(
        record.getMessage().startswith("bench-7/a:1 POST /v1/chat/completions status=200") for record in caplog.records
    )


def test_a_cache_salt_reaches_the_engine() -> None:
    with serving() as served:
        assert served.chat(cache_salt="tenant é").status_code == 200
        assert served.text(prompt=["a", "b"], cache_salt="b").status_code == 200
        assert served.chat().status_code == 200
        assert served.backend.cache_salts == ["tenant é", "b", "b", ""]


def _knowing(*options: str) -> FakeBackend:
    backend = FakeBackend(Script())
    backend.tokenizer = FakeTokenizer(options)
    return backend


def test_chat_template_kwargs_reach_the_chat_template() -> None:
    with serving(_knowing("enable_thinking", "style")) as served:
        assert served.chat(chat_template_kwargs={"enable_thinking": False, "style": ["short"]}).status_code == 200
        ((_, options),) = served.backend.tokenizer.chats
    assert options == {"enable_thinking": False, "style": ["short"]}


def test_reasoning_effort_reaches_only_templates_that_use_it() -> None:
    with serving(_knowing("reasoning_effort")) as served:
        assert served.chat(reasoning_effort="high").status_code == 200
        assert (
            served.chat(reasoning_effort="high", chat_template_kwargs={"reasoning_effort": "mine"}).status_code == 200
        )
        assert served.chat().status_code == 200
        assert [options for _, options in served.backend.tokenizer.chats] == [
            {"reasoning_effort": "high"},
            {"reasoning_effort": "mine"},
            {},
        ]
    with serving(_knowing()) as served:
        assert served.chat(reasoning_effort="high").status_code == 200
        assert served.backend.tokenizer.chats[0][1] == {}


def test_a_chat_may_omit_the_generation_prompt_or_continue_its_final_message() -> None:
    answered = [*HI, {"role": "assistant", "content": "Well"}]
    with serving() as served:
        assert served.chat(add_generation_prompt=False).status_code == 200
        assert served.chat(messages=answered, continue_final_message=True).status_code == 200
        assert (
            served.chat(messages=answered, continue_final_message=True, add_generation_prompt=False).status_code == 200
        )
        assert served.chat(add_generation_prompt=True).status_code == 200
        assert served.backend.prompts == [
            "user: hi\n",
            "user: hi\nassistant: Well",
            "user: hi\nassistant: Well",
            "user: hi\nassistant: ",
        ]


def test_names_and_reasoning_of_messages_reach_the_template() -> None:
    messages = [
        {"role": "user", "content": "hi", "name": "Ann"},
        {"role": "assistant", "content": "a", "reasoning_content": "because", "refusal": None, "annotations": []},
        {"role": "assistant", "content": "b", "reasoning": "why not"},
    ]
    with serving() as served:
        assert served.chat(messages=messages).status_code == 200
        ((laid_out, _),) = served.backend.tokenizer.chats
    assert laid_out == [
        {"role": "user", "content": "hi", "name": "Ann"},
        {"role": "assistant", "content": "a", "reasoning_content": "because"},
        {"role": "assistant", "content": "b", "reasoning_content": "why not"},
    ]


def test_tool_calls_and_results_reach_templates_that_use_them() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, "é"]}'}}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "1", "name": "f"},
    ]
    with serving(_knowing("tool", "tool_calls")) as served:
        assert served.chat(messages=messages).status_code == 200
        ((laid_out, _),) = served.backend.tokenizer.chats
    assert laid_out[1:] == [
        {"role": "assistant", "tool_calls": [{**call, "function": {"name": "f", "arguments": {"x": [1, "é"]}}}]},
        {"role": "tool", "content": "42", "tool_call_id": "1", "name": "f"},
    ]
