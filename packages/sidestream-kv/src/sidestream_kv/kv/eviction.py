"""The order in which idle blocks are evicted: least recently used first. Called by the thread that owns the pool."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class Lru:
    """Block ids in the order of their last use."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._order

    def touch(self, block_id: int) -> None:
        """Add the block, or make it the most recently used one."""
        self._order[block_id] = None
        self._order.move_to_end(block_id)

    def add_all(self, block_ids: Sequence[int]) -> None:
        """Add blocks that are not present; the last becomes the most recently used one."""
        self._order.update(dict.fromkeys(block_ids))

    def holds_all(self, block_ids: Sequence[int]) -> bool:
        """Whether all these blocks are present."""
        return self._order.keys() >= {*block_ids}

    def demote(self, block_id: int) -> None:
        """Make the block, which is present, the least recently used one."""
        self._order.move_to_end(block_id, last=False)

    def discard_all(self, block_ids: Sequence[int]) -> None:
        """Remove the blocks that are present."""
        pop = self._order.pop
        for block_id in block_ids:
            pop(block_id, None)

    def discard(self, block_id: int) -> None:
        """Remove the block, if it is present."""
        self._order.pop(block_id, None)

    def pop_oldest(self, count: int) -> list[int]:
        """Remove and return the `count` least recently used blocks, oldest first. KeyError if there are fewer."""
        pop = self._order.popitem
        return [pop(last=False)[0] for _ in range(count)]  # rule: least-recently-used-block-is-evicted-first
