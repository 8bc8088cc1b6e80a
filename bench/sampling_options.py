"""The table of sampling options in docs/api.md, made from the rows in `sidestream.config`."""

from __future__ import annotations

from sidestream.config import SAMPLING_OPTIONS, SamplingOption, SamplingParams


def option_table() -> str:
    """One markdown table: name, default, range and meaning of each option."""
    lines = ["| field | default | range | meaning |", "| --- | --- | --- | --- |"]
    unset = SamplingParams()
    for name, row in SAMPLING_OPTIONS.items():
        default = f"the model's, else {row.neutral:g}" if getattr(unset, name) is None else f"{row.neutral:g}"
        lines.append(f"| `{name}` | {default} | {_range(row)} | {row.help} |")
    return "\n".join([*lines, ""])


def _range(row: SamplingOption) -> str:
    if row.kind is int:
        return f"whole, from {row.low:g}"
    return f"above {row.low:g}, to {row.high:g}" if row.low_excluded else f"{row.low:g} to {row.high:g}"
