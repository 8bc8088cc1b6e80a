"""Several engines on one directory: each finds the blocks of the others, and no write takes a slot that is in use."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import transfer_rig
from disk_fixtures import LAYOUT, block, crash, entry_of, holds, key, keys, open_tier, records, slot_of, store

from sidestream.errors import TierCorrupt, TierFull
from sidestream_kv.offload.tiers.disk import DiskTier
from sidestream_kv.offload.tiers.index import Entry


@pytest.fixture
def pair(tmp_path: Path) -> tuple[DiskTier, DiskTier]:
    return open_tier(tmp_path, max_entries=3), open_tier(tmp_path, max_entries=3)


def read(tier: DiskTier, entry: Entry) -> bool:
    """Whether the entry is read with its own bytes."""
    out = np.zeros(LAYOUT.block_bytes, np.uint8)
    tier.read(entry, out)
    return bool((out == block(entry.key)).all())


def test_blocks_of_one_engine_are_hits_of_the_other(pair: tuple[DiskTier, DiskTier]) -> None:
    one, other = pair
    store(one, *keys(1, 2))
    assert key(1) not in other.index
    other.refresh()
    assert all(holds(other, wanted) for wanted in keys(1, 2))
    store(other, key(3))
    one.refresh()
    assert holds(one, key(3))
    assert len({entry.serial for entry in records(one)}) == 3


def test_an_engine_that_joins_takes_the_capacity_of_the_directory(tmp_path: Path) -> None:
    one = open_tier(tmp_path, max_entries=3)
    store(one, *keys(1, 2, 3))
    other = open_tier(tmp_path, max_entries=1)
    assert other.index.max_entries == 3
    assert all(holds(other, wanted) for wanted in keys(1, 2, 3))
    one.close()
    other.close()
    assert list(open_tier(tmp_path, max_entries=1).index) == [key(3)]


def test_an_entry_that_another_engine_has_evicted_is_not_found_any_more(pair: tuple[DiskTier, DiskTier]) -> None:
    one, other = pair
    store(one, *keys(1, 2, 3))
    other.refresh()
    old = entry_of(one, key(1))
    store(other, key(4))
    with pytest.raises(TierCorrupt, match="is gone"):
        read(one, old)
    one.refresh()
    assert sorted(one.index) == sorted(keys(2, 3, 4))
    store(one, *keys(5, 6, 7))  # the places of forgotten entries are not counted twice
    assert sorted(one.index) == sorted(keys(5, 6, 7)) == sorted(entry.key for entry in records(one))


def test_an_own_entry_that_gave_way_to_a_write_is_not_found_any_more(pair: tuple[DiskTier, DiskTier]) -> None:
    """The directory is full of blocks that the engine does not know, so its write takes the place of its own block."""
    one, other = pair
    store(one, key(1))
    store(other, *keys(2, 3))
    store(one, key(4))
    one.refresh()
    assert sorted(one.index) == sorted(keys(2, 3, 4)) == sorted(entry.key for entry in records(one))


def test_a_block_that_another_engine_reads_is_evicted_later(pair: tuple[DiskTier, DiskTier]) -> None:
    one, other = pair
    store(one, *keys(1, 2, 3))
    other.refresh()
    assert holds(other, key(1))
    one.refresh()
    store(one, key(4))
    assert sorted(one.index) == sorted(keys(1, 3, 4))


def test_a_slot_is_not_written_while_another_engine_leases_it(pair: tuple[DiskTier, DiskTier]) -> None:
    one, other = pair
    store(one, *keys(1, 2, 3))
    other.refresh()
    lease = other.index.pin(keys(1))
    one.index.drop(keys(1))  # its entry is the victim of the next write
    store(one, key(4))
    assert read(other, lease.entries[0])
    assert sorted(entry.key for entry in records(one)) == sorted(keys(1, 3, 4))
    lease.release()
    store(one, *keys(6, 7, 8))
    assert sorted(entry.key for entry in records(one)) == sorted(keys(6, 7, 8))


def test_a_slot_is_not_written_while_another_engine_reads_it(
    pair: tuple[DiskTier, DiskTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank reads entries that its own index has not pinned."""
    one, other = pair
    store(one, *keys(1, 2, 3))
    preadv = os.preadv

    def write_meanwhile(fd: int, buffers: list[memoryview], offset: int) -> int:
        if len(buffers) == 2:  # a header and a block, not a table
            monkeypatch.setattr(os, "preadv", preadv)
            store(one, key(4))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", write_meanwhile)
    assert read(other, entry_of(one, key(1)))
    assert sorted(entry.key for entry in records(one)) == sorted(keys(1, 3, 4))


def test_a_slot_that_another_engine_has_written_meanwhile_is_not_taken(pair: tuple[DiskTier, DiskTier]) -> None:
    one, other = pair
    store(one, key(1))  # and knows two void slots
    store(other, *keys(2, 3))
    store(one, key(4))
    assert sorted(entry.key for entry in records(one)) == sorted(keys(2, 3, 4))


def test_the_worker_looks_for_blocks_of_other_engines(disk_rig: transfer_rig.Rig, tmp_path: Path) -> None:
    rig, wanted = disk_rig, transfer_rig.keys("a", "b")
    other = DiskTier.open(tmp_path, layout=transfer_rig.LAYOUT, fingerprint="rig", capacity_bytes=1 << 20)
    for one in wanted:
        grant = other.index.reserve(one)
        assert grant is not None
        other.write(grant, transfer_rig.content(one))
        other.index.publish(grant)
    rig.clock.now_s += 1
    rig.settle()
    assert rig.transfers.locate(wanted) == ["disk"] * 2
    rig.promote(wanted)
    rig.finish("disk-read-0", "disk-read-1")
    assert all(rig.host_holds(one) for one in wanted)


def test_a_write_is_refused_if_others_lease_every_slot(pair: tuple[DiskTier, DiskTier]) -> None:
    one, other = pair
    store(one, *keys(1, 2, 3))
    other.refresh()
    lease = other.index.pin(keys(1, 2, 3))
    grant = one.index.reserve(key(4))
    assert grant is not None
    with pytest.raises(TierFull, match="all 3 blocks are being read or written"):
        one.write(grant, block(key(4)))
    one.index.abandon(grant)
    lease.release()
    store(one, key(4))
    assert holds(one, key(4))


def test_the_lease_of_a_crashed_engine_ends_with_it(pair: tuple[DiskTier, DiskTier]) -> None:
    one, other = pair
    store(one, *keys(1, 2, 3))
    other.refresh()
    other.index.pin(keys(1, 2, 3))
    crash(other)
    store(one, *keys(4, 5, 6))
    assert sorted(entry.key for entry in records(one)) == sorted(keys(4, 5, 6))


def test_a_slot_has_one_writer(pair: tuple[DiskTier, DiskTier], monkeypatch: pytest.MonkeyPatch) -> None:
    """The other engine begins a write while the first one is in the middle of its own."""
    one, other = pair
    pwritev, begun, proceed = os.pwritev, Event(), Event()

    def slow(fd: int, buffers: list[memoryview], offset: int) -> int:
        if not begun.is_set():
            begun.set()
            assert proceed.wait(10)
        return pwritev(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", slow)
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(store, one, key(1))
        assert begun.wait(10)
        store(other, *keys(2, 3))
        proceed.set()
        first.result()
    assert all(holds(tier, wanted) for tier, wanted in ((one, key(1)), (other, key(2)), (other, key(3))))
    assert len({slot_of(other, entry) for entry in records(other)}) == 3


def test_a_block_that_both_engines_write_is_found_by_both(pair: tuple[DiskTier, DiskTier]) -> None:
    one, other = pair
    store(one, key(1))
    store(other, key(1))
    for tier in pair:
        tier.refresh()
        assert holds(tier, key(1))
        tier.close()
    again = open_tier(one.directory, max_entries=3)
    assert len(records(again)) == 1
    assert holds(again, key(1))


def test_the_record_of_another_engine_is_found_by_a_read_before_the_next_refresh(
    pair: tuple[DiskTier, DiskTier],
) -> None:
    """Of several ranks, only rank 0 looks for entries of other engines."""
    one, other = pair
    store(one, key(1))
    assert read(other, entry_of(one, key(1)))
    other.refresh()
    assert key(1) in other.index


def test_a_reset_of_one_engine_deletes_no_block_that_another_one_reads(pair: tuple[DiskTier, DiskTier]) -> None:
    one, other = pair
    store(one, *keys(1, 2))
    other.refresh()
    lease = other.index.pin(keys(1))
    one.index.clear()
    one.close()
    assert read(other, lease.entries[0])
    lease.release()
    other.refresh()
    assert list(other.index) == [key(1)]
