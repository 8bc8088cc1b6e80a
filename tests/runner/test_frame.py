"""Frames: what captured kernels read is what the batch says, and padding is nobody's."""

from __future__ import annotations

import random

import pytest
import torch

from sidestream.config import SamplingParams
from sidestream.kv.layout import KVLayout
from sidestream.runner.frame import BlockTableMirror, GraphInputs, GraphKey, keys_that_fit, pack, shape_of
from sidestream.runner.hidden_states import FROM_ROW, origin_of
from sidestream.runner.inputs import Packer
from sidestream.runner.state import DecodeState
from sidestream.types import BatchPlan, RowPlan, RowStart

ROWS, BLOCK_TOKENS, WIDTH = 12, 4, 10
GREEDY = SamplingParams(temperature=0).spec(seed=0, eos_ids=())
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_tokens=BLOCK_TOKENS, dtype="float32")


def row_plan(
    row: int, start: int, stop: int, *, blocks: tuple[int, ...], decodes: bool, samples: bool = True
) -> RowPlan:
    tokens = None if decodes else tuple(100 + position for position in range(start, stop))
    return RowPlan(row, row, 0, start, stop, tokens, blocks, samples, 0)


def random_batch(rng: random.Random, most: int) -> BatchPlan:
    """Rows with up to `most` drafts, behind steps that may have had as many."""
    numbers = rng.sample(range(ROWS), rng.randint(1, 7))
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


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("seed", range(50))
def test_captured_kernels_read_what_eager_ones_are_given_and_padding_is_nobodys_h18(seed: int, drafts: int) -> None:
    rng = random.Random(seed)
    state = DecodeState(ROWS, 300)
    state.hold_tables(WIDTH)
    state.last.copy_(torch.arange(ROWS + 1) + 50)
    keeper, packer = BlockTableMirror(ROWS, WIDTH), Packer(ROWS, LAYOUT)
    shape = GraphKey(9, 60, drafts)
    frame = GraphInputs.allocate(shape, torch.device("cpu"), padding_slot=state.padding_slot)
    for _ in range(4):  # over one another: what an earlier batch left must not show
        batch = random_batch(rng, shape.drafts)
        changes = keeper.changes(batch.columns)
        if inside := len(changes.places) <= shape.rows:
            state.place_numbers([0], [0])  # nothing else is there before
        else:
            state.place_numbers(*changes)
        given = changes if inside else None
        numbers = pack(
            batch, shape, padding_slot=state.padding_slot, block_tokens=BLOCK_TOKENS, entry=640, changes=given
        )
        frame.buffer.copy_(torch.from_numpy(numbers))
        state.place(frame.places, frame.blocks)
        for row in batch.rows:  # somewhere in its bounds; and where the host knows, whatever a failed step left
            state.lengths[row.row] = 27 if row.is_certain else rng.randint(row.min_start, row.stop - row.num_tokens)
        drafts = (
            torch.randint(300, (ROWS + 1, shape.drafts), generator=torch.Generator().manual_seed(seed))
            if shape.drafts
            else None
        )
        tokens, positions, kv_lens, slots, tables = frame.inputs(state, BLOCK_TOKENS, drafts)

        expected = packer.pack(batch).anchored(state.lengths)
        count, decodes = len(expected.tokens), len(expected.state_rows)
        wanted = expected.tokens.clone()
        wanted[expected.from_state] = state.last_tokens(expected.state_rows)
        if drafts is not None:
            wanted[expected.drafted] = torch.cat([drafts[row.row, : row.drafts] for row in batch.rows])
        assert tokens[:count].tolist() == wanted.tolist()
        assert positions[:count].tolist() == expected.positions.tolist()
        assert slots[:count].tolist() == expected.slots.tolist()
        assert slots[count:].eq(-1).all()
        assert positions[count:].eq(0).all()
        assert frame.token_rows[count:].eq(state.padding_slot).all()

        starts = frame.cu_seqlens_q.tolist()
        places = [*range(decodes), *range(shape.decodes, shape.decodes + len(batch.rows) - decodes)]
        for at, place in enumerate(places):
            assert starts[place : place + 2] == list(expected.cu_seqlens_q[at : at + 2])
            assert kv_lens[place] == expected.kv_lens[at]
            assert frame.origins[place] == origin_of(batch.rows[at], BLOCK_TOKENS)
            held = -(-expected.kv_lens[at] // BLOCK_TOKENS)
            assert tables[place, :held].tolist() == expected.block_tables[at, :held].tolist()
        for place in set(range(shape.rows)) - set(places):
            assert starts[place] == starts[place + 1]
            assert kv_lens[place] == 0
            assert frame.origins[place] == FROM_ROW
            assert frame.rows[place] == state.padding_slot
        assert starts[-1] == count
        sampling = len(expected.logit_rows)
        assert frame.logit_rows[:sampling].tolist() == expected.logit_rows.tolist()
        assert frame.logit_rows[sampling:].eq(-1).all()
        drawing = [place for place, row in zip(places, batch.rows, strict=True) if row.samples]
        assert frame.draws.tolist() == drawing + [-1] * (shape.rows - len(drawing))
        assert frame.entry.tolist() == [640]


def test_a_frame_that_was_never_filled_is_padding() -> None:
    shape = GraphKey(3, 8)
    frame = GraphInputs.allocate(shape, torch.device("cpu"), padding_slot=ROWS)
    state = DecodeState(ROWS, 10)
    state.hold_tables(WIDTH)
    assert frame.inputs(state, BLOCK_TOKENS).slots.eq(-1).all()
    assert frame.cu_seqlens_q.eq(0).all()
    assert frame.kv_lens.eq(0).all()


def test_a_chunk_of_one_token_is_no_row_that_decodes() -> None:
    batch = BatchPlan((row_plan(0, 3, 4, blocks=(1,), decodes=True), row_plan(1, 3, 4, blocks=(2,), decodes=False)))
    assert shape_of(batch) == (1, 1, 1, 0)


def smallest(
    shapes: list[GraphKey], decodes: int, chunks: int, tokens: int, drafts: int = 0, together: int = 0
) -> GraphKey | None:
    return next(
        (shape for shape in keys_that_fit(shapes, decodes, chunks, tokens, drafts) if together <= shape.all_drafts),
        None,
    )


def test_the_shape_with_the_least_padding_is_chosen() -> None:
    shapes = GraphKey.all_of(max_rows=40, chunk_tokens=256, max_tokens=300)
    assert smallest(shapes, 3, 0, 0) == GraphKey(4)
    assert smallest(shapes, 33, 0, 0) == GraphKey(40)
    assert smallest(shapes, 40, 0, 0) == GraphKey(40)
    assert smallest(shapes, 0, 1, 17) == GraphKey(0, 32)
    assert smallest(shapes, 9, 2, 300) == GraphKey(32, 300)
    assert smallest(shapes, 41, 0, 0) is None
    assert smallest(shapes, 0, 9, 9) == GraphKey(0, 256)  # room for sixteen chunks
    assert smallest(shapes, 0, 19, 300) is None
    assert smallest(shapes, 0, 1, 301) is None
    assert smallest(shapes, 3, 0, 0, 2) is None
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
    assert GraphKey(16, 0, 4, 16).num_tokens == 32


def test_tables_change_where_a_row_got_blocks_or_another_owner() -> None:
    keeper = BlockTableMirror(3, WIDTH)
    assert keeper.changes(BatchPlan((row_plan(1, 0, 8, blocks=(7, 8), decodes=False),)).columns) == (
        [WIDTH, WIDTH + 1],
        [7, 8],
    )
    assert keeper.changes(BatchPlan((row_plan(1, 8, 9, blocks=(7, 8), decodes=True),)).columns) == ([], [])
    assert keeper.changes(BatchPlan((row_plan(1, 8, 9, blocks=(7, 8, 3), decodes=True),)).columns) == ([WIDTH + 2], [3])
    assert keeper.changes(BatchPlan((row_plan(1, 0, 4, blocks=(5,), decodes=False),)).columns) == ([WIDTH], [5])
    keeper.forget()
    assert keeper.changes(BatchPlan((row_plan(1, 0, 4, blocks=(5,), decodes=False),)).columns) == ([WIDTH], [5])
