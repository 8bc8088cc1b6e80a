"""The disk tier on a real file system: stored entries, restarts, eviction and concurrent operations."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from disk_fixtures import (
    ENTRY_BYTES,
    LAYOUT,
    block,
    crash,
    entry_of,
    failing_with,
    holds,
    key,
    keys,
    load,
    open_tier,
    records,
    slot_of,
    store,
)

from sidestream.errors import InvariantError
from sidestream_kv.offload.tiers import disk
from sidestream_kv.offload.tiers.base import PersistentTier
from sidestream_kv.offload.tiers.disk import HEADER_BYTES, entry_bytes
from sidestream_kv.offload.tiers.slots import write_at


def test_a_stored_block_is_read_back(tmp_path: Path) -> None:
    tier: PersistentTier = open_tier(tmp_path / "new" / "tier")
    grant = tier.index.reserve(key(1))
    assert grant is not None
    tier.write(grant, block(key(1)).data)
    tier.index.publish(grant)
    out = bytearray(LAYOUT.block_bytes)
    tier.read(tier.index.pin([key(1)]).entries[0], memoryview(out))
    assert out == block(key(1)).tobytes()


def test_an_entry_on_disk_has_a_whole_number_of_pages() -> None:
    assert ENTRY_BYTES == HEADER_BYTES + LAYOUT.block_bytes == 8192
    assert entry_bytes(replace(LAYOUT, block_tokens=2)) == 8192
    assert entry_bytes(replace(LAYOUT, block_tokens=17)) == 12288


def test_files_of_the_tier_are_not_readable_by_other_users(tmp_path: Path) -> None:
    store(open_tier(tmp_path / "tier"), key(1))
    assert (tmp_path / "tier").stat().st_mode & 0o077 == 0
    files = list((tmp_path / "tier").iterdir())
    assert len(files) == 3
    assert all(file.stat().st_mode & 0o077 == 0 for file in files)


def test_writing_a_block_or_key_of_the_wrong_length_raises(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    grant = tier.index.reserve(key(1))
    assert grant is not None
    with pytest.raises(InvariantError, match="4096 bytes, not 4095"):
        tier.write(grant, block(key(1))[:-1])
    short_key = tier.index.reserve(b"short")
    assert short_key is not None
    with pytest.raises(InvariantError, match="16 bytes, not 5"):
        tier.write(short_key, block(key(1)))
    assert records(tier) == []


def test_a_restart_serves_every_block(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store(tier, *keys(1, 2, 3))
    tier.close()
    again = open_tier(tmp_path)
    assert again.index.lookup(keys(1, 2, 3)) == 3
    assert all(holds(again, one) for one in keys(1, 2, 3))
    assert again.index.stats.corrupt == 0


def test_a_block_written_but_not_published_before_a_crash_is_served(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    grant = tier.index.reserve(key(1))
    assert grant is not None
    tier.write(grant, block(key(1)))
    crash(tier)
    assert holds(open_tier(tmp_path), key(1))


def test_a_record_that_was_half_written_when_the_process_was_killed_is_removed(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store(tier, *keys(1, 2))
    table, slot = tier._medium._table, slot_of(tier, entry_of(tier, key(1)))
    write_at(table.fd, b"half of a", table._bodies_at + 24 * slot)
    crash(tier)
    again = open_tier(tmp_path)
    assert list(again.index) == [key(2)]
    assert again.index.stats.corrupt == 1
    store(again, key(1))
    assert holds(again, key(1))


def test_the_eviction_order_survives_a_restart(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store(tier, *keys(1, 2, 3))
    load(tier, key(1))
    crash(tier)
    again = open_tier(tmp_path, max_entries=3)
    store(again, *keys(4, 5))
    assert [one in again.index for one in keys(1, 2, 3, 4, 5)] == [True, False, False, True, True]


def test_a_lowered_capacity_evicts_the_oldest_at_open(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store(tier, *keys(1, 2, 3, 4))
    tier.close()
    again = open_tier(tmp_path, capacity_bytes=3 * ENTRY_BYTES - 1)
    assert sorted(again.index) == sorted(keys(3, 4))
    assert all(holds(again, one) for one in keys(3, 4))  # they were moved to other slots
    assert (tmp_path / "segment-000000").stat().st_size <= 3 * ENTRY_BYTES
    assert again.index.stats.evictions == 2


def test_a_raised_capacity_keeps_all_blocks(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, max_entries=2)
    store(tier, *keys(1, 2))
    tier.close()
    again = open_tier(tmp_path, max_entries=4)
    store(again, *keys(3, 4))
    assert all(holds(again, one) for one in keys(1, 2, 3, 4))


def test_the_later_of_two_entries_with_one_key_is_served(tmp_path: Path) -> None:
    tier, wanted = open_tier(tmp_path), keys(*range(12))
    store(tier, *wanted)
    tier.index.unlearn(list(tier.index.entries))
    store(tier, *wanted)
    later = [entry_of(tier, one) for one in wanted]
    assert len(records(tier)) == 24  # as if a process was killed before it deleted the old ones
    crash(tier)
    again = open_tier(tmp_path)
    assert sorted(again.index.entries) == sorted(records(again)) == sorted(later)
    assert all(holds(again, one) for one in wanted)


def test_serial_numbers_continue_after_a_restart(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store(tier, *keys(1, 2))
    before = entry_of(tier, key(2)).serial
    crash(tier)
    again = open_tier(tmp_path)
    store(again, key(3))
    assert entry_of(again, key(3)).serial > before


def test_files_with_other_names_are_left_alone(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store(tier, key(1))
    (tmp_path / "README").write_text("mine")
    tier.close()
    again = open_tier(tmp_path)
    assert (tmp_path / "README").read_text() == "mine"
    assert again.index.stats.corrupt == 0


def test_a_directory_has_few_files_of_the_size_of_its_capacity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "SEGMENT_BYTES", 4 * ENTRY_BYTES)
    tier = open_tier(tmp_path, max_entries=10)
    store(tier, *keys(*range(5)))
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("segment-*")}
    assert sizes == {"segment-000000": 4 * ENTRY_BYTES, "segment-000001": 4 * ENTRY_BYTES}
    store(tier, *keys(*range(5, 20)))
    assert (tmp_path / "segment-000002").stat().st_size == 2 * ENTRY_BYTES
    tier.close()
    open_tier(tmp_path, max_entries=3)
    assert [path.name for path in tmp_path.glob("segment-*")] == ["segment-000000"]


def test_a_tier_killed_during_its_creation_is_created_again(tmp_path: Path) -> None:
    (tmp_path / "sidestream-tier.json.tmp").write_text('{"form')
    tier = open_tier(tmp_path)
    store(tier, key(1))
    assert holds(tier, key(1))
    assert not (tmp_path / "sidestream-tier.json.tmp").exists()


def test_an_evicted_entry_is_replaced_by_the_write_that_takes_its_place(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, max_entries=2)
    store(tier, *keys(1, 2))
    slot = slot_of(tier, entry_of(tier, key(1)))
    grant = tier.index.reserve(key(3))
    assert grant is not None
    assert key(1) not in tier.index
    assert {entry.key for entry in records(tier)} == set(keys(1, 2))
    tier.write(grant, block(key(3)))
    assert {entry.key for entry in records(tier)} == set(keys(2, 3))
    assert slot_of(tier, grant.entry) == slot


def test_a_late_deletion_does_not_remove_a_newer_write_of_the_same_key(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, max_entries=2)
    store(tier, *keys(1, 2))
    evicting_1 = tier.index.reserve(key(3))
    assert evicting_1 is not None
    assert evicting_1.victim is not None
    assert evicting_1.victim.key == key(1)
    store(tier, key(1))  # a new write of key 1 overtakes the deletion of the old one
    tier.write(evicting_1, block(key(3)))
    tier.index.publish(evicting_1)
    assert holds(tier, key(1))
    assert holds(tier, key(3))
    assert len(records(tier)) == 2


def test_a_pinned_entry_can_be_read_despite_evictions_and_a_rewrite(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, max_entries=2)
    store(tier, key(1))
    lease = tier.index.pin([key(1)])
    tier.index.clear()
    store(tier, key(1))
    store(tier, *keys(2, 3, 4))
    out = np.zeros(LAYOUT.block_bytes, np.uint8)
    tier.read(lease.entries[0], out)
    assert (out == block(key(1))).all()
    lease.release()
    store(tier, *keys(5, 6))
    assert sorted(entry.key for entry in records(tier)) == sorted(keys(5, 6))


def test_close_deletes_forgotten_entries(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store(tier, *keys(1, 2))
    tier.index.clear()
    tier.close()
    assert records(open_tier(tmp_path)) == []


def test_concurrent_reads_and_writes_keep_every_block_complete(tmp_path: Path) -> None:
    """The engine thread reserves, pins and publishes while four threads do the I/O, on few keys and less room."""
    tier = open_tier(tmp_path, max_entries=8)
    rng = np.random.default_rng(7)
    reads = 0
    with ThreadPoolExecutor(4) as streams:
        for _ in range(60):
            grants = [grant for number in rng.integers(0, 12, 4) if (grant := tier.index.reserve(key(int(number))))]
            wanted = [one for number in rng.integers(0, 12, 4) if (one := key(int(number))) in tier.index]
            lease = tier.index.pin(wanted)
            outs = [np.zeros(LAYOUT.block_bytes, np.uint8) for _ in wanted]
            writing = [streams.submit(tier.write, grant, block(grant.entry.key)) for grant in grants]
            reading = [streams.submit(tier.read, entry, out) for entry, out in zip(lease.entries, outs, strict=True)]
            for work in (*writing, *reading):
                work.result()
            assert len(records(tier)) <= 8
            for one, out in zip(wanted, outs, strict=True):
                assert (out == block(one)).all()
                reads += 1
            for grant in grants:
                tier.index.publish(grant)
            lease.release()
    assert reads > 50
    assert tier.index.stats.evictions > 50


def test_the_index_does_no_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It works while every call on files fails."""
    tier = open_tier(tmp_path, max_entries=2)
    store(tier, *keys(1, 2))
    for call in ("open", "unlink", "rename", "stat", "pread", "pwrite", "preadv", "pwritev", "scandir"):
        monkeypatch.setattr(os, call, failing_with(errno.EIO))
    grant = tier.index.reserve(key(3))
    assert grant is not None
    tier.index.touch(keys(2))
    tier.index.pin(keys(2)).release()
    tier.index.abandon(grant)
    tier.index.forget(entry_of(tier, key(2)))
    tier.index.clear()
    assert len(tier.index) == 0
