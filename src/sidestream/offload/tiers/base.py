"""The contract of a persistent tier. docs/tiers.md explains it to authors; `testing.tier_conformance` tests it.

Threads. The offload worker owns the index; the engine thread only looks keys up in it. `write` and `read` run on stream
threads.

    offload worker   grant = tier.index.reserve(key)          lease = tier.index.pin([key])
    stream thread    tier.write(grant, block)                 tier.read(lease.entries[0], slot)
    offload worker   after the fence:                         after the fence:
                     tier.index.publish(grant), or            lease.release(), and before it, if `read` raised,
                     tier.index.abandon(grant) after a raise  tier.index.forget(entry)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sidestream.config import OffloadConfig
from sidestream.kv.layout import KVLayout
from sidestream.offload.tiers.index import Entry, ReadLease, TierIndex, TierStats, WriteGrant
from sidestream.types import Tracer

__all__ = [
    "Block",
    "Entry",
    "PersistentTier",
    "ReadLease",
    "TierContext",
    "TierIndex",
    "TierKind",
    "TierStats",
    "WriteGrant",
]

Block = memoryview | npt.NDArray[np.uint8]
"""One block's bytes: `layout.block_bytes`, contiguous, in host memory. Page-aligned blocks may be faster to move."""


class PersistentTier(Protocol):
    """KV blocks by content key, on a medium that is slower than host memory.

    The index never does I/O. `read` and `write` may block on I/O. They are called on stream threads, several at the
    same time, and never use the index: they work on the grant or the pinned entry that they are given. For every
    reader, in this process and in later ones, an entry is either complete or absent.
    """

    @property
    def index(self) -> TierIndex:
        """The keys that the tier holds. Only the offload worker writes the index; the engine thread looks keys up."""
        ...

    def write(self, grant: WriteGrant, payload: Block) -> None:
        """Delete `grant.victim`, if there is one, and store `payload` as `grant.entry`; then set `grant.written`.

        Raises TierFull (the medium has no room) or TierError; then no part of the entry is left.
        """
        ...

    def read(self, entry: Entry, out: Block) -> None:
        """Fill `out` with the block of a pinned entry, and verify it.

        Raises TierCorrupt (the entry is missing or damaged; the tier deletes it) or TierError; then `out` is undefined.
        """
        ...

    def close(self) -> None:
        """Delete `index.take_doomed()` and release the medium. Called after the last read and write. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class TierContext:
    """The context in which a tier is opened: the model whose KV it will hold.

    fingerprint   identifies weights and config; a tier must not serve blocks of another model
    tracer        tracer for the tier's index
    """

    layout: KVLayout
    fingerprint: str
    tracer: Tracer | None = None


@dataclass(frozen=True, slots=True)
class TierKind:
    """A row of the registry.

    name   name of the tier in metrics (`tier="NAME"`, `kind="NAME-write"`), streams, `CachedTokens.by_tier` and
           `OffloadConfig.tiers`, and name of the tier's index
    open   function that makes the tier, or returns None if the config does not ask for it. Raises ConfigError
    """

    name: str
    open: Callable[[OffloadConfig, TierContext], PersistentTier | None]
