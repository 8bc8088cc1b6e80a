"""Packed inputs of a batch: correct whatever slots and buffer held before, with padding that no row reads."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from sidestream.config import SamplingParams
from sidestream.ops import Ops
from sidestream.ops.interface import FROM_SLOT, ResolvedInputs
from sidestream.runner.state import DecodeState, Uploads
from sidestream.runner.step_inputs import (
    BlockTableMirror,
    GraphKey,
    InputSizes,
    StepInputs,
    TableChanges,
    demand_of,
    hidden_source_of,
    keys_that_fit,
    pack,
)
from sidestream.types import BatchPlan, RowPlan, RowStart

SLOTS, BLOCK_TOKENS, WIDTH = 12, 4, 10
GREEDY = SamplingParams(temperature=0).spec(seed=0, eos_ids=())


def row_plan(
    row: int, start: int, stop: int, *, blocks: tuple[int, ...], decodes: bool, samples: bool = True
) -> RowPlan:
    tokens = None if decodes else tuple(100 + position for position in range(start, stop))
    return RowPlan(row, row, 0, start, stop, tokens, blocks, samples, 0)


def random_batch(rng: random.Random, most: int) -> BatchPlan:
    """Rows with up to `most` drafts, after steps that may have had as many."""
    numbers = rng.sample(range(SLOTS), rng.randint(1, 7))
    decodes = rng.randint(0, len(numbers))
    rows = []
    for at, number in enumerate(numbers):
        start = rng.randrange(0, 25)
        drafts, slack = (rng.randint(0, most), rng.randint(0, most)) if at < decodes else (0, 0)
        stop = start + (1 + drafts + slack if at < decodes else rng.randint(1, 8))
        blocks = tuple(rng.sample(range(500), -(-stop // BLOCK_TOKENS)))
        row = row_plan(
            number, start, stop, blocks=blocks, decodes=at < decodes, samples=at < decodes or rng.random() < 0.7
        )
        begin = RowStart(GREEDY, (1,), ()) if at >= decodes and rng.random() < 0.5 else None
        rows.append(row._replace(drafts=drafts, begin=begin))
    rows[:decodes] = sorted(rows[:decodes], key=lambda row: row.drafts > 0)
    return BatchPlan(tuple(rows), speculates=most > 0)


@dataclass
class Expected:
    """The inputs of a batch without padding, number by number."""

    tokens: list[int]
    positions: list[int]
    slot_mapping: list[int]
    slots: list[int]
    starts: list[int]
    kv_lens: list[int]
    logits_indices: list[int]

    @classmethod
    def of(cls, batch: BatchPlan, state: DecodeState, drafts: torch.Tensor | None) -> Expected:
        it = cls([], [], [], [], [0], [], [])
        for row in batch.rows:
            start = row.min_start if row.is_certain else int(state.lengths[row.slot])
            ids = row.tokens
            if ids is None:
                drafted = [] if drafts is None else drafts[row.slot, : row.drafts].tolist()
                ids = (int(state.last_tokens[row.slot]), *drafted)
            for position, token in enumerate(ids, start):
                it.tokens.append(token)
                it.positions.append(position)
                block = row.block_table[position // BLOCK_TOKENS]
                it.slot_mapping.append(block * BLOCK_TOKENS + position % BLOCK_TOKENS)
                it.slots.append(row.slot)
            it.starts.append(len(it.tokens))
            it.kv_lens.append(start + len(ids))
            if row.samples:
                it.logits_indices += range(len(it.tokens) - 1 - row.drafts, len(it.tokens))
        return it


class Host:
    """Packs batches for one state as an executor does, exact or into the buffer of a key."""

    def __init__(self, width: int = WIDTH) -> None:
        self.state = DecodeState(SLOTS, 300, table_width=width)
        self.state.last_tokens.copy_(torch.arange(SLOTS + 1) + 50)
        self.mirror = BlockTableMirror(SLOTS, width)

    def pack(self, batch: BatchPlan, into: StepInputs | None = None) -> StepInputs:
        sizes = InputSizes.of(batch) if into is None else into.sizes
        changes = self.mirror.changes(batch.columns)
        inside = len(changes.indices) <= sizes.rows
        if not inside:
            indices, block_ids = (torch.from_numpy(part) for part in changes)
            Ops().update_block_tables(indices, block_ids, self.state.block_tables)
        numbers = torch.from_numpy(
            pack(
                batch,
                sizes,
                padding_slot=self.state.padding_slot,
                block_tokens=BLOCK_TOKENS,
                mailbox_offset=640,
                changes=changes if inside else None,
            )
        )
        if into is None:
            width = max(len(row.block_table) for row in batch.rows)
            inputs = StepInputs.of(numbers, sizes, table_width=width)
        else:
            into.buffer.copy_(numbers)
            inputs = into
        Ops().update_block_tables(inputs.table_indices, inputs.block_ids, self.state.block_tables)
        return inputs

    def resolve(self, inputs: StepInputs, drafts: torch.Tensor | None = None) -> ResolvedInputs:
        return Ops().resolve_inputs(
            inputs.tokens,
            inputs.positions,
            inputs.token_slots,
            inputs.kv_lens,
            inputs.slots,
            last_tokens=self.state.last_tokens,
            lengths=self.state.lengths,
            block_tables=self.state.block_tables,
            drafts=drafts,
            block_tokens=BLOCK_TOKENS,
            width=inputs.table_width,
        )

    def place_rows(self, batch: BatchPlan, rng: random.Random) -> None:
        """Each row somewhere in its bounds; where the host knows the start, whatever a failed step left."""
        for row in batch.rows:
            self.state.lengths[row.slot] = (
                27 if row.is_certain else rng.randint(row.min_start, row.stop - row.num_tokens)
            )


def random_drafts(seed: int, most: int) -> torch.Tensor | None:
    return torch.randint(300, (SLOTS + 1, most), generator=torch.Generator().manual_seed(seed)) if most else None


def check_exact(host: Host, batch: BatchPlan, drafts: torch.Tensor | None = None) -> StepInputs:
    """Nothing of exact inputs is padding."""
    inputs = host.pack(batch)
    resolved, expected = host.resolve(inputs, drafts), Expected.of(batch, host.state, drafts)
    for tensor, numbers in (
        (resolved.tokens, expected.tokens),
        (resolved.positions, expected.positions),
        (resolved.slot_mapping, expected.slot_mapping),
        (resolved.kv_lens, expected.kv_lens),
        (inputs.token_slots, expected.slots),
        (inputs.cu_seqlens_q, expected.starts),
        (inputs.logits_indices, expected.logits_indices),
        (inputs.slots, [row.slot for row in batch.rows]),
        (inputs.hidden_sources, [hidden_source_of(row, BLOCK_TOKENS) for row in batch.rows]),
        (inputs.mailbox_offset, [640]),
    ):
        assert (tensor.tolist(), tensor.dtype) == (numbers, torch.int64)
    for row, table in zip(batch.rows, resolved.block_tables.tolist(), strict=True):
        assert table[: len(row.block_table)] == list(row.block_table)
    sampling = [at for at, row in enumerate(batch.rows) if row.samples]
    assert inputs.sampling_rows.tolist() == sampling + [-1] * (len(batch.rows) - len(sampling))
    assert inputs.without_padding() is inputs
    leading = [row.tokens is None and not row.drafts for row in batch.rows]
    assert inputs.sizes.first_drafting == sum(leading)
    return inputs


@pytest.mark.parametrize("drafts", [0, 3])
def test_an_eager_step_has_the_exact_inputs_of_its_batch(drafts: int) -> None:
    for seed in range(100):
        rng, host = random.Random(seed), Host()
        for _ in range(4):
            batch = random_batch(rng, drafts)
            host.place_rows(batch, rng)
            check_exact(host, batch, random_drafts(seed, max(row.drafts for row in batch.rows)))


def test_a_reused_slot_has_no_inputs_of_its_former_owner() -> None:  # H16
    host = Host()
    check_exact(host, batch_of(row_plan(2, 15, 16, blocks=(5, 6, 7, 8), decodes=True)))
    check_exact(host, batch_of(row_plan(2, 0, 2, blocks=(9,), decodes=False)))  # shorter, and others
    # begins as the one before last did; and another block in the middle
    check_exact(host, batch_of(row_plan(2, 4, 5, blocks=(5, 6), decodes=True)))
    check_exact(host, batch_of(row_plan(1, 11, 12, blocks=(1, 2, 3), decodes=True)))
    check_exact(host, batch_of(row_plan(1, 11, 12, blocks=(1, 4, 3), decodes=True)))


def batch_of(*rows: RowPlan) -> BatchPlan:
    return BatchPlan(rows)


def test_block_tables_grow_without_changing_a_step_packed_before() -> None:
    host, blocks = Host(width=300), tuple(range(1, 300))
    first = host.pack(batch_of(row_plan(0, 7, 8, blocks=blocks[:2], decodes=True)))
    kept = first.buffer.tolist()
    for count in (2, 3, 63, 64, 65, 200, 299):
        check_exact(host, batch_of(row_plan(0, 4 * count - 1, 4 * count, blocks=blocks[:count], decodes=True)))
    assert first.buffer.tolist() == kept


def test_inputs_are_fetched_by_one_kernel_with_positions_at_offset_0() -> None:
    """Compiled layers are handed positions, and would be compiled again for another offset into shared memory."""
    host = Host()
    batch = batch_of(row_plan(0, 4, 5, blocks=(3, 1), decodes=True), row_plan(1, 1, 4, blocks=(2,), decodes=False))
    packed = host.pack(batch)
    staging = torch.zeros(1, 2048, dtype=torch.uint8)
    uploads = Uploads(staging=staging, mapped=staging.view(torch.uint8))
    uploads.open(0)
    (buffer,) = uploads.together([packed.buffer])
    assert buffer.equal(packed.buffer)
    resolved = host.resolve(StepInputs.of(buffer, packed.sizes, table_width=2))
    assert resolved.positions.storage_offset() == 0


@pytest.mark.parametrize("drafts", [0, 3])
def test_padding_of_a_captured_step_belongs_to_no_request_h18(drafts: int) -> None:
    for seed in range(50):
        rng, host, key = random.Random(seed), Host(), GraphKey(9, 60, drafts)
        state, sizes = host.state, key.sizes
        inputs = StepInputs.allocate(key, torch.device("cpu"), padding_slot=state.padding_slot, table_width=WIDTH)
        for _ in range(4):  # over one another: what an earlier batch left must not show
            batch = random_batch(rng, drafts)
            host.pack(batch, inputs)
            host.place_rows(batch, rng)
            guesses = random_drafts(seed, drafts)
            tokens, positions, kv_lens, slot_mapping, tables = host.resolve(inputs, guesses)

            expected, decodes = Expected.of(batch, state, guesses), batch.num_decodes
            count = len(expected.tokens)
            assert tokens[:count].tolist() == expected.tokens
            assert positions[:count].tolist() == expected.positions
            assert slot_mapping[:count].tolist() == expected.slot_mapping
            assert slot_mapping[count:].eq(-1).all()
            assert positions[count:].eq(0).all()
            assert inputs.token_slots[count:].eq(state.padding_slot).all()

            starts = inputs.cu_seqlens_q.tolist()
            places = [*range(decodes), *range(key.decodes, key.decodes + len(batch.rows) - decodes)]
            for at, (place, row) in enumerate(zip(places, batch.rows, strict=True)):
                assert starts[place : place + 2] == expected.starts[at : at + 2]
                assert kv_lens[place] == expected.kv_lens[at]
                assert inputs.hidden_sources[place] == hidden_source_of(row, BLOCK_TOKENS)
                held = -(-expected.kv_lens[at] // BLOCK_TOKENS)
                assert tables[place, :held].tolist() == list(row.block_table[:held])
            for place in set(range(sizes.rows)) - set(places):
                assert starts[place] == starts[place + 1]
                assert kv_lens[place] == 0
                assert inputs.hidden_sources[place] == FROM_SLOT
                assert inputs.slots[place] == state.padding_slot
            assert starts[-1] == count
            sampling = len(expected.logits_indices)
            assert inputs.logits_indices[:sampling].tolist() == expected.logits_indices
            assert inputs.logits_indices[sampling:].eq(-1).all()
            drawing = [place for place, row in zip(places, batch.rows, strict=True) if row.samples]
            assert inputs.sampling_rows.tolist() == drawing + [-1] * (sizes.rows - len(drawing))
            assert inputs.mailbox_offset.tolist() == [640]

            exact, without = host.pack(batch), inputs.without_padding()  # as attention by torch takes it
            for name in ("tokens", "positions", "token_slots", "cu_seqlens_q", "kv_lens", "slots", "hidden_sources"):
                assert getattr(without, name).tolist() == getattr(exact, name).tolist(), name
            assert without.logits_indices.tolist() == exact.logits_indices.tolist()
            assert (without.sizes.decodes, without.sizes.num_tokens) == (exact.sizes.decodes, exact.sizes.num_tokens)
            if drafts:
                assert without.sizes.first_drafting == exact.sizes.first_drafting


def test_inputs_that_were_never_filled_are_padding() -> None:
    host = Host()
    inputs = StepInputs.allocate(GraphKey(3, 8), torch.device("cpu"), padding_slot=SLOTS, table_width=WIDTH)
    assert host.resolve(inputs).slot_mapping.eq(-1).all()
    assert inputs.cu_seqlens_q.eq(0).all()
    assert inputs.kv_lens.eq(0).all()
    assert inputs.without_padding().sizes.num_tokens == 0


def test_block_table_changes_are_packed_with_the_inputs() -> None:
    sizes = GraphKey(9, 60).sizes
    changes = TableChanges.of([5, 9], [70, 71])
    numbers = pack(random_batch(random.Random(1), 0), sizes, padding_slot=SLOTS, block_tokens=4, changes=changes)
    inputs = StepInputs.of(torch.from_numpy(numbers), sizes, table_width=WIDTH, padded=True)
    assert inputs.table_indices.tolist() == [5, 9] + [-1] * (sizes.rows - 2)
    assert inputs.block_ids[:2].tolist() == [70, 71]


def test_a_chunk_of_one_token_is_no_decode_row() -> None:
    batch = BatchPlan((row_plan(0, 3, 4, blocks=(1,), decodes=True), row_plan(1, 3, 4, blocks=(2,), decodes=False)))
    assert demand_of(batch) == (1, 1, 1, 0)


def smallest(
    keys: list[GraphKey], decodes: int, chunks: int, tokens: int, drafts: int = 0, together: int = 0
) -> GraphKey | None:
    return next(
        (key for key in keys_that_fit(keys, decodes, chunks, tokens, drafts) if together <= key.all_drafts), None
    )


def test_the_key_with_the_least_padding_is_chosen() -> None:
    keys = GraphKey.all_of(max_rows=40, chunk_tokens=256, max_tokens=300)
    assert smallest(keys, 3, 0, 0) == GraphKey(4)
    assert smallest(keys, 33, 0, 0) == GraphKey(40)
    assert smallest(keys, 40, 0, 0) == GraphKey(40)
    assert smallest(keys, 0, 1, 17) == GraphKey(0, 32)
    assert smallest(keys, 9, 2, 300) == GraphKey(32, 300)
    assert smallest(keys, 41, 0, 0) is None
    assert smallest(keys, 0, 9, 9) == GraphKey(0, 256)  # room for sixteen chunks
    assert smallest(keys, 0, 19, 300) is None
    assert smallest(keys, 0, 1, 301) is None
    assert smallest(keys, 3, 0, 0, 2) is None
    drafting = GraphKey.all_of(max_rows=40, chunk_tokens=256, max_tokens=300, drafts=4)
    assert smallest(drafting, 3, 0, 0) == GraphKey(4)
    assert smallest(drafting, 3, 0, 0, 2) == GraphKey(4, 0, 4)
    assert smallest(drafting, 9, 2, 200, 1) == GraphKey(32, 256, 4)
    assert smallest(drafting, 33, 2, 257, 1) == GraphKey(40, 300, 4)
    assert smallest(drafting, 16, 0, 0, 4, 16) == GraphKey(16, 0, 4, 16)
    assert smallest(drafting, 16, 0, 0, 1, 17) == GraphKey(24, 0, 4, 24)
    assert smallest(drafting, 9, 0, 0, 1, 1) == GraphKey(16, 0, 4, 16)
    assert smallest(drafting, 8, 0, 0, 1, 1) == GraphKey(16, 0, 4, 16)
    assert smallest(drafting, 4, 0, 0, 1, 1) == GraphKey(4, 0, 4)
    assert smallest(drafting, 40, 0, 0, 4, 41) == GraphKey(40, 0, 4)
    assert GraphKey(16, 0, 4, 16).sizes.num_tokens == 32


def test_block_table_changes_cover_new_blocks_and_new_owners() -> None:
    keeper = BlockTableMirror(3, WIDTH)

    def changes(start: int, stop: int, blocks: tuple[int, ...], *, decodes: bool) -> tuple[list[int], list[int]]:
        step = BatchPlan((row_plan(1, start, stop, blocks=blocks, decodes=decodes),))
        indices, block_ids = keeper.changes(step.columns)
        return indices.tolist(), block_ids.tolist()

    assert changes(0, 8, (7, 8), decodes=False) == ([WIDTH, WIDTH + 1], [7, 8])
    assert changes(8, 9, (7, 8), decodes=True) == ([], [])
    assert changes(8, 9, (7, 8, 3), decodes=True) == ([WIDTH + 2], [3])
    assert changes(0, 4, (5,), decodes=False) == ([WIDTH], [5])
    keeper.forget()
    assert changes(0, 4, (5,), decodes=False) == ([WIDTH], [5])
