"""The block pool: references, fences and keys of each block, by id. Holds no tensor. A fence is a point in a device
stream, which is done when all work before it is done.

A block is one unit of a pool: a KV block on the device, a slot of host memory, a request slot, an entry of the mailbox.
No block is reused before the fence of its last use is done. A release never waits on the host: the block keeps the
fences of its last uses, and the next owner makes its own stream wait for them.

    free      no reference and no key: the block's content is of no use
    cached    no reference, but findable under its key until it is evicted (least recently used first)
    used      one reference or more; several requests may share a block that they only read

A findable block may be partial: the layers with a sliding window are missing. A request may use it only if it continues
so far after the block that these layers do not attend to the block any more.

One thread owns a pool and makes all changes: the offload worker's thread owns the host slots, the engine thread all
other pools. Other threads may call `get` and `match` and read the counters; the results may be out of date.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from sidestream_kv.errors import InvariantError, SidestreamError
from sidestream_kv.kv.key_log import TierKeyLog
from sidestream_kv.kv.pins import Pins
from sidestream_kv.types import Fence, Key, Tracer


class PoolExhausted(SidestreamError):
    """The caller asked for more blocks than are free or cached. No block was taken."""


class Lease:
    """The right to use some blocks of a pool, until `release`. Owned by one request or one transfer. `extend` adds
    blocks, `split` takes some away.

    after   unfinished fences of the blocks' earlier uses: the new owner's stream waits for them before it writes
    """

    __slots__ = ("_open", "after", "ids", "pool")

    def __init__(self, pool: FencedPool, block_ids: list[int], after: tuple[Fence, ...]) -> None:
        self.pool = pool
        self.ids = block_ids
        self.after = after
        self._open = True

    @property
    def open(self) -> bool:
        """Whether the lease still holds its blocks."""
        return self._open

    def extend(self, other: Lease) -> None:
        """Take over the blocks of the lease `other`, which ends without a release."""
        if other.pool is not self.pool or not other._open or not self._open:
            raise InvariantError(f"leases of {self.pool.name} and {other.pool.name} cannot be joined, or one has ended")
        other._open = False
        self.ids.extend(other.ids)
        if other.after:
            self.after = merge_fences((*self.after, *other.after))  # rule: extended-lease-keeps-fences

    def split(self, count: int) -> Lease:
        """A lease of its own for the first `count` blocks, which this lease loses. InvariantError if it has fewer."""
        if not self._open or count > len(self.ids):
            raise InvariantError(f"{count} blocks of a lease of {self.pool.name} {self.ids} cannot be split off")
        first = Lease(self.pool, self.ids[:count], self.after)
        del self.ids[:count]
        return first

    def release(self, *, after: Iterable[Fence] = (), until: Fence | None = None) -> None:
        """Give the blocks back at once. The stream of the next owner waits for the fences `after`. A second release is
        an error.

        until   a fence for which streams cannot wait, only the host: the blocks stay in use until `FencedPool.settle`
                sees that this fence is done
        """
        if not self._open:
            raise InvariantError(f"lease of {self.pool.name} {self.ids} was released twice")
        self._open = False
        if until is None or until.poll():  # rule: release-waits-for-transfers-that-only-the-host-observes
            self.pool._release(self.ids, tuple(after))  # rule: release-keeps-its-fences
        else:
            self.pool._postpone(until, self.ids, tuple(after))  # rule: postponed-release-keeps-its-fences


class FencedPool:
    """`size` blocks with references, fences and keys. `tracer` records every lease and every key."""

    def __init__(self, name: str, size: int, *, tracer: Tracer | None = None) -> None:
        self.name = name
        self.size = size
        self._tracer = tracer
        self._references = [0] * size
        self._fences: list[tuple[Fence, ...]] = [()] * size
        self._free: deque[int] | FreeIds = deque(range(size))
        # Releases that wait for a fence `until`, in the order in which these fences will be done.
        self._postponed: deque[tuple[Fence, list[int], tuple[Fence, ...]]] = deque()
        self._cached = Lru()
        self._demoted: set[int] = set()  # used blocks that are evicted first once they are cached
        self._index = PrefixIndex()
        self.on_evict: tuple[Callable[[Sequence[Key]], None], ...] = ()
        """Called with the keys of evicted blocks, on the owner's thread."""
        self.key_log: TierKeyLog | None = None
        """Records every change of the findable keys; None: changes are not recorded."""
        self.pins: Pins | None = None
        """The keys whose blocks are evicted last; None: no block can be pinned."""

    def grow(self, size: int) -> None:
        """Add free blocks until the pool has `size` blocks. Never removes a block."""
        self._references.extend(0 for _ in range(self.size, size))
        self._fences.extend(() for _ in range(self.size, size))
        self._free.extend(range(self.size, size))
        self.size = max(self.size, size)

    @property
    def num_free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Number of cached blocks."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Number of blocks that `take` can lease: free or cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Number of used blocks."""
        return self.size - self.num_available

    @property
    def num_keys(self) -> int:
        """Number of findable keys."""
        return len(self._index)

    @property
    def is_settling(self) -> bool:
        """Whether releases are postponed until a transfer ends."""
        return bool(self._postponed)

    def settle(self) -> None:
        """Execute the postponed releases whose fence `until` (see `Lease.release`) is done."""
        while self._postponed and self._postponed[0][0].poll():  # rule: postponed-release-waits-for-its-use
            _, block_ids, after = self._postponed.popleft()
            self._release(block_ids, after)  # rule: postponed-release-is-executed

    def take(self, count: int) -> Lease:
        """Lease `count` blocks for writing: free blocks first, then cached blocks, which it evicts, least recently used
        first.

        Raises PoolExhausted, with nothing taken, when fewer are available.
        """
        free, fences = self._free, self._fences
        evicted = max(0, count - len(free))
        if evicted > len(self._cached):
            raise PoolExhausted(f"{self.name}: {count} asked for, {self.num_available} of {self.size} available")
        block_ids = [free.popleft() for _ in range(count - evicted)]
        if evicted:
            block_ids.extend(self._evict(evicted))
        pending: tuple[Fence, ...] = ()
        if any(map(fences.__getitem__, block_ids)):
            # rule: take-passes-the-fences-on
            pending = merge_fences(fence for block_id in block_ids for fence in fences[block_id])
            for block_id in block_ids:
                # rule: unused-lease-keeps-fences
                fences[block_id] = tuple(fence for fence in fences[block_id] if not fence.poll())
        for block_id in block_ids:
            self._references[block_id] = 1
        if self._tracer is not None:
            self._tracer.took(self.name, block_ids, pending)
        return Lease(self, block_ids, pending)

    def take_some(self, count: int) -> Lease:
        """Lease `count` blocks for writing, or as many as there are: see `take`."""
        return self.take(min(count, self.num_available))

    def lease(self, keys: Sequence[Key]) -> Lease:
        """Lease the blocks of the longest run of leading `keys` that are all findable, for reading."""
        return self.share(self.match(keys))

    def share(self, block_ids: Sequence[int]) -> Lease:
        """Lease used or cached blocks for reading. Raises InvariantError for a free block."""
        references = self._references
        if idle := [block_id for block_id in block_ids if not references[block_id]]:
            if not self._cached.holds_all(idle):
                nothing = next(block_id for block_id in idle if block_id not in self._cached)
                raise InvariantError(f"{self.name} {nothing} is free: it cannot be shared")
            self._cached.discard_all(idle)  # rule: shared-block-is-not-evictable
        self._demoted.difference_update(block_ids)
        for block_id in block_ids:
            references[block_id] += 1  # rule: share-counts-its-reference
        if self._tracer is not None:
            self._tracer.shared(self.name, block_ids)
        return Lease(self, list(block_ids), ())

    def publish(self, block_id: int, key: Key, *, partial: bool = False) -> bool:
        """Make a used block findable under `key`. Call it when the block's bytes are complete (hazard H7).

        partial   the layers with a sliding window are missing

        Returns False, and changes nothing, when the block has another key or another block has this key. But if that
        block is partial and this one is whole, this one takes the key over.
        """
        if self._references[block_id] == 0:
            raise InvariantError(f"{self.name} {block_id} is not in use: it cannot be published")
        if not partial and (known := self._index.get(key)) is not None and self._index.is_partial(known):
            if self._index.holds_key(block_id):
                return False
            self.forget([known])  # rule: whole-block-takes-the-key-over
        added = self._index.add(key, block_id, partial=partial)
        if added and self._tracer is not None:
            self._tracer.published(self.name, block_id, key, partial=partial)
        if added and self.key_log is not None:
            self.key_log.stored((key,))
        return added

    def publish_all(self, block_ids: Sequence[int], keys: Sequence[Key], *, partial: bool = False) -> None:
        """`publish` each block under its key; faster than one call per block."""
        if 0 in map(self._references.__getitem__, block_ids):
            raise InvariantError(f"of {self.name} {list(block_ids)}, not all are in use: they cannot be published")
        if not self._index.add_all(keys, block_ids, partial=partial):
            for block_id, key in zip(block_ids, keys, strict=True):
                self.publish(block_id, key, partial=partial)
            return
        if self._tracer is not None:
            for block_id, key in zip(block_ids, keys, strict=True):
                self._tracer.published(self.name, block_id, key, partial=partial)
        if self.key_log is not None:
            self.key_log.stored(keys)

    def match(self, keys: Sequence[Key]) -> list[int]:
        """Blocks of the longest run of leading `keys` that are all findable. Callable from any thread."""
        return self._index.match(keys)

    def get(self, key: Key) -> int | None:
        """The block that is findable under `key`, or None. Callable from any thread."""
        return self._index.get(key)

    def is_partial(self, block_id: int) -> bool:
        """Whether the block is findable, but its layers with a sliding window are missing. Callable from any thread."""
        return self._index.is_partial(block_id)

    def first_partial(self, block_ids: Sequence[int]) -> int | None:
        """Index of the first of these blocks that `is_partial`. Callable from any thread."""
        return self._index.first_partial(block_ids)

    def keys_by_use(self) -> Iterator[Key]:
        """The keys of the cached blocks, most recently used first."""
        return map(self._index.key_of, self._cached.newest_first())

    def is_cached(self, block_id: int) -> bool:
        """Whether the block is findable and unused, so that `take` may evict it."""
        return block_id in self._cached

    def touch(self, keys: Sequence[Key]) -> None:
        """Mark the blocks of `keys` as just used. The keys are those of a sequence's first blocks, in order; the first
        block will be evicted last.

        Skips absent keys and blocks that are in use.
        """
        self._cached.touch_all(map(self._index.get, reversed(keys)))

    def demote(self, keys: Sequence[Key]) -> None:
        """Make the blocks of `keys` the next to be evicted. For a used block, this takes effect when it is released,
        unless it is shared before. Skips absent keys.
        """
        for key in keys:
            block_id = self._index.get(key)
            if block_id is None:
                continue
            if block_id in self._cached:
                self._cached.demote(block_id)
            else:
                self._demoted.add(block_id)

    def forget_all(self) -> None:
        """Remove every key, because the cache was reset or the weights changed (hazard H8). Leases stay valid."""
        if self.key_log is not None:
            self.key_log.cleared(list(self._index))
        if self.pins is not None:
            self.pins.clear()
        self._not_findable(self._index.clear())

    def forget(self, block_ids: Sequence[int]) -> None:
        """Remove the keys of these blocks, if they have keys. Leases stay valid."""
        findable = [block_id for block_id in block_ids if self._index.holds_key(block_id)]
        keys = self._index.remove_all(findable)
        if self.key_log is not None:
            self.key_log.removed(keys)
        self._not_findable(findable)

    def _not_findable(self, block_ids: Sequence[int]) -> None:
        if self._tracer is not None:
            self._tracer.forgot(self.name, block_ids)
        self._demoted.difference_update(block_ids)
        for block_id in block_ids:
            if block_id in self._cached:
                self._cached.discard(block_id)  # rule: unfindable-block-is-free
                self._free.append(block_id)

    def check(self) -> None:
        """Raise InvariantError unless every block is in exactly one state of the module's table. For tests."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise InvariantError(f"{self.name}: a block is free twice")
        for block_id in range(self.size):
            num_states = (block_id in free) + (block_id in self._cached) + (self._references[block_id] > 0)
            if num_states != 1 or self._references[block_id] < 0:
                raise InvariantError(
                    f"{self.name} {block_id} is in {num_states} states with {self._references[block_id]} references"
                )
            findable = self._index.holds_key(block_id)
            if block_id in self._demoted and not (findable and self._references[block_id]):
                raise InvariantError(
                    f"{self.name} {block_id} is to be evicted first, but is not in use or not findable"
                )
            if self._index.is_partial(block_id) and not findable:
                raise InvariantError(f"{self.name} {block_id} is partial, but not findable")
            if (findable and block_id in free) or (not findable and block_id in self._cached):
                raise InvariantError(
                    f"{self.name} {block_id} is {'free' if findable else 'cached'}, and findable: {findable}"
                )

    def _postpone(self, until: Fence, block_ids: list[int], after: tuple[Fence, ...]) -> None:
        self._postponed.append((until, block_ids, after))

    def _evict(self, count: int) -> list[int]:
        if (pins := self.pins) is not None and pins.held:
            block_ids = _oldest_unpinned(self._cached, self._index, count, pins)
        else:
            block_ids = self._cached.pop_oldest(count)
        keys = self._index.remove_all(block_ids)  # rule: evicted-block-loses-its-key
        for on_evict in self.on_evict:
            on_evict(keys)
        if self.key_log is not None:
            self.key_log.removed(keys)
        return block_ids

    def _release(self, block_ids: Sequence[int], after: tuple[Fence, ...]) -> None:
        references, fences = self._references, self._fences
        if block_ids and min(map(references.__getitem__, block_ids)) <= 0:
            raise InvariantError(f"{self.name} {block_ids} were released more often than taken")
        if self._tracer is not None:
            self._tracer.released(self.name, block_ids, after)
        after = merge_fences(after)
        # Maps the earlier fences of a block to its merged fences. Most blocks of a lease have the same earlier fences,
        # so few merges are computed.
        merged: dict[tuple[Fence, ...], tuple[Fence, ...]] = {}
        idle: list[int] = []
        # In reverse, so that the end of a sequence is evicted before its start, which more sequences share.
        for block_id in reversed(block_ids):  # rule: end-of-a-sequence-is-evicted-first
            references[block_id] -= 1  # rule: release-ends-its-reference
            if after or fences[block_id]:
                before = fences[block_id]
                if before not in merged:
                    merged[before] = merge_fences((*before, *after))  # rule: release-adds-to-earlier-fences
                fences[block_id] = merged[before]
            if not references[block_id]:  # rule: last-release-frees
                idle.append(block_id)
        findable, others = self._index.split(idle)
        self._cached.add_all(findable)
        self._free.extend(others)  # rule: released-block-without-a-key-is-free
        if self._demoted:
            for block_id in findable:
                if block_id in self._demoted:
                    self._cached.demote(block_id)
            self._demoted.difference_update(findable)


def merge_fences(fences: Iterable[Fence]) -> tuple[Fence, ...]:
    """The unfinished fences, reduced to the last fence of each stream: when this fence is done, all earlier ones of the
    stream are done.
    """
    last: dict[str, Fence] = {}
    for fence in fences:
        # rule: merged-fences
        if not fence.poll() and (fence.stream not in last or last[fence.stream].tick < fence.tick):
            last[fence.stream] = fence  # rule: merged-fences-are-of-all-streams
    return tuple(last.values())


def _oldest_unpinned(cached: Lru, index: PrefixIndex, count: int, pins: Pins) -> list[int]:
    """Remove and return `count` cached blocks, least recently used first, but those that no pin holds before
    others. Pinned blocks that it passes count as just used, in their order.
    """
    pins.end_late()
    found: list[int] = []
    while True:
        for _ in range(len(cached)):
            if len(found) == count:
                return found
            (block_id,) = cached.pop_oldest(1)
            if index.key_of(block_id) in pins.held:
                cached.touch(block_id)
            else:
                found.append(block_id)
        if len(found) == count:
            return found
        pins.end_first()


class PrefixIndex:
    """A one-to-one map between published keys and block ids. A key identifies a whole prefix, so a flat map replaces a
    prefix tree. A block may be partial: some of its layers are missing.

    Changed by the thread that owns the pool; `get` and `match` may be called from any thread.
    """

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

    def key_of(self, block_id: int) -> Key:
        """The key of a block that has one."""
        return self._key_of[block_id]

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


class FreeIds(OrderedDict[int, None]):
    """Free blocks in order, for a pool whose blocks other processes take, too: any of them can be removed."""

    def popleft(self) -> int:
        """Remove and return the first id."""
        return self.popitem(last=False)[0]

    def append(self, block_id: int) -> None:
        """Add an id at the end."""
        self[block_id] = None

    def extend(self, block_ids: Iterable[int]) -> None:
        """Add ids at the end."""
        self.update(dict.fromkeys(block_ids))


class Lru:
    """Ids of idle blocks in the order of their last use: the least recently used one is evicted first."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._order

    def touch(self, block_id: int) -> None:
        """Add the block, or make it the most recently used one."""
        self._order[block_id] = None
        self._order.move_to_end(block_id)

    def touch_all(self, block_ids: Iterable[int | None]) -> None:
        """Make those of these blocks that are present the most recently used ones, the last one last."""
        order = self._order
        for block_id in block_ids:
            if block_id is not None and block_id in order:
                order.move_to_end(block_id)

    def add_all(self, block_ids: Sequence[int]) -> None:
        """Add blocks that are not present; the last becomes the most recently used one."""
        self._order.update(dict.fromkeys(block_ids))

    def holds_all(self, block_ids: Sequence[int]) -> bool:
        """Whether all these blocks are present."""
        return self._order.keys() >= {*block_ids}

    def demote(self, block_id: int) -> None:
        """Make the block, which is present, the least recently used one."""
        self._order.move_to_end(block_id, last=False)

    def discard_all(self, block_ids: Sequence[int]) -> None:
        """Remove the blocks that are present."""
        pop = self._order.pop
        for block_id in block_ids:
            pop(block_id, None)

    def discard(self, block_id: int) -> None:
        """Remove the block, if it is present."""
        self._order.pop(block_id, None)

    def newest_first(self) -> Iterator[int]:
        """The blocks, most recently used first."""
        return reversed(self._order)

    def pop_oldest(self, count: int) -> list[int]:
        """Remove and return the `count` least recently used blocks, oldest first. KeyError if there are fewer."""
        pop = self._order.popitem
        return [pop(last=False)[0] for _ in range(count)]  # rule: least-recently-used-block-is-evicted-first
