"""Argmax, prompt lookup and forced tokens by Triton kernels equal torch, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import random

import pytest
import torch

from sidestream.ops import Ops
from sidestream.types import Forced

pytest.importorskip(
    "triton", reason="triton is not installed: it comes with torch on Linux x86-64, or with the dev extra"
)

from sidestream.ops.triton_ops import TritonOps

HERE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if HERE == "cuda" else []
SEEDS = range(40 if HERE == "cuda" else 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_argmax_takes_the_lowest_id_and_marks_rows_that_are_not_finite(dtype: torch.dtype) -> None:
    for width in [3, 4096, 9000]:
        for seed in SEEDS:
            rng, draws = random.Random(seed), torch.Generator().manual_seed(seed)
            logits = torch.randint(-3, rng.choice([2, 400]), (6, width), generator=draws).to(dtype)
            for row, odd in enumerate((torch.nan, torch.inf, -torch.inf)):
                logits[row, rng.randrange(width)] = odd
            logits[3] = -torch.inf
            logits[4, : width - 1] = -torch.inf

            tokens, finite = TritonOps().argmax(logits.to(HERE))
            wanted, wanted_finite = Ops().argmax(logits)

            assert (tokens.tolist(), finite.tolist()) == (wanted.tolist(), wanted_finite.tolist())
            assert wanted_finite.tolist() == [False, False, True, False, True, True]
            assert tokens[4] == width - 1


def test_argmax_of_some_columns() -> None:
    logits = torch.randn(5, 9000, generator=torch.Generator().manual_seed(3)).to(HERE)
    assert TritonOps().argmax(logits[:, :5000])[0].tolist() == logits[:, :5000].cpu().argmax(-1).tolist()


@pytest.mark.parametrize(("longest", "shortest"), [(4, 1), (2, 2), (3, 1)])
def test_ngram_finds_the_longest_earlier_occurrence(longest: int, shortest: int) -> None:
    for seed in SEEDS:
        rng, draws = random.Random(seed), torch.Generator().manual_seed(seed)
        width = rng.choice([9, 1500])
        history = torch.randint(rng.choice([2, 5, 60]), (7, width + 1), generator=draws, dtype=torch.int32)
        rows = torch.tensor(rng.sample(range(7), 4))
        lengths = torch.tensor([1, 2, width, rng.randint(1, width)])

        wanted = Ops().match_ngram(history[:, :-1], rows, lengths, 5, longest=longest, shortest=shortest)
        got = TritonOps().match_ngram(
            history.to(HERE)[:, :-1], rows.to(HERE), lengths.to(HERE), 5, longest=longest, shortest=shortest
        )

        assert got.tolist() == wanted.tolist()


def test_forced_tokens_replace_the_drafts_behind_their_own_beginning() -> None:
    slots, width, most, count = 6, 12, 5, 3
    for seed in range(200):
        rng = random.Random(seed)
        history = torch.tensor([[rng.randrange(2) for _ in range(width + 1)] for _ in range(slots)], dtype=torch.int32)
        forced = torch.tensor(
            [
                [rng.randrange(width), rng.randrange(most + 1), *(rng.randrange(2) for _ in range(most))]
                for _ in range(slots)
            ]
        )
        rows = torch.tensor(rng.sample(range(slots), 3))
        lengths = torch.tensor([rng.randint(1, width) for _ in rows])
        drafts = torch.tensor([[7, 8, 9]] * 3)
        wanted = drafts.tolist()
        for row, (slot, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
            start, size, *tokens = forced[slot].tolist()
            known = Forced(start, tuple(tokens[:size])).after(history[slot, :length].tolist())[:count]
            wanted[row][: len(known)] = known

        for ops, here in ((Ops(), "cpu"), (TritonOps(), HERE)):
            got = drafts.to(here).clone()
            ops.take_forced(got, forced.to(here), history.to(here)[:, :-1], rows.to(here), lengths.to(here))
            assert got.tolist() == wanted, (seed, type(ops).__name__)
