"""What a step declares at its start, before any of its layers waits for a load."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sidestream.runner.accesses import StepAccesses
from sidestream.runner.executor import StepTracing
from sidestream.types import BatchPlan, RowPlan
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.kv.state_layout import StateLayout, StateRegion, StateTensor
from sidestream_kv.types import Access

LAYOUT = KVLayout(2, 1, 2, 4, "float32")
SIZE = LAYOUT.block_bytes


def row(number: int, blocks: tuple[int, ...], *, start: int, stop: int, drafts: int) -> RowPlan:
    return RowPlan(
        request_id=number,
        slot=number,
        epoch=0,
        min_start=start,
        stop=stop,
        tokens=None,
        block_table=blocks,
        samples=True,
        min_output_index=0,
        drafts=drafts,
    )


DRAFTING = row(0, (3, 5), start=5, stop=8, drafts=2)
LOADING = row(1, (7,), start=2, stop=3, drafts=0)


def declared(rows: tuple[RowPlan, ...], *, gated: bool) -> list[Access]:
    """The accesses that a step of these rows declares when it begins. Their positions are exact."""
    found: list[Access] = []
    stream: Any = SimpleNamespace(touch=lambda accesses: found.extend(accesses()))
    lengths = torch.tensor([row.min_start for row in rows])
    state: Any = SimpleNamespace(lengths=lengths)
    tracing = StepTracing(stream, "kv", LAYOUT, None, None, None, state, None, True)
    tracing.at_start(BatchPlan(rows, any(row.drafts for row in rows)), gated=gated)
    return found


def whole(block: int, *, write: bool) -> Access:
    return Access("kv", block * SIZE, (block + 1) * SIZE, write)


def test_a_step_that_waits_for_loads_declares_only_the_kv_of_its_drafts_at_first() -> None:
    """Drafting reads and writes KV before the first gate, but no block that is being loaded."""
    assert declared((DRAFTING, LOADING), gated=True) == [whole(3, write=False), whole(5, write=True)]


def test_a_step_without_loads_declares_all_kv_at_its_start() -> None:
    expected = [whole(3, write=False), whole(5, write=True), whole(7, write=True)]
    assert declared((DRAFTING, LOADING), gated=False) == expected


def test_layers_with_a_window_declare_no_block_before_it() -> None:
    layout = KVLayout(3, 1, 2, 4, "float32", windows=(0, 5))
    layer = layout.layer_bytes
    # A token at position 9 attends to positions from 5 on: layer 1 does not read block 3, and reads a part of block 5.
    step = StepAccesses("kv", None, (row(0, (3, 5, 7), start=9, stop=10, drafts=0),), layout, None)
    assert step.layers(range(1, 2)) == [
        Access("kv", 16 * layer, 17 * layer, False),
        Access("kv", 22 * layer, 23 * layer, True),
    ]
    assert {access.start // layer for access in step.all()} == {9, 11, 15, 16, 17, 21, 22, 23}
    (edge,) = (row(0, (3, 5, 7), start=start, stop=start + 1, drafts=0) for start in (8,))
    assert len(StepAccesses("kv", None, (edge,), layout, None).layers(range(1, 2))) == 2  # from position 4 on


@pytest.mark.parametrize("gated", [False, True])
def test_a_step_that_only_loads_declares_no_kv_at_its_start(gated: bool) -> None:
    assert declared((LOADING,), gated=gated) == []


def test_accesses_to_the_scratch_block_and_reserved_states_are_declared() -> None:
    region = StateRegion(StateLayout((StateTensor(0, "recurrent", 0, (4,), "float32"),), 1, "float32"), SIZE, 10, 2)
    found = StepAccesses("kv", 9, (), LAYOUT, region).all()
    assert found == [
        whole(9, write=True),
        Access("kv", *region.span(2), write=False),
        Access("kv", *region.span(3), write=True),
    ]
