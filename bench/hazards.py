"""Makes docs/ordering.md's table of hazards from the code: miniature programs, their tests, the number of mutations."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

from proof.miniatures import MINIATURES
from proof.mutations import ELSEWHERE, HAZARDS, MUTATIONS

RACES = Path(__file__).resolve().parent.parent / "tests" / "races"


def hazard_table() -> str:
    """One markdown row for each hazard."""
    tests = _tests_by_miniature()
    lines = ["| | hazard | miniature: its test | mutations |", "| --- | --- | --- | --- |"]
    for hazard, sentence in HAZARDS.items():
        played = [f"{one.name}: {_code(tests[one.name])}" for one in MINIATURES if one.hazard == hazard]
        mutated = sum(mutation.hazard == hazard for mutation in MUTATIONS)
        lines.append(f"| {hazard} | {sentence} | {'<br>'.join(played)} | {mutated or 'none: ' + ELSEWHERE[hazard]} |")
    return "\n".join([*lines, ""])


def _tests_by_miniature() -> dict[str, list[str]]:
    """Names of the tests that say `reenact("MINIATURE", …)`."""
    found: dict[str, list[str]] = {miniature.name: [] for miniature in MINIATURES}
    for path in sorted(RACES.glob("test_*.py")):
        for test in ast.parse(path.read_text(encoding="utf-8")).body:
            for node in ast.walk(test):
                match node:
                    case ast.Call(func=ast.Name(id="reenact"), args=[ast.Constant(value=str(name)), *_]) if isinstance(
                        test, ast.FunctionDef
                    ):
                        found[name].append(test.name)
    return found


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
