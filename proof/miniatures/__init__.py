"""Miniatures: published bugs of KV offloading as small programs. Each program can run with or without its protection
(fix). Without it, the program fails in some schedules (orders of execution); with it, in none.

`MINIATURES` covers the hazards H1 to H26 of docs/ordering.md, the hazards between processes (H32, H34, H35), and some
bugs that only cost time. `run_miniature` runs a miniature on the simulated device with a policy, a seed and the
checker, and reports the oracle that detected the bug.
"""

from __future__ import annotations

from dataclasses import dataclass

from proof.miniatures.border import BORDER
from proof.miniatures.copies import COPIES
from proof.miniatures.requests import REQUESTS
from proof.miniatures.rows import ROWS
from proof.miniatures.stage import Miniature, Outcome
from proof.miniatures.tiers import TIERS
from sidestream.errors import InvariantError
from sidestream_order.explore import Program, Rules, replay
from sidestream_order.sim import SimDevice

__all__ = ["MINIATURES", "RULES", "Caught", "Miniature", "Outcome", "as_program", "run_miniature"]

# Exceptions that miniatures raise on purpose inside work.
RULES = Rules(faults=(Exception,))
_NAMES = {"assertion": "balance", "deadlock": "order"}

MINIATURES: tuple[Miniature, ...] = (*COPIES, *TIERS, *ROWS, *REQUESTS, *BORDER)


@dataclass(frozen=True, slots=True)
class Caught:
    """The failure of a run.

    oracles   one or more of `"checker"`, `"tokens"`, `"accept length"`, `"balance"` (a leak, or one release too many)
              and `"order"` (an event was too late or never happened)
    detail    message of the first oracle
    """

    oracles: tuple[str, ...]
    detail: str

    @property
    def oracle(self) -> str:
        """The first oracle that detected a failure."""
        return self.oracles[0]


def as_program(miniature: Miniature, *, protected: bool) -> Program:
    """The miniature as a program for `explore` and `exhaust`, with `RULES`: a wrong outcome is an AssertionError."""

    def program(device: SimDevice) -> None:
        try:
            verdicts = miniature.run(device, protected).verdicts()
        except InvariantError as error:  # raised by a pool, for example for a double release
            raise AssertionError(str(error)) from error
        assert not verdicts, verdicts

    return program


def run_miniature(miniature: Miniature, policy: str, seed: int, *, protected: bool) -> Caught | None:
    """Run `miniature` once. None if no oracle detected a failure. Raises ConfigError for an unknown policy, and
    InvariantError for a miniature that raises an unexpected exception.
    """
    outcomes: list[Outcome] = []

    def program(device: SimDevice) -> None:
        try:
            outcomes.append(miniature.run(device, protected))
        except InvariantError as error:  # raised by a pool, for example for a double release
            raise AssertionError(str(error)) from error

    run = replay(program, policy, seed, rules=RULES, trace=False)
    by_oracle = {problem.oracle: problem.text for problem in reversed(run.problems)}
    if "error" in by_oracle:
        raise InvariantError(f"miniature {miniature.name} raised {by_oracle['error']}")
    verdicts = [("checker", by_oracle["checker"])] if "checker" in by_oracle else []
    verdicts += [verdict for outcome in outcomes for verdict in outcome.verdicts()]
    verdicts += [(name, by_oracle[oracle]) for oracle, name in _NAMES.items() if oracle in by_oracle]
    if not verdicts:
        return None
    return Caught(tuple(dict.fromkeys(oracle for oracle, _ in verdicts)), verdicts[0][1])
