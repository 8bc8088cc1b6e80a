"""Published bugs of KV offloading as small programs: each one fails without its protection, and never with it.

`MINIATURES` covers every hazard H1 to H26, those of the border between processes (H32, H34, H35), and some bugs that
only cost time. `run_miniature` plays one on the simulated device under a policy and a seed, with the checker attached,
and reports the oracle that caught it.
"""

from __future__ import annotations

from dataclasses import dataclass

from sidestream.device.sim import Deadlock
from sidestream.errors import InvariantError
from sidestream.testing.checker import simulated
from sidestream.testing.miniatures.border import BORDER
from sidestream.testing.miniatures.copies import COPIES
from sidestream.testing.miniatures.requests import REQUESTS
from sidestream.testing.miniatures.rows import ROWS
from sidestream.testing.miniatures.stage import Miniature, Outcome
from sidestream.testing.miniatures.tiers import TIERS

__all__ = ["MINIATURES", "Caught", "Miniature", "Outcome", "run_miniature"]

MINIATURES: tuple[Miniature, ...] = (*COPIES, *TIERS, *ROWS, *REQUESTS, *BORDER)


@dataclass(frozen=True, slots=True)
class Caught:
    """How a failure was noticed.

    oracles   all oracles that objected, of `"checker"`, `"tokens"`, `"accept length"`, `"balance"` (a leak, or a
              release too many) and `"order"` (too late, or never); never empty
    detail    the message of the first one
    """

    oracles: tuple[str, ...]
    detail: str

    @property
    def oracle(self) -> str:
        """The first oracle."""
        return self.oracles[0]


def run_miniature(miniature: Miniature, policy: str, seed: int, *, protected: bool) -> Caught | None:
    """Play `miniature` once; None when nothing is wrong. Raises ConfigError for an unknown policy."""
    device, checker = simulated(policy, seed)
    verdicts: list[tuple[str, str]] = []
    try:
        outcome = miniature.run(device, protected)
        device.close()
        verdicts += outcome.verdicts()
        checker.check_idle()
    except InvariantError as error:  # the ledger raises, for example for a double release
        verdicts.append(("balance", str(error)))
    except Deadlock as error:
        verdicts.append(("order", str(error)))
    finally:
        device.kill()
    verdicts = [("checker", str(finding)) for finding in checker.findings[:1]] + verdicts
    if not verdicts:
        return None
    return Caught(tuple(dict.fromkeys(oracle for oracle, _ in verdicts)), verdicts[0][1])
