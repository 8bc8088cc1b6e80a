"""Checks the table `EQUIVALENT` (`proof.mutations`): rules of the code that the torture test cannot
detect.

A row makes two claims. Without the rule, no schedule of the torture test has a finding. The unit test that the row
names passes with the rule and fails without it. Schedules run in this process. Each unit test runs in its own process,
and needs pytest and the directory `tests` of a checkout.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from proof.mutations import EQUIVALENT, Equivalent
from proof.mutations.marks import PACKAGES
from proof.torture.hunting import Killed, Table, kill
from sidestream.errors import ConfigError
from sidestream_kv.config import unknown_name

SCHEDULES_PER_EXCUSE = 200

_TESTS = PACKAGES[0].parents[1] / "tests"
# Time limit of a unit test, which may wait for ever without its rule. The slowest test takes 10 s.
_PATIENCE_S = 120.0
_OUTPUT_CHARS = 2000


@dataclass(frozen=True, slots=True)
class ExcuseRow:
    """The result for one row of `EQUIVALENT`.

    noticed_by   the unit test that the row names; empty: the row names none
    killed       the schedule that detects the missing rule; None: no schedule does
    test         why the unit test contradicts the row; empty: it confirms the row, or the row names none
    """

    name: str
    noticed_by: str
    killed: Killed | None
    test: str

    @property
    def wrong(self) -> str:
        """Why the row is wrong; empty: both claims are true."""
        if self.killed is not None:
            return f"{self.killed.oracle} detects that the rule is missing, after {self.killed.after} schedules"
        return self.test


@dataclass(slots=True)
class Excuses(Table[ExcuseRow]):
    """The results for all rows."""

    @property
    def wrong(self) -> list[ExcuseRow]:
        """The rows that are wrong."""
        return [row for row in self.rows if row.wrong]


def check_excuses(
    names: Sequence[str] = (),
    *,
    schedules: int = SCHEDULES_PER_EXCUSE,
    seed: int = 0,
    workers: int = 1,
    on_progress: Callable[[Excuses], None] | None = None,
) -> Excuses:
    """Check the rows of `EQUIVALENT` with these names; None: all. Blocks; an interrupt ends it early.

    schedules   number of schedules for each row; 0: run only the unit tests

    Raises ConfigError for an unknown name or a negative number, or if unit tests are needed and there is no directory
    `tests`.
    """
    known = {row.mutation.name: row for row in EQUIVALENT}
    for name in names:
        if name not in known:
            raise ConfigError(unknown_name("excuse", name, known))
    if schedules < 0:
        raise ConfigError(f"schedules is {schedules}: give a whole number from 0")
    chosen = list(dict.fromkeys(names)) or list(known)
    if any(known[name].noticed_by for name in chosen) and not _TESTS.is_dir():
        raise ConfigError(f"there is no {_TESTS}, whose tests rows name: check excuses in a checkout of the repository")
    report, jobs = Excuses(len(chosen)), {name: _Check(name, schedules, seed) for name in chosen}
    report.collect(jobs, max_schedules=schedules, workers=workers, on_progress=on_progress)
    return report


def check_excuse(row: Equivalent, *, schedules: int = SCHEDULES_PER_EXCUSE, seed: int = 0) -> ExcuseRow:
    """Check one row: see `check_excuses`."""
    test = _error_of_test(row) if row.noticed_by else ""
    killed = kill(row.mutation, max_schedules=schedules, seed=seed) if schedules else None
    return ExcuseRow(row.mutation.name, row.noticed_by, killed, test)


@dataclass(frozen=True, slots=True)
class _Check:
    name: str
    schedules: int
    seed: int

    def run(self) -> ExcuseRow:
        (row,) = (row for row in EQUIVALENT if row.mutation.name == self.name)
        return check_excuse(row, schedules=self.schedules, seed=self.seed)


@dataclass(frozen=True, slots=True)
class _Runs:
    """Outcomes of a unit test with and without its rule, and the output of its process. An outcome is empty if the test
    did not end within _PATIENCE_S.
    """

    with_rule: tuple[str, ...]
    without: tuple[str, ...]
    output: str


def _error_of_test(row: Equivalent) -> str:
    """A sentence that says why the unit test contradicts the row; empty: it confirms the row."""
    runs = _run_test(row)
    if not runs.with_rule:
        return f"{row.noticed_by} did not run: {runs.output or f'no result after {_PATIENCE_S:.0f} s'}"
    if set(runs.with_rule) != {"passed"}:
        return f"{row.noticed_by} has the outcome {', '.join(runs.with_rule)} with the rule: it must pass"
    if "failed" in runs.without or not runs.output:  # without its rule, the test fails or hangs; both confirm the row
        return ""
    if len(runs.without) < len(runs.with_rule):
        return f"{row.noticed_by} ended without a result: {runs.output}"
    return f"{row.noticed_by} passes without the rule, too"


def _run_test(row: Equivalent) -> _Runs:
    """Run the row's unit test with and without its rule, in its own process."""
    with tempfile.TemporaryDirectory(prefix="sidestream-excuses-") as directory:
        file = Path(directory) / "outcomes"
        file.touch()
        options = ("-q", "-p", "no:cacheprovider", "-p", "proof.mutations.noticed")
        command = (sys.executable, "-m", "pytest", *options, "--rule", row.mutation.name, "--outcomes", str(file))
        try:
            done = subprocess.run(
                (*command, str(_TESTS / row.noticed_by)),
                cwd=_TESTS.parent,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                timeout=_PATIENCE_S,
            )
            output = done.stdout.strip()[-_OUTPUT_CHARS:] or f"exit status {done.returncode}"
        except subprocess.TimeoutExpired:
            output = ""
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    with_rule, without = (
        tuple(line["outcome"] for line in lines if line["has_rule"] is has_rule) for has_rule in (True, False)
    )
    return _Runs(with_rule, without, output)
