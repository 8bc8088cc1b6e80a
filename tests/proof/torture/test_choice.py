"""The workloads of a campaign have pairs of features that random workloads lack."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, islice

import pytest

from proof.torture import campaign, choice, torture
from proof.torture.campaign import POLICIES, _jobs, deal, num_workloads, run_one
from proof.torture.choice import CANDIDATES, NEVER_TOGETHER, Coverage
from proof.torture.drawing import draw_workload
from proof.torture.workload import FEATURES
from sidestream.errors import ConfigError

WORKLOADS = 180  # of a campaign of 360 schedules


def missing(seeds: Iterable[int]) -> int:
    drawn = (combinations(sorted(draw_workload(seed).features), 2) for seed in seeds)
    return ALL_PAIRS - len({pair for pairs in drawn for pair in pairs} - NEVER_TOGETHER.keys())


ALL_PAIRS = len(FEATURES) * (len(FEATURES) - 1) // 2 - len(NEVER_TOGETHER)


def test_a_short_campaign_has_nearly_every_pair_of_features() -> None:
    jobs = list(_jobs(0, POLICIES, 2 * WORKLOADS, coverage := Coverage(0), first=False))
    seeds = [job.workload_seed for job in jobs]
    assert len(set(seeds)) == WORKLOADS
    assert coverage.missing == missing(seeds) <= 5 < 50 < missing(range(WORKLOADS))
    both = [seed for seed in seeds if {"states", "speculative"} <= draw_workload(seed).features]
    assert len(both) >= 3


def test_every_second_workload_is_an_ordinary_one() -> None:
    coverage = Coverage(0)
    seeds = [coverage.choose() for _ in range(12)]
    assert seeds[1::2] == list(range(CANDIDATES, 12 * CANDIDATES, 2 * CANDIDATES))
    assert any(seed % CANDIDATES for seed in seeds[::2])


def test_schedules_share_a_workload_in_twos_and_later_in_eights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "SHORT_CAMPAIGN", 6)
    jobs = list(_jobs(0, POLICIES, 26, Coverage(0), first=False))
    assert [len(job.runs) for job in jobs] == [2, 2, 2, 8, 8, 4]
    assert [seed for job in jobs for _, seed in job.runs] == list(range(26))
    assert [num_workloads(schedules) for schedules in (3, 6, 7, 26)] == [2, 3, 4, 6]


def test_workloads_have_the_features_that_a_campaign_asks_for() -> None:
    coverage = Coverage(3, ("states", "speculative"))
    drawn = [draw_workload(coverage.choose()) for _ in range(3)]
    assert all({"states", "speculative"} <= workload.features for workload in drawn)
    assert len({workload.seed for workload in drawn}) == 3


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (("state",), "no feature state; did you mean states"),
        (("rank_loss", "states", "restart"), "no workload has rank_loss and restart: the loss ends the engine"),
    ],
)
def test_features_that_no_workload_has_are_refused(features: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        torture(schedules=1, features=features)


def test_a_search_without_a_workload_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_MOST_DRAWS", 64)
    with pytest.raises(ConfigError, match="none of 64 workloads has all of bad_logits, flipped_block, twins"):
        Coverage(0, ("twins", "flipped_block", "bad_logits")).choose()


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
        return [job.workload_seed for job in islice(_jobs(7, POLICIES, None, Coverage(7), first=False), 20)]

    coverage = Coverage(7)
    assert seeds() == seeds() == [coverage.choose() for _ in range(20)]


def test_policies_take_turns_and_rank_1_is_starved_as_a_whole_and_in_its_steps() -> None:
    dealt = [deal(number, POLICIES) for number in range(2 * len(POLICIES))]
    first, second = dealt[: len(POLICIES)], dealt[len(POLICIES) :]
    assert first == [*POLICIES]
    assert second == [policy + "/compute" * (policy == "starve:rank1") for policy in POLICIES]
