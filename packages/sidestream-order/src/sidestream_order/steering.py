"""Records the decisions at which a policy switches to another actor (host, stream or thread), and reduces a list of
such switches. `sidestream_order.sim.policies.Steered` repeats a run from its switches (deviations).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from sidestream_order.sim.policies import Choice, Policy

T = TypeVar("T")


class Watched:
    """Wraps a policy, and records its deviations.

    count        number of decisions so far
    deviations   decision number → chosen actor, for each decision that did not continue the running actor
    actors       names of all actors that could be chosen, in order of appearance
    """

    def __init__(self, inner: Policy) -> None:
        self._inner = inner
        self.count = 0
        self.deviations: dict[int, str] = {}
        self.actors: dict[str, None] = {}

    def choose(self, choice: Choice) -> str:
        name = self._inner.choose(choice)
        if name != (choice.current if choice.current in choice.able else choice.able[0]):
            self.deviations[self.count] = name
        self.actors.update(dict.fromkeys(choice.able))
        self.count += 1
        return name


def minimise(items: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """A small subset of `items` for which `fails` is still True: delta debugging, Zeller and Hildebrandt 2002.
    `fails(items)` must be True. The caller can limit the run time: if `fails` returns False from some call on, this
    function soon returns.
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
