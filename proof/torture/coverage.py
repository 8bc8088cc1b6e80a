"""Finds the workloads whose schedules run a line of the product's code.

If no schedule runs a line, no schedule can detect its mutants. One schedule of each workload is run with Python's
tracing, which makes it several times slower.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from proof.mutations.marks import PACKAGES, below_package
from proof.torture.campaign import POLICIES, deal, run_one
from proof.torture.drawing import draw_workload

Reach = dict[str, dict[int, list[int]]]
"""Module (path below the package) → line → seeds of the workloads that run the line."""


def reach_of(
    modules: Sequence[Path], *, seed: int, workloads: int, file: Path, on_progress: Callable[[int], None]
) -> Reach:
    """The lines of these modules that each workload runs; blocks. `file` keeps the result for the next call with the
    same code.

    on_progress   called with the number of workloads so far
    """
    key = _key_of(seed, workloads)
    if file.is_file():
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["key"] == key:
            return {
                module: {int(line): seeds for line, seeds in lines.items()} for module, lines in kept["reach"].items()
            }
    reach: Reach = {}
    for number in range(seed, seed + workloads):
        for name, line in _lines_run(number, modules):
            reach.setdefault(name, {}).setdefault(line, []).append(number)
        on_progress(number - seed + 1)
    file.write_text(json.dumps({"key": key, "reach": reach}), encoding="utf-8")
    return reach


def seeds_that_reach(reach: Reach, module: Path, lines: Iterable[int]) -> list[int]:
    """Seeds of the workloads that run one of these lines, in order."""
    of_module = reach.get(_name(module), {})
    return sorted({seed for line in lines for seed in of_module.get(line, [])})


def _lines_run(seed: int, modules: Collection[Path]) -> set[tuple[str, int]]:
    names = {str(path): _name(path) for path in modules}
    found: set[tuple[str, int]] = set()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        return trace_lines if frame.f_code.co_filename in names else None

    def trace_lines(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            found.add((names[frame.f_code.co_filename], frame.f_lineno))
        return trace_lines

    workload = draw_workload(seed)
    sys.settrace(trace)
    threading.settrace(trace)
    try:
        run_one(workload, deal(seed, POLICIES), seed)
    finally:
        sys.settrace(None)
        threading.settrace(None)
    return found


def _name(path: Path) -> str:
    return below_package(path).as_posix()


def _key_of(seed: int, workloads: int) -> str:
    digest = hashlib.sha256(f"{seed} {workloads}".encode())
    for path in (path for package in PACKAGES for path in sorted(package.rglob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()
