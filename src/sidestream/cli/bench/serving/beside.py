"""Combines the figures of several servers in one report: first the figures of earlier runs of `sidestream bench serve`,
then the figures of this run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sidestream.cli.bench.report import Figure
from sidestream.errors import ConfigError

# Names of the figures that `measure.row` makes. Figures of the engine without a server have the label `engine`.
_ROW = re.compile(
    r"(?P<label>(?:(?!_over_).)+)_(tok_s|ttft_ms_p50|ttft_ms_p99|itl_ms_p50|itl_ms_p99|burst_share)_b\d+|burst_share_b\d+"
)
_NO_SERVER = "engine"


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


def compared(label: str, figures: Sequence[Figure], earlier: Sequence[Earlier]) -> list[Figure]:
    """All figures, and ratios: the tokens per second of each earlier server, divided by those of this server."""
    rows = [figure for result in earlier for figure in result.figures]
    ours = {figure.name: figure.value for figure in figures}
    ratios = []
    for figure in rows:
        other, found, size = figure.name.rpartition("_tok_s_b")
        if found and (value := ours.get(f"{label}_tok_s_b{size}")):
            ratios.append(Figure(f"{other}_over_{label}_tok_s_b{size}", figure.value / value, "ratio"))
    return [*rows, *figures, *ratios]
