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


_TENSORS = ("tokens", "from_state", "positions", "slots", "block_tables", "query_starts_dev", "kv_lens_dev", "logit_rows")


def make_inputs(batch: BatchPlan, layout: KVLayout) -> StepInputs:
    """Pack a batch whose decode rows come first."""
    rows = batch.rows
    lengths = [row.stop - row.start for row in rows]
    starts = np.concatenate(([0], np.cumsum(lengths)))
    tables = np.zeros((len(rows), max(len(row.block_ids) for row in rows)), np.int64)
    positions = np.empty(starts[-1], np.int64)
    tokens = np.zeros(starts[-1], np.int64)
    slots = np.empty(starts[-1], np.int64)
    for index, row in enumerate(rows):
        here = slice(starts[index], starts[index + 1])
        tables[index, : len(row.block_ids)] = row.block_ids
        positions[here] = np.arange(row.start, row.stop)
        slots[here] = tables[index, positions[here] // layout.block_tokens] * layout.block_tokens + positions[here] % layout.block_tokens
        if row.tokens is not None:
            tokens[here] = row.tokens
    from_state = [index for index, row in enumerate(rows) if row.tokens is None]
    return StepInputs(
        tokens=torch.from_numpy(tokens),
        from_state=torch.from_numpy(starts[from_state]) if from_state else torch.empty(0, dtype=torch.int64),
        state_rows=tuple(rows[index].row for index in from_state),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(slots),
        block_tables=torch.from_numpy(tables),
        query_starts=tuple(starts.tolist()),
        query_starts_dev=torch.from_numpy(starts),
        kv_lens=tuple(row.stop for row in rows),
        kv_lens_dev=torch.tensor([row.stop for row in rows], dtype=torch.int64),
        num_decode=sum(1 for row in rows if row.tokens is None),
        logit_rows=torch.tensor([int(starts[i + 1]) - 1 for i, row in enumerate(rows) if row.samples], dtype=torch.int64),
    )


def kv_accesses(rows: Sequence[RowPlan], layout: KVLayout, layers: range) -> list[Access]:
    """The byte ranges of the pool that some layers of a flight read (blocks before the chunk) and write (blocks of the chunk)."""
    size = layout.block_tokens
    accesses = []
    for row in rows:
        for index, block in enumerate(row.block_ids):
            start, stop = layout.layer_span(block, layers.start, layers.stop)
            accesses.append(Access("kv", start, stop, write=(index + 1) * size > row.start))
    return accesses
