"""Drafts in the scheduler: bounds that narrow at commit, blocks that are not taken from other requests, and limits that
hold for any accept length.
"""

from __future__ import annotations

from collections import Counter

import pytest
from plans import prompt, row_of
from scheduler_world import World

from sidestream.schedule.request import Request
from sidestream.types import RowPlan, RowResult

WRONG, RIGHT = 0, 3


def drafting_world(*, right: int, drafts: int = 3, num_blocks: int = 16) -> World:
    """Of each row's drafts so many are right."""
    world = World(num_blocks=num_blocks, drafts=drafts)
    world.draws.randint = lambda low, high: min(right, high)  # type: ignore[method-assign,assignment]
    return world


def decodes(world: World, request: Request) -> list[RowPlan]:
    return [
        row for plan in world.plans for row in plan.batch.rows if row.request_id == request.id and row.tokens is None
    ]


def test_bounds_of_a_row_narrow_once_accept_lengths_are_known() -> None:
    world = drafting_world(right=1)
    request = world.submit(prompt(6), outputs=20)
    while len(decodes(world, request)) < 4:
        world.step()
    first, second, third, _ = decodes(world, request)
    assert (first.min_start, first.stop, first.drafts, first.is_certain) == (6, 10, 3, True)
    assert (second.min_start, second.stop, second.is_certain) == (7, 14, False)  # behind 1 to 4 tokens
    assert (third.min_start, third.stop) == (9, 16)  # the first one went on by 2
    assert [row.min_output_index for row in (first, second, third)] == [1, 2, 4]
    world.run()


@pytest.mark.parametrize("right", [WRONG, 1, RIGHT])
def test_no_position_after_the_end_of_an_answer_is_written(right: int) -> None:
    for outputs in range(1, 12):
        world = drafting_world(right=right)
        request = world.submit(prompt(5), outputs=outputs)
        world.run()
        assert world.said(request) == world.expected(request)
        assert max((row.stop for row in decodes(world, request)), default=0) <= 5 + outputs


def test_a_plan_counts_rows_without_drafts_by_reason() -> None:
    world = drafting_world(right=RIGHT)
    request = world.submit(prompt(5), outputs=6)
    world.run()
    reasons = Counter[str]()
    for plan in world.plans:
        reasons.update(plan.undrafted)
    assert set(reasons) == {"end"}
    assert reasons["end"] == sum(not row.drafts for row in decodes(world, request))


def test_correct_drafts_save_steps() -> None:
    steps = {}
    for right in (WRONG, RIGHT):
        world = drafting_world(right=right)
        request = world.submit(prompt(5), outputs=24)
        world.run()
        steps[right] = len(decodes(world, request))
    assert steps[RIGHT] <= 8
    assert steps[WRONG] >= 23


def test_a_row_without_blocks_for_drafts_decodes_without_them() -> None:
    world = drafting_world(right=WRONG, num_blocks=7)
    older, younger = world.submit(prompt(7), outputs=10), world.submit(prompt(7, beginning=21), outputs=10)
    world.run()
    assert world.scheduler.num_preemptions == 0
    assert all(world.said(request) == world.expected(request) for request in (older, younger))
    assert sum(plan.undrafted["blocks"] for plan in world.plans) > 0


def test_a_row_gets_all_drafts_that_exactly_fill_its_last_block() -> None:
    world = drafting_world(right=WRONG, num_blocks=3)
    request = world.submit(prompt(8), outputs=5)  # its first decode row takes the positions 8 to 11 of the third block
    while not decodes(world, request):
        world.step()
    assert [(row.stop, row.drafts) for row in decodes(world, request)] == [(12, 3)]


def test_a_request_may_ask_for_fewer_drafts_or_none() -> None:
    world = drafting_world(right=WRONG)
    beginnings = (1, 21, 31)
    plain, one, three = (
        world.submit(prompt(5, beginning=begin), outputs=9, drafts=most)
        for begin, most in zip(beginnings, (0, 1, 3), strict=True)
    )
    world.step(), world.step()
    plan = world.step()
    assert [row_of(plan, request).drafts for request in (plain, one, three)] == [0, 1, 3]
    assert [row.request_id for row in plan.batch.rows] == [plain.id, one.id, three.id]
    world.run()


def test_drafts_do_not_reduce_the_token_budget_of_prompts() -> None:
    world = drafting_world(right=WRONG, num_blocks=64)
    early = [world.submit(prompt(5, beginning=beginning), outputs=30) for beginning in (1, 21, 31)]
    while not all(decodes(world, request) for request in early):
        world.step()
    late = world.submit(prompt(9, beginning=11), outputs=2)
    plan = world.step()
    assert (row_of(plan, late).min_start, row_of(plan, late).stop) == (0, 8)  # a whole chunk, beside 3 x 4 tokens
    world.run()


def test_accepted_and_rejected_drafts_change_the_requests_record() -> None:
    chances = {}
    for right in (WRONG, RIGHT):
        world = drafting_world(right=right)
        request = world.submit(prompt(5), outputs=24)
        records = world.policy.records
        before = records.chance[request.spec_record]
        world.run()
        chances[right] = records.chance[request.spec_record] - before
    assert chances[WRONG] < 0 < chances[RIGHT]


def test_non_finite_logits_do_not_change_the_record_of_drafts() -> None:
    world = drafting_world(right=RIGHT)
    request = world.submit(prompt(5), outputs=20)
    while not any(row.drafts for row in decodes(world, request)):
        world.step()
    launched = world.previous
    assert launched is not None
    world.device.run_until(launched.fence)
    chance, behind = (
        values[request.spec_record] for values in (world.policy.records.chance, world.policy.records.debt)
    )
    world.scheduler.commit(launched.batch, [RowResult((), finite=False) for _ in launched.results], launched.fence)
    assert world.policy.records.chance[request.spec_record] == chance
    assert world.policy.records.debt[request.spec_record] == behind


def test_a_prompt_computed_in_a_step_with_drafts_is_charged_for_the_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(num_blocks=32, drafts=3)
    held_up: list[list[int]] = []
    monkeypatch.setattr(world.policy, "charge", held_up.append)
    first = world.submit(prompt(5), outputs=40)
    while len(decodes(world, first)) < 2:
        world.step()
    assert held_up == []  # nobody is beside it
    other = world.submit(prompt(6, beginning=100), outputs=2)
    world.step()
    assert [(row.request_id, row.drafts) for row in world.plans[-1].batch.rows] == [(first.id, 3), (other.id, 0)]
    world.run()
    chunks = [
        row for plan in world.plans for row in plan.batch.rows if row.request_id == other.id and row.tokens is not None
    ]
    assert held_up == [[other.spec_record]] * len(chunks)
