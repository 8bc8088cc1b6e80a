"""The interface of the device operations. Unless its docstring says otherwise, an operation enqueues work on the
current stream and reads no device values on the host. `TritonOps` may be captured in a CUDA graph.

Shapes: T packed tokens, B rows of a step, R rows of a call, S request slots (the last is the padding slot), N rows of
logits, K drafts per row, V tokens of the vocabulary. Integers are int64 unless a type is given.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

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
    """The state of R decode rows before a step drafts for them.

    tokens         `[R]`: the last token of each row
    lengths        `[R]`: number of tokens of each row, including the last one
    bounds         `[R]`: the last position for which the row has a block
    padding        bool `[R]`: the row is padding
    block_tables   int32 `[R, width]`
    hidden         `[R, hidden_size]`
    """

    tokens: Tensor
    lengths: Tensor
    bounds: Tensor
    padding: Tensor
    block_tables: Tensor
    hidden: Tensor


class PackedRows(NamedTuple):
    """The rows of a packed step, for hidden states.

    cu_seqlens_q   `[B + 1]`: offsets of the rows into the packed tokens
    slots          `[B]`: request slots
    origins        `[B]`: the source of the hidden state before the row's first token: a block id, `FROM_SLOT` or
                   `ZEROS`
    """

    cu_seqlens_q: Tensor
    slots: Tensor
    origins: Tensor


FROM_SLOT, ZEROS = -1, -2
"""Values of `origins`: the hidden state before a row's first token is the state of its request slot (`FROM_SLOT`), or
it is zeros, at the start of a sequence (`ZEROS`).
"""


class SlotTensors(NamedTuple):
    """The state of request slots that a draw advances.

    last_tokens     `[S]`
    lengths         `[S]`: number of tokens with KV
    history         int32 `[S, width + 1]`: all tokens. Writes to the last column are ignored. An engine without drafts
                    has no columns here, and keeps neither `lengths` nor `hidden`
    hidden          `[S, hidden_size]`
    output_counts   int32 `[S, V]`: counts of output tokens of penalised slots; None: no row of the step is penalised
    sampling        sampling options, see `ops/rules.py`
    """

    last_tokens: Tensor
    lengths: Tensor
    history: Tensor
    hidden: Tensor
    output_counts: Tensor | None
    sampling: Tensor


class Ops(Protocol):
    """The operations. The docstring of a method names the arguments that it overwrites, if any."""

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Id of each row's largest logit, `[N]` (the lowest id among equal logits); and whether the row is finite, bool
        `[N]`.

        logits `[N, V]`. A row is not finite if it has NaN or +inf, or only -inf; its id is then 0.
        """
        ...

    def match_ngram(
        self, history: Tensor, slots: Tensor, lengths: Tensor, count: int, *, longest: int, shortest: int
    ) -> Tensor:
        """Drafts `[R, count]` by prompt lookup, see `NgramProposer`. history int32 `[S, width]`; slots and lengths
        `[R]`.
        """
        ...

    def update_block_tables(self, indices: Tensor, block_ids: Tensor, block_tables: Tensor) -> None:
        """Write block ids at flat indices of `block_tables`, int32 `[S, width]`. An index of -1 writes nothing."""
        ...

    def resolve_inputs(
        self,
        packed: Tensor,
        positions: Tensor,
        token_slots: Tensor,
        kv_lens: Tensor,
        slots: Tensor,
        *,
        last_tokens: Tensor,
        lengths: Tensor,
        block_tables: Tensor,
        drafts: Tensor | None,
        block_tokens: int,
        width: int,
    ) -> ResolvedInputs:
        """Replace the placeholders in packed inputs by device state.

        packed        `[T]`: token ids; -1: the slot's last token; -2 - k: its draft k
        positions     `[T]`; -1 - k: k positions after the slot's last token
        token_slots   `[T]`
        kv_lens       `[B]`; -k: k tokens more than the slot's length
        slots         `[B]`
        drafts        `[S, K]` by slot; None: the step has no drafts
        width         number of columns of the returned block tables
        """
        ...

    def draft_rows(
        self,
        positions: Tensor,
        starts: Tensor,
        kv_lens: Tensor,
        slots: Tensor,
        *,
        last_tokens: Tensor,
        lengths: Tensor,
        block_tables: Tensor,
        hidden: Tensor,
        width: int,
    ) -> DraftRows:
        """The state of R decode rows. positions `[T]` and kv_lens `[R]` as in `resolve_inputs`; starts `[R]`: the first
        packed token of each row; slots `[R]`.
        """
        ...

    def draft_slots(
        self, block_tables: Tensor, positions: Tensor, bounds: Tensor, padding: Tensor, *, block_tokens: int
    ) -> tuple[Tensor, Tensor]:
        """Slot mapping and KV lengths, both `[R]`, of rows with one token each. The token is at the row's position, or
        at its bound if that is earlier. Padding rows write nothing and have length 0.
        """
        ...

    def penalise(
        self,
        logits: Tensor,
        slots: Tensor,
        sampling: Tensor,
        output_counts: Tensor,
        in_prompt: Tensor,
        drafted: Tensor | None,
    ) -> Tensor:
        """The logits after the penalties of their slots, float32 `[N, V]`. Float32 logits may be overwritten.

        slots           `[N]`
        output_counts   int32 `[S, V]`
        in_prompt       bool `[S, V]`
        drafted         `[N, K]`: drafts between the slot's last token and each row of logits, padded with -1. They
                        count as output tokens
        """
        ...

    def draw(self, logits: Tensor, slots: Tensor, output_indices: Tensor, sampling: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens `[N]`, and whether the logits of each row are finite, bool `[N]`. If not, the row's token is 0.

        slots            `[N]`
        output_indices   `[N]`: number of the slot's outputs before this token

        `TorchOps` reads device values here.
        """
        ...

    def advance(
        self,
        tokens: Tensor,
        positions: Tensor,
        drafts: Tensor | None,
        hidden: Tensor | None,
        state: SlotTensors,
        *,
        sampling_rows: Tensor,
        first_logits: Tensor,
        slots: Tensor,
        cu_seqlens_q: Tensor,
        decodes: int,
    ) -> Tensor:
        """Accept drafts, and advance the slots of sampling rows by the drawn tokens; `state` is overwritten. Returns
        the accept lengths, `[B]`: the number of tokens by which each sampling row advances (H19). Padding rows change
        only the padding slot.

        tokens          `[N]`: the drawn tokens
        positions       `[N]`: position of the packed token before each drawn token
        drafts          `[decodes or fewer, K]`: drafts of the first rows; None: the step has no drafts
        hidden          `[N, hidden_size]`: hidden states at the logits; None: they are not kept
        sampling_rows   `[B]`: indices of the rows that sample, then -1
        first_logits    `[B]`: index of the first logits of each of these rows
        """
        ...

    def previous_hidden(self, hidden: Tensor, rows: PackedRows, by_slot: Tensor, by_block: Tensor) -> Tensor:
        """The hidden state at the position before each packed token, `[T, hidden_size]`.

        hidden     `[T, hidden_size]`: hidden states of this step
        by_slot    `[S, hidden_size]`: hidden states of request slots
        by_block   `[blocks, hidden_size]`: hidden states of blocks
        """
        ...

    def keep_hidden(
        self,
        hidden: Tensor,
        rows: PackedRows,
        by_slot: Tensor,
        by_block: Tensor,
        *,
        positions: Tensor,
        slot_mapping: Tensor,
        block_tokens: int,
    ) -> None:
        """Write the hidden state of each complete block's last token to `by_block`, and of each row's last token to
        `by_slot`. Writes to the last block of `by_block` are ignored.
        """
        ...
