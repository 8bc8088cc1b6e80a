"""The values that the device operations take and return.

A row is one request's part of a step's batch: a decode token with its drafts, or a chunk of a prompt. The tokens of all
rows are packed in one tensor. A request slot is a request's index in the tensors of device state. A draft is a guessed
token that the model verifies.

Shapes: T packed tokens, B rows of a step, R rows of a call, S request slots (the last slot is for padding), N rows of
logits, K drafts per row, V tokens of the vocabulary. Integers are int64 unless another type is given.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ResolvedInputs(NamedTuple):
    """The inputs of a forward pass.

    tokens, positions   `[T]`
    kv_lens             `[B]`
    slot_mapping        `[T]`; -1: the token writes no KV
    block_tables        int32 `[B, width]`
    """

    tokens: Tensor
    positions: Tensor
    kv_lens: Tensor
    slot_mapping: Tensor
    block_tables: Tensor


class DraftRows(NamedTuple):
    """The state of R decode rows before a step makes their drafts.

    tokens         `[R]`: the last token of each row
    lengths        `[R]`: number of tokens of each row, including the last token
    bounds         `[R]`: the last position for which the row has a block
    padding        bool `[R]`: whether the row is padding
    block_tables   int32 `[R, width]`
    hidden         `[R, hidden_size]`: the hidden state of each row's request slot
    """

    tokens: Tensor
    lengths: Tensor
    bounds: Tensor
    padding: Tensor
    block_tables: Tensor
    hidden: Tensor


class PackedRows(NamedTuple):
    """The rows of a step, for operations on hidden states.

    cu_seqlens_q     `[B + 1]`: offsets of the rows into the packed tokens
    slots            `[B]`: request slot of each row
    hidden_sources   `[B]`: where to read the hidden state of the token before each row's first token: a block id,
                     `FROM_SLOT` or `ZEROS`
    """

    cu_seqlens_q: Tensor
    slots: Tensor
    hidden_sources: Tensor


FROM_SLOT, ZEROS = -1, -2
"""Values of `PackedRows.hidden_sources`. `FROM_SLOT`: the hidden state is kept for the row's request slot. `ZEROS`: the
row begins a sequence, so the hidden state is zeros.
"""


class SlotTensors(NamedTuple):
    """Device state of the request slots that `Ops.advance` updates after sampling.

    last_tokens     `[S]`
    lengths         `[S]`: number of tokens with KV
    history         int32 `[S, width + 1]`: all tokens of each request; the last column takes writes to be ignored. An
                    engine without drafts keeps no history (no columns), no `lengths` and no `hidden`
    hidden          `[S, hidden_size]`
    output_counts   int32 `[S, V]`: how often each token was output, for slots with a penalty; None if no row of the
                    step has a penalty
    sampling        sampling options: `SamplingTensors.numbers` in ops/rules.py
    """

    last_tokens: Tensor
    lengths: Tensor
    history: Tensor
    hidden: Tensor
    output_counts: Tensor | None
    sampling: Tensor
