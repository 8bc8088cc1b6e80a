"""Random numbers, and the distributions of sampled tokens. Seeds are fixed, so results are the same each time."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from sampler_rig import sample
from splitmix import uniform

from sidestream.config import SamplingParams
from sidestream.ops.rules import COLUMNS, sampling_row, uniforms
from sidestream.runner.state import DecodeState
from sidestream.types import RowStart

pytestmark = pytest.mark.slow

DRAWS = 8_000
PROBS = np.array([0.02, 0.3, 0.05, 0.2, 0.03, 0.25, 0.05, 0.1])


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    """How many standard deviations the statistic lies above its mean; beyond 4 is less than one in ten thousand."""
    kept = expected > 0
    assert observed[~kept].sum() == 0
    freedom = kept.sum() - 1
    statistic = ((observed[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    return float((statistic - freedom) / math.sqrt(2 * freedom))


def renormalised(*, keep: list[int], power: float = 1.0) -> np.ndarray:
    kept = np.zeros_like(PROBS)
    kept[keep] = PROBS[keep] ** power
    return kept / kept.sum()


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, PROBS),
        ({"temperature": 2.0}, renormalised(keep=list(range(8)), power=0.5)),
        ({"temperature": 0.5}, renormalised(keep=list(range(8)), power=2.0)),
        ({"top_k": 3}, renormalised(keep=[1, 3, 5])),
        ({"top_p": 0.8}, renormalised(keep=[1, 3, 5, 7])),
        ({"min_p": 0.16}, renormalised(keep=[1, 2, 3, 5, 6, 7])),
        ({"top_k": 4, "top_p": 0.8}, renormalised(keep=[1, 3, 5])),
        ({"temperature": 2.0, "top_p": 0.9, "min_p": 0.5}, renormalised(keep=[1, 3, 5, 7], power=0.5)),
    ],
    ids=str,
)
@pytest.mark.parametrize("varied", ["seed", "output index"])
def test_sampled_tokens_follow_the_filtered_distribution(params, expected, varied):
    state = DecodeState(DRAWS, len(PROBS))
    by_seed = varied == "seed"
    for row in range(DRAWS):
        spec = SamplingParams(**params).spec(seed=row if by_seed else 17, eos_ids=())
        state.begin([(row, RowStart(spec, (), ()))])
    logits = torch.tensor(np.log(PROBS), dtype=torch.float32).repeat(DRAWS, 1)
    indices = [0] * DRAWS if by_seed else range(DRAWS)
    observed = np.bincount(sample(logits, range(DRAWS), indices, state).tokens.numpy(), minlength=len(PROBS))
    assert chi_square(observed, expected * DRAWS) < 4


def test_random_numbers_are_in_0_to_1_and_equal_in_every_process():
    assert all(
        0 <= uniform(seed, index) < 1
        for seed, index in itertools.product((0, 1, -1, -(1 << 63), (1 << 63) - 1), range(50))
    )
    assert [uniform(0, 0), uniform(42, 7), uniform(-1, 1 << 20)] == [
        0.6524484863740322,
        0.7347204584623639,
        0.6439801416380194,
    ]


def test_random_numbers_of_the_device_equal_the_reference():
    pairs = [*itertools.product((0, 1, 42, -1, -(1 << 63), (1 << 63) - 1), (0, 1, 7, 1 << 20)), (12345, 678)]
    hashed = [
        sampling_row(SamplingParams().spec(seed=seed, eos_ids=()), prompt_len=0)[COLUMNS["seed"]] for seed, _ in pairs
    ]
    numbers = uniforms(torch.tensor(hashed), torch.tensor([index for _, index in pairs]))
    assert numbers.tolist() == [uniform(seed, index) for seed, index in pairs]


@pytest.mark.parametrize("axis", ["seed", "output index", "random seeds"])
def test_uniform_numbers_fill_the_interval_evenly(axis):
    randoms = np.random.default_rng(1).integers(-(1 << 63), (1 << 63) - 1, DRAWS)
    pairs = {
        "seed": ((seed, 3) for seed in range(DRAWS)),
        "output index": ((12345, index) for index in range(DRAWS)),
        "random seeds": ((int(seed), 0) for seed in randoms),
    }
    values = np.array([uniform(seed, index) for seed, index in pairs[axis]])
    observed, _ = np.histogram(values, bins=64, range=(0, 1))
    assert abs(chi_square(observed, np.full(64, DRAWS / 64))) < 4


@pytest.mark.parametrize(("seed_step", "index_step"), [(1, 0), (0, 1), (1, -1), (1, 1), (2, -2), (1 << 32, 0), (0, 7)])
def test_random_numbers_of_neighbouring_seeds_and_indices_are_independent(seed_step, index_step):
    """Seed s at index i + 1 against seed s + 1 at index i, above all: those are the same number in a counter that only
    adds.
    """
    pairs = [(seed, index) for seed in range(100, 300) for index in range(10, 110)]
    here = np.array([uniform(seed, index) for seed, index in pairs])
    there = np.array([uniform(seed + seed_step, index + index_step) for seed, index in pairs])
    assert abs(np.corrcoef(here, there)[0, 1]) < 4 / math.sqrt(len(pairs))
    joint, _, _ = np.histogram2d(here, there, bins=8, range=((0, 1), (0, 1)))
    assert abs(chi_square(joint.ravel(), np.full(64, len(pairs) / 64))) < 4


def test_no_two_seeds_and_indices_share_a_random_number():
    numbers = {uniform(seed, index) for seed in range(-100, 100) for index in range(200)}
    assert len(numbers) == 200 * 200
