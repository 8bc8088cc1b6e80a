"""Records in which decisions a policy deviates from the running actor, and reduces such a list.

A run is repeated from its deviations by `sidestream.device.sim.policies.Steered`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from sidestream.device.sim.policies import Choice, Policy

T = TypeVar("T")


class Watched:
    """A policy that records the deviations of another one.

    count        number of decisions so far
    deviations   decision number → chosen actor, where it was not the running one
    actors       names of all actors that could be chosen, in order of appearance
    """

    def __init__(self, inner: Policy) -> None:
        self._inner = inner
        self.count = 0
        self.deviations: dict[int, str] = {}
        self.actors: dict[str, None] = {}

    def choose(self, choice: Choice) -> str:
        """See `Policy.choose`."""
        name = self._inner.choose(choice)
        if name != (choice.current if choice.current in choice.able else choice.able[0]):
            self.deviations[self.count] = name
        self.actors.update(dict.fromkeys(choice.able))
        self.count += 1
        return name


def minimise(items: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """A subset of `items` that still fails, and from which no part of the tried sizes can be removed: delta debugging,
    Zeller and Hildebrandt 2002.

    `items` themselves fail. Terminates when `fails` always returns False, so a bounded number of calls bounds this
    function.
    """
    if fails(()):
        return []
    kept, parts = list(items), 2
    while len(kept) >= 2:
        size = -(-len(kept) // parts)
        for start in range(0, len(kept), size):
            rest = kept[:start] + kept[start + size :]
            if fails(rest):
                kept, parts = rest, max(parts - 1, 2)
                break
        else:
            if parts >= len(kept):
                break
            parts = min(len(kept), parts * 2)
    return kept
