"""`python -m proof torture --auto-mutants`: changes the statements that order work one by one; hunts each change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from proof.report import Figure, at_least, publish

if TYPE_CHECKING:
    from proof.torture import MutantHunt, MutantRow

_SHARE = 0.97


def show_mutants(
    only: str,
    *,
    schedules: int | None,
    seed: int,
    workers: int,
    save: Path,
    as_json: bool,
    show: Callable[[float, str], None],
) -> None:
    """Hunt the automatic mutants whose names match `only`, or all, and print the figures."""
    from proof.torture import SCHEDULES_PER_MUTANT, hunt_mutants

    def on_progress(step: str, report: MutantHunt) -> None:
        show(
            len(report.rows) / report.total,
            f"{len(report.rows)} of {report.total}, {len(report.open)} undetected: {step}",
        )

    report = hunt_mutants(
        only,
        schedules=SCHEDULES_PER_MUTANT if schedules is None else schedules,
        seed=seed,
        workers=workers,
        save=save,
        on_progress=on_progress,
    )
    _show_operators(report)
    _show_open(report.open)
    if report.reused:
        Console(stderr=True).print(
            f"{report.reused} results are those of an earlier run: delete their lines in {save} to try them again",
            markup=False,
        )
    details = {"mutants": [_as_json(row) for row in report.rows]}
    publish(
        "torture",
        "toy",
        _figures(report),
        as_json=as_json,
        console=Console(),
        details=details,
        interrupted=report.interrupted,
    )


def _figures(report: MutantHunt) -> list[Figure]:
    total = None if report.interrupted else at_least(report.total)
    return [
        Figure("auto_mutants_total", len(report.rows), "mutants", total),
        Figure("auto_mutants_detected_by_schedules", len(report.by("schedules")), "mutants"),
        Figure("auto_mutants_detected_by_tests", len(report.by("tests")), "mutants"),
        Figure("auto_mutants_equivalent", len(report.by("reason")), "mutants"),
        Figure("auto_mutants_open", len(report.open), "mutants"),
        Figure("auto_mutants_detected_or_equivalent", report.share, "share", at_least(_SHARE)),
    ]


def _as_json(row: MutantRow) -> dict[str, object]:
    """One row as JSON values. Only undetected mutants need their source: the names of others are enough."""
    values: dict[str, object] = {"name": row.name, "by": row.by or None, "finding": row.finding or None}
    values["schedules"] = row.schedules
    return values if row.by in ("schedules", "tests") else values | {"change": row.change}


def _show_operators(report: MutantHunt) -> None:
    """Print how many mutants of each operator were detected, on standard error."""
    table = Table(title="automatic mutants")
    for heading in ("operator", "mutants", "by schedules", "by tests", "equivalent", "open"):
        table.add_column(heading, justify="left" if heading == "operator" else "right")
    counts = Counter((row.name.split(":")[3], row.by) for row in report.rows)
    for operator in sorted({operator for operator, _ in counts}):
        of_operator = [counts[operator, by] for by in ("schedules", "tests", "reason", "")]
        table.add_row(operator, str(sum(of_operator)), *map(str, of_operator))
    Console(stderr=True).print(table)


def _show_open(rows: Sequence[MutantRow]) -> None:
    """Print the mutants that nothing detected, on standard error."""
    if not rows:
        return
    table = Table(title="undetected mutants")
    for heading in ("mutant", "change", "schedules"):
        table.add_column(heading, justify="right" if heading == "schedules" else "left", overflow="fold")
    for row in rows:
        table.add_row(escape(row.name), escape(row.change), str(row.schedules))
    Console(stderr=True).print(table)
