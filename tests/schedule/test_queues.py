"""The queues of unfinished requests: disjoint, ranked by level and arrival, aged by steps that skip a request."""

from __future__ import annotations

from scheduler_world import GREEDY

from sidestream.schedule.request import Request, RequestQueues, State
from sidestream.types import BatchPlan, RowPlan


def request(number: int, *, priority: int = 0) -> Request:
    return Request(
        id=number,
        prompt=(1, 2, 3),
        sampling=GREEDY,
        max_outputs=4,
        stop_ids=frozenset(),
        min_tokens=0,
        priority=priority,
    )


def queues_of(*requests: Request, aging_steps: int = 2) -> RequestQueues:
    queues = RequestQueues(aging_steps)
    for each in requests:
        queues.add(each)
    return queues


def batch_of(*requests: Request) -> BatchPlan:
    return BatchPlan(tuple(RowPlan(each.id, 0, 0, 0, 1, (1,), (0,), False, 0) for each in requests))


def test_a_request_is_either_waiting_or_running_until_it_is_removed() -> None:
    one = request(0)
    queues = queues_of(one)
    assert (list(queues.waiting), list(queues.running)) == ([0], [])
    queues.start(one)
    assert (list(queues.waiting), list(queues.running), one.state) == ([], [0], State.RUNNING)
    queues.requeue(one)
    assert (list(queues.waiting), list(queues.running), one.state, one.epoch) == ([0], [], State.WAITING, 1)
    queues.remove(one)
    assert (queues.unfinished, queues.waiting, queues.running, one.state) == ({}, {}, {}, State.FINISHED)


def test_requests_are_ranked_by_priority_and_then_arrival() -> None:
    first, urgent, last = request(0), request(1, priority=-1), request(2)
    queues = queues_of(first, urgent, last)
    for each in (last, first, urgent):
        queues.start(each)
    assert list(queues.running_by_rank()) == [urgent, first, last]


def test_steps_that_skip_a_request_improve_its_rank() -> None:
    urgent, waiting = request(0), request(1, priority=1)
    queues = queues_of(urgent, waiting)
    for _ in range(2):
        queues.age(batch_of(urgent))
    urgent.waited_steps = 0
    assert waiting.waited_steps == 2
    assert queues.by_rank([waiting, urgent]) == [urgent, waiting]  # one level better: equal, and arrival decides
    for _ in range(2):
        queues.age(batch_of(urgent))
    urgent.waited_steps = 0
    assert queues.by_rank([urgent, waiting]) == [waiting, urgent]


def test_a_plan_without_rows_ages_no_request() -> None:
    waiting = request(0)
    queues_of(waiting).age(batch_of())
    assert waiting.waited_steps == 0


def test_running_requests_stay_ranked_after_starts_and_ends() -> None:
    first, last = request(0), request(1)
    queues = queues_of(first, last)
    queues.start(last)
    assert list(queues.running_by_rank()) == [last]
    queues.start(first)
    assert list(queues.running_by_rank()) == [first, last]
    queues.remove(first)
    assert list(queues.running_by_rank()) == [last]
