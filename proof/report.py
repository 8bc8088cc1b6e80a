"""The output of every benchmark: named figures with their bounds, and the environment of the measurement."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import typer
from rich.console import Console
from rich.table import Table

from sidestream.version import VERSION
from sidestream_kv.device.machine import cpu_name, instruction_set

INTERRUPTED = 130
"""Exit status of a benchmark that an interrupt has ended early."""
_LOOPS, _LOOP_ROUNDS = 5, 200_000


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower or upper bound of a figure."""

    kind: Literal["at most", "at least"]
    value: float

    def holds(self, value: float) -> bool:
        """Whether `value` is within the bound."""
        return value <= self.value if self.kind == "at most" else value >= self.value

    def __str__(self) -> str:
        return f"{self.kind} {self.value:.4g}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value, with or without a bound."""

    name: str
    value: float
    unit: str
    bound: Bound | None = None

    @property
    def holds(self) -> bool | None:
        """Whether the bound holds; None without a bound."""
        return None if self.bound is None else self.bound.holds(self.value)

    def plain(self) -> dict[str, object]:
        """The figure as JSON values."""
        value = round(self.value, 6)
        return {
            "name": self.name,
            "value": value,
            "unit": self.unit,
            "bound": None if self.bound is None else str(self.bound),
            "holds": self.holds,
        }


def at_most(value: float) -> Bound:
    """An upper bound."""
    return Bound("at most", value)


def at_least(value: float) -> Bound:
    """A lower bound."""
    return Bound("at least", value)


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile `percent` (0 to 100) of `values`, with linear interpolation between the two nearest values.
    `values` must not be empty.
    """
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _python_loop_ms() -> float:
    """Milliseconds of one core for a fixed Python loop, the fastest of five: figures of different machines can be
    compared with it. Includes the time that other programs take on the core.
    """
    fastest_s = math.inf
    for _ in range(_LOOPS):
        started_s, total = time.perf_counter(), 0
        for number in range(_LOOP_ROUNDS):
            total = (total * 31 + number) & 0xFFFF_FFFF
        fastest_s = min(fastest_s, time.perf_counter() - started_s)
    return round(fastest_s * 1e3, 2)


def environment(model: str, dtype: str | None = None) -> dict[str, object]:
    """The machine and the versions of packages, on which the figures depend.

    dtype   data type of the loaded model; None: no model is loaded
    """
    from importlib.metadata import version  # takes 20 ms to import

    import torch

    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_initialized() else {}  # type: ignore[no-untyped-call]
    return gpu | {
        "date": datetime.now(UTC).date().isoformat(),
        "model": model,
        **({} if dtype is None else {"dtype": dtype}),
        "cpu": cpu_name(),
        "instruction_set": instruction_set(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python_loop_ms": _python_loop_ms(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "transformers": version("transformers"),
        "sidestream": VERSION,
        **({"ray": version("ray")} if "ray" in sys.modules else {}),
    }


def command_line() -> str:
    """The command line, quoted for a shell: `python -m bench prefix --json`."""
    spec = sys.modules["__main__"].__spec__
    program = [Path(sys.argv[0]).name] if spec is None else ["python", "-m", spec.name.removesuffix(".__main__")]
    return shlex.join([*program, *sys.argv[1:]])


def publish(
    bench: str,
    model: str,
    figures: Sequence[Figure],
    *,
    as_json: bool,
    console: Console,
    dtype: str | None = None,
    details: Mapping[str, object] | None = None,
    interrupted: bool = False,
) -> None:
    """Print the figures as one JSON object or as a table. The last call of every benchmark: raises typer.Exit with 1 if
    a bound does not hold, after a line for each such figure on standard error, and with 130 after an interrupt.

    dtype        data type of the loaded model; only in the JSON object
    details      further keys of the JSON object
    interrupted  an interrupt has ended the measurement early
    """
    if as_json:
        report: dict[str, object] = {
            "bench": bench,
            "environment": environment(model, dtype),
            "command": command_line(),
            "figures": [f.plain() for f in figures],
        }
        report |= details or {}
        print(json.dumps(report, indent=2))
    else:
        table = Table(title=f"bench {bench}")
        for heading in ("figure", "value", "unit", "bound", "holds"):
            table.add_column(heading, justify="right" if heading == "value" else "left")
        for figure in figures:
            verdict = {True: "[green]yes[/]", False: "[red]no[/]", None: ""}[figure.holds]
            table.add_row(figure.name, f"{figure.value:.4g}", figure.unit, str(figure.bound or ""), verdict)
        console.print(table)
    missed = [figure for figure in figures if figure.holds is False]
    for figure in missed:
        text = f"bound missed: {figure.name} is {figure.value:.6g} {figure.unit}, and must be {figure.bound}"
        Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)
    if missed or interrupted:
        raise typer.Exit(1 if missed else INTERRUPTED)


def was_given(context: typer.Context, name: str) -> bool:
    """Whether the command line sets the parameter `name`, even to its default."""
    return getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
