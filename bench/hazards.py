"""Makes docs/ordering.md's table of hazards from the code: miniature programs, the number of mutations."""

from __future__ import annotations

from proof.miniatures import MINIATURES
from proof.mutations import ELSEWHERE, HAZARDS, MUTATIONS


def hazard_table() -> str:
    """One markdown row for each hazard."""
    lines = ["| | hazard | miniatures | mutations |", "| --- | --- | --- | --- |"]
    for hazard, sentence in HAZARDS.items():
        played = "<br>".join(one.name for one in MINIATURES if one.hazard == hazard)
        mutated = sum(mutation.hazard == hazard for mutation in MUTATIONS)
        lines.append(f"| {hazard} | {sentence} | {played} | {mutated or 'none: ' + ELSEWHERE[hazard]} |")
    return "\n".join([*lines, ""])
