"""Hunts automatic mutants with schedules that run the changed line, and with the unit tests of its module.

Each mutant is tried until its first finding. Schedules run in a child process, because a mutant may hang; tests run in
a process of their own, and need pytest and the directory `tests` of a checkout. Results are appended to a file, so that
the next call continues an interrupted one.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import itertools
import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from proof.mutations.automatic import PREFIX, Mutant, find_mutant, modules, mutants
from proof.mutations.marks import PACKAGES
from proof.mutations.mutant_tables import conftest_folder, equivalent_mutants, needs_of, paths_of
from proof.torture.campaign import POLICIES, SCHEDULES_PER_WORKLOAD, deal, run_one
from proof.torture.coverage import Reach, reach_of, seeds_that_reach
from proof.torture.drawing import draw_workload
from proof.torture.hunting import workloads_with
from proof.torture.isolated_job import HANG_STATUS, Apart, ProcessEnded, watched
from proof.torture.oracle import Reference, reference_of
from proof.torture.verdict import Finding
from sidestream.errors import ConfigError, InvariantError

SCHEDULES_PER_MUTANT = 40
"""Schedules that must have no finding before a mutant counts as undetected."""

# Part of the schedules that run before the tests: the later ones detect few mutants (bench/results/auto-mutants.json).
_BEFORE_TESTS = 0.25

_WORKLOADS = 200
_WORKLOADS_PER_MUTANT = 50
_FEW_WORKLOADS = 10
# A schedule takes a tenth of a second, and one that hangs without an end is stopped after 30.
_SCHEDULE_S = 30.0
_MUTANT_S = 60.0
_TESTS_S = 300.0
_TESTS = PACKAGES[0].parents[1] / "tests"


@dataclass(frozen=True, slots=True)
class MutantRow:
    """The result for one mutant.

    by          "schedules" or "tests": what detected the mutant; "reason": a row of the table of equivalent mutants;
                empty: nothing
    finding     the oracle, "hang" or "crash"; for "tests" the name of the test; for "reason" the reason
    detail      the oracle's message; empty for others
    schedules   number of schedules, with the one that detected it; 0: no schedule runs the line, or one hung
    """

    name: str
    change: str
    fingerprint: str
    by: str
    finding: str
    detail: str
    schedules: int
    seconds: float


@dataclass(slots=True)
class MutantHunt:
    """The results for all mutants of a hunt, in the order of the source. `reused`: of an earlier hunt's rows."""

    total: int
    reused: int = 0
    rows: list[MutantRow] = field(default_factory=list)
    seconds: float = 0.0
    interrupted: bool = False

    def by(self, *which: str) -> list[MutantRow]:
        """The rows with these values of `by`."""
        return [row for row in self.rows if row.by in which]

    @property
    def open(self) -> list[MutantRow]:
        """The mutants that nothing detected, and that no row declares as equivalent."""
        return self.by("")

    @property
    def share(self) -> float:
        """Share of the mutants that were detected or are equivalent; 1.0 without rows."""
        return 1 - len(self.open) / len(self.rows) if self.rows else 1.0


def hunt_mutants(
    pattern: str = "",
    *,
    schedules: int = SCHEDULES_PER_MUTANT,
    seed: int = 0,
    workers: int = 1,
    save: Path,
    on_progress: Callable[[str, MutantHunt], None] | None = None,
) -> MutantHunt:
    """Try the automatic mutants whose names match `pattern` (with wildcards `*` and `?`), or all; blocks. An interrupt
    ends it early.

    save          directory for the results so far, which must exist
    on_progress   called with the current step and the results so far

    Raises ConfigError if no name matches, a number is out of range, or this is no checkout; InvariantError if the code
    fails without a mutant.
    """
    chosen = _chosen(pattern)
    _check(schedules, workers)
    tell = on_progress or (lambda step, report: None)
    report, start = MutantHunt(len(chosen)), time.monotonic()
    results = _Results(save / "auto-mutants.jsonl", schedules, seed)
    rows = {mutant.name: row for mutant in chosen if (row := results.of(mutant)) is not None}
    report.reused, report.rows = len(rows), list(rows.values())
    left = [mutant for mutant in chosen if mutant.name not in rows]

    def on_row(row: MutantRow) -> None:
        results.add(row)
        rows[row.name] = row
        report.rows = [rows[mutant.name] for mutant in chosen if mutant.name in rows]
        report.seconds = time.monotonic() - start
        tell(row.name, report)

    try:
        if left:
            reach = reach_of(
                modules(),
                seed=seed,
                workloads=_WORKLOADS,
                file=save / "auto-mutants-reach.json",
                on_progress=lambda number: tell(f"workload {number} of {_WORKLOADS}: lines that it runs", report),
            )
            _run(
                [_Trial(mutant.name, _seeds_for(mutant, reach, seed=seed), schedules) for mutant in left],
                workers,
                on_row,
            )
    except KeyboardInterrupt:
        report.interrupted = True
    report.rows = [_with_reason(row) for row in report.rows]
    report.seconds = time.monotonic() - start
    return report


def _chosen(pattern: str) -> list[Mutant]:
    """The mutants that match. Raises ConfigError if there is none."""
    wanted = pattern if not pattern or pattern.startswith(PREFIX) else f"{PREFIX}{pattern}"
    chosen = [mutant for name, mutant in mutants().items() if not pattern or fnmatch.fnmatchcase(name, wanted)]
    if not chosen:
        raise ConfigError(
            f"no automatic mutant matches {pattern!r}: names are {PREFIX}MODULE:FUNCTION:OPERATOR:NUMBER, such as "
            f"{next(iter(mutants()))}, and patterns have the wildcards * and ?"
        )
    return chosen


def _check(schedules: int, workers: int) -> None:
    if schedules < 1:
        raise ConfigError(f"schedules is {schedules}: give a whole number from 1")
    if workers < 1:
        raise ConfigError(f"workers is {workers}: give a whole number from 1")
    if not _TESTS.is_dir():
        raise ConfigError(f"there is no {_TESTS}: hunt automatic mutants in a checkout of the repository")


def _seeds_for(mutant: Mutant, reach: Reach, *, seed: int) -> tuple[int, ...]:
    """Seeds of workloads that run the mutant's line. If there are few of them, also seeds of workloads with the
    features that the mutant's rules need.
    """
    seeds = seeds_that_reach(reach, mutant.mark.path, mutant.lines)[:_WORKLOADS_PER_MUTANT]
    if len(seeds) < _FEW_WORKLOADS and (needs := needs_of(mutant)):
        more = itertools.islice(workloads_with(needs, seed=seed + _WORKLOADS), _FEW_WORKLOADS)
        seeds += [workload.seed for workload in more]
    return tuple(seeds)


def _with_reason(row: MutantRow) -> MutantRow:
    """The row; if nothing detected its mutant, with the reason why it is equivalent, if there is one."""
    reason = equivalent_mutants().get(row.name)
    return row if row.by or reason is None else dataclasses.replace(row, by="reason", finding=reason.reason)


# ------------------------------------------------------------------ results


class _Results:
    """The file with one line of JSON for each result. A result counts for the same changed function and the same seed.
    If nothing detected the mutant, it had at least as many schedules as now.
    """

    def __init__(self, path: Path, schedules: int, seed: int) -> None:
        self._path = path
        self._bounds = {"max_schedules": schedules, "seed": seed}
        self._rows: dict[str, MutantRow] = {}
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                values = json.loads(line)
                bounds = {name: values.pop(name) for name in self._bounds}
                row = MutantRow(**values)
                tried = row.schedules if row.by == "schedules" else bounds["max_schedules"]
                counts = row.by == "tests" or (tried <= schedules if row.by else tried >= schedules)
                if counts and bounds["seed"] == seed:
                    self._rows[row.fingerprint] = row

    def of(self, mutant: Mutant) -> MutantRow | None:
        """The earlier result of a mutant."""
        row = self._rows.get(mutant.fingerprint)
        return None if row is None else dataclasses.replace(row, name=mutant.name)

    def add(self, row: MutantRow) -> None:
        """Append a result."""
        line = json.dumps(dataclasses.asdict(row) | self._bounds)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


# ------------------------------------------------------------------ trials


@dataclass(frozen=True, slots=True)
class _Found:
    """The result of a mutant's schedules. `finding`: the oracle, "hang" or "crash"; empty: none had a finding.

    tried      number of schedules; 0 if the process of the schedules ended
    is_clean   the same schedule has no finding without the mutant
    """

    tried: int
    finding: str = ""
    detail: str = ""
    is_clean: bool = True


@dataclass(frozen=True, slots=True)
class _Trial:
    """The schedules of one mutant: all its workloads in turn, again and again with other policies and seeds.

    first   number of schedules that have been run already
    """

    name: str
    seeds: tuple[int, ...]
    schedules: int
    first: int = 0

    def run(self) -> _Found:
        """Run schedules until one has a finding. Ends the process if a schedule hangs."""
        mutant, until_s, tried = find_mutant(self.name), time.monotonic() + _MUTANT_S, self.first
        while self.seeds and tried < self.schedules and time.monotonic() < until_s:
            turn, at = divmod(tried, len(self.seeds))
            seed, policy = self.seeds[at], deal(tried, POLICIES)
            run_seed, reference = seed * SCHEDULES_PER_WORKLOAD + turn, _reference(seed)
            with watched(_SCHEDULE_S), mutant.applied():
                found = _first_finding(seed, policy, run_seed, reference)
            tried += 1
            if found is not None:
                left = _first_finding(seed, policy, run_seed, reference)
                return _Found(tried, found.oracle, found.text, is_clean=left is None)
        return _Found(tried)


def _first_finding(seed: int, policy: str, run_seed: int, reference: Reference) -> Finding | None:
    """The first finding of a schedule. An exception of the oracles is one, too: they use the product's keys."""
    try:
        return next(iter(run_one(draw_workload(seed), policy, run_seed, reference).findings), None)
    except Exception as error:
        return Finding("error", f"{type(error).__name__}: {error}")


@functools.cache
def _reference(seed: int) -> Reference:
    return reference_of(draw_workload(seed))


class _Worker:
    """Tries mutants one by one, in processes of its own."""

    def __init__(self) -> None:
        self._schedules = Apart()
        self._tests: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def try_mutant(self, trial: _Trial) -> MutantRow | None:
        """The result; None after a stop."""
        start, mutant = time.monotonic(), find_mutant(trial.name)
        before = math.ceil(trial.schedules * _BEFORE_TESTS)
        by, found = "schedules", self._first_finding(dataclasses.replace(trial, schedules=before))
        if not found.finding and not self._stopped:
            by, found = "tests", dataclasses.replace(found, finding=self._first_test(mutant))
        if not found.finding and not self._stopped:
            by, found = "schedules", self._first_finding(dataclasses.replace(trial, first=found.tried))
        if self._stopped:
            return None
        return MutantRow(
            mutant.name,
            mutant.change,
            mutant.fingerprint,
            by if found.finding else "",
            found.finding,
            found.detail,
            found.tried,
            round(time.monotonic() - start, 1),
        )

    def stop(self) -> None:
        """End the processes. Idempotent; any thread."""
        self._stopped = True
        self._schedules.stop()
        if (tests := self._tests) is not None and tests.poll() is None:
            os.killpg(tests.pid, signal.SIGKILL)

    def _first_finding(self, trial: _Trial) -> _Found:
        """The result of the mutant's schedules. A finding that stays without the mutant may come from what an earlier
        mutant has left in the process, so that the schedules are run again in a new one.
        """
        try:
            if not (found := self._schedules.run(trial)).is_clean:
                self._schedules.stop()
                found = self._schedules.run(trial)
            if not found.is_clean:
                self._schedules.stop()
            return found
        except ProcessEnded as ended:
            if ended.status == HANG_STATUS:
                return _Found(0, "hang", f"a schedule did not end in {_SCHEDULE_S:.0f} s")
            return _Found(0, "crash", f"the process of the schedule ended with status {ended.status}")

    def _first_test(self, mutant: Mutant) -> str:
        """The first test of the mutant's module that detects it; empty: none does."""
        with tempfile.TemporaryDirectory(prefix="sidestream-mutants-") as directory:
            file = Path(directory) / "outcomes"
            file.touch()
            folder = str(_TESTS / conftest_folder(mutant))
            options = (
                "-q",
                "-p",
                "no:cacheprovider",
                "-p",
                "proof.mutations.mutated",
                "--confcutdir",
                folder,
            )
            command = (sys.executable, "-m", "pytest", *options, "--mutant", mutant.name, "--outcomes", str(file))
            self._tests = subprocess.Popen(
                (*command, *(str(_TESTS / path) for path in paths_of(mutant))),
                cwd=_TESTS.parent,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                self._tests.wait(_TESTS_S)
                ended = True
            except subprocess.TimeoutExpired:
                ended = False
            finally:
                if self._tests.poll() is None:
                    os.killpg(self._tests.pid, signal.SIGKILL)
                    self._tests.wait()
            lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for line in lines:
            if line["event"] == "detected":
                return str(line["test"])
        if not lines:
            raise InvariantError(f"the tests of {mutant.name} did not run: {', '.join(paths_of(mutant))}")
        if ended and lines[-1]["event"] == "began":
            return f"{lines[-1]['test']} (hang)"
        return ""


def _run(trials: Sequence[_Trial], workers: int, on_row: Callable[[MutantRow], None]) -> None:
    """Try the mutants, with one thread for each worker. Closing or an interrupt ends all processes."""
    waiting: queue.SimpleQueue[_Trial] = queue.SimpleQueue()
    for trial in trials:
        waiting.put(trial)
    done: queue.SimpleQueue[MutantRow | BaseException] = queue.SimpleQueue()
    staff = [_Worker() for _ in range(workers)]

    def work(worker: _Worker) -> None:
        try:
            while (row := worker.try_mutant(waiting.get_nowait())) is not None:
                done.put(row)
        except queue.Empty:
            pass
        except BaseException as error:
            done.put(error)

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in staff]
    try:
        for thread in threads:
            thread.start()
        for _ in trials:
            row = done.get()
            if isinstance(row, BaseException):
                raise row
            on_row(row)
    finally:
        for worker in staff:
            worker.stop()
        for thread in threads:
            thread.join()
