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
    <!-- campaigns together -->       their sums
    <!-- races -->                    other engines' races, from examples/races (`races.py`)
    <!-- sampling options -->         the sampling options, from the code (`sampling_options.py`)
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from bench.campaigns import campaign_sums, campaign_table, cpu_of
from bench.hazards import hazard_table
from bench.mutants import mutant_table
from bench.races import race_table
from bench.sampling_options import option_table
from bench.served import served_table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
_FILES = re.compile(
    r"(<!-- (?P<which>figures|bounds): (?P<names>[\w\-. ]+) -->\n)(?P<table>.*?)(?P<end><!-- end -->)", re.DOTALL
)
_COMPARED = re.compile(
    r"(<!-- compared (?P<which>figures|bounds): (?P<names>[\w\-.\s]+) -->\n)(?P<table>.*?)(?P<end><!-- end -->)",
    re.DOTALL,
)
_SELECTED = re.compile(
    r"(<!-- selected\n(?P<rows>(?:[\w\-.]+ \w+: [^\n]+\n)+)-->\n)(?P<table>.*?)(?P<end><!-- end -->)", re.DOTALL
)
_HAZARDS = re.compile(r"(<!-- hazards -->\n)(?P<table>.*?)(?P<end><!-- end -->)", re.DOTALL)
_RACES = re.compile(r"(<!-- races -->\n)(?P<table>.*?)(?P<end><!-- end -->)", re.DOTALL)
_MUTANTS = re.compile(r"(<!-- mutants: (?P<name>[\w\-.]+) -->\n)(?P<table>.*?)(?P<end><!-- end -->)", re.DOTALL)
_CAMPAIGNS = re.compile(r"(<!-- campaigns -->\n)(?P<table>.*?)(?P<end><!-- end -->)", re.DOTALL)
_SUMS = re.compile(r"(<!-- campaigns together -->\n)(?P<table>.*?)(?P<end><!-- end -->)", re.DOTALL)
_SERVED = re.compile(r"(<!-- served: (?P<name>[\w\-.]+) -->\n)(?P<table>.*?)(?P<end><!-- end -->)", re.DOTALL)
_OPTIONS = re.compile(r"(<!-- sampling options -->\n)(?P<table>.*?)(<!-- end -->)", re.DOTALL)
_TABLES = (_FILES, _COMPARED, _SERVED, _SELECTED, _MUTANTS, _CAMPAIGNS, _SUMS, _HAZARDS, _RACES, _OPTIONS)
_MARKER = re.compile(
    r"<!-- (?:figures|bounds|compared|served|selected|mutants|campaigns|hazards|races|sampling options)\b"
)


def table(names: list[str], *, bounded: bool = False) -> str:
    """Markdown table of all figures in several result files, with the machines and commands below it.

    bounded   only figures that have a bound
    """
    reports = [_report(name) for name in names]
    lines = ["| figure | measured | unit | bound |", "| --- | ---: | --- | --- |"]
    for report in reports:
        for figure in report["figures"]:
            if bounded and figure["bound"] is None:
                continue
            cells = (f"`{figure['name']}`", _judged(figure), figure["unit"], figure["bound"] or "")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", _sources(reports), ""])


def compared_table(names: list[str], *, bounded: bool = False) -> str:
    """Markdown table of all figures in several result files of one kind: a row for each figure, a column for each file.

    bounded   only figures of a file that have a bound there
    """
    reports = [_report(name) for name in names]
    rows: dict[str, dict[int, dict[str, Any]]] = {}
    for column, report in enumerate(reports):
        for figure in report["figures"]:
            if not bounded or figure["bound"] is not None:
                rows.setdefault(figure["name"], {})[column] = figure
    labels = " | ".join(f"`{label}`" for label in _different_parts(names))
    lines = [f"| figure | {labels} | unit | bound |", f"| --- |{' ---: |' * len(names)} --- | --- |"]
    for name, figures in rows.items():
        cells = [_judged(figures[column]) if column in figures else "" for column in range(len(names))]
        bounds = " / ".join(dict.fromkeys(figure["bound"] for figure in figures.values() if figure["bound"]))
        unit = next(iter(figures.values()))["unit"]
        lines.append(f"| `{name}` | {' | '.join(cells)} | {unit} | {bounds} |")
    return "\n".join([*lines, "", _sources(reports), ""])


def selected_table(rows: str) -> str:
    """Markdown table of single figures, one for each line `NAME FIGURE: words`. Raises KeyError for another."""
    lines = ["| figure | measured | bound | holds | machine |", "| --- | ---: | --- | --- | --- |"]
    for row in rows.splitlines():
        where, words = row.split(": ", 1)
        name, wanted = where.split()
        report = _report(name)
        figure = {figure["name"]: figure for figure in report["figures"]}[wanted]
        environment = report["environment"]
        machine = environment.get("gpu") or cpu_of(environment)
        lines.append(f"| {words} | {_value(figure)} | {figure['bound'] or ''} | {_holds(figure)} | {machine} |")
    return "\n".join([*lines, ""])


def rewritten(text: str) -> str:
    """The text with every marked table made anew. Raises ValueError if a marker matches no table."""
    marked = sum(len(pattern.findall(text)) for pattern in _TABLES)
    markers = len(_MARKER.findall(text))
    if marked != markers:
        raise ValueError(
            f"{markers} markers of tables, of which {marked} name files and have an end: "
            "see the head of bench/tables.py"
        )
    text = _FILES.sub(
        lambda found: found[1] + table(found["names"].split(), bounded=found["which"] == "bounds") + found["end"], text
    )
    text = _COMPARED.sub(
        lambda found: (
            found[1] + compared_table(found["names"].split(), bounded=found["which"] == "bounds") + found["end"]
        ),
        text,
    )
    text = _SELECTED.sub(lambda found: found[1] + selected_table(found["rows"]) + found["end"], text)
    text = _MUTANTS.sub(lambda found: found[1] + mutant_table(_report(found["name"])) + found["end"], text)
    text = _SERVED.sub(lambda found: found[1] + served_table(_report(found["name"])) + found["end"], text)
    text = _OPTIONS.sub(lambda found: found[1] + option_table() + found[3], text)
    text = _CAMPAIGNS.sub(lambda found: found[1] + campaign_table(_campaigns()) + found["end"], text)
    text = _SUMS.sub(lambda found: found[1] + campaign_sums(_campaigns()) + found["end"], text)
    text = _RACES.sub(lambda found: found[1] + race_table() + found["end"], text)
    return _HAZARDS.sub(lambda found: found[1] + hazard_table() + found["end"], text)


def _report(name: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return report


def _campaigns() -> list[dict[str, Any]]:
    return [_report(f"campaigns/{path.stem}") for path in (RESULTS / "campaigns").glob("*.json")]


def _value(figure: dict[str, Any]) -> str:
    value = figure["value"]
    return f"{value:,.0f}" if value == int(value) else f"{value:.4g}"


def _holds(figure: dict[str, Any]) -> str:
    return {True: "yes", False: "**no**", None: ""}[figure["holds"]]


def _judged(figure: dict[str, Any]) -> str:
    return f"{_value(figure)} **no**" if figure["holds"] is False else _value(figure)


def _different_parts(names: list[str]) -> list[str]:
    """The names without the first and last words that all of them have; whole, if one would be empty."""
    words = [name.split("-") for name in names]
    first = next((at for at, column in enumerate(zip(*words, strict=False)) if len(set(column)) > 1), 0)
    backwards = [list(reversed(name)) for name in words]
    last = next((at for at, column in enumerate(zip(*backwards, strict=False)) if len(set(column)) > 1), 0)
    parts = ["-".join(name[first : len(name) - last]) for name in words]
    return parts if all(parts) else names


def _sources(reports: list[dict[str, Any]]) -> str:
    runs: dict[tuple[str, str], list[str]] = {}
    for report in reports:
        environment = report["environment"]
        runs.setdefault((_machine(report), environment["date"]), []).append(environment["model"])
    machines = "; ".join(
        f"{where}, {'; '.join(dict.fromkeys(of))}, {date}" for (where, date), of in sorted(runs.items())
    )
    commands = ", ".join(f"`{report['command']}`" for report in reports)
    return _wrapped(f"Machine: {machines}. Commands: {commands}.")


def _machine(report: dict[str, Any]) -> str:
    e = report["environment"]
    gpu = f"{e['gpu']}, " if "gpu" in e else ""
    return f"{gpu}{cpu_of(e)}, torch {e['torch']}, transformers {e['transformers']}"


def _wrapped(text: str) -> str:
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
