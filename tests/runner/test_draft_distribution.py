"""Drafts do not change the distribution of sampled answers (chi-square), nor any token of an equal seed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sampler_rig import sample
from torch import Tensor

from sidestream.config import SamplingParams
from sidestream.ops import Ops
from sidestream.runner.forward import ForwardOutput, Proposed
from sidestream.runner.sampler import Sampler, SamplingMode
from sidestream.runner.state import DecodeState
from sidestream.runner.step_inputs import InputSizes, StepInputs, pack
from sidestream.types import BatchPlan, RowPlan, RowStart

ROWS, LENGTH, MOST = 3_000, 3, 2
# A token depends on the one before it, and 0 comes first.
NEXT = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.6, 0.1, 0.2], [0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.1, 0.1]])
VOCAB = len(NEXT)


def rows(first_seed: int) -> DecodeState:
    state = DecodeState(ROWS, VOCAB, max_len=LENGTH + MOST + 2)
    for row in range(ROWS):
        state.begin([(row, RowStart(SamplingParams().spec(seed=first_seed + row, eos_ids=()), (0,), ()))])
    return state


def plain(first_seed: int) -> Tensor:
    """`[ROWS, LENGTH]`."""
    state, tokens = rows(first_seed), [torch.zeros(ROWS, dtype=torch.int64)]
    for index in range(LENGTH):
        tokens.append(sample(NEXT[tokens[-1]].log(), range(ROWS), [index] * ROWS, state).tokens)
    return torch.stack(tokens[1:], dim=1)


def drafted(first_seed: int, *, guess: torch.Generator) -> tuple[Tensor, float]:
    """The same by steps that draft, and the share of drafts that was right."""
    state = rows(first_seed)
    sampler = Sampler(state, Ops())
    plan = (RowPlan(row, row, 0, 0, LENGTH + 2 * MOST, None, (0,), True, 0, drafts=MOST) for row in range(ROWS))
    batch = BatchPlan(tuple(plan), speculates=True)
    sizes = InputSizes.of(batch)
    numbers = pack(batch, sizes, padding_slot=ROWS, block_tokens=LENGTH + 3 * MOST)
    inputs = StepInputs.of(torch.from_numpy(numbers), sizes, table_width=1)
    right = steps = 0.0
    while int(state.lengths[:ROWS].min()) < LENGTH:
        guesses = torch.randint(VOCAB, (ROWS, MOST), generator=guess)
        before = torch.cat([state.last_tokens[:ROWS, None], guesses], dim=1)
        positions = state.lengths[:ROWS, None].clamp(max=LENGTH) + torch.arange(1 + MOST)
        proposed = Proposed(guesses, torch.zeros(3, dtype=torch.int64))
        output = ForwardOutput(NEXT[before].log().flatten(0, 1), positions.flatten(), proposed=proposed)
        _, counts = sampler.sample(inputs, output, SamplingMode.RANDOM)
        assert counts is not None
        right, steps = right + float((counts - 1).sum()), steps + 1
    return state.history[:ROWS, 1 : 1 + LENGTH].to(torch.int64), right / (steps * ROWS * MOST)


def test_drafts_change_no_token_and_answers_follow_the_models_distribution() -> None:
    with_drafts, share = drafted(0, guess=torch.Generator().manual_seed(7))
    assert 0.1 < share < 0.5  # many a draft was right, and many a one wrong
    assert torch.equal(with_drafts, plain(0))
    assert excess(with_drafts) < 4


def excess(answers: Tensor) -> float:
    """How many standard deviations chi-square of the answers lies above its mean; beyond 4 is less than one in ten
    thousand.
    """
    start = torch.zeros(VOCAB)
    start[0] = 1
    joint = (start @ NEXT)[:, None, None] * NEXT[:, :, None] * NEXT[None]
    expected = joint.flatten().double().numpy() * ROWS
    numbers = (answers * torch.tensor([VOCAB**2, VOCAB, 1])).sum(1)
    observed = np.bincount(numbers.numpy(), minlength=VOCAB**LENGTH)
    freedom = len(expected) - 1
    return float((((observed - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize("seed", [1, 2])
def test_keeping_wrong_drafts_would_fail_the_chi_square_test(seed: int) -> None:
    answers = plain(seed * ROWS)
    answers[: ROWS // 4, 1] = torch.randint(VOCAB, (ROWS // 4,), generator=torch.Generator().manual_seed(seed))
    assert excess(plain(seed * ROWS)) < 4 < excess(answers)
