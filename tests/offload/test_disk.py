"""The disk tier on a real file system: stored entries, restarts, eviction and concurrent operations."""

from __future__ import annotations

import errno
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from disk_fixtures import (
    ENTRY_BYTES,
    FILE_BYTES,
    LAYOUT,
    block,
    crash,
    entry_files,
    entry_of,
    failing_with,
    file_of,
    holds,
    key,
    keys,
    load,
    open_tier,
    store,
)

from sidestream.errors import InvariantError
from sidestream_kv.offload.tiers.base import PersistentTier
from sidestream_kv.offload.tiers.disk import HEADER_BYTES, entry_bytes


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
    assert file_of(tmp_path / "tier", key(1)).stat().st_mode & 0o077 == 0


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
    assert entry_files(tmp_path) == []


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


def test_the_temporary_file_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store(tier, key(1))
    path = file_of(tmp_path, key(1))
    path.rename(f"{path}.tmp")
    crash(tier)
    again = open_tier(tmp_path)
    assert key(1) not in again.index
    assert entry_files(tmp_path) == []


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
    assert len(entry_files(tmp_path)) == 2
    assert again.index.stats.evictions == 2


def test_the_later_of_two_files_with_one_key_is_served(tmp_path: Path) -> None:
    """Several keys, so that the earlier file is listed first for some, the later for others."""
    tier, wanted = open_tier(tmp_path), keys(*range(12))
    store(tier, *wanted)
    earlier = {file_of(tmp_path, one): file_of(tmp_path, one).read_bytes() for one in wanted}
    tier.index.clear()
    store(tier, *wanted)
    later = entry_files(tmp_path)
    for path, content in earlier.items():
        path.write_bytes(content)  # as if the deletions had not happened before the crash
    crash(tier)
    again = open_tier(tmp_path)
    assert all(holds(again, one) for one in wanted)
    assert entry_files(tmp_path) == later


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
    strangers = [file_of(tmp_path, key(1)).with_name("notes.txt"), tmp_path / "README"]
    for stranger in strangers:
        stranger.write_text("mine")
    tier.close()
    again = open_tier(tmp_path)
    assert [stranger.read_text() for stranger in strangers] == ["mine", "mine"]
    assert again.index.stats.corrupt == 0


def test_opening_removes_and_counts_files_of_wrong_size_or_place(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store(tier, *keys(1, 2, 3, 4))
    tier.close()
    os.truncate(file_of(tmp_path, key(1)), FILE_BYTES - 1)
    os.truncate(file_of(tmp_path, key(2)), 0)
    misplaced = file_of(tmp_path, key(3))
    elsewhere = tmp_path / ("00" if misplaced.parent.name != "00" else "01")
    elsewhere.mkdir()
    misplaced.rename(elsewhere / misplaced.name)
    again = open_tier(tmp_path)
    assert list(again.index) == [key(4)]
    assert len(entry_files(tmp_path)) == 1
    assert again.index.stats.corrupt == 3


def test_subdirectories_are_created_when_an_entry_needs_them(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    store(tier, key(1))
    made = file_of(tmp_path, key(1)).parent
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [made]
    assert made.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(made)  # by somebody, while the tier is open
    tier.index.drop([key(1)])
    store(tier, key(1))
    assert holds(tier, key(1))


def test_a_tier_killed_during_its_creation_is_created_again(tmp_path: Path) -> None:
    (tmp_path / "sidestream-tier.lock").write_text("4711")
    (tmp_path / "sidestream-tier.json.tmp").write_text('{"form')
    tier = open_tier(tmp_path)
    store(tier, key(1))
    assert holds(tier, key(1))
    assert not (tmp_path / "sidestream-tier.json.tmp").exists()


def test_an_evicted_file_is_deleted_by_the_write_that_replaces_it(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, max_entries=2)
    store(tier, *keys(1, 2))
    grant = tier.index.reserve(key(3))
    assert grant is not None
    assert key(1) not in tier.index
    assert len(entry_files(tmp_path)) == 2
    tier.write(grant, block(key(3)))
    assert {path.name[:32] for path in entry_files(tmp_path)} == {key(2).hex(), key(3).hex()}


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
    assert len(entry_files(tmp_path)) == 2


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
    assert sorted(path.name[:32] for path in entry_files(tmp_path)) == sorted(one.hex() for one in keys(5, 6))


def test_close_deletes_the_files_of_forgotten_entries(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store(tier, *keys(1, 2))
    tier.index.clear()
    tier.close()
    assert entry_files(tmp_path) == []


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
            assert len(entry_files(tmp_path)) <= 8
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
    for call in ("open", "unlink", "rename", "stat", "utime", "scandir", "readv", "writev"):
        monkeypatch.setattr(os, call, failing_with(errno.EIO))
    grant = tier.index.reserve(key(3))
    assert grant is not None
    tier.index.touch(keys(2))
    tier.index.pin(keys(2)).release()
    tier.index.abandon(grant)
    tier.index.forget(entry_of(tier, key(2)))
    tier.index.clear()
    assert len(tier.index) == 0
