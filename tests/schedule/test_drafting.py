"""How many drafts a row gets, from what became of earlier ones and what flights took."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from sidestream.schedule.drafting import DraftPolicy, DraftRecord

PLAIN_S = 0.010


def record(chance: float) -> DraftRecord:
    return DraftRecord(chance)


def proportional(cost: float) -> Callable[[int], float]:
    """A flight takes so much more for each draft of a row: as on a CPU."""
    return lambda depth: PLAIN_S * (1 + cost * depth)


def flat(ratio: float) -> Callable[[int], float]:
    """A flight takes so many times as long with drafts, however many: as a captured pass does."""
    return lambda depth: PLAIN_S * (ratio if depth else 1.0)


def fly(policy: DraftPolicy, rows: Sequence[DraftRecord], takes: Callable[[int], float], *, most: int = 4) -> list[int]:
    """One flight: what each row gets."""
    counts = policy.choose(rows, [most] * len(rows))
    policy.saw_flight(len(rows), max(counts), takes(max(counts)))
    return counts


def depths(policy: DraftPolicy, rows: Sequence[DraftRecord], takes: Callable[[int], float], flights: int) -> list[int]:
    return [max(fly(policy, rows, takes)) for _ in range(flights)]


def settled(counts: Sequence[int]) -> int:
    """What most of the last flights got."""
    return max(set(counts), key=counts.count)


def test_a_flight_without_drafts_comes_first_and_the_first_with_drafts_says_what_they_cost() -> None:
    policy, rows = DraftPolicy(4), [record(0.9)] * 4
    assert [fly(policy, rows, flat(6.0))[0] for _ in range(4)] == [0, 4, 0, 0]


@pytest.mark.parametrize(("ratio", "chance", "expected"), [(1.7, 0.6, 4), (2.2, 0.6, 4), (2.4, 0.6, 0), (1.05, 0.1, 1), (4.0, 0.95, 4)])
def test_where_drafts_cost_the_same_however_many_all_are_made_or_none(ratio: float, chance: float, expected: int) -> None:
    """With a chance of 0.6, four drafts bring 1.3 tokens more."""
    policy = DraftPolicy(4)
    assert settled(depths(policy, [record(chance)] * 8, flat(ratio), 60)[20:]) == expected


@pytest.mark.parametrize(("cost", "expected"), [(0.02, 4), (0.2, 2), (0.4, 1), (0.7, 0)])
def test_where_each_draft_costs_as_many_are_made_as_pay(cost: float, expected: int) -> None:
    policy = DraftPolicy(4)
    assert settled(depths(policy, [record(0.6)] * 8, proportional(cost), 60)[20:]) == expected


def test_a_clock_that_does_not_move_says_nothing() -> None:
    assert settled(depths(DraftPolicy(4), [record(0.9)] * 2, lambda depth: 0.0, 20)) == 4


def test_no_row_gets_more_than_there_may_be() -> None:
    policy, rows = DraftPolicy(4), [record(0.95)] * 2
    depths(policy, rows, flat(1.2), 10)
    assert [fly(policy, rows, flat(1.2), most=most) for most in (9, 2, 0, -1)] == [[4, 4], [2, 2], [0, 0], [0, 0]]


def test_rows_whose_drafts_fail_do_without_beside_others_and_try_again_now_and_then() -> None:
    policy, rows = DraftPolicy(4, max_slowdown=math.inf), [record(0.9)] * 6 + [record(0.02)]
    depths(policy, rows, flat(1.3), 10)
    counts = [fly(policy, rows, flat(1.3)) for _ in range(200)]
    assert settled([flight[0] for flight in counts]) == 4
    assert 3 <= sum(flight[-1] for flight in counts) <= 8
    assert max(flight[-1] for flight in counts) == 1


@pytest.mark.parametrize("num_rows", [1, 8, 32, 128])
@pytest.mark.parametrize("ratio", [1.3, 2.0, 4.0])
@pytest.mark.parametrize("chance", [0.02, 0.5])
def test_drafts_that_are_not_worth_it_cost_less_than_three_in_a_hundred(num_rows: int, ratio: float, chance: float) -> None:
    """Rows do not try one after another, each in a flight that all of them pay for."""
    policy, rows = DraftPolicy(4), [record(chance) for _ in range(num_rows)]
    takes = flat(ratio)
    depths(policy, rows, takes, 20)
    tokens = seconds = 0.0
    for _ in range(2000):
        counts = fly(policy, rows, takes)
        tokens += sum(1 + sum(row.chance**at for at in range(1, count + 1)) for row, count in zip(rows, counts, strict=True))
        seconds += takes(max(counts))
    assert tokens / seconds > 0.97 * num_rows / PLAIN_S


def together(policy: DraftPolicy, chances: Sequence[float], takes: Callable[[int], float], *, tokens: int = 400) -> list[float]:
    """Requests that begin at once and have so many tokens to draw: when each ends, in flights without drafts. What came of a flight is known one later."""
    draws = random.Random(0)
    rows, left, ends = [record(chance) for chance in chances], [tokens] * len(chances), [0.0] * len(chances)
    now, seen = 0.0, list[tuple[DraftRecord, int, int]]()
    while live := [at for at, count in enumerate(left) if count > 0]:
        counts = policy.choose([rows[at] for at in live], [min(4, left[at] - 1) for at in live])
        now += takes(max(counts)) / PLAIN_S
        policy.saw_flight(len(live), max(counts), takes(max(counts)))
        for known in seen:
            policy.saw(*known)
        seen.clear()
        for at, count in zip(live, counts, strict=True):
            accepted = next((place for place in range(count) if draws.random() > chances[at]), count)
            if count:
                seen.append((rows[at], count, accepted))
            left[at] -= 1 + accepted
            if left[at] <= 0:
                ends[at] = now
    return ends


@pytest.mark.parametrize("ratio", [1.15, 1.3, 2.0])
@pytest.mark.parametrize("failing", [1, 16, 31])
def test_nobody_is_slowed_down_by_more_than_may_be_for_drafts_of_others(failing: int, ratio: float) -> None:
    ends = together(DraftPolicy(4, max_slowdown=0.02), [0.0] * failing + [0.9] * (32 - failing), flat(ratio))
    assert max(ends) < 1.03 * 400
    alone = together(DraftPolicy(4, max_slowdown=math.inf), [0.0] * failing + [0.9] * (32 - failing), flat(ratio))
    if failing < 31:
        assert max(alone) > 1.03 * 400  # for more tokens a second of all together


def test_a_row_that_would_get_no_drafts_gains_nothing_by_its_chance() -> None:
    """0.05 is too little for a draft, and would be enough for a flight that lasts 3 % longer."""
    policy, rows = DraftPolicy(4), [record(0.05) for _ in range(8)] + [record(0.9) for _ in range(8)]
    depths(policy, rows, flat(1.03), 3)
    assert fly(policy, rows, flat(1.03)) == [0] * 8 + [4] * 8
    rows[0].behind = 1.1
    assert (fly(policy, rows, flat(1.03)), policy.reason) == ([0] * 16, "others")
    rows[0].behind, rows[0].chance = 1.1, 0.06  # now it would get one
    assert fly(policy, rows, flat(1.03)) == [1] + [0] * 7 + [4] * 8


def test_who_gains_alike_is_drafted_for_however_many_they_are_and_whatever_others_gained_before() -> None:
    policy = DraftPolicy(4)
    together(policy, [0.0, 0.9] * 16, flat(1.5))
    assert max(together(policy, [0.8] * 64, flat(1.5))) < 0.6 * 400


def test_a_request_that_wants_few_drafts_is_not_slowed_down_by_what_it_could_have_gained() -> None:
    def end(max_slowdown: float) -> float:
        """Of one whose only draft is right four times of five, beside others that gain by four."""
        policy, draws = DraftPolicy(4, max_slowdown=max_slowdown), random.Random(0)
        modest, others = record(0.8), [record(0.9)] * 31
        now, left = 0.0, 600
        while left > 0:
            counts = policy.choose([modest, *others], [1, *[4] * 31])
            now += flat(2.0)(max(counts)) / PLAIN_S
            policy.saw_flight(32, max(counts), flat(2.0)(max(counts)))
            accepted = int(counts[0] > 0 and draws.random() < 0.8)
            if counts[0]:
                policy.saw(modest, counts[0], accepted)
            left -= 1 + accepted
        return now / 600

    assert end(0.02) < 1.03
    assert end(math.inf) > 1.08


def test_a_row_that_others_are_not_drafted_for_because_of_tries_again() -> None:
    policy, rows = DraftPolicy(4), [record(0.02), *[record(0.9)] * 31]
    for _ in range(300):
        counts = fly(policy, rows, flat(1.5))
        for row, count in zip(rows, counts, strict=True):
            policy.saw(row, count, 0 if row is rows[0] else 3 if count else 0)
    assert policy.reason == "others"
    flights = 0
    while not (fly(policy, rows, flat(1.5))[0]):
        flights += 1
        assert flights < 100


def test_a_request_that_wants_no_drafts_is_not_slowed_down_for_others_either() -> None:
    policy, others = DraftPolicy(4), [record(0.9)] * 3
    unwilling = record(0.0)
    seconds = 0.0
    for _ in range(2000):
        counts = policy.choose([unwilling, *others], [0, 4, 4, 4])
        assert counts[0] == 0
        seconds += flat(1.5)(max(counts))
        policy.saw_flight(4, max(counts), flat(1.5)(max(counts)))
    assert 2000 * PLAIN_S < seconds < 1.03 * 2000 * PLAIN_S


def test_costs_are_those_of_flights_of_about_so_many_rows_and_at_first_those_of_the_next_best_number() -> None:
    policy, good = DraftPolicy(4), record(0.6)
    depths(policy, [good] * 64, flat(5.0), 10)
    depths(policy, [good] * 2, flat(1.2), 200)
    assert settled(depths(policy, [good] * 64, flat(5.0), 10)) == 0
    assert settled(depths(policy, [good] * 2, flat(1.2), 10)) == 4
    assert [max(fly(policy, [good] * 40, flat(5.0))) for _ in range(3)] == [0, 0, 0]
    assert [max(fly(policy, [good] * 5, flat(1.2))) for _ in range(3)] == [0, 4, 4]  # measured first


def test_a_flight_goes_without_drafts_now_and_then_so_that_their_cost_is_known() -> None:
    policy = DraftPolicy(4)
    counts = depths(policy, [record(0.9)] * 4, flat(1.4), 400)
    assert 5 <= counts.count(0) <= 8


def test_a_flight_that_was_to_be_measured_and_was_not_does_not_end_drafting() -> None:
    """Flights with prompts beside them measure nothing."""
    policy, rows = DraftPolicy(4), [record(0.9)] * 4
    depths(policy, rows, flat(1.4), 66)
    counts = []
    for _ in range(50):
        counts += policy.choose(rows, [4] * 4)[:1]
    assert counts.count(0) <= 1


def test_drafts_that_were_too_dear_are_tried_by_all_rows_together_now_and_then() -> None:
    policy, rows = DraftPolicy(4), [record(0.9)] * 4
    depths(policy, rows, flat(6.0), 20)
    assert set(depths(policy, rows, flat(6.0), 400)) == {0}
    counts = depths(policy, rows, flat(1.4), 8000)  # they are cheap now: some tries find out
    assert settled(counts[-100:]) == 4


def test_a_new_request_begins_with_how_others_fared_and_now_and_then_one_hopes_again() -> None:
    policy = DraftPolicy(4)
    assert policy.newcomer().chance == pytest.approx(0.8)
    failing = policy.newcomer()
    for _ in range(300):
        policy.saw(failing, 4, 0)
    begun = [policy.newcomer() for _ in range(32)]
    assert sum(one.chance == pytest.approx(0.8) for one in begun) == 2
    assert sum(one.chance < 0.05 for one in begun) == 30
    for _ in range(300):
        policy.saw(failing, 4, 4)
    assert all(policy.newcomer().chance > 0.9 for _ in range(8))


def test_a_record_follows_what_became_of_its_drafts() -> None:
    policy, one = DraftPolicy(4), record(0.5)
    for _ in range(60):
        policy.saw(one, 4, 4)
    assert one.chance > 0.95
    for _ in range(60):
        policy.saw(one, 4, 0)
    assert one.chance < 0.05


@pytest.mark.parametrize("most", [0, 3])
def test_without_adapting_a_row_always_gets_what_there_may_be(most: int) -> None:
    policy = DraftPolicy(3, adaptive=False)
    assert policy.choose([record(0.0)], [8]) == [3]
    assert policy.choose([record(0.0)], [most]) == [most]
