"""Admission: order, blocks reserved for running requests, and a bound on the requests that a step considers."""

from __future__ import annotations

from plans import prompt, small_limits, states, steps_until
from scheduler_world import World

from sidestream.schedule.request import State

# ---------------------------------------------------------------------- one request


# ---------------------------------------------------------------------- admission and the token budget


def test_requests_are_admitted_in_order_of_arrival() -> None:
    world = World(num_rows=2)
    requests = [world.submit(prompt(3, beginning=10 * index), outputs=2) for index in range(4)]
    world.step()
    assert states(requests) == [State.RUNNING, State.RUNNING, State.WAITING, State.WAITING]
    steps_until(world, lambda: State.FINISHED in states(requests))
    world.step()
    assert states(requests[2:]) == [State.RUNNING, State.RUNNING]


def test_no_request_overtakes_the_first_waiting_one_that_lacks_blocks() -> None:
    world = World(num_blocks=8)
    running = world.submit(prompt(17), outputs=4)
    world.step()
    long, short = world.submit(prompt(20, beginning=11)), world.submit(prompt(2, beginning=21))
    steps_until(world, lambda: running.state is State.FINISHED or State.RUNNING in states([long, short]))
    assert states([running, long, short]) == [State.FINISHED, State.WAITING, State.WAITING]
    world.end_transfers()
    world.step()
    assert states([long, short]) == [State.RUNNING, State.RUNNING]
    world.run()


def test_admission_reserves_a_free_block_for_each_running_request() -> None:
    world = World(num_blocks=4)
    talker, guest = world.submit(prompt(3), outputs=4), world.submit(prompt(9, beginning=11), outputs=3)
    world.step()
    assert states([talker, guest]) == [State.RUNNING, State.WAITING]  # three blocks are free, and the guest needs three
    world.run()
    assert (talker.epoch, guest.epoch) == (0, 0)


def test_a_step_considers_a_bounded_number_of_waiting_requests() -> None:
    world = World(limits=small_limits(max_probes=2))
    _, joined, behind = world.submit(prompt(18)), world.submit(prompt(18)), world.submit(prompt(3, beginning=11))
    world.step()
    assert states([joined, behind]) == [State.WAITING, State.WAITING]
    world.run()
    assert world.said(behind) == world.expected(behind)


def test_a_finite_set_of_requests_ends_in_a_bounded_number_of_steps() -> None:
    world = World(num_blocks=10, num_rows=3, seed=1)
    for index in range(20):
        world.submit(prompt(1 + index % 17, beginning=index), outputs=1 + index % 9, priority=index % 3)
    assert world.run() <= 120
