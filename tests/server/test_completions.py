"""The two APIs as the real openai client sees them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from proof.fake_backend import FakeBackend, FakeTokenizer, Script
from sidestream.config import SamplingParams
from sidestream.server import fields
from sidestream.types import CachedTokens

from .serving import HI, Served, serving


def test_chat_replies_with_text_finish_reason_and_usage(shared: Served) -> None:
    reply = shared.openai.chat.completions.create(model="fake", messages=HI)
    (choice,) = reply.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello, world", "stop")
    assert reply.object == "chat.completion"
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len("user: hi\nassistant: ")
    assert reply.usage.completion_tokens == len("Hello, world")
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 6
    assert reply.usage.prompt_tokens_details.to_dict()["cached_tokens_by_tier"] == {"device": 1, "host": 2, "disk": 3}


def test_a_streamed_chat_has_the_same_text_and_usage_as_a_whole_one(shared: Served) -> None:
    whole = shared.openai.chat.completions.create(model="fake", messages=HI)
    with shared.openai.chat.completions.create(
        model="fake", messages=HI, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    *news, last = chunks
    assert all(chunk.usage is None for chunk in news)
    assert (last.choices, last.usage) == ([], whole.usage)
    assert news[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in news) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in news if chunk.choices[0].finish_reason] == ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_without_include_usage_has_no_usage_field(shared: Served) -> None:
    assert "usage" not in shared.chat(stream=True).text


def test_stream_is_server_sent_events_that_end_with_done(shared: Served) -> None:
    reply = shared.chat(stream=True)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = reply.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") for event in events[:-2])


def test_text_completion_replies_with_text_and_finish_reason(shared: Served) -> None:
    whole = shared.openai.completions.create(model="fake", prompt="hi")
    (choice,) = whole.choices
    assert (whole.object, choice.text, choice.finish_reason) == ("text_completion", "Hello, world", "stop")


def test_text_completion_generates_16_tokens_by_default() -> None:
    with serving(FakeBackend(Script("x" * 50))) as served:
        choice = served.openai.completions.create(model="fake", prompt="hi").choices[0]
        assert (choice.text, choice.finish_reason) == ("x" * 16, "length")
        assert served.openai.chat.completions.create(model="fake", messages=HI).choices[0].message.content == "x" * 50


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_an_answer_cut_by_its_token_limit_has_finish_reason_length(shared: Served, field: str) -> None:
    choice = shared.chat(**{field: 5}).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello", "length")


@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_many_prompts_and_samples_are_indexed_prompt_by_prompt(shared: Served, stream: bool) -> None:
    def prompts() -> list[str]:
        return ["one", "two accents"]

    if stream:
        texts = dict.fromkeys(range(4), "")
        with shared.openai.completions.create(model="fake", prompt=prompts(), n=2, stream=True) as chunks:
            for chunk in chunks:
                texts[chunk.choices[0].index] += chunk.choices[0].text
    else:
        reply = shared.openai.completions.create(model="fake", prompt=prompts(), n=2)
        texts = {choice.index: choice.text for choice in reply.choices}
        assert reply.usage is not None and reply.usage.prompt_tokens == len("one") + len("two accents")
    assert texts == {0: "Hello, world", 1: "Hello, world", 2: "héé", 3: "héé"}


def test_each_streamed_chat_sample_begins_with_a_role_and_ends_once(shared: Served) -> None:
    with shared.openai.chat.completions.create(model="fake", messages=HI, n=2, stream=True) as stream:
        chunks = [chunk.choices[0] for chunk in stream]
    for index in range(2):
        mine = [choice for choice in chunks if choice.index == index]
        assert [choice.delta.role for choice in mine].count("assistant") == 1 and mine[0].delta.role == "assistant"
        assert [choice.finish_reason for choice in mine].count("stop") == 1 and mine[-1].finish_reason == "stop"


@pytest.mark.parametrize("prompt", ["abc", ["abc"], [97, 98, 99], [[97, 98, 99]]])
def test_a_prompt_may_be_text_or_tokens(prompt: object) -> None:
    with serving() as served:
        assert served.text(prompt=prompt).status_code == 200
        assert served.backend.prompts == ["abc"]


def test_roles_and_text_parts_reach_the_chat_template() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None},
        {"role": "user", "content": "d"},
    ]
    with serving() as served:
        assert served.chat(messages=messages).status_code == 200
        assert served.backend.prompts == ["system: be brief\nuser: ab\nassistant: c\nuser: d\nassistant: "]


def test_every_accepted_field_reaches_the_engine() -> None:
    same: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "n": 2, "seed": 7, "top_k": 40, "min_p": 0.05}
    same |= {"presence_penalty": 0.1, "frequency_penalty": -0.2, "repetition_penalty": 1.1}
    same |= {"min_tokens": 2, "max_tokens": 9, "ignore_eos": True, "max_drafts": 2}
    lists = {"stop": ["x", "y"], "stop_token_ids": [3], "logit_bias": {"65": -100, "66": 1.5}}
    others = {"include_stop_str_in_output": True, "priority": -3, "logprobs": True, "top_logprobs": 4}
    with serving() as served:
        assert served.chat(**same, **lists, **others).status_code == 200
        assert served.backend.priorities == [-3]
        expected = SamplingParams(**same, stop=("x", "y"), stop_token_ids=(3,), include_stop=True, logprobs=4)
        assert served.backend.params == [dataclasses.replace(expected, logit_bias={65: -100, 66: 1.5})]


def test_a_null_field_means_its_default() -> None:
    with serving() as served:
        drawing = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        nothing = dict.fromkeys(
            (*drawing, "n", "stop", "seed", "logit_bias", "max_tokens", "stream", "logprobs", "tools", "user")
        )
        assert served.chat(**nothing).status_code == 200
        (params,) = served.backend.params
    assert params == SamplingParams()


def test_omitted_fields_use_the_models_sampling_defaults() -> None:
    with serving() as served:
        assert served.chat().status_code == served.text(max_tokens=7).status_code == 200
        assert served.backend.params == [SamplingParams(), SamplingParams(max_tokens=7)]


def test_chat_logprobs_have_tokens_bytes_and_alternatives(shared: Served) -> None:
    reply = shared.openai.chat.completions.create(
        model="fake", messages=HI, logprobs=True, top_logprobs=3, max_tokens=2
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    first = logprobs.content[0]
    assert (first.token, first.bytes, first.logprob) == ("H", [72], -0.5)
    assert [(other.token, other.logprob) for other in first.top_logprobs] == [("H", -0.5), ("I", -1.5), ("J", -9999.0)]
    assert [entry.token for entry in logprobs.content] == ["H", "e"]


def test_tokens_of_one_character_have_their_bytes_and_the_last_one_the_text(shared: Served) -> None:
    reply = shared.openai.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "accents"}], logprobs=True
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    entries = [(entry.token, entry.bytes) for entry in logprobs.content[:3]]
    assert entries == [("h", [104]), ("", [0xC3]), ("é", [0xA9])]


def test_joined_streamed_logprobs_equal_those_of_a_whole_reply(shared: Served) -> None:
    fields = {"prompt": "accents", "logprobs": 2}
    whole = shared.text(**fields).json()["choices"][0]["logprobs"]
    assert whole["tokens"] == ["h", "", "é", "", "é"]
    assert whole["text_offset"] == [0, 1, 1, 2, 2]
    assert whole["token_logprobs"] == [-0.5] * 5
    assert whole["top_logprobs"][0] == {"h": -0.5, "i": -1.5}
    joined: dict[str, list[object]] = {}
    for line in shared.text(**fields, stream=True).text.split("\n\n")[:-2]:
        for name, values in (json.loads(line.removeprefix("data: "))["choices"][0]["logprobs"] or {}).items():
            joined.setdefault(name, []).extend(values)
    assert joined == whole


def test_alternatives_with_equal_text_are_all_listed(shared: Served) -> None:
    """In a character, the sampled byte completes none, and its alternatives break it."""
    whole = shared.text(prompt="accents", logprobs=5).json()["choices"][0]["logprobs"]
    assert [len(alternatives) for alternatives in whole["top_logprobs"]] == [5, 6, 6, 6, 6]
    assert all(
        token in alternatives for token, alternatives in zip(whole["tokens"], whole["top_logprobs"], strict=True)
    )


def test_tokens_are_named_by_id_on_request(shared: Served) -> None:
    fields = {"max_tokens": 1, "return_tokens_as_token_ids": True}
    text = shared.text(**fields, logprobs=2).json()["choices"][0]["logprobs"]
    assert text["tokens"] == ["token_id:72"]
    assert text["top_logprobs"] == [{"token_id:72": -0.5, "token_id:73": -1.5}]
    chat = shared.chat(**fields, logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]["content"][0]
    assert (chat["token"], chat["bytes"], chat["top_logprobs"][0]["token"]) == ("token_id:72", [72], "token_id:72")


# Prompts, and their texts.
ECHOED = [
    ("one ", ["one "]),
    (["one", "two accents"], ["one", "two accents"]),
    (list(b"one"), ["one"]),
    ([list(b"one"), list(b"two accents")], ["one", "two accents"]),
]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(("prompt", "texts"), ECHOED, ids=str)
def test_with_echo_each_answer_begins_with_its_prompt(shared: Served, prompt: Any, texts: list[str], n: int) -> None:
    plain = shared.openai.completions.create(model="fake", prompt=prompt, n=n)
    echoed = shared.openai.completions.create(model="fake", prompt=prompt, n=n, echo=True, stop="one")
    begins = [texts[choice.index // n] for choice in plain.choices]
    assert [choice.text for choice in echoed.choices] == [
        begin + choice.text for begin, choice in zip(begins, plain.choices, strict=True)
    ]
    assert echoed.usage == plain.usage
    asked: dict[str, Any] = {"model": "fake", "prompt": prompt, "n": n, "echo": True, "stream": True}
    pieces: list[list[str]] = [[] for _ in begins]
    for chunk in shared.openai.completions.create(**asked):
        pieces[chunk.choices[0].index].append(chunk.choices[0].text)
    assert [first for first, *_ in pieces] == begins
    assert ["".join(texts) for texts in pieces] == [choice.text for choice in echoed.choices]


@pytest.mark.parametrize("stream", [False, True])
def test_with_echo_and_max_tokens_0_the_answer_is_the_prompt(shared: Served, stream: bool) -> None:
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    reply = shared.text(prompt="one", echo=True, max_tokens=0, stream=stream, **usage)
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    parts = events if stream else [reply.json()]
    choices = [choice for part in parts for choice in part["choices"]]
    assert ("".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]) == ("one", "length")
    assert (parts[-1]["usage"]["prompt_tokens"], parts[-1]["usage"]["completion_tokens"]) == (3, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_with_echo_a_chat_begins_with_the_message_that_it_continues(shared: Served, stream: bool) -> None:
    begun = [*HI, {"role": "assistant", "content": "Well, "}]
    for messages, text in ((begun, "Well, Hello, world"), (HI, "Hello, world")):
        reply = shared.chat(messages=messages, echo=True, stream=stream)
        if stream:
            events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
            assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == text
        else:
            assert reply.json()["choices"][0]["message"]["content"] == text


def test_text_options_of_both_apis_reach_the_engine() -> None:
    with serving() as served:
        for ask in (served.chat, served.text):
            assert ask(skip_special_tokens=False, stop="end", ignore_eos=True, min_tokens=2).status_code == 200
            params = served.backend.params[-1]
            assert (params.skip_special_tokens, params.stop, params.ignore_eos) == (False, ("end",), True)
            assert params.min_tokens == 2


def test_echo_leaves_token_ids_that_the_tokenizer_lacks_to_the_engine() -> None:
    body = b'{"model": "fake", "prompt": [97, 256, 2147483647], "echo": true}'
    call = fields.parse_text(body, tokenizer=FakeTokenizer(), served=fields.Served("fake", 1, 64))
    assert (call.prompts, call.echo) == (((97, 256, 2147483647),), ("a",))


def test_prompts_and_final_messages_are_continued_and_chats_begin_a_new_turn() -> None:
    with serving() as served:
        assert served.text().status_code == 200
        assert served.chat().status_code == 200
        assert served.chat(continue_final_message=True).status_code == 200
        assert served.backend.continues == [True, False, True]


def test_logprobs_0_lists_the_sampled_token_only(shared: Served) -> None:
    assert shared.text(logprobs=0, max_tokens=1).json()["choices"][0]["logprobs"]["top_logprobs"] == [{"H": -0.5}]


@pytest.mark.parametrize("stream", [False, True])
def test_an_empty_answer_has_finish_reason_stop(shared: Served, stream: bool) -> None:
    reply = shared.text(prompt="nothing", stream=stream)
    assert reply.status_code == 200
    assert '"finish_reason":"stop"' in reply.text


def test_models_are_listed_and_found_by_name() -> None:
    with serving(served_model_name="org/some model") as served:
        assert [model.id for model in served.openai.models.list()] == ["org/some model"]
        assert served.openai.models.retrieve("org/some model").id == "org/some model"
        assert served.http.get("/v1/models/org/other").status_code == 404
        assert served.text(model="org/some model").status_code == 200
        assert served.text(model="fake").status_code == 404


def test_an_uncached_prompt_has_0_cached_tokens_in_its_usage() -> None:
    with serving(FakeBackend(Script(cached=CachedTokens()))) as served:
        assert served.text().json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_prompt_logprobs_are_in_each_choice_of_a_text_and_once_in_a_chat(shared: Served) -> None:
    def entry(byte: int, rank: int) -> dict[str, Any]:
        return {"logprob": 0.5 - rank, "rank": rank, "decoded_token": chr(byte)}

    expected = [None, {"98": entry(98, 1), "99": entry(99, 2)}]
    for choice in shared.text(prompt="ab", n=2, prompt_logprobs=2).json()["choices"]:
        assert (choice["prompt_logprobs"], choice["logprobs"]) == (expected, None)
    chat = shared.chat(prompt_logprobs=0).json()
    text = "user: hi\nassistant: "
    assert chat["prompt_logprobs"] == [None, *({str(ord(letter)): entry(ord(letter), 1)} for letter in text[1:])]
    assert "prompt_logprobs" not in chat["choices"][0]
    assert "prompt_logprobs" not in shared.text(prompt="ab").json()["choices"][0]


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("stream", [False, True])
def test_with_echo_logprobs_begin_with_the_prompt(shared: Served, stream: bool, max_tokens: int) -> None:
    reply = shared.text(prompt=["one", "o"], echo=True, logprobs=2, max_tokens=max_tokens, stream=stream, n=2)
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    choices = [choice for part in (events if stream else [reply.json()]) for choice in part["choices"]]
    for index, prompt in enumerate(("one", "one", "o", "o")):
        texts, lists = "", dict[str, list[Any]]()
        for choice in choices:
            if choice["index"] == index:
                texts += choice["text"]
                for name, values in (choice["logprobs"] or {}).items():
                    lists.setdefault(name, []).extend(values)
        whole = prompt + "Hello"[:max_tokens]
        assert texts == whole
        assert lists["tokens"] == list(whole)
        assert lists["token_logprobs"] == [None, *[-0.5] * (len(whole) - 1)]
        assert lists["top_logprobs"][0] is None
        assert lists["top_logprobs"][1:] == [{one: -0.5, chr(ord(one) + 1): -1.5} for one in whole[1:]]
        assert lists["text_offset"] == list(range(len(whole)))


def test_a_beam_search_gives_the_n_best_answers_of_both_apis() -> None:
    """The fake's likeliest token is H, at any place, and the letter behind it has a third of its probability."""
    with serving() as served:
        ask = {"use_beam_search": True, "n": 2, "best_of": 3, "max_tokens": 4, "temperature": 0.0}
        for reply in (served.text(echo=True, **ask), served.chat(**ask)):
            assert reply.status_code == 200, reply.text
            body = reply.json()
            texts = [choice.get("text") or "hi" + choice["message"]["content"] for choice in body["choices"]]
            assert (texts[0], sorted(texts[1])) == ("hiHHHH", sorted("hiHHHI"))
            assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "length"]
            assert body["usage"]["completion_tokens"] == 8
        assert {params.logprobs for params in served.backend.params} == {6}
        assert len(served.backend.params) == 2 * (1 + 3 * 3)
    with serving(FakeBackend(lambda prompt: Script(fail_after=0))) as served:
        assert served.text(use_beam_search=True, max_tokens=4).status_code == 500


@pytest.mark.parametrize(("limit", "kept"), [(3, 3), (-1, 64 - 16), (100, 70)])
def test_truncated_prompts_keep_their_last_tokens(limit: int, kept: int) -> None:
    """Prompts may be longer than the model's context, which has 64 tokens."""
    sent = "0123456789" * 7
    with serving(FakeBackend(max_model_len=64)) as served:
        given = {"truncate_prompt_tokens": limit, "max_tokens": 16}
        for reply in (
            served.text(prompt=[list(sent.encode())] * 2, echo=True, **given),
            served.chat(messages=[{"role": "user", "content": sent}], **given),
        ):
            assert reply.status_code == 200, reply.text
        chat = f"user: {sent}\nassistant: "
        assert served.backend.prompts == [sent[-kept:], sent[-kept:], chat[-kept if limit != 100 else 0 :]]
        texts = [choice["text"] for choice in served.text(prompt=sent, echo=True, **given).json()["choices"]]
        assert texts == [sent[-kept:] + "Hello, world"]
        assert served.text(prompt=sent).json()["error"]["code"] == "context_length_exceeded"


def test_a_hand_over_is_told_after_the_answer_and_only_of_a_complete_reply(shared: Served) -> None:
    asked = {"do_remote_decode": True, "remote_engine_id": None, "remote_block_ids": None, "remote_port": 1}
    reply = shared.text(prompt=[65, 66, 67], max_tokens=1, kv_transfer_params=asked)
    told = {"do_remote_decode": False, "do_remote_prefill": True, "stored_tokens": 3}
    assert reply.json()["kv_transfer_params"] == told
    passed_on = shared.chat(kv_transfer_params={**told, "remote_host": "h"})
    assert passed_on.status_code == 200
    assert "kv_transfer_params" not in passed_on.json()
    refused = shared.text(stream=True, kv_transfer_params=asked)
    assert refused.status_code == 400
    assert "do_remote_decode and stream" in refused.json()["error"]["message"]
