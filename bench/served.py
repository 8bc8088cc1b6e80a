"""The table of served figures for docs/benchmarks.md: one row for each load and quantity, with the percentiles of all
requests of the run for each server.
"""

from __future__ import annotations

import re
from typing import Any

_NAME = re.compile(
    r"(?P<label>\w+?)_(?P<quantity>(?:ttft|itl|tpot|e2e)_ms)_p(?P<percent>\d+)_(?P<load>b\d+|poisson\d+)"
)
_RATE = re.compile(r"(?P<label>\w+?)_(?P<quantity>tok_s|requests_per_s)_(?P<load>b\d+|poisson\d+)")
_PERCENTS = ("50", "90", "99")


def served_table(report: dict[str, Any]) -> str:
    """Markdown table of a report of `bench serve`: a column for each server, in it p50 / p90 / p99, or one rate."""
    cells: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for figure in report["figures"]:
        found = _NAME.fullmatch(figure["name"]) or _RATE.fullmatch(figure["name"])
        if found is None or "_over_" in found["label"]:
            continue
        percent = found.groupdict().get("percent", "")
        row = cells.setdefault((found["load"], found["quantity"]), {})
        row.setdefault(found["label"], {})[percent] = figure["value"]
    labels = list(dict.fromkeys(label for row in cells.values() for label in row))
    lines = [f"| load | figure | {' | '.join(labels)} |", "| --- | --- |" + " ---: |" * len(labels)]
    for (load, quantity), row in cells.items():
        values = " | ".join(_cell(row.get(label, {})) for label in labels)
        lines.append(f"| `{load}` | `{quantity}` | {values} |")
    return "\n".join([*lines, ""])


def _cell(values: dict[str, float]) -> str:
    if "" in values:
        return f"{values['']:,.4g}" if values[""] < 1000 else f"{values['']:,.0f}"
    return " / ".join(f"{values[percent]:,.1f}" for percent in _PERCENTS if percent in values)
