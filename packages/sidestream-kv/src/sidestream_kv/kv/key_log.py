"""The log of keys: in which order keys became findable or unfindable in each tier (device, host, disk). A key is the
hash of a block's content; a findable block can be reused.

Pools and tier indices write to the log when their keys change, and `engine.kv_events` turns the log into KV events. If
nothing needs the log, the attribute `key_log` of pools and indices is None.

Threads: the engine thread writes the device's part of the log and calls `KeyLog.drain`; the thread of the offload
worker writes the parts of all other tiers. No call blocks, because a deque's `append` and `popleft` are atomic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from sidestream_kv.types import DEVICE, Key


@dataclass(frozen=True, slots=True)
class KeysStored:
    """The blocks `keys` became findable in `tier`.

    On the device, the blocks are consecutive in one sequence:

    parent      key of the block before the first one; None: these blocks begin the sequence
    token_ids   the blocks' tokens; empty in other tiers, which know no tokens
    salt        cache salt of the request
    """

    tier: str
    keys: tuple[Key, ...]
    parent: Key | None = None
    token_ids: tuple[int, ...] = ()
    salt: str = ""


@dataclass(frozen=True, slots=True)
class KeysRemoved:
    """The blocks `keys` are no longer findable in `tier`."""

    tier: str
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class KeysCleared:
    """No block is findable on the device any more."""


KeyChange = KeysStored | KeysRemoved | KeysCleared


class KeyLog:
    """The changes of all tiers since the last `drain`."""

    def __init__(self, *, block_tokens: int) -> None:
        self._changes: deque[KeyChange] = deque()
        self.device = DeviceKeyLog(self._changes, block_tokens)

    def tier(self, name: str) -> TierKeyLog:
        """The writer for a tier other than the device."""
        return TierKeyLog(self._changes, name)

    def drain(self, *, most_keys: int | None = None) -> list[KeyChange]:
        """Return and remove the changes so far, in order. `most_keys`: after this many keys, the rest stays in the
        log.
        """
        drained: list[KeyChange] = []
        keys = 0
        for _ in range(len(self._changes)):
            drained.append(change := self._changes.popleft())
            keys += 0 if isinstance(change, KeysCleared) else len(change.keys)
            if most_keys is not None and keys >= most_keys:
                break
        return drained


class TierKeyLog:
    """Writes the changes of one tier to the log. The owner of the tier's keys calls it."""

    __slots__ = ("_changes", "_tier")

    def __init__(self, changes: deque[KeyChange], tier: str) -> None:
        self._changes = changes
        self._tier = tier

    def stored(self, keys: Sequence[Key]) -> None:
        """Log that these keys became findable."""
        if keys:
            self._changes.append(KeysStored(self._tier, tuple(keys)))

    def removed(self, keys: Sequence[Key]) -> None:
        """Log that these keys are no longer findable."""
        if keys:
            self._changes.append(KeysRemoved(self._tier, tuple(keys)))

    def cleared(self, keys: Sequence[Key]) -> None:
        """Log that no key is findable any more. `keys`: all keys that were findable."""
        self.removed(keys)


class DeviceKeyLog(TierKeyLog):
    """Writes the changes of the device to the log. The pool reports new keys by `stored`, but does not know their
    tokens. So they are logged by the next call of `sequence`, which gets the tokens. Hidden keys, of parts of blocks,
    are never logged.
    """

    __slots__ = ("_block_tokens", "_fresh", "_hidden")

    def __init__(self, changes: deque[KeyChange], block_tokens: int) -> None:
        super().__init__(changes, DEVICE)
        self._block_tokens = block_tokens
        self._fresh: set[Key] = set()
        self._hidden: set[Key] = set()

    def hide(self, key: Key) -> None:
        """Never log this key, which just became findable."""
        self._fresh.discard(key)
        self._hidden.add(key)

    def removed(self, keys: Sequence[Key]) -> None:
        """Log that these keys are no longer findable, but not the hidden ones."""
        super().removed([key for key in keys if key not in self._hidden] if self._hidden else keys)
        self._hidden.difference_update(keys)

    def stored(self, keys: Sequence[Key]) -> None:
        """Note that these keys became findable. A call of `sequence` with their tokens must follow."""
        self._fresh.update(keys)

    def cleared(self, keys: Sequence[Key]) -> None:
        """Log that no key is findable any more."""
        self._changes.append(KeysCleared())
        self._hidden.clear()

    def sequence(self, keys: Sequence[Key], token_ids: Sequence[int], *, first: int, stop: int, salt: str) -> None:
        """Log the keys that became findable since the last call. All of them are in `keys[first:stop]`.

        `keys` are the keys of the first blocks of the sequence `token_ids`.
        """
        fresh, size, start = self._fresh, self._block_tokens, first
        if not fresh:
            return
        while start < stop:
            end = start
            while end < stop and keys[end] in fresh:
                end += 1
            if start < end:
                parent = keys[start - 1] if start else None
                tokens = tuple(token_ids[start * size : end * size])
                self._changes.append(KeysStored(self._tier, tuple(keys[start:end]), parent, tokens, salt))
            start = end + 1
        self._fresh = set()
