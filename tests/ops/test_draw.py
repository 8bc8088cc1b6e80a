"""Draws and penalties by kernels of ours are what torch computes. On a GPU if there is one, else in Triton's
interpreter.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sidestream.ops import Ops
from sidestream.ops.torch_ops import LARGEST, SMALLEST, UNIT, _filter, keep_typical
from sidestream.runner.state import DecodeState
from sidestream.types import RowStart

pytest.importorskip(
    "triton", reason="triton is not installed: it comes with torch on Linux x86-64, or with the dev extra"
)

from sidestream.config import SAMPLING_OPTIONS, SamplingParams
from sidestream.ops import triton_ops

HERE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.slow, *([pytest.mark.gpu] if HERE == "cuda" else [])]
SEEDS = range(4 if HERE == "cuda" else 1)
GREEDY = SamplingParams(temperature=0).spec(seed=0, eos_ids=())
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Into how many parts a row is cut does not depend on what it is cut from. Triton's interpreter takes seconds for a wide
# row, so there each dtype meets a narrow, a whole and a wide row once; a GPU tries all pairs.
CUTS = [
    (width, programs, dtype)
    for width, programs, dtypes in (
        (3, 512, DTYPES),
        (4096, 512, DTYPES),
        (7000, 512, DTYPES[:1]),
        (7000, 1, DTYPES[1:2]),
        (7000, 50, DTYPES[2:]),
    )
    for dtype in (DTYPES if HERE == "cuda" else dtypes)
]
ASKED: list[dict[str, object]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.95},
    {},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 3.0, "top_k": 300, "top_p": 0.7, "min_p": 0.01},
    {"temperature": 0.6, "min_p": 0.1},
    {"temperature": 1e-30, "top_p": 0.5},
    {"temperature": 1e30, "top_k": 2},
    {"temperature": 1.5, "top_p": 1e-9},
    {"temperature": 1.0, "top_k": 1 << 40, "top_p": 0.999},
    {"temperature": 1.2, "typical_p": 0.4},
    {"temperature": 2.0, "top_k": 200, "top_p": 0.9, "typical_p": 0.8},
]
PENALTIES: list[dict[str, object]] = [
    {},
    {"repetition_penalty": 1.7},
    {"presence_penalty": 0.5},
    {"frequency_penalty": -0.25},
    {"repetition_penalty": 0.5, "presence_penalty": -1.0, "frequency_penalty": 2.0},
]


def states(asked: list[dict[str, object]], width: int, seed: int) -> tuple[DecodeState, DecodeState]:
    """The same rows on a CPU and where kernels run."""
    rng = random.Random(seed)
    here, there = DecodeState(len(asked), width), DecodeState(len(asked), width, device=HERE)
    for row, each in enumerate(asked):
        # Directly, not by SamplingParams: some values are beyond what a request may ask for.
        spec = replace(
            GREEDY,
            options={**GREEDY.options, **each},
            penalised=any(SAMPLING_OPTIONS[name].penalty for name in each),
            seed=rng.randrange(-(1 << 63), 1 << 63),
        )
        prompt, outputs = ([rng.randrange(width) for _ in range(count)] for count in (5, 9))
        here.begin([(row, RowStart(spec, tuple(prompt), tuple(outputs)))])
    there.rules.numbers.copy_(here.rules.numbers)
    for mine, given in zip(there.seen_tables(), here.seen_tables(), strict=True):
        mine.copy_(given)
    return here, there


def between(logits: Tensor, place: int, row: int, state: DecodeState, ends: list[int]) -> float:
    """Which share of what a row keeps lies between two tokens; 1 if it does not keep both."""
    rules = state.rules
    logs = (logits[place].float() - logits[place].float().amax()).div(
        rules["temperature"][row].clamp(SMALLEST, LARGEST).float()
    )[None]
    powers = logs.exp()
    weights = (powers * UNIT).to(torch.int64)
    _filter(weights, powers, *(rules[name][[row]] for name in ("top_k", "top_p", "min_p")))
    keep_typical(weights, powers, logs, rules["typical_p"][[row]])
    first, last = sorted(ends)
    if not (weights[0, first] and weights[0, last]):
        return 1.0
    return float(weights[0, first + 1 : last].sum() / weights.sum())


@pytest.mark.parametrize(("width", "programs", "dtype"), CUTS)
def test_rows_sample_the_tokens_that_their_options_allow(
    width: int, programs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in SEEDS:
        monkeypatch.setattr(triton_ops, "_PROGRAMS", programs)  # into how many parts a row is cut
        generator, count = torch.Generator().manual_seed(seed), len(ASKED)
        here, there = states(ASKED, width, seed)
        logits = (torch.randn(2 * count + 4, width, generator=generator) * 3).to(dtype)
        logits[: count // 2] = logits[: count // 2].mul(2).round().div(2)  # many equals
        for place, odd in enumerate((torch.nan, torch.inf, -torch.inf)):
            logits[place, seed % width] = odd
        rows = torch.tensor([*range(count), *reversed(range(count)), *[here.padding_slot] * 4])
        indices = torch.randint(0, 1000, (len(rows),), generator=generator)

        wanted, wanted_finite = Ops().draw(logits, rows, indices, here.rules.numbers, typical=True)
        moved = logits.to(HERE)
        tokens, finite = triton_ops.TritonOps().draw(
            moved, rows.to(HERE), indices.to(HERE), there.rules.numbers, typical=True
        )

        assert finite.tolist() == wanted_finite.tolist() and not finite[0] and not finite[1]
        drawn, different = tokens.tolist(), 0
        for place, (row, expected) in enumerate(zip(rows.tolist(), wanted.tolist(), strict=True)):
            if drawn[place] != expected:  # the exponential is not the same to the last bit
                different += 1
                assert between(logits, place, row, here, [drawn[place], expected]) < 1e-5, (place, row)
        assert different <= 1
        assert tokens[-4:].tolist() == Ops().argmax(logits)[0][-4:].tolist()  # of padding


@pytest.mark.parametrize(
    ("asked", "kept", "dtype"),
    [
        ({"top_k": 2}, 2, torch.bfloat16),
        ({"top_k": 3}, 3, torch.float32),
        ({"top_p": 0.001}, 1, torch.bfloat16),
        (
            {"top_p": 0.26},
            3,
            torch.bfloat16,
        ),  # of 12 that are hardly less likely than each other, three have a little more than a quarter
        ({"top_k": 4, "top_p": 0.26}, 2, torch.bfloat16),
        ({"min_p": 0.975}, 3, torch.bfloat16),  # exp(-0.02) is a little more
        ({"top_k": 3, "min_p": 0.985}, 2, torch.float32),
        ({"top_k": 3, "typical_p": 0.3}, 1, torch.float32),
    ],
    ids=str,
)
def test_filters_keep_so_many_and_no_other(asked: dict[str, object], kept: int, dtype: torch.dtype) -> None:
    order, draws = torch.randperm(12, generator=torch.Generator().manual_seed(9)), 30
    logits = (order - 6).to(dtype)[None].repeat(draws, 1)  # the temperature brings them together
    here, there = states([{"temperature": 100.0, **asked}], 12, 1)
    rows, indices = torch.zeros(draws, dtype=torch.int64), torch.arange(draws)

    moved, typical = logits.to(HERE), "typical_p" in asked
    tokens, _ = triton_ops.TritonOps().draw(
        moved, rows.to(HERE), indices.to(HERE), there.rules.numbers, typical=typical
    )

    likeliest_first = order.sort(descending=True).indices.tolist()
    if typical:
        likeliest_first = likeliest_first[1:]  # of three, the second has the logarithm that is nearest to the mean
    assert set(tokens.tolist()) == set(likeliest_first[:kept])
    assert tokens.tolist() == Ops().draw(logits, rows, indices, here.rules.numbers, typical=typical)[0].tolist()


def test_a_vocabulary_of_more_tiles_than_a_row_has_parts() -> None:
    width = 200_001
    logits = torch.randn(2, width, generator=torch.Generator().manual_seed(2)).mul(3).to(torch.bfloat16)
    here, there = states([{"temperature": 1.0, "top_k": 5000, "top_p": 0.9}, {"temperature": 1.0}], width, 4)
    rows, indices = torch.arange(2), torch.tensor([3, 4])

    moved = logits.to(HERE)
    tokens, _ = triton_ops.TritonOps().draw(moved, rows.to(HERE), indices.to(HERE), there.rules.numbers)

    for row, expected in enumerate(Ops().draw(logits, rows, indices, here.rules.numbers)[0].tolist()):
        assert tokens[row] == expected or between(logits, row, row, here, [int(tokens[row]), expected]) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "stride"), [(60, 60), (9000, 9010)])
def test_masks(width: int, stride: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(9, stride, generator=generator).to(dtype)[:, :width]
    rows = torch.tensor([7, 0, 3])
    masks = torch.randint(-(1 << 31), 1 << 31, (3, -(-width // 32)), generator=generator).to(torch.int32)
    wanted = logits.clone()
    for row, words in zip(rows.tolist(), masks.tolist(), strict=True):
        for token in range(width):
            if not words[token // 32] >> token % 32 & 1:
                wanted[row, token] = -torch.inf
    for ops, device in ((Ops(), torch.device("cpu")), (triton_ops.TritonOps(), HERE)):
        masked = torch.empty_strided(logits.shape, logits.stride(), dtype=dtype, device=device).copy_(logits)
        ops.mask(masked, rows.to(device), masks.to(device))
        assert torch.equal(masked.cpu(), wanted)


@pytest.mark.parametrize("drafted", [True, False])
@pytest.mark.parametrize(("width", "stride"), [(60, 60), (9000, 9000), (9000, 9010)])
def test_penalties(width: int, stride: int, drafted: bool) -> None:
    for dtype in [torch.float32, torch.bfloat16]:
        for seed in SEEDS:
            generator = torch.Generator().manual_seed(seed)
            here, there = states(PENALTIES, width, seed)
            logits = torch.randn(9, stride, generator=generator).mul(3).to(dtype)[:, :width]
            rows = torch.tensor([0, 1, 2, 3, 4, here.padding_slot, 4, 3, 0])
            before = torch.randint(-1, width, (9, 3), generator=generator) if drafted else None

            moved = torch.empty_strided(logits.shape, logits.stride(), dtype=dtype, device=HERE).copy_(logits)
            drafts = None if before is None else before.to(HERE)
            got = triton_ops.TritonOps().penalise(
                moved, rows.to(HERE), there.rules.numbers, *there.seen_tables(), drafts
            )
            wanted = Ops().penalise(logits.clone(), rows, here.rules.numbers, *here.seen_tables(), before)

            assert wanted.dtype == got.dtype == torch.float32
            torch.testing.assert_close(got.cpu(), wanted, rtol=1e-6, atol=1e-6)
            assert torch.equal(got[[0, 5, 8]].cpu(), logits[[0, 5, 8]].float())
            assert not torch.equal(wanted[1:5], logits[1:5].float())
