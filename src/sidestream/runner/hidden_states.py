"""Hidden states from one step to the next: by row on the device, and by block in its last layers, so that they come
back with the KV.

A proposer that reads hidden states takes, at each token, that of the position before. For a row's first token of a step
that is what the row's step before left; for its first token of an epoch, what the block before it holds (H15); and at
the start of a sequence, zeros. On the compute stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sidestream.kv.layout import KVLayout
from sidestream.runner.state import DecodeState
from sidestream.speculate import devices
from sidestream.types import RowPlan

FROM_ROW, NOTHING = -1, -2
"""Where the hidden state before a row's first token is, if not in a block: with the row, or nowhere."""


def origin_of(row: RowPlan, block_tokens: int) -> int:
    """Where the hidden state before the row's first token of this step is: the id of the block that holds it,
    `FROM_ROW` or `NOTHING`.
    """
    if row.begin is None:
        return FROM_ROW
    return row.block_ids[row.min_start // block_tokens - 1] if row.min_start else NOTHING


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The rows of a packed step, on the device.

    bounds    int64 `[B + 1]`: where each one's tokens begin, and where the last one's end
    numbers   int64 `[B]`: row numbers
    origins   int64 `[B]`: `origin_of` each
    """

    bounds: Tensor
    numbers: Tensor
    origins: Tensor


class HiddenStates:
    """Owner of the pool's last layers, which hold in each complete block the hidden state of its last token.

    kv   the pool, with one block more than anybody holds: what belongs nowhere is written there
    """

    def __init__(self, kv: Tensor, layout: KVLayout, state: DecodeState) -> None:
        self._state = state
        self._size = layout.block_tokens
        hidden_size = state.hidden.shape[1]
        start = (layout.num_layers - layout.layers_for(hidden_size)) * kv[0, 0].numel()
        self._by_block = kv.view(kv.shape[0], -1)[:, start : start + hidden_size]

    def before_each(self, rows: PackedRows) -> Tensor:
        """The same for rows with one token each that go on from their step before, `[B, hidden_size]`: none of it is of
        this step.
        """
        return self._state.hidden[rows.numbers]

    def before(self, hidden: Tensor, rows: PackedRows) -> Tensor:
        """The hidden state at the position before each packed token: `[T, hidden_size]`, from those of this step,
        `hidden` `[T, hidden_size]`.
        """
        if devices.has_kernels(hidden):
            from sidestream.runner import launch  # Triton, which a CPU does not need

            return launch.before(hidden, rows, self._state.hidden, self._by_block)
        first, where = self._state.hidden[rows.numbers], rows.origins[:, None]
        held = self._by_block[rows.origins.clamp(min=0)]
        first = torch.where(where >= 0, held, torch.where(where == FROM_ROW, first, 0))
        starts, stops, nowhere = rows.bounds[:-1], rows.bounds[1:], len(hidden)
        shifted = torch.cat([hidden[-1:], hidden])  # one more: what belongs to rows without tokens goes there
        return shifted.index_copy(0, torch.where(stops > starts, starts, nowhere), first)[:nowhere]

    def keep(self, hidden: Tensor, rows: PackedRows, *, positions: Tensor, slots: Tensor) -> None:
        """Write what blocks hold, and leave to each row that of its last packed token. positions, slots int64 `[T]`,
        slot -1: nobody's.
        """
        if devices.has_kernels(hidden):
            from sidestream.runner import launch

            launch.keep(
                hidden,
                rows,
                self._state.hidden,
                self._by_block,
                positions=positions,
                slots=slots,
                block_tokens=self._size,
            )
            return
        nowhere = self._by_block.shape[0] - 1
        blocks = torch.where(((positions + 1) % self._size == 0) & (slots >= 0), slots // self._size, nowhere)
        self._by_block[blocks] = hidden
        self._state.hidden[rows.numbers] = hidden[(rows.bounds[1:] - 1).clamp(min=0)]
