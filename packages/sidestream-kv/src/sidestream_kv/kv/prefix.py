"""The map from keys to a pool's blocks. A key identifies a whole prefix, so a flat map replaces a prefix tree.

Changed by the thread that owns the pool; `get` and `match` may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sidestream_kv.types import Key


class PrefixIndex:
    """A one-to-one map between published keys and block ids. A block may be partial: some of its layers are missing."""

    def __init__(self) -> None:
        self._id_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._partial: set[int] = set()

    def __len__(self) -> int:
        return len(self._id_of)

    def __iter__(self) -> Iterator[Key]:
        """The published keys, in the order of their publication."""
        return iter(self._id_of)

    def get(self, key: Key) -> int | None:
        """The block that holds `key`."""
        return self._id_of.get(key)

    def holds_key(self, block_id: int) -> bool:
        """Whether the block has a key."""
        return block_id in self._key_of

    def is_partial(self, block_id: int) -> bool:
        """Whether the block has a key and was added as partial."""
        return block_id in self._partial

    def first_partial(self, block_ids: Sequence[int]) -> int | None:
        """Index of the first of these blocks that is partial."""
        if self._partial.isdisjoint(block_ids):
            return None
        return next(index for index, block_id in enumerate(block_ids) if block_id in self._partial)

    def split(self, block_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """The blocks with a key, and the blocks without a key, both in the given order."""
        key_of = self._key_of
        return [block_id for block_id in block_ids if block_id in key_of], [
            block_id for block_id in block_ids if block_id not in key_of
        ]

    def match(self, keys: Sequence[Key]) -> list[int]:
        """The blocks of the longest run of leading `keys` that are all in the index."""
        block_ids: list[int] = []
        for key in keys:
            block_id = self._id_of.get(key)
            if block_id is None:
                break  # rule: match-ends-at-a-gap
            block_ids.append(block_id)
        return block_ids

    def add(self, key: Key, block_id: int, *, partial: bool = False) -> bool:
        """Give the block this key. Returns False, and changes nothing, if block or key is in the index already."""
        if key in self._id_of or block_id in self._key_of:  # rule: key-refers-to-one-block
            return False
        if partial:
            self._partial.add(block_id)  # rule: partial-block-is-marked
        self._id_of[key] = block_id
        self._key_of[block_id] = key
        return True

    def add_all(self, keys: Sequence[Key], block_ids: Sequence[int], *, partial: bool = False) -> bool:
        """Add all pairs. Returns False, and changes nothing, if one of them cannot be added."""
        # rule: keys-refer-to-one-block-each
        if (
            len({*keys}) < len(keys)
            or not self._id_of.keys().isdisjoint(keys)
            or not self._key_of.keys().isdisjoint(block_ids)
        ):
            return False
        if partial:
            self._partial.update(block_ids)  # rule: partial-blocks-are-marked
        self._id_of.update(zip(keys, block_ids, strict=True))  # rule: block-has-its-own-key
        self._key_of.update(zip(block_ids, keys, strict=True))
        return True

    def remove_all(self, block_ids: Sequence[int]) -> list[Key]:
        """Remove and return the keys of these blocks; each must have one."""
        key_of, id_of = self._key_of.pop, self._id_of
        keys = [key_of(block_id) for block_id in block_ids]
        for key in keys:
            del id_of[key]
        self._partial.difference_update(block_ids)
        return keys

    def clear(self) -> list[int]:
        """Remove all keys. Returns the blocks that had a key."""
        block_ids = list(self._key_of)
        self._id_of.clear()  # rule: reset-removes-keys
        self._key_of.clear()
        self._partial.clear()
        return block_ids
