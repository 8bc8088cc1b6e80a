"""The tiers of one engine, as an ordered list: host memory, then the persistent tiers (such as the disk). To add a
persistent tier, write its module, and add a row to `_KINDS` or call `register`.

A block is copied from the device to the host tier, and from there to every persistent tier. It comes back through the
host tier, from the fastest tier that has it. The offload worker owns the pool of the host tier and the indices of the
persistent tiers; the engine thread calls only `locate`, `gauges` and `close`. A slot is host memory for one block.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import random
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sidestream_kv.config import OffloadConfig, parse_bytes, unknown_name
from sidestream_kv.errors import ConfigError, InvariantError
from sidestream_kv.kv.layout import LayeredLayout
from sidestream_kv.kv.pool import FencedPool
from sidestream_kv.metrics import Metrics
from sidestream_kv.offload.tiers import disk, mooncake, redis, s3
from sidestream_kv.offload.tiers.base import PersistentTier, TierContext, TierKind
from sidestream_kv.offload.tiers.shared_memory import SharedMemory
from sidestream_kv.offload.tiers.shared_pool import HOST_SLOTS, SharedPool
from sidestream_kv.types import DEVICE, HOST, Access, Key, Tracer

if TYPE_CHECKING:  # a process without torch reads the names of the tiers
    from sidestream_kv.device.base import Device, Memory

logger = logging.getLogger(__name__)

# Number of slots that a log line names.
_SLOTS_TOLD = 8

_KINDS: list[TierKind] = [disk.KIND, mooncake.KIND, redis.KIND, s3.KIND]
"""The known persistent tiers, fastest first."""


def register(kind: TierKind) -> None:
    """Add a persistent tier after the known tiers, for engines that this process builds later.

    Raises ConfigError if a tier with that name is known already.
    """
    if kind.name in names() or kind_of(kind.name) != kind.name:
        raise ConfigError(f"a tier {kind.name} is known already: give the tier another name")
    _KINDS.append(kind)


def names(*, stores: bool = True) -> tuple[str, ...]:
    """Names of all known tiers, fastest first: the device, host memory, the persistent tiers. `stores`: also those in
    stores that engines share, which most engines do not use.
    """
    return (DEVICE, HOST, *(kind.name for kind in _KINDS if stores or not kind.ranks))


def kind_of(name: str) -> str:
    """The name of the kind of a tier: `disk` of `disk-2`. Of unknown tiers, the name of the tier."""
    kind, _, number = name.rpartition("-")
    return kind if number.isdecimal() and kind in names() else name


def open_tiers(config: OffloadConfig, context: TierContext) -> dict[str, PersistentTier]:
    """The persistent tiers that `config` asks for, by name, fastest first.

    Raises ConfigError if a tier cannot be opened or is unknown; tiers that were opened before are closed again.
    """
    known = {kind.name for kind in _KINDS}
    for name in config.tiers:
        if name not in known:
            raise ConfigError(unknown_name("tier", name, known))
    with contextlib.ExitStack() as undo:
        opened: dict[str, PersistentTier] = {}
        for kind in _KINDS:
            for number, part in enumerate(kind.parts(config), start=1):
                name = kind.name if number == 1 else f"{kind.name}-{number}"
                if (tier := kind.open(part, dataclasses.replace(context, name=name))) is not None:
                    undo.callback(tier.close)
                    opened[name] = tier
        undo.pop_all()
    return opened


def write_policies(config: OffloadConfig) -> dict[str, str]:
    """The write policy of each known persistent tier. Raises ConfigError if `config` has one for an unknown tier."""
    policies = {kind.name: kind.write_policy for kind in _KINDS}
    if isinstance(config.write_policy, Mapping):
        for name in config.write_policy:
            if name not in policies:
                raise ConfigError(unknown_name("tier", name, policies))
        return policies | dict(config.write_policy)
    return policies if config.write_policy is None else dict.fromkeys(policies, config.write_policy)


def share_of_rank(config: OffloadConfig, rank: int, size: int) -> OffloadConfig:
    """The tier options of one of `size` ranks: its share of the bytes, and its own directory in each of `config.disk`.

    Raises ConfigError if the directory holds blocks of another number of ranks, or if `config` asks for a tier that
    does not keep the entries of ranks apart itself (`TierKind.ranks`).
    """
    if size == 1:
        return config
    if config.shared_memory is not None:
        raise ConfigError(
            f"shared_memory cannot be used with {size} ranks, because a leased slot would have to be leased on all of "
            "them: leave it out, so that each rank has host memory of its own, or use one rank"
        )
    divided = {kind.name for kind in _KINDS if kind.ranks}
    if (whole := next((name for name in config.tiers if name not in divided), None)) is not None:
        raise ConfigError(
            f"tier {whole} cannot be used with {size} ranks, because Sidestream cannot divide its options among ranks: "
            "remove the tier, or use one rank"
        )
    for root in config.disks:
        names = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
        if strange := next((name for name in names if not name.endswith(f"-of-{size}")), None):
            raise ConfigError(
                f"disk directory {root} holds {strange}, which {size} ranks cannot use, because a directory is for one "
                "number of ranks: give another directory, or empty this one"
            )
    return dataclasses.replace(
        config,
        host=config.host_bytes // size,
        disk=tuple(root / f"rank-{rank}-of-{size}" for root in config.disks) or None,
        disk_capacity=parse_bytes(config.disk_capacity, option="offload disk_capacity") // size,
    )


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """A memory that holds KV blocks, on the device or on the host. It is one allocation, or one allocation per layer
    (striped).
    """

    memory: Memory
    layout: LayeredLayout

    def accesses(self, block_ids: Sequence[int], *, write: bool) -> list[Access]:
        """The byte ranges of whole blocks, for a tracer, which checks them for races."""
        return [Access(self.memory.name, *self.layout.span(block_id), write) for block_id in block_ids]


class HostTier:
    """`num_slots` blocks in one allocation of host memory, which the device can copy from and to. A pool tracks the
    slots, like the pool of device blocks.

    Has slots and bytes, but copies nothing. The offload worker's thread owns the pool; the engine thread only looks
    keys up in it. Only the holder of a slot's lease (the right to use the slot) writes the slot's bytes.

    memory        `num_slots * layout.block_bytes` bytes, from `Device.allocate_host`
    ready_bytes   number of bytes at the start of the memory that can be used already; `grow` raises it. None: all bytes
    shared        the memory of a cache process that `memory` is; None: it is the engine's own
    """

    def __init__(
        self,
        memory: Memory,
        layout: LayeredLayout,
        *,
        ready_bytes: int | None = None,
        tracer: Tracer | None = None,
        shared: SharedMemory | None = None,
    ) -> None:
        self.layout = layout
        self.memory = memory
        self.num_slots = memory.num_bytes // layout.block_bytes
        if tracer is not None:
            tracer.backed(HOST_SLOTS, memory.name, layout.block_bytes)
        ready = (memory.num_bytes if ready_bytes is None else ready_bytes) // layout.block_bytes
        self.pool = (
            FencedPool(HOST_SLOTS, ready, tracer=tracer)
            if shared is None
            else SharedPool(shared, ready=ready, tracer=tracer)
        )

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


def _log_shared(shared: SharedMemory, host: HostTier, wanted: int) -> None:
    logger.info(
        "host tier: memory of the cache process at %s, %d blocks, %d slots in %d bytes%s",
        shared.path,
        host.pool.num_keys,
        host.num_slots,
        host.memory.num_bytes,
        "" if wanted == host.memory.num_bytes else f" (not {wanted}, because another engine has made it)",
    )


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
        layout = context.layout
        if not isinstance(layout, LayeredLayout):
            raise InvariantError("host memory next to a device needs a LayeredLayout; persistent tiers take any layout")
        block_bytes = layout.block_bytes
        if config.host_bytes < block_bytes:
            raise ConfigError(
                f"offload host is {config.host_bytes} bytes, a block takes {block_bytes}: give more, or 0 for none"
            )
        num_bytes = config.host_bytes // block_bytes * block_bytes
        with contextlib.ExitStack() as undo:
            shared = None
            if config.shared_memory is None:
                memory = device.allocate_host(HOST, num_bytes, item_bytes=block_bytes)
            else:
                shared = SharedMemory.open(  # rule: shared-memory-is-of-one-model
                    config.shared_memory, layout=layout, fingerprint=context.fingerprint, num_bytes=num_bytes
                )
                undo.callback(shared.close)  # rule: failed-start-leaves-the-shared-memory
                memory = device.adopt_host(HOST, shared.pages, item_bytes=block_bytes)
            ready_bytes = device.ready_bytes(memory)
            host = HostTier(memory, layout, ready_bytes=ready_bytes, tracer=context.tracer, shared=shared)
            if shared is not None:
                _log_shared(shared, host, num_bytes)
            stack = cls(host, open_tiers(config, context) if persistent is None else persistent)
            undo.pop_all()
        return stack

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
        """Close every persistent tier, and leave a shared memory. Call it after the last transfer. Idempotent."""
        with contextlib.ExitStack() as ends:
            if isinstance(self.host.pool, SharedPool):
                ends.callback(self.host.pool.close)  # rule: closed-engine-leaves-the-shared-memory
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

    def forget_all(self, tiers: Collection[str] | None = None) -> dict[str, int]:
        """Make every block unreachable in `tiers`; None: in every tier (hazard H8 in docs/glossary.md). Returns the
        number of blocks that each of them held.
        """
        held = {gauge.name: gauge.num_blocks for gauge in self.gauges() if tiers is None or gauge.name in tiers}
        if HOST in held:
            self.host.pool.forget_all()  # rule: reset-drops-keys-of-the-host-tier
        for name in held.keys() & self.persistent.keys():
            self.persistent[name].index.clear()  # rule: reset-drops-keys-of-the-disk
        return held

    def forget(self, keys: Iterable[Key], tiers: Collection[str] | None = None) -> dict[str, int]:
        """Make these blocks unreachable in `tiers`; None: in every tier. Returns the number of them that each held."""
        pool, keys, held = self.host.pool, list(keys), dict[str, int]()
        if tiers is None or HOST in tiers:
            slots = [slot for key in keys if (slot := pool.get(key)) is not None]
            held[HOST] = len(slots)
            pool.forget(slots)  # rule: invalidated-blocks-leave-the-host-tier
        for name, tier in self.persistent.items():
            if tiers is None or name in tiers:
                held[name] = sum(key in tier.index for key in keys)
                tier.index.drop(keys)  # rule: invalidated-blocks-leave-the-disk
        return held


class Checksums:
    """Checksums of a share of the blocks in host memory, for the self-check. Used on the offload worker's thread only.

    A chosen block gets its checksum when it becomes findable, and the checksum is compared before each load of the
    block. So it covers the time in between: another owner that writes the slot, a copy that ends late, a memory error.
    It does not cover the copies themselves. Entries of persistent tiers have checksums of their own.

    share   share of the blocks that get a checksum; 0: none
    """

    def __init__(self, host: HostTier, *, share: float, device: Device, metrics: Metrics) -> None:
        self._host = host
        self._memory = BlockMemory(host.memory, host.layout)
        self._share = share
        self._tracer = device.tracer
        self._clock = device.now
        self._metrics = metrics
        self._random = random.Random("sidestream self-check of blocks")
        self._by_slot: dict[int, int] = {}
        if isinstance(host.pool, SharedPool):
            host.pool.on_rewrite = self.forget  # rule: checksum-ends-with-its-block

    def forget(self, slots: Iterable[int]) -> None:
        """Forget the checksums of slots that another engine has written."""
        for slot in slots:
            self._by_slot.pop(slot, None)

    def compute(self, slots: Sequence[int]) -> None:
        """Compute checksums of randomly chosen blocks that become findable now. The caller has leases of
        the slots, and the bytes are complete.
        """
        if not self._share:
            return
        for slot in slots:
            self._by_slot.pop(slot, None)
        start_s = self._clock()
        self._by_slot.update((slot, self._checksum(slot)) for slot in slots if self._random.random() < self._share)
        self._spent(start_s)

    def changed(self, slots: Sequence[int]) -> list[int]:
        """Compare the blocks in these slots with their checksums, before a load. Returns the indices in `slots` of the
        blocks that have changed. The caller has leases of the slots.
        """
        known = [index for index, slot in enumerate(slots) if slot in self._by_slot]
        if not known:
            return []
        start_s = self._clock()
        changed = [at for at in known if self._checksum(slots[at]) != self._by_slot[slots[at]]]
        self._spent(start_s)
        self._metrics.inc("self_check_blocks_total", len(known) - len(changed), "match")
        if changed:
            self._metrics.inc("self_check_blocks_total", len(changed), "mismatch")
            logger.error(
                "self-check: %d of %d blocks in host memory changed after they were stored (slots %s): a race or a "
                "memory error, see docs/self-check.md",
                len(changed),
                len(known),
                ", ".join(str(slots[at]) for at in changed[:_SLOTS_TOLD]),
            )
        return changed

    def _checksum(self, slot: int) -> int:
        """The checksum of a slot's bytes. zlib releases the GIL meanwhile."""
        if self._tracer is not None:
            self._tracer.host_touched(lambda: self._accesses(slot), "checksum")
        return zlib.crc32(self._host.slot(slot))

    def _accesses(self, slot: int) -> list[Access]:
        return self._memory.accesses([slot], write=False)

    def _spent(self, since_s: float) -> None:
        self._metrics.inc("self_check_seconds_total", self._clock() - since_s, "checksums")
