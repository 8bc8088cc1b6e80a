"""The number of drafts of each row, chosen from earlier accept lengths and step times."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from sidestream.schedule.spec_policy import SpecPolicy

PLAIN_S = 0.010


def rows_of(policy: SpecPolicy, chances: Sequence[float], *, wanted: int = 4) -> list[int]:
    """Requests whose drafts are right so often, as far as is known, in a policy of theirs."""
    rows = [policy.add_request(wanted) for _ in chances]
    policy.records.chance[rows] = chances
    return rows


def drafting(chances: Sequence[float], **options: float) -> tuple[SpecPolicy, list[int]]:
    policy = SpecPolicy(4, **options)  # type: ignore[arg-type]
    return policy, rows_of(policy, chances)


def proportional(cost: float) -> Callable[[int], float]:
    """Each draft of a row adds `cost` of a plain step, as on a CPU."""
    return lambda depth: PLAIN_S * (1 + cost * depth)


def flat(ratio: float) -> Callable[[int], float]:
    """Any number of drafts makes a step `ratio` times as long, as in a captured pass."""
    return lambda depth: PLAIN_S * (ratio if depth else 1.0)


def chosen_of(policy: SpecPolicy, rows: Sequence[int], *, room: int = 4) -> list[int]:
    """Number of drafts of each row in the next step."""
    return (policy.reuse(len(rows)) or policy.choose(rows, [room] * len(rows))).counts


def fly(policy: SpecPolicy, rows: Sequence[int], takes: Callable[[int], float], *, room: int = 4) -> list[int]:
    """One step: what each row gets."""
    counts = chosen_of(policy, rows, room=room)
    policy.record_step(len(rows), max(counts), takes(max(counts)), 1000)
    return counts


def depths(policy: SpecPolicy, rows: Sequence[int], takes: Callable[[int], float], steps: int) -> list[int]:
    return [max(fly(policy, rows, takes)) for _ in range(steps)]


def settled(counts: Sequence[int]) -> int:
    """What most of the last steps got."""
    return max(set(counts), key=counts.count)


def test_the_first_step_with_drafts_measures_their_cost() -> None:
    policy, rows = drafting([0.9] * 4)
    assert [fly(policy, rows, flat(6.0))[0] for _ in range(8)] == [0, 0, 0, 0, 0, 4, 0, 0]


@pytest.mark.parametrize(
    ("ratio", "chance", "expected"), [(1.7, 0.6, 4), (2.2, 0.6, 4), (2.4, 0.6, 0), (1.05, 0.1, 1), (4.0, 0.95, 4)]
)
def test_all_or_no_drafts_are_made_if_the_cost_is_independent_of_their_number(
    ratio: float, chance: float, expected: int
) -> None:
    """With a chance of 0.6, four drafts bring 1.3 tokens more."""
    policy, rows = drafting([chance] * 8)
    assert settled(depths(policy, rows, flat(ratio), 60)[20:]) == expected


@pytest.mark.parametrize(("cost", "expected"), [(0.02, 4), (0.2, 2), (0.4, 1), (0.7, 0)])
def test_only_drafts_that_pay_are_made_if_each_has_a_cost(cost: float, expected: int) -> None:
    policy, rows = drafting([0.6] * 8)
    assert settled(depths(policy, rows, proportional(cost), 60)[20:]) == expected


def test_step_times_of_zero_do_not_stop_drafting() -> None:
    policy, rows = drafting([0.9] * 2)
    assert settled(depths(policy, rows, lambda depth: 0.0, 20)) == 4


def test_no_row_gets_more_drafts_than_allowed() -> None:
    policy, rows = drafting([0.95] * 2)
    depths(policy, rows, flat(1.2), 10)
    assert [fly(policy, rows, flat(1.2), room=room) for room in (9, 2, 0, -1)] == [[4, 4], [2, 2], [0, 0], [0, 0]]


def test_rows_with_rejected_drafts_rarely_draft_beside_others() -> None:
    policy, rows = drafting([0.9] * 6 + [0.02], max_slowdown=math.inf)
    depths(policy, rows, flat(1.3), 10)
    counts = [fly(policy, rows, flat(1.3)) for _ in range(200)]
    assert settled([launched[0] for launched in counts]) == 4
    assert 3 <= sum(launched[-1] for launched in counts) <= 8
    assert max(launched[-1] for launched in counts) == 1


@pytest.mark.parametrize("num_rows", [1, 8, 32, 128])
def test_trying_drafts_that_do_not_pay_costs_less_than_3_percent(num_rows: int) -> None:
    """Rows do not try one after another, each in a step that all of them pay for."""
    for ratio in [1.3, 2.0, 4.0]:
        for chance in [0.02, 0.5]:
            policy, rows = drafting([chance] * num_rows)
            takes = flat(ratio)
            depths(policy, rows, takes, 20)
            tokens = seconds = 0.0
            for _ in range(2000):
                counts = fly(policy, rows, takes)
                tokens += sum(1 + sum(chance**at for at in range(1, count + 1)) for count in counts)
                seconds += takes(max(counts))
            assert tokens / seconds > 0.97 * num_rows / PLAIN_S


def together(
    policy: SpecPolicy,
    chances: Sequence[float],
    takes: Callable[[int], float],
    *,
    tokens: int = 400,
    known: bool = True,
) -> list[float]:
    """Requests that begin at once and have so many tokens to draw: when each ends, in flights without drafts. What came
    of a step is known one later, and of a request at first what is `known`, or how others fared.
    """
    draws = random.Random(0)
    rows = rows_of(policy, chances) if known else [policy.add_request(4) for _ in chances]
    left, ends = [tokens] * len(chances), [0.0] * len(chances)
    now, seen = 0.0, list[tuple[int, int, int]]()
    while live := [at for at, count in enumerate(left) if count > 0]:
        chosen = policy.reuse(len(live)) or policy.choose([rows[at] for at in live], [left[at] - 1 for at in live])
        counts = chosen.counts
        now += takes(max(counts)) / PLAIN_S
        policy.record_step(len(live), max(counts), takes(max(counts)), 1000)
        if seen:
            policy.record_accepted(*zip(*seen, strict=True))
        seen.clear()
        for at, count in zip(live, counts, strict=True):
            accepted = next((place for place in range(count) if draws.random() > chances[at]), count)
            if count:
                seen.append((rows[at], count, accepted))
            left[at] -= 1 + accepted
            if left[at] <= 0:
                ends[at] = now
    return ends


@pytest.mark.parametrize("failing", [1, 16, 31])
def test_no_row_is_slowed_down_more_than_allowed_by_drafts_of_others(failing: int) -> None:
    for ratio in [1.15, 1.3, 2.0]:
        ends = together(SpecPolicy(4, max_slowdown=0.02), [0.0] * failing + [0.9] * (32 - failing), flat(ratio))
        assert max(ends) < 1.03 * 400
        alone = together(SpecPolicy(4, max_slowdown=math.inf), [0.0] * failing + [0.9] * (32 - failing), flat(ratio))
        if failing < 31:
            assert max(alone) > 1.03 * 400  # for more tokens a second of all together


@pytest.mark.parametrize("cost", [0.1, 0.22, 0.4])
def test_new_rows_lose_little_time_if_each_draft_has_a_cost(cost: float) -> None:
    """As on a CPU, with short answers: a token, and what is to be found out, weigh most there."""
    for seed in range(8):
        policy, draws, ends = SpecPolicy(4), random.Random(seed), list[float]()
        for _ in range(6):
            chances = [min(0.95, max(0.2, draws.gauss(0.6, 0.15))) for _ in range(8)]
            ends.append(max(together(policy, chances, proportional(cost), tokens=96, known=False)) / 96)
        assert ends[0] < 1.06
        assert max(ends[1:]) < 1.045


def test_a_row_without_drafts_does_not_count_as_gaining_from_them() -> None:
    """0.05 is too little for a draft, and would be enough for a step that lasts 3 % longer."""
    policy, rows = drafting([0.05] * 8 + [0.9] * 8)
    depths(policy, rows, flat(1.03), 7)
    assert fly(policy, rows, flat(1.03)) == [0] * 8 + [4] * 8
    policy.records.debt[rows[0]] = 1.1
    assert policy.choose(rows, [4] * 16) == ([0] * 16, {"others": 16})
    policy.records.debt[rows[0]], policy.records.chance[rows[0]] = 1.1, 0.06  # now it would get one
    assert policy.choose(rows, [4] * 16).counts == [1] + [0] * 7 + [4] * 8


def test_a_row_at_the_end_of_its_answer_does_not_try_drafts_again() -> None:
    policy, rows = drafting([0.02, *[0.9] * 3], max_slowdown=math.inf)
    depths(policy, rows, flat(1.1), 8)
    policy.records.idle[rows[0]] = 100
    assert policy.choose(rows, [0, 4, 4, 4]) == ([0, 4, 4, 4], {"end": 1})


def test_rows_with_equal_gain_all_get_drafts() -> None:
    policy = SpecPolicy(4)
    together(policy, [0.0, 0.9] * 16, flat(1.5))
    assert max(together(policy, [0.8] * 64, flat(1.5))) < 0.6 * 400


def test_a_request_limited_to_one_draft_is_not_slowed_down() -> None:
    def end(max_slowdown: float) -> float:
        """Of one whose only draft is right four times of five, beside others that gain by four."""
        policy, draws = SpecPolicy(4, max_slowdown=max_slowdown), random.Random(0)
        rows = [*rows_of(policy, [0.8], wanted=1), *rows_of(policy, [0.9] * 31)]
        now, left = 0.0, 600
        while left > 0:
            counts = chosen_of(policy, rows)
            now += flat(2.0)(max(counts)) / PLAIN_S
            policy.record_step(32, max(counts), flat(2.0)(max(counts)), 1000)
            accepted = int(counts[0] > 0 and draws.random() < 0.8)
            if counts[0]:
                policy.record_accepted(rows[:1], counts[:1], [accepted])
            left -= 1 + accepted
        return now / 600

    assert end(0.02) < 1.03
    assert end(math.inf) > 1.08


def test_a_row_that_prevents_drafts_of_others_tries_again() -> None:
    policy, rows = drafting([0.02, *[0.9] * 31])
    for _ in range(300):
        counts = fly(policy, rows, flat(1.5))
        policy.record_accepted(rows, counts, [0, *(3 if count else 0 for count in counts[1:])])
    assert policy.choose(rows, [4] * 32).undrafted == {"others": 32}
    steps = 0
    while not (fly(policy, rows, flat(1.5))[0]):
        steps += 1
        assert steps < 100


def test_a_request_without_drafts_is_not_slowed_down_by_others() -> None:
    policy = SpecPolicy(4)
    rows = [policy.add_request(0), *rows_of(policy, [0.9] * 3)]
    seconds = 0.0
    for _ in range(2000):
        counts = chosen_of(policy, rows)
        assert counts[0] == 0
        seconds += flat(1.5)(max(counts))
        policy.record_step(4, max(counts), flat(1.5)(max(counts)), 1000)
    assert 2000 * PLAIN_S < seconds < 1.03 * 2000 * PLAIN_S


def test_costs_are_estimated_from_steps_with_a_similar_number_of_rows() -> None:
    policy, rows = drafting([0.6] * 64)
    depths(policy, rows, flat(5.0), 10)
    depths(policy, rows[:2], flat(1.2), 200)
    assert settled(depths(policy, rows, flat(5.0), 10)) == 0
    assert settled(depths(policy, rows[:2], flat(1.2), 10)) == 4
    assert depths(policy, rows[:40], flat(5.0), 7) == [0] * 7
    assert depths(policy, rows[:5], flat(1.2), 7) == [0, 0, 0, 0, 0, 4, 4]  # measured first


def test_some_steps_run_without_drafts_to_measure_their_cost() -> None:
    policy, rows = drafting([0.9] * 4)
    counts = depths(policy, rows, flat(1.4), 800)
    assert 12 <= counts.count(0) <= 16


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_cost_of_drafts_includes_host_time_if_the_host_is_the_bottleneck(asynchronous: bool) -> None:
    """Between two commits the host reads what came of one step and plans another: drafts in either make a step without
    seem to take as long.
    """
    policy, rows = drafting([0.25] * 128)  # two drafts bring 0.31 tokens
    steps, seconds, tokens = [0, 0], 0.0, 0.0
    for number in range(3000):
        steps.append(max(chosen_of(policy, rows)))
        seen = steps[-1 - asynchronous]
        takes = 1 + 0.3 * (steps[-3 if asynchronous else -1] > 0) + 0.3 * (steps[-1] > 0)
        policy.record_step(128, seen, PLAIN_S * takes, 1000)
        if number > 1000:
            seconds, tokens = seconds + takes, tokens + 1 + sum(0.25**place for place in range(1, seen + 1))
    assert tokens / seconds > 0.97


def test_a_request_that_starts_or_ends_causes_a_new_choice() -> None:
    policy, rows = drafting([0.0] * 4)
    depths(policy, rows, flat(1.4), 6)
    policy.choose(rows, [4] * 4)
    assert policy.reuse(4) is not None
    policy.remove_request(rows.pop())
    rows.append(policy.add_request(4))
    assert policy.reuse(4) is None


def test_a_measurement_continues_until_enough_steps_were_timed() -> None:
    """Steps with prompts measure nothing, and others may not."""
    policy, rows = drafting([0.9] * 8)
    depths(policy, rows, flat(1.2), 5 + 320)
    for number in range(9):
        assert max(policy.choose(rows, [4] * 8).counts) == 0
        if number % 3 == 2:
            policy.record_step(8, 0, 0.8 * PLAIN_S, 1000)
    assert max(policy.choose(rows, [4] * 8).counts) == 0  # the last one that was planned
    assert max(policy.choose(rows, [4] * 8).counts) == 4
    assert policy._times(8).plain_s == pytest.approx(0.8 * PLAIN_S)


def test_a_choice_without_drafts_is_reused_for_a_few_steps() -> None:
    policy, rows = drafting([0.0] * 4)
    depths(policy, rows, flat(1.4), 5)
    assert policy.reuse(4) is None  # they were measured
    behind, anew = policy.records.debt[rows[0]], []
    for _ in range(12):
        chosen = policy.reuse(4)
        anew.append(chosen is None)
        assert max((chosen or policy.choose(rows, [4] * 4)).counts) == 0
        policy.record_step(4, 0, PLAIN_S, 1000)
    assert anew == [True, False, False, False] * 3
    policy.choose(rows, [4] * 4)
    assert policy.records.debt[rows[0]] == pytest.approx(
        behind - 13 * policy.max_slowdown
    )  # what is forgiven is, in each step
    assert policy.records.idle[rows[0]] == 0  # not for others
    assert policy.reuse(3) is None  # somebody went
    assert policy.reuse(4) is not None


def test_a_single_row_with_rejected_drafts_tries_one_after_30_to_36_steps() -> None:
    policy, rows = drafting([0.9])
    depths(policy, rows, flat(1.0), 7)
    policy.records.chance[rows] = 0.02
    assert 30 < depths(policy, rows, flat(1.0), 200).index(1) < 36


def test_reusing_a_choice_does_not_delay_the_next_try() -> None:

    def first(ask_each_time: bool) -> int:
        policy, rows = drafting([0.06] * 4)
        depths(policy, rows, flat(1.5), 6)
        for number in range(1000):
            again = None if ask_each_time else policy.reuse(4)
            if max((again or policy.choose(rows, [4] * 4)).counts):
                return number
            policy.record_step(4, 0, PLAIN_S, 1000)
        return 1000

    assert first(False) == pytest.approx(first(True), abs=4)
    assert 40 < first(True) < 70


def test_steps_are_compared_with_steps_over_a_similar_amount_of_kv() -> None:
    """Over its life an answer's steps get half as long again: what drafts bring and cost in the mean would be 3 % too
    little.
    """
    policy = SpecPolicy(4)
    kept: list[float] = []
    for _ in range(6):
        rows, seconds, tokens = rows_of(policy, [0.03] * 16 + [0.9] * 16), 0.0, 0.0
        for step in range(200):
            grown = 1 + step / 400
            counts = chosen_of(policy, rows)
            policy.record_step(32, max(counts), grown * flat(1.1)(max(counts)), 100 + step)
            policy.record_accepted(rows, counts, [0] * 16 + [min(3, count) for count in counts[16:]])
            seconds += grown * flat(1.1)(max(counts))
            tokens += grown
        kept.append(tokens * PLAIN_S / seconds)
    assert min(kept[1:]) > 0.975


@pytest.mark.parametrize("held_up", [0.5, 0.97, 30.0])
def test_one_late_host_step_does_not_change_the_cost_of_drafts(held_up: float) -> None:
    """A step then seems long; and the next one short, whose end was seen as late as it was."""
    for at in range(12):
        policy, rows = drafting([0.3] * 8)
        depths(policy, rows, proportional(0.05), 5 + 320)  # now some go without, to be measured
        chosen = [0]
        for number in range(600):
            chosen.append(max(chosen_of(policy, rows)))
            seen = proportional(0.05)(chosen[-2])  # of the step before, as it is in an engine
            if number == at:
                seen += held_up * PLAIN_S
            elif number == at + 1:
                seen = max(0.03 * PLAIN_S, seen - held_up * PLAIN_S)
            policy.record_step(8, chosen[-2], seen, 1000)
        assert chosen.count(0) < 25


def test_the_cost_ratio_stays_right_on_a_machine_that_became_slower() -> None:
    policy, rows = drafting([0.9] * 8)
    depths(policy, rows, flat(1.2), 5 + 320)
    depths(policy, rows, lambda depth: 1.5 * flat(1.2)(depth), 5 + 20)
    assert policy._ratios(8)[4] == pytest.approx(1.2, rel=0.01)


def test_a_measurement_interrupted_by_prompts_does_not_reuse_an_old_one() -> None:
    """Over twice the KV all steps take longer by half; of those that go without drafts only one is seen."""
    policy, rows = drafting([0.9] * 8)
    depths(policy, rows, flat(1.2), 5 + 320)
    for number in range(5):
        assert max(chosen_of(policy, rows)) == 0
        if number == 3:
            policy.record_step(8, 0, 1.5 * PLAIN_S, 2000)
    for _ in range(30):
        depth = max(chosen_of(policy, rows))
        policy.record_step(8, depth, 1.5 * flat(1.2)(depth), 2000)
    assert policy._ratios(8)[4] == pytest.approx(1.2, rel=0.01)


def test_the_estimated_cost_of_drafts_is_never_negative() -> None:
    """Else every row would be given credit by each step with drafts, and could be slowed down for it later."""
    policy, rows = drafting([0.0] + [0.9] * 7)
    for number in range(1500):
        counts = chosen_of(policy, rows)
        policy.record_step(8, max(counts), flat(1.3)(max(counts)) * (3 if number < 5 else 1), 1000)
        policy.record_accepted(rows, counts, [0, *(3 if count else 0 for count in counts[1:])])
        assert min(policy._ratios(8)) >= 1
        assert policy.records.debt[rows[0]] >= -0.02 * (number + 1)


def test_a_step_time_of_zero_from_a_coarse_clock_raises_no_error() -> None:
    policy, rows = drafting([0.9] * 4)
    for number in range(50):
        counts = chosen_of(policy, rows)
        policy.record_step(4, max(counts), 0.0 if max(counts) or number % 2 else PLAIN_S, 1000)


def test_an_unmeasured_depth_is_estimated_to_cost_more_than_a_measured_one() -> None:
    """Rows that get two drafts at most never show what four of them cost."""
    policy, rows = drafting([0.25] * 8, max_slowdown=math.inf)
    assert depths(policy, rows, flat(1.6), 500)[20:].count(0) > 460


def test_a_missed_measurement_does_not_end_drafting() -> None:
    """Steps with prompts beside them measure nothing."""
    policy, rows = drafting([0.9] * 4)
    depths(policy, rows, flat(1.4), 5 + 320)
    counts = []
    for _ in range(50):
        counts += chosen_of(policy, rows)[:1]
    assert counts == [0] * 16 + [4] * 34


def test_all_rows_occasionally_try_drafts_that_were_too_expensive() -> None:
    policy, rows = drafting([0.9] * 4)
    depths(policy, rows, flat(6.0), 20)
    assert set(depths(policy, rows, flat(6.0), 400)) == {0}
    counts = depths(policy, rows, flat(1.4), 8000)  # they are cheap now: some tries find out
    assert settled(counts[-100:]) == 4


def test_new_requests_start_at_the_accept_rate_of_others_or_rarely_the_default() -> None:
    policy = SpecPolicy(4)
    chance = policy.records.chance
    assert chance[policy.add_request(4)] == pytest.approx(0.8)
    failing = policy.add_request(4)
    for _ in range(300):
        policy.record_accepted([failing], [4], [0])
    begun = [float(chance[policy.add_request(4)]) for _ in range(32)]
    assert sum(one == pytest.approx(0.8) for one in begun) == 2
    assert sum(one < 0.05 for one in begun) == 30
    for _ in range(300):
        policy.record_accepted([failing], [4], [4])
    assert all(chance[policy.add_request(4)] > 0.9 for _ in range(8))
    assert chance[policy.add_request(0)] == 0


def test_the_record_of_a_row_follows_its_accepted_drafts() -> None:
    policy, rows = drafting([0.5, 0.5])
    for _ in range(60):
        policy.record_accepted(rows, [4, 2], [4, 0])
    assert policy.records.chance[rows[0]] > 0.95
    assert policy.records.chance[rows[1]] < 0.05
    assert policy.records.debt[rows].tolist() == [-240, 0]


def test_a_reused_record_is_reset() -> None:
    policy = SpecPolicy(4)
    rows = [policy.add_request(4) for _ in range(200)]
    assert sorted(rows) == [*range(200)]
    policy.records.chance[rows], policy.records.debt[rows], policy.records.idle[rows] = 0.1, 5.0, 30
    for row in rows:
        policy.remove_request(row)
    assert sorted(begun := [policy.add_request(2) for _ in range(200)]) == sorted({*begun})
    for values, fresh in ((policy.records.debt, 0), (policy.records.idle, 0), (policy.records.wanted, 2)):
        assert set(values[begun].tolist()) == {fresh}
    assert policy.records.chance[begun].min() > 0.7


def test_rows_without_drafts_are_counted_by_reason() -> None:
    policy, rows = drafting([0.9, 0.9, 0.9, 0.01])
    unwilling = policy.add_request(0)
    assert policy.choose([*rows, unwilling], [4, 4, 0, 4, 4]) == ([0] * 5, {"end": 1, "measuring": 3})
    depths(policy, rows, flat(1.2), 8)
    assert policy.choose([*rows, unwilling], [4, 4, 0, 4, 4]) == ([4, 4, 0, 0, 0], {"end": 1, "chance": 1})


def test_without_adapting_a_row_always_gets_the_allowed_drafts() -> None:
    for most in [0, 3]:
        policy = SpecPolicy(3, adaptive=False)
        row = policy.add_request(8)
        assert policy.choose([row], [8]).counts == [3]
        assert policy.choose([row], [most]).counts == [most]
        assert policy.choose([policy.add_request(1)], [8]).counts == [1]


def test_a_prompt_computed_beside_drafts_is_charged_their_cost() -> None:
    policy, rows = drafting([0.9] * 8)
    depths(policy, rows, flat(1.5), 12)
    newcomer = policy.add_request(4)
    assert max(fly(policy, rows, flat(1.5))) > 0
    policy.charge([newcomer])
    assert policy.records.debt[newcomer] == pytest.approx(policy._ratios(8)[4] - 1) == pytest.approx(0.5, abs=0.1)
    assert max(fly(policy, rows, flat(1.5), room=0)) == 0
    policy.charge([newcomer])
    assert policy.records.debt[newcomer] == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("forced_only", [False, True])
def test_forced_drafts_are_as_many_as_there_are_whatever_the_rows_own_rate(forced_only: bool) -> None:
    policy, rows = drafting([0.0, 0.0, 0.9, 0.9], forced_only=forced_only, max_slowdown=math.inf)
    for _ in range(12):
        policy.choose(rows, [4] * 4, [3, 2, 0, 4])
        policy.record_step(4, 0, PLAIN_S, 1000)
    own = 0 if forced_only else 4
    assert policy.choose(rows, [4] * 4, [3, 2, 0, 4]).counts == [3, 2, own, 4]
    assert policy.choose(rows, [4, 1, 4, 4], [3, 2, 0, 9]).counts == [3, 1, own, 4]
    policy = SpecPolicy(4, adaptive=False, forced_only=forced_only)
    assert policy.choose(rows_of(policy, [0.5] * 3), [4] * 3, [3, 0, 9]).counts == [3, own, 4]
    assert policy.choose(rows_of(policy, [0.5] * 2), [4] * 2).counts == [own] * 2


def test_outcomes_of_forced_drafts_change_no_rows_own_rate() -> None:
    policy, rows = drafting([0.9, 0.9])
    for _ in range(500):
        policy.record_forced(rows, [4, 4], [0, 0])
    assert policy.records.chance[rows].tolist() == [0.9, 0.9]
    assert policy._usual == pytest.approx(0.8) and policy._forced == pytest.approx(0.2)
    for _ in range(500):
        policy.record_forced(rows, [4, 4], [4, 4])
    assert policy._forced > 0.99 and policy.records.debt[rows].tolist() == [-2000.0] * 2
