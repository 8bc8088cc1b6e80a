"""The log of findable keys: which keys became findable or unfindable in each tier, in order. No tensors.

Pools and tier indices write it when their keys change, and `engine.kv_events` makes events of it. Without a log
(`key_log` is None) they only test for None.

Threads. Each tier's log is written by the thread that owns its pool or index: the device's by the engine thread, all
others by the offload worker's. `KeyLog.drain` is called by the engine thread. Nothing blocks: a deque's `append` and
`popleft` are atomic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from sidestream.types import DEVICE, Key


@dataclass(frozen=True, slots=True)
class KeysStored:
    """The blocks `keys` became findable in `tier`.

    On the device, the blocks are consecutive in one sequence:

    parent      key of the block before; None: the sequence begins here
    token_ids   the blocks' tokens; empty in other tiers, which do not know them
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
        """The log of another tier than the device."""
        return TierKeyLog(self._changes, name)

    def drain(self) -> list[KeyChange]:
        """Return and remove the changes so far, in order."""
        return [self._changes.popleft() for _ in range(len(self._changes))]


class TierKeyLog:
    """One tier's end of the log, for the owner of the tier's keys."""

    __slots__ = ("_changes", "_tier")

    def __init__(self, changes: deque[KeyChange], tier: str) -> None:
        self._changes = changes
        self._tier = tier

    def stored(self, keys: Sequence[Key]) -> None:
        """These keys became findable."""
        if keys:
            self._changes.append(KeysStored(self._tier, tuple(keys)))

    def removed(self, keys: Sequence[Key]) -> None:
        """These keys are no longer findable."""
        if keys:
            self._changes.append(KeysRemoved(self._tier, tuple(keys)))

    def cleared(self, keys: Sequence[Key]) -> None:
        """These keys, all that were findable, are no longer findable."""
        self.removed(keys)


class DeviceKeyLog(TierKeyLog):
    """The device's end of the log. The pool knows which keys are new; `sequence`, called after they were published,
    knows their tokens.
    """

    __slots__ = ("_block_tokens", "_fresh")

    def __init__(self, changes: deque[KeyChange], block_tokens: int) -> None:
        super().__init__(changes, DEVICE)
        self._block_tokens = block_tokens
        self._fresh: set[Key] = set()

    def stored(self, keys: Sequence[Key]) -> None:
        """These keys became findable; `sequence` follows."""
        self._fresh.update(keys)

    def cleared(self, keys: Sequence[Key]) -> None:
        """No key is findable any more."""
        self._changes.append(KeysCleared())

    def sequence(self, keys: Sequence[Key], token_ids: Sequence[int], *, first: int, stop: int, salt: str) -> None:
        """Log the keys that became findable since the last call: some of `keys[first:stop]`.

        `keys` are those of the first blocks of the sequence `token_ids`.
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
