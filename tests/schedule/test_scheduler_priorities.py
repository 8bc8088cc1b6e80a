"""Priorities and aging: the order of requests, and no request starves."""

from __future__ import annotations

import pytest
from plans import promoting, prompt, small_limits, states, steps_until
from scheduler_world import World

from sidestream.schedule.request import State


def test_a_request_with_a_lower_priority_number_runs_earlier() -> None:
    world = World(num_rows=1)
    requests = [
        world.submit(prompt(3, beginning=10 * index), priority=priority) for index, priority in enumerate([5, 0, 5, -1])
    ]
    ended: list[int] = []
    for _ in range(20):
        world.step()
        ended.extend(request.id for request in requests if request.state is State.FINISHED and request.id not in ended)
    assert ended == [3, 1, 0, 2]


def test_only_requests_of_lower_priority_are_preempted() -> None:
    world = World(num_rows=2)
    equal, lower = (
        world.submit(prompt(3), outputs=9, priority=0),
        world.submit(prompt(3, beginning=11), outputs=9, priority=1),
    )
    for _ in range(2):
        world.step()
    urgent = world.submit(prompt(3, beginning=21), priority=0)
    world.step()
    assert states([equal, lower, urgent]) == [State.RUNNING, State.WAITING, State.RUNNING]
    another = world.submit(prompt(3, beginning=31), priority=0)
    world.step()
    assert states([equal, another, urgent]) == [State.RUNNING, State.WAITING, State.RUNNING]
    world.run()
    assert world.said(lower) == world.expected(lower)


def test_a_request_that_has_run_no_step_is_not_preempted() -> None:
    world = World(num_rows=1)
    lower = world.submit(prompt(3), outputs=5, priority=1)
    world.step()
    urgent = world.submit(prompt(3, beginning=11), priority=0)
    world.step()
    assert states([lower, urgent]) == [State.RUNNING, State.WAITING]
    world.step()
    assert states([lower, urgent]) == [State.WAITING, State.RUNNING]
    world.run()


def test_no_request_is_preempted_if_that_frees_too_few_blocks() -> None:
    world = World(num_blocks=11)
    large, small = (
        world.submit(prompt(17), outputs=10, priority=0),
        world.submit(prompt(3, beginning=11), outputs=10, priority=1),
    )
    for _ in range(4):
        world.step()
    urgent = world.submit(prompt(25, beginning=21), priority=0)
    world.step()
    assert states([large, small, urgent]) == [State.RUNNING, State.RUNNING, State.WAITING]
    steps_until(world, lambda: small.epoch > 0 or large.state is State.FINISHED)
    assert small.epoch == 0
    world.run()


def test_no_request_is_preempted_for_blocks_that_both_requests_share() -> None:
    """The urgent one finds most of its prompt in blocks that a running request of lower priority uses."""
    world = World(num_blocks=9)
    lower = world.submit(prompt(17), outputs=10, priority=1)
    steps_until(world, lambda: lower.num_outputs > 0)
    urgent = world.submit(prompt(18), outputs=2, priority=0)
    world.step()
    assert states([lower, urgent]) == [State.RUNNING, State.RUNNING]
    assert lower.epoch == 0
    world.run()


def test_no_request_is_preempted_for_one_that_waits_for_pending_blocks() -> None:
    world = World(num_rows=2, num_blocks=32)
    lower = world.submit(prompt(3, beginning=11), outputs=12, priority=1)
    steps_until(world, lambda: lower.stepped)
    for _ in range(2):
        world.submit(prompt(30), outputs=2, priority=0)
    world.step()
    assert world.scheduler.num_waiting == 1
    world.step()
    assert (lower.state, lower.epoch) == (State.RUNNING, 0)
    world.run()


def test_aging_improves_rank_but_preempts_no_request_of_equal_or_better_priority() -> None:
    """Else two requests of equal priority, or an aged one and a better one, would throw each other out in turns."""
    world = World(num_rows=1, num_blocks=32, limits=small_limits(aging_steps=2))
    talker = world.submit(prompt(3), outputs=30, priority=0)
    world.step()
    equal, lower = world.submit(prompt(3, beginning=11), priority=0), world.submit(prompt(3, beginning=21), priority=1)
    for _ in range(20):
        world.step()
    assert min(equal.level(2), lower.level(2)) < talker.level(2)
    world.run()
    assert [request.epoch for request in (talker, equal, lower)] == [0, 0, 0]


@pytest.mark.parametrize(("aging_steps", "outputs", "level"), [(2, 8, -1), (4, 5, 0)])
def test_a_request_aged_to_equal_or_better_priority_is_not_preempted(
    aging_steps: int, outputs: int, level: int
) -> None:
    world = World(num_rows=1, num_blocks=32, limits=small_limits(aging_steps=aging_steps))
    world.submit(prompt(3), outputs=outputs, priority=0)
    world.step()
    aged = world.submit(prompt(3, beginning=11), outputs=8, priority=1)
    steps_until(world, lambda: aged.stepped)
    assert max(-1, aged.level(aging_steps)) == level
    world.submit(prompt(3, beginning=21), priority=0)
    for _ in range(3):
        world.step()
        assert (aged.state, aged.epoch) == (State.RUNNING, 0)
    world.run()


def test_no_waiting_request_starves_under_a_stream_of_better_requests() -> None:
    world = World(num_rows=1, num_blocks=32, limits=small_limits(aging_steps=3))
    low = world.submit(prompt(3), outputs=4, priority=4)
    for index in range(60):
        if world.scheduler.num_waiting < 3:
            world.submit(prompt(3, beginning=100 + index), outputs=1, priority=0)
        world.step()
        if low.state is State.FINISHED:
            break
    assert low.finish_reason == "length"
    world.run()


def test_no_running_request_starves_under_a_stream_of_better_prompts() -> None:
    """Admitted, but passed over: the chunks of better requests would take the whole budget of every step."""
    world = World(num_rows=4, num_blocks=64, limits=small_limits(aging_steps=3))
    low = world.submit(prompt(30), outputs=2, priority=4)
    world.step()
    for index in range(60):
        while len(world.scheduler.requests()) < 4:  # two of them have a chunk to compute at any time
            world.submit(prompt(40, beginning=100 * len(world.stories)), outputs=1, priority=0)
        world.step()
        assert index >= 10 or low.launched_len == 16  # what it got while it was alone, and then nothing
        if low.state is State.FINISHED:
            break
    assert low.finish_reason == "length"
    assert low.epoch == 0
    world.run()


def test_a_skipped_request_ages_even_if_no_request_arrives_or_ends() -> None:
    world = World(num_rows=2, num_blocks=64, limits=small_limits(aging_steps=3))
    low, high = world.submit(prompt(30), priority=1), world.submit(prompt(100, beginning=101), priority=0)
    for _ in range(8):
        world.step()
    assert high.in_prefill
    assert low.launched_len > 8
    world.run()


def test_an_engine_loop_without_a_step_ages_no_request() -> None:
    """An idle engine looks at its transfers two thousand times a second; that is not waiting for others."""
    world = World()
    request = promoting(world)
    for _ in range(100):
        world.step()
    assert request.waited_steps == 0
    world.run()
