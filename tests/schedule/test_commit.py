"""Commit: tokens are appended up to the end of their request, and results of dropped rows are ignored."""

from __future__ import annotations

from plans import prompt, row_of
from scheduler_world import World

from sidestream.schedule.request import Request


def test_a_step_is_launched_before_the_previous_one_is_committed() -> None:
    world = World()
    request = world.submit(prompt(3), outputs=4)
    world.step()
    assert request.num_outputs == 0
    plan = world.step()  # continues from a token that the host does not know yet
    assert row_of(plan, request).tokens is None
    assert request.num_outputs == 1


def test_a_token_sampled_after_a_stop_token_is_dropped() -> None:
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


def test_accepted_tokens_after_a_stop_token_are_dropped() -> None:
    request = Request(
        id=0, prompt=(5,), sampling=World().submit([1]).sampling, max_outputs=3, stop_ids=frozenset([5]), min_tokens=0
    )
    assert request.append_outputs([6, 5, 7]) == (2, "stop")
    assert request.tokens == [5, 6, 5]


def test_the_result_of_an_aborted_row_is_dropped_and_others_keep_theirs() -> None:
    """H21: the result of an aborted request comes in between two others."""
    world = World()
    one, two, three = (world.submit(prompt(3, beginning=beginning), outputs=4) for beginning in (1, 11, 21))
    world.step()
    world.abort(two)
    world.run()
    assert world.said(two) == []
    assert (world.said(one), world.said(three)) == (world.expected(one), world.expected(three))
