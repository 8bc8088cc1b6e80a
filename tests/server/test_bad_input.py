"""Everything a client can get wrong is a 4xx that names it, and the next request is served."""

from __future__ import annotations

import gzip
import json
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sidestream.server.extras import OTHER_SERVERS

from .serving import HI, Served, serving

IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


def _call(arguments: str) -> dict[str, object]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


CALL = _call("")


def _user(content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": 129}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": -1.0}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_completion_tokens": 10**3000}, "max_completion_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_use": True}}, "stream_options.include_use"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stop": 5}, "stop"),
        ({"stop": [5]}, "stop[0]"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"01": 1}}, "logit_bias"),
        ({"logit_bias": {"99999999999": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"1": "a"}}, "logit_bias.1"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_k": -2}, "top_k"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids[0]"),
        ({"max_drafts": 17}, "max_drafts"),
        ({"priority": "high"}, "priority"),
        ({"priority": 10**9}, "priority"),
        ({"reasoning_effort": "hard"}, "reasoning_effort"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": 1}}, "stream_options.continuous_usage_stats"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "a b"}, "request_id"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"request_id": 5}, "request_id"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 1025}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"add_generation_prompt": "no"}, "add_generation_prompt"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"enable_thinkng": True}}, "chat_template_kwargs.enable_thinkng"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"add_generation_prompt": True}}, "chat_template_kwargs.add_generation_prompt"),
        ({"temprature": 1}, "temprature"),
        ({"prompt": "x"}, "prompt"),
        ({"x" * 100_000: None}, "x" * 64),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": _user(5)}, "messages[0].content"),
        ({"messages": _user([])}, "messages[0].content"),
        ({"messages": _user(["hi"])}, "messages[0].content[0]"),
        ({"messages": _user([{"type": "text", "text": "a"}, IMAGE])}, "messages[0].content[1].type"),
        ({"messages": _user([{"type": "text"}])}, "messages[0].content[0].text"),
        (
            {"messages": _user([{"type": "text", "text": "a", "cache_kontrol": {}}])},
            "messages[0].content[0].cache_kontrol",
        ),
        ({"messages": [{"role": "user", "content": "hi", "name": 5}]}, "messages[0].name"),
        (
            {"messages": [{"role": "assistant", "content": "hi", "reasoning_content": []}]},
            "messages[0].reasoning_content",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": "f"}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": ["f"]}]}, "messages[0].tool_calls[0]"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [_call("{")]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [_call("[]")]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "contents": "hi"}]}, "messages[0].contents"),
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_bad_chat_field_is_a_400_that_names_it(shared: Served, fields: dict[str, Any], param: str) -> None:
    _expect_400(shared.chat(**fields), param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": [5, "a"]}, "prompt[1]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [2**31]}, "prompt[0]"),
        ({"prompt": [1.0]}, "prompt[0]"),
        ({"prompt": [[1], 2]}, "prompt[1]"),
        ({"prompt": [[1], [None]]}, "prompt[1][0]"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"echo": True, "max_tokens": -2}, "max_tokens"),
        ({"echo": False, "max_tokens": 0}, "max_tokens"),
        ({"echo": 0}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"length_penalty": 11.0, "use_beam_search": True}, "length_penalty"),
        ({"use_beam_search": True, "stream": True}, "stream"),
        ({"use_beam_search": True, "stop": "x"}, "stop"),
        ({"use_beam_search": True, "logprobs": 1}, "logprobs"),
        ({"use_beam_search": True, "n": 3, "best_of": 2}, "best_of"),
        ({"use_beam_search": True, "n": 11}, "n"),
        ({"use_beam_search": True, "best_of": 11}, "best_of"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"suffix": "end"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"messages": HI}, "messages"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_bad_text_field_is_a_400_that_names_it(shared: Served, fields: dict[str, Any], param: str) -> None:
    _expect_400(shared.text(**fields), param)


def _expect_400(reply: Any, param: str) -> None:
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param.rpartition(".")[2].split("[")[0] in error["message"]
    assert len(reply.content) < 2000


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "x" * 5000}, "prompt"),
        ("/v1/completions", {"prompt": ["x", "x" * 5000]}, "prompt"),
        ("/v1/completions", {"prompt": [-1] * 5000}, "prompt"),
        ("/v1/completions", {"prompt": [[1], [-1] * 5000]}, "prompt[1]"),
        ("/v1/chat/completions", {"messages": _user("x" * 5000)}, "prompt"),
        ("/v1/chat/completions", {"messages": [{}] * 5000}, "messages"),
        ("/tokenize", {"prompt": "x" * 5000}, "prompt"),
        ("/tokenize", {"messages": [{}] * 5000}, "messages"),
        ("/detokenize", {"tokens": [-1] * 5000}, "tokens"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_too_long_prompts_are_refused_with_their_length(
    shared: Served, path: str, fields: dict[str, Any], param: str
) -> None:
    reply = shared.post_raw(json.dumps({"model": "fake", **fields}).encode(), path)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert "the model takes 4096" in error["message"]


def test_null_and_empty_fields_are_accepted(shared: Served) -> None:
    assert shared.chat(stream_options=None, stop=[], top_logprobs=0).status_code == 200


def test_an_error_about_an_unknown_field_names_the_nearest_known_one(shared: Served) -> None:
    assert "did you mean temperature?" in shared.chat(temprature=1).json()["error"]["message"]


@pytest.mark.parametrize("name", [*OTHER_SERVERS, "n_predicts", "store_all", "optional", "streaming"])
def test_an_error_about_another_servers_field_explains_it(shared: Served, name: str) -> None:
    """With `n_predict` taken for `prediction`, which has no effect, a client would lose its limit."""
    for reply in (shared.chat(**{name: 8}), shared.text(**{name: 8})):
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, name)
        assert error["message"] == f"no field {name}: {OTHER_SERVERS.get(name, 'leave it out')}"


def test_fields_suggested_in_place_of_other_servers_fields_exist(shared: Served) -> None:
    """Each field that an explanation names is accepted by one of the APIs."""
    for text in OTHER_SERVERS.values():
        if text.endswith("has this meaning here"):
            name = text.partition(" ")[0].rstrip(",")
            replies = [api(**{name: None}) for api in (shared.chat, shared.text)]
            assert not all(f"no field {name}" in reply.text for reply in replies)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_max_tokens_minus_1_means_as_many_as_fit(name: str) -> None:
    with serving() as served:
        assert served.chat(**{name: -1}).status_code == 200
        assert served.backend.params[0].max_tokens == served.backend.max_model_len


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"model": "fake",}', "not valid JSON"),
        (b"\xff\xfe", "not UTF-8: invalid byte at position 0"),
        ('{"model": "é"}'.encode("latin-1"), "not UTF-8"),
        ('{"model": "fake"}'.encode("utf-16"), "not UTF-8"),
        (b'{"temperature": NaN}', "NaN is not a JSON number"),
        (b'{"temperature": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"temperature": 1e999}', "beyond the range"),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"model": "fake", "model": "other"}', "'model' is given twice"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogate"),
        (b"[]", "array"),
        (b'"fake"', "string"),
        (b"5", "number"),
        (b"null", "null"),
        (b"true", "boolean"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (
            b'{"model": "fake", "messages": [{"role": "user", "content": ' + b"[" * 400 + b"]" * 400 + b"}]}",
            "messages[0].content[0]",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_body_is_a_400_that_says_why(shared: Served, body: bytes, says: str) -> None:
    reply = shared.post_raw(body)
    assert reply.status_code == 400, reply.text
    assert says in reply.json()["error"]["message"]


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_content_types_that_web_pages_may_post_without_preflight_are_refused(shared: Served, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    body = json.dumps({"model": "fake", "messages": HI}).encode()
    assert shared.http.post("/v1/chat/completions", content=body, headers=headers).status_code == 415


def test_a_compressed_body_is_refused_with_a_remedy(shared: Served) -> None:
    body = gzip.compress(json.dumps({"model": "fake", "messages": HI}).encode())
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    reply = shared.http.post("/v1/chat/completions", content=body, headers=headers)
    assert (reply.status_code, reply.json()["error"]["message"]) == (
        415,
        "content-encoding is 'gzip': send the body uncompressed",
    )


def test_a_wrong_model_raises_not_found_in_the_openai_client(shared: Served) -> None:
    with pytest.raises(openai.NotFoundError) as failure:
        shared.openai.chat.completions.create(model="gpt-4", messages=HI)  # type: ignore[arg-type]
    assert (failure.value.code, failure.value.param) == ("model_not_found", "model")


def test_errors_about_unknown_paths_and_methods_have_openai_bodies(shared: Served) -> None:
    unknown = shared.http.get("/v1/embeddings")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_url")
    wrong = shared.http.get("/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json()["error"]["message"] == "Method Not Allowed: this path takes POST"


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
_NAMES = (
    "temperature", "top_p", "n", "stream", "stream_options", "stop", "logit_bias", "logprobs", "top_logprobs", "seed",
    "max_tokens", "min_tokens", "stop_token_ids", "tools", "response_format", "messages", "prompt", "model", "priority",
    "echo", "metadata",
)  # fmt: skip


@settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    path=st.sampled_from(["/v1/chat/completions", "/v1/completions"]),
    fields=st.dictionaries(st.sampled_from(_NAMES), _JSON, max_size=4),
)
def test_no_field_value_causes_a_500(shared: Served, path: str, fields: dict[str, Any]) -> None:
    base = {"model": "fake"} | ({"messages": HI} if "chat" in path else {"prompt": "hi"})
    _expect_sane(shared.post_raw(json.dumps(base | fields).encode(), path))


@settings(max_examples=75, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.binary(max_size=64) | st.text('{}[]",:0123456789eE+-.truefalsn\\u', max_size=64).map(str.encode))
def test_no_body_causes_a_500(shared: Served, body: bytes) -> None:
    assert shared.post_raw(body).status_code == 400


def _expect_sane(reply: Any) -> None:
    assert reply.status_code in (200, 400, 404), reply.text
    if reply.status_code != 200:
        assert reply.json()["error"]["message"]
