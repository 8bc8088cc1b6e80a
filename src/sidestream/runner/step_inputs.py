"""The inputs of one step: a single buffer of int64 numbers, which the host packs in the same way for eager and for
captured steps.

A captured step (CUDA graph) has fixed sizes and addresses: each batch overwrites the whole buffer of the `GraphKey`
that it uses. Rows of padding use the padding slot, write no KV, and their sampled tokens are not read (hazard H18). An
eager step has the exact sizes of its batch, so it has no padding.

Also which positions of prefill rows need logits for the log-probabilities of prompts (`PromptSlots`).
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from operator import is_not
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sidestream.ops.interface import FROM_SLOT, ZEROS
from sidestream.types import BatchPlan, RowColumns, RowPlan, RowStart
from sidestream_kv.types import RequestId

Numbers = npt.NDArray[np.int64]

# Smallest and largest number of prefill chunks in the sizes of a graph key.
_CHUNKS, _MOST_CHUNKS = 8, 128
_CHUNK_TOKENS = 16
# With more prompt tokens than these, a step takes so long that padding of its decode rows does not count: there are
# fewer keys.
_FINE_TOKENS = 2048
# There are additional keys for steps with at least _MANY_ROWS decode rows and few drafts, and for steps with drafts,
# prefill and at most _FEW_ROWS decode rows.
_MANY_ROWS = 16
_FEW_ROWS = 32
SHORT_TOKENS = 16
"""If a step has at most this many prefill tokens, attention splits the KV of its chunks among programs, as for decode
rows. Short chunks often have a long context, because few tokens are left to compute after a prefix-cache hit.
"""


@dataclass(frozen=True, slots=True)
class InputSizes:
    """The sizes of a step's inputs: exact for an eager step, upper bounds for a captured step.

    decodes          number of decode rows, which come first
    chunks           number of prefill rows
    prefill_tokens   tokens of all chunks together
    draft_len        largest number of drafts of one row
    num_drafts       number of drafts of all rows together
    logits           rows of logits: one for each sampling row and one for each draft
    first_drafting   index of the first decode row that may have drafts; equal to `decodes` if no row may
    has_states       whether the model has recurrent state
    """

    decodes: int
    chunks: int
    prefill_tokens: int
    draft_len: int
    num_drafts: int
    logits: int
    first_drafting: int
    has_states: bool = False

    @classmethod
    def of(cls, batch: BatchPlan) -> InputSizes:
        """The exact sizes of a batch."""
        columns, decodes = batch.columns, batch.num_decodes
        longest = num_drafts = 0
        first_drafting = decodes
        if batch.speculates:
            longest, num_drafts = max(columns.drafts, default=0), sum(columns.drafts)
            first_drafting = columns.drafts[:decodes].count(0)
        logits = sum(columns.samples) + num_drafts
        chunks, prefill_tokens = batch.num_rows - decodes, batch.num_prefill_tokens
        has_states = bool(columns.states) and columns.states[0] is not None
        return cls(decodes, chunks, prefill_tokens, longest, num_drafts, logits, first_drafting, has_states)

    @property
    def rows(self) -> int:
        """Number of all rows."""
        return self.decodes + self.chunks

    @property
    def num_tokens(self) -> int:
        """Number of all packed tokens."""
        return self.decodes + self.num_drafts + self.prefill_tokens

    @property
    def split_chunks(self) -> int:
        """Number of chunks for which attention splits the KV among programs, as for decode rows."""
        return min(_CHUNKS, self.chunks) if self.prefill_tokens <= SHORT_TOKENS else 0

    @property
    def parts(self) -> list[int]:
        """Lengths of the parts of the buffer, in the order of `StepInputs`."""
        tokens, rows, states = [self.num_tokens] * 3, [self.rows] * 3, [self.rows * self.has_states] * 3
        return [*tokens, self.rows + 1, *rows, self.logits, self.rows, self.rows, self.rows, self.rows, 1, *states]


@dataclass(frozen=True, slots=True, order=True)
class GraphKey:
    """The sizes of the largest batch that one captured step can run.

    decodes       number of decode rows
    tokens        number of prefill tokens, all chunks together
    drafts        number of drafts of each decode row
    total_drafts  number of drafts of all rows together; 0: every row may have `drafts` drafts
    has_states    whether the model has recurrent state
    """

    decodes: int
    tokens: int = 0
    drafts: int = 0
    total_drafts: int = 0
    has_states: bool = False

    @property
    def described(self) -> str:
        """The sizes as a text, for progress."""
        drafts = f" with {self.drafts} drafts" if self.drafts else ""
        return f"{self.decodes} decode rows{drafts}, {self.tokens} prefill tokens"

    @property
    def all_drafts(self) -> int:
        """Number of drafts of all rows together."""
        return self.total_drafts or self.decodes * self.drafts

    @property
    def chunks(self) -> int:
        """Number of prefill rows."""
        return min(max(_CHUNKS, self.tokens // _CHUNK_TOKENS), _MOST_CHUNKS) if self.tokens else 0

    @property
    def sizes(self) -> InputSizes:
        """The sizes of the captured step's inputs."""
        logits = self.decodes + self.all_drafts + self.chunks
        first_drafting = 0 if self.drafts else self.decodes
        return InputSizes(
            self.decodes,
            self.chunks,
            self.tokens,
            self.drafts,
            self.all_drafts,
            logits,
            first_drafting,
            self.has_states,
        )

    def fits(self, decodes: int, chunks: int, tokens: int, drafts: int = 0) -> bool:
        """Whether a batch with these numbers fits; `drafts`: the largest number of drafts of a row."""
        return decodes <= self.decodes and chunks <= self.chunks and tokens <= self.tokens and drafts <= self.drafts

    @classmethod
    def all_of(
        cls,
        *,
        max_rows: int,
        chunk_tokens: int,
        max_tokens: int,
        drafts: int = 0,
        has_states: bool = False,
        chunks: bool = True,
    ) -> list[GraphKey]:
        """The keys to capture, for up to `max_rows` rows and `max_tokens` prefill tokens; the most used keys first.

        A key for `chunk_tokens` lets the largest chunk run without padding. If `drafts` > 0, each number of decode rows
        has a key without drafts and a key with `drafts` drafts for each row. Large numbers of rows have a third key,
        for a quarter of these drafts: if only few rows have drafts, the second key would compute mostly padding. For
        the same reason, steps with prefill and drafts have a key for at most `_FEW_ROWS` decode rows. Without `chunks`
        there are only keys without prefill.
        """
        decodes = [
            count
            for count in (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 1024, 32))
            if count < max_rows
        ]
        fine = (SHORT_TOKENS, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, _FINE_TOKENS)
        coarse = range(_FINE_TOKENS + 1024, max_tokens, 1024)
        doubling = (SHORT_TOKENS << power for power in range(10))
        tokens, drafting_tokens = (
            sorted({*(count for count in (*counts, chunk_tokens) if count < max_tokens), max_tokens})
            for counts in ((*fine, *coarse), doubling)
        )
        few = sorted({min(_FEW_ROWS, max_rows), max_rows})
        beside = (*(count for count in (0, 8, 32, 128) if count < max_rows), max_rows)
        keys = [
            *(cls(count, 0, number) for number in sorted({0, drafts}) for count in (*decodes, max_rows)),
            *(
                cls(count, 0, drafts, count * drafts // 4)
                for count in (*decodes, max_rows)
                if drafts and count >= _MANY_ROWS
            ),
            *(cls(rows, count, drafts) for rows in few for count in drafting_tokens if drafts),
            *(cls(rows, count) for count in tokens for rows in (beside if count <= _FINE_TOKENS else few)),
        ]
        return [replace(key, has_states=has_states) for key in keys if chunks or not key.tokens]


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """The input buffer of a step, int64 on the device, and its parts. T packed tokens, B rows, N rows of logits.

    table_width       number of columns of the step's block tables
    padded            the buffer has the sizes of a graph key, so parts of it may be padding
    tokens            [T] ids; -1: the slot's last token; -2 - k: its draft k
    positions         [T]; -1 - k: k tokens after the slot's last token, if only the device knows the number of the
                      slot's tokens
    token_slots       [T] request slot of each token; for padding, the padding slot
    cu_seqlens_q      [B + 1] decode rows first, then chunks; rows of padding have no tokens
    kv_lens           [B]; 0 for padding; -k: k tokens more than the slot's length on the device
    slots             [B] request slots; for padding, the padding slot
    hidden_sources    [B] source of the hidden state before the row's first token, see `hidden_source_of`
    logits_indices    [N] packed positions of the tokens whose logits are computed; -1 for padding
    sampling_rows     [B] indices of the rows that sample, then -1
    first_logits      [B] for each entry of `sampling_rows`, the index in `logits_indices` of the row's first logit
    table_indices     [B] flat indices of the entries of the block tables to overwrite; -1 for padding
    block_ids         [B] the block id for each entry of `table_indices`
    mailbox_offset    [1] first byte of the step's mailbox entry
    state_reads       [B] state that the row reads; negative: the sequence begins. Empty for models without recurrent
                      state, like the next two
    state_writes      [B] state that the row writes; negative: padding
    state_checkpoints [B] additional state that the row writes at the end of a block; negative: none

    chunk_lens        number of tokens of each chunk, for a model with recurrent state; only in an eager step
    """

    sizes: InputSizes
    table_width: int
    padded: bool
    chunk_lens: tuple[int, ...]
    buffer: Tensor
    tokens: Tensor
    positions: Tensor
    token_slots: Tensor
    cu_seqlens_q: Tensor
    kv_lens: Tensor
    slots: Tensor
    hidden_sources: Tensor
    logits_indices: Tensor
    sampling_rows: Tensor
    first_logits: Tensor
    table_indices: Tensor
    block_ids: Tensor
    mailbox_offset: Tensor
    state_reads: Tensor
    state_writes: Tensor
    state_checkpoints: Tensor

    @classmethod
    def of(
        cls,
        buffer: Tensor,
        sizes: InputSizes,
        *,
        table_width: int,
        padded: bool = False,
        chunk_lens: tuple[int, ...] = (),
    ) -> StepInputs:
        """View a buffer that `pack` filled as its parts."""
        return cls(sizes, table_width, padded, chunk_lens, buffer, *torch.split(buffer, sizes.parts))

    @classmethod
    def allocate(cls, key: GraphKey, device: torch.device, *, padding_slot: int, table_width: int) -> StepInputs:
        """Allocate the inputs of a graph, filled with padding."""
        numbers = pack(BatchPlan(()), key.sizes, padding_slot=padding_slot, block_tokens=1)
        return cls.of(torch.from_numpy(numbers).to(device), key.sizes, table_width=table_width, padded=True)

    def slots_of_logits(self, count: int, *, padding_slot: int) -> Tensor:
        """The request slot of each of the first `count` logits, int64 `[count]`."""
        indices = self.logits_indices[:count]
        return torch.where(indices < 0, padding_slot, self.token_slots[indices.clamp(min=0)])

    def without_padding(self) -> StepInputs:
        """The same inputs without padding, for the torch backend of attention. Reads the buffer on the host, so it
        works only on a CPU.
        """
        if not self.padded:
            return self
        starts, decodes = self.cu_seqlens_q.tolist(), self.sizes.decodes
        rows = [row for row in range(self.sizes.rows) if starts[row + 1] > starts[row]]
        lengths = [starts[row + 1] - starts[row] for row in rows]
        num_decodes = sum(row < decodes for row in rows)
        indices = self.logits_indices[self.logits_indices >= 0]
        count = starts[-1]
        sizes = replace(
            self.sizes,
            decodes=num_decodes,
            chunks=len(rows) - num_decodes,
            prefill_tokens=sum(lengths[num_decodes:]),
            num_drafts=sum(lengths[:num_decodes]) - num_decodes,
            logits=len(indices),
            first_drafting=lengths[:num_decodes].count(1) if self.sizes.draft_len else num_decodes,
        )
        return replace(
            self,
            sizes=sizes,
            padded=False,
            tokens=self.tokens[:count],
            positions=self.positions[:count],
            token_slots=self.token_slots[:count],
            cu_seqlens_q=torch.tensor([0, *(starts[row + 1] for row in rows)]),
            kv_lens=self.kv_lens[rows],
            slots=self.slots[rows],
            hidden_sources=self.hidden_sources[rows],
            logits_indices=indices,
            chunk_lens=tuple(lengths[num_decodes:]),
            state_reads=self.state_reads[rows] if self.sizes.has_states else self.state_reads,
            state_writes=self.state_writes[rows] if self.sizes.has_states else self.state_writes,
            state_checkpoints=self.state_checkpoints[rows] if self.sizes.has_states else self.state_checkpoints,
        )


class TableChanges(NamedTuple):
    """Entries of the device's block tables to overwrite: flat indices, and new block ids. Arrays, because a long prompt
    from host memory has thousands of blocks: torch reads a list of 2,048 numbers in 0.29 ms, and an array in 0.04 ms.
    """

    indices: Numbers
    block_ids: Numbers

    @classmethod
    def of(cls, indices: Sequence[int], block_ids: Sequence[int]) -> TableChanges:
        """Changes from lists."""
        return cls(np.array(indices, np.int64), np.array(block_ids, np.int64))


NO_CHANGES = TableChanges.of((), ())


def demand_of(batch: BatchPlan) -> tuple[int, int, int, int]:
    """The arguments of `GraphKey.fits`: numbers of decode rows, chunks and prefill tokens, and the largest number of
    drafts of a row.
    """
    decodes = batch.num_decodes
    longest = max(batch.columns.drafts, default=0) if batch.speculates else 0
    return decodes, batch.num_rows - decodes, batch.num_prefill_tokens, longest


def pack(
    batch: BatchPlan,
    sizes: InputSizes,
    *,
    padding_slot: int,
    block_tokens: int,
    mailbox_offset: int = 0,
    changes: TableChanges | None = None,
    further_logits: Numbers | None = None,
) -> Numbers:
    """Compute the content of a step's input buffer. The batch must fit into `sizes`, and its decode rows come first.

    changes   changed entries of the device's block tables, at most one for each row of `sizes`
    further_logits   packed positions whose logits come behind those that are sampled at
    """
    columns, decodes = batch.columns, batch.num_decodes
    plain = not batch.speculates
    numbers = (_of_decodes(sizes, padding_slot, decodes) if plain else _padding(sizes, padding_slot)).copy()
    parts = _Parts(*(numbers[part] for part in _slices(sizes)))
    parts.mailbox_offset[:] = mailbox_offset  # rule: captured-samples-go-to-their-mailbox-entry
    if changes is not None and (count := len(changes.indices)):
        # rule: changed-blocks-reach-the-device
        parts.table_indices[:count], parts.block_ids[:count] = changes
    decode_slots, starts = _array_of(columns.slot[:decodes]), _array_of(columns.min_start[:decodes])
    parts.slots[:decodes] = decode_slots
    if plain:
        count = decodes
        parts.positions[:count], parts.token_slots[:count], parts.kv_lens[:count] = starts, decode_slots, starts + 1
    else:
        count = _pack_drafting(columns, decodes, decode_slots, starts, parts)
    _pack_chunks(batch, sizes, count, block_tokens, parts)
    if further_logits is not None:
        parts.logits_indices[-len(further_logits) :] = further_logits
    if sizes.has_states and batch.num_rows:
        rows = np.array([*range(decodes), *range(sizes.decodes, sizes.decodes + batch.num_rows - decodes)])
        # rule: states-of-a-row-are-its-owners
        parts.state_reads[rows], parts.state_writes[rows], parts.state_checkpoints[rows] = zip(
            *columns.states, strict=True
        )
    return numbers


def _array_of(column: Sequence[int]) -> Numbers:
    """The numbers as an array that is only read. For 256 of them, `np.array` takes three times as long."""
    return np.frombuffer(struct.pack(f"{len(column)}q", *column), np.int64)


class _Parts(NamedTuple):
    """The parts of a buffer, in the order of `StepInputs`."""

    tokens: Numbers
    positions: Numbers
    token_slots: Numbers
    cu_seqlens_q: Numbers
    kv_lens: Numbers
    slots: Numbers
    hidden_sources: Numbers
    logits_indices: Numbers
    sampling_rows: Numbers
    first_logits: Numbers
    table_indices: Numbers
    block_ids: Numbers
    mailbox_offset: Numbers
    state_reads: Numbers
    state_writes: Numbers
    state_checkpoints: Numbers


def _pack_drafting(columns: RowColumns, decodes: int, decode_slots: Numbers, starts: Numbers, parts: _Parts) -> int:
    """Pack the decode rows of a step with drafts, or of a step whose positions depend on drafts in flight. Returns the
    number of packed tokens.
    """
    stops = np.array(columns.stop[:decodes], np.int64)
    parts.sampling_rows[:decodes] = np.arange(decodes)
    counts = 1 + np.array(columns.drafts[:decodes], np.int64)
    ends = counts.cumsum()
    count = int(ends[-1]) if decodes else 0
    number = np.arange(count) - np.repeat(ends - counts, counts)  # index of each token within its row
    # rule: row-positions-come-from-the-device
    lost = starts + counts != stops  # rows whose first position only the device knows
    parts.tokens[:count] = -1 - number
    parts.token_slots[:count] = np.repeat(decode_slots, counts)
    parts.positions[:count] = np.where(np.repeat(lost, counts), -1 - number, number + np.repeat(starts, counts))
    parts.kv_lens[:decodes] = np.where(lost, -counts, stops)
    parts.cu_seqlens_q[1 : decodes + 1], parts.first_logits[:decodes] = ends, ends - counts
    parts.logits_indices[:count] = np.arange(count)
    parts.cu_seqlens_q[decodes + 1 :] = count
    return count


def _pack_chunks(batch: BatchPlan, sizes: InputSizes, begin: int, block_tokens: int, parts: _Parts) -> None:
    """Pack the prefill chunks, after the decode rows, which have `begin` tokens."""
    logit, sampling = begin, batch.num_decodes
    for at, row in enumerate(batch.prefill_rows, sizes.decodes):
        end = begin + row.stop - row.min_start
        parts.tokens[begin:end] = row.tokens or ()
        parts.positions[begin:end] = np.arange(row.min_start, row.stop)
        parts.token_slots[begin:end] = row.slot
        parts.cu_seqlens_q[at + 1 :] = end
        parts.kv_lens[at], parts.slots[at], parts.hidden_sources[at] = (
            row.stop,
            row.slot,
            hidden_source_of(row, block_tokens),
        )
        if row.samples:
            parts.logits_indices[logit], parts.sampling_rows[sampling], parts.first_logits[sampling] = (
                end - 1,
                at,
                logit,
            )
            logit, sampling = logit + 1, sampling + 1
        begin = end


def hidden_source_of(row: RowPlan, block_tokens: int) -> int:
    """The source of the hidden state before the row's first token of this step: a block id, `FROM_SLOT` or `ZEROS`."""
    if row.begin is None:
        return FROM_SLOT
    # rule: hidden-state-comes-back-with-its-block
    return row.block_table[row.min_start // block_tokens - 1] if row.min_start else ZEROS


@functools.lru_cache(maxsize=256)
def _slices(sizes: InputSizes) -> list[slice]:
    """The parts of a buffer, in the order of `StepInputs`."""
    stops = np.cumsum(sizes.parts).tolist()
    return [slice(stop - size, stop) for stop, size in zip(stops, sizes.parts, strict=True)]


@functools.lru_cache(maxsize=256)
def _padding(sizes: InputSizes, padding_slot: int) -> Numbers:
    """The content of a buffer that is all padding."""
    numbers = np.zeros(sum(sizes.parts), np.int64)
    parts = _Parts(*(numbers[part] for part in _slices(sizes)))
    parts.token_slots[:] = parts.slots[:] = padding_slot
    parts.hidden_sources[:] = FROM_SLOT
    parts.logits_indices[:] = parts.sampling_rows[:] = parts.table_indices[:] = -1
    parts.state_reads[:] = parts.state_writes[:] = parts.state_checkpoints[:] = -1
    return numbers


@functools.lru_cache(maxsize=64)
def _of_decodes(sizes: InputSizes, padding_slot: int, decodes: int) -> Numbers:
    """The content that all batches with `decodes` decode rows and no drafts have in common."""
    numbers = _padding(sizes, padding_slot).copy()
    parts = _Parts(*(numbers[part] for part in _slices(sizes)))
    parts.tokens[:decodes] = -1
    parts.cu_seqlens_q[1 : decodes + 1], parts.cu_seqlens_q[decodes + 1 :] = np.arange(1, decodes + 1), decodes
    for each in (parts.logits_indices, parts.sampling_rows, parts.first_logits):
        each[:decodes] = np.arange(decodes)
    return numbers


class BlockTableMirror:
    """The host's copy of the block tables on the device; computes the changes that a step must make there. Engine
    thread only.
    """

    def __init__(self, num_slots: int, width: int, *, parts: int = 0) -> None:
        """`parts`: blocks of a page, whose tables come after those of the blocks, and after the padding slot's; 0:
        there are no pages.
        """
        self._width = width
        self._parts = parts
        self._num_slots = num_slots
        self.forget()

    def changes(self, step: RowColumns) -> TableChanges:
        """The changes that a step's rows need; usually none. Updates the host's copy as if the step had made the
        changes: call `forget` if the step fails.
        """
        indices: list[int] = []
        block_ids: list[int] = []
        groups = [(self._held, step.block_table, 0, self._width)]
        if self._parts:
            first = (self._num_slots + 1) * self._width
            groups.append((self._held_pages, step.window_table, first, self._width * self._parts))
        for held_tables, tables, first, width in groups:
            others = map(is_not, map(held_tables.__getitem__, step.slot), tables)
            for slot, block_table in compress(zip(step.slot, tables, strict=True), others):
                held = held_tables[slot]
                # rule: block-table-belongs-to-its-slots-owner
                kept = len(held) if block_table[: len(held)] == held else 0  # 0: another request has the slot now
                base = first + slot * width
                indices.extend(range(base + kept, base + len(block_table)))
                block_ids.extend(block_table[kept:])
                held_tables[slot] = block_table
        return TableChanges.of(indices, block_ids) if indices else NO_CHANGES

    def forget(self) -> None:
        """Discard the host's copy, so that the next steps write the device's block tables completely."""
        self._held: list[tuple[int, ...]] = [()] * self._num_slots
        self._held_pages: list[tuple[int, ...]] = [()] * self._num_slots


def keys_that_fit(keys: Sequence[GraphKey], decodes: int, chunks: int, tokens: int, drafts: int = 0) -> list[GraphKey]:
    """The keys that fit a batch with these numbers, the key with the least padding first. Does not check the total
    number of drafts, see `GraphKey.all_drafts`.
    """
    return sorted(
        (key for key in keys if key.fits(decodes, chunks, tokens, drafts)),
        key=lambda key: (key.sizes.num_tokens, key),
    )


class PromptPart(NamedTuple):
    """Logits of one row: of the positions from `start` on, which give the log-probabilities of the tokens behind them.

    targets   ids of these tokens
    top       requested number of alternatives for each
    """

    request_id: RequestId
    start: int
    targets: tuple[int, ...]
    top: int


class PromptLogits(NamedTuple):
    """The positions of a step whose logits are computed only for log-probabilities of prompts.

    indices   packed positions, of all parts in order
    """

    parts: tuple[PromptPart, ...]
    indices: npt.NDArray[np.int64]

    @property
    def targets(self) -> list[int]:
        """Ids of the tokens behind these positions."""
        return [token for part in self.parts for token in part.targets]


class PromptSlots:
    """The prompts of request slots whose log-probabilities are wanted. A request that resumes with outputs has them
    already.
    """

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[tuple[int, ...], int]] = {}

    def begin(self, slot: int, start: RowStart) -> None:
        """Another request has the slot from the next launched step on."""
        if start.sampling.prompt_logprobs >= 0 and not start.outputs:
            self._prompts[slot] = start.prompt, start.sampling.prompt_logprobs
        else:
            self._prompts.pop(slot, None)  # rule: slot-forgets-the-last-owners-prompt

    def wanted(self, batch: BatchPlan) -> PromptLogits | None:
        """The positions of this step; nearly always None."""
        if not self._prompts or batch.num_decodes == batch.num_rows:
            return None
        parts: list[PromptPart] = []
        indices: list[int] = []
        packed = batch.num_decodes + sum(batch.columns.drafts)
        for row in batch.prefill_rows:
            if (found := self._prompts.get(row.slot)) is not None:
                prompt, top = found
                targets = prompt[row.min_start + 1 : row.stop + 1]
                parts.append(PromptPart(row.request_id, row.min_start, targets, top))
                indices += range(packed, packed + len(targets))
            packed += row.num_tokens
        return PromptLogits(tuple(parts), np.array(indices, np.int64)) if indices else None
