"""Write the tables of README, docs and bench/results/README.md from the files in bench/results and from the code.

    python -m bench.tables            # rewrite stale tables
    python -m bench.tables --check    # only name the pages with stale tables; exit status 1 if there are any

A table stands between its marker and `<!-- end -->`. NAME is a file of bench/results without its ending.

    <!-- figures: NAME … -->          all figures of these files
    <!-- bounds: NAME … -->           those that have a bound
    <!-- compared figures: NAME … --> all figures of these files, a column for each file; also `compared bounds`
    <!-- served: NAME -->             percentiles of every server in this result of `bench serve` (`served.py`)
    <!-- selected                     one row for each line, with words of its own
    NAME FIGURE: what it means
    -->
    <!-- hazards -->                  the hazards, from the code (`hazards.py`)
    <!-- mutants: NAME -->            the automatic mutants of this file that nothing detected (`mutants.py`)
    <!-- campaigns -->                campaigns of torture schedules, from bench/results/campaigns (`campaigns.py`)
    <!-- races -->                    other engines' races, from examples/races (`races.py`)
    <!-- sampling options -->         the sampling options, from the code (`sampling_options.py`)
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.campaigns import campaign_table, cpu_of
from bench.hazards import hazard_table
from bench.mutants import mutant_table
from bench.races import race_table
from bench.sampling_options import option_table
from bench.served import served_table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
_NAMED = "figures|bounds|compared figures|compared bounds|served|mutants"
_ALONE = "campaigns|hazards|races|sampling options"
_TABLE = re.compile(
    rf"(?P<marker><!-- (?:(?P<named>{_NAMED}): (?P<names>[\w\-.\s]+) -->|(?P<alone>{_ALONE}) -->"
    r"|selected\n(?P<rows>(?:[\w\-.]+ \w+: [^\n]+\n)+)-->)\n).*?(?P<end><!-- end -->)",
    re.DOTALL,
)
_MARKER = re.compile(rf"<!-- (?:{_NAMED}|{_ALONE}|compared|selected)\b")


def table(names: list[str], *, bounded: bool = False, compared: bool = False) -> str:
    """Markdown table of all figures in several result files, with the machines and commands below it.

    bounded    only figures that have a bound
    compared   a column for each file, instead of one file below the other
    """
    reports = [_report(name) for name in names]
    labels = " | ".join(f"`{name}`" for name in names) if compared else "measured"
    columns = len(names) if compared else 1
    lines = [f"| figure | {labels} | unit | bound |", f"| --- |{' ---: |' * columns} --- | --- |"]
    for first in range(0, len(names), columns):
        rows: dict[str, list[dict[str, Any] | None]] = {}
        for column, report in enumerate(reports[first : first + columns]):
            for figure in report["figures"]:
                if not bounded or figure["bound"] is not None:
                    rows.setdefault(figure["name"], [None] * columns)[column] = figure
        for name, row in rows.items():
            figures = [figure for figure in row if figure is not None]
            bounds = " / ".join(dict.fromkeys(figure["bound"] for figure in figures if figure["bound"]))
            values = " | ".join(_value(figure) if figure else "" for figure in row)
            lines.append(f"| `{name}` | {values} | {figures[0]['unit']} | {bounds} |")
    return "\n".join([*lines, "", _sources(reports), ""])


def selected_table(rows: str) -> str:
    """Markdown table of single figures, one for each line `NAME FIGURE: words`. Raises KeyError for another."""
    lines = ["| figure | measured | bound | machine |", "| --- | ---: | --- | --- |"]
    for row in rows.splitlines():
        where, words = row.split(": ", 1)
        name, wanted = where.split()
        report = _report(name)
        figure = {figure["name"]: figure for figure in report["figures"]}[wanted]
        environment = report["environment"]
        machine = environment.get("gpu") or cpu_of(environment)
        lines.append(f"| {words} | {_value(figure)} | {figure['bound'] or ''} | {machine} |")
    return "\n".join([*lines, ""])


def rewritten(text: str) -> str:
    """The text with every marked table made anew. Raises ValueError if a marker matches no table."""
    marked, markers = len(_TABLE.findall(text)), len(_MARKER.findall(text))
    if marked != markers:
        raise ValueError(f"{markers} markers of tables, of which {marked} name files and have an end: see tables.py")
    return _TABLE.sub(lambda found: found["marker"] + _table_of(found) + found["end"], text)


def _table_of(found: re.Match[str]) -> str:
    names, kind = (found["names"] or "").split(), found["named"] or found["alone"]
    if kind is None:
        return selected_table(found["rows"])
    made: dict[str, Callable[[], str]] = {
        "served": lambda: served_table(_report(*names)),
        "mutants": lambda: mutant_table(_report(*names)),
        "campaigns": lambda: campaign_table(_campaigns()),
        "hazards": hazard_table,
        "races": race_table,
        "sampling options": option_table,
    }
    figures = partial(table, names, bounded="bounds" in kind, compared="compared" in kind)
    return made.get(kind, figures)()


def _report(name: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return report


def _campaigns() -> list[dict[str, Any]]:
    return [_report(f"campaigns/{path.stem}") for path in (RESULTS / "campaigns").glob("*.json")]


def _value(figure: dict[str, Any]) -> str:
    """The value, and **no** if it misses its bound."""
    value = figure["value"]
    number = f"{value:,.0f}" if value == int(value) else f"{value:.4g}"
    return f"{number} **no**" if figure["holds"] is False else number


def _sources(reports: list[dict[str, Any]]) -> str:
    runs: dict[tuple[str, str], list[str]] = {}
    for report in reports:
        e = report["environment"]
        gpu = f"{e['gpu']}, " if "gpu" in e else ""
        machine = f"{gpu}{cpu_of(e)}, torch {e['torch']}, transformers {e['transformers']}"
        runs.setdefault((machine, e["date"]), []).append(e["model"])
    machines = "; ".join(f"{on}, {'; '.join(dict.fromkeys(of))}, {date}" for (on, date), of in sorted(runs.items()))
    commands = ", ".join(f"`{report['command']}`" for report in reports)
    text = f"Machine: {machines}. Commands: {commands}."
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def main() -> int:
    """Rewrite, or check; 1 when `--check` found a stale table."""
    stale = []
    for path in (ROOT / "README.md", RESULTS / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = path.read_text(encoding="utf-8")
        if (new := rewritten(text)) != text:
            stale.append(path.relative_to(ROOT))
            if "--check" not in sys.argv:
                path.write_text(new, encoding="utf-8")
    for path in stale:
        print(f"{path}: {'stale: run make tables' if '--check' in sys.argv else 'rewritten'}")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
