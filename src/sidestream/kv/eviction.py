"""Which idle item goes first: the least recently used. Knows ids only; called from the engine thread."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class Lru:
    """Ids in the order of their last use."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, item: int) -> bool:
        return item in self._order

    def touch(self, item: int) -> None:
        """Add `item`, or make it the most recently used."""
        self._order[item] = None
        self._order.move_to_end(item)

    def add_all(self, items: Sequence[int]) -> None:
        """Add those, which are not present, in this order: the last one is the most recently used."""
        self._order.update(dict.fromkeys(items))

    def holds_all(self, items: Sequence[int]) -> bool:
        """Whether each of them is present."""
        return self._order.keys() >= {*items}

    def discard_all(self, items: Sequence[int]) -> None:
        """`discard` each."""
        pop = self._order.pop
        for item in items:
            pop(item, None)

    def discard(self, item: int) -> None:
        """Forget `item`, if present."""
        self._order.pop(item, None)

    def pop_oldest(self, count: int) -> list[int]:
        """Remove and return the `count` least recently used, the oldest first. Raises KeyError when there are fewer."""
        pop = self._order.popitem
        return [pop(last=False)[0] for _ in range(count)]
