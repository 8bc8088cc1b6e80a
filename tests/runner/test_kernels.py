"""The operations of a step by Triton kernels are those by torch. On a GPU if there is one, else in Triton's
interpreter.
"""

from __future__ import annotations

import random

import pytest
import torch
from test_sampler import HIDDEN, MAX_LEN, begun, forward_output
from test_sampler import random_batch as certain_batch
from test_step_inputs import BLOCK_TOKENS, SLOTS, WIDTH, random_batch

from sidestream.ops import Ops
from sidestream.ops.interface import FROM_SLOT, ZEROS, DraftRows, PackedRows, ResolvedInputs
from sidestream.runner.forward import HiddenStates
from sidestream.runner.sampler import SamplingMode
from sidestream.runner.state import DecodeState
from sidestream.runner.step_inputs import GraphKey, InputSizes, StepInputs, pack
from sidestream.types import BatchPlan
from sidestream_kv.kv.layout import KVLayout

pytest.importorskip(
    "triton", reason="triton is not installed: it comes with torch on Linux x86-64, or with the dev extra"
)

from sidestream.ops.triton_ops import TritonOps

HERE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if HERE == "cuda" else []
SEEDS = range(80 if HERE == "cuda" else 6)


def inputs_of(batch: BatchPlan, sizes: InputSizes, device: str) -> StepInputs:
    numbers = pack(batch, sizes, padding_slot=SLOTS, block_tokens=BLOCK_TOKENS)
    return StepInputs.of(torch.from_numpy(numbers).to(device), sizes, table_width=WIDTH, padded=True)


def sizes_of(batch: BatchPlan, key: GraphKey, seed: int) -> InputSizes:
    """Of an eager or of a captured step."""
    return InputSizes.of(batch) if seed % 3 == 0 else key.sizes


def over_there(state: DecodeState) -> DecodeState:
    """The same where kernels run."""
    copy = DecodeState(
        state.num_slots,
        state.vocab_size,
        device=HERE,
        table_width=state.block_tables.shape[1],
        max_len=max(0, state.history.shape[1] - 1),
        hidden_size=state.hidden.shape[1],
    )
    for name in ("last_tokens", "lengths", "block_tables", "history", "hidden"):
        getattr(copy, name).copy_(getattr(state, name))
    copy.rules.numbers.copy_(state.rules.numbers)
    for mine, given in zip(copy.seen_tables(), state.seen_tables(), strict=True):
        mine.copy_(given)
    return copy


def equal(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got.cpu(), wanted, rtol=0, atol=0, equal_nan=True)


def decode_state(rng: random.Random, draws: torch.Generator, batch: BatchPlan, hidden_size: int = 0) -> DecodeState:
    """A state in which the rows of a batch lie somewhere in their bounds."""
    state = DecodeState(SLOTS, 300, table_width=rng.choice([WIDTH, 200]), hidden_size=hidden_size)
    state.last_tokens.copy_(torch.arange(SLOTS + 1) + 50)
    state.block_tables.copy_(torch.randint(500, state.block_tables.shape, generator=draws))
    state.hidden.copy_(torch.randn(state.hidden.shape, generator=draws))
    for row in batch.rows:
        state.lengths[row.slot] = 27 if row.is_certain else rng.randint(row.min_start, row.stop - row.num_tokens)
    return state


def test_every_operation_has_a_kernel() -> None:
    """None is inherited: the host reads device values in some operations of torch."""
    assert {name for name in vars(Ops) if not name.startswith("__")} <= vars(TritonOps).keys()


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_kernels_resolve_step_inputs_as_torch_does(seed: int, drafts: int) -> None:
    rng, draws = random.Random(seed), torch.Generator().manual_seed(seed)
    key, batch = GraphKey(9, rng.choice([0, 60, 300]), drafts), random_batch(rng, drafts)
    if not key.tokens:
        batch = BatchPlan([row for row in batch.rows if row.tokens is None], batch.speculates)
    state, sizes = decode_state(rng, draws, batch), sizes_of(batch, key, seed)
    width = rng.choice([3, state.block_tables.shape[1]])
    proposed = torch.randint(300, (SLOTS + 1, drafts), generator=draws) if drafts else None

    def resolve(ops: Ops, state: DecodeState, device: str) -> ResolvedInputs:
        inputs = inputs_of(batch, sizes, device)
        return ops.resolve_inputs(
            inputs.tokens,
            inputs.positions,
            inputs.token_slots,
            inputs.kv_lens,
            inputs.slots,
            last_tokens=state.last_tokens,
            lengths=state.lengths,
            block_tables=state.block_tables,
            drafts=None if proposed is None else proposed.to(device),
            block_tokens=BLOCK_TOKENS,
            width=width,
        )

    for got, wanted in zip(resolve(TritonOps(), over_there(state), HERE), resolve(Ops(), state, "cpu"), strict=True):
        equal(got, wanted)


@pytest.mark.parametrize("count", [0, 3, 200])
def test_kernels_update_block_tables_as_torch_does(count: int) -> None:
    state = DecodeState(SLOTS, 10, table_width=WIDTH)
    there = over_there(state)
    indices = torch.full((200,), -1)
    indices[torch.randperm(200)[:count]] = torch.randperm(SLOTS * WIDTH)[:count] if count < SLOTS * WIDTH else -1
    block_ids = torch.arange(200) + 7

    Ops().update_block_tables(indices, block_ids, state.block_tables)
    TritonOps().update_block_tables(indices.to(HERE), block_ids.to(HERE), there.block_tables)

    equal(there.block_tables, state.block_tables)


@pytest.mark.parametrize(("drafts", "counted"), [(0, False), (3, False), (0, True), (3, True)])
@pytest.mark.parametrize("seed", SEEDS)
def test_kernels_advance_slots_by_the_sampled_tokens_h19_h18(seed: int, drafts: int, counted: bool) -> None:
    rng = random.Random(seed)
    hidden, key = drafts > 0 and seed % 2 == 0, GraphKey(9, 60, drafts)
    state = begun(MAX_LEN if drafts else 0, HIDDEN if hidden else 0, SamplingMode.PENALISED)
    for slot in range(SLOTS):
        state.lengths[slot] = 3
    batch = certain_batch(rng, drafts)
    sizes = sizes_of(batch, key, seed)
    if not sizes.logits:
        return
    output = forward_output(sizes, batch, seed, hidden=hidden)
    tokens = output.logits.nan_to_num().argmax(-1)
    there = over_there(state)
    before = there.last_tokens[state.padding_slot].item()

    def advance(ops: Ops, state: DecodeState, device: str) -> torch.Tensor:
        inputs = inputs_of(batch, sizes, device)
        return ops.advance(
            tokens.to(device),
            output.positions.to(device),
            None if output.proposed is None else output.proposed.tokens.to(device),
            None if output.hidden is None else output.hidden.to(device),
            state.slot_tensors(counted=counted),
            sampling_rows=inputs.sampling_rows,
            first_logits=inputs.first_logits,
            slots=inputs.slots,
            cu_seqlens_q=inputs.cu_seqlens_q,
            decodes=sizes.decodes,
        )

    equal(advance(TritonOps(), there, HERE), advance(Ops(), state, "cpu"))
    for name in ("last_tokens", "lengths", "history", "hidden"):
        mine, theirs = getattr(there, name)[:SLOTS], getattr(state, name)[:SLOTS]
        if name == "history" and drafts:
            mine, theirs = mine[:, :-1], theirs[:, :-1]  # the last column takes writes that count for nothing
        equal(mine, theirs)
    equal(there.seen_tables()[0][:SLOTS], state.seen_tables()[0][:SLOTS])
    assert there.last_tokens[state.padding_slot].item() == before  # padding does not even write to its own slot


@pytest.mark.parametrize("seed", SEEDS)
def test_kernels_read_and_keep_hidden_states_as_torch_does_h15(seed: int) -> None:
    rng, draws = random.Random(seed), torch.Generator().manual_seed(seed)
    blocks, size, hidden_size = 20, 4, rng.choice([2, 200])
    layout = KVLayout(
        num_layers=2 + -(-hidden_size // 16), num_kv_heads=1, head_dim=2, block_tokens=size, dtype="float32"
    )
    assert layout.layers_for(hidden_size) < layout.num_layers
    kv = torch.randn(layout.shape(blocks + 1), generator=draws)
    state = DecodeState(SLOTS, 10, hidden_size=hidden_size)
    state.hidden.copy_(torch.randn(state.hidden.shape, generator=draws))
    lengths = [rng.choice([0, 1, 1, 2, 7]) for _ in range(rng.choice([3, SLOTS]))]
    padding = rng.choice([0, 5])
    count = sum(lengths) + padding
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    numbers = torch.tensor(
        [row if length else SLOTS for row, length in zip(rng.sample(range(SLOTS), len(lengths)), lengths, strict=True)]
    )
    hidden_sources = torch.tensor([rng.choice([FROM_SLOT, ZEROS, rng.randrange(blocks)]) for _ in lengths])
    positions = torch.randint(40, (count,), generator=draws)
    slots = torch.tensor([*(rng.sample(range(blocks), min(blocks, count)) * 10)[:count]]) * size + positions % size
    slots[torch.rand(count, generator=draws) < 0.3] = -1
    slots[blocks:] = -1  # each block at most once
    hidden = torch.randn(count, hidden_size, generator=draws)
    there_kv, there = kv.clone().to(HERE), over_there(state)
    rows, rows_there = (
        PackedRows(bounds, numbers, hidden_sources),
        PackedRows(bounds.to(HERE), numbers.to(HERE), hidden_sources.to(HERE)),
    )
    ours, theirs = (HiddenStates(kv, layout, state, Ops()), HiddenStates(there_kv, layout, there, TritonOps()))
    if not count:
        return

    got = theirs.previous(hidden.to(HERE), rows_there)
    equal(got[: sum(lengths)], ours.previous(hidden, rows)[: sum(lengths)])

    ours.keep(hidden, rows, positions=positions, slot_mapping=slots)
    theirs.keep(hidden.to(HERE), rows_there, positions=positions.to(HERE), slot_mapping=slots.to(HERE))
    equal(there.hidden[:SLOTS], state.hidden[:SLOTS])
    equal(there_kv[:blocks], kv[:blocks])


def test_drafts_are_written_by_the_block_table_within_the_bounds_of_the_row_h11() -> None:
    draws = torch.Generator().manual_seed(5)
    tables = torch.randint(500, (9, WIDTH), generator=draws, dtype=torch.int32)
    positions, bounds = (torch.randint(WIDTH * BLOCK_TOKENS, (9,), generator=draws) for _ in range(2))
    padding = torch.arange(9) % 3 == 0
    there = [part.to(HERE) for part in (tables, positions, bounds, padding)]

    for ops, given in ((TritonOps(), there), (Ops(), [tables, positions, bounds, padding])):
        slot_mapping, kv_lens = ops.draft_slots(*given, block_tokens=BLOCK_TOKENS)
        for row in range(9):
            at = min(int(positions[row]), int(bounds[row]))
            slot = int(tables[row, at // BLOCK_TOKENS]) * BLOCK_TOKENS + at % BLOCK_TOKENS
            assert (slot_mapping[row], kv_lens[row]) == ((-1, 0) if padding[row] else (slot, at + 1))


@pytest.mark.parametrize("seed", SEEDS)
def test_kernels_select_the_rows_to_draft_for_as_torch_does(seed: int) -> None:
    rng, draws = random.Random(seed), torch.Generator().manual_seed(seed)
    batch = random_batch(rng, 3)
    batch = BatchPlan([row for row in batch.rows if row.tokens is None], batch.speculates)
    state, sizes = decode_state(rng, draws, batch, rng.choice([0, 5, 200])), sizes_of(batch, GraphKey(9, 0, 3), seed)
    drafting = slice(sizes.first_drafting, sizes.decodes)
    if drafting.start == drafting.stop:
        return

    def rows(ops: Ops, state: DecodeState, device: str) -> DraftRows:
        inputs = inputs_of(batch, sizes, device)
        return ops.draft_rows(
            inputs.positions,
            inputs.cu_seqlens_q[drafting],
            inputs.kv_lens[drafting],
            inputs.slots[drafting],
            last_tokens=state.last_tokens,
            lengths=state.lengths,
            block_tables=state.block_tables,
            hidden=state.hidden,
            width=WIDTH,
        )

    for got, wanted in zip(rows(TritonOps(), over_there(state), HERE), rows(Ops(), state, "cpu"), strict=True):
        equal(got, wanted)
