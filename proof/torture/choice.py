"""Chooses the workloads of a campaign by the pairs of features that ran least so far.

Most faults need two features together, such as captured graphs and a tier that fails. Rare features seldom meet if
workloads are drawn at random: in 250 random workloads, one pair of sixteen never occurs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from itertools import combinations, islice

from proof.mutations import Feature
from proof.torture.drawing import draw_workload
from proof.torture.workload import FEATURES
from sidestream.errors import ConfigError
from sidestream_kv.config import unknown_name

CANDIDATES = 32
"""Number of seeds from which each workload's seed is chosen."""

NEVER_TOGETHER: Mapping[tuple[Feature, Feature], str] = {
    ("cache_salts", "twins"): "both are choices of one draw",
    ("device_loss", "rank_loss"): "either of them ends the engine",
    ("device_loss", "restart"): "the loss ends the engine, and another one starts on the same disk",
    ("failing_step", "rank_loss"): "either of them ends an engine with several ranks",
    ("grammar", "speculative"): "the reference has no accept lengths of answers with a grammar",
    ("meanwhile", "twins"): "a twin's prompt would replace one that arrives in the middle of a step",
    ("rank_loss", "restart"): "the loss ends the engine, and another one starts on the same disk",
    ("rank_loss", "weights"): "an engine with several ranks refuses new weights",
    ("ranks", "weights"): "an engine with several ranks refuses new weights",
    **{
        (min(one, other), max(one, other)): "engines that share have one rank, and blocks of one kind"
        for one in ("shared_disk", "shared_memory", "store")
        for other in ("rank_loss", "ranks", "states", "window")
    },
    ("growing_tier", "shared_memory"): "a cache process gives all of its memory at once",
    ("self_check", "states"): "the self-check refuses models with recurrent state",
}
"""Pairs of features, in alphabetical order, that no workload has → the reason."""

_COMPARED = 6  # the rarest pairs of a candidate that decide
_MOST_DRAWS = 20_000  # in search of a workload with all needed features, before the search ends
_MOST_PAIRS = len(FEATURES) * (len(FEATURES) - 1) // 2 - len(NEVER_TOGETHER)


class Coverage:
    """Chooses the workloads of a campaign, and counts the pairs of features in them.

    The first, third, … workload is the one of `CANDIDATES` with the most missing pairs; among equal ones, the one whose
    pairs ran least. Every other workload is an ordinary one, drawn at random: the chosen ones take longer.
    """

    def __init__(self, seed: int, needs: Collection[str] = ()) -> None:
        """`seed` is the campaign's; its workloads are drawn from seeds from `seed * CANDIDATES` on. All chosen
        workloads have the features `needs`.

        Raises ConfigError for an unknown feature, and for features that never meet.
        """
        for name in needs:
            if name not in FEATURES:
                raise ConfigError(unknown_name("feature", name, FEATURES))
        for pair, reason in NEVER_TOGETHER.items():
            if set(pair) <= set(needs):
                raise ConfigError(f"no workload has {pair[0]} and {pair[1]}: {reason}: leave one of them out")
        self._needs = frozenset(needs)
        self._next = seed * CANDIDATES
        self._chosen = 0
        self._pairs = Counter[tuple[Feature, Feature]]()

    @property
    def missing(self) -> int:
        """Number of pairs of features that no chosen workload has, without those of `NEVER_TOGETHER`."""
        return _MOST_PAIRS - len(self._pairs.keys() - NEVER_TOGETHER.keys())

    def choose(self) -> int:
        """The seed of the next workload. Raises ConfigError if no workload seems to have the needed features."""
        drawn = self._draw(1 if self._chosen % 2 else CANDIDATES)

        def rank(seed: int) -> tuple[int, list[int]]:
            counts = sorted(self._pairs[pair] for pair in combinations(drawn[seed], 2))
            return -counts.count(0), counts[:_COMPARED]

        seed = min(drawn, key=rank)
        self._pairs.update(combinations(drawn[seed], 2))
        self._chosen += 1
        return seed

    def _draw(self, most: int) -> dict[int, list[Feature]]:
        """Up to `most` of the next seeds whose workloads have the needed features → the features, in order."""
        for first in range(self._next, self._next + _MOST_DRAWS, CANDIDATES):
            features = ((seed, draw_workload(seed).features) for seed in range(first, first + CANDIDATES))
            fitting = ((seed, sorted(names)) for seed, names in features if self._needs <= names)
            if drawn := dict(islice(fitting, most)):
                self._next = first + CANDIDATES
                return drawn
        raise ConfigError(
            f"none of {_MOST_DRAWS:,} workloads has all of {', '.join(sorted(self._needs))}: leave one of them out"
        )
