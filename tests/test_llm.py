"""The interface for scripts, with a real tiny model: many prompts through a short queue, and nothing left behind by a
failure.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import logging
import pickle
import re
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llm_rig import with_sampling_defaults

from proof.faults import Hold
from proof.tiny_models import tiny_model_dir
from sidestream import (
    LLM,
    ConfigError,
    EngineConfig,
    EngineStopped,
    KVEventsConfig,
    ModelError,
    OffloadConfig,
    ProcessFailed,
    QueueFull,
    RequestError,
    RequestRejected,
    SamplingParams,
    SidestreamError,
    SpeculativeConfig,
    StructuredOutputs,
)
from sidestream.config import EngineSizes, ReasoningMarks
from sidestream.text import Detokenizer, StopStrings
from sidestream.types import Delta
from sidestream_kv.device.machine import process_age_s

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [
    f"The {name} " * 3 for name in ("whale", "ship", "sea", "crew", "mate", "boat", "wind", "rope", "mast", "sail")
]
BOUND = 3
SIZES: dict[str, Any] = {"kv_memory": "8MiB", "compute_threads": 1}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Two requests run, one waits, a fourth is one too many."""
    directory = tiny_model_dir("llama", tmp_path_factory.mktemp("tiny"), seed=1)
    with LLM(directory, kv_memory="8MiB", max_running=2, max_waiting=BOUND - 2, compute_threads=1) as llm:
        yield llm
        assert llm.engine.unfinished == 0


class Watched:
    """Counts what an engine is asked and refuses, and may fail in the middle."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch, *, fail_at: int | None = None) -> None:
        self.accepted = 0
        self.refused = 0
        self._submit = llm.engine.submit
        self._fail_at = fail_at
        monkeypatch.setattr(llm.engine, "submit", self)

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self.accepted == self._fail_at:
            raise MemoryError("injected")
        try:
            handle = self._submit(*args, **options)
        except QueueFull:
            self.refused += 1
            raise
        self.accepted += 1
        return handle


def test_the_stages_of_the_start_are_reported(tmp_path: Path) -> None:
    stages: list[tuple[str, int, int]] = []
    with LLM(tiny_model_dir("llama", tmp_path, seed=1), **SIZES, on_stage=lambda *stage: stages.append(stage)):
        names = ["reading the tokenizer", "reading and checking the weights", "building the engine"]
        assert [stage for stage, *_ in stages] == names


def test_default_chunk_and_budget_sizes_depend_on_the_device_and_each_other() -> None:
    assert EngineConfig().sizes("cpu") == EngineSizes(1 << 30, 16, 256, 528)
    assert EngineConfig().sizes("cuda") == EngineSizes(None, 256, 8192, 8448, False, 0.25)
    assert EngineConfig(max_running=64, kv_memory="2GiB").sizes("cuda") == EngineSizes(
        2 << 30, 64, 8192, 8256, False, 0.25
    )
    assert EngineConfig(separate_tail_chunk=True).sizes("cuda") == EngineSizes(None, 256, 8192, 8448, True, None)
    assert EngineConfig(target_gap_ms=60).sizes("cpu") == EngineSizes(1 << 30, 16, 256, 528, False, 0.06)
    with pytest.raises(
        ConfigError, match="target_gap_ms is 60 and separate_tail_chunk is on, with which no chunk is cut"
    ):
        EngineConfig(target_gap_ms=60, separate_tail_chunk=True)
    with pytest.raises(ConfigError, match="target_gap_ms is 0: give milliseconds above 0"):
        EngineConfig(target_gap_ms=0)
    assert EngineConfig(block_tokens=48).sizes("cpu") == EngineSizes(1 << 30, 16, 240, 496)
    assert EngineConfig(block_tokens=512).sizes("cpu") == EngineSizes(1 << 30, 16, 512, 1040)
    with pytest.raises(ConfigError, match=r"token_budget is 300: it must hold one chunk .* \(256 \+ 64\)"):
        EngineConfig(token_budget=300, max_running=64)
    with pytest.raises(ConfigError, match=r"chunk_tokens is 100: it must be a multiple of block_tokens \(16\)"):
        EngineConfig(chunk_tokens=100)


def test_no_objects_are_kept_for_unread_outputs(llm: LLM) -> None:
    """A thousand a second would make the garbage collector stop the engine thread every few dozen steps."""
    submit, lying = llm.engine.submit, list[int]()
    before = sum(type(each) is Delta for each in gc.get_objects())  # of other tests

    def submit_and_count_at_the_end(prompt: Any, params: Any, sink: Any, **options: Any) -> Any:
        def count(delta: Delta) -> None:
            sink(delta)
            if delta.finish_reason is not None:
                lying.append(sum(type(each) is Delta for each in gc.get_objects()) - before)

        return submit(prompt, params, count, **options)

    llm.engine.submit = submit_and_count_at_the_end  # type: ignore[method-assign]
    try:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    finally:
        del llm.engine.submit
    assert [len(output.token_ids) for output in outputs] == [24] * len(PROMPTS)
    assert len(lying) == len(PROMPTS)
    assert max(lying) <= 2 * len(PROMPTS) + 2  # the first of each, and one on its way


def test_more_prompts_than_the_queue_takes_are_answered_in_order(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in PROMPTS]
    watched = Watched(llm, monkeypatch)
    together = llm.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in together] == alone
    assert len(set(alone)) == len(PROMPTS)
    assert (watched.accepted, watched.refused > 0) == (len(PROMPTS), True)


def test_samples_count_towards_the_queue_too(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(llm, monkeypatch)
    outputs = llm.generate(PROMPTS[:4], SamplingParams(temperature=0, max_tokens=3, n=2, ignore_eos=True))
    assert [len(output.completions) for output in outputs] == [2] * 4
    assert watched.refused > 0


def test_each_prompt_may_have_params_of_its_own(llm: LLM) -> None:
    each = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (5, 1, 4, 2, 3)]
    assert [len(output.token_ids) for output in llm.generate(PROMPTS[:5], each)] == [5, 1, 4, 2, 3]
    with pytest.raises(RequestRejected, match="5 params for 4 prompts"):
        llm.generate(PROMPTS[:4], each)


def test_a_queue_filled_by_others_raises_at_once(llm: LLM) -> None:
    told: list[Delta] = []
    with Hold(llm.engine.parts.device._streams["compute"]):  # type: ignore[attr-defined]
        others = llm.engine.submit(
            [1, 2, 3], SamplingParams(max_tokens=1, n=BOUND, temperature=0, ignore_eos=True), told.append
        )
        with pytest.raises(QueueFull, match="raise max_waiting"):
            llm.generate(PROMPTS, GREEDY)
        assert llm.engine.unfinished == len(others.request_ids)
    wait_until_idle(llm)
    assert [delta.finish_reason for delta in told] == ["length"] * BOUND


def test_a_refused_prompt_is_raised_before_any_prompt_starts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(llm, monkeypatch)
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.generate([*PROMPTS, []], GREEDY)
    assert (watched.accepted, watched.refused) == (0, 0)


def test_a_failure_in_the_middle_aborts_running_requests(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    Watched(llm, monkeypatch, fail_at=2)
    aborted = llm.metrics.value("requests_total", "abort")
    with pytest.raises(MemoryError):
        llm.generate(PROMPTS, SamplingParams(max_tokens=900, ignore_eos=True))
    wait_until_idle(llm)
    assert llm.metrics.value("requests_total", "abort") == aborted + 2


class _Broken:
    """A detokenizer that fails at the third token."""

    def __init__(self) -> None:
        self._texts = iter("xx")

    def push(self, token_id: int) -> str:
        for text in self._texts:
            return text
        raise UnicodeError("injected: no such character")


def test_a_stream_has_the_whole_text_decoded_outside_of_the_engine_thread(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = llm.generate(PROMPTS[0], GREEDY)[0].text
    assert whole
    makers = []
    push = Detokenizer.push
    monkeypatch.setattr(
        Detokenizer, "push", lambda self, token: makers.append(threading.current_thread()) or push(self, token)
    )
    assert "".join(delta.text for delta in llm.stream(PROMPTS[0], GREEDY)) == whole
    assert set(makers) == {threading.current_thread()}
    makers.clear()
    assert llm.generate(PROMPTS[0], GREEDY)[0].text == whole
    assert not makers  # all tokens at once


@pytest.mark.parametrize("stop", [(), ("never",)], ids=["all at once", "delta by delta"])
def test_special_tokens_are_part_of_the_text_if_asked_for(llm: LLM, stop: tuple[str, ...]) -> None:
    special = next(index for index in llm.tokenizer.special_ids if index not in llm.tokenizer.eos_ids)
    params = dataclasses.replace(GREEDY, allowed_token_ids=(special,), max_tokens=2, stop=stop)
    assert llm.generate(PROMPTS[0], params)[0].text == ""
    shown = llm.generate(PROMPTS[0], dataclasses.replace(params, skip_special_tokens=False))[0].text
    assert shown == 2 * llm.tokenizer.token_strings([special])[0]


def test_one_string_is_a_stop(llm: LLM) -> None:
    params, _ = stop_within(llm, PROMPTS[0], max_tokens=400)
    one = dataclasses.replace(params, stop=params.stop[0])
    assert one.stop == params.stop
    assert llm.generate(PROMPTS[0], one)[0].text == llm.generate(PROMPTS[0], params)[0].text


def test_a_chat_may_continue_its_last_message(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The whale"}]
    continued = llm.chat(messages, GREEDY, continue_final_message=True)
    prompt = llm.tokenizer.chat(messages, continue_final_message=True)
    assert prompt[-2:] == llm.tokenizer.encode("The whale", add_special_tokens=False)[-2:]
    assert continued.token_ids == llm.generate([prompt], GREEDY)[0].token_ids
    assert llm.chat(messages[:1], GREEDY, add_generation_prompt=False).prompt_tokens < continued.prompt_tokens


def test_truncated_prompts_keep_their_last_tokens(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPTS[0])
    for limit, kept in ((5, 5), (-1, len(ids)), (1000, len(ids))):
        params = dataclasses.replace(GREEDY, truncate_prompt_tokens=limit)
        output, expected = llm.generate(PROMPTS[0], params)[0], llm.generate([ids[-kept:]], GREEDY)[0]
        assert (output.prompt_tokens, output.token_ids) == (kept, expected.token_ids)
        assert next(delta.prompt_tokens for delta in llm.stream(ids, params)) == kept
    with pytest.raises(RequestRejected, match="truncate_prompt_tokens is 0: it must be a whole number in"):
        SamplingParams(truncate_prompt_tokens=0)


def test_typical_sampling_is_reproducible_and_independent_of_the_batch(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, typical_p=0.3, seed=5, max_tokens=12, ignore_eos=True)
    alone = llm.generate(PROMPTS[0], params)[0].token_ids
    each = [params, GREEDY, dataclasses.replace(params, typical_p=0.9, top_k=20), SamplingParams(max_tokens=3)]
    assert llm.generate([PROMPTS[0], *PROMPTS[1:4]], each)[0].token_ids == alone
    assert llm.generate(PROMPTS[0], dataclasses.replace(params, typical_p=1.0))[0].token_ids != alone


@pytest.mark.parametrize(
    "speculative", [None, SpeculativeConfig(max_drafts=3, adaptive=False)], ids=["plain", "drafts"]
)
def test_reasoning_ends_at_its_budget_and_the_answer_goes_on(tmp_path: Path, speculative: Any) -> None:
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=20, ignore_eos=True)
    with LLM(tiny_model_dir("llama", tmp_path, seed=1), **SIZES, speculative=speculative) as llm:
        start, end = (tuple(llm.tokenizer.encode(text, add_special_tokens=False)) for text in ("A", "BC"))
        free = llm.generate(PROMPTS[0], params)[0].token_ids
        bound = dataclasses.replace(params, thinking_token_budget=4, reasoning=ReasoningMarks(start, end, inside=True))
        answer = llm.generate(PROMPTS[0], bound)[0].token_ids
        assert (answer[:4], answer[4:6], len(answer)) == (free[:4], end, 20)
        outside = dataclasses.replace(bound, reasoning=ReasoningMarks(start, end))
        assert llm.generate(PROMPTS[0], outside)[0].token_ids == free  # it never reasons
        form = StructuredOutputs(regex="[^C]*C[0-9]{3}")
        formed = dataclasses.replace(bound, structured_outputs=form)
        assert re.fullmatch(r"[^C]*BC[0-9]{3}", llm.generate(PROMPTS[0], formed)[0].text)
        for wrong in ({"reasoning": None}, {"allowed_token_ids": (1, 2)}):
            with pytest.raises(RequestRejected, match="thinking_token_budget"):
                llm.generate(PROMPTS[0], dataclasses.replace(bound, **wrong))


def test_python_finds_the_markers_of_reasoning_in_the_chat_template(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(llm.tokenizer), "chat_template", "<think> </think>")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>"}]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, thinking_token_budget=2)
    answer = llm.chat(messages, params, continue_final_message=True)
    end = llm.tokenizer.encode("</think>", add_special_tokens=False)
    assert answer.token_ids[2 : 2 + len(end)] == tuple(end)
    assert llm.chat(messages[:1], params).token_ids[2 : 2 + len(end)] != tuple(end)


def stop_within(llm: LLM, prompt: str, *, max_tokens: int) -> tuple[SamplingParams, int]:
    """Parameters with a stop string that occurs early in the greedy answer to `prompt`, and the number of tokens until
    it is found.
    """
    free = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    text, tokens = "", list[int]()
    for delta in llm.stream(prompt, dataclasses.replace(free, max_tokens=24)):
        text += delta.text
        tokens += delta.token_ids
    params = dataclasses.replace(free, stop=(text[3:6],))
    detokenizer, stops = llm.tokenizer.detokenizer(), StopStrings(params.stop)
    return params, next(count for count, token in enumerate(tokens, 1) if stops.push(detokenizer.push(token))[1])


def test_prompts_of_one_call_each_end_at_their_own_stop_string(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine waits at the token that completes a stop string until it is told to end the answer; then it emits no
    further one.
    """
    asked = [stop_within(llm, prompt, max_tokens=400) for prompt in PROMPTS]
    needed = {tuple(llm.tokenizer.encode(prompt)): count for prompt, (_, count) in zip(PROMPTS, asked, strict=True)}
    submit, abort = llm.engine.submit, llm.engine.abort
    ended: dict[Any, threading.Event] = {}
    late: list[tuple[int, ...]] = []

    def submit_watched(prompt: Any, params: Any, sink: Any, **options: Any) -> Any:
        told, submitted, handles = list[int](), threading.Event(), list[Any]()

        def watched(delta: Delta) -> None:
            sink(delta)
            told.extend(delta.token_ids)
            if delta.finish_reason is None and not late and len(told) >= needed[tuple(prompt)]:
                submitted.wait(20)
                if not ended[handles[0]].wait(20):
                    late.append(tuple(prompt))

        handle = submit(prompt, params, watched, **options)
        ended[handle.request_ids] = threading.Event()
        handles.append(handle.request_ids)
        submitted.set()
        return handle

    def abort_watched(handle: Any, reason: str = "abort") -> None:
        abort(handle, reason)
        ended[handle.request_ids].set()

    monkeypatch.setattr(llm.engine, "submit", submit_watched)
    monkeypatch.setattr(llm.engine, "abort", abort_watched)
    emitted, stopped = llm.metrics.value("output_tokens_total"), llm.metrics.value("requests_total", "stop")
    outputs = llm.generate(PROMPTS, [params for params, _ in asked])
    assert late == []
    assert llm.engine.unfinished == 0  # an answer is returned when the engine holds nothing of it any more
    for output, prompt, (params, count) in zip(outputs, PROMPTS, asked, strict=True):
        (answer,) = output.completions
        assert (answer.finish_reason, len(answer.token_ids)) == ("stop", count), prompt
        assert llm.tokenizer.decode(answer.token_ids).startswith(answer.text + params.stop[0])
    assert llm.metrics.value("output_tokens_total") - emitted == sum(count for _, count in asked)
    assert llm.metrics.value("requests_total", "stop") - stopped == len(PROMPTS)


def test_prompts_with_and_without_stop_strings_may_share_a_call(llm: LLM) -> None:
    params, count = stop_within(llm, PROMPTS[1], max_tokens=40)
    each = [GREEDY, params, GREEDY, dataclasses.replace(params, n=2), GREEDY]
    outputs = llm.generate([PROMPTS[0], PROMPTS[1], PROMPTS[2], PROMPTS[1], PROMPTS[3]], each)
    assert [[(len(one.token_ids), one.finish_reason) for one in output.completions] for output in outputs] == [
        [(6, "length")],
        [(count, "stop")],
        [(6, "length")],
        [(count, "stop")] * 2,
        [(6, "length")],
    ]


def test_a_stream_ends_at_its_stop_string_and_ends_its_request(llm: LLM) -> None:
    params, count = stop_within(llm, PROMPTS[2], max_tokens=900)
    stopped = llm.metrics.value("requests_total", "stop")
    deltas = list(llm.stream(PROMPTS[2], params))
    assert (sum(len(delta.token_ids) for delta in deltas), deltas[-1].finish_reason) == (count, "stop")
    assert llm.engine.unfinished == 0
    assert llm.metrics.value("requests_total", "stop") == stopped + 1


def test_the_engine_thread_needs_no_tokenizer_for_stop_strings(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params, _ = stop_within(llm, PROMPTS[3], max_tokens=40)
    users: set[threading.Thread] = set()

    def watched(owner: Any, name: str) -> None:
        used = getattr(owner, name)

        def use(*values: Any) -> Any:
            users.add(threading.current_thread())
            return used(*values)

        monkeypatch.setattr(owner, name, use)

    watched(llm.tokenizer, "detokenizer")
    for name in ("push", "finish", "decode"):
        watched(Detokenizer, name)
    assert llm.generate(PROMPTS[3], params)[0].completions[0].finish_reason == "stop"
    assert [delta.finish_reason for delta in llm.stream(PROMPTS[3], params)][-1] == "stop"
    assert llm.generate(PROMPTS[3], GREEDY)[0].text
    assert users == {threading.current_thread()}


def test_a_tokenizer_that_fails_ends_its_request_with_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.tokenizer, "detokenizer", lambda after, shown=(): _Broken())
    with pytest.raises(RequestError, match="the tokenizer failed: injected"):
        list(llm.stream(PROMPTS[0], SamplingParams(max_tokens=900, ignore_eos=True)))
    wait_until_idle(llm)
    with pytest.raises(RequestError, match="the tokenizer failed: '_Broken' object has no attribute 'decode'"):
        llm.generate(PROMPTS[0], GREEDY)
    wait_until_idle(llm)


@pytest.mark.parametrize("stop", [(), ("z",)])
def test_an_answer_with_a_grammar_has_the_text_of_its_last_token(llm: LLM, stop: tuple[str, ...]) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=40, stop=stop, structured_outputs=StructuredOutputs(regex="[a-f]{5}!")
    )
    (output,) = llm.generate(["abc"], params)
    assert re.fullmatch("[a-f]{5}!", output.text)
    assert output.completions[0].finish_reason == "stop"


def test_a_stop_string_that_is_a_special_token_ends_the_answer_at_that_token(llm: LLM) -> None:
    (end,) = llm.tokenizer.encode("<|im_end|>")
    params = SamplingParams(max_tokens=4, logit_bias={end: 100.0}, stop=("<|im_end|>",))
    completion = llm.generate(PROMPTS[0], params)[0].completions[0]
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("", (end,), "stop")
    assert [delta.finish_reason for delta in llm.stream(PROMPTS[0], params)] == ["stop"]


def test_loading_warns_about_more_token_ids_than_embeddings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    few = tiny_model_dir("llama", tmp_path / "few", seed=1, vocab_size=258)
    with caplog.at_level("WARNING", logger="sidestream.engine.loading"), LLM(few, **SIZES):
        assert "the tokenizer has 259 token ids, the model 258 embeddings" in caplog.text
        assert (
            "('<|im_end|>') is refused; the chat template writes one of them, so every chat is refused" in caplog.text
        )


def test_token_ids_are_one_prompt_and_must_be_whole_numbers(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPTS[0])
    expected = [llm.generate(PROMPTS[0], GREEDY)[0].token_ids]
    for given in (ids, np.array(ids)):
        assert [output.token_ids for output in llm.generate(given, GREEDY)] == expected  # type: ignore[arg-type]
    assert llm.generate([], GREEDY) == []
    for wrong in (1.5, "2", None, True):
        for prompt in ([*ids, wrong], [[*ids, wrong]]):
            with pytest.raises(RequestRejected, match="not a whole number"):
                llm.generate(prompt, GREEDY)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (None, "prompts is None: give a text, a list of token ids, or a list of such prompts"),
        (5, "prompts is 5: give a text"),
        (b"hi", "prompts is b'hi': give a text"),
        ({"role": "user"}, r"prompts is {'role': 'user'}: .*a conversation is for chat\(\)"),
        ({1, 2}, r"prompts is {1, 2}: give a text"),
        (["hi", None], r"prompts\[1\] is None: give a text or a list of token ids"),
        ([b"hi"], r"prompts\[0\] is b'hi': give a text or a list of token ids"),
        ([{"role": "user"}], r"prompts\[0\] is .*a conversation is for chat\(\)"),
        ([[1, 2], ["a"]], "prompt has 'a', which is not a whole number"),
        ([[]], "the prompt is empty"),
    ],
    ids=repr,
)
def test_a_wrong_prompt_is_refused_by_name(llm: LLM, prompts: Any, words: str) -> None:
    with pytest.raises(RequestRejected, match=f"^{words}"):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (
            {"temperature": 0, "max_tokens": 9},
            r"params is {.+}: .+ such as SamplingParams\(temperature=0, max_tokens=9\)",
        ),
        (5, r"params is 5: give a SamplingParams object, such as SamplingParams\(temperature=0\)"),
        ("greedy", "params is 'greedy': give a SamplingParams object"),
        (SamplingParams, "params is the class SamplingParams: give a SamplingParams object"),
        ([{"top_k": 1}], r"params\[0\] is {'top_k': 1}: .+ such as SamplingParams\(top_k=1\)"),
        ([None, None], "2 params for 1 prompts: give one object for all, or one for each prompt"),
    ],
    ids=repr,
)
def test_a_value_that_is_no_sampling_params_is_refused_by_name(llm: LLM, params: Any, words: str) -> None:
    with pytest.raises(RequestRejected, match=f"^{words}"):
        llm.generate("hi", params)


@pytest.mark.parametrize("messages", ["hi", b"hi", None, 5, {"role": "user", "content": "hi"}], ids=repr)
def test_a_value_that_is_no_list_of_messages_is_refused_with_an_example(llm: LLM, messages: Any) -> None:
    with pytest.raises(
        RequestRejected, match=r'^messages is .+: give a list of messages, such as \[{"role": "user", "content"'
    ) as refusal:
        llm.chat(messages)
    assert refusal.value.param == "messages"


def test_streams_refuse_the_same_inputs_as_whole_answers(llm: LLM) -> None:
    with pytest.raises(RequestRejected, match=r"^prompt is None: give a text or a list of token ids"):
        next(llm.stream(None))  # type: ignore[arg-type]
    with pytest.raises(RequestRejected, match=r"^prompt has 'a', which is not a whole number"):
        next(llm.stream(["a", "b"]))  # type: ignore[arg-type]
    with pytest.raises(RequestRejected, match=r"^params is 5: give a SamplingParams object"):
        next(llm.stream("hi", 5))  # type: ignore[arg-type]


@pytest.mark.freezes_gc_heap
def test_a_closed_model_holds_no_weights(tmp_path: Path) -> None:
    """Scripts close one model and load the next one while they still have a name for the first."""
    llm = LLM(tiny_model_dir("llama", tmp_path, 0), **SIZES)
    llm.generate(["x"], SamplingParams(max_tokens=2))
    held = [weakref.ref(weight) for weight in llm.engine.parts.executor._model.module.parameters()]
    other = LLM(tiny_model_dir("llama", tmp_path, 0), **SIZES)
    llm.close()
    assert [ref() for ref in held] == [None] * len(held)
    assert gc.get_freeze_count()  # the other engine still keeps collections short
    other.close()


def test_close_of_a_hanging_engine_returns_after_a_bound_and_ends_its_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sidestream.engine.loading.CLOSE_S", 0.2)
    before = set(threading.enumerate())
    llm = LLM(tiny_model_dir("llama", tmp_path, seed=1), **SIZES)
    with ThreadPoolExecutor(2) as pool, Hold(llm.engine.parts.device._streams["compute"]):  # type: ignore[attr-defined]
        answer = pool.submit(llm.generate, PROMPTS[0], GREEDY)
        while not llm.engine.num_steps:
            time.sleep(0.001)
        late = pool.submit(llm.generate, PROMPTS[1], GREEDY)  # stays in the inbox
        while llm.engine.unfinished < 2:
            time.sleep(0.001)
        with pytest.raises(ProcessFailed, match=r"did not close within 0\.2 s, because thread sidestream-engine hangs"):
            llm.close()
        for request in (answer, late):
            with pytest.raises(RequestError, match="did not close within"):
                request.result(10.0)
        llm.close()
    assert "in block_until" in caplog.text  # the stack
    for thread in set(threading.enumerate()) - before:  # once the device goes on, the engine ends
        thread.join(10.0)
        assert not thread.is_alive()


def test_a_closed_model_raises_on_every_call(tmp_path: Path) -> None:
    with LLM(tiny_model_dir("llama", tmp_path, seed=1), **SIZES) as closed:
        pass
    calls = (
        lambda: closed.generate("hi"),
        lambda: closed.generate([]),
        lambda: next(closed.stream("hi")),
        lambda: closed.chat([{"role": "user", "content": "hi"}]),
        closed.flush,
        closed.reset_prefix_cache,
        lambda: closed.pin_prefix("hi", ttl_s=1),
        lambda: closed.unpin_prefix("hi"),
        lambda: closed.prefetch_prefix("hi"),
        closed.cached_prefixes,
        lambda: closed.drop_prefix("hi"),
        closed.pause,
        closed.resume,
        closed.__enter__,
    )
    for call in calls:
        with pytest.raises(EngineStopped, match=r"^this LLM is closed: make a new one$"):
            call()
    closed.close()  # still idempotent


@pytest.mark.parametrize(
    ("config", "old", "new"),
    [(EngineConfig, "tail_apart", "separate_tail_chunk"), (SpeculativeConfig, "max_slowdown", "max_draft_slowdown")],
)
def test_the_old_name_of_an_option_gives_its_new_name(config: type, old: str, new: str) -> None:
    with pytest.raises(ConfigError, match=f"^no option {old}: it is {new} now$"):
        config(**{old: 1})


@pytest.mark.parametrize(
    ("kind", "wrong", "near", "error"),
    [
        (SamplingParams, "temprature", "temperature", RequestRejected),
        (EngineConfig, "kv_mem", "kv_memory", ConfigError),
        (OffloadConfig, "dsk", "disk", ConfigError),
        (SpeculativeConfig, "proposr", "proposer", ConfigError),
    ],
)
def test_an_error_about_an_unknown_option_names_the_nearest_one(
    kind: type, wrong: str, near: str, error: type[SidestreamError]
) -> None:
    with pytest.raises(error, match=f"^no option {wrong}; did you mean {near}\\?$"):
        kind(**{wrong: 1})
    with pytest.raises(error, match=f"^no option {wrong}; did you mean {near}\\?$"):
        dataclasses.replace(kind(), **{wrong: 1})  # type: ignore[call-overload]
    assert list(inspect.signature(kind).parameters) == [field.name for field in dataclasses.fields(kind)]
    for same in (pickle.loads(pickle.dumps(kind())), copy.deepcopy(kind()), dataclasses.replace(kind())):  # type: ignore[call-overload]
        assert same == kind()


def test_sampling_defaults_of_the_checkpoint_apply_to_unset_options(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sidestream.engine.loading")
    directory = with_sampling_defaults(tmp_path, temperature=20.0, top_k=1)
    eight = SamplingParams(n=8, seed=1, max_tokens=8, ignore_eos=True)
    with LLM(directory, **SIZES) as llm:
        assert len({one.token_ids for one in llm.generate("The whale", eight)[0].completions}) == 1
        assert len({one.token_ids for one in llm.chat([{"role": "user", "content": "Hi"}], eight).completions}) == 1
        streamed: dict[int, tuple[int, ...]] = {}
        for delta in llm.stream("The whale", eight):
            streamed[delta.index] = streamed.get(delta.index, ()) + delta.token_ids
        assert len(set(streamed.values())) == 1
        freely = dataclasses.replace(eight, top_k=0)
        assert len({one.token_ids for one in llm.generate("The whale", freely)[0].completions}) == 8
    with LLM(directory, **SIZES, generation_config="none") as llm:
        hot = dataclasses.replace(eight, temperature=20.0)
        assert len({one.token_ids for one in llm.generate("The whale", hot)[0].completions}) == 8
        assert 256 in llm.engine.parts.eos_ids  # the file's, which count either way
    assert [record.message for record in caplog.records if "sampling" in record.message] == [
        "sampling defaults from generation_config.json: temperature 20, top_k 1; --generation-config none "
        "(in Python generation_config='none') ignores them",
        "sampling defaults: temperature 1, no filters, no penalties; generation_config.json is ignored",
    ]


def test_a_bad_sampling_default_is_refused_before_the_weights_are_read(tmp_path: Path) -> None:
    directory, stages = with_sampling_defaults(tmp_path, top_p=1.5), list[str]()
    with pytest.raises(
        ModelError,
        match=r"generation_config\.json: top_p is 1\.5: it must be a number in \(0\.0, 1\.0\]; correct the file",
    ):
        LLM(directory, **SIZES, on_stage=lambda stage, done, total: stages.append(stage))
    assert stages == []
    with LLM(directory, **SIZES, generation_config="none") as llm:
        assert len(llm.generate("The whale", GREEDY)[0].token_ids) == 6
    with pytest.raises(ConfigError, match=r"^no generation_config non; did you mean none\?$"):
        EngineConfig(generation_config="non")


def wait_until_idle(llm: LLM) -> None:
    until = time.monotonic() + 20
    while llm.engine.unfinished:
        assert time.monotonic() < until, "requests do not end"


def test_kv_events_reach_a_callback(tmp_path: Path) -> None:
    with LLM(
        tiny_model_dir("llama", tmp_path, seed=1), kv_memory="1MiB", compute_threads=1, kv_events=KVEventsConfig()
    ) as llm:
        batches: list[Any] = []
        llm.on_kv_events(lambda sequence, batch: batches.append((sequence, batch)))
        prompt = list(range(3, 40))
        llm.generate([prompt], GREEDY)
    assert [sequence for sequence, _ in batches] == list(range(len(batches)))
    tokens = [token for _, batch in batches for event in batch.events for token in getattr(event, "token_ids", ())]
    assert tokens[:32] == prompt[:32]


def test_a_kv_events_endpoint_in_use_is_refused_before_loading() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="which cannot be bound"):
        LLM("no-such-model", kv_events=KVEventsConfig(f"tcp://127.0.0.1:{taken.getsockname()[1]}"))


@pytest.mark.parametrize(
    "options",
    [
        {"kv_memory": "100TiB"},
        {"kv_memory": "12KiB", "block_tokens": 4, "speculative": SpeculativeConfig(max_drafts=16)},
    ],
    ids=["more than the machine has", "fewer tokens than drafts"],
)
def test_a_refused_size_is_not_logged_as_chosen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    caplog.set_level("INFO")
    directory = tiny_model_dir("llama", tmp_path, seed=1)
    with pytest.raises(ConfigError):
        LLM(directory, compute_threads=1, **options)
    assert "KV memory" not in caplog.text
    with LLM(directory, compute_threads=1, kv_memory="8MiB"):
        assert "KV memory: 0.01 GiB on cpu" in caplog.text


def test_max_running_above_65536_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_running is 1000000000: at most 65536 requests run at once; lower it"):
        EngineConfig(max_running=10**9)


def test_time_to_ready_is_measured_from_the_start_of_the_process(tmp_path: Path) -> None:
    begin = process_age_s()
    with LLM(tiny_model_dir("llama", tmp_path, seed=1), compute_threads=1, kv_memory="8MiB") as llm:
        assert begin < llm.metrics.value("engine_ready_seconds") <= process_age_s()
