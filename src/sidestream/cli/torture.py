"""`sidestream torture`: schedules that a seed draws, the same with rules taken out of the code, and one that failed before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from sidestream.cli.bench.report import Figure, at_least, at_most, publish
from sidestream.cli.options import AsJson
from sidestream.errors import ConfigError

if TYPE_CHECKING:
    from sidestream.testing.torture import Failure, Hunt, Report, TraceLine

_SCHEDULES = 2000
_INTERRUPTED = 130
# Failures of one campaign that are made short and shown; there is rarely more than one cause.
_SHOWN = 3

Tell = Callable[[float, str], None]
"""Draws the bar up to so many units, with a text beside it."""


def torture(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="With --mutations: only these.", show_default=False)
    ] = None,
    schedules: Annotated[
        int | None, typer.Option(metavar="N", help="Schedules to run.", show_default=f"{_SCHEDULES}, or none with --mutations")
    ] = None,
    minutes: Annotated[float | None, typer.Option(metavar="M", help="Run for so long instead.", show_default=False)] = None,
    seed: Annotated[int, typer.Option(metavar="S", help="Where drawing starts; same seed, same schedules.")] = 0,
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="P", help="random, late, early, starve:STREAM or pct:DEPTH; may be given several times.", show_default="all"),
    ] = None,
    mutations: Annotated[bool, typer.Option("--mutations", help="Take rules out of the code, one by one: each must be missed.")] = False,
    replay: Annotated[Path | None, typer.Option(metavar="FILE", help="Run a schedule that failed before.", show_default=False)] = None,
    workers: Annotated[int, typer.Option(metavar="N", help="Processes.")] = 1,
    save: Annotated[Path, typer.Option(metavar="DIR", help="Where failing schedules are written.")] = Path("runs/torture"),
    as_json: AsJson = False,
) -> None:
    """Run the engine on a simulated device, in orders that are allowed and unlikely, and judge all that comes of it."""
    if names and not mutations:
        raise ConfigError(f"{names[0]} is given without --mutations: give both, or leave it out")
    if replay is not None:
        if mutations or policy or schedules is not None or minutes is not None:
            raise ConfigError(f"--replay {replay} says all about its schedule: leave the other options out")
        _replay(replay, as_json=as_json)
        return
    figures: list[Figure] = []
    good, interrupted = True, False
    if not mutations or schedules is not None or minutes is not None:
        report = _campaign(_SCHEDULES if schedules is None else schedules, minutes, seed, policy, workers)
        figures += _campaign_figures(report)
        good, interrupted = not report.num_failures, report.interrupted
        _show_failures(report.failures, save)
    if mutations and not interrupted:
        found = _hunt(names or [], seed, workers)
        figures += _hunt_figures(found)
        good, interrupted = good and not found.survivors, found.interrupted
        _show_rows(found, save)
    publish("torture", "toy", figures, as_json=as_json, console=Console())
    if not good:
        raise typer.Exit(1)
    if interrupted:
        raise typer.Exit(_INTERRUPTED)


def _campaign(schedules: int, minutes: float | None, seed: int, policies: list[str] | None, workers: int) -> Report:
    from sidestream.testing.torture import POLICIES, torture

    with _bar("torture", schedules if minutes is None else minutes * 60) as tell:

        def on_progress(report: Report) -> None:
            findings = f"{report.num_failures} findings, " if report.num_failures else ""
            done = report.schedules if minutes is None else report.seconds
            tell(done, f"{report.schedules} schedules, {findings}{report.schedules_per_minute * report.workers:,.0f} a minute")

        return torture(
            schedules=schedules, minutes=minutes, seed=seed, policies=policies or POLICIES, workers=workers, on_progress=on_progress
        )


def _hunt(names: list[str], seed: int, workers: int) -> Hunt:
    from sidestream.testing.torture import hunt

    with _bar("mutations", None) as tell:

        def on_progress(found: Hunt) -> None:
            tell(len(found.rows) / found.total, f"{len(found.rows)} of {found.total}, {len(found.survivors)} survived")

        return hunt(names, seed=seed, workers=workers, on_progress=on_progress)


def _replay(path: Path, *, as_json: bool) -> None:
    from sidestream.testing.mutations import find
    from sidestream.testing.torture import load_replay, rerun

    schedule = load_replay(path)
    outcome = rerun(schedule.workload, schedule.turns, mutation=None if schedule.mutation is None else find(schedule.mutation))
    console = Console(stderr=as_json)
    without = f", without {schedule.mutation}" if schedule.mutation else ""
    console.print(f"{path}: workload {schedule.workload.seed}{without}", markup=False, soft_wrap=True)
    _show_lines(console, outcome.lines, outcome.conflicts)
    for finding in outcome.findings:
        console.print(f"{finding.oracle}: {finding.text}", markup=False, soft_wrap=True)
    if not outcome.findings:
        console.print(f"nothing is wrong any more; it was: {schedule.oracle}: {schedule.said}", markup=False, soft_wrap=True)
    if as_json:
        publish("torture", "toy", [Figure("schedules", 1, "schedules"), _findings(len(outcome.findings))], as_json=True, console=console)
    if outcome.findings:
        raise typer.Exit(1)


# ------------------------------------------------------------------ what is shown


def _campaign_figures(report: Report) -> list[Figure]:
    return [
        Figure("schedules", report.schedules, "schedules"),
        Figure("schedules_per_minute", report.schedules_per_minute, "schedules/min/core", at_least(1000)),
        _findings(report.num_failures),
        Figure("steps_per_schedule", report.steps / max(report.schedules, 1), "steps"),
        Figure("decisions_per_schedule", report.decisions / max(report.schedules, 1), "decisions"),
    ]


def _findings(count: int) -> Figure:
    return Figure("findings", count, "schedules", at_most(0))


def _hunt_figures(found: Hunt) -> list[Figure]:
    killed = [row.killed for row in found.rows if row.killed is not None]
    return [
        Figure("mutations_total", len(found.rows), "mutations"),
        Figure("mutations_killed", len(killed), "mutations", at_least(len(found.rows))),
        Figure("schedules_to_kill_max", max((one.after for one in killed), default=0), "schedules", at_most(500)),
    ]


def _show_rows(found: Hunt, save: Path) -> None:
    """The table, on standard error; a schedule that misses the rule is written for each mutation that was asked for by name."""
    table = Table(title="mutations")
    for heading in ("mutation", "hazard", "killed after", "by"):
        table.add_column(heading, justify="right" if heading == "killed after" else "left")
    for row in found.rows:
        name = f"{row.name} (miniature)" if row.miniature else row.name
        after, by = (str(row.killed.after), row.killed.oracle) if row.killed is not None else ("[red]survived[/]", "")
        table.add_row(name, row.hazard, after, by)
    console = Console(stderr=True)
    console.print(table)
    if len(found.rows) == 1 and (killed := found.rows[0].killed) is not None and killed.failure is not None:
        _show_failure(console, killed.failure, save, found.rows[0].name)


def _show_failures(failures: list[Failure], save: Path) -> None:
    """The first failure of each oracle, made short, with the command that runs it again."""
    console = Console(stderr=True)
    first = {failure.outcome.oracles[0]: failure for failure in reversed(failures)}
    for failure in list(first.values())[:_SHOWN]:
        _show_failure(console, failure, save, None)


def _show_failure(console: Console, failure: Failure, save: Path, mutation: str | None) -> None:
    from sidestream.testing.mutations import find
    from sidestream.testing.torture import Replay, shrink

    with console.status("making the failure short"):
        short = shrink(failure, mutation=None if mutation is None else find(mutation))
    findings = [finding for finding in short.outcome.findings if finding.oracle == failure.outcome.oracles[0]]
    where = f"workload {failure.workload.seed}, policy {failure.policy}, seed {failure.seed}"
    console.print(f"\n{where}: made short in {short.runs} runs", markup=False, soft_wrap=True)
    _show_lines(console, short.outcome.lines, short.outcome.conflicts)
    for finding in findings:
        console.print(f"{finding.oracle}: {finding.text}", markup=False, soft_wrap=True)
    name = mutation or f"{failure.workload.seed}-{failure.policy.replace(':', '-')}-{failure.seed}"
    path = save / f"{name}.json"
    _make_directory(save)
    Replay(short.workload, short.turns, mutation, findings[0].oracle, findings[0].text).save(path)
    console.print(f"run it again: sidestream torture --replay {path}", markup=False, soft_wrap=True)


def _show_lines(console: Console, lines: tuple[TraceLine, ...], marked: tuple[str, ...]) -> None:
    from sidestream.testing.torture import render

    console.print(render(lines, marked), markup=False, highlight=False, no_wrap=True, overflow="ignore", crop=False)


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--save {directory} cannot be made: {error.strerror or error}: give another directory") from error


@contextlib.contextmanager
def _bar(what: str, total: float | None) -> Iterator[Tell]:
    """A progress bar on standard error; `total` None: told in shares of one."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(what, total=1.0 if total is None else total, text="")
        yield lambda done, text: bars.update(task, completed=done, text=text)
