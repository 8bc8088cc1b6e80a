"""Keeps the model's hidden states from one step to the next: the last one of each request slot, and the last one of
each block. A block's hidden state is in the last layers of the block pool, so it is stored and loaded with the block's
KV.

A proposer that reads hidden states uses, at each token, the hidden state of the position before. For a row's first
token in a step, the slot has kept it from its last step. For the first token after an admission, the block before the
token holds it (hazard H15). At the start of a sequence, it is zero. On the compute stream.
"""

from __future__ import annotations

from torch import Tensor

from sidestream.ops import Ops
from sidestream.ops.interface import PackedRows
from sidestream.runner.state import DecodeState
from sidestream_kv.kv.layout import KVLayout


class HiddenStates:
    """Owner of the pool's last layers. In each complete block, they hold the hidden state of the block's last token.

    kv   the block pool; its last block is used by no request, and takes writes that are not kept
    """

    def __init__(self, kv: Tensor, layout: KVLayout, state: DecodeState, ops: Ops) -> None:
        self._state = state
        self._ops = ops
        self._block_tokens = layout.block_tokens
        hidden_size = state.hidden.shape[1]
        start = (layout.num_layers - layout.layers_for(hidden_size)) * kv[0, 0].numel()
        self._by_block = kv.view(kv.shape[0], -1)[:, start : start + hidden_size]

    def previous_by_slot(self, rows: PackedRows) -> Tensor:
        """The hidden state before each row, `[B, hidden_size]`. Only for steps in which every row has one token and
        continues its last step: their states are known before the step runs.
        """
        return self._state.hidden[rows.slots]

    def previous(self, hidden: Tensor, rows: PackedRows) -> Tensor:
        """The hidden state before each packed token, `[T, hidden_size]`. `hidden`: this step's hidden states."""
        return self._ops.previous_hidden(hidden, rows, self._state.hidden, self._by_block)

    def keep(self, hidden: Tensor, rows: PackedRows, *, positions: Tensor, slot_mapping: Tensor) -> None:
        """Keep hidden states of this step, `[T, hidden_size]`: each row's last hidden state in its slot, and the last
        hidden state of each complete block in the block.
        """
        self._ops.keep_hidden(
            hidden,
            rows,
            self._state.hidden,
            self._by_block,
            positions=positions,
            slot_mapping=slot_mapping,
            block_tokens=self._block_tokens,
        )
