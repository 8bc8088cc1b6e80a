"""Write the tables of README and docs from the files in bench/results; with `--check`, only say whether they are up to
date.

A table stands between `<!-- figures: NAME … -->` and `<!-- end -->`; NAME is a file of bench/results without its
ending. `bounds` in the place of `figures` shows only those that have a bound. The table of hazards stands behind `<!--
hazards -->` and is made from the code (`hazards.py`).
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from hazards import hazard_table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
_MARKED = re.compile(
    r"(<!-- (?P<which>figures|bounds): (?P<names>[\w\-. ]+) -->\n)(?P<table>.*?)(?P<end><!-- end -->)", re.DOTALL
)
_MARKER = re.compile(r"<!-- (?:figures|bounds)\b")
_HAZARDS = re.compile(r"(<!-- hazards -->\n)(?P<table>.*?)(<!-- end -->)", re.DOTALL)


def table(names: list[str], *, bounded: bool = False) -> str:
    """One markdown table for several result files, with the machine and the commands below it. `bounded`: only figures
    that have a bound.
    """
    reports = [json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in names]
    lines = ["| figure | measured | unit | bound | holds |", "| --- | ---: | --- | --- | --- |"]
    for report in reports:
        for figure in report["figures"]:
            if bounded and figure["bound"] is None:
                continue
            holds = {True: "yes", False: "**no**", None: ""}[figure["holds"]]
            value = figure["value"]
            shown = f"{value:,.0f}" if value == int(value) else f"{value:.4g}"
            lines.append(f"| `{figure['name']}` | {shown} | {figure['unit']} | {figure['bound'] or ''} | {holds} |")
    machines = {
        f"{e['gpu'] + ', ' if 'gpu' in e else ''}{e['cpu']}, {e['cores']} cores, torch {e['torch']}, transformers {e['transformers']}, {e['model']}, {e['date']}"
        for e in (report["environment"] for report in reports)
    }
    commands = ", ".join(f"`{report['command']}`" for report in reports)
    return "\n".join([*lines, "", f"Machine: {'; '.join(sorted(machines))}. Commands: {commands}.", ""])


def rewritten(text: str) -> str:
    """The text with every marked table made anew. Raises ValueError for a marker that names no table, which would stay
    as it is, unseen.
    """
    marked, markers = len(_MARKED.findall(text)), len(_MARKER.findall(text))
    if marked != markers:
        raise ValueError(
            f"{markers} markers of tables, of which {marked} name files and have an end: see the head of bench/tables.py"
        )
    text = _MARKED.sub(
        lambda found: found[1] + table(found["names"].split(), bounded=found["which"] == "bounds") + found["end"], text
    )
    return _HAZARDS.sub(lambda found: found[1] + hazard_table() + found[3], text)


def main() -> int:
    """Rewrite, or check; 1 when `--check` found a stale table."""
    stale = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
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
