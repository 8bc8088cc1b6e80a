"""The interface of the device operations. Each enqueues on the current stream and reads nothing back, unless it says
so: `TritonOps` may be captured in a CUDA graph.

Shapes: T packed tokens, B rows of a step, S request slots (the last one is the padding slot), N logits, K drafts a row,
V the vocabulary. Integers are int64 unless a type is given.
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

    tokens         `[R]`: the last token of each
    lengths        `[R]`: tokens of each, the last one included
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
"""The hidden state before a row's first token is the one of its request slot, or zeros at the start of a sequence."""


class SlotTensors(NamedTuple):
    """The state of request slots that a draw advances.

    last_tokens     `[S]`
    lengths         `[S]`: tokens of each that have KV
    history         int32 `[S, width + 1]`, all tokens; the last column takes writes that count for nothing. No columns
                    where nothing is drafted; then neither `lengths` nor `hidden` is kept
    hidden          `[S, hidden_size]`
    output_counts   int32 `[S, V]`, outputs of penalised slots; None: no row of the step is penalised
    sampling        sampling options, see `ops/rules.py`
    """

    last_tokens: Tensor
    lengths: Tensor
    history: Tensor
    hidden: Tensor
    output_counts: Tensor | None
    sampling: Tensor


class Ops(Protocol):
    """The operations. A method that overwrites an argument says so."""

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Ids of the largest logits, `[N]`, the lowest id among equals; and whether they are finite, bool `[N]`.

        logits `[N, V]`. A row with NaN or +inf, or with -inf only, is not finite, and its id is 0.
        """
        ...

    def match_ngram(
        self, history: Tensor, slots: Tensor, lengths: Tensor, count: int, *, longest: int, shortest: int
    ) -> Tensor:
        """Drafts `[R, count]` by prompt lookup: see `NgramProposer`. history int32 `[S, width]`; others `[R]`."""
        ...

    def update_block_tables(self, indices: Tensor, block_ids: Tensor, block_tables: Tensor) -> None:
        """Write block ids at flat indices of `block_tables`, int32 `[S, width]`; nothing at index -1."""
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
        """Replace the placeholders of packed inputs by device state.

        packed        `[T]` ids; -1: the slot's last token; -2 - k: its draft k
        positions     `[T]`; -1 - k: k tokens after the slot's last one
        token_slots   `[T]`
        kv_lens       `[B]`; -k: k tokens more than the slot's length
        slots         `[B]`
        drafts        `[S, K]` by slot; None: nothing is drafted
        width         columns of the block tables that are returned
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
        """Slot mapping and KV lengths, both `[R]`, of rows with one token each at `positions`, or at `bounds` if that
        is earlier. Rows of padding write nothing and have length 0.
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
        """The logits as float32 `[N, V]`, less the penalties of their slots. Float32 logits may be overwritten.

        slots `[N]` · output_counts int32 and in_prompt bool, `[S, V]` · drafted `[N, K]`: drafts between the slot's
        last token and each logit, else -1; they count as output
        """
        ...

    def draw(self, logits: Tensor, slots: Tensor, output_indices: Tensor, sampling: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens `[N]`, and whether the logits of each are finite, bool `[N]`; else its token is 0.

        slots `[N]` · output_indices `[N]`: outputs of the slot before this one. By torch, it reads device values.
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
        """Accept drafts and advance the slots of sampling rows by what was drawn; `state` is overwritten. Returns the
        accept lengths, `[B]`: tokens that each sampling row advances by (H19). Rows of padding change nothing that is
        read.

        tokens          `[N]`, drawn
        positions       `[N]`: of the packed token before each
        drafts          `[decodes or fewer, K]`, of the first rows; None: nothing was drafted
        hidden          `[N, hidden_size]`: hidden states at the logits; None: not to be kept
        sampling_rows   `[B]`: indices of the rows that sample, then -1
        first_logits    `[B]`: the first logit of each of those
        """
        ...

    def previous_hidden(self, hidden: Tensor, rows: PackedRows, by_slot: Tensor, by_block: Tensor) -> Tensor:
        """The hidden state at the position before each packed token, `[T, hidden_size]`, from those of this step,
        `hidden` `[T, hidden_size]`, of slots `[S, hidden_size]` and of blocks `[blocks, hidden_size]`.
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
        """Write the hidden state of each complete block's last token to `by_block`, whose last block takes writes that
        count for nothing, and of each row's last token to `by_slot`.
        """
        ...
