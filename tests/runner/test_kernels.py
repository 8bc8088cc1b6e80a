"""What captured passes compute by kernels of ours is what torch computes. On a GPU if there is one, else in Triton's
interpreter.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from test_draws import HIDDEN, MAX_LEN, begun, computed, random_batch
from test_frame import BLOCK_TOKENS, ROWS, WIDTH
from test_frame import random_batch as batch_within_bounds

from sidestream.kv.layout import KVLayout
from sidestream.runner.draws import SamplingMode, _advance
from sidestream.runner.frame import GraphInputs, GraphKey, TableChanges, pack
from sidestream.runner.hidden_states import FROM_ROW, NOTHING, HiddenStates, PackedRows
from sidestream.runner.state import DecodeState

pytest.importorskip(
    "triton", reason="triton is not installed: it comes with torch on Linux x86-64, or with the dev extra"
)

from sidestream.runner import launch

HERE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if HERE == "cuda" else []
SEEDS = range(80 if HERE == "cuda" else 6)


def framed(numbers: object, shape: GraphKey, device: str) -> GraphInputs:
    buffer = torch.as_tensor(numbers).to(device)
    return GraphInputs(shape, buffer, *torch.split(buffer, shape.sizes))


def over_there(state: DecodeState) -> DecodeState:
    """The same where kernels run."""
    copy = DecodeState(
        state.num_slots,
        state.vocab_size,
        device=HERE,
        max_len=max(0, state.history.shape[1] - 1),
        hidden_size=state.hidden.shape[1],
    )
    copy.hold_tables(state.tables.shape[1])
    for name in ("last", "lengths", "tables", "history", "hidden"):
        getattr(copy, name).copy_(getattr(state, name))
    copy.rules.numbers.copy_(state.rules.numbers)
    for mine, given in zip(copy.seen_tables(), state.seen_tables(), strict=True):
        mine.copy_(given)
    return copy


def equal(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got.cpu(), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_inputs_of_a_frame(seed: int, drafts: int) -> None:
    rng, draws = random.Random(seed), torch.Generator().manual_seed(seed)
    state, shape = DecodeState(ROWS, 300), GraphKey(9, rng.choice([0, 60, 300]), drafts)
    state.hold_tables(rng.choice([WIDTH, 200]))
    state.last.copy_(torch.arange(ROWS + 1) + 50)
    state.tables.copy_(torch.randint(500, state.tables.shape, generator=draws))
    batch = batch_within_bounds(rng, drafts)
    if not shape.tokens:
        batch = replace(batch, rows=tuple(row for row in batch.rows if row.tokens is None))
    for row in batch.rows:
        state.lengths[row.row] = 27 if row.is_certain else rng.randint(row.min_start, row.stop - row.num_tokens)
    numbers = pack(batch, shape, padding_slot=state.padding_slot, block_tokens=BLOCK_TOKENS)
    proposed = torch.randint(300, (ROWS + 1, drafts), generator=draws) if drafts else None

    wanted = framed(numbers, shape, "cpu").inputs(state, BLOCK_TOKENS, proposed)
    given = None if proposed is None else proposed.to(HERE)
    for got, expected in zip(
        launch.inputs(framed(numbers, shape, HERE), over_there(state), BLOCK_TOKENS, given), wanted, strict=True
    ):
        equal(got, expected)


@pytest.mark.parametrize("count", [0, 3, 200])
def test_changes_of_tables(count: int) -> None:
    state = DecodeState(ROWS, 10)
    state.hold_tables(WIDTH)
    there = over_there(state)
    places = torch.full((200,), -1)
    places[torch.randperm(200)[:count]] = torch.randperm(ROWS * WIDTH)[:count] if count < ROWS * WIDTH else -1
    blocks = torch.arange(200) + 7

    state.place(places, blocks)
    launch.place(places.to(HERE), blocks.to(HERE), there.tables)

    equal(there.tables, state.tables)


@pytest.mark.parametrize(("drafts", "counted"), [(0, False), (3, False), (0, True)])
@pytest.mark.parametrize("seed", SEEDS)
def test_rows_go_on_by_what_was_drawn_h19_h18(seed: int, drafts: int, counted: bool) -> None:
    rng = random.Random(seed)
    hidden, shape = drafts > 0 and seed % 2 == 0, GraphKey(9, 60, drafts)
    state = begun(MAX_LEN if drafts else 0, HIDDEN if hidden else 0, SamplingMode.PENALISED)
    for row in range(ROWS):
        state.lengths[row] = 3
    batch = random_batch(rng, drafts)
    left = computed(shape, batch, seed, hidden=hidden, padded=True)
    tokens = left.logits.nan_to_num().argmax(-1)
    numbers = pack(batch, shape, padding_slot=state.padding_slot, block_tokens=BLOCK_TOKENS)
    there = over_there(state)
    before = there.last[state.padding_slot].item()
    moved = left._replace(
        positions=left.positions.to(HERE),
        hidden=None if left.hidden is None else left.hidden.to(HERE),
        proposed=None if left.proposed is None else left.proposed._replace(tokens=left.proposed.tokens.to(HERE)),
    )

    wanted = _advance(framed(numbers, shape, "cpu"), left, tokens, state, counted=counted)
    got = launch.advance(framed(numbers, shape, HERE), moved, tokens.to(HERE), there, counted=counted)

    equal(got, wanted)
    for name in ("last", "lengths", "history", "hidden"):
        mine, theirs = getattr(there, name)[:ROWS], getattr(state, name)[:ROWS]
        if name == "history" and drafts:
            mine, theirs = mine[:, :-1], theirs[:, :-1]  # the last column takes what is thrown away
        equal(mine, theirs)
    equal(there.seen_tables()[0][:ROWS], state.seen_tables()[0][:ROWS])
    assert there.last[state.padding_slot].item() == before  # padding does not even write to nobody


@pytest.mark.parametrize("seed", SEEDS)
def test_hidden_states_before_each_token_and_what_is_kept_of_them_h15(seed: int) -> None:
    rng, draws = random.Random(seed), torch.Generator().manual_seed(seed)
    blocks, size, hidden_size = 20, 4, rng.choice([2, 200])
    layout = KVLayout(
        num_layers=2 + -(-hidden_size // 16), num_kv_heads=1, head_dim=2, block_tokens=size, dtype="float32"
    )
    assert layout.layers_for(hidden_size) < layout.num_layers
    kv = torch.randn(layout.shape(blocks + 1), generator=draws)
    state = DecodeState(ROWS, 10, hidden_size=hidden_size)
    state.hidden.copy_(torch.randn(state.hidden.shape, generator=draws))
    lengths = [rng.choice([0, 1, 1, 2, 7]) for _ in range(rng.choice([3, ROWS]))]
    padding = rng.choice([0, 5])
    count = sum(lengths) + padding
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    numbers = torch.tensor(
        [row if length else ROWS for row, length in zip(rng.sample(range(ROWS), len(lengths)), lengths, strict=True)]
    )
    origins = torch.tensor([rng.choice([FROM_ROW, NOTHING, rng.randrange(blocks)]) for _ in lengths])
    positions = torch.randint(40, (count,), generator=draws)
    slots = torch.tensor([*(rng.sample(range(blocks), min(blocks, count)) * 10)[:count]]) * size + positions % size
    slots[torch.rand(count, generator=draws) < 0.3] = -1
    slots[blocks:] = -1  # each block at most once
    hidden = torch.randn(count, hidden_size, generator=draws)
    there_kv, there = kv.clone().to(HERE), over_there(state)
    rows, rows_there = (
        PackedRows(bounds, numbers, origins),
        PackedRows(bounds.to(HERE), numbers.to(HERE), origins.to(HERE)),
    )
    ours, theirs = HiddenStates(kv, layout, state), HiddenStates(there_kv, layout, there)
    if not count:
        return

    got = launch.before(hidden.to(HERE), rows_there, there.hidden, theirs._by_block)
    equal(got[: sum(lengths)], ours.before(hidden, rows)[: sum(lengths)])

    ours.keep(hidden, rows, positions=positions, slots=slots)
    launch.keep(
        hidden.to(HERE),
        rows_there,
        there.hidden,
        theirs._by_block,
        positions=positions.to(HERE),
        slots=slots.to(HERE),
        block_tokens=size,
    )
    equal(there.hidden[:ROWS], state.hidden[:ROWS])
    equal(there_kv[:blocks], kv[:blocks])


@pytest.mark.parametrize("padded", [True, False])
def test_one_token_of_each_row_goes_where_its_table_says_and_no_further_than_it_has_room_h11(padded: bool) -> None:
    draws = torch.Generator().manual_seed(5)
    tables = torch.randint(500, (9, WIDTH), generator=draws, dtype=torch.int32)
    positions, last = (torch.randint(WIDTH * BLOCK_TOKENS, (9,), generator=draws) for _ in range(2))
    nobody = torch.arange(9) % 3 == 0
    there = (part.to(HERE) for part in (tables, positions, last))

    slots, lengths = launch.one_token_each(*there, nobody.to(HERE) if padded else None, block_tokens=BLOCK_TOKENS)

    for row in range(9):
        at = min(int(positions[row]), int(last[row]))
        slot = int(tables[row, at // BLOCK_TOKENS]) * BLOCK_TOKENS + at % BLOCK_TOKENS
        assert (slots[row], lengths[row]) == ((-1, 0) if padded and nobody[row] else (slot, at + 1))


def test_a_frames_changes_are_part_of_its_numbers() -> None:
    numbers = pack(
        random_batch(random.Random(1), 0),
        GraphKey(9, 60),
        padding_slot=ROWS,
        block_tokens=4,
        changes=TableChanges([5, 9], [70, 71]),
    )
    frame = framed(numbers, GraphKey(9, 60), "cpu")
    assert frame.places.tolist() == [5, 9] + [-1] * (GraphKey(9, 60).rows - 2)
    assert frame.blocks[:2].tolist() == [70, 71]


@pytest.mark.parametrize("seed", SEEDS)
def test_where_rows_stand_that_are_to_be_drafted_for(seed: int) -> None:
    rng, draws = random.Random(seed), torch.Generator().manual_seed(seed)
    state, shape = DecodeState(ROWS, 300, hidden_size=rng.choice([0, 5, 200])), GraphKey(9, 0, 3)
    state.hold_tables(rng.choice([WIDTH, 200]))
    state.tables.copy_(torch.randint(500, state.tables.shape, generator=draws))
    state.hidden.copy_(torch.randn(state.hidden.shape, generator=draws))
    state.last.copy_(torch.arange(ROWS + 1) + 50)
    batch = batch_within_bounds(rng, 3)
    batch = replace(batch, rows=tuple(row for row in batch.rows if row.tokens is None))
    for row in batch.rows:
        state.lengths[row.row] = 27 if row.is_certain else rng.randint(row.min_start, row.stop - row.num_tokens)
    numbers = pack(batch, shape, padding_slot=state.padding_slot, block_tokens=BLOCK_TOKENS)

    wanted = framed(numbers, shape, "cpu").standing(state, shape.decodes)
    for got, expected in zip(launch.standing(framed(numbers, shape, HERE), over_there(state)), wanted, strict=True):
        equal(got, expected)
