"""Events of blocks that tiers gained and lost, by the engine's own hashes, for routers of an engine's requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sidestream_kv.kv.key_log import KeyChange, KeysCleared, KeysStored
from sidestream_kv.types import Key


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """A tier gained or lost blocks.

    group   index of the group of layers that the blocks are for
    hashes  the engine's hashes of the blocks
    """

    tier: str
    stored: bool
    group: int
    hashes: tuple[bytes, ...]


class KeyEvents:
    """Turns changes of keys into events. Knows the hashes of blocks that were stored since the start; of others, such
    as those that a directory held at the start, there are no events.
    """

    def __init__(self) -> None:
        self._hashes: dict[Key, tuple[int, bytes]] = {}
        self._tiers: dict[Key, set[str]] = {}  # that hold the block
        self._events: deque[BlockEvent] = deque()

    def ordered(self, group: int, hashes: Mapping[Key, bytes]) -> None:
        """These blocks are about to be stored."""
        self._hashes.update({key: (group, block_hash) for key, block_hash in hashes.items()})

    def changed(self, changes: Sequence[KeyChange]) -> None:
        """A rank reported changes."""
        for change in changes:
            if isinstance(change, KeysCleared):  # of the device only
                continue
            stored = isinstance(change, KeysStored)
            by_group: dict[int, list[bytes]] = {}
            for key in change.keys:
                if key in self._hashes:
                    group, block_hash = self._hashes[key]
                    by_group.setdefault(group, []).append(block_hash)
                    tiers = self._tiers.setdefault(key, set())
                    tiers.add(change.tier) if stored else tiers.discard(change.tier)
                    self._forget_unheld(key)
            for group, hashes in by_group.items():
                self._events.append(BlockEvent(change.tier, stored, group, tuple(hashes)))

    def settled(self, keys: Iterable[Key]) -> None:
        """The stores of these blocks have ended. Those that no tier has got are not stored."""
        for key in keys:
            self._tiers.setdefault(key, set())
            self._forget_unheld(key)

    def _forget_unheld(self, key: Key) -> None:
        if not self._tiers[key]:  # rule: hashes-of-lost-blocks-are-forgotten
            del self._tiers[key]
            self._hashes.pop(key, None)

    def take(self) -> list[BlockEvent]:
        """The events since the last call, in order."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def sizes(self) -> Mapping[str, int]:
        """Number of objects that are kept."""
        return {"hashes": len(self._hashes), "events": len(self._events)}
