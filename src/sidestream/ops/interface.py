"""The interface of the device operations. An operation enqueues work on the current stream, and the host reads no
device values, unless the operation's docstring says otherwise. CUDA graphs may capture the operations of `TritonOps`.

A row is one request's part of a step's batch: a decode token with its drafts, or a chunk of a prompt. The tokens of all
rows are packed in one tensor. A request slot is a request's index in the tensors of device state. A draft is a guessed
token that the model verifies.

Shapes: T packed tokens, B rows of a step, R rows of a call, S request slots (the last slot is for padding), N rows of
logits, K drafts per row, V tokens of the vocabulary. Integers are int64 unless another type is given.
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
        """Drafts `[R, count]` by prompt lookup: the tokens that follow the longest earlier occurrence of a row's last
        tokens. Such an occurrence has `shortest` to `longest` tokens. history int32 `[S, width]`; slots and lengths
        `[R]`.
        """
        ...

    def take_forced(self, drafts: Tensor, forced: Tensor, history: Tensor, slots: Tensor, lengths: Tensor) -> None:
        """Replace drafts by tokens that the grammars of rows leave no choice about. Overwrites `drafts`, `[R, K]`.

        forced    `[S, 2 + F]` by slot: the position of the first forced token, the number of forced tokens, and these
                  tokens. They count only if all tokens of the row from that position on are the first of them
        history   int32 `[S, width]`; slots and lengths `[R]`, as in `match_ngram`
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
        """Replace placeholders by device state. The host prepares a step before the results of the previous step are
        known, so its inputs contain negative numbers in place of unknown values.

        packed        `[T]`: token ids; -1: the last token of the slot; -2 - k: draft k of the slot
        positions     `[T]`; -1 - k: k positions after the last token of the slot
        token_slots   `[T]`: request slot of each token
        kv_lens       `[B]`; -k: k tokens more than the length of the slot
        slots         `[B]`: request slot of each row
        drafts        `[S, K]` by slot; None: the step has no drafts
        width         number of columns of the returned block tables
        """
        ...

    def draft_rows(
        self,
        positions: Tensor,
        first_tokens: Tensor,
        kv_lens: Tensor,
        slots: Tensor,
        *,
        last_tokens: Tensor,
        lengths: Tensor,
        block_tables: Tensor,
        hidden: Tensor,
        width: int,
    ) -> DraftRows:
        """The state of R decode rows. positions `[T]` and kv_lens `[R]` are as in `resolve_inputs`. first_tokens `[R]`:
        the rows' first packed tokens; slots `[R]`.
        """
        ...

    def draft_slots(
        self, block_tables: Tensor, positions: Tensor, bounds: Tensor, padding: Tensor, *, block_tokens: int
    ) -> tuple[Tensor, Tensor]:
        """Slot mapping and KV lengths, both `[R]`, of a batch with one token in each row. The token is at the row's
        position, or at the row's bound if the bound is smaller. Padding rows write nothing and have length 0.
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
        """The logits with the penalties of their request slots applied, float32 `[N, V]`. Float32 logits may be
        overwritten.

        slots           `[N]`
        output_counts   int32 `[S, V]`
        in_prompt       bool `[S, V]`: whether the token is in the prompt
        drafted         `[N, K]`: the drafts before each row of logits, padded with -1. The penalties count them as
                        output tokens
        """
        ...

    def mask(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        """Set the logits of tokens that are not allowed to -inf. Overwrites `logits`, `[N, V]`.

        rows    `[M]`: the rows of logits to change
        masks   int32 `[M, ceil(V / 32)]`, on a GPU in mapped host memory: bit i of word w is set if the row may get
                token 32 w + i
        """
        ...

    def draw(
        self, logits: Tensor, slots: Tensor, output_indices: Tensor, sampling: Tensor, *, typical: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Sample one token for each row of logits. Returns the tokens, `[N]`, and whether the logits of each row are
        finite, bool `[N]`; if not, the token is 0.

        slots            `[N]`
        output_indices   `[N]`: number of the request's outputs before this token
        typical          some row has `typical_p` below 1; False: the option is not read

        In `TorchOps`, the host reads device values.
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
        """Verify drafts, and update the request slots of rows that sample; `state` is overwritten. Returns the accept
        lengths, `[B]`: the number of tokens by which each of these rows advances. Padding rows change only the padding
        slot.

        tokens          `[N]`: the sampled token of each row of logits
        positions       `[N]`: position of the token whose logits these are
        drafts          `[decodes or fewer, K]`: drafts of the first rows; None: the step has no drafts
        hidden          `[N, hidden_size]`: hidden states of these tokens; None: they are not kept
        sampling_rows   `[B]`: indices of the rows that sample, padded with -1
        first_logits    `[B]`: for each of these rows, the index of its first row of logits
        decodes         number of decode rows, which are the first rows
        """
        ...

    def previous_hidden(self, hidden: Tensor, rows: PackedRows, by_slot: Tensor, by_block: Tensor) -> Tensor:
        """The hidden state of the token before each packed token, `[T, hidden_size]`.

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
        `by_slot`. The last block of `by_block` takes writes to be ignored.
        """
        ...
