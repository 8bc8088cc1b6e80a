"""What a captured forward pass reads: one buffer of numbers, and what its kernels make of it and of the device's decode
state.

A graph bakes in shapes and addresses, so every batch that it serves is written over the same buffer, whole: whatever is
not of this batch is padding, which computes with nobody's row, writes no KV and draws nothing (H18).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from operator import is_not
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sidestream.runner.hidden_states import FROM_ROW, origin_of
from sidestream.runner.state import DecodeState
from sidestream.speculate import devices
from sidestream.types import BatchPlan, RowColumns

Numbers = npt.NDArray[np.int64]

# Chunks of prefill that one step of a captured shape has, at least and at most: as many as there are, if they are short
# prompts.
_CHUNKS, _MOST_CHUNKS = 8, 64
_CHUNK_TOKENS = 16
# From so many rows on, a step with few drafts has a shape of its own; up to so many, one with drafts and prefill.
_MANY_ROWS = 16
_FEW_ROWS = 32
SHORT_TOKENS = 16
"""A step with so few tokens of prefill reduces them in splits, like rows that decode: what a cache did not supply is a
few tokens over many.
"""


@dataclass(frozen=True, slots=True, order=True)
class GraphKey:
    """What one graph has room for.

    decodes   rows that decode, a token each
    tokens    of prefill, all chunks together
    drafts    of each row that decodes, at most
    together  of all of them together, at most; 0: as many as they may have each
    """

    decodes: int
    tokens: int = 0
    drafts: int = 0
    together: int = 0

    @property
    def all_drafts(self) -> int:
        """Drafts of all rows together."""
        return self.together or self.decodes * self.drafts

    @property
    def chunks(self) -> int:
        """Rows of prefill."""
        return min(max(_CHUNKS, self.tokens // _CHUNK_TOKENS), _MOST_CHUNKS) if self.tokens else 0

    @property
    def rows(self) -> int:
        """All rows."""
        return self.decodes + self.chunks

    @property
    def num_tokens(self) -> int:
        """All tokens."""
        return self.places + self.tokens - self.chunks

    @property
    def places(self) -> int:
        """Where a token may be drawn."""
        return self.decodes + self.all_drafts + self.chunks

    @property
    def short_rows(self) -> int:
        """Chunks that attention reduces in splits, as it does rows that decode."""
        return self.chunks if self.tokens <= SHORT_TOKENS else 0

    @property
    def sizes(self) -> list[int]:
        """Lengths of the parts of a frame's buffer, in the order of `GraphInputs`."""
        return [
            self.num_tokens,
            self.num_tokens,
            self.num_tokens,
            self.rows + 1,
            self.rows,
            self.rows,
            self.rows,
            self.places,
            self.rows,
            self.rows,
            self.rows,
            self.rows,
            1,
        ]

    def fits(self, decodes: int, chunks: int, tokens: int, drafts: int = 0) -> bool:
        """Whether such a batch has room in it."""
        return decodes <= self.decodes and chunks <= self.chunks and tokens <= self.tokens and drafts <= self.drafts

    @classmethod
    def all_of(cls, *, max_rows: int, chunk_tokens: int, max_tokens: int, drafts: int = 0) -> list[GraphKey]:
        """Those worth a graph each, for up to `max_rows` rows at once and up to `max_tokens` tokens of prefill; the
        most used first.

        A whole chunk of prefill is not padded. With drafts, rows that decode have graphs for `drafts` of them beside
        those for none, and many rows also for a quarter of that: where few of them draft, most of what is computed
        would be padding. Beside prefill, few rows have their own for the same reason: a thousand rows' drafts would be
        computed for one.
        """
        decodes = [
            count
            for count in (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 1024, 32))
            if count < max_rows
        ]
        tokens = [
            count
            for count in (SHORT_TOKENS, 32, 64, 128, 256, 384, 512, 768, *range(1024, 8192, 512), chunk_tokens)
            if count < max_tokens
        ]
        doubling = {
            count for count in (*(SHORT_TOKENS << power for power in range(10)), chunk_tokens) if count < max_tokens
        }
        beside = [count for count in (0, 8, 32, 128) if count < max_rows]
        return [
            *(cls(count, 0, number) for number in sorted({0, drafts}) for count in (*decodes, max_rows)),
            *(
                cls(count, 0, drafts, count * drafts // 4)
                for count in (*decodes, max_rows)
                if drafts and count >= _MANY_ROWS
            ),
            *(
                cls(rows, count, drafts)
                for rows in sorted({min(_FEW_ROWS, max_rows), max_rows})
                for count in (*sorted(doubling), max_tokens)
                if drafts
            ),
            *(cls(rows, count) for rows in (*beside, max_rows) for count in (*sorted(set(tokens)), max_tokens)),
        ]


@dataclass(frozen=True, slots=True, eq=False)
class GraphInputs:
    """The buffer of one shape, int64 on the device, and its parts; overwritten by each batch, read by the captured
    launch.

    tokens         [T] ids; -1: the row's last token, from device state; -2 and below: its first draft, and those behind
                   it
    positions      [T]; -1 and below: where only the device knows: the row's last token, and what is behind it
    token_rows     [T] row of each token; `DecodeState.padding_slot` of padding
    cu_seqlens_q   [B + 1] rows that decode first, then chunks of prefill; rows of padding have no tokens
    kv_lens        [B]; 0 of padding; below: so many tokens more than the device knows of the row
    rows           [B]; `padding_slot` of padding
    origins        [B] what was before the row's first token: a block's hidden state, or `FROM_ROW`, or `NOTHING`
    logit_rows     [N] packed positions where a token is drawn, one after another; -1 of padding
    draws          [B] rows that sample, one after another, by their place in `rows`; -1 of padding
    firsts         [B] of each of those, its first place among `logit_rows`
    places         [B] flat places in the device's tables that get another block; -1 of padding
    blocks         [B] which one
    entry         [1] where what was drawn is left for the host: bytes into the mailbox
    """

    shape: GraphKey
    buffer: Tensor
    tokens: Tensor
    positions: Tensor
    token_rows: Tensor
    cu_seqlens_q: Tensor
    kv_lens: Tensor
    rows: Tensor
    origins: Tensor
    logit_rows: Tensor
    draws: Tensor
    firsts: Tensor
    places: Tensor
    blocks: Tensor
    entry: Tensor

    @classmethod
    def allocate(cls, shape: GraphKey, device: torch.device, *, padding_slot: int) -> GraphInputs:
        """All of it padding."""
        buffer = torch.from_numpy(pack(BatchPlan(()), shape, padding_slot=padding_slot, block_tokens=1)).to(device)
        return cls(shape, buffer, *torch.split(buffer, shape.sizes))

    def rows_of_places(self, count: int, *, padding_slot: int) -> Tensor:
        """The row number of each of the first `count` places where a token is drawn, int64 `[count]`; `padding_slot` of
        padding.
        """
        at = self.logit_rows[:count]
        return torch.where(at < 0, padding_slot, self.token_rows[at.clamp(min=0)])

    def standing(self, state: DecodeState, count: int) -> Standing:
        """Of the first `count` rows, all of which decode. On the compute stream."""
        if devices.has_kernels(self.buffer):
            from sidestream.runner import launch  # Triton, which a CPU does not need

            return Standing(*launch.standing(self, state))
        rows = self.rows[:count]
        # Where the row is, by the host if it knows; and as far as it has room.
        begins, ends = self.positions[self.cu_seqlens_q[:count]], self.kv_lens[:count]
        lengths = torch.where(begins < 0, state.lengths[rows], begins)
        bounds = (torch.where(ends < 0, lengths - ends, ends) - 1).clamp(min=0)  # rows of padding have none
        return Standing(
            state.last[rows], lengths + 1, bounds, rows == state.padding_slot, state.tables[rows], state.hidden[rows]
        )

    def inputs(self, state: DecodeState, block_tokens: int, drafts: Tensor | None = None) -> ResolvedInputs:
        """What the kernels take. `drafts`: int64 `[num_slots + 1, shape.drafts]`, by row. On the compute stream."""
        if devices.has_kernels(self.buffer):
            from sidestream.runner import launch  # Triton, which a CPU does not need

            return ResolvedInputs(*launch.inputs(self, state, block_tokens, drafts))
        tokens = torch.where(self.tokens < 0, state.last[self.token_rows], self.tokens)
        if drafts is not None:
            number = (-2 - self.tokens).clamp(min=0)
            tokens = torch.where(self.tokens < -1, drafts[self.token_rows, number], tokens)
        positions = torch.where(self.positions < 0, state.lengths[self.token_rows] - 1 - self.positions, self.positions)
        kv_lens = torch.where(self.kv_lens < 0, state.lengths[self.rows] - self.kv_lens, self.kv_lens)
        blocks = state.tables[self.token_rows, positions // block_tokens]
        slots = torch.where(self.token_rows == state.padding_slot, -1, blocks * block_tokens + positions % block_tokens)
        return ResolvedInputs(tokens, positions, kv_lens, slots, state.tables[self.rows])


class Standing(NamedTuple):
    """Where rows that decode stand before a step.

    tokens    int64 `[R]`: the last one of each
    lengths   int64 `[R]`: how many tokens each has, that one included
    bounds    int64 `[R]`: the last position that it has room for
    nobody    bool `[R]`: padding
    tables    int32 `[R, max blocks]`
    hidden    `[R, hidden_size]`
    """

    tokens: Tensor
    lengths: Tensor
    bounds: Tensor
    nobody: Tensor
    tables: Tensor
    hidden: Tensor


class TableChanges(NamedTuple):
    """Flat places in the device's tables, and the block that belongs there."""

    places: list[int]
    blocks: list[int]


class ResolvedInputs(NamedTuple):
    """What captured kernels make of a frame and the device state.

    tokens, positions   int64 `[T]`
    kv_lens             int64 `[B]`
    slots               int64 `[T]`; -1: nothing is written
    tables              int32 `[B, max blocks]`
    """

    tokens: Tensor
    positions: Tensor
    kv_lens: Tensor
    slots: Tensor
    tables: Tensor


def shape_of(batch: BatchPlan) -> tuple[int, int, int, int]:
    """Rows that decode, chunks of prefill, tokens of prefill, drafts of the row that has most."""
    decodes = batch.num_decodes
    most = max(batch.columns.drafts, default=0) if batch.speculates else 0
    return decodes, len(batch.rows) - decodes, batch.num_prefill_tokens, most


def pack(
    batch: BatchPlan,
    shape: GraphKey,
    *,
    padding_slot: int,
    block_tokens: int,
    entry: int = 0,
    changes: TableChanges | None = None,
) -> Numbers:
    """The numbers of a frame of `shape`, which has room for the batch, whose rows that decode come first; see
    `GraphInputs.entry`.

    changes   of the device's tables, at most as many as the frame has rows
    """
    columns, decodes = batch.columns, batch.num_decodes
    numbers = (_padding(shape, padding_slot) if batch.speculates else _of_decodes(shape, padding_slot, decodes)).copy()
    parts = [numbers[part] for part in _parts(shape)]
    (
        tokens,
        positions,
        token_rows,
        cu_seqlens_q,
        kv_lens,
        frame_rows,
        origins,
        logit_rows,
        draws,
        firsts,
        changed,
        blocks,
        entries,
    ) = parts
    entries[:] = entry
    if changes is not None and (count := len(changes.places)):
        changed[:count], blocks[:count] = changes
    own, starts = np.array(columns.row[:decodes], np.int64), np.array(columns.min_start[:decodes], np.int64)
    frame_rows[:decodes] = own
    if batch.speculates:
        stops = np.array(columns.stop[:decodes], np.int64)
        draws[:decodes] = np.arange(decodes)
        counts = 1 + np.array(columns.drafts[:decodes], np.int64)
        ends = counts.cumsum()
        count = int(ends[-1]) if decodes else 0
        inside = np.arange(count) - np.repeat(ends - counts, counts)  # of its row
        lost = starts + counts != stops  # rows whose place the host does not know are where the device says
        tokens[:count] = -1 - inside
        token_rows[:count] = np.repeat(own, counts)
        positions[:count] = np.where(np.repeat(lost, counts), -1 - inside, inside + np.repeat(starts, counts))
        kv_lens[:decodes] = np.where(lost, -counts, stops)
        cu_seqlens_q[1 : decodes + 1], firsts[:decodes] = ends, ends - counts
        logit_rows[:count] = np.arange(count)
        cu_seqlens_q[decodes + 1 :] = count
    else:
        count = decodes
        positions[:count], token_rows[:count], kv_lens[:count] = starts, own, starts + 1
    begin, place, sampling = count, count, decodes
    for at, row in enumerate(batch.rows[decodes:], shape.decodes):
        end = begin + row.stop - row.min_start
        tokens[begin:end], positions[begin:end], token_rows[begin:end] = (
            row.tokens or (),
            np.arange(row.min_start, row.stop),
            row.row,
        )
        cu_seqlens_q[at + 1 :], kv_lens[at], frame_rows[at], origins[at] = (
            end,
            row.stop,
            row.row,
            origin_of(row, block_tokens),
        )
        if row.samples:
            logit_rows[place], draws[sampling], firsts[sampling] = end - 1, at, place
            place, sampling = place + 1, sampling + 1
        begin = end
    return numbers


@functools.cache
def _parts(shape: GraphKey) -> list[slice]:
    """Of a frame's buffer, in the order of `GraphInputs`."""
    stops = np.cumsum(shape.sizes).tolist()
    return [slice(stop - size, stop) for stop, size in zip(stops, shape.sizes, strict=True)]


@functools.cache
def _padding(shape: GraphKey, padding_slot: int) -> Numbers:
    """A frame's numbers without a batch."""
    numbers = np.zeros(sum(shape.sizes), np.int64)
    _, _, token_rows, _, _, rows, origins, logit_rows, draws, _, changed, *_ = (numbers[part] for part in _parts(shape))
    token_rows[:], rows[:], origins[:], logit_rows[:], draws[:], changed[:] = (
        padding_slot,
        padding_slot,
        FROM_ROW,
        -1,
        -1,
        -1,
    )
    return numbers


@functools.lru_cache(maxsize=64)
def _of_decodes(shape: GraphKey, padding_slot: int, decodes: int) -> Numbers:
    """What every frame of so many rows that decode has, without drafts: the same step after step."""
    numbers = _padding(shape, padding_slot).copy()
    tokens, _, _, cu_seqlens_q, _, _, _, logit_rows, draws, firsts, *_ = (numbers[part] for part in _parts(shape))
    tokens[:decodes] = -1
    cu_seqlens_q[1 : decodes + 1], cu_seqlens_q[decodes + 1 :] = np.arange(1, decodes + 1), decodes
    for each in (logit_rows, draws, firsts):
        each[:decodes] = np.arange(decodes)
    return numbers


class BlockTableMirror:
    """Which blocks the device's tables say that each row holds, and what a step has to change there. Engine thread
    only.
    """

    def __init__(self, num_slots: int, width: int) -> None:
        self._width = width
        self._held: list[tuple[int, ...]] = [()] * num_slots

    def changes(self, step: RowColumns) -> TableChanges:
        """What the tables of a step's rows lack, mostly nothing. It is taken for made: `forget` if it was not."""
        places: list[int] = []
        blocks: list[int] = []
        others = map(is_not, map(self._held.__getitem__, step.row), step.block_ids)
        for row, wanted in compress(zip(step.row, step.block_ids, strict=True), others):
            held = self._held[row]
            kept = len(held) if wanted[: len(held)] == held else 0  # else it is somebody else's row now
            base = row * self._width
            places.extend(range(base + kept, base + len(wanted)))
            blocks.extend(wanted[kept:])
            self._held[row] = wanted
        return TableChanges(places, blocks)

    def forget(self) -> None:
        """Believe nothing of the device's tables any more."""
        self._held = [()] * len(self._held)


def keys_that_fit(
    shapes: Sequence[GraphKey], decodes: int, chunks: int, tokens: int, drafts: int = 0
) -> list[GraphKey]:
    """Those that such a batch has room in, if it has as many drafts as they hold together; the one with the least
    padding first.
    """
    return sorted(
        (shape for shape in shapes if shape.fits(decodes, chunks, tokens, drafts)),
        key=lambda shape: (shape.num_tokens, shape),
    )
