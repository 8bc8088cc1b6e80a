"""`sidestream doctor`: checks the machine and suggests remedies."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sidestream.cli.declare import Option
from sidestream.cli.options import AsJson
from sidestream.cli.probes import Finding, Status, findings
from sidestream.cli.progress import Steps

_MARKS = {Status.OK: ("✓", "green"), Status.WARN: ("!", "yellow"), Status.FAIL: ("✗", "red")}


def doctor(
    disk: Annotated[
        Path | None,
        Option("Measure the disk of this directory.", "DIR", "the cache directory"),
    ] = None,
    model: Annotated[
        str | None,
        Option("Report the memory that KV and recurrent states of this model take.", "MODEL"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine: versions of packages, cores, memory, GPUs, speed of copies and of the disk.

    The exit status is 1 if serving is impossible, else 0.
    """
    found: list[Finding] = []
    with Steps() as steps:
        steps.update("measuring")
        for finding in findings(disk, model):
            found.append(finding)
            steps.update("measuring", note=f"{finding.name} is done")
    serves = all(finding.status is not Status.FAIL for finding in found)
    if as_json:
        print(json.dumps({"serves": serves, "findings": [dataclasses.asdict(finding) for finding in found]}, indent=2))
    else:
        _print(found, serves)
    raise typer.Exit(0 if serves else 1)


def _print(found: Iterable[Finding], serves: bool) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(width=1)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for finding in found:
        mark, colour = _MARKS[finding.status]
        text = Text(finding.text)
        if finding.remedy:
            text.append(f"\n→ {finding.remedy}", style=colour)
        table.add_row(Text(mark, style=colour), finding.name, text)
    console = Console()
    console.print(table)
    console.print(
        "\nThis machine can serve." if serves else "\n[red]This machine cannot serve yet:[/red] see ✗ above.",
        highlight=False,
    )
