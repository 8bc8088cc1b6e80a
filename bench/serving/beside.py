"""Combines the figures of several servers in one report: first the figures of earlier runs of `python -m bench serve`,
then the figures of this run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from proof.report import Figure, at_least, at_most
from sidestream.errors import ConfigError

# Names of the figures that `measure.row` and `arrival_rows` make. Figures of the engine without a server have the label
# `engine`.
_ROW = re.compile(
    r"(?P<label>(?:(?!_over_).)+?)(?P<steady>_steady)?"
    r"_(?P<quantity>tok_s|(?:ttft|itl|tpot|e2e)_ms_p\d+|burst_share|requests_per_s)_(?P<load>b\d+|poisson\d+)"
)
_NO_SERVER = "engine"
# The figures of which there are ratios, and their bounds: faster than the other server, in each of them.
_RATIOS = {
    "tok_s": at_least(1.03),
    "ttft_ms_p50": None,
    "ttft_ms_p99": at_most(1.0),
    "itl_ms_p90": at_most(1.0),
    "tpot_ms_p50": at_most(1.0),
    "e2e_ms_p99": at_most(1.0),
}


@dataclass(frozen=True, slots=True)
class Earlier:
    """One earlier result: the figures of its servers, and the command and environment of its run."""

    figures: tuple[Figure, ...]
    origin: Mapping[str, object]


def read_result(path: Path, *, label: str) -> Earlier:
    """Read a result file. Raises ConfigError if the file is not a result of `bench serve`, or if this run's figures
    would have the same names.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        found = [
            Figure(figure["name"], figure["value"], figure["unit"])
            for figure in report["figures"]
            if report["bench"] == "serve"
        ]
        origin = {"command": report["command"], "environment": report["environment"]}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"--beside {path} cannot be read as a result of `bench serve --json`: {error}") from error
    rows = []
    for figure in found:
        row = _ROW.fullmatch(figure.name)
        if row is not None and row["label"] == label:
            raise ConfigError(f"--beside {path} has {figure.name}, which this run will also have: give another --label")
        if row is not None and row["label"] != _NO_SERVER:
            rows.append(figure)
    if not rows:
        raise ConfigError(f"--beside {path} has no figures of a server: give a result of `bench serve --json`")
    return Earlier(tuple(rows), origin)


def capacity_of(earlier: Sequence[Earlier]) -> float | None:
    """The capacity in requests per second of the first earlier server that got Poisson arrivals, so that this server
    gets the same. None: there is none.
    """
    for figure in (figure for result in earlier for figure in result.figures):
        row = _ROW.fullmatch(figure.name)
        if row is not None and row["quantity"] == "requests_per_s":
            return figure.value * 100 / int(row["load"].removeprefix("poisson"))
    return None


def compared(label: str, figures: Sequence[Figure], earlier: Sequence[Earlier]) -> list[Figure]:
    """All figures, and ratios: the figures of each earlier server, divided by those of this server."""
    rows = [figure for result in earlier for figure in result.figures]
    ours = {figure.name: figure.value for figure in figures}
    ratios = []
    for figure in rows:
        row = _ROW.fullmatch(figure.name)
        if row is None or row["steady"] or row["quantity"] not in _RATIOS:
            continue
        end = f"{row['quantity']}_{row['load']}"
        if value := ours.get(f"{label}_{end}"):
            name = f"{row['label']}_over_{label}_{end}"
            bound = _RATIOS[row["quantity"]]
            if row["quantity"] == "tok_s" and row["load"].startswith("poisson"):
                bound = None  # the rate of the arrivals decides it
            ratios.append(Figure(name, figure.value / value, "ratio", bound))
    return [*rows, *figures, *ratios]
