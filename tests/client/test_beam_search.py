"""Beam search finds what transformers' finds, from every front end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from proof.tiny_models import tiny_model_dir
from sidestream import LLM, RequestRejected
from sidestream.client.beam_search import BeamSearch
from sidestream.client.front_end import FrontEnd
from sidestream.client.in_process import InProcessClient
from sidestream.types import TokenLogprob

PROMPTS = [[10 + position * step % 200 for position in range(length)] for step, length in ((3, 37), (7, 18), (11, 5))]
SIZES: dict[str, Any] = {"kv_memory": "8MiB", "compute_threads": 1, "block_tokens": 8, "dtype": "float32"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir("llama", tmp_path_factory.mktemp("tiny"), seed=1)


@pytest.fixture(scope="module")
def llm(directory: Path) -> Any:
    with LLM(directory, **SIZES) as llm:
        yield llm


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def theirs(model: Any, prompt: list[int], end_ids: tuple[int, ...], **options: Any) -> list[tuple[list[int], float]]:
    width = options["num_beams"]
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        num_return_sequences=width,
        eos_token_id=list(end_ids) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    found = []
    for row, score in zip(output.sequences[:, len(prompt) :].tolist(), output.sequences_scores.tolist(), strict=True):
        ends = [at for at, token in enumerate(row) if token in end_ids]
        found.append((row[: ends[0] + 1] if ends else row, score))
    return found


def searched(llm: LLM, prompt: list[int], end_ids: tuple[int, ...], width: int, **options: Any) -> Any:
    search = BeamSearch(prompt, width=width, end_ids=end_ids, **options)
    while search.prompts:
        outputs = llm.generate(search.prompts, search.params)
        search.advance([output.completions[0].logprobs[0] for output in outputs])
    return search.answers(llm.tokenizer)


@pytest.mark.parametrize(
    ("width", "ends", "length_penalty"),
    [(2, 0, 1.0), (3, 0, 2.0), (4, 1, -0.5), (5, 2, 0.0), (5, 2, 2.0), (3, 5, 1.0), (2, 9, -0.5), (2, 9, 2.0)],
)
def test_answers_and_scores_are_those_of_transformers(
    llm: LLM, model: Any, width: int, ends: int, length_penalty: float
) -> None:
    """With ends, some of the likeliest tokens end an answer, so that answers of many lengths compete."""
    for prompt in PROMPTS:
        first = searched(llm, prompt, (), 2, max_tokens=8, length_penalty=1.0)
        frequent = sorted({token for answer in first for token in answer.token_ids[2:]})[:ends]
        options = {"num_beams": width, "max_new_tokens": 8, "length_penalty": length_penalty}
        end_ids = tuple(frequent)[: 20 // width - 1]
        expected = theirs(model, prompt, end_ids, **options)
        found = searched(llm, prompt, end_ids, width, max_tokens=8, length_penalty=length_penalty)
        assert [list(answer.token_ids) for answer in found] == [tokens for tokens, _ in expected]
        assert [answer.score for answer in found] == pytest.approx([score for _, score in expected], abs=1e-4)
        assert [answer.finish_reason == "stop" for answer in found] == [tokens[-1] in end_ids for tokens, _ in expected]


def test_several_prompts_are_searched_together_and_share_their_beginnings(llm: LLM) -> None:
    alone = [llm.beam_search(prompt, beam_width=3, max_tokens=12, ignore_eos=True)[0] for prompt in PROMPTS]
    cached = llm.metrics.value("cached_tokens_total", "device")
    together = llm.beam_search(PROMPTS, beam_width=3, max_tokens=12, ignore_eos=True)
    for ours, others in zip(together, alone, strict=True):
        assert [answer.token_ids for answer in ours] == [answer.token_ids for answer in others]
        # other batches, other rounding
        assert [answer.score for answer in ours] == pytest.approx([answer.score for answer in others], abs=1e-4)
    assert llm.metrics.value("cached_tokens_total", "device") > cached + 12 * 3 * 32
    for answers in alone:
        assert [answer.score for answer in answers] == sorted((answer.score for answer in answers), reverse=True)
        assert len({answer.token_ids for answer in answers}) == 3
        assert all(answer.text == llm.tokenizer.detokenizer([65]).decode(answer.token_ids) for answer in answers)
    greedy = llm.beam_search(PROMPTS[0], beam_width=1, max_tokens=5, ignore_eos=True)[0][0]
    assert greedy.finish_reason == "length"


def test_an_event_loop_finds_the_same(llm: LLM) -> None:
    async def search() -> Any:
        front_end = FrontEnd(InProcessClient(llm.engine), llm.tokenizer, model_name="tiny")
        return await front_end.beam_search(PROMPTS[0], beam_width=3, max_tokens=12, ignore_eos=True)

    here = llm.beam_search(PROMPTS[0], beam_width=3, max_tokens=12, ignore_eos=True)[0]
    assert [answer.token_ids for answer in asyncio.run(search())] == [answer.token_ids for answer in here]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"beam_width": 11}, r"beam_width is 11: it must be a whole number in \[1, 10\]"),
        ({"beam_width": 0}, "beam_width is 0: "),
        ({"beam_width": True}, "beam_width is True: "),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens is 0"),
    ],
)
def test_a_beam_search_beyond_its_bounds_is_refused(llm: LLM, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestRejected, match=reason):
        llm.beam_search(PROMPTS, **{"max_tokens": 4, "ignore_eos": True, **options})
    assert llm.engine.unfinished == 0


def test_a_search_ends_when_no_beam_can_improve() -> None:
    """Two answers end at once with a better score than any beam has."""
    search = BeamSearch([1], width=2, max_tokens=100, end_ids=(8, 9))
    search.advance([TokenLogprob(8, 0.0, ((8, -0.1), (9, -0.2), (3, -5.0), (4, -6.0), (5, -7.0), (6, -8.0)))])
    assert search.prompts == []
