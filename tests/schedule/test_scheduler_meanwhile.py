"""Loads planned while a step is awaited: those that the next plan would have, without harm to other requests."""

from __future__ import annotations

import pytest
from plans import prompt, row_of, states, steps_until
from scheduler_world import World

from sidestream.schedule.request import Request, State
from sidestream_kv.types import LoadPlan, PromotePlan


def busy_world(*, num_blocks: int = 16, num_rows: int = 4) -> tuple[World, Request]:
    """Somebody decodes, with a step on its way."""
    world = World(num_blocks=num_blocks, num_rows=num_rows)
    other = world.submit(prompt(6, beginning=31), outputs=8)
    steps_until(world, lambda: other.num_outputs > 0)
    return world, other


def rests(world: World, request: Request, source: str = "host", *, blocks: int = 4) -> None:
    world.tiers.where.update(dict.fromkeys(world.keys_of(request)[:blocks], source))  # type: ignore[arg-type]


def test_a_request_whose_load_was_planned_during_a_wait_joins_the_next_step() -> None:
    world, _ = busy_world()
    arrived: list[Request] = []

    def arrive() -> None:
        arrived.append(world.submit(prompt(22)))
        rests(world, arrived[0])

    world.step(arrive)
    (request,) = arrived
    assert request.state is State.RUNNING
    plan = world.step()
    assert plan.transfers == ()
    assert row_of(plan, request).min_start == 16
    world.run()


def test_loads_planned_during_a_wait_equal_those_of_the_next_plan() -> None:
    ordered = []
    for meanwhile in (False, True):
        world, _ = busy_world()
        first, second, third = (world.submit(prompt(18, beginning=beginning)) for beginning in (1, 11, 21))
        rests(world, first)
        rests(world, second, "disk")
        rests(world, third)
        ordered.append(tuple(world.scheduler.plan_loads()) if meanwhile else world.scheduler.plan().transfers)
        assert states([first, second, third]) == [State.RUNNING, State.LOADING, State.RUNNING]
    assert ordered[0] == ordered[1]
    assert [type(plan) for plan in ordered[1]] == [LoadPlan, PromotePlan, LoadPlan]


def test_a_request_without_a_load_is_not_overtaken_during_a_wait() -> None:
    world, _ = busy_world()
    first, second = world.submit(prompt(6)), world.submit(prompt(18, beginning=11))
    rests(world, second)
    assert world.scheduler.plan_loads() == []
    assert states([first, second]) == [State.WAITING, State.WAITING]
    assert len(world.step().transfers) == 1
    assert states([first, second]) == [State.RUNNING, State.RUNNING]
    world.run()


def test_no_load_is_planned_ahead_of_a_request_that_lacks_blocks() -> None:
    world, other = busy_world(num_blocks=8)
    large, small = world.submit(prompt(26)), world.submit(prompt(10, beginning=11))
    rests(world, large)
    rests(world, small, blocks=2)
    assert world.scheduler.plan_loads() == []
    assert states([other, large, small]) == [State.RUNNING, State.WAITING, State.WAITING]
    world.run()


def test_loads_are_planned_in_order_of_rank() -> None:
    world, _ = busy_world(num_rows=2)
    later, urgent = world.submit(prompt(18), priority=1), world.submit(prompt(18, beginning=11))
    rests(world, later)
    rests(world, urgent)
    (load,) = world.scheduler.plan_loads()
    assert isinstance(load, LoadPlan)
    assert load.request_id == urgent.id


def test_a_request_that_waits_for_pending_blocks_delays_no_other_request() -> None:
    world, _ = busy_world()
    first, same, other = world.submit(prompt(18)), world.submit(prompt(18)), world.submit(prompt(18, beginning=11))
    rests(world, first)
    rests(world, other)
    assert len(world.scheduler.plan_loads()) == 2
    assert states([first, same, other]) == [State.RUNNING, State.WAITING, State.RUNNING]


def test_no_load_is_planned_during_a_wait_while_admission_is_paused() -> None:
    world, _ = busy_world()
    rests(world, world.submit(prompt(18)))
    world.scheduler.pause_admission()
    assert world.scheduler.plan_loads() == []


def test_a_load_planned_during_a_wait_waits_for_the_steps_in_flight() -> None:  # H3
    world = World(num_blocks=6)
    old = world.submit(prompt(18), outputs=6)
    steps_until(world, lambda: old.num_outputs > 0)

    def change_places() -> None:
        world.abort(old)
        rests(world, world.submit(prompt(18, beginning=11)))

    world.step(change_places)
    (ticket,) = world.tickets
    assert world.previous is not None
    assert ticket.plan.after == (world.previous.fence,)
    world.run()


def change_owner(world: World) -> Request:
    """Who runs goes, and somebody else takes its blocks, with a step on its way."""
    (old,) = world.scheduler.requests()
    world.abort(old)
    request = world.submit(prompt(18, beginning=11))
    rests(world, request)
    assert world.scheduler.plan_loads()
    return request


@pytest.fixture
def full_world() -> World:
    world = World(num_blocks=6)
    old = world.submit(prompt(18), outputs=6)
    steps_until(world, lambda: old.num_outputs > 0)
    return world


def test_the_next_step_waits_for_the_last_use_of_blocks_taken_during_a_wait(full_world: World) -> None:
    assert full_world.previous is not None
    fence, request = full_world.previous.fence, change_owner(full_world)
    full_world.scheduler.load_ready(request.id, epoch=0)
    plan = full_world.scheduler.plan()
    assert plan.batch.rows
    assert fence in plan.after
    assert full_world.scheduler.plan().after == ()


def test_fences_of_blocks_taken_during_a_wait_are_kept_until_a_step_has_rows(full_world: World) -> None:
    assert full_world.previous is not None
    fence, request = full_world.previous.fence, change_owner(full_world)
    assert full_world.scheduler.plan().batch.rows == ()  # its load has no fences yet
    full_world.scheduler.load_ready(request.id, epoch=0)
    assert fence in full_world.scheduler.plan().after
