"""The ledger of reusable things: device blocks, host slots, rows. Knows ids, references, fences and keys; never a
tensor.

The law lives here: nothing is reused before the fence of its last use. A release is immediate and never waits; the id
keeps the fences of its last uses, and whoever takes it next makes its own stream wait for them. Called from the engine
thread only.

    free      no reference, no key: holds nothing
    cached    no reference, but findable under its key until evicted (least recently used first)
    used      one reference or more; several requests may share a block that is only read
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from sidestream.errors import InvariantError, SidestreamError
from sidestream.kv.eviction import Lru
from sidestream.kv.prefix import PrefixIndex
from sidestream.types import Fence, Key, Tracer


class PoolExhausted(SidestreamError):
    """Fewer ids are free or cached than were asked for; nothing was taken."""


class Lease:
    """The right to use some ids of a pool, until `release`. Grows by `extend`; owned by one request or ticket.

    after   unfinished fences of the ids' last uses at the time they were taken: the next writer's stream waits for them
    """

    __slots__ = ("_open", "after", "ids", "pool")

    def __init__(self, pool: FencedPool, ids: list[int], after: tuple[Fence, ...]) -> None:
        self.pool = pool
        self.ids = ids
        self.after = after
        self._open = True

    @property
    def open(self) -> bool:
        """Whether the ids are still held."""
        return self._open

    def extend(self, other: Lease) -> None:
        """Take over what `other` holds; `other` ends without a release."""
        if other.pool is not self.pool or not other._open or not self._open:
            raise InvariantError(f"leases of {self.pool.name} and {other.pool.name} cannot be joined, or one has ended")
        other._open = False
        self.ids.extend(other.ids)
        if other.after:
            self.after = merge_fences((*self.after, *other.after))

    def truncate(self, count: int, *, after: Iterable[Fence] = ()) -> None:
        """Release all but the first `count` ids. The lease must still be open."""
        if not self._open:
            raise InvariantError(f"lease of {self.pool.name} {self.ids} was released before: it cannot be cut")
        dropped = self.ids[count:]
        del self.ids[count:]
        self.pool._release(dropped, tuple(after))

    def release(self, *, after: Iterable[Fence] = (), until: Fence | None = None) -> None:
        """Give the ids back at once; they may be reused behind the fences `after`. A second release is an error.

        until   a use that no stream can wait for, because only the host will see its end: the ids stay in use until
                `FencedPool.settle` finds it done
        """
        if not self._open:
            raise InvariantError(f"lease of {self.pool.name} {self.ids} was released twice")
        self._open = False
        if until is None or until.poll():
            self.pool._release(self.ids, tuple(after))
        else:
            self.pool._postpone(until, self.ids, tuple(after))


class FencedPool:
    """`size` ids with references, fences and keys. `tracer`: told of every lease and every key."""

    def __init__(self, name: str, size: int, *, tracer: Tracer | None = None) -> None:
        self.name = name
        self.size = size
        self._tracer = tracer
        self._references = [0] * size
        self._fences: list[tuple[Fence, ...]] = [()] * size
        self._free: deque[int] = deque(range(size))
        self._postponed: deque[tuple[Fence, list[int], tuple[Fence, ...]]] = (
            deque()
        )  # in the order of the fences' ticks
        self._cached = Lru()
        self._index = PrefixIndex()

    def grow(self, size: int) -> None:
        """Add free ids up to `size`; never fewer than before."""
        self._references.extend(0 for _ in range(self.size, size))
        self._fences.extend(() for _ in range(self.size, size))
        self._free.extend(range(self.size, size))
        self.size = max(self.size, size)

    @property
    def num_free(self) -> int:
        """Ids that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Ids that are findable and unused."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Ids that `take` can give out: free or cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Ids with a reference."""
        return self.size - self.num_available

    @property
    def num_keys(self) -> int:
        """Keys that are findable."""
        return len(self._index)

    @property
    def is_settling(self) -> bool:
        """Whether leases have ended whose ids come back as soon as a transfer ends."""
        return bool(self._postponed)

    def settle(self) -> None:
        """Carry out the releases whose last uses are done by now."""
        while self._postponed and self._postponed[0][0].poll():
            _, ids, after = self._postponed.popleft()
            self._release(ids, after)

    def take(self, count: int) -> Lease:
        """Lease `count` ids for writing, evicting the least recently used cached ones. All or nothing: raises
        PoolExhausted.
        """
        free, fences = self._free, self._fences
        evicted = max(0, count - len(free))
        if evicted > len(self._cached):
            raise PoolExhausted(f"{self.name}: {count} asked for, {self.num_available} of {self.size} available")
        ids = [free.popleft() for _ in range(count - evicted)]
        if evicted:
            ids.extend(self._evict(evicted))
        pending: tuple[Fence, ...] = ()
        if any(map(fences.__getitem__, ids)):
            pending = merge_fences(fence for item in ids for fence in fences[item])
            for item in ids:
                fences[item] = tuple(fence for fence in fences[item] if not fence.poll())
        for item in ids:
            self._references[item] = 1
        if self._tracer is not None:
            self._tracer.took(self.name, ids, pending)
        return Lease(self, ids, pending)

    def share(self, ids: Sequence[int]) -> Lease:
        """Lease ids for reading that are used or cached already. An id that holds nothing raises InvariantError."""
        references = self._references
        if idle := [item for item in ids if not references[item]]:
            if not self._cached.holds_all(idle):
                nothing = next(item for item in idle if item not in self._cached)
                raise InvariantError(f"{self.name} {nothing} holds nothing: it cannot be shared")
            self._cached.discard_all(idle)
        for item in ids:
            references[item] += 1
        if self._tracer is not None:
            self._tracer.shared(self.name, ids)
        return Lease(self, list(ids), ())

    def publish(self, item: int, key: Key) -> bool:
        """Make a used id findable under `key`, once its bytes are complete (H7); False when either is taken by another
        already.
        """
        if self._references[item] == 0:
            raise InvariantError(f"{self.name} {item} is not in use: it cannot be published")
        added = self._index.add(key, item)
        if added and self._tracer is not None:
            self._tracer.published(self.name, item, key)
        return added

    def publish_all(self, ids: Sequence[int], keys: Sequence[Key]) -> None:
        """`publish` each id under its key, at a cost that hardly grows with their number."""
        if 0 in map(self._references.__getitem__, ids):
            raise InvariantError(f"of {self.name} {list(ids)}, not all are in use: they cannot be published")
        if self._tracer is not None or not self._index.add_all(keys, ids):
            for item, key in zip(ids, keys, strict=True):
                self.publish(item, key)

    def match(self, keys: Sequence[Key]) -> list[int]:
        """Ids of the longest run of leading `keys` that are findable. Read-only."""
        return self._index.match(keys)

    def get(self, key: Key) -> int | None:
        """The id findable under `key`. Read-only."""
        return self._index.get(key)

    def is_cached(self, item: int) -> bool:
        """Whether the id is findable and unused, so that `take` might evict it."""
        return item in self._cached

    def touch(self, keys: Sequence[Key]) -> None:
        """Count `keys`, a run from the start of a sequence, as just used: the first one is evicted last. Absent and
        used ones are skipped.
        """
        for key in reversed(keys):
            item = self._index.get(key)
            if item is not None and item in self._cached:
                self._cached.touch(item)

    def forget_all(self) -> None:
        """Make every id unfindable at once (H8: reset, new weights). Uses go on."""
        self._not_findable(self._index.clear())

    def forget(self, ids: Sequence[int]) -> None:
        """Make these unfindable, those of them that are findable. Uses go on."""
        findable = [item for item in ids if self._index.holds_key(item)]
        self._index.remove_all(findable)
        self._not_findable(findable)

    def _not_findable(self, ids: Sequence[int]) -> None:
        if self._tracer is not None:
            self._tracer.forgot(self.name, ids)
        for item in ids:
            if item in self._cached:
                self._cached.discard(item)
                self._free.append(item)

    def check(self) -> None:
        """Raise InvariantError unless every id is in exactly one place, as this module's table says. For tests and the
        checker.
        """
        free = set(self._free)
        if len(free) != len(self._free):
            raise InvariantError(f"{self.name}: an id is free twice")
        for item in range(self.size):
            places = (item in free) + (item in self._cached) + (self._references[item] > 0)
            if places != 1 or self._references[item] < 0:
                raise InvariantError(
                    f"{self.name} {item} is in {places} places with {self._references[item]} references"
                )
            findable = self._index.holds_key(item)
            if (findable and item in free) or (not findable and item in self._cached):
                raise InvariantError(
                    f"{self.name} {item} is {'free' if findable else 'cached'}, and findable: {findable}"
                )

    def _postpone(self, until: Fence, ids: list[int], after: tuple[Fence, ...]) -> None:
        self._postponed.append((until, ids, after))

    def _evict(self, count: int) -> list[int]:
        items = self._cached.pop_oldest(count)
        self._index.remove_all(items)
        return items

    def _release(self, ids: Sequence[int], after: tuple[Fence, ...]) -> None:
        references, fences = self._references, self._fences
        if ids and min(map(references.__getitem__, ids)) <= 0:
            raise InvariantError(f"{self.name} {ids} were released more often than taken")
        if self._tracer is not None:
            self._tracer.released(self.name, ids, after)
        after, merged = (
            merge_fences(after),
            dict[tuple[Fence, ...], tuple[Fence, ...]](),
        )  # most ids of a lease have the same fences
        idle: list[int] = []
        for item in reversed(ids):  # the end of a sequence is evicted before its start, which more sequences share
            references[item] -= 1
            if after or fences[item]:
                before = fences[item]
                if before not in merged:
                    merged[before] = merge_fences((*before, *after))
                fences[item] = merged[before]
            if not references[item]:
                idle.append(item)
        findable, others = self._index.split(idle)
        self._cached.add_all(findable)
        self._free.extend(others)


def merge_fences(fences: Iterable[Fence]) -> tuple[Fence, ...]:
    """The unfinished ones among `fences`, the last of each stream."""
    last: dict[str, Fence] = {}
    for fence in fences:
        if not fence.poll() and (fence.stream not in last or last[fence.stream].tick < fence.tick):
            last[fence.stream] = fence
    return tuple(last.values())
