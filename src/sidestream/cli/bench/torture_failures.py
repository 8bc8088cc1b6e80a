"""Saves and shows the failing schedules of `sidestream torture`.

A failing schedule is saved as it ran when it is found, and replaced by a shorter one later: shrinking takes a minute,
and an interrupt or the end of the process must not lose what a campaign of hours has found.
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
    from sidestream.testing.torture import Failure, Finding, Outcome

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
        """Save the failures that are not saved yet, as they ran. A file that cannot be written is tried again at the
        next call; only the first error of each is printed, so that a campaign goes on.
        """
        from sidestream.testing.torture import Replay

        for failure in failures:
            path = self._path(failure)
            if path in self._kept:
                continue
            finding, turns = failure.outcome.findings[0], failure.outcome.deviations
            try:
                Replay(failure.workload, turns, self._mutation, finding.oracle, finding.text).save(path)
            except ConfigError as error:
                if path not in self._refused:
                    say(self._console, str(error))
                self._refused.add(path)
            else:
                self._kept.add(path)

    def show(self, failures: Iterable[Failure], count: int) -> None:
        """Shrink and print the first failure of each oracle, with the command that replays it; `count` is the number of
        all failures. After an interrupt, the failures are printed as they ran.
        """
        failures = list(failures)
        self.keep(failures)
        first = {failure.outcome.oracles[0]: failure for failure in reversed(failures)}
        shown = list(first.values())[:_MAX_SHRUNK]
        interrupted = False
        for failure in shown:
            if not interrupted:
                try:
                    self._shrink(failure)
                    continue
                except KeyboardInterrupt:
                    interrupted = True
                except ConfigError as error:  # it does not fail again, or cannot be written
                    say(self._console, f"\n{error}")
            self._say_as_it_ran(failure)
        if count > len(shown):
            say(
                self._console,
                f"\n{count} schedules failed; above is the first failure of each oracle, at most {_MAX_SHRUNK}; "
                f"{self._save} has {len(self._kept)}",
            )

    def _shrink(self, failure: Failure) -> None:
        from sidestream.testing.mutations import find
        from sidestream.testing.torture import Replay, shrink

        with Steps() as steps:
            steps.update("shrinking the failure")
            shrunk = shrink(failure, mutation=None if self._mutation is None else find(self._mutation))
        oracle, path = failure.outcome.oracles[0], self._path(failure)
        message = next(finding.text for finding in shrunk.outcome.findings if finding.oracle == oracle)
        Replay(shrunk.workload, shrunk.turns, self._mutation, oracle, message).save(path)
        say(self._console, f"\n{_title(failure)}: shrunk in {shrunk.runs} runs")
        show_outcome(self._console, shrunk.outcome, oracle)
        self._say_how_to_replay(path)

    def _say_as_it_ran(self, failure: Failure) -> None:
        say(self._console, f"\n{_title(failure)}: not shrunk")
        _say_findings(self._console, failure.outcome, failure.outcome.oracles[0])
        self._say_how_to_replay(self._path(failure))

    def _say_how_to_replay(self, path: Path) -> None:
        if path in self._kept:
            say(self._console, f"run it again: {shlex.join(['sidestream', 'torture', '--replay', str(path)])}")

    def _path(self, failure: Failure) -> Path:
        policy = failure.policy.replace(":", "-").replace("/", "-")
        return self._save / f"{self._mutation or f'{failure.workload.seed}-{policy}-{failure.seed}'}.json"


def show_outcome(console: Console, outcome: Outcome, oracle: str) -> None:
    """Print the order of events and the findings of the check `oracle`; if it has none, those of all other checks."""
    from sidestream.testing.torture import render

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


def _title(failure: Failure) -> str:
    return f"workload {failure.workload.seed}, policy {failure.policy}, seed {failure.seed}"


def _of(outcome: Outcome, oracle: str) -> list[Finding]:
    return [finding for finding in outcome.findings if finding.oracle == oracle] or list(outcome.findings)


def _say_findings(console: Console, outcome: Outcome, oracle: str) -> None:
    from sidestream.testing.torture import explain

    found = _of(outcome, oracle)
    for finding in found[:_MAX_FINDINGS]:
        say(console, f"{finding.oracle}: {finding.text}")
    if len(found) > _MAX_FINDINGS:
        say(console, f"… and {len(found) - _MAX_FINDINGS} more like it")
    if outcome.objections and found[0].oracle == "checker" and (story := explain(outcome.objections[0])):
        say(console, story)
