"""Chooses the workloads of a campaign by the pairs of features that ran least so far.

Most faults need two features together, such as captured graphs and a tier that fails. Rare features seldom meet if
workloads are drawn at random: in 250 random workloads, one pair of sixteen never occurs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations

from sidestream.testing.mutations import Feature
from sidestream.testing.torture.drawing import draw_workload
from sidestream.testing.torture.workload import FEATURES, Workload

CANDIDATES = 8
"""Number of seeds from which each workload's seed is chosen."""

NEVER_TOGETHER: Mapping[tuple[Feature, Feature], str] = {
    ("cache_salts", "twins"): "both are choices of one draw",
    ("device_loss", "rank_loss"): "either of them ends the engine",
    ("device_loss", "restart"): "the loss ends the engine, and another one starts on the same disk",
    ("failing_step", "rank_loss"): "either of them ends an engine with several ranks",
    ("meanwhile", "twins"): "a twin's prompt would replace one that arrives in the middle of a step",
    ("rank_loss", "restart"): "the loss ends the engine, and another one starts on the same disk",
    ("rank_loss", "weights"): "an engine with several ranks refuses new weights",
    ("ranks", "weights"): "an engine with several ranks refuses new weights",
    ("self_check", "states"): "the self-check refuses models with recurrent state",
}
"""Pairs of features, in alphabetical order, that no workload has → the reason."""

_COMPARED = 6  # the rarest pairs of a candidate that decide
_MOST_PAIRS = len(FEATURES) * (len(FEATURES) - 1) // 2 - len(NEVER_TOGETHER)


class Coverage:
    """The pairs of features in the workloads that were chosen so far."""

    def __init__(self) -> None:
        self._pairs = Counter[tuple[str, str]]()

    @property
    def missing(self) -> int:
        """Number of pairs of features that no chosen workload has, without those of `NEVER_TOGETHER`."""
        return _MOST_PAIRS - len(self._pairs.keys() - NEVER_TOGETHER.keys())

    def choose(self, number: int) -> int:
        """The seed of workload `number` of a campaign: of the seeds from `number * CANDIDATES`, the one whose workload
        has the pairs that ran least. Every second workload has the first of these seeds, so that ordinary workloads
        run, too.
        """
        first = number * CANDIDATES
        seeds = range(first, first + (1 if number % 2 == 0 else CANDIDATES))
        drawn = {seed: _features_of(draw_workload(seed)) for seed in seeds}

        def rarest(seed: int) -> list[int]:
            return sorted(self._pairs[pair] for pair in combinations(drawn[seed], 2))[:_COMPARED]

        chosen = min(seeds, key=rarest)
        self.add(drawn[chosen])
        return chosen

    def add(self, features: Sequence[str]) -> None:
        """Count a workload with these features, in alphabetical order."""
        self._pairs.update(combinations(features, 2))


def _features_of(workload: Workload) -> list[str]:
    return sorted(name for name, has in FEATURES.items() if has(workload))
