"""The one long test: two thousand schedules of the code as it is, none of which may go wrong."""

from __future__ import annotations

import pytest

from sidestream.testing.torture import POLICIES, Report, torture

SCHEDULES = 2000


@pytest.fixture(scope="module")
def report() -> Report:
    return torture(schedules=SCHEDULES, seed=0)


def test_no_oracle_objects_to_any_of_two_thousand_schedules(report: Report) -> None:
    told = [
        (failure.workload.seed, failure.policy, failure.seed, failure.outcome.findings) for failure in report.failures
    ]
    assert told == []  # one of them, made short: sidestream torture --seed WORKLOAD --schedules 8
    assert (report.schedules, report.num_failures, report.interrupted) == (SCHEDULES, 0, False)


def test_they_are_worth_their_name(report: Report) -> None:
    assert report.steps / report.schedules > 20
    assert report.decisions / report.schedules > 80
    assert 100 * len(POLICIES) < SCHEDULES
