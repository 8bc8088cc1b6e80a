"""What a captured forward pass reads: one buffer of numbers, and what its kernels make of it and of the device's decode state.

A graph bakes in shapes and addresses, so every batch that it serves is written over the same buffer, whole: whatever is not of this batch is
padding, which computes with nobody's row, writes no KV and draws nothing (H18).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sidestream.execute.state import DecodeState
from sidestream.types import BatchPlan, RowPlan

Numbers = npt.NDArray[np.int64]

# Chunks of prefill that one flight of a captured shape has at most.
_CHUNKS = 8
SHORT_TOKENS = 16
"""A flight with so few tokens of prefill reduces them in splits, like rows that decode: what a cache did not supply is a few tokens over many."""


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """What one graph has room for.

    decodes   rows that decode, a token each
    tokens    of prefill, all chunks together
    """

    decodes: int
    tokens: int = 0

    @property
    def chunks(self) -> int:
        """Rows of prefill."""
        return _CHUNKS if self.tokens else 0

    @property
    def rows(self) -> int:
        """All rows."""
        return self.decodes + self.chunks

    @property
    def num_tokens(self) -> int:
        """All tokens."""
        return self.decodes + self.tokens

    @property
    def splits(self) -> tuple[int, int]:
        """How many of its first rows attention reduces in splits, and how many query tokens each of these has at most."""
        return (self.rows, SHORT_TOKENS) if 0 < self.tokens <= SHORT_TOKENS else (self.decodes, 1)

    @property
    def sizes(self) -> list[int]:
        """Lengths of the parts of a frame's buffer, in the order of `Frame`."""
        return [self.num_tokens, self.num_tokens, self.num_tokens, self.rows + 1, self.rows, self.rows, self.rows]

    def fits(self, decodes: int, chunks: int, tokens: int) -> bool:
        """Whether such a batch has room in it."""
        return decodes <= self.decodes and chunks <= self.chunks and tokens <= self.tokens

    @classmethod
    def all_of(cls, *, max_rows: int, chunk_tokens: int, max_tokens: int) -> list[Shape]:
        """Those worth a graph each, for up to `max_rows` rows at once and up to `max_tokens` tokens of prefill; the most used first.

        A whole chunk of prefill is not padded.
        """
        decodes = [count for count in (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 1024, 32)) if count < max_rows]
        tokens = [
            count for count in (SHORT_TOKENS, 32, 64, 128, 256, 384, 512, 768, *range(1024, 8192, 512), chunk_tokens) if count < max_tokens
        ]
        beside = [count for count in (0, 8, 32, 128) if count < max_rows]
        return [
            *(cls(count) for count in (*decodes, max_rows)),
            *(cls(rows, count) for rows in (*beside, max_rows) for count in (*sorted(set(tokens)), max_tokens)),
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """The buffer of one shape, int64 on the device, and its parts; written by `fill`, read by the captured kernels.

    tokens         [T] ids; -1: the row's last token, from device state
    positions      [T]
    token_rows     [T] row of each token; `DecodeState.nobody` of padding
    query_starts   [B + 1] rows that decode first, then chunks of prefill; rows of padding have no tokens
    kv_lens        [B]; 0 of padding
    rows           [B]; `nobody` of padding
    logit_rows     [B] packed position of the last token of each row that samples, one after another; -1 of padding
    """

    shape: Shape
    buffer: Tensor
    tokens: Tensor
    positions: Tensor
    token_rows: Tensor
    query_starts: Tensor
    kv_lens: Tensor
    rows: Tensor
    logit_rows: Tensor

    @classmethod
    def allocate(cls, shape: Shape, device: torch.device, *, nobody: int) -> Frame:
        """All of it padding."""
        buffer = torch.from_numpy(pack(BatchPlan(()), shape, nobody=nobody)).to(device)
        return cls(shape, buffer, *torch.split(buffer, shape.sizes))

    def fill(self, staged: Tensor) -> None:
        """Overwrite all of it with a packed batch. On the compute stream; `staged` is pinned, if the buffer is on a GPU."""
        self.buffer.copy_(staged, non_blocking=True)

    def inputs(self, state: DecodeState, block_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids `[T]`, slots `[T]` (-1: nothing is written) and block tables int32 `[B, max blocks]`. On the compute stream."""
        tokens = torch.where(self.tokens < 0, state.last[self.token_rows], self.tokens)
        blocks = state.tables[self.token_rows, self.positions // block_tokens]
        slots = blocks * block_tokens + self.positions % block_tokens
        return tokens, torch.where(self.token_rows == state.nobody, -1, slots), state.tables[self.rows]


def shape_of(batch: BatchPlan) -> tuple[int, int, int]:
    """Rows that decode, chunks of prefill, tokens of prefill."""
    decodes = sum(row.tokens is None for row in batch.rows)
    return decodes, len(batch.rows) - decodes, batch.num_tokens - decodes


def pack(batch: BatchPlan, shape: Shape, *, nobody: int) -> Numbers:
    """The numbers of a frame of `shape`, which has room for the batch, whose rows that decode come first."""
    decodes, chunks, _ = shape_of(batch)
    rows = np.array([row.row for row in batch.rows], np.int64)
    starts = np.array([row.start for row in batch.rows], np.int64)
    stops = np.array([row.stop for row in batch.rows], np.int64)
    ends = np.cumsum(stops - starts)  # packed
    count = int(ends[-1]) if len(ends) else 0

    numbers = np.zeros(sum(shape.sizes), np.int64)
    tokens, positions, token_rows, query_starts, kv_lens, frame_rows, logit_rows = np.split(numbers, np.cumsum(shape.sizes)[:-1])
    tokens[:decodes] = -1
    for row, (begin, end) in zip(batch.rows[decodes:], pairwise([decodes, *ends[decodes:].tolist()]), strict=True):
        tokens[begin:end] = row.tokens or ()
    positions[:count] = np.arange(count) - np.repeat(ends - stops, stops - starts)
    token_rows[:] = nobody
    token_rows[:count] = np.repeat(rows, stops - starts)
    frame_rows[:] = nobody
    query_starts[: decodes + 1] = np.arange(decodes + 1)
    query_starts[decodes + 1 : shape.decodes + 1] = decodes
    query_starts[shape.decodes + 1 :] = count
    behind = slice(shape.decodes, shape.decodes + chunks)
    kv_lens[:decodes], kv_lens[behind] = stops[:decodes], stops[decodes:]
    frame_rows[:decodes], frame_rows[behind] = rows[:decodes], rows[decodes:]
    query_starts[shape.decodes + 1 :][:chunks] = ends[decodes:]
    last = [end - 1 for row, end in zip(batch.rows, ends.tolist(), strict=True) if row.samples]
    logit_rows[: len(last)], logit_rows[len(last) :] = last, -1
    return numbers


class TableChanges(NamedTuple):
    """Flat places in the device's tables, and the block that belongs there."""

    places: list[int]
    blocks: list[int]


class TableKeeper:
    """Which blocks the device's tables say that each row holds, and what a flight has to change there. Engine thread only."""

    def __init__(self, num_rows: int, width: int) -> None:
        self._width = width
        self._held: list[tuple[int, ...]] = [()] * num_rows

    def changes(self, rows: Iterable[RowPlan]) -> TableChanges:
        """What the rows' tables lack. It is taken for made: `forget` if it was not."""
        places: list[int] = []
        blocks: list[int] = []
        for row in rows:
            held, wanted = self._held[row.row], row.block_ids
            if wanted == held:
                continue
            kept = len(held) if wanted[: len(held)] == held else 0  # else it is somebody else's row now
            base = row.row * self._width
            places.extend(range(base + kept, base + len(wanted)))
            blocks.extend(wanted[kept:])
            self._held[row.row] = wanted
        return TableChanges(places, blocks)

    def forget(self) -> None:
        """Believe nothing of the device's tables any more."""
        self._held = [()] * len(self._held)


def smallest(shapes: Sequence[Shape], decodes: int, chunks: int, tokens: int) -> Shape | None:
    """The one with the least padding that fits; None: none does."""
    fitting = [shape for shape in shapes if shape.fits(decodes, chunks, tokens)]
    return min(fitting, key=lambda shape: (shape.num_tokens, shape), default=None)
