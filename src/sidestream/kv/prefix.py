"""Which id holds which key. A chain of keys is its own tree: equal keys mean equal prefixes. Called from the engine
thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from sidestream.types import Key


class PrefixIndex:
    """A one-to-one map between published keys and ids."""

    def __init__(self) -> None:
        self._id_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}

    def __len__(self) -> int:
        return len(self._id_of)

    def get(self, key: Key) -> int | None:
        """The id that holds `key`."""
        return self._id_of.get(key)

    def holds_key(self, item: int) -> bool:
        """Whether `item` is findable under a key."""
        return item in self._key_of

    def split(self, items: Sequence[int]) -> tuple[list[int], list[int]]:
        """Those that are findable under a key, and the others; both in their order."""
        key_of = self._key_of
        return [item for item in items if item in key_of], [item for item in items if item not in key_of]

    def match(self, keys: Sequence[Key]) -> list[int]:
        """Ids of the longest run of leading `keys` that are all held. Read-only."""
        ids: list[int] = []
        for key in keys:
            item = self._id_of.get(key)
            if item is None:
                break
            ids.append(item)
        return ids

    def add(self, key: Key, item: int) -> bool:
        """Make `item` findable under `key`; False, and no change, when another id holds the key or the id
        another key.
        """
        if key in self._id_of or item in self._key_of:
            return False
        self._id_of[key] = item
        self._key_of[item] = key
        return True

    def add_all(self, keys: Sequence[Key], ids: Sequence[int]) -> bool:
        """`add` for each pair, if all can be; else False, and no change."""
        if (
            len({*keys}) < len(keys)
            or not self._id_of.keys().isdisjoint(keys)
            or not self._key_of.keys().isdisjoint(ids)
        ):
            return False
        self._id_of.update(zip(keys, ids, strict=True))
        self._key_of.update(zip(ids, keys, strict=True))
        return True

    def remove_all(self, items: Sequence[int]) -> None:
        """Forget the keys of `items`, which have one each."""
        key_of, id_of = self._key_of.pop, self._id_of
        for item in items:
            del id_of[key_of(item)]

    def clear(self) -> list[int]:
        """Forget all; returns the ids that were findable."""
        ids = list(self._key_of)
        self._id_of.clear()
        self._key_of.clear()
        return ids
