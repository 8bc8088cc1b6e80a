"""Preemption: the choice of the request, dropped results, and readmission."""

from __future__ import annotations

import pytest
from plans import crowded_world, loading, promoting, prompt, row_epochs, small_limits, states, steps_until
from scheduler_world import World

from sidestream.schedule.request import Request, State

# ---------------------------------------------------------------------- preemption


def test_the_younger_request_is_preempted_when_the_pool_is_full() -> None:
    world, old, young = crowded_world()
    steps_until(world, lambda: young.epoch == 1)
    assert states([old, young]) == [State.RUNNING, State.WAITING]
    assert world.scheduler.num_preemptions == 1
    assert (young.slot, young.blocks) == (None, None)
    world.run()
    assert old.epoch == 0


def test_a_preempted_request_outputs_the_same_tokens() -> None:
    world, old, young = crowded_world()
    steps_until(world, lambda: young.epoch == 1)
    said_before = len(world.said(young))
    assert 0 < said_before < 13
    world.run()
    assert world.said(young) == world.expected(young)
    assert world.said(old) == world.expected(old)
    begins = [row.begin for plan in world.plans for row in plan.batch.rows if row.request_id == young.id and row.begin]
    assert [len(begin.outputs) for begin in begins] == [0, said_before]


def test_a_preempted_request_is_readmitted_while_admission_is_paused() -> None:
    """New weights wait for all requests that have begun, so a preempted one must come to its end."""
    world, _, young = crowded_world()
    steps_until(world, lambda: young.epoch == 1)
    world.scheduler.pause_admission()
    world.run()
    assert world.said(young) == world.expected(young)


def test_a_request_may_be_preempted_during_its_prefill() -> None:
    """By a decode row of the same plan, which has looked for requests with a next chunk before."""
    world = World(num_blocks=18, limits=small_limits(chunk_tokens=4, token_budget=8))
    old, young = world.submit(prompt(3), outputs=20), world.submit(prompt(60, beginning=21), outputs=1)
    steps_until(world, lambda: young.epoch == 1)
    chunks = [row for plan in world.plans for row in plan.batch.rows if row.request_id == young.id]
    assert 0 < chunks[-1].stop < 60
    world.run()
    assert world.said(young) == world.expected(young)
    assert world.said(old) == world.expected(old)


def test_late_results_of_a_preempted_request_are_dropped() -> None:
    """H12, H16: the step in the air at the preemption belongs to an epoch that is over."""
    world, _, young = crowded_world()
    flying = None
    for _ in range(30):
        if young.epoch == 0:
            flying = world.previous  # in the air when the next plan is made: the last such plan preempts
            world.step()
    assert young.epoch == 1
    assert flying is not None and row_epochs(flying.batch.rows, young) == [0]
    outputs = young.num_outputs
    world.step()
    assert young.num_outputs == outputs
    assert young.state is not State.FINISHED
    world.run()


def test_a_late_result_is_dropped_even_if_its_request_runs_again() -> None:
    """The preempted request is back in a row, in epoch 1, when the step of epoch 0 lands."""
    world = World()
    request = world.submit(prompt(6), outputs=6)
    world.step()
    world.step()
    world.scheduler.preempt(request)
    flying = world.previous
    assert flying is not None and row_epochs(flying.batch.rows, request) == [0]
    world.step()  # admits it again, then commits the late step
    assert (request.state, request.epoch, request.num_outputs) == (State.RUNNING, 1, 0)
    assert not request.stepped  # H26: the late step was no step of this epoch
    world.step()
    assert request.stepped
    world.run()
    assert world.said(request) == world.expected(request)


def test_a_readmitted_request_reuses_its_complete_blocks() -> None:
    world, _, young = crowded_world()
    steps_until(world, lambda: young.epoch == 1)
    world.run()
    again = [row.min_start for plan in world.plans for row in plan.batch.rows if row_epochs([row], young) == [1]]
    assert again[0] >= 4  # the block that the older one took was the youngest's last


def test_a_readmitted_request_runs_a_step_before_it_is_preempted_again() -> None:
    """H26: otherwise two requests could throw each other out for ever."""
    world = World(num_blocks=10, num_rows=4)
    requests = [world.submit(prompt(2, beginning=11 * index), outputs=30) for index in range(6)]
    chosen: list[Request] = []
    victim_for = world.scheduler._preemption.victim_for

    def watched(request: Request) -> Request | None:
        victim = victim_for(request)
        if victim is not None:
            first = min(
                (other for other in requests if other.state is State.RUNNING),
                key=lambda other: (other.level(256), other.id),
            )
            assert victim.stepped or request is first
            chosen.append(victim)
        return victim

    world.scheduler._preemption.victim_for = watched  # type: ignore[method-assign]
    steps = world.run(max_steps=400)
    assert len(chosen) > len(set(chosen))  # somebody was preempted more than once
    assert steps <= 200


def test_only_the_first_request_may_preempt_one_that_has_run_no_step() -> None:
    world = World(num_blocks=16, num_rows=4)
    first, second, third = (world.submit(prompt(4, beginning=11 * index), outputs=9) for index in range(3))
    world.step()
    victim_for = world.scheduler._preemption.victim_for
    assert [request.stepped for request in (first, second, third)] == [False, False, False]
    assert (victim_for(first), victim_for(second), victim_for(third)) == (third, None, None)
    second.stepped = True
    assert victim_for(first) is second  # younger ones that stepped go before younger ones that did not
    third.stepped = True
    assert (victim_for(first), victim_for(second), victim_for(third)) == (third, third, None)
    world.run()


# ---------------------------------------------------------------------- what was used is fenced


# ---------------------------------------------------------------------- abort


def waiting(world: World) -> Request:
    for index in range(4):
        world.submit(prompt(3, beginning=10 * index), outputs=9)
    request = world.submit(prompt(9, beginning=51))
    world.step()
    assert request.state is State.WAITING
    return request


def joined(world: World) -> Request:
    world.submit(prompt(18))
    request = world.submit(prompt(18))
    world.step()
    assert request.state is State.WAITING
    return request


def flying(world: World) -> Request:
    request = world.submit(prompt(18), outputs=4)
    for _ in range(4):
        world.step()
    assert world.previous is not None and not world.previous.fence.poll()
    assert row_epochs(world.previous.batch.rows, request) == [0]
    return request


def preempted(world: World) -> Request:
    request = world.submit(prompt(6), outputs=6)
    world.step()
    world.step()
    world.scheduler.preempt(request)
    assert request.state is State.WAITING
    return request


def readmitted(world: World) -> Request:
    request = preempted(world)
    world.step()
    assert (request.state, request.epoch) == (State.RUNNING, 1)
    return request


@pytest.mark.parametrize("reach", [waiting, joined, promoting, loading, flying, preempted, readmitted])
def test_an_abort_in_any_state_releases_everything(reach: object) -> None:
    """H21, H22. `World.run` ends with empty pools; what is in the air at the abort comes in afterwards."""
    world = World()
    request = reach(world)  # type: ignore[operator]
    said = list(world.said(request))
    world.abort(request)
    assert (request.state, request.finish_reason, request.slot, request.blocks) == (State.FINISHED, "abort", None, None)
    assert world.scheduler.get(request.id) is None
    world.abort(request)  # a second one is harmless
    world.run()
    assert world.said(request) == said
    again = world.submit(request.prompt, outputs=3)
    world.run()
    assert world.said(again) == world.expected(again)
