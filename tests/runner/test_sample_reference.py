"""The sampler against a slow one that is written differently: one row, Python lists, float64, sorting. And against
transformers' filters.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sampler_rig import sample
from splitmix import uniform
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from sidestream.config import SamplingParams
from sidestream.runner.state import DecodeState
from sidestream.types import RowStart, SamplingSpec

VOCAB = 24
END = 2
# Decisions closer than this may fall either way in float32; such examples are skipped.
CLOSE = 2e-5


def adjusted(logits: Sequence[float], start: RowStart, output_index: int) -> list[float]:
    return [adjusted_one(token, logit, start, output_index) for token, logit in enumerate(logits)]


def adjusted_one(token: int, logit: float, start: RowStart, output_index: int) -> float:
    spec = start.sampling
    if output_index < spec.min_tokens and token in spec.forbidden_until_min:
        return -math.inf
    biased = logit + spec.logit_bias.get(token, 0.0)
    if token in start.prompt or token in start.outputs:
        biased = (
            biased / spec.options["repetition_penalty"] if biased > 0 else biased * spec.options["repetition_penalty"]
        )
    times = start.outputs.count(token)
    return biased - spec.options["frequency_penalty"] * times - (spec.options["presence_penalty"] if times else 0.0)


def softmax(logits: Sequence[float]) -> list[float]:
    top = max(logits)
    powers = [math.exp(logit - top) for logit in logits]
    return [power / sum(powers) for power in powers]


def clearly_less(left: float, right: float) -> bool:
    assume(left == right or abs(left - right) > CLOSE * max(abs(left), abs(right)))
    return left < right


def kept(probs: Sequence[float], spec: SamplingSpec) -> set[int]:
    ids = set(range(len(probs)))
    if spec.options["top_k"]:
        ids = {i for i in ids if sum(clearly_less(probs[i], other) for other in probs) < spec.options["top_k"]}
    if spec.options["top_p"] < 1:
        mass = sum(probs[i] for i in ids)
        ids = {
            i
            for i in ids
            if clearly_less(
                sum(probs[j] for j in ids if clearly_less(probs[i], probs[j])), spec.options["top_p"] * mass
            )
        }
    ids = {i for i in ids if not clearly_less(probs[i], spec.options["min_p"] * max(probs))}
    return ids if spec.options["typical_p"] == 1 else typical(probs, ids, spec.options["typical_p"])


def typical(probs: Sequence[float], ids: set[int], typical_p: float) -> set[int]:
    mass = sum(probs[i] for i in ids)
    surprise = {i: -math.log(probs[i] / mass) for i in ids if probs[i] > 1e-12}
    entropy = sum(probs[i] / mass * surprise[i] for i in surprise)
    distance = {i: 1 + abs(surprise[i] - entropy) for i in surprise}  # 1: what is close is not relative to 0
    return {
        i
        for i in surprise
        if clearly_less(sum(probs[j] for j in surprise if clearly_less(distance[j], distance[i])), typical_p * mass)
    }


def reference(logits: Sequence[float], start: RowStart, output_index: int) -> int:
    spec = start.sampling
    logits = adjusted(logits, start, output_index)
    if spec.options["temperature"] == 0 or spec.options["top_k"] == 1:
        best = max(range(len(logits)), key=lambda i: logits[i])
        assume(all(logits[best] - logit > CLOSE for i, logit in enumerate(logits) if i != best))
        return best
    probs = softmax([logit / spec.options["temperature"] for logit in logits])
    ids = sorted(kept(probs, spec))
    target = uniform(spec.seed, output_index) * sum(probs[i] for i in ids)
    total = 0.0
    for i in ids:
        total += probs[i]
        if clearly_less(target, total):
            return i
    raise AssertionError("the sum ends above every target")


def tokens_of(count: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, VOCAB - 1), max_size=count).map(tuple)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.0, 1.7, 20.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, VOCAB - 1, VOCAB, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.999, 0.9, 0.5, 0.1, 1e-6]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.2, 0.9]),
    typical_p=st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.2, 3.0, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.6, -1.1, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.3, -0.7, 2.0]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB + 3), st.floats(-5, 5), max_size=3),
    stop_token_ids=tokens_of(2),
    min_tokens=st.sampled_from([0, 0, 3]),
)


@st.composite
def row_starts(draw: st.DrawFn) -> RowStart:
    spec = draw(PARAMS).spec(seed=draw(st.integers(-(1 << 63), (1 << 63) - 1)), eos_ids=(END,))
    return RowStart(spec, draw(tokens_of(6)), draw(tokens_of(6)))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(row_starts(), min_size=1, max_size=4), st.integers(0, 10_000), st.integers(0, 6))
def test_any_mixture_of_options_samples_the_references_tokens(starts, logits_seed, output_index):
    # the grid makes equal logits common
    logits = torch.randn(len(starts), VOCAB, generator=torch.Generator().manual_seed(logits_seed)).mul(8).round().div(4)
    want = [reference(row.tolist(), start, output_index) for row, start in zip(logits, starts, strict=True)]
    state = DecodeState(len(starts), VOCAB)
    for row, start in enumerate(starts):
        state.begin([(row, start)])
    drawn = sample(logits, range(len(starts)), [output_index] * len(starts), state)
    assert drawn.tokens.tolist() == want and drawn.finite.all()


@pytest.mark.parametrize(
    "params",
    [{"top_p": 0.95}, {"top_k": 40}, {"top_k": 100, "top_p": 0.8}, {"min_p": 0.02}, {"temperature": 0.6}],
    ids=str,
)
def test_rows_of_3000_logits_sample_the_references_tokens(params):
    logits = torch.randn(40, 3000, generator=torch.Generator().manual_seed(5)) * 3
    starts = [RowStart(SamplingParams(**params).spec(seed=seed, eos_ids=()), (), ()) for seed in range(40)]
    want = []
    for row, start in zip(logits.double(), starts, strict=True):
        probs = row.div(start.sampling.options["temperature"]).softmax(-1)
        ranked, ids = probs.sort(descending=True)
        if start.sampling.options["top_k"]:
            ranked[start.sampling.options["top_k"] :] = 0
        ranked /= ranked.sum()
        ranked[(ranked.cumsum(0) - ranked) >= start.sampling.options["top_p"]] = 0
        ranked[ranked < start.sampling.options["min_p"] * ranked[0]] = 0
        cumulative = torch.zeros_like(ranked).scatter_(0, ids, ranked).cumsum(0)
        want.append(int((cumulative <= uniform(start.sampling.seed, 0) * cumulative[-1]).sum()))
    state = DecodeState(40, 3000)
    for row, start in enumerate(starts):
        state.begin([(row, start)])
    assert sample(logits, range(40), [0] * 40, state).tokens.tolist() == want


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"typical_p": 0.3},
        {"typical_p": 0.6, "temperature": 2.0},
        {"temperature": 1.5, "top_k": 7, "top_p": 0.95, "min_p": 0.05, "typical_p": 0.5},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.8, "min_p": 0.3},
        {"repetition_penalty": 1.8, "top_k": 4},
        {"temperature": 0.5, "top_p": 0.95, "repetition_penalty": 0.7},
    ],
    ids=str,
)
def test_filters_keep_the_tokens_that_transformers_keeps(params):
    prompt = (1, 4, 6)
    logits = torch.randn(1, 10, generator=torch.Generator().manual_seed(2))
    p = SamplingParams(**params).spec(seed=0, eos_ids=())
    theirs = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(p.options["repetition_penalty"]),
            TemperatureLogitsWarper(p.options["temperature"]),
        ]
    )
    if p.options["top_k"]:
        theirs.append(TopKLogitsWarper(p.options["top_k"]))
    if p.options["top_p"] < 1:
        theirs.append(TopPLogitsWarper(p.options["top_p"]))
    if p.options["min_p"]:
        theirs.append(MinPLogitsWarper(p.options["min_p"]))
    if p.options["typical_p"] < 1:
        theirs.append(TypicalLogitsWarper(p.options["typical_p"]))
    want = theirs(torch.tensor([prompt]), logits.clone()).isfinite()[0].nonzero().flatten().tolist()
    state = DecodeState(2000, 10)
    for seed in range(2000):
        state.begin([(seed, RowStart(dataclasses.replace(p, seed=seed), prompt, ()))])
    drawn = sample(logits.repeat(2000, 1), range(2000), [0] * 2000, state)
    assert sorted(set(drawn.tokens.tolist())) == want
