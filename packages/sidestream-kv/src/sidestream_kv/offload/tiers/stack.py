"""The tiers of one engine, as an ordered list: host memory, then the persistent tiers (such as the disk).

A block is copied from the device to the host tier, and from there to every persistent tier. It comes back through the
host tier, from the fastest tier that has it. The offload worker owns the pool of the host tier and the indices of the
persistent tiers; the engine thread calls only `locate`, `gauges` and `close`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sidestream_kv.config import OffloadConfig
from sidestream_kv.device.base import Device, Memory
from sidestream_kv.errors import ConfigError
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.kv.pool import FencedPool
from sidestream_kv.offload.tiers.base import PersistentTier, TierContext
from sidestream_kv.offload.tiers.registry import open_tiers
from sidestream_kv.types import HOST, Key, Tracer


class HostTier:
    """`num_slots` blocks in one allocation of host memory, which the device can copy from and to. A slot is the memory
    of one block, and a pool tracks the slots, like the pool of device blocks.

    Has slots and bytes, but copies nothing. The offload worker's thread owns the pool; the engine thread only looks
    keys up in it. Only the holder of a slot's lease (the right to use the slot) writes the slot's bytes.

    memory        `num_slots * layout.block_bytes` bytes, from `Device.allocate_host`
    ready_bytes   number of bytes at the start of the memory that can be used already; `grow` raises it. None: all bytes
    """

    def __init__(
        self, memory: Memory, layout: KVLayout, *, ready_bytes: int | None = None, tracer: Tracer | None = None
    ) -> None:
        self.layout = layout
        self.memory = memory
        self.num_slots = memory.num_bytes // layout.block_bytes
        self.pool = FencedPool(
            "host slots",
            (memory.num_bytes if ready_bytes is None else ready_bytes) // layout.block_bytes,
            tracer=tracer,
        )
        if tracer is not None:
            tracer.backed(self.pool.name, memory.name, layout.block_bytes)

    def grow(self, ready_bytes: int) -> bool:
        """Use the first `ready_bytes` of the memory from now on. Returns whether this adds slots."""
        ready = ready_bytes // self.layout.block_bytes
        if ready <= self.pool.size:
            return False
        self.pool.grow(ready)
        return True

    @property
    def ready_bytes(self) -> int:
        """Bytes of the slots that can be used already. Any thread may read it."""
        return self.pool.size * self.layout.block_bytes

    def slot(self, index: int) -> memoryview:
        """The bytes of one slot, writable. Valid while the caller holds a lease of the slot."""
        start, stop = self.layout.span(index)
        return self.memory.data[start:stop].numpy().data


@dataclass(frozen=True, slots=True)
class TierGauge:
    """The content of one tier. `ready_bytes`: bytes of the tier's memory that can be used already; None if the tier is
    not in memory.
    """

    name: str
    num_blocks: int
    num_bytes: int
    ready_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class TierStack:
    """The tier `host`, and the tiers `persistent` by name, fastest first."""

    host: HostTier
    persistent: Mapping[str, PersistentTier] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        config: OffloadConfig,
        device: Device,
        context: TierContext,
        *,
        persistent: Mapping[str, PersistentTier] | None = None,
    ) -> TierStack:
        """Allocate the host tier's memory on `device`, and open the persistent tiers that `config` asks for, or take
        the open tiers `persistent` instead. Raises ConfigError for a host tier smaller than a block, and if a tier
        cannot be opened.
        """
        block_bytes = context.layout.block_bytes
        if config.host_bytes < block_bytes:
            raise ConfigError(
                f"offload host is {config.host_bytes} bytes, a block takes {block_bytes}: give more, or 0 for none"
            )
        slots = config.host_bytes // block_bytes
        memory = device.allocate_host(HOST, slots * block_bytes, item_bytes=block_bytes)
        host = HostTier(memory, context.layout, ready_bytes=device.ready_bytes(memory), tracer=context.tracer)
        return cls(host, open_tiers(config, context) if persistent is None else persistent)

    # ------------------------------------------------------------------ called from any thread

    def locate(self, keys: Sequence[Key]) -> list[str]:
        """The longest run of leading `keys` that the tiers hold. Returns the name of a tier for each key of the run.

        This is only a lookup: if a block is evicted before a plan loads it, that load is a miss.
        """
        sources = [HOST] * len(self.host.pool.match(keys))  # often the whole run; faster than single lookups
        for key in keys[len(sources) :]:
            source = HOST if self.host.pool.get(key) is not None else self.find(key)
            if source is None:
                break
            sources.append(source)
        return sources

    def find(self, key: Key) -> str | None:
        """The name of the fastest persistent tier that holds `key`, or None."""
        return next((name for name, tier in self.persistent.items() if key in tier.index), None)

    def gauges(self) -> Iterator[TierGauge]:
        """The content of each tier, fastest first."""
        pool, block_bytes = self.host.pool, self.host.layout.block_bytes
        yield TierGauge(HOST, pool.num_keys, pool.num_keys * block_bytes, self.host.ready_bytes)
        for name, tier in self.persistent.items():
            stats = tier.index.stats
            yield TierGauge(name, stats.entries, stats.bytes)

    def close(self) -> None:
        """Close every persistent tier. Call it after the last transfer. Idempotent."""
        with contextlib.ExitStack() as ends:
            for tier in self.persistent.values():
                ends.callback(tier.close)

    # ------------------------------------------------------------------ called from the offload worker only

    def touch(self, prefix: Sequence[Key]) -> None:
        """Mark the first blocks of a sequence as just used in every tier; the last of them will be evicted first."""
        self.host.pool.touch(prefix)
        self.touch_persistent(prefix)

    def demote(self, keys: Sequence[Key]) -> None:
        """Let these blocks be evicted first, in every tier."""
        self.host.pool.demote(keys)
        for tier in self.persistent.values():
            tier.index.demote(keys)

    def touch_persistent(self, prefix: Sequence[Key]) -> None:
        """Like `touch`, but only in the persistent tiers."""
        for tier in self.persistent.values():
            tier.index.touch(prefix)

    def forget_all(self) -> None:
        """Make every block unreachable in every tier (hazard H8 in docs/glossary.md)."""
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
