"""Prompt lookup against the same, written for one row in plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st

from sidestream.ops import Ops
from sidestream.speculate import Context, NgramProposer

WIDTH = 40
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=WIDTH)


def looked_up(tokens: list[int], count: int, longest: int, shortest: int) -> list[int]:
    for length in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if length <= len(tokens) and tokens[end - length : end] == tokens[-length:]:
                return [tokens[end + step % (len(tokens) - end)] for step in range(count)]
    return [tokens[-1]] * count


def given(history: torch.Tensor, lengths: torch.Tensor) -> Context:
    """Without hidden states and attention."""
    return Context(
        history,
        torch.arange(len(lengths)),
        lengths,
        history[:, 0],
        torch.empty(len(lengths), 0),
        lambda positions: pytest.fail("it attends"),
        Ops(),
    )


def proposed(rows: list[list[int]], count: int, *, garbage: int = 9, **options: int) -> list[list[int]]:
    history = torch.full((len(rows), WIDTH), garbage, dtype=torch.int32)
    for row, tokens in enumerate(rows):
        history[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    context = given(history, torch.tensor([len(tokens) for tokens in rows]))
    return NgramProposer(**options).propose(context, count).tolist()


@drawn(
    rows=st.lists(TOKENS, min_size=1, max_size=4),
    count=st.integers(1, 6),
    longest=st.integers(1, 4),
    shortest=st.integers(1, 4),
)
def test_tokens_after_the_longest_latest_match_are_drafted(
    rows: list[list[int]], count: int, longest: int, shortest: int
) -> None:
    shortest = min(shortest, longest)
    expected = [looked_up(tokens, count, longest, shortest) for tokens in rows]
    assert proposed(rows, count, longest=longest, shortest=shortest) == expected


@pytest.mark.parametrize("garbage", [0, 1, 2, 3])
def test_tokens_after_the_end_of_a_row_are_ignored(garbage: int) -> None:
    rows = [[1, 2, 3, 1, 2], [0], [3, 3], [1, 0, 2, 0]]
    assert proposed(rows, 3, garbage=garbage) == proposed(rows, 3)


def test_proposing_for_a_row_that_never_began_raises_no_error() -> None:
    context = given(torch.zeros(2, WIDTH, dtype=torch.int32), torch.tensor([0, WIDTH]))
    assert NgramProposer().propose(context, 3).shape == (2, 3)
