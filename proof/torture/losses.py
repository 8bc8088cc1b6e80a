"""Two oracles for errors that change no answer: a block is evicted before blocks that were used less recently, or a
request computes a block again that it could reuse. Called by the actor whose turn it is.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from sidestream.engine.parts import Parts
from sidestream.schedule.allocation import Reuse
from sidestream.schedule.request import Request, State
from sidestream.schedule.states import part_keys
from sidestream_kv.kv.pool import FencedPool
from sidestream_kv.offload.tiers.index import TierIndex
from sidestream_kv.types import HOST, Fence, Key
from sidestream_order.shadow import hide_frames_of
from sidestream_order.trace import Recorder

hide_frames_of(__file__)


@dataclass(slots=True)
class _Uses:
    """What the order of evictions depends on, in one pool or index. Ids are those of blocks, or serials of entries.

    leases   by id, the number of leases
    keys     id → key, of the findable ids; `ids`: key → id
    idle     findable ids without a lease, least recently used first
    early    ids that must be evicted before all others
    """

    leases: Counter[int] = field(default_factory=Counter)
    keys: dict[int, Key] = field(default_factory=dict)
    ids: dict[Key, int] = field(default_factory=dict)
    idle: dict[int, None] = field(default_factory=dict)
    early: set[int] = field(default_factory=set)

    def use(self, item: int) -> None:
        """Note that the id is in use."""
        self.idle.pop(item, None)
        self.early.discard(item)

    def lose_key(self, item: int) -> None:
        """Note that the id is not findable any more."""
        self.use(item)
        if (key := self.keys.pop(item, None)) is not None:
            del self.ids[key]


class EvictionOrder:
    """Follows the leases and keys of all pools and indices, and checks each eviction.

    The least recently used block goes first: the one whose last lease or `touch` ended first. Of blocks that were
    released or touched together, the last one goes first, because it is useless without those before it. Blocks that
    were demoted go before all others. No block goes while another one is free.

    wrong   sentences about evictions out of order
    """

    def __init__(self, recorder: Recorder) -> None:
        self.wrong: list[str] = []
        self._uses: defaultdict[str, _Uses] = defaultdict(_Uses)
        self._watched: dict[str, FencedPool | TierIndex] = {}
        self._evictions: Counter[str] = Counter()
        for event in ("took", "shared", "released", "published", "forgot"):
            setattr(recorder, event, _both(getattr(self, event), getattr(recorder, event)))

    def watch(self, pool: FencedPool | TierIndex) -> None:
        """Follow the uses that are no leases, too."""
        self._watched[pool.name] = pool
        self._evictions[pool.name] = pool.stats.evictions if isinstance(pool, TierIndex) else 0
        uses, demotes_used = self._uses[pool.name], isinstance(pool, FencedPool)

        def touch(keys: Sequence[Key]) -> None:
            for key in reversed(keys):
                if (item := uses.ids.get(key)) in uses.idle:
                    uses.use(item)
                    uses.idle[item] = None

        def demote(keys: Sequence[Key]) -> None:
            found = {uses.ids[key] for key in keys if key in uses.ids}
            uses.early |= found if demotes_used else found & uses.idle.keys()

        pool.touch, pool.demote = _both(touch, pool.touch), _both(demote, pool.demote)  # type: ignore[method-assign]

    # ------------------------------------------------------------------ Tracer

    def took(self, pool: str, ids: Sequence[int], after: Sequence[Fence]) -> None:
        """See `Tracer.took`. Of a pool, cached blocks among `ids` were evicted, in this order."""
        uses = self._uses[pool]
        for item in ids:
            if item in uses.idle:
                self._evict(pool, item)
            uses.leases[item] = 1

    def shared(self, pool: str, ids: Sequence[int]) -> None:
        uses = self._uses[pool]
        for item in ids:
            uses.leases[item] += 1
            uses.use(item)

    def released(self, pool: str, ids: Sequence[int], after: Sequence[Fence]) -> None:
        uses = self._uses[pool]
        for item in reversed(ids):
            uses.leases[item] -= 1
            if not uses.leases[item] and item in uses.keys:
                uses.idle[item] = None

    def published(self, pool: str, item: int, key: Key, *, partial: bool = False) -> None:
        uses = self._uses[pool]
        uses.keys[item], uses.ids[key] = key, item

    def forgot(self, pool: str, ids: Sequence[int]) -> None:
        """See `Tracer.forgot`. An index also calls it for an eviction, which it has counted by then."""
        index = self._watched.get(pool)
        if isinstance(index, TierIndex) and index.stats.evictions > self._evictions[pool]:
            self._evictions[pool] += 1
            self._evict(pool, ids[0])
        for item in ids:
            self._uses[pool].lose_key(item)

    def _evict(self, pool: str, item: int) -> None:
        uses, watched = self._uses[pool], self._watched.get(pool)
        due = uses.early & uses.idle.keys() or set(list(uses.idle)[:1])
        if watched is None:  # other engines use and evict the blocks, too
            uses.lose_key(item)
            return
        if item not in due:
            self.wrong.append(f"{pool} {item} is evicted before {sorted(due)}")
        if isinstance(watched, FencedPool) and watched.num_free:
            self.wrong.append(f"{pool} {item} is evicted, although {watched.num_free} are free")
        uses.lose_key(item)


def lost_hits(parts: Parts, request: Request, reuse: Reuse) -> Iterator[str]:
    """Sentences about blocks that the request could reuse and does not. Call it when the request is admitted.

    It reuses as many of its first blocks as are on the device or in host memory, and has a checkpoint of the recurrent
    state at their end, and the pages of the window before their end. It waits for slower tiers before. But it loads no
    block if computing is expected to be faster, and does not try again a tier that has failed it.
    """
    scheduler, limits = parts.scheduler, parts.scheduler.limits
    most_blocks = (len(request.tokens) - 1) // limits.block_tokens
    keys = scheduler.keys_of(request.tokens, salt=request.cache_salt)[:most_blocks]
    tiers = None if request.avoid_tiers else parts.tiers

    def in_host(key: Key) -> str | None:
        return HOST if tiers is not None and tiers.host.pool.get(key) is not None else None

    def in_any(key: Key) -> str | None:
        return in_host(key) or (None if tiers is None else tiers.find(key))

    def is_usable(key: Key, before_window: bool) -> bool:
        block = parts.blocks.get(key)
        return block is not None and (before_window or not parts.blocks.is_partial(block))

    def most(tier_of: Callable[[Key], str | None]) -> tuple[int, list[str], int]:
        """The largest number of blocks, the tier of each block to load, and how many are loaded without some layers."""
        for count in range(len(keys), 0, -1):
            before, loads = limits.blocks_before_window(count), list[Key]()
            if parts.states is not None and parts.states.get(keys[count - 1]) is None:
                assert parts.state_region is not None
                loads = part_keys(keys[count - 1], parts.state_region.blocks_per_state)
            if (windows := scheduler._windows) is not None:
                pages = [keys[at] for at in windows.window(count)]
                loads = [part for key in pages if windows.on_device(key) is None for part in windows.part_keys(key)]
            hits = next((at for at in range(count) if not is_usable(keys[at], at < before)), count)
            sources = [source for key in (*loads, *keys[hits:count]) if (source := tier_of(key)) is not None]
            if len(sources) == len(loads) + count - hits:
                return count, sources, max(0, before - hits)
        return 0, [], 0

    def is_worth(found: tuple[int, list[str], int], count: int | None) -> bool:
        assert parts.transfers is not None
        return parts.transfers.worth_loading(found[1], num_blocks=count, num_partial=found[2])

    def is_worth_waiting(found: tuple[int, list[str], int]) -> bool:
        """A prefix with a recurrent state at its end is loaded whole; of any other, a head may be."""
        if parts.states is not None:
            return is_worth(found, None)
        assert parts.transfers is not None
        return parts.transfers.head(found[1], num_partial=found[2]) > sum(1 for _ in takewhile(HOST.__eq__, found[1]))

    (alone, *_), host, slow = most(lambda key: None), most(in_host), most(in_any)
    who = f"request {request.id} reuses {reuse.num_blocks} blocks"
    if reuse.num_blocks < alone:
        yield f"{who}, and {alone} are on the device"
    elif reuse.num_blocks < host[0] and is_worth(host, host[0] - alone):
        yield f"{who}, and {host[0]} are on the device or in host memory"
    loading = sum(other.state is State.LOADING for other in scheduler._queues.waiting.values())
    may_wait = not request.avoid_disk and request.promotions < limits.max_promotions and loading < scheduler.slots.size
    if slow[0] > host[0] and may_wait and is_worth_waiting(slow):
        yield f"{who} and does not wait for slower tiers, and {slow[0]} are on the device or in tiers"


def _both(first: Callable[..., None], second: Callable[..., None]) -> Callable[..., None]:
    """A function that calls both, in this order."""

    def both(*given: object, **options: object) -> None:
        first(*given, **options)
        second(*given, **options)

    return both
