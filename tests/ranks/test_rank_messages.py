"""Steps as messages: a round trip gives the same plan, and each step comes once."""

from __future__ import annotations

import random

import msgspec
import pytest

from sidestream.errors import InvariantError
from sidestream.ranks.messages import Step, StepDecoder, StepEncoder
from sidestream.types import BatchPlan, LayerGates, RowPlan, RowStart, SamplingSpec

_UNGATED = LayerGates(())


def _decode_row(slot: int, length: int, blocks: tuple[int, ...], drafts: int = 0) -> RowPlan:
    return RowPlan(
        request_id=slot,
        slot=slot,
        epoch=0,
        min_start=length,
        stop=length + 1 + drafts,
        tokens=None,
        block_ids=blocks,
        samples=True,
        min_output_index=length,
        begin=None,
        drafts=drafts,
        states=None,
    )


def _over_the_wire(step: Step) -> Step:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(step), type=Step)


def test_plans_survive_the_journey() -> None:
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
        plan = plan.run_twice() if draw.random() < 0.5 else plan
        assert decoder.decode(_over_the_wire(encoder.encode(plan, (), _UNGATED))) == plan


def test_a_slot_begins_on_every_rank() -> None:
    start = RowStart(SamplingSpec({}, False, {5: 1.0}, 3, 0, (), -1), prompt=(5, 6), outputs=(7,))
    first = _decode_row(2, 2, (9,), 0)._replace(tokens=(6, 7), stop=4, begin=start)
    plan = BatchPlan((_decode_row(1, 4, (3,), 0), first), False)
    assert StepDecoder().decode(_over_the_wire(StepEncoder().encode(plan, (), _UNGATED))).begins == [(2, start)]


def test_step_that_comes_twice_or_is_skipped_is_refused() -> None:
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
