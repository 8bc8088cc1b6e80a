"""Steps as messages: a round trip gives the same plan, and each step comes once."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream.errors import EngineStopped, InvariantError
from sidestream.processes.frames import FrameDecoder, FrameEncoder
from sidestream.ranks.messages import Step, StepDecoder, StepEncoder, ToRank
from sidestream.types import BatchPlan, RowPlan, RowStart, SamplingSpec
from sidestream_kv.types import LayerGates

_UNGATED = LayerGates(())


def _decode_row(slot: int, length: int, blocks: tuple[int, ...], drafts: int = 0) -> RowPlan:
    return RowPlan(
        request_id=slot,
        slot=slot,
        epoch=0,
        min_start=length,
        stop=length + 1 + drafts,
        tokens=None,
        block_table=blocks,
        samples=True,
        min_output_index=length,
        begin=None,
        drafts=drafts,
        states=None,
    )


def _over_the_wire(step: Step) -> Step:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(step), type=Step)


def test_plans_survive_encoding_and_decoding() -> None:
    """Block tables grow, shrink, are replaced, and stay."""
    draw = random.Random(3)
    encoder, decoder = StepEncoder(), StepDecoder()
    tables = {slot: tuple(draw.sample(range(100), 3)) for slot in range(8)}
    for _ in range(200):
        rows = []
        for slot in sorted(draw.sample(range(8), draw.randint(1, 8))):
            match draw.randrange(4):
                case 0:
                    tables[slot] = (*tables[slot], draw.randrange(100))
                case 1:
                    tables[slot] = tables[slot][: draw.randint(0, len(tables[slot]))]
                case 2:
                    tables[slot] = tuple(draw.sample(range(100), draw.randint(1, 5)))
            row = _decode_row(slot, draw.randint(1, 50), tables[slot], draw.randrange(3))
            rows.append(row)
        for index in range(draw.randint(0, len(rows))):
            tokens = tuple(draw.sample(range(100), 3))
            row = rows[-1 - index]
            rows[-1 - index] = row._replace(tokens=tokens, drafts=0, stop=row.min_start + 3)
        plan = BatchPlan(tuple(rows), draw.random() < 0.5)
        plan = plan.with_self_check() if draw.random() < 0.5 else plan
        assert decoder.decode(_over_the_wire(encoder.encode(plan, (), _UNGATED))) == plan


def test_a_slot_begins_on_every_rank() -> None:
    start = RowStart(SamplingSpec({}, False, {5: 1.0}, 3, 0, (), -1), prompt=(5, 6), outputs=(7,))
    first = _decode_row(2, 2, (9,), 0)._replace(tokens=(6, 7), stop=4, begin=start)
    plan = BatchPlan((_decode_row(1, 4, (3,), 0), first), False)
    assert StepDecoder().decode(_over_the_wire(StepEncoder().encode(plan, (), _UNGATED))).begins == [(2, start)]


def test_a_repeated_or_skipped_step_is_refused() -> None:
    encoder, decoder = StepEncoder(), StepDecoder()
    plan = BatchPlan((_decode_row(0, 4, (1, 2)),), False)
    first, _, third = (encoder.encode(plan, (), _UNGATED) for _ in range(3))
    decoder.decode(first)
    with pytest.raises(InvariantError, match="step 1 came after step 1"):
        decoder.decode(first)
    with pytest.raises(InvariantError, match="step 3 came after step 1"):
        decoder.decode(third)


def test_decode_step_of_32_rows_takes_at_most_2_kb() -> None:
    encoder = StepEncoder()
    tables = {slot: tuple(range(300 * slot, 300 * slot + 250)) for slot in range(32)}

    def size(length: int) -> int:
        rows = tuple(_decode_row(slot, length, tables[slot]) for slot in range(32))
        return len(msgspec.msgpack.encode(encoder.encode(BatchPlan(rows, False), (), _UNGATED)))

    size(4000)
    assert size(4001) <= 2000
    tables = {slot: (*blocks, 20_000 + slot) for slot, blocks in tables.items()}
    assert size(4002) <= 2000


# ------------------------------------------------------------------ any step, as bytes


@st.composite
def _plans(draw: st.DrawFn) -> BatchPlan:
    """A step of any rows: decode rows, also with drafts, and behind them prefill rows, of which some begin."""
    numbers = st.integers(0, 2**31 - 1)
    slots = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True))
    num_decodes = draw(st.integers(0, len(slots)))
    start = RowStart(SamplingSpec({}, False, {5: 1.0}, 3, 0, (), -1), prompt=(5, 6), outputs=(7,))
    rows = []
    for index, slot in enumerate(slots):
        blocks = tuple(draw(st.lists(numbers, min_size=1, max_size=5)))
        row = _decode_row(slot, draw(numbers), blocks, draw(st.integers(0, 3)))
        if index >= num_decodes:
            tokens = tuple(draw(st.lists(numbers, min_size=1, max_size=4)))
            begin = start if draw(st.booleans()) else None
            row = row._replace(tokens=tokens, stop=row.min_start + len(tokens), drafts=0, begin=begin)
        rows.append(row._replace(samples=draw(st.booleans())))
    return BatchPlan(rows, draw(st.booleans()))


def _decoder() -> FrameDecoder:
    return FrameDecoder(msgspec.msgpack.Decoder(ToRank))


@settings(max_examples=50)
@given(st.lists(_plans(), min_size=1, max_size=6), st.data())
def test_steps_are_decoded_equally_for_any_split_of_their_bytes(plans: list[BatchPlan], data: Any) -> None:
    encoder, frames = StepEncoder(), FrameEncoder()
    sent = b"".join(frames.encode(encoder.encode(plan, (), _UNGATED)) for plan in plans)
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=4))), len(sent)]
    receiver, decoder, arrived = _decoder(), StepDecoder(), list[BatchPlan]()
    for begin, end in pairwise(cuts):
        arrived += map(decoder.decode, receiver.feed(sent[begin:end]))
    assert arrived == plans


@settings(max_examples=50)
@given(_plans(), st.data())
def test_a_step_that_lost_bytes_is_refused_or_waited_for(plan: BatchPlan, data: Any) -> None:
    frame = FrameEncoder().encode(StepEncoder().encode(plan, (), _UNGATED))
    kept = data.draw(st.integers(0, len(frame) - 9))
    assert [*_decoder().feed(frame[:kept])] == []
    shorter = (kept).to_bytes(4, "little") + frame[4 : 8 + kept]  # a frame that is whole, with a message that is not
    with pytest.raises(EngineStopped, match="a message cannot be read"):
        list(_decoder().feed(shorter))


_STEP = StepEncoder().encode(BatchPlan((_decode_row(1, 4, (1, 2)), _decode_row(2, 6, (3,)))), (), _UNGATED)
_START = RowStart(SamplingSpec({}, False, {}, 3, 0, (), -1), prompt=(5, 6), outputs=())


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"tables": ((2, 0, (1,)),)}, "step 1 has a block table for row 2 of 2"),
        ({"tables": ((-1, 0, (1,)),)}, "step 1 has a block table for row -1 of 2"),
        ({"tables": ((0, 1, (1,)), (1, 0, (3,)))}, "step 1 keeps 1 of 0 blocks of slot 1"),
        ({"tables": ((0, -1, (1,)), (1, 0, (3,)))}, "step 1 keeps -1 of 0 blocks of slot 1"),
        ({"tables": ((0, 0, (1,)),)}, "step 1 has no block table for slot 2"),
        ({"stops": (5,)}, "step 1 of 2 rows has columns of lengths"),
        ({"drafts": (0, 0, 0)}, "step 1 of 2 rows has columns of lengths"),
        ({"tokens": ((1,), (2,), (3,))}, "step 1 of 2 rows has columns of lengths"),
        ({"begins": ((2, _START),)}, r"step 1 begins rows \[2\] of 2"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_step_whose_parts_do_not_fit_is_refused(changes: dict[str, Any], refusal: str) -> None:
    step = _over_the_wire(msgspec.structs.replace(_STEP, **changes))
    with pytest.raises(InvariantError, match=refusal):
        StepDecoder().decode(step)
