"""The index of a tier alone: recency, pins and grants; the medium never holds more than max_entries."""

from __future__ import annotations

import pytest
from disk_fixtures import key, keys

from sidestream.errors import InvariantError, TierFull
from sidestream_kv.kv.pins import Pins
from sidestream_kv.offload.tiers.index import Entry, TierIndex, WriteGrant


def index_of(*numbers: int, max_entries: int = 3) -> TierIndex:
    index = TierIndex(name="disk", max_entries=max_entries, entry_bytes=10)
    for number in numbers:
        put(index, number)
    return index


def reserve(index: TierIndex, number: int) -> WriteGrant:
    grant = index.reserve(key(number))
    assert grant is not None
    return grant


def put(index: TierIndex, number: int) -> WriteGrant:
    grant = reserve(index, number)
    wrote(grant)
    index.publish(grant)
    return grant


def wrote(grant: WriteGrant) -> None:
    """What a tier's write does to its grant."""
    grant.victim = None
    grant.written = True


def test_lookup_counts_the_leading_keys_without_a_gap() -> None:
    index = index_of(1, 2, 4, max_entries=5)
    assert index.lookup(keys(1, 2, 3, 4)) == 2
    assert index.lookup(keys(3, 1)) == 0
    assert index.lookup([]) == 0
    assert index.lookup(keys(4, 2, 1)) == 3


def test_lookup_does_not_change_the_eviction_order() -> None:
    index = index_of(1, 2, 3)
    index.lookup(keys(1))
    assert victim_key(reserve(index, 4)) == key(1)


def test_a_key_is_visible_only_after_publish_H7() -> None:
    index = index_of()
    grant = reserve(index, 1)
    assert key(1) not in index
    wrote(grant)
    assert key(1) not in index
    index.publish(grant)
    assert key(1) in index


def test_publish_before_a_successful_write_raises_H7() -> None:
    index = index_of()
    grant = reserve(index, 1)
    with pytest.raises(InvariantError, match="before its write succeeded"):
        index.publish(grant)
    index.abandon(grant)


def test_a_grant_cannot_be_ended_twice() -> None:
    index = index_of()
    grant = reserve(index, 1)
    index.abandon(grant)
    with pytest.raises(InvariantError, match="ended twice"):
        index.abandon(grant)


def test_a_key_that_exists_or_is_being_written_gets_no_grant() -> None:
    index = index_of(1)
    assert index.reserve(key(1)) is None
    reserve(index, 2)
    assert index.reserve(key(2)) is None


def test_the_least_recently_used_entry_is_evicted_first() -> None:
    index = index_of(1, 2, 3)
    index.pin(keys(1)).release()
    assert [victim_key(put_and_keep_victim(index, number)) for number in (4, 5, 6)] == keys(2, 3, 1)
    assert index.stats.evictions == 3


def test_a_run_is_evicted_from_its_end() -> None:
    index = index_of(1, 2, 3)
    index.pin(keys(1, 2, 3)).release()
    assert [victim_key(put_and_keep_victim(index, number)) for number in (4, 5)] == keys(3, 2)


def test_touch_makes_a_run_recent_and_skips_absent_and_pinned_keys() -> None:
    index = index_of(1, 2, 3)
    lease = index.pin(keys(3))
    index.touch(keys(1, 9, 3))
    assert victim_key(put_and_keep_victim(index, 4)) == key(2)
    lease.release()
    index.touch(keys(1, 3, 4))
    assert [victim_key(put_and_keep_victim(index, number)) for number in (5, 6, 7)] == keys(4, 3, 1)


def test_demoted_keys_are_evicted_first_and_absent_and_pinned_ones_are_skipped() -> None:
    index = index_of(1, 2, 3)
    lease = index.pin(keys(2))
    index.demote(keys(2, 9, 3))
    assert [victim_key(put_and_keep_victim(index, number)) for number in (4, 5)] == keys(3, 1)
    lease.release()
    assert [victim_key(put_and_keep_victim(index, number)) for number in (6, 7)] == keys(4, 5)


def test_pinned_entries_are_not_evicted_until_the_last_release_H6() -> None:
    index = index_of(1, 2, max_entries=2)
    first, second = index.pin(keys(1)), index.pin(keys(1, 2))
    first.release()
    with pytest.raises(TierFull, match=r"all 2 entries .*\(20 bytes\).*raise its capacity"):
        index.reserve(key(3))
    second.release()
    assert victim_key(reserve(index, 3)) == key(2)


def test_entries_being_written_are_not_evicted() -> None:
    index = index_of(max_entries=2)
    reserve(index, 1)
    reserve(index, 2)
    with pytest.raises(TierFull):
        index.reserve(key(3))
    assert index.stats.evictions == 0


def test_a_lease_cannot_be_released_twice() -> None:
    lease = index_of(1).pin(keys(1))
    lease.release()
    with pytest.raises(InvariantError, match="released twice"):
        lease.release()


def test_pinning_keys_of_which_one_is_absent_pins_none() -> None:
    index = index_of(1, max_entries=1)
    with pytest.raises(InvariantError, match="look up first"):
        index.pin(keys(1, 2))
    assert victim_key(reserve(index, 3)) == key(1)


def test_an_abandoned_grant_leaves_no_entry_and_frees_its_capacity_H9() -> None:
    index = index_of(max_entries=1)
    index.abandon(reserve(index, 1))
    assert key(1) not in index
    assert reserve(index, 2).victim is None


def test_the_next_grant_deletes_the_victim_of_an_abandoned_grant() -> None:
    index = index_of(1, max_entries=1)
    grant = reserve(index, 2)
    victim = grant.victim
    index.abandon(grant)
    assert reserve(index, 3).victim == victim
    assert index.stats.evictions == 1


def test_the_next_grant_deletes_the_written_entry_of_an_abandoned_grant() -> None:
    index = index_of()
    grant = reserve(index, 1)
    wrote(grant)
    index.abandon(grant)
    assert reserve(index, 1).victim == grant.entry


def test_each_write_of_a_key_gets_a_new_entry() -> None:
    index = index_of(1, max_entries=1)
    evicted = reserve(index, 2)
    old = evicted.victim
    index.abandon(evicted)
    new = reserve(index, 1)
    assert new.victim == old
    assert new.entry != old


def test_forget_drops_the_entry_and_counts_it() -> None:
    index = index_of(1)
    entry = index.pin(keys(1)).entries[0]
    index.forget(entry)
    index.forget(entry)
    assert key(1) not in index
    assert index.stats.corrupt == 1


def test_a_late_forget_does_not_drop_a_newer_write_of_the_key() -> None:
    index = index_of(1)
    lease = index.pin(keys(1))
    index.forget(lease.entries[0])
    lease.release()
    put(index, 1)
    index.forget(lease.entries[0])
    assert key(1) in index


def test_a_forgotten_pinned_entry_is_deleted_after_its_release() -> None:
    index = index_of(1, max_entries=2)
    lease = index.pin(keys(1))
    index.forget(lease.entries[0])
    assert reserve(index, 2).victim is None
    with pytest.raises(TierFull):
        index.reserve(key(3))
    lease.release()
    assert reserve(index, 3).victim == lease.entries[0]


def test_clear_removes_all_keys_even_those_being_written_H8() -> None:
    index = index_of(1)
    lease, grant = index.pin(keys(1)), reserve(index, 2)
    index.clear()
    wrote(grant)
    index.publish(grant)
    lease.release()
    assert len(index) == 0
    assert set(index.take_doomed()) == {lease.entries[0], grant.entry}


def test_a_key_can_be_written_again_after_clear() -> None:
    index = index_of(1, 2, 3)
    index.clear()
    victims = {victim_key(put_and_keep_victim(index, number)) for number in (1, 2, 3)}
    assert victims == set(keys(1, 2, 3))
    assert index.stats.entries == 3
    assert index.stats.evictions == 0


def test_stats_count_published_entries() -> None:
    index = index_of(1, 2)
    reserve(index, 3)
    assert (index.stats.entries, index.stats.bytes) == (2, 20)
    assert sorted(index) == sorted(keys(1, 2))


def test_entries_of_an_earlier_run_are_evicted_oldest_first() -> None:
    index = TierIndex([Entry(key(1), 4), Entry(key(2), 9)], name="disk", max_entries=2, entry_bytes=10, next_serial=10)
    grant = reserve(index, 3)
    assert grant.victim == Entry(key(1), 4)
    assert grant.entry.serial == 10


def victim_key(grant: WriteGrant) -> bytes:
    assert grant.victim is not None
    return grant.victim.key


def put_and_keep_victim(index: TierIndex, number: int) -> WriteGrant:
    """Publish an entry; the grant still shows its victim."""
    grant = reserve(index, number)
    grant.written = True
    index.publish(grant)
    return grant


def test_entries_of_a_pinned_prefix_are_evicted_last_and_never_block_a_write() -> None:
    index, now_s = index_of(1, 2, max_entries=4), 0.0
    index.prefix_pins = pins = Pins(clock=lambda: now_s, size=lambda: 4)
    assert pins.add(key(2), keys(1, 2), ttl_s=60)
    for number in range(3, 9):
        put(index, number)
    assert index.lookup(keys(1, 2)) == 2
    with_reads = index.pin(keys(7, 8))
    put(index, 9)
    assert not pins.held and index.lookup(keys(1, 2)) < 2
    with_reads.release()


def test_a_reset_ends_the_pins_of_prefixes_and_a_pin_ends_with_its_time() -> None:
    index, now_s = index_of(1, 2, 3), [0.0]
    index.prefix_pins = pins = Pins(clock=lambda: now_s[0], size=lambda: 4)
    pins.add(key(1), keys(1), ttl_s=60)
    now_s[0] = 60.0
    assert victim_key(reserve(index, 4)) == key(1)
    pins.add(key(2), keys(2), ttl_s=60)
    index.clear()
    assert not pins.held


def test_learned_entries_are_found_and_evicted_last() -> None:
    index = index_of(1, 2, max_entries=4)
    index.touch(keys(1))
    index.learn([Entry(key(3), 70), Entry(key(4), 71)])
    assert index.lookup(keys(1, 2, 3, 4)) == 4
    assert [victim_key(put_and_keep_victim(index, number)) for number in (5, 6, 7)] == keys(2, 1, 3)


def test_learning_keeps_own_writes_and_stays_within_the_capacity() -> None:
    index = index_of(1, max_entries=3)
    own, grant = index.pin(keys(1)), reserve(index, 2)
    index.learn([Entry(key(1), 70), Entry(key(2), 71), Entry(key(3), 72), Entry(key(4), 73)])
    assert sorted(index) == sorted(keys(1, 3))
    wrote(grant)
    index.publish(grant)
    assert [entry for entry in index.entries if entry.key == key(1)] == list(own.entries)


def test_an_entry_that_vanished_before_its_publication_is_not_findable() -> None:
    """Another process has evicted it between its write and the moment when the worker takes note of the write."""
    index = index_of(max_entries=2)
    grant, other = reserve(index, 1), reserve(index, 2)
    wrote(grant)
    wrote(other)
    index.unlearn([grant.entry, other.entry._replace(serial=70)])
    index.publish(grant)
    index.publish(other)
    assert list(index) == keys(2)


def test_unlearned_entries_are_not_found_and_not_deleted_again() -> None:
    index = index_of(1, 2, max_entries=2)
    lease = index.pin(keys(2))
    index.unlearn([*index.entries, Entry(key(3), 70)])
    assert len(index) == 0
    assert reserve(index, 4).victim is None
    lease.release()
    assert index.take_doomed() == list(lease.entries)
