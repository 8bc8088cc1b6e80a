"""The one long test: 1,200 schedules of the code as it is, none of which may go wrong."""

from __future__ import annotations

import itertools

import pytest

from proof.torture import POLICIES, Report, campaign, draw_workload, reference_of, run_one, torture
from sidestream_order.sim.policies import Choice, Starve

pytestmark = pytest.mark.slow

SCHEDULES = 1200


@pytest.fixture(scope="module")
def report() -> Report:
    """Of as many workloads, each in one order: more workloads find more than more orders of each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(campaign, "_OF_SHORT_CAMPAIGN", 1)
        return torture(schedules=SCHEDULES, seed=0)


def test_no_oracle_objects_to_any_of_1200_schedules(report: Report) -> None:
    told = [
        (failure.workload.seed, failure.policy, failure.seed, failure.outcome.findings) for failure in report.failures
    ]
    assert told == []  # again: run_one(draw_workload(WORKLOAD), POLICY, SEED); shrink: python -m proof torture --save
    assert (report.schedules, report.num_failures, report.interrupted) == (SCHEDULES, 0, False)


def test_the_1200_schedules_have_enough_steps_and_few_missing_pairs(report: Report) -> None:
    assert report.steps / report.schedules > 20
    assert report.decisions / report.schedules > 80
    assert 100 * len(POLICIES) < SCHEDULES
    assert report.pairs_missing < 30  # of 771


def test_the_last_reports_of_ranks_are_read_before_they_end() -> None:
    """A rank whose work has just ended had not reported it yet."""
    assert run_one(draw_workload(1646), "late", 1641).findings == ()


def test_a_reset_fails_if_transfers_have_failed() -> None:
    """The device refused copies two steps before, and the engine had not noticed. The reset counted as done."""
    assert run_one(draw_workload(723678), "pct:4", 723679).findings == ()


def test_a_state_whose_load_failed_does_not_fail_the_other_rows_of_its_step() -> None:
    """The forward pass raised an error for the whole step. One of some 200,000 schedules showed it."""
    assert run_one(draw_workload(248_046_144), "starve:load", 248_046_145).findings == ()


def test_every_starved_name_is_the_name_of_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that starves a name that does not exist would choose at random."""
    starved: set[str] = set()
    choose = Starve.choose

    def watching(self: Starve, choice: Choice) -> str:
        if any(name == self._victim or name.startswith(self._family) for name in choice.able):
            starved.add(self._victim)
        return choose(self, choice)

    monkeypatch.setattr(Starve, "choose", watching)
    victims = {policy.partition(":")[2] for policy in POLICIES if policy.startswith("starve:")}
    several = (each for each in map(draw_workload, range(400)) if {"ranks", "slow_load", "offload"} <= each.features)
    for workload in itertools.islice(several, 3):
        for victim in victims:
            run_one(workload, f"starve:{victim}", 0, reference_of(workload))
    assert starved == victims
