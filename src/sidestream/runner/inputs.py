"""From a plan to the tensors of one step. Made on the engine thread, read on the compute stream, never changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sidestream.device.kinds import on_host
from sidestream.kv.layout import KVLayout
from sidestream.runner.upload import Uploads
from sidestream.types import Access, BatchPlan, RowPlan


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Tensors of one step, rows packed one after another.

    tokens          int64 [T]; 0 where the token is taken from device state, or drafted
    from_state      positions in `tokens` to be filled from device state, for the rows `state_rows`
    drafted         positions in `tokens` of the drafts, row after row
    positions       int64 [T]
    slots           int64 [T]: block id * block_tokens + offset of each token
    block_tables    int64 [B, max blocks], padded with 0
    cu_seqlens_q    B + 1 offsets into the packed tokens; `cu_seqlens_q_dev` the same as int64 [B + 1]
    kv_lens         B; `kv_lens_dev` the same as int64 [B]
    num_decode      rows of one token that come first
    logit_rows      int64 [N]: packed positions of what is drawn behind: the last token of each row that samples, and
                    each draft
    anchors         what puts rows where only the device knows that they are; None: the host knows where all begin
    """

    tokens: torch.Tensor
    from_state: torch.Tensor
    state_rows: tuple[int, ...]
    drafted: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    block_tables: torch.Tensor
    cu_seqlens_q: tuple[int, ...]
    cu_seqlens_q_dev: torch.Tensor
    kv_lens: tuple[int, ...]
    kv_lens_dev: torch.Tensor
    num_decode: int
    logit_rows: torch.Tensor
    anchors: Anchors | None

    def brought(self, uploads: Uploads) -> StepInputs:
        """The same with its tensors on the device, and positions in memory of their own: compiled layers are handed
        them, and would be compiled again for another place in memory that is shared.
        """
        anchors = self.anchors
        more = [] if anchors is None else [anchors.rows, anchors.begins, anchors.token_rows]
        moved = uploads.together([getattr(self, name) for name in _TENSORS] + more)
        given: dict[str, Any] = dict(zip(_TENSORS, moved, strict=False))
        if given["positions"].storage_offset():
            given["positions"] = given["positions"].clone()
        if anchors is not None:
            rows, begins, token_rows = moved[len(_TENSORS) :]
            given["anchors"] = Anchors(rows, begins, token_rows, anchors.block_tokens)
        return replace(self, **given)

    def anchored(self, lengths: torch.Tensor) -> StepInputs:
        """The same with every row that decodes where the device state says that it is: `lengths` int64 by row. On the
        compute stream.

        On a CPU it looks at them, as whoever runs the step may; on a GPU nothing is read back, and `kv_lens` says the
        least that it may be.
        """
        if self.anchors is None:
            return self
        anchors, size = self.anchors, self.anchors.block_tokens
        begins = lengths[anchors.rows]
        shift = torch.where(anchors.begins < 0, 0, begins - anchors.begins)
        positions = self.positions + shift[anchors.token_rows]
        blocks = self.block_tables[anchors.token_rows, positions // size]
        kv_lens_dev = self.kv_lens_dev + shift
        kv_lens = tuple(kv_lens_dev.tolist()) if on_host(lengths.device) else self.kv_lens
        return replace(
            self, positions=positions, slots=blocks * size + positions % size, kv_lens=kv_lens, kv_lens_dev=kv_lens_dev
        )


@dataclass(frozen=True, slots=True)
class Anchors:
    """Where the host put rows of which only the device knows where they begin.

    rows         int64 [B]: row number of each row of the step
    begins       int64 [B]: the first position that it packed for it; -1 where it knows
    token_rows   int64 [T]: which row of the step each token is of
    """

    rows: torch.Tensor
    begins: torch.Tensor
    token_rows: torch.Tensor
    block_tokens: int


# Blocks of a row that there is room for from the start.
_WIDTH = 64

_TENSORS = (
    "tokens",
    "from_state",
    "drafted",
    "positions",
    "slots",
    "block_tables",
    "cu_seqlens_q_dev",
    "kv_lens_dev",
    "logit_rows",
)


class Packer:
    """Packs batches whose decode rows come first. Keeps each row's block table: a step adds a block to a few of
    them.
    """

    def __init__(self, num_rows: int, layout: KVLayout) -> None:
        self._block_tokens = layout.block_tokens
        self._held: list[tuple[int, ...]] = [()] * num_rows
        self._tables = np.zeros((num_rows, _WIDTH), np.int64)  # what a row holds, then zeros

    def pack(self, batch: BatchPlan) -> StepInputs:
        """The batch as tensors; a copy, which later batches do not change."""
        rows, columns, size = batch.rows, batch.columns, self._block_tokens
        for row, block_ids in zip(columns.row, columns.block_ids, strict=True):
            self._hold(row, block_ids)
        begins = np.array(columns.min_start, np.int64)
        if batch.speculates:
            counts = np.array([row.num_tokens for row in rows], np.int64)
            kv_lens_dev = begins + counts
        else:
            kv_lens_dev = np.array(columns.stop, np.int64)
            counts = kv_lens_dev - begins
        starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        index = np.repeat(np.arange(len(rows)), counts)  # of each token's row
        positions = np.arange(starts[-1]) - (starts[:-1] - begins)[index]
        tables = self._tables[list(columns.row), : max(map(len, columns.block_ids))]
        blocks, inside = np.divmod(positions, size)
        tokens = np.zeros(starts[-1], np.int64)
        from_state = []
        for at, given in enumerate(columns.tokens):
            if given is None:
                from_state.append(at)
            else:
                tokens[starts[at] : starts[at + 1]] = given
        drafted, drawn, anchors = torch.empty(0, dtype=torch.int64), starts[1:][list(columns.samples)] - 1, None
        if batch.speculates:
            ends = starts[1:].tolist()
            drafted = _numbers(
                place for row, end in zip(rows, ends, strict=True) for place in range(end - row.drafts, end)
            )
            drawn = np.array(
                [
                    place
                    for row, end in zip(rows, ends, strict=True)
                    if row.samples
                    for place in range(end - row.drafts - 1, end)
                ]
            )
            begin_or_none = _numbers(-1 if row.is_certain else row.min_start for row in rows)
            anchors = Anchors(_numbers(columns.row), begin_or_none, torch.from_numpy(index), size)
        return StepInputs(
            tokens=torch.from_numpy(tokens),
            from_state=torch.from_numpy(starts[from_state]) if from_state else torch.empty(0, dtype=torch.int64),
            state_rows=tuple(columns.row[at] for at in from_state),
            drafted=drafted,
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(tables[index, blocks] * size + inside),
            block_tables=torch.from_numpy(tables),
            cu_seqlens_q=tuple(starts.tolist()),
            cu_seqlens_q_dev=torch.from_numpy(starts),
            kv_lens=tuple(kv_lens_dev.tolist()),
            kv_lens_dev=torch.from_numpy(kv_lens_dev),
            num_decode=sum(row.tokens is None and not row.drafts for row in rows)
            if batch.speculates
            else len(from_state),
            logit_rows=torch.from_numpy(drawn),
            anchors=anchors,
        )

    def _hold(self, row: int, block_ids: tuple[int, ...]) -> None:
        """Make the row's table say `block_ids`: mostly it does, or lacks the last one."""
        held = self._held[row]
        if block_ids is held or block_ids == held:
            return
        if len(block_ids) > self._tables.shape[1]:
            wider = np.zeros((len(self._held), 2 * len(block_ids)), np.int64)
            wider[:, : self._tables.shape[1]] = self._tables
            self._tables = wider
        kept = len(held) if block_ids[: len(held)] == held else 0  # else it is somebody else's row now
        self._tables[row, kept : len(block_ids)] = block_ids[kept:]
        self._tables[row, len(block_ids) : len(held)] = 0
        self._held[row] = block_ids


def _numbers(values: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def kv_accesses(rows: Sequence[RowPlan], layout: KVLayout, layers: range) -> list[Access]:
    """The byte ranges of the pool that some layers of a step read (blocks before the chunk) and write (blocks of the
    chunk).
    """
    size = layout.block_tokens
    accesses = []
    for row in rows:
        for index, block in enumerate(row.block_ids):
            start, stop = layout.layer_span(block, layers.start, layers.stop)
            accesses.append(Access("kv", start, stop, write=(index + 1) * size > row.min_start))
    return accesses
