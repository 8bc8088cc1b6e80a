"""The hunt for automatic mutants: schedules and tests detect them, and an interrupted hunt goes on."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from proof.mutations.automatic import find_mutant, modules
from proof.mutations.mutant_tables import EquivalentMutant
from proof.torture import MutantHunt, hunt_mutants, mutants
from proof.torture.coverage import reach_of, seeds_that_reach
from proof.torture.isolated_job import HANG_STATUS, Apart, ProcessEnded, watched
from sidestream.errors import ConfigError

pytestmark = pytest.mark.slow

NAME = "auto:kv.pool:Lease.release:delete:0"
BY_TESTS = "kv.pool:PrefixIndex.add:operand:1"


@pytest.fixture(autouse=True)
def few_workloads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "_WORKLOADS", 2)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """What tests find, by name of the mutant, without running any; schedules find nothing."""
    by_name: dict[str, str] = {}
    monkeypatch.setattr(mutants, "reach_of", lambda *args, **options: {})
    monkeypatch.setattr(mutants._Worker, "_first_finding", lambda self, trial: mutants._Found(trial.schedules))
    monkeypatch.setattr(mutants._Worker, "_first_test", lambda self, mutant: by_name.get(mutant.name, ""))
    monkeypatch.setattr(mutants, "equivalent_mutants", dict)
    yield by_name


def test_schedules_detect_a_mutant_and_have_no_finding_without_it() -> None:
    found = mutants._Trial(NAME, (0,), 8).run()
    assert (found.finding, found.tried, found.is_clean) == ("error", 1, True), "a pool that never frees a block"


def test_an_interrupted_hunt_can_be_continued(tmp_path: Path, found: dict[str, str]) -> None:
    def interrupt(step: str, report: MutantHunt) -> None:
        if report.rows:
            raise KeyboardInterrupt

    found.update((name, "a test") for name in mutants.mutants())
    pattern = "kv.pool:Lease.*"
    first = hunt_mutants(pattern, schedules=2, save=tmp_path, on_progress=interrupt)
    assert first.interrupted
    assert [row.by for row in first.rows] == ["tests"]
    second = hunt_mutants(pattern, schedules=2, save=tmp_path)
    assert not second.interrupted
    assert second.reused >= 1
    assert (len(second.rows), second.share) == (second.total, 1.0)
    third = hunt_mutants(pattern, schedules=2, save=tmp_path)
    assert (third.reused, third.rows) == (second.total, second.rows)
    assert hunt_mutants(pattern, schedules=3, save=tmp_path).reused == second.total
    assert hunt_mutants(pattern, schedules=3, seed=1, save=tmp_path).reused == 0


def test_a_mutant_that_schedules_miss_is_given_to_the_tests_of_its_module(tmp_path: Path) -> None:
    (row,) = hunt_mutants(BY_TESTS, schedules=1, save=tmp_path).rows
    assert (row.by, row.schedules) == ("tests", 1)
    assert row.finding.startswith("tests/kv/test_pool.py::")


def test_a_mutant_without_an_effect_is_open_unless_a_row_gives_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: dict[str, str]
) -> None:
    report = hunt_mutants(NAME, schedules=2, save=tmp_path)
    assert [row.name for row in report.open] == [NAME]
    assert report.share == 0.0
    assert hunt_mutants(NAME, schedules=2, save=tmp_path).reused == 1
    assert hunt_mutants(NAME, schedules=3, save=tmp_path).reused == 0, "it had fewer schedules"
    row = EquivalentMutant(NAME, find_mutant(NAME).change, "a reason")
    monkeypatch.setattr(mutants, "equivalent_mutants", lambda: {NAME: row})
    report = hunt_mutants(NAME, schedules=3, save=tmp_path)
    assert [row.finding for row in report.by("reason")] == ["a reason"]
    assert report.share == 1.0


@pytest.mark.parametrize(
    ("pattern", "options", "message"),
    [
        ("kv.pol:*", {}, "no automatic mutant matches 'kv.pol:*': names are auto:MODULE:FUNCTION:OPERATOR:NUMBER"),
        ("", {"schedules": 0}, "schedules is 0: give a whole number from 1"),
        ("", {"workers": 0}, "workers is 0: give a whole number from 1"),
    ],
)
def test_invalid_options_are_refused(pattern: str, options: dict[str, int], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        hunt_mutants(pattern, save=tmp_path, **options)
    assert message in str(refused.value)
    assert not any(tmp_path.iterdir())


def test_reach_names_the_workloads_that_run_a_line(tmp_path: Path) -> None:
    counts: list[int] = []
    file = tmp_path / "reach.json"
    reach = reach_of(modules(), seed=0, workloads=2, file=file, on_progress=counts.append)
    assert counts == [1, 2]
    mutant = find_mutant(NAME)
    assert seeds_that_reach(reach, mutant.mark.path, mutant.lines) == [0, 1]
    assert seeds_that_reach(reach, mutant.mark.path, [1]) == []
    assert reach_of(modules(), seed=0, workloads=2, file=file, on_progress=counts.append) == reach
    assert counts == [1, 2], "the file was read"


@dataclasses.dataclass(frozen=True)
class _Spin:
    seconds: float

    def run(self) -> int:
        with watched(0.1):
            until = time.monotonic() + self.seconds
            while time.monotonic() < until:
                pass
        return os.getpid()


def test_a_job_that_hangs_ends_its_process_and_the_next_job_gets_another_one() -> None:
    apart = Apart()
    try:
        with pytest.raises(ProcessEnded) as ended:
            apart.run(_Spin(60.0))
        assert ended.value.status == HANG_STATUS
        assert apart.run(_Spin(0.0)) != os.getpid()
    finally:
        apart.stop()
