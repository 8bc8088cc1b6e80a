"""Who runs next: one request, admission and the token budget."""

from __future__ import annotations

from plans import prompt, row_of, small_limits, spans, states, steps_until
from scheduler_world import World

from sidestream.schedule.request import Request, State

# ---------------------------------------------------------------------- one request


def test_a_prompt_is_computed_in_chunks_and_then_one_token_a_step() -> None:
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
    assert [row.output_index for row in rows if row.samples] == [0, 1, 2]
    assert [row.tokens is None for row in rows] == [False, False, False, True, True]
    assert [row.begin is not None for row in rows] == [True, False, False, False, False]
    assert request.finish_reason == "length"
    world.settle()


def test_a_step_is_launched_before_the_one_before_is_seen() -> None:
    world = World()
    request = world.submit(prompt(3), outputs=4)
    world.step()
    assert request.num_outputs == 0
    plan = world.step()  # continues from a token that the host does not know yet
    assert row_of(plan, request).tokens is None
    assert request.num_outputs == 1


def test_a_stop_token_ends_a_request_and_the_token_drawn_beyond_it_is_dropped() -> None:
    world = World()
    reference = world.submit(prompt(6), outputs=8)
    world.run()
    stop = world.said(reference)[3]
    request = world.submit(prompt(6), outputs=8, stop_ids=[stop])
    world.run()
    assert request.finish_reason == "stop"
    assert world.said(request) == world.said(reference)[: world.said(reference).index(stop) + 1]


def test_a_stop_token_before_min_tokens_does_not_end_a_request() -> None:
    request = Request(
        id=0, prompt=(1,), sampling=World().submit([1]).sampling, max_outputs=3, stop_ids=frozenset([5]), min_tokens=2
    )
    assert [request.append_outputs([token]) for token in (5, 6, 5)] == [(1, None), (1, None), (1, "stop")]


def test_of_tokens_that_come_together_those_behind_a_stop_token_are_dropped() -> None:
    request = Request(
        id=0, prompt=(5,), sampling=World().submit([1]).sampling, max_outputs=3, stop_ids=frozenset([5]), min_tokens=0
    )
    assert request.append_outputs([6, 5, 7]) == (2, "stop")
    assert request.tokens == [5, 6, 5]


def test_a_result_that_is_not_of_a_live_row_is_dropped_and_the_others_keep_their_own() -> None:
    """H21: the result of an aborted request comes in between two others."""
    world = World()
    one, two, three = (world.submit(prompt(3, beginning=beginning), outputs=4) for beginning in (1, 11, 21))
    world.step()
    world.abort(two)
    world.run()
    assert world.said(two) == []
    assert (world.said(one), world.said(three)) == (world.expected(one), world.expected(three))


# ---------------------------------------------------------------------- admission and the token budget


def test_requests_are_admitted_in_the_order_of_their_arrival() -> None:
    world = World(num_rows=2)
    requests = [world.submit(prompt(3, beginning=10 * index), outputs=2) for index in range(4)]
    world.step()
    assert states(requests) == [State.RUNNING, State.RUNNING, State.WAITING, State.WAITING]
    steps_until(world, lambda: State.FINISHED in states(requests))
    world.step()
    assert states(requests[2:]) == [State.RUNNING, State.RUNNING]


def test_nobody_overtakes_the_first_in_line_for_lack_of_room() -> None:
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


def test_admission_leaves_every_running_request_a_block_to_grow() -> None:
    world = World(num_blocks=4)
    talker, guest = world.submit(prompt(3), outputs=4), world.submit(prompt(9, beginning=11), outputs=3)
    world.step()
    assert states([talker, guest]) == [State.RUNNING, State.WAITING]  # three blocks are free, and the guest needs three
    world.run()
    assert (talker.epoch, guest.epoch) == (0, 0)


def test_decode_goes_first_and_prefill_takes_whole_chunks_from_what_is_left() -> None:
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


def test_a_step_looks_at_a_bounded_number_of_those_in_line() -> None:
    world = World(limits=small_limits(max_probes=2))
    _, joined, behind = world.submit(prompt(18)), world.submit(prompt(18)), world.submit(prompt(3, beginning=11))
    world.step()
    assert states([joined, behind]) == [State.WAITING, State.WAITING]
    world.run()
    assert world.said(behind) == world.expected(behind)


def test_a_short_tail_goes_along_where_a_chunk_does_not_fit() -> None:
    world = World(limits=small_limits(token_budget=12))
    long, short = world.submit(prompt(30)), world.submit(prompt(3, beginning=11))
    plan = world.step()
    assert (spans(plan, long), spans(plan, short)) == ([(0, 8)], [(0, 3)])
    world.run()


def test_the_oldest_prefill_gets_a_chunk_every_step_however_many_decode() -> None:
    world = World(num_blocks=32, num_rows=4)
    for index in range(3):
        world.submit(prompt(2, beginning=10 * index), outputs=20)
    world.step()
    long = world.submit(prompt(30, beginning=41))
    assert [spans(world.step(), long) for _ in range(5)] == [[(0, 8)], [(8, 16)], [(16, 24)], [(24, 28)], [(28, 30)]]
    world.run()


def test_a_finite_set_of_requests_ends_in_a_bounded_number_of_steps() -> None:
    world = World(num_blocks=10, num_rows=3, seed=1)
    for index in range(20):
        world.submit(prompt(1 + index % 17, beginning=index), outputs=1 + index % 9, priority=index % 3)
    assert world.run() <= 120
