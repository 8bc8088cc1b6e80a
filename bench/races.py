"""The table of other engines' races for docs/races.md, from the programs in examples/races: their docstrings, and the
schedules that show the races.

    python -m bench.races           # the table
    python -m bench.races --json    # the figures: bench/results/races-cpu.json. A minute of one core
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from proof.miniatures import MINIATURES, RULES, as_program
from proof.report import Figure, at_least, at_most, environment
from sidestream_order.exhaust import exhaust
from sidestream_order.explore import SCHEDULES, Exploration, explore, replay

SAMPLE = 50
ORDERS = 2000
RACES = Path(__file__).resolve().parent.parent / "examples" / "races"
_PROJECTS = {"vllm": "vLLM", "sglang": "SGLang", "rtp-llm": "RTP-LLM", "tokenspeed": "TokenSpeed"}
_THREAD = re.compile(r"https://github\.com/[\w.-]+/(?P<name>[\w.-]+)/(?:pull|issues)/(?P<number>\d+)")
_PART = re.compile(r"^(Thread|Simplified|Fix)( \(ours\))?: (.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Race:
    """One file of examples/races.

    title       first line of its docstring
    thread      address of the public thread
    parts       the docstring's other parts, by name: `Thread`, `Simplified` and `Fix`
    program     function of a device and `fixed`
    """

    path: Path
    title: str
    thread: str
    parts: dict[str, str]
    program: Callable[..., None]

    def run(self, *, fixed: bool) -> Exploration:
        """300 schedules, or fewer until the first finding."""
        return explore(partial(self.program, fixed=fixed))

    @property
    def label(self) -> str:
        """Project and number of the thread."""
        found = _THREAD.fullmatch(self.thread)
        assert found is not None
        return f"{_PROJECTS.get(found['name'], found['name'])} #{found['number']}"


def races() -> list[Race]:
    """All programs, by file name. Raises ValueError for a docstring without thread, simplification or fix."""
    return [_race(path) for path in sorted(RACES.glob("*.py"))]


def race_table() -> str:
    """One markdown row for each race."""
    lines = [
        "| thread | race | the checker's finding | wrong results | fix |",
        "| --- | --- | --- | --- | --- |",
    ]
    for race in races():
        found = race.run(fixed=False).found
        assert found is not None
        kind = found.problem.kind[1] or found.problem.oracle
        cells = (
            f"[{race.label}]({race.thread})<br>[{race.path.name}](../examples/races/{race.path.name})",
            race.title,
            f"`{kind}`, schedule {found.schedule}",
            f"{wrong_results(race.program)} of {SAMPLE}",
            race.parts["Fix"],
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def wrong_results(program: Callable[..., None]) -> int:
    """The number of random schedules, of `SAMPLE`, in which the published program's own assertion fails."""
    published = partial(program, fixed=False)
    runs = (replay(published, "random", seed, trace=False) for seed in range(SAMPLE))
    return sum("assertion" in run.oracles for run in runs)


def figures() -> list[Figure]:
    """Races found within 300 schedules each, the schedules that the slowest took, and findings with the fixes, also in
    all orders that can make a difference; and the miniatures' protections in all orders.
    """
    programs = races()
    found = [result.found.schedule for race in programs if (result := race.run(fixed=False)).found is not None]
    fixed = [race.run(fixed=True) for race in programs]
    orders = [exhaust(partial(race.program, fixed=True), limit=ORDERS) for race in programs]
    small = [exhaust(as_program(one, protected=True), limit=ORDERS, rules=RULES) for one in MINIATURES]
    whole = [done for done in small if done.complete]
    return [
        Figure("museum_total", len(programs), "programs"),
        Figure("museum_found", len(found), "programs", at_least(len(programs))),
        Figure("museum_schedules_max", max(found, default=0), "schedules", at_most(SCHEDULES)),
        Figure("museum_findings_with_fix", sum(run.found is not None for run in fixed), "programs", at_most(0)),
        Figure("museum_schedules_with_fix", sum(run.schedules for run in fixed), "schedules"),
        Figure("museum_fixes_in_all_orders", sum(done.complete for done in orders), "programs", at_least(len(orders))),
        Figure("museum_orders_max", max(done.schedules for done in orders), "schedules"),
        Figure("miniatures_total", len(small), "programs"),
        Figure("miniatures_in_all_orders", len(whole), "programs"),
        Figure("miniatures_orders_max", max(done.schedules for done in whole), "schedules"),
        Figure("miniatures_findings", sum(done.problem is not None for done in small), "programs", at_most(0)),
    ]


def _race(path: Path) -> Race:
    source = path.read_text(encoding="utf-8")
    title, _, rest = (ast.get_docstring(ast.parse(source)) or "").partition("\n")
    parts = {name: _sentence(f"{'ours: ' if ours else ''}{text}") for name, ours, text in _PART.findall(rest)}
    thread = _THREAD.search(parts.get("Thread", ""))
    if thread is None or set(parts) != {"Thread", "Simplified", "Fix"}:
        raise ValueError(
            f"{path.name}: its docstring has {sorted(parts)}: give Thread with an address, Simplified, Fix"
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Race(path, title, thread[0], parts, module.program)


def _sentence(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    if sys.argv[1:] == ["--json"]:
        report = {"bench": "races", "environment": environment("no model"), "command": "python -m bench.races --json"}
        print(json.dumps(report | {"figures": [figure.plain() for figure in figures()]}, indent=2))
    else:
        print(race_table())
