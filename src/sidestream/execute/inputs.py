"""From a plan to the tensors of one flight. Made on the engine thread, read on the compute stream, never changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sidestream.execute.upload import upload
from sidestream.kv.layout import KVLayout
from sidestream.types import Access, BatchPlan, RowPlan


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Tensors of one flight, rows packed one after another.

    tokens          int64 [T]; 0 where the token is taken from device state
    from_state      positions in `tokens` to be filled from device state, for the rows `state_rows`
    positions       int64 [T]
    slots           int64 [T]: block id * block_tokens + offset of each token
    block_tables    int64 [B, max blocks], padded with 0
    query_starts    B + 1 offsets into the packed tokens; `query_starts_dev` the same as int64 [B + 1]
    kv_lens         B; `kv_lens_dev` the same as int64 [B]
    logit_rows      int64 [R]: packed position of the last token of each row that samples
    """

    tokens: torch.Tensor
    from_state: torch.Tensor
    state_rows: tuple[int, ...]
    positions: torch.Tensor
    slots: torch.Tensor
    block_tables: torch.Tensor
    query_starts: tuple[int, ...]
    query_starts_dev: torch.Tensor
    kv_lens: tuple[int, ...]
    kv_lens_dev: torch.Tensor
    num_decode: int
    logit_rows: torch.Tensor

    def to(self, device: torch.device) -> StepInputs:
        """The same with its tensors on `device`. See `upload`."""
        moved: dict[str, Any] = dict(zip(_TENSORS, upload([getattr(self, name) for name in _TENSORS], device), strict=True))
        return replace(self, **moved)


# Blocks of a row that there is room for from the start.
_WIDTH = 64

_TENSORS = ("tokens", "from_state", "positions", "slots", "block_tables", "query_starts_dev", "kv_lens_dev", "logit_rows")


class Packer:
    """Packs batches whose decode rows come first. Keeps each row's block table: a step adds a block to a few of them."""

    def __init__(self, num_rows: int, layout: KVLayout) -> None:
        self._block_tokens = layout.block_tokens
        self._held: list[tuple[int, ...]] = [()] * num_rows
        self._tables = np.zeros((num_rows, _WIDTH), np.int64)  # what a row holds, then zeros

    def pack(self, batch: BatchPlan) -> StepInputs:
        """The batch as tensors; a copy, which later batches do not change."""
        rows, size = batch.rows, self._block_tokens
        for row in rows:
            self._hold(row.row, row.block_ids)
        begins = np.array([row.start for row in rows], np.int64)
        kv_lens = [row.stop for row in rows]
        kv_lens_dev = np.array(kv_lens, np.int64)
        starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(kv_lens_dev - begins, out=starts[1:])
        index = np.repeat(np.arange(len(rows)), kv_lens_dev - begins)  # of each token's row
        positions = np.arange(starts[-1]) - (starts[:-1] - begins)[index]
        tables = self._tables[[row.row for row in rows], : max(len(row.block_ids) for row in rows)]
        blocks, inside = np.divmod(positions, size)
        tokens = np.zeros(starts[-1], np.int64)
        from_state = []
        for at, row in enumerate(rows):
            if row.tokens is None:
                from_state.append(at)
            else:
                tokens[starts[at] : starts[at + 1]] = row.tokens
        return StepInputs(
            tokens=torch.from_numpy(tokens),
            from_state=torch.from_numpy(starts[from_state]) if from_state else torch.empty(0, dtype=torch.int64),
            state_rows=tuple(rows[at].row for at in from_state),
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(tables[index, blocks] * size + inside),
            block_tables=torch.from_numpy(tables),
            query_starts=tuple(starts.tolist()),
            query_starts_dev=torch.from_numpy(starts),
            kv_lens=tuple(kv_lens),
            kv_lens_dev=torch.from_numpy(kv_lens_dev),
            num_decode=len(from_state),
            logit_rows=torch.from_numpy(starts[1:][[row.samples for row in rows]] - 1),
        )

    def _hold(self, row: int, block_ids: tuple[int, ...]) -> None:
        """Make the row's table say `block_ids`: mostly it does, or lacks the last one."""
        held = self._held[row]
        if block_ids == held:
            return
        if len(block_ids) > self._tables.shape[1]:
            wider = np.zeros((len(self._held), 2 * len(block_ids)), np.int64)
            wider[:, : self._tables.shape[1]] = self._tables
            self._tables = wider
        kept = len(held) if block_ids[: len(held)] == held else 0  # else it is somebody else's row now
        self._tables[row, kept : len(block_ids)] = block_ids[kept:]
        self._tables[row, len(block_ids) : len(held)] = 0
        self._held[row] = block_ids


def kv_accesses(rows: Sequence[RowPlan], layout: KVLayout, layers: range) -> list[Access]:
    """The byte ranges of the pool that some layers of a flight read (blocks before the chunk) and write (blocks of the chunk)."""
    size = layout.block_tokens
    accesses = []
    for row in rows:
        for index, block in enumerate(row.block_ids):
            start, stop = layout.layer_span(block, layers.start, layers.stop)
            accesses.append(Access("kv", start, stop, write=(index + 1) * size > row.start))
    return accesses
