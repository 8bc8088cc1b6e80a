"""`python -m proof torture --excuses`: checks the excuses: reasons why no schedule detects the removal of a rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from proof.report import Figure, at_least, at_most, publish

if TYPE_CHECKING:
    from proof.torture import ExcuseRow, Excuses


def show_excuses(
    names: Sequence[str],
    *,
    schedules: int | None,
    seed: int,
    workers: int,
    as_json: bool,
    show: Callable[[float, str], None],
) -> None:
    """Check the excuses of the rules `names` (of all rules if `names` is empty), and print the figures."""
    from proof.torture import SCHEDULES_PER_EXCUSE, check_excuses

    def on_progress(report: Excuses) -> None:
        show(len(report.rows) / report.total, f"{len(report.rows)} of {report.total}, {len(report.wrong)} wrong")

    report = check_excuses(
        names,
        schedules=SCHEDULES_PER_EXCUSE if schedules is None else schedules,
        seed=seed,
        workers=workers,
        on_progress=on_progress,
    )
    figures = [
        Figure("excuses_checked", len(report.rows), "rules", None if report.interrupted else at_least(report.total)),
        Figure("excuses_wrong", len(report.wrong), "rules", at_most(0)),
        Figure("excuses_with_a_test", sum(bool(row.noticed_by) for row in report.rows), "rules"),
        Figure("schedules", report.schedules, "schedules"),
    ]
    _show_wrong(report.wrong)
    details = {"excuses": [_as_json(row) for row in report.rows]}
    publish(
        "torture",
        "toy",
        figures,
        as_json=as_json,
        console=Console(),
        details=details,
        interrupted=report.interrupted,
    )


def _as_json(row: ExcuseRow) -> dict[str, object]:
    return {"name": row.name, "noticed_by": row.noticed_by, "wrong": row.wrong}


def _show_wrong(rows: Sequence[ExcuseRow]) -> None:
    """Print the wrong excuses on standard error."""
    if not rows:
        return
    table = Table(title="wrong excuses")
    table.add_column("rule")
    table.add_column("error")
    for row in rows:
        table.add_row(row.name, escape(row.wrong))
    Console(stderr=True).print(table)
