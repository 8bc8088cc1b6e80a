"""The block pool: fences stay with ids, no id is in two places, least recently used blocks are evicted first."""

from __future__ import annotations

import pytest
from fake_fences import FakeStream

from sidestream.errors import InvariantError
from sidestream_kv.kv.pool import FencedPool, Lease, Lru, PoolExhausted, PrefixIndex, merge_fences
from sidestream_kv.types import Key


def key(number: int) -> Key:
    return number.to_bytes(16, "little")


@pytest.fixture
def pool() -> FencedPool:
    return FencedPool("blocks", 4)


def cached(pool: FencedPool, *numbers: int) -> list[int]:
    """Leave one cached id for each key number, released as one sequence; returns the ids in its order."""
    lease = pool.take(len(numbers))
    for block_id, number in zip(lease.ids, numbers, strict=True):
        assert pool.publish(block_id, key(number))
    lease.release()
    return lease.ids


# ---------------------------------------------------------------------- the law: fences travel with ids


def test_the_next_owner_of_a_block_waits_for_its_last_use(pool: FencedPool) -> None:
    """H2, H3, H16: a release never waits, so the fence goes along."""
    fence = FakeStream("compute").record()
    pool.take(4).release(after=(fence,))
    assert pool.take(4).after == (fence,)


def test_the_next_owner_of_a_block_waits_for_its_last_use_on_each_stream(pool: FencedPool) -> None:
    compute, store = FakeStream("compute"), FakeStream("store")
    writer = pool.take(1)
    pool.publish(writer.ids[0], key(1))
    reader, worker = pool.share(writer.ids), pool.share(writer.ids)
    early, late, stored = compute.record(), compute.record(), store.record()
    reader.release(after=(late,))
    worker.release(after=(stored,))
    writer.release(after=(early,))
    pool.forget_all()
    assert set(pool.take(4).after) == {late, stored}


def test_a_release_without_a_fence_keeps_the_fence_of_the_use_before(pool: FencedPool) -> None:
    fence = FakeStream("store").record()
    pool.take(4).release(after=(fence,))
    pool.take(4).release()  # taken and given back by a request that was aborted before it was launched
    assert pool.take(4).after == (fence,)


def test_a_block_released_until_a_host_fence_stays_in_use_until_it_is_done(pool: FencedPool) -> None:
    """H2, H10: no stream can wait for it, so the id stays in use."""
    worker = FakeStream("worker")
    pool.take(3).release(until=worker.record())
    assert (pool.num_used, pool.is_settling) == (3, True)
    pool.settle()
    with pytest.raises(PoolExhausted):
        pool.take(2)
    worker.finish()
    assert pool.num_used == 3  # the ledger has not looked
    pool.settle()
    assert (pool.num_used, pool.is_settling) == (0, False)


def test_a_block_released_late_keeps_its_fences(pool: FencedPool) -> None:
    """H3: the transfer has ended, and the last step still uses the block."""
    worker, fence = FakeStream("worker"), FakeStream("compute").record()
    pool.take(4).release(after=(fence,), until=worker.record())
    worker.finish()
    pool.settle()
    assert pool.take(4).after == (fence,)


def test_a_release_until_a_finished_fence_frees_blocks_at_once(pool: FencedPool) -> None:
    worker = FakeStream("worker")
    done = worker.record()
    worker.finish()
    pool.take(4).release(until=done)
    assert (pool.num_free, pool.is_settling) == (4, False)


def test_blocks_are_freed_in_the_order_in_which_their_uses_end(pool: FencedPool) -> None:
    worker = FakeStream("worker")
    leases = [pool.take(2), pool.take(1), pool.take(1)]
    for lease in leases:
        lease.release(until=worker.record())
    for done, free in ((1, 2), (2, 3), (3, 4)):
        worker.finish(up_to=done)
        pool.settle()
        assert pool.num_free == free


def test_publishing_many_blocks_at_once_equals_publishing_each(pool: FencedPool) -> None:
    lease = pool.take(4)
    pool.publish(lease.ids[1], key(9))
    pool.publish(lease.ids[3], key(2))
    pool.publish_all(lease.ids[:3], [key(0), key(1), key(2)])  # the second has a key, and the third's key is another's
    assert [pool.get(key(number)) for number in (0, 1, 2, 9)] == [lease.ids[0], None, lease.ids[3], lease.ids[1]]
    lease.release()
    with pytest.raises(InvariantError, match="not all are in use"):
        pool.publish_all([lease.ids[2]], [key(5)])
    pool.check()


def test_the_next_owner_does_not_wait_for_a_finished_use(pool: FencedPool) -> None:
    compute, store = FakeStream("compute"), FakeStream("store")
    done, pending = compute.record(), store.record()
    pool.take(4).release(after=(done, pending))
    compute.finish()
    assert pool.take(4).after == (pending,)


def test_a_lease_has_the_fences_of_its_own_blocks_only(pool: FencedPool) -> None:
    one, two = FakeStream("compute").record(), FakeStream("store").record()
    left, right = pool.take(2), pool.take(2)
    left.release(after=(one,))
    right.release(after=(two,))
    assert pool.take(2).after == (one,)
    assert pool.take(2).after == (two,)


def test_an_evicted_block_keeps_its_fences(pool: FencedPool) -> None:
    fence = FakeStream("compute").record()
    lease = pool.take(4)
    pool.publish(lease.ids[0], key(1))
    lease.release(after=(fence,))
    pool.take(3)
    assert pool.take(1).after == (fence,)


def test_a_joined_lease_has_the_fences_of_both_leases(pool: FencedPool) -> None:
    one, two = FakeStream("compute").record(), FakeStream("store").record()
    left, right = pool.take(2), pool.take(2)
    left.release(after=(one,))
    right.release(after=(two,))
    lease, more = pool.take(2), pool.take(2)
    lease.extend(more)
    assert set(lease.after) == {one, two}
    assert (len(lease.ids), lease.open, more.open) == (4, True, False)


def test_merging_keeps_the_last_unfinished_fence_of_each_stream() -> None:
    compute, store, load = FakeStream("compute"), FakeStream("store"), FakeStream("load")
    fences = [compute.record(), compute.record(), store.record(), load.record(), load.record()]
    load.finish(up_to=1)
    compute_1, compute_2, store_1, load_1, load_2 = fences
    assert set(merge_fences([compute_2, load_2, store_1, compute_1, load_1])) == {compute_2, store_1, load_2}
    load.finish()
    assert set(merge_fences(fences)) == {compute_2, store_1}
    assert merge_fences([]) == ()


# ---------------------------------------------------------------------- leases


def test_a_second_release_is_an_error_and_changes_nothing(pool: FencedPool) -> None:
    lease = pool.take(2)
    lease.release()
    with pytest.raises(InvariantError, match=r"lease of blocks \[0, 1\] was released twice"):
        lease.release()
    assert pool.num_free == 4
    pool.check()


def end_by_release(lease: Lease, pool: FencedPool) -> None:
    lease.release()


def end_by_joining(lease: Lease, pool: FencedPool) -> None:
    pool.take(1).extend(lease)


@pytest.mark.parametrize("end", [end_by_release, end_by_joining])
def test_a_released_or_joined_lease_cannot_be_used(end: object, pool: FencedPool) -> None:
    owner = pool.take(2)
    pool.publish(owner.ids[0], key(1))
    ended = pool.share(owner.ids)
    end(ended, pool)  # type: ignore[operator]
    for misuse in (ended.release, lambda: owner.extend(ended), lambda: ended.extend(owner)):
        with pytest.raises(InvariantError):
            misuse()
    owner.release()  # the misuse took nothing from the one who still holds the ids
    pool.check()


def test_leases_of_two_pools_cannot_be_joined(pool: FencedPool) -> None:
    with pytest.raises(InvariantError, match="leases of blocks and rows cannot be joined"):
        pool.take(1).extend(FencedPool("rows", 1).take(1))


def test_taking_more_blocks_than_available_takes_none(pool: FencedPool) -> None:
    pool.take(2)
    with pytest.raises(PoolExhausted, match="blocks: 3 asked for, 2 of 4 available"):
        pool.take(3)
    assert (pool.num_free, pool.num_used) == (2, 2)


def test_a_free_block_cannot_be_shared_or_published(pool: FencedPool) -> None:
    used = pool.take(1)
    with pytest.raises(InvariantError, match="blocks 3 is free"):
        pool.share([*used.ids, 3])
    with pytest.raises(InvariantError, match="blocks 3 is not in use"):
        pool.publish(3, key(1))
    used.release()
    assert pool.num_free == 4  # the failed share left no reference behind


@pytest.mark.parametrize("asked", [("cached", "free"), ("free", "cached"), ("free",), ("cached", "cached", "free")])
def test_sharing_a_cached_block_and_a_free_one_shares_neither(asked: tuple[str, ...], pool: FencedPool) -> None:
    [block_id] = cached(pool, 1)
    ids = {"cached": block_id, "free": (block_id + 1) % pool.size}
    with pytest.raises(InvariantError, match=f"blocks {ids['free']} is free: it cannot be shared"):
        pool.share([ids[which] for which in asked])
    pool.check()
    assert pool.num_cached == 1


def test_a_shared_block_is_in_use_until_its_last_lease_is_released(pool: FencedPool) -> None:
    [block_id] = cached(pool, 1)
    one, two = pool.share([block_id]), pool.share([block_id])
    assert (pool.num_used, pool.num_cached, pool.num_available) == (1, 0, 3)
    one.release()
    assert pool.num_used == 1
    two.release()
    assert (pool.num_used, pool.num_cached, pool.num_available) == (0, 1, 4)


# ---------------------------------------------------------------------- keys


def test_a_published_block_is_found_while_in_use_and_after_release(pool: FencedPool) -> None:
    lease = pool.take(1)
    assert pool.get(key(1)) is None
    assert pool.publish(lease.ids[0], key(1))
    assert pool.get(key(1)) == lease.ids[0]
    lease.release()
    assert pool.get(key(1)) == lease.ids[0]
    assert pool.is_cached(lease.ids[0])


def test_a_key_keeps_its_first_block_and_a_block_its_first_key(pool: FencedPool) -> None:
    one, two = pool.take(1), pool.take(1)
    assert pool.publish(one.ids[0], key(1))
    assert not pool.publish(two.ids[0], key(1))
    assert not pool.publish(one.ids[0], key(2))
    assert (pool.get(key(1)), pool.get(key(2)), pool.num_keys) == (one.ids[0], None, 1)
    two.release()
    assert pool.num_cached == 0  # it holds no key, so it is free


def test_a_match_is_the_longest_run_of_leading_keys(pool: FencedPool) -> None:
    ids = cached(pool, 1, 2, 4)
    assert pool.match([key(1), key(2), key(3), key(4)]) == ids[:2]
    assert pool.match([key(3), key(1)]) == []
    assert pool.num_cached == 3  # looking takes nothing


def test_an_evicted_block_is_no_longer_found(pool: FencedPool) -> None:
    ids = cached(pool, 1, 2, 3, 4)
    taken = pool.take(1)
    assert taken.ids == [ids[3]]
    assert [pool.get(key(number)) for number in (1, 2, 3, 4)] == [*ids[:3], None]


def test_free_blocks_are_taken_before_cached_ones(pool: FencedPool) -> None:
    ids = cached(pool, 1, 2)
    assert not set(pool.take(2).ids) & set(ids)
    assert pool.num_keys == 2


def test_the_least_recently_used_sequence_is_evicted_from_its_end(pool: FencedPool) -> None:
    old, recent = cached(pool, 1, 2), cached(pool, 3, 4)
    pool.share(old).release()  # used again: now the other one is older
    assert [pool.take(1).ids[0] for _ in range(4)] == [recent[1], recent[0], old[1], old[0]]


def test_a_touched_sequence_is_evicted_last_from_its_end(pool: FencedPool) -> None:
    old, recent = cached(pool, 1, 2), cached(pool, 3, 4)
    pool.touch([key(1), key(2), key(9)])  # an absent key is skipped
    assert [pool.take(1).ids[0] for _ in range(4)] == [recent[1], recent[0], old[1], old[0]]


def test_touching_a_block_in_use_does_not_make_it_evictable(pool: FencedPool) -> None:
    [block_id] = cached(pool, 1)
    pool.share([block_id])
    pool.touch([key(1)])
    assert (pool.num_cached, pool.num_used) == (0, 1)
    pool.check()


def test_demoted_blocks_are_evicted_first(pool: FencedPool) -> None:
    old, recent = cached(pool, 1, 2), cached(pool, 3, 4)
    pool.demote([key(3), key(9)])  # an absent key is skipped
    assert [pool.take(1).ids[0] for _ in range(4)] == [recent[0], old[1], old[0], recent[1]]


def test_a_block_demoted_while_in_use_is_evicted_first_after_release(pool: FencedPool) -> None:
    cached(pool, 1, 2)
    [demoted] = cached(pool, 3)
    reader, other = pool.share([demoted]), pool.share([demoted])
    pool.demote([key(3)])
    reader.release()
    assert (pool.num_cached, pool.num_free) == (2, 1)
    other.release()
    assert demoted in pool.take(2).ids
    pool.check()


def test_a_demoted_block_that_is_shared_again_is_evicted_last(pool: FencedPool) -> None:
    first, second = cached(pool, 1, 2)
    [demoted] = cached(pool, 3)
    reader = pool.share([demoted])
    pool.demote([key(3)])
    again = pool.share([demoted])
    reader.release()
    again.release()
    pool.take(1)  # the free one
    assert [pool.take(1).ids[0] for _ in range(3)] == [second, first, demoted]


def test_forgetting_a_demoted_block_ends_its_demotion(pool: FencedPool) -> None:
    [demoted] = cached(pool, 1)
    reader = pool.share([demoted])
    pool.demote([key(1)])
    pool.forget_all()
    reader.release()
    assert pool.num_free == 4
    others = cached(pool, 2, 3, 4, 5)
    assert [pool.take(1).ids[0] for _ in range(4)] == others[::-1]


def test_a_block_in_use_is_never_evicted(pool: FencedPool) -> None:
    ids = cached(pool, 1, 2)
    reader = pool.share(ids[:1])
    assert set(pool.take(3).ids).isdisjoint(reader.ids)
    with pytest.raises(PoolExhausted):
        pool.take(1)


def test_forget_removes_only_the_keys_of_the_given_blocks(pool: FencedPool) -> None:
    idle, used, kept = cached(pool, 1, 2, 3)
    reader = pool.share([used])
    [unnamed] = pool.take(1).ids
    pool.forget([idle, used, unnamed])
    assert (pool.num_keys, pool.num_cached, pool.num_free, pool.num_used) == (1, 1, 1, 2)
    assert [pool.get(key(number)) for number in (1, 2, 3)] == [None, None, kept]
    reader.release()
    assert pool.num_free == 2
    pool.forget([idle])  # nothing to forget is no error
    pool.check()


def test_forget_all_removes_all_keys_and_keeps_blocks_in_use(pool: FencedPool) -> None:
    """H8: reset or new weights. What was in use is free afterwards, not cached, and still brings its fence."""
    fence = FakeStream("compute").record()
    _, used = cached(pool, 1, 2)
    reader = pool.share([used])
    pool.forget_all()
    assert (pool.num_keys, pool.num_cached, pool.num_free, pool.num_used) == (0, 0, 3, 1)
    assert pool.match([key(1), key(2)]) == []
    reader.release(after=(fence,))
    assert pool.num_free == 4
    assert pool.take(4).after == (fence,)


# ---------------------------------------------------------------------- the checker itself


@pytest.mark.parametrize(
    "damage", ["freed twice", "free and used", "nowhere", "free and findable", "cached and not findable"]
)
def test_check_finds_a_damaged_ledger(damage: str, pool: FencedPool) -> None:
    [block_id] = cached(pool, 1)
    pool.check()
    match damage:
        case "freed twice":
            pool._free.append(pool._free[0])
        case "free and used":
            pool._references[pool._free[0]] = 1
        case "nowhere":
            pool._free.popleft()
        case "free and findable":
            pool._cached.discard(block_id)
            pool._free.append(block_id)
        case "cached and not findable":
            pool._index.remove_all([block_id])
    with pytest.raises(InvariantError):
        pool.check()


# ---------------------------------------------------------------------- the parts of a pool


def test_lru_pops_the_least_recently_touched_first() -> None:
    lru = Lru()
    for block_id in (1, 2, 3, 1):
        lru.touch(block_id)
    lru.discard(3)
    lru.discard(9)
    assert (len(lru), 1 in lru, 3 in lru) == (2, True, False)
    assert lru.pop_oldest(2) == [2, 1]
    with pytest.raises(KeyError):
        lru.pop_oldest(1)
    lru.touch(4)
    lru.add_all([7, 5, 6])
    assert (lru.holds_all([6, 4]), lru.holds_all([6, 8]), lru.holds_all([8])) == (True, False, False)
    lru.discard_all([5, 9])
    assert lru.pop_oldest(3) == [4, 7, 6]


def test_the_index_maps_keys_and_blocks_one_to_one() -> None:
    index = PrefixIndex()
    assert index.add(key(1), 5)
    assert not index.add(key(1), 6)
    assert not index.add(key(2), 5)
    assert (len(index), index.holds_key(5), index.holds_key(6)) == (1, True, False)
    index.remove_all([5])
    assert (index.get(key(1)), index.holds_key(5)) == (None, False)
    assert index.add(key(2), 5)
    assert index.clear() == [5]
    assert (len(index), index.holds_key(5)) == (0, False)
