"""Saves and shows the failing schedules of `python -m proof torture`.

A campaign first saves a failing schedule as it ran: shrinking takes a minute, and an interrupt or the end of the
process must not lose a finding of a campaign of hours. The shrunk schedule then replaces the long one.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from sidestream.cli.progress import Steps
from sidestream.errors import ConfigError

if TYPE_CHECKING:
    from proof.torture import Failure, Finding, Outcome, Shrunk, Workload

_MAX_SHRUNK = 3  # failures that are shrunk and shown; more than one cause is rare
_MAX_FINDINGS = 3  # findings shown for a failure; one missing wait often breaks several rules


class FailingSchedules:
    """The failing schedules of one call of the command.

    save      directory of their files, which exists
    mutation  name of the removed rule; None: unmodified code
    """

    def __init__(self, save: Path, mutation: str | None = None) -> None:
        self._save = save
        self._mutation = mutation
        self._console = Console(stderr=True)
        self._kept: set[Path] = set()
        self._refused: set[Path] = set()  # could not be written, for example because the disk was full

    def keep(self, failures: Iterable[Failure]) -> None:
        """Save the failures that are not saved yet, as they ran. If a file cannot be written, print the error once, and
        try again at the next call, so that a campaign goes on.
        """
        for failure in failures:
            path = self._path(failure, "-as-it-ran")
            if path not in self._kept:
                self._write(path, failure.workload, failure.outcome.deviations, failure.outcome.findings[0])

    def show(self, failures: Iterable[Failure], count: int) -> bool:
        """Shrink and print the first failure of each oracle, with the command that replays it; `count` is the number of
        all failures. Returns whether an interrupt has ended the shrinking; then the remaining failures are printed
        without it.
        """
        failures, interrupted = list(failures), False
        self.keep(failures)
        first = {failure.outcome.oracles[0]: failure for failure in reversed(failures)}
        shown = list(first.values())[:_MAX_SHRUNK]
        for failure in shown:
            shrunk = None
            try:
                shrunk = None if interrupted else self._shrink(failure)
            except KeyboardInterrupt:
                interrupted = True
            except ConfigError as error:  # it does not fail again
                say(self._console, f"\n{error}")
            self._show_failure(failure, shrunk)
        if count > len(shown):
            say(
                self._console,
                f"\n{count} schedules failed; above is the first failure of each oracle, at most {_MAX_SHRUNK}. "
                f"The first {len(failures)} are saved in {self._save}",
            )
        return interrupted

    def _shrink(self, failure: Failure) -> Shrunk:
        from proof.mutations import find
        from proof.torture import shrink

        with Steps() as steps:
            steps.update("shrinking the failure")
            return shrink(failure, mutation=None if self._mutation is None else find(self._mutation))

    def _show_failure(self, failure: Failure, shrunk: Shrunk | None) -> None:
        """Print a failure, and save its shrunk schedule instead of the long one."""
        title = f"workload {failure.workload.seed}, policy {failure.policy}, seed {failure.seed}"
        oracle, path = failure.outcome.oracles[0], self._path(failure, "-as-it-ran")
        if shrunk is None:
            say(self._console, f"\n{title}: not shrunk")
            _say_findings(self._console, failure.outcome, oracle)
        else:
            short, finding = self._path(failure), _of(shrunk.outcome, oracle)[0]
            if self._write(short, shrunk.workload, shrunk.turns, finding):
                path.unlink(missing_ok=True)
                path = short
            say(self._console, f"\n{title}: shrunk in {shrunk.runs} runs")
            show_outcome(self._console, shrunk.outcome, oracle)
        if path in self._kept:
            say(
                self._console,
                f"run it again: {shlex.join(['python', '-m', 'proof', 'torture', '--replay', str(path)])}",
            )

    def _write(self, path: Path, workload: Workload, turns: dict[int, str], finding: Finding) -> bool:
        """Write a schedule to a file. Returns whether it is there; prints an error once."""
        from proof.torture import Replay

        try:
            Replay(workload, turns, self._mutation, finding.oracle, finding.text).save(path)
        except ConfigError as error:
            if path not in self._refused:
                say(self._console, f"\n{error}")
            self._refused.add(path)
            return False
        self._kept.add(path)
        return True

    def _path(self, failure: Failure, suffix: str = "") -> Path:
        policy = failure.policy.replace(":", "-").replace("/", "-")
        return self._save / f"{self._mutation or f'{failure.workload.seed}-{policy}-{failure.seed}'}{suffix}.json"


def show_outcome(console: Console, outcome: Outcome, oracle: str) -> None:
    """Print the order of events and the findings of the check `oracle`; if it has none, those of all other checks."""
    from proof.torture import render

    found = _of(outcome, oracle)
    objection = outcome.objections[0] if outcome.objections and found[0].oracle == "checker" else None
    console.print(
        render(outcome.lines, objection, width=console.width), markup=False, highlight=False, no_wrap=True, crop=False
    )
    console.print()
    _say_findings(console, outcome, oracle)


def say(console: Console, text: str) -> None:
    """Print a text as it is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _of(outcome: Outcome, oracle: str) -> list[Finding]:
    return [finding for finding in outcome.findings if finding.oracle == oracle] or list(outcome.findings)


def _say_findings(console: Console, outcome: Outcome, oracle: str) -> None:
    from proof.torture import explain

    found = _of(outcome, oracle)
    for finding in found[:_MAX_FINDINGS]:
        say(console, f"{finding.oracle}: {finding.text}")
    if len(found) > _MAX_FINDINGS:
        say(console, f"… and {len(found) - _MAX_FINDINGS} more like it")
    if outcome.objections and found[0].oracle == "checker" and (story := explain(outcome.objections[0])):
        say(console, story)
