"""`python -m proof torture`: tests the ordering of concurrent work by running the engine on a simulated device.

A schedule is one run with a seeded order of events. A mutation removes a rule from the code, and the hunt checks that
schedules detect (kill) it. An automatic mutant is a small change of a statement that orders work. An excuse is the
reason why no schedule can detect the removal of a rule. An oracle is a check that a run may fail. A miniature is a
small model of a published bug. The command also replays saved schedules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from proof.commands.device import show_campaign, show_hunt, show_service
from proof.commands.excuses import show_excuses
from proof.commands.failures import FailingSchedules, say, show_outcome
from proof.commands.mutants import show_mutants
from proof.commands.ranks import BLOCKS, show_ranks
from proof.report import Figure, at_least, at_most, publish, was_given
from sidestream.cli.declare import Option, option
from sidestream.cli.options import AsJson
from sidestream.cli.progress import Steps
from sidestream.errors import ConfigError
from sidestream_kv.device.kinds import CPU, CUDA

if TYPE_CHECKING:
    from proof.torture import Hunt, Report, Row

_SCHEDULES = 2000
_RATED_SCHEDULES = 1000  # fewer are no measurement of schedules a minute
_OF_CAMPAIGN = {"policy": "--policy", "features": "--with", "first": "--first"}
_OF_DEVICE = ("device", "blocks", "requests", "tensor_parallel", "check_order")

ShowProgress = Callable[[float, str], None]
"""Moves the progress bar to a value, and shows a text beside the bar."""

Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME", help="With --mutations or --excuses: check only these rules.", show_default=False),
]
Schedules = Annotated[
    int | None,
    Option(
        "Number of schedules (runs) to try; with --excuses, for each rule; with --auto-mutants, at most for each.",
        absent=f"{_SCHEDULES}, or none with --mutations, or 200 with --excuses, or 40 with --auto-mutants",
    ),
]
Minutes = Annotated[float | None, Option("Minutes to run, instead of --schedules.", "M", False)]
Seed = Annotated[int, Option("Seed of the schedules; the same seed gives the same schedules.", "S")]
Policies = Annotated[
    list[str] | None,
    Option(
        "Order of events: random, late, early, starve:STREAM or pct:DEPTH[:POINTS]; may be given several times.",
        "P",
        "all",
    ),
]
With = Annotated[
    list[str] | None,
    option(
        "--with",
        "FEATURE",
        "Only workloads with this feature, such as states or speculative; may be given several times.",
        "all",
    ),
]
First = Annotated[bool, Option("Stop at the first finding.")]
Mutations = Annotated[bool, Option("Remove rules from the code one by one; each removal must be detected.")]
ExcusesFlag = Annotated[
    bool, Option("Check rules whose removal no schedule detects: a unit test must detect it instead. Needs a checkout.")
]
AutoMutants = Annotated[
    bool,
    Option(
        "Change each statement that orders work in standard ways; each change must be detected by schedules or by unit "
        "tests. Needs a checkout."
    ),
]
Only = Annotated[
    str, Option("With --auto-mutants: only mutants whose names match, with wildcards * and ?.", "PATTERN", "all")
]
ReplayFile = Annotated[Path | None, Option("Replay a saved schedule.", "FILE", False)]
Workers = Annotated[int, Option("Number of processes.")]
Save = Annotated[Path, Option("Directory for failing schedules, and for the results of --auto-mutants so far.", "DIR")]
OnDevice = Annotated[
    str | None,
    Option(
        "Test a real device, cuda or cpu: only its transfers, unless --requests or --tensor-parallel is given.",
        "D",
        "a simulated device",
    ),
]
Blocks = Annotated[
    int | None,
    Option(
        "With --device: block transfers to run; with --mutations too: maximum for each mutation; with "
        "--tensor-parallel: on all ranks together.",
        absent="1,000,000 on cuda, 20,000 on cpu; with --tensor-parallel "
        f"{BLOCKS[CUDA]:,} on cuda, {BLOCKS[CPU]:,} on cpu",
    ),
]
Requests = Annotated[int | None, Option("With --device: test a whole engine with N requests.", absent=False)]
TensorParallel = Annotated[
    int | None,
    Option(
        "With --device: test a language model on N ranks: processes, each with a GPU or with the CPU.", absent=False
    ),
]
CheckOrder = Annotated[bool, Option("With --device: also run the order checker, with a tenth of the blocks.")]


def torture(
    context: typer.Context,
    names: Names = None,
    schedules: Schedules = None,
    minutes: Minutes = None,
    seed: Seed = 0,
    policy: Policies = None,
    features: With = None,
    first: First = False,
    mutations: Mutations = False,
    excuses: ExcusesFlag = False,
    auto_mutants: AutoMutants = False,
    only: Only = "",
    replay: ReplayFile = None,
    workers: Workers = 1,
    save: Save = Path("runs/torture"),
    device: OnDevice = None,
    blocks: Blocks = None,
    requests: Requests = None,
    tensor_parallel: TensorParallel = None,
    check_order: CheckOrder = False,
    as_json: AsJson = False,
) -> None:
    """Run the engine on a simulated device, in legal but unlikely orders of events, and check output and ordering."""
    _check_options(context, names or [])
    if device is not None:
        with _bar("mutations" if mutations else "torture", None) as show:
            if mutations:
                show_hunt(device, names or [], seed=seed, blocks=blocks, requests=requests, as_json=as_json, show=show)
            elif tensor_parallel is not None:
                show_ranks(device, ranks=tensor_parallel, seed=seed, blocks=blocks, as_json=as_json, show=show)
            elif requests is not None:
                show_service(device, seed=seed, requests=requests, as_json=as_json, show=show)
            else:
                show_campaign(device, seed=seed, blocks=blocks, check_order=check_order, as_json=as_json, show=show)
        return
    if replay is not None:
        _replay(replay, as_json=as_json)
        return
    if excuses:
        with _bar("excuses", None) as show:
            show_excuses(names or [], schedules=schedules, seed=seed, workers=workers, as_json=as_json, show=show)
        return
    _make_directory(save)
    if auto_mutants:
        with _bar("mutants", None) as show:
            show_mutants(only, schedules=schedules, seed=seed, workers=workers, save=save, as_json=as_json, show=show)
        return
    figures: list[Figure] = []
    details: dict[str, object] = {}
    interrupted = False
    if not mutations or schedules is not None or minutes is not None:
        failing = FailingSchedules(save)
        report = _campaign(
            _SCHEDULES if schedules is None else schedules,
            failing,
            minutes=minutes,
            seed=seed,
            policies=policy,
            features=features or [],
            workers=workers,
            first=first,
        )
        figures += _campaign_figures(report, rated=not policy and not features)
        interrupted = failing.show(report.failures, report.num_failures) or report.interrupted
    if mutations and not interrupted:
        found = _hunt(names or [], seed, workers)
        figures += _hunt_figures(found)
        details["mutations"] = [_as_json(row) for row in found.rows]
        interrupted = _show_rows(found, save) or found.interrupted
    publish("torture", "toy", figures, as_json=as_json, console=Console(), details=details, interrupted=interrupted)


def _check_options(context: typer.Context, names: Sequence[str]) -> None:
    """Raise ConfigError for an option that would have no effect."""
    of_device = {name: f"--{name.replace('_', '-')}" for name in _OF_DEVICE}
    of_simulation = ("schedules", "minutes", "seed", "mutations", "excuses", "only", "workers", "save")
    flags = _OF_CAMPAIGN | {name: f"--{name}" for name in of_simulation} | of_device
    flags["auto_mutants"] = "--auto-mutants"
    given = [flag for name, flag in flags.items() if was_given(context, name)]
    of_campaign = _OF_CAMPAIGN.values()
    if was_given(context, "device"):
        _check_device_options(context, given, names)
    elif others := [flag for flag in of_device.values() if flag in given]:
        raise ConfigError(f"{others[0]} is given without --device: give both, or leave it out")
    elif was_given(context, "replay"):
        if given or names:
            raise ConfigError(f"--replay takes everything from its file: leave {(given or names)[0]} out")
    elif "--auto-mutants" in given:
        if others := [flag for flag in ("--minutes", *of_campaign, "--mutations", "--excuses") if flag in given]:
            raise ConfigError(f"--auto-mutants does not work with {others[0]}: leave one of them out")
        if names:
            raise ConfigError(f"{names[0]} is given with --auto-mutants: write --only {names[0]}")
    elif "--only" in given:
        raise ConfigError("--only is given without --auto-mutants: give both, or leave it out")
    elif "--excuses" in given:
        if others := [flag for flag in ("--minutes", *of_campaign, "--mutations", "--save") if flag in given]:
            raise ConfigError(f"--excuses does not work with {others[0]}: leave one of them out")
    elif names and "--mutations" not in given:
        raise ConfigError(f"{names[0]} is given without --mutations or --excuses: give one of them, or leave it out")
    elif "--schedules" in given and "--minutes" in given:
        raise ConfigError("--schedules and --minutes are both given: give only one of them")
    elif "--mutations" not in given or "--schedules" in given or "--minutes" in given:
        return
    elif others := [flag for flag in of_campaign if flag in given]:
        raise ConfigError(
            f"{others[0]} is given, and --mutations uses all policies and workloads: leave one of them out, or give "
            "--schedules too"
        )


def _check_device_options(context: typer.Context, given: Sequence[str], names: Sequence[str]) -> None:
    """Raise ConfigError for an option that has no effect with `--device`."""
    simulated_only = [
        flag
        for flag in given
        if flag
        not in ("--device", "--blocks", "--requests", "--tensor-parallel", "--check-order", "--seed", "--mutations")
    ]
    if was_given(context, "replay"):
        simulated_only.append("--replay")
    if simulated_only:
        raise ConfigError(
            f"{simulated_only[0]} applies only to the simulated device: leave out that option or --device"
        )
    if names and "--mutations" not in given:
        raise ConfigError(f"{names[0]} is given without --mutations: give both, or leave it out")
    if "--tensor-parallel" in given and (
        others := [flag for flag in ("--mutations", "--requests", "--check-order") if flag in given]
    ):
        raise ConfigError(
            f"--tensor-parallel does not work with {others[0]}: leave one of them out; --blocks sets the length"
        )
    if "--requests" in given and (others := [flag for flag in ("--blocks", "--check-order") if flag in given]):
        raise ConfigError(f"--requests tests a whole engine, {others[0]} only transfers: leave one of them out")
    if "--check-order" in given and "--mutations" in given:
        raise ConfigError("--check-order does not work with --mutations, which compares bytes: leave one of them out")


def _campaign(
    schedules: int,
    failing: FailingSchedules,
    *,
    minutes: float | None,
    seed: int,
    policies: list[str] | None,
    features: list[str],
    workers: int,
    first: bool,
) -> Report:
    from proof.torture import POLICIES, torture

    with _bar("torture", schedules if minutes is None else minutes * 60) as show:

        def on_progress(report: Report) -> None:
            failing.keep(report.failures)
            findings = f"{report.num_failures} findings, " if report.num_failures else ""
            done = report.schedules if minutes is None else report.seconds
            show(
                done,
                f"{report.schedules} schedules, {findings}{report.schedules_per_minute * report.workers:,.0f} a minute",
            )

        return torture(
            schedules=schedules,
            minutes=minutes,
            seed=seed,
            policies=policies or POLICIES,
            features=features,
            workers=workers,
            first=first,
            on_progress=on_progress,
        )


def _hunt(names: list[str], seed: int, workers: int) -> Hunt:
    from proof.torture import hunt

    with _bar("mutations", None) as show:

        def on_progress(found: Hunt) -> None:
            show(len(found.rows) / found.total, f"{len(found.rows)} of {found.total}, {len(found.survivors)} survived")

        return hunt(names, seed=seed, workers=workers, on_progress=on_progress)


def _replay(path: Path, *, as_json: bool) -> None:
    from proof.mutations import find
    from proof.torture import load_replay, rerun

    schedule = load_replay(path)
    outcome = rerun(
        schedule.workload, schedule.turns, mutation=None if schedule.mutation is None else find(schedule.mutation)
    )
    console = Console(stderr=as_json)
    without = f", without {schedule.mutation}" if schedule.mutation else ""
    say(
        console,
        f"{path}: workload {schedule.workload.seed}{without}, {len(schedule.turns)} forced context switches",
    )
    show_outcome(console, outcome, schedule.oracle)
    if not outcome.findings:
        say(console, f"the schedule no longer fails; it failed with: {schedule.oracle}: {schedule.said}")
    if as_json:
        publish(
            "torture",
            "toy",
            [Figure("schedules", 1, "schedules"), _findings(len(outcome.findings))],
            as_json=True,
            console=console,
        )
    if outcome.findings:
        raise typer.Exit(1)


# ------------------------------------------------------------------ output


def _campaign_figures(report: Report, *, rated: bool) -> list[Figure]:
    """The figures of a campaign. `rated`: it ran all policies and workloads, so its speed has a bound if it was long
    enough.
    """
    rate = at_least(1000) if rated and report.schedules >= _RATED_SCHEDULES else None
    return [
        Figure("schedules", report.schedules, "schedules"),
        Figure("schedules_per_minute", report.schedules_per_minute, "schedules/min/core", rate),
        _findings(report.num_failures),
        Figure("steps_per_schedule", report.steps / max(report.schedules, 1), "steps"),
        Figure("decisions_per_schedule", report.decisions / max(report.schedules, 1), "decisions"),
        Figure("feature_pairs_missing", report.pairs_missing, "pairs"),
        Figure("outcome_digest", report.digest, ""),
    ]


def _findings(count: int) -> Figure:
    return Figure("findings", count, "schedules", at_most(0))


def _hunt_figures(found: Hunt) -> list[Figure]:
    after = sorted(row.killed.after for row in found.rows if row.killed is not None)
    return [
        Figure("mutations_total", len(found.rows), "mutations"),
        Figure("mutations_killed", len(after), "mutations", at_least(len(found.rows))),
        Figure("schedules_to_kill_p50", _percentile(after, 50), "schedules"),
        Figure("schedules_to_kill_p95", _percentile(after, 95), "schedules"),
        Figure("schedules_to_kill_max", _percentile(after, 100), "schedules", at_most(500)),
    ]


def _percentile(ascending: Sequence[int], percent: int) -> int:
    """The smallest value that at least `percent` % of the values do not exceed; 0 if there are none."""
    return ascending[max(0, -(-len(ascending) * percent // 100) - 1)] if ascending else 0


def _as_json(row: Row) -> dict[str, object]:
    """One mutation as JSON values; `killed_after` is None if no schedule detected the mutation."""
    killed = row.killed
    after, oracle = (killed.after, killed.oracle) if killed is not None else (None, None)
    return {"name": row.name, "hazard": row.hazard, "miniature": row.miniature, "killed_after": after, "oracle": oracle}


def _show_rows(found: Hunt, save: Path) -> bool:
    """Print the mutations on standard error. If there is only one, also save the schedule that detected it. Returns
    whether an interrupt has ended its shrinking.
    """
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
        return FailingSchedules(save, found.rows[0].name).show([killed.failure], 1)
    return False


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot create --save {directory}: {error.strerror or error}: give another directory"
        ) from error


@contextlib.contextmanager
def _bar(step: str, total: float | None) -> Iterator[ShowProgress]:
    """Context manager: a progress bar on standard error. `total` None: the caller reports fractions of one."""
    full = 1.0 if total is None else total
    with Steps() as steps:
        steps.update(step, 0, full, note="beginning")
        yield lambda done, text: steps.update(step, done, full, note=text)
