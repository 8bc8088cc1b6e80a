"""Drafts are accepted up to the first that differs from the sampled token."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sidestream.ops.torch_ops import accept_lengths

ROW = st.tuples(
    st.lists(st.integers(0, 2), min_size=4, max_size=4),
    st.lists(st.integers(0, 2), min_size=5, max_size=5),
    st.integers(0, 4),
)


def accepted(drafts: list[int], drawn: list[int], count: int) -> int:
    length = 1
    while length <= count and drafts[length - 1] == drawn[length - 1]:
        length += 1
    return length


@given(rows=st.lists(ROW, min_size=1, max_size=5))
def test_a_row_advances_by_its_accepted_drafts_and_one_token(rows: list[tuple[list[int], list[int], int]]) -> None:
    drafts, drawn, counts = (torch.tensor(part) for part in zip(*rows, strict=True))
    assert accept_lengths(drafts, drawn, counts).tolist() == [accepted(*row) for row in rows]
