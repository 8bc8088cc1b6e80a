"""The table of automatic mutants that nothing detected, for bench/results/README.md, from a file of bench/results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def mutant_table(report: Mapping[str, Any]) -> str:
    """One markdown row for each mutant that is equivalent or open."""
    lines = ["| automatic mutant | change | equivalent, because |", "| --- | --- | --- |"]
    for row in report["mutants"]:
        if row["by"] in ("schedules", "tests"):
            continue
        change = row["change"].replace("|", "\\|")
        lines.append(f"| `{row['name'].removeprefix('auto:')}` | `{change}` | {row['finding'] or '**open**'} |")
    return "\n".join([*lines, ""])
