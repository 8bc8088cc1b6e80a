"""Prefill rows: whole chunks within the budget that decode rows leave."""

from __future__ import annotations

import pytest
from plans import prompt, small_limits, spans
from scheduler_world import World

from sidestream.schedule.limits import Limits
from sidestream.schedule.request import State


def test_a_prompt_is_computed_in_chunks_and_an_answer_token_by_token() -> None:
    world = World()
    request = world.submit(prompt(18), outputs=3)
    assert [spans(world.step(), request) for _ in range(6)] == [
        [(0, 8)],
        [(8, 16)],
        [(16, 18)],
        [(18, 19)],
        [(19, 20)],
        [],
    ]
    rows = [row for plan in world.plans for row in plan.batch.rows]
    assert [row.samples for row in rows] == [False, False, True, True, True]
    assert [row.min_output_index for row in rows if row.samples] == [0, 1, 2]
    assert [row.tokens is None for row in rows] == [False, False, False, True, True]
    assert [row.begin is not None for row in rows] == [True, False, False, False, False]
    assert request.finish_reason == "length"
    world.settle()


def test_decode_comes_first_and_prefill_gets_whole_chunks_of_the_rest() -> None:
    world = World(num_blocks=32)
    talkers = [world.submit(prompt(2, beginning=10 * index), outputs=12) for index in (1, 2)]
    world.step()
    long, other = world.submit(prompt(30, beginning=51)), world.submit(prompt(30, beginning=61))
    plan = world.step()
    assert [row.tokens is None for row in plan.batch.rows] == [True, True, False]
    assert [spans(plan, request) for request in (*talkers, long, other)] == [[(2, 3)], [(2, 3)], [(0, 8)], []]
    assert (
        other.state is State.RUNNING
    )  # it has its room; of the budget, 2 tokens were left, and no chunk is cut to fit
    assert plan.batch.num_tokens == 10
    world.run()


def test_a_short_tail_is_scheduled_where_a_chunk_does_not_fit() -> None:
    world = World(limits=small_limits(token_budget=12))
    long, short = world.submit(prompt(30)), world.submit(prompt(3, beginning=11))
    plan = world.step()
    assert (spans(plan, long), spans(plan, short)) == ([(0, 8)], [(0, 3)])
    world.run()


def test_the_oldest_prefill_gets_a_chunk_in_every_step() -> None:
    world = World(num_blocks=32, num_rows=4)
    for index in range(3):
        world.submit(prompt(2, beginning=10 * index), outputs=20)
    world.step()
    long = world.submit(prompt(30, beginning=41))
    assert [spans(world.step(), long) for _ in range(5)] == [[(0, 8)], [(8, 16)], [(16, 24)], [(24, 28)], [(28, 30)]]
    world.run()


def test_a_chunk_is_cut_at_a_block_boundary_to_fill_a_step_without_tail_chunks() -> None:
    world = World(num_blocks=32, limits=small_limits(token_budget=14, tail_apart=False))
    first, second = world.submit(prompt(8)), world.submit(prompt(8, beginning=11))
    plan = world.step()
    assert (spans(plan, first), spans(plan, second)) == ([(0, 8)], [(0, 4)])  # six tokens were left
    assert spans(world.step(), second) == [(4, 8)]
    world.run()


@pytest.mark.parametrize(
    ("num_decoding", "rate", "budget"),
    [
        (0, 1000.0, 8448),  # nothing decodes: no gap to bound
        (48, None, 8400),  # the rate is unknown
        (48, 40_000.0, 4000),
        (48, 1e9, 8400),
        (48, 10.0, 256),  # fewer tokens would take as long
    ],
)
def test_a_target_gap_bounds_the_prompt_tokens_of_steps_with_decode_rows(
    num_decoding: int, rate: float | None, budget: int
) -> None:
    limits = Limits(16, 8192, 8448, tail_apart=False, target_gap_s=0.1)
    assert limits.prefill_budget(num_decoding, rate) == budget
    assert Limits(16, 8192, 8448, tail_apart=False).prefill_budget(num_decoding, rate) == 8448 - num_decoding
