"""The tiers of one engine: host memory, and persistent tiers behind it, as an ordered list.

A block goes from the device to the host tier, and from there to every persistent tier; it comes back from the fastest
tier that has it, through the host tier. The offload worker owns the ledgers; the engine thread calls `locate`,
`gauges` and `close`, which only look.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sidestream.offload.tiers.base import PersistentTier
from sidestream.offload.tiers.host import HostTier
from sidestream.types import HOST, Key


@dataclass(frozen=True, slots=True)
class TierGauge:
    """What one tier holds. `ready_bytes`: bytes of a memory that can be used already; None: not a memory."""

    name: str
    num_blocks: int
    num_bytes: int
    ready_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class TierStack:
    """`host`, and the `persistent` tiers by name, fastest first."""

    host: HostTier
    persistent: Mapping[str, PersistentTier] = field(default_factory=dict)

    # ------------------------------------------------------------------ any thread

    def locate(self, keys: Sequence[Key]) -> list[str]:
        """Names of the tiers that hold the longest run of leading `keys`, one for each key of the run.

        A lookup: when the plan that follows from it is carried out, a block may have been evicted, and is a miss.
        """
        sources = [HOST] * len(self.host.pool.match(keys))  # usually the whole run, and faster than key by key
        for key in keys[len(sources) :]:
            source = HOST if self.host.pool.get(key) is not None else self.find(key)
            if source is None:
                break
            sources.append(source)
        return sources

    def find(self, key: Key) -> str | None:
        """The fastest persistent tier that holds `key`."""
        return next((name for name, tier in self.persistent.items() if key in tier.index), None)

    def gauges(self) -> Iterator[TierGauge]:
        """What each tier holds, fastest first."""
        pool, block_bytes = self.host.pool, self.host.layout.block_bytes
        yield TierGauge(HOST, pool.num_keys, pool.num_keys * block_bytes, self.host.ready_bytes)
        for name, tier in self.persistent.items():
            stats = tier.index.stats
            yield TierGauge(name, stats.entries, stats.bytes)

    def close(self) -> None:
        """Close every persistent tier; after the last transfer. Idempotent."""
        with contextlib.ExitStack() as ends:
            for tier in self.persistent.values():
                ends.callback(tier.close)

    # ------------------------------------------------------------------ the offload worker

    def touch(self, prefix: Sequence[Key]) -> None:
        """Mark a run from the start of a sequence as just used, in every tier: a run is evicted from its end."""
        self.host.pool.touch(prefix)
        self.touch_persistent(prefix)

    def touch_persistent(self, prefix: Sequence[Key]) -> None:
        """`touch`, in the persistent tiers only."""
        for tier in self.persistent.values():
            tier.index.touch(prefix)

    def forget_all(self) -> None:
        """Make every block unreachable, in every tier (H8)."""
        self.host.pool.forget_all()  # rule: reset-drops-keys-of-the-host-tier
        for tier in self.persistent.values():
            tier.index.clear()  # rule: reset-drops-keys-of-the-disk

    def forget(self, keys: Iterable[Key]) -> None:
        """Make these blocks unreachable, in every tier."""
        pool, keys = self.host.pool, list(keys)
        # rule: invalidated-blocks-leave-the-host-tier
        pool.forget([slot for key in keys if (slot := pool.get(key)) is not None])
        for tier in self.persistent.values():
            tier.index.drop(keys)  # rule: invalidated-blocks-leave-the-disk
