"""Steps of one row, without an engine."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sidestream.attention.interface import ungated
from sidestream.attention.paged import PagedBatch


def one_row(
    pool: torch.Tensor,
    length: int,
    *,
    start: int = 0,
    num_decode: int = 0,
    before_layer: Callable[[int], object] = ungated,
) -> PagedBatch:
    """Tokens `start` to `length` of a row whose blocks are those of the pool, in order."""
    positions = torch.arange(start, length)
    tables = torch.arange(len(pool))[None]
    return PagedBatch(pool, positions, tables, (0, len(positions)), (length,), num_decode, before_layer)
