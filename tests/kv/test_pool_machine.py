"""Any order of takes, shares, releases, keys and completions, against a model that is a few plain lists."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from fake_fences import FakeFence, FakeStream
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sidestream.errors import InvariantError
from sidestream_kv.kv.pool import FencedPool, Lease, PoolExhausted
from sidestream_kv.types import Key

STREAMS = ("compute", "store", "load")
KEYS = [bytes([number]) * 16 for number in range(5)]
PICK = st.integers(0, 1 << 16)


@dataclass
class Held:
    """An open lease, and the ids that it must hold."""

    lease: Lease
    ids: list[int]


class PoolMachine(RuleBasedStateMachine):
    """The model: free and cached ids in order, the ids of each lease, and the fences of all releases of each id."""

    @initialize(size=st.integers(1, 6))
    def create(self, size: int) -> None:
        self.pool = FencedPool("blocks", size)
        self.streams = {name: FakeStream(name) for name in STREAMS}
        self.free = list(range(size))
        self.cached: list[int] = []
        self.demoted: set[int] = set()
        self.key_of: dict[int, Key] = {}
        self.partial: set[int] = set()
        self.history: dict[int, list[FakeFence]] = {block_id: [] for block_id in range(size)}
        self.held: list[Held] = []
        self.offload = FakeStream("offload")  # only the host sees its fences
        self.postponed: list[tuple[FakeFence, list[int], list[FakeFence]]] = []

    def users(self) -> Counter[int]:
        return Counter(
            block_id
            for ids in (*(held.ids for held in self.held), *(ids for _, ids, _ in self.postponed))
            for block_id in ids
        )

    def pending(self, ids: list[int]) -> set[FakeFence]:
        """The last unfinished fence on each stream, of all uses that these ids ever had."""
        unfinished = [fence for block_id in ids for fence in self.history[block_id] if not fence.poll()]
        return {
            max((f for f in unfinished if f.stream == name), key=lambda f: f.tick)
            for name in {f.stream for f in unfinished}
        }

    def give_back(self, ids: list[int], after: list[FakeFence]) -> None:
        """Release these ids in the model, once they are out of `held`."""
        left = self.users() + Counter(ids)  # a lease that was joined to another may hold an id twice
        idle: list[int] = []
        for block_id in reversed(ids):
            self.history[block_id].extend(after)
            left[block_id] -= 1
            if left[block_id] == 0:
                (self.cached if block_id in self.key_of else self.free).append(block_id)
                idle.append(block_id)
        for block_id in idle:
            if block_id in self.demoted:
                self.cached.remove(block_id)
                self.cached.insert(0, block_id)
        self.demoted.difference_update(idle)

    # ------------------------------------------------------------------ rules

    @rule(count=st.integers(0, 7))
    def take(self, count: int) -> None:
        expected = (self.free + self.cached)[:count]
        if count > len(self.free) + len(self.cached):
            with pytest.raises(PoolExhausted):
                self.pool.take(count)
            return
        lease = self.pool.take(count)
        assert lease.ids == expected
        assert set(lease.after) == self.pending(expected)
        assert len(lease.after) == len({fence.stream for fence in lease.after})
        for block_id in expected:
            self.key_of.pop(block_id, None)
            self.partial.discard(block_id)
        self.free = [block_id for block_id in self.free if block_id not in expected]
        self.cached = [block_id for block_id in self.cached if block_id not in expected]
        self.held.append(Held(lease, list(expected)))

    @rule(block_ids=st.lists(st.integers(0, 5), max_size=4))
    def share(self, block_ids: list[int]) -> None:
        block_ids = [block_id for block_id in block_ids if block_id < self.pool.size]
        if any(block_id in self.free for block_id in block_ids):
            with pytest.raises(InvariantError):
                self.pool.share(block_ids)
            return
        lease = self.pool.share(block_ids)
        self.cached = [block_id for block_id in self.cached if block_id not in block_ids]
        self.demoted.difference_update(block_ids)
        self.held.append(Held(lease, block_ids))

    @precondition(lambda self: self.held)
    @rule(pick=PICK, streams=st.sets(st.sampled_from(STREAMS)))
    def release(self, pick: int, streams: set[str]) -> None:
        held = self.held.pop(pick % len(self.held))
        after = [self.streams[name].record() for name in sorted(streams)]
        held.lease.release(after=after)
        self.give_back(held.ids, after)
        with pytest.raises(InvariantError):
            held.lease.release()

    @precondition(lambda self: self.held)
    @rule(pick=PICK, streams=st.sets(st.sampled_from(STREAMS)))
    def release_until(self, pick: int, streams: set[str]) -> None:
        held = self.held.pop(pick % len(self.held))
        after, until = [self.streams[name].record() for name in sorted(streams)], self.offload.record()
        held.lease.release(after=after, until=until)
        self.postponed.append((until, held.ids, after))
        assert not held.lease.open

    @rule(count=st.integers(0, 3))
    def settle(self, count: int) -> None:
        self.offload.finish(up_to=min(self.offload.tick, self.offload.done_tick + count))
        self.pool.settle()
        while self.postponed and self.postponed[0][0].poll():
            _, ids, after = self.postponed.pop(0)
            self.give_back(ids, after)
        assert self.pool.is_settling == bool(self.postponed)

    @precondition(lambda self: len(self.held) > 1)
    @rule(pick=PICK)
    def extend(self, pick: int) -> None:
        other = self.held.pop(pick % len(self.held))
        held = self.held[pick % len(self.held)]
        held.lease.extend(other.lease)
        held.ids = held.ids + other.ids
        assert not other.lease.open

    @rule(block_id=st.integers(0, 5), key=st.sampled_from(KEYS), partial=st.booleans())
    def publish(self, block_id: int, key: Key, partial: bool) -> None:
        if block_id >= self.pool.size:
            return
        if self.users()[block_id] == 0:
            with pytest.raises(InvariantError):
                self.pool.publish(block_id, key, partial=partial)
            return
        assert self.pool.publish(block_id, key, partial=partial) == self.give_key(block_id, key, partial=partial)

    def give_key(self, block_id: int, key: Key, *, partial: bool) -> bool:
        """Publish in the model of the pool."""
        known = next((block for block, other in self.key_of.items() if other == key), None)
        if block_id in self.key_of or (known is not None and (partial or known not in self.partial)):
            return False
        if known is not None:
            self.forgotten([known])
        self.key_of[block_id] = key
        if partial:
            self.partial.add(block_id)
        return True

    @rule(
        block_ids=st.lists(st.integers(0, 5), max_size=4, unique=True),
        keys=st.permutations(KEYS),
        partial=st.booleans(),
    )
    def publish_all(self, block_ids: list[int], keys: list[Key], partial: bool) -> None:
        block_ids = [block_id for block_id in block_ids if block_id < self.pool.size]
        keys = keys[: len(block_ids)]
        users = self.users()
        if any(users[block_id] == 0 for block_id in block_ids):
            with pytest.raises(InvariantError):
                self.pool.publish_all(block_ids, keys, partial=partial)
            return
        self.pool.publish_all(block_ids, keys, partial=partial)
        for block_id, key in zip(block_ids, keys, strict=True):
            self.give_key(block_id, key, partial=partial)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=3))
    def touch(self, keys: list[Key]) -> None:
        self.pool.touch(keys)
        item_of = {key: block_id for block_id, key in self.key_of.items()}
        for block_id in (item_of.get(key) for key in reversed(keys)):
            if block_id in self.cached:
                self.cached.remove(block_id)
                self.cached.append(block_id)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=3))
    def demote(self, keys: list[Key]) -> None:
        self.pool.demote(keys)
        item_of = {key: block_id for block_id, key in self.key_of.items()}
        for block_id in (item_of[key] for key in keys if key in item_of):
            if block_id in self.cached:
                self.cached.remove(block_id)
                self.cached.insert(0, block_id)
            else:
                self.demoted.add(block_id)

    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        self.forgotten(list(self.key_of))

    def forgotten(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self.key_of.pop(block_id, None)
            self.partial.discard(block_id)
            self.demoted.discard(block_id)
            if block_id in self.cached:
                self.cached.remove(block_id)
                self.free.append(block_id)

    @rule(name=st.sampled_from(STREAMS), count=st.integers(1, 3))
    def complete(self, name: str, count: int) -> None:
        stream = self.streams[name]
        stream.finish(up_to=min(stream.tick, stream.done_tick + count))

    # ------------------------------------------------------------------ what must always hold

    @invariant()
    def every_id_is_where_the_model_says(self) -> None:
        users = self.users()
        self.pool.check()
        assert sorted([*self.free, *self.cached, *users]) == list(range(self.pool.size))
        assert (self.pool.num_free, self.pool.num_cached, self.pool.num_used) == (
            len(self.free),
            len(self.cached),
            len(users),
        )
        assert [self.pool.is_cached(block_id) for block_id in range(self.pool.size)] == [
            block_id in self.cached for block_id in range(self.pool.size)
        ]

    @invariant()
    def every_open_lease_holds_what_it_was_given(self) -> None:
        for held in self.held:
            assert held.lease.open
            assert held.lease.ids == held.ids

    @invariant()
    def keys_and_ids_are_one_to_one(self) -> None:
        found = {block_id: key for key in KEYS if (block_id := self.pool.get(key)) is not None}
        assert found == self.key_of
        assert self.pool.num_keys == len(found)
        assert {block_id for block_id in range(self.pool.size) if self.pool.is_partial(block_id)} == self.partial

    def teardown(self) -> None:
        """Nothing leaked: once everybody gave back, everything can be taken, behind every fence that is still open."""
        while self.held:
            held = self.held.pop()
            held.lease.release()
            self.give_back(held.ids, [])
        self.settle(self.offload.tick)
        everything = self.pool.take(self.pool.size)
        assert sorted(everything.ids) == list(range(self.pool.size))
        assert set(everything.after) == self.pending(everything.ids)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=250, stateful_step_count=30, deadline=None, derandomize=True)
