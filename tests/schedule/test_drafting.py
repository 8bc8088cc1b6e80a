"""How many drafts a row gets, from what became of earlier ones and what flights took."""

from __future__ import annotations

import pytest

from sidestream.schedule.drafting import DraftPolicy, DraftRecord


def record(*, accepted: int, drafted: int, times: int = 60) -> DraftRecord:
    made = DraftRecord()
    for _ in range(times):
        made.saw(drafted, accepted)
    return made


def seasoned(cost: float, *, num_rows: int = 4) -> DraftPolicy:
    """One that saw flights in which a draft of each row costs so much of a row."""
    policy = DraftPolicy(4)
    for _ in range(40):
        policy.saw_flight(num_rows, 0, 0.010)
        policy.saw_flight(num_rows, 2 * num_rows, 0.010 * (1 + 2 * cost))
    return policy


def chosen(policy: DraftPolicy, one: DraftRecord, *, num_rows: int = 4, most: int = 4) -> int:
    policy.prepare(num_rows)
    return policy.choose(one, most=most)


def test_rows_whose_drafts_are_right_get_as_many_as_there_may_be() -> None:
    good = record(accepted=4, drafted=4)
    assert [chosen(seasoned(0.1), good, most=most) for most in (9, 2, 0, -1)] == [4, 2, 0, 0]


def test_a_draft_is_worth_it_as_long_as_its_chance_exceeds_its_cost() -> None:
    half = record(accepted=1, drafted=2)
    half.chance = 0.5
    assert [chosen(seasoned(cost), half) for cost in (0.04, 0.2, 0.4, 0.6)] == [4, 2, 1, 0]


def test_costs_are_those_of_flights_of_about_so_many_rows() -> None:
    policy = seasoned(1.9, num_rows=64)
    good = record(accepted=3, drafted=4)
    assert chosen(policy, good, num_rows=64) == 0
    policy.saw_flight(2, 0, 0.005)
    assert chosen(policy, good, num_rows=2) > 0


def test_a_flight_without_drafts_comes_first_and_the_first_with_drafts_says_what_they_cost() -> None:
    policy, good = DraftPolicy(4), record(accepted=4, drafted=4)
    assert chosen(policy, good) == 0
    policy.saw_flight(4, 0, 0.010)
    assert chosen(policy, good) == 4
    policy.saw_flight(4, 16, 0.060)
    assert chosen(policy, good) == 0


def test_a_new_request_begins_with_how_others_fared_and_now_and_then_one_hopes_again() -> None:
    policy = seasoned(0.3)
    assert policy.newcomer().chance == pytest.approx(0.8)
    failing = policy.newcomer()
    for _ in range(300):
        policy.saw(failing, 4, 0)
    begun = [policy.newcomer() for _ in range(32)]
    hopeful = [one for one in begun if one.chance == pytest.approx(0.8)]
    assert len(hopeful) == 2
    assert [chosen(policy, one) > 0 for one in begun].count(True) == 2
    for _ in range(300):
        policy.saw(failing, 4, 4)
    assert all(chosen(policy, policy.newcomer()) == 4 for _ in range(8))


def test_a_row_whose_drafts_fail_stops_and_tries_again_now_and_then() -> None:
    policy, failing = seasoned(0.1), record(accepted=0, drafted=1)
    counts = [chosen(policy, failing) for _ in range(200)]
    assert 3 <= sum(counts) <= 8
    assert max(counts) == 1


def test_a_flight_goes_without_drafts_now_and_then_so_that_their_cost_is_known() -> None:
    policy, good = seasoned(0.1), record(accepted=4, drafted=4)
    counts = []
    for _ in range(400):
        counts.append(chosen(policy, good))
        policy.saw_flight(4, 4 * counts[-1], 0.014 if counts[-1] else 0.010)
    assert 4 <= counts.count(0) <= 8


def test_a_flight_that_was_to_be_measured_and_was_not_does_not_end_drafting() -> None:
    """Flights with prompts beside them measure nothing."""
    policy, good = seasoned(0.1), record(accepted=4, drafted=4)
    for _ in range(70):
        policy.saw_flight(4, 16, 0.014)
    assert [chosen(policy, good) for _ in range(50)].count(0) == 1


def test_few_drafts_among_many_rows_say_nothing_of_what_all_would_cost() -> None:
    policy, good = seasoned(0.1, num_rows=32), record(accepted=4, drafted=4)
    for _ in range(50):
        policy.saw_flight(32, 1, 0.013)
    assert [chosen(policy, good, num_rows=32) for _ in range(2)] == [0, 4]  # measured first


def test_drafts_that_were_too_dear_are_tried_by_all_rows_together_now_and_then() -> None:
    policy, good = seasoned(3.0), record(accepted=4, drafted=4)
    counts = []
    for _ in range(600):
        counts.append(chosen(policy, good))
        policy.saw_flight(4, 4 * counts[-1], 0.014 if counts[-1] else 0.010)
    assert counts[:200] == [0] * 32 + [1] + counts[33:200]
    assert sum(count == 4 for count in counts[-100:]) > 90  # they are cheap now: a few tries found out


@pytest.mark.parametrize("most", [0, 3])
def test_without_adapting_a_row_always_gets_what_there_may_be(most: int) -> None:
    policy = DraftPolicy(3, adaptive=False)
    assert chosen(policy, record(accepted=0, drafted=3), num_rows=1, most=8) == 3
    assert chosen(policy, record(accepted=0, drafted=3), num_rows=1, most=most) == most
