"""The workloads of a campaign have pairs of features that random workloads lack."""

from __future__ import annotations

from itertools import combinations, islice

from sidestream.testing.torture.campaign import POLICIES, _jobs, deal, run_one
from sidestream.testing.torture.choice import CANDIDATES, NEVER_TOGETHER, Coverage
from sidestream.testing.torture.drawing import draw_workload
from sidestream.testing.torture.workload import FEATURES

WORKLOADS = 120


def missing(seeds: list[int]) -> int:
    coverage = Coverage()
    for seed in seeds:
        features = [name for name, has in sorted(FEATURES.items()) if has(draw_workload(seed))]
        coverage.add(features)
    return coverage.missing


def test_chosen_workloads_have_more_pairs_of_features_than_random_ones() -> None:
    coverage = Coverage()
    chosen = [coverage.choose(number) for number in range(WORKLOADS)]
    assert coverage.missing == missing(chosen)
    assert coverage.missing < 0.6 * missing(list(range(WORKLOADS)))
    # Every second workload is an ordinary one.
    assert [seed for number, seed in enumerate(chosen) if number % 2 == 0] == list(
        range(0, CANDIDATES * WORKLOADS, 2 * CANDIDATES)
    )


def test_pairs_that_cannot_meet_never_do_and_give_a_reason() -> None:
    drawn = [sorted(draw_workload(seed).features) for seed in range(2000)]
    met = {pair for features in drawn for pair in combinations(features, 2)}
    assert not met & NEVER_TOGETHER.keys()
    assert all(first < second and reason for (first, second), reason in NEVER_TOGETHER.items())
    assert {name for pair in NEVER_TOGETHER for name in pair} <= FEATURES.keys()


def test_with_several_ranks_loads_of_recurrent_states_fail_too() -> None:
    workloads = [
        w for w in map(draw_workload, range(1500)) if w.ranks > 1 and w.states and "failing_load" in w.features
    ]
    assert workloads
    assert run_one(workloads[0], "random", 0).findings == ()


def test_a_campaign_runs_the_chosen_workloads_and_the_same_ones_again() -> None:
    def seeds() -> list[int]:
        return [job.workload_seed for job in islice(_jobs(7, POLICIES, None, Coverage()), 20)]

    coverage = Coverage()
    assert seeds() == seeds() == [coverage.choose(7 + number) for number in range(20)]
    assert len(set(seeds())) == 20


def test_policies_take_turns_and_rank_1_is_starved_as_a_whole_and_in_its_steps() -> None:
    dealt = [deal(number, POLICIES) for number in range(2 * len(POLICIES))]
    first, second = dealt[: len(POLICIES)], dealt[len(POLICIES) :]
    assert first == [*POLICIES]
    assert second == [policy + "/compute" * (policy == "starve:rank1") for policy in POLICIES]
