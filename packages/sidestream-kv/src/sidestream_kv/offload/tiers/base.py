"""The interface of a persistent tier: storage for KV blocks that is slower than host memory, such as a disk.
docs/tiers.md explains the interface to authors of tiers; `sidestream_order.tier_conformance` tests an implementation.

The offload worker's thread owns the tier's index, which gives grants (the right to write one entry) and pins entries
(protects them from eviction). The engine thread only looks keys up in the index. `write` and `read` run on the threads
of the tier's streams. The fence of a read or write marks its end.

    offload worker   grant = tier.index.reserve(key)          lease = tier.index.pin([key])
    stream thread    tier.write(grant, payload)               tier.read(lease.entries[0], out)
    offload worker   after the fence:                         after the fence:
                     tier.index.publish(grant), or            lease.release(), and before it, if `read` raised,
                     tier.index.abandon(grant) after a raise  tier.index.forget(entry)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from sidestream_kv.config import OffloadConfig
from sidestream_kv.kv.layout import BlockLayout
from sidestream_kv.offload.tiers.index import Entry, ReadLease, TierIndex, TierStats, WriteGrant
from sidestream_kv.types import Key, Tracer

__all__ = [
    "BatchTier",
    "Block",
    "Entry",
    "PersistentTier",
    "ReadLease",
    "SharedTier",
    "TierContext",
    "TierIndex",
    "TierKind",
    "TierStats",
    "TierStreams",
    "WriteGrant",
]

# Blocks that are read or written at once. With two buffers each, far below the system's limit of 1024.
_MOST_BATCHED = 64

Block = memoryview | npt.NDArray[np.uint8]
"""The bytes of one block: `layout.block_bytes`, contiguous, in host memory. Page-aligned blocks may be faster to copy.
"""


class PersistentTier(Protocol):
    """KV blocks by content key, on a medium that is slower than host memory.

    Calls of `index` never do I/O. `read` and `write` may block on I/O. They are called on stream threads, several at
    the same time. They must not use the index, but only the grant or the pinned entry that they are given. An entry
    must always be either complete or absent, for readers in this process and in later processes.

    Two names are optional. `streams` is a `TierStreams`. `refresh()` is called on the offload worker's thread, which
    owns the index, every 0.2 s: there, a tier whose medium has several users calls `index.learn` and `index.unlearn`.
    """

    @property
    def index(self) -> TierIndex:
        """The keys that the tier holds. Only the offload worker writes the index; the engine thread looks keys up."""
        ...

    def write(self, grant: WriteGrant, payload: Block) -> None:
        """Delete `grant.victim`, if there is one, and store `payload` as `grant.entry`; then set `grant.written`. The
        victim may be absent from the medium.

        Raises TierFull (the medium has no space), TierLost (all entries are gone) or TierError. After any error, no
        part of the entry may be left.
        """
        ...

    def read(self, entry: Entry, out: Block) -> None:
        """Fill `out` with the block of a pinned entry, and verify it.

        Raises TierCorrupt (the entry is missing or damaged; the tier deletes it), TierLost (all entries are gone) or
        TierError. After any error, the content of `out` is undefined.
        """
        ...

    def close(self) -> None:
        """Delete the entries of `index.take_doomed()` and release the medium. Called after the last read and write.
        Idempotent.
        """
        ...


@runtime_checkable
class SharedTier(PersistentTier, Protocol):
    """A tier whose medium other processes write, too, so that its index does not know all of its entries."""

    def find(self, keys: Sequence[Key]) -> Sequence[Entry]:
        """Those entries of `keys`, a request's blocks in their order, that are on the medium. It may leave out entries
        after the first missing one.

        Called on a thread of the tier's own, for requests that wait for the answer, and may block on I/O. The offload
        worker adds the answer to the index. Raises TierError; then no key counts as found.
        """
        ...

    def delete(self, entries: Sequence[Entry]) -> None:
        """Delete entries that were dropped from the index, on the thread of `find`. They may be absent. Raises
        TierError.
        """
        ...


@runtime_checkable
class BatchTier(PersistentTier, Protocol):
    """A tier that reads and writes several blocks at once faster than one after another. `TierStreams.batch_bytes` says
    how many.
    """

    def write_all(self, grants: Sequence[WriteGrant], payloads: Sequence[Block]) -> Sequence[Exception | None]:
        """Do what `write` does for each grant. Returns, for each, what `write` would raise: a failure of one block is
        no failure of another one.
        """
        ...

    def read_all(self, entries: Sequence[Entry], outs: Sequence[Block]) -> Sequence[Exception | None]:
        """Do what `read` does for each entry. Returns, for each, what `read` would raise."""
        ...


@dataclass(frozen=True, slots=True)
class TierContext:
    """Facts that a tier needs when it is opened, about the model whose KV it will hold.

    fingerprint   hash of the model's weights and config; a tier must not serve blocks of another model
    tracer        tracer for the tier's index, in tests; None: no tracing
    name          name of the tier: its kind's name; with `-2` and so on, if several tiers of the kind are opened
    rank          which of the `num_ranks` ranks that hold a share of each block opens the tier
    """

    layout: BlockLayout
    fingerprint: str
    tracer: Tracer | None = None
    rank: int = 0
    num_ranks: int = 1
    name: str = ""


@dataclass(frozen=True, slots=True)
class TierStreams:
    """Number of streams for a tier's reads and writes: how many of them run at the same time. `batch_bytes`: how many
    bytes each of them reads or writes at once, if the tier is a `BatchTier` and several blocks are that small.
    """

    readers: int = 2
    writers: int = 1
    batch_bytes: int = 0


def streams_of(tier: PersistentTier) -> TierStreams:
    """What the tier says in its attribute `streams`, or the default."""
    streams: TierStreams = getattr(tier, "streams", TierStreams())
    return streams


def batch_blocks(tier: PersistentTier, block_bytes: int) -> int:
    """Number of blocks that a stream of the tier reads or writes at once."""
    num_blocks = streams_of(tier).batch_bytes // block_bytes if isinstance(tier, BatchTier) else 1
    return max(1, min(num_blocks, _MOST_BATCHED))


@dataclass(frozen=True, slots=True)
class TierKind:
    """A kind of persistent tier that the registry knows.

    name   name of the tier in metrics (`tier="NAME"`, `kind="NAME-write"`), streams, `CachedTokens.by_tier`,
           `OffloadConfig.tiers` and the tier's index
    open   function that makes the tier, or returns None if the config does not ask for the tier. Raises ConfigError
    write_policy   which blocks it writes by default: see `OffloadConfig.write_policy`. A tier that engines share should
           keep `"all"`, because others may reuse a block that this engine never uses again
    parts  configs of the tiers to open: several, if each block is in one of several tiers
    ranks  whether several ranks may open it with the same options, because it keeps their entries apart itself
    """

    name: str
    open: Callable[[OffloadConfig, TierContext], PersistentTier | None]
    write_policy: str = "all"
    ranks: bool = False
    parts: Callable[[OffloadConfig], Sequence[OffloadConfig]] = lambda config: (config,)
