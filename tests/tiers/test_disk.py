"""The disk tier on a real file system: what it keeps, what it refuses, what it survives."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from disk_fixtures import (
    ENTRY_BYTES,
    LAYOUT,
    block,
    entry_files,
    entry_of,
    file_of,
    holds,
    key,
    keys,
    load,
    open_tier,
    snapshot,
    store,
)

from sidestream.errors import ConfigError, InvariantError, TierCorrupt, TierError, TierFull
from sidestream.tiers.base import PersistentTier
from sidestream.tiers.disk import HEADER_BYTES, DiskTier, entry_bytes

FILE_BYTES = HEADER_BYTES + LAYOUT.block_bytes


def test_a_stored_block_is_read_back(tmp_path: Path) -> None:
    tier: PersistentTier = open_tier(tmp_path / "new" / "tier")
    grant = tier.index.reserve(key(1))
    assert grant is not None
    tier.write(grant, block(key(1)).data)
    tier.index.publish(grant)
    out = bytearray(LAYOUT.block_bytes)
    tier.read(tier.index.pin([key(1)]).entries[0], memoryview(out))
    assert out == block(key(1)).tobytes()


def test_a_block_takes_whole_pages_on_disk() -> None:
    assert ENTRY_BYTES == HEADER_BYTES + LAYOUT.block_bytes == 8192
    assert entry_bytes(replace(LAYOUT, block_tokens=2)) == 8192
    assert entry_bytes(replace(LAYOUT, block_tokens=17)) == 12288


def test_the_files_are_not_readable_by_other_users(tmp_path: Path) -> None:
    store(open_tier(tmp_path / "tier"), key(1))
    assert (tmp_path / "tier").stat().st_mode & 0o077 == 0
    assert file_of(tmp_path / "tier", key(1)).stat().st_mode & 0o077 == 0


def test_a_block_or_key_of_the_wrong_length_is_a_bug(tmp_path: Path) -> None:
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


# --- restart ---------------------------------------------------------------------------------------------------------------------


def test_a_restart_serves_every_block(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store(tier, *keys(1, 2, 3))
    tier.close()
    again = open_tier(tmp_path)
    assert again.index.lookup(keys(1, 2, 3)) == 3
    assert all(holds(again, one) for one in keys(1, 2, 3))
    assert again.index.stats.corrupt == 0


def test_a_block_renamed_but_not_published_before_the_crash_is_served(tmp_path: Path) -> None:
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


def test_recency_survives_a_restart(tmp_path: Path) -> None:
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


def test_of_two_files_of_one_key_the_later_one_is_served(tmp_path: Path) -> None:
    """Several keys, so that the directory lists some earlier files first and some later ones."""
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


def test_serials_go_on_after_a_restart(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store(tier, *keys(1, 2))
    before = entry_of(tier, key(2)).serial
    crash(tier)
    again = open_tier(tmp_path)
    store(again, key(3))
    assert entry_of(again, key(3)).serial > before


def test_files_with_other_names_are_let_be(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store(tier, key(1))
    strangers = [file_of(tmp_path, key(1)).with_name("notes.txt"), tmp_path / "README"]
    for stranger in strangers:
        stranger.write_text("mine")
    tier.close()
    again = open_tier(tmp_path)
    assert [stranger.read_text() for stranger in strangers] == ["mine", "mine"]
    assert again.index.stats.corrupt == 0


def test_a_file_of_the_wrong_size_or_place_is_removed_and_counted_at_open(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store(tier, *keys(1, 2, 3, 4))
    tier.close()
    os.truncate(file_of(tmp_path, key(1)), FILE_BYTES - 1)
    os.truncate(file_of(tmp_path, key(2)), 0)
    misplaced = file_of(tmp_path, key(3))
    misplaced.rename(tmp_path / ("00" if misplaced.parent.name != "00" else "01") / misplaced.name)
    again = open_tier(tmp_path)
    assert list(again.index) == [key(4)]
    assert len(entry_files(tmp_path)) == 1
    assert again.index.stats.corrupt == 3


def test_a_tier_killed_while_it_was_being_made_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "sidestream-tier.lock").write_text("4711")
    (tmp_path / "sidestream-tier.json.tmp").write_text('{"form')
    tier = open_tier(tmp_path)
    store(tier, key(1))
    assert holds(tier, key(1))
    assert not (tmp_path / "sidestream-tier.json.tmp").exists()


# --- damage ----------------------------------------------------------------------------------------------------------------------


def flip(position: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[position] ^= 0x10
        path.write_bytes(content)

    return damage


DAMAGE: dict[str, Callable[[Path], object]] = {
    "magic": flip(0),
    "version": flip(8),
    "identity": flip(12),
    "key": flip(28),
    "length": flip(44),
    "padding": flip(2000),
    "checksum": flip(HEADER_BYTES - 1),
    "first payload byte": flip(HEADER_BYTES),
    "last payload byte": flip(FILE_BYTES - 1),
    "empty": lambda path: path.write_bytes(b""),
    "header only": lambda path: os.truncate(path, HEADER_BYTES),
    "one byte short": lambda path: os.truncate(path, FILE_BYTES - 1),
    "one byte long": lambda path: os.truncate(path, FILE_BYTES + 1),
    "payload of zeros": lambda path: path.write_bytes(path.read_bytes()[:HEADER_BYTES] + bytes(LAYOUT.block_bytes)),
    "all zeros": lambda path: path.write_bytes(bytes(FILE_BYTES)),
    "deleted": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_a_miss_is_deleted_and_counted(tmp_path: Path, damage: str) -> None:
    tier = open_tier(tmp_path)
    store(tier, *keys(1, 2))
    path = file_of(tmp_path, key(1))
    DAMAGE[damage](path)
    entry = entry_of(tier, key(1))
    with pytest.raises(TierCorrupt, match="disk entry "):
        load(tier, key(1))
    assert not path.exists()
    tier.index.forget(entry)
    assert key(1) not in tier.index
    assert tier.index.stats.corrupt == 1
    assert holds(tier, key(2))
    store(tier, key(1))
    assert holds(tier, key(1))


def test_a_truncated_file_is_a_miss_even_when_the_buffer_holds_the_missing_bytes(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store(tier, key(1))
    os.truncate(file_of(tmp_path, key(1)), FILE_BYTES - 100)
    with pytest.raises(TierCorrupt, match="shorter than one block"):
        tier.read(entry_of(tier, key(1)), block(key(1)))


def test_the_entry_of_another_key_under_this_name_is_a_miss(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store(tier, *keys(1, 2))
    shutil.copyfile(file_of(tmp_path, key(2)), file_of(tmp_path, key(1)))
    with pytest.raises(TierCorrupt, match="header of something else"):
        load(tier, key(1))


def test_the_same_key_written_by_another_model_is_a_miss_H14(tmp_path: Path) -> None:
    ours, theirs = open_tier(tmp_path / "a"), open_tier(tmp_path / "b", fingerprint="model-b")
    store(ours, key(1))
    store(theirs, key(1))
    shutil.copyfile(file_of(tmp_path / "b", key(1)), file_of(tmp_path / "a", key(1)))
    with pytest.raises(TierCorrupt, match="header of something else"):
        load(ours, key(1))


def test_an_unreadable_entry_is_a_tier_error_and_deleted_after_it_was_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(tmp_path)
    store(tier, key(1))
    entry, path = entry_of(tier, key(1)), file_of(tmp_path, key(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "readv", failing_with(errno.EIO))
        with pytest.raises(TierError, match="could not be read: Input/output error") as caught:
            load(tier, key(1))
    assert not isinstance(caught.value, TierCorrupt)
    assert path.exists()
    tier.index.forget(entry)
    store(tier, key(2))
    assert not path.exists()


# --- a full or failing disk ------------------------------------------------------------------------------------------------------


def test_a_write_that_outgrows_a_limit_is_tier_full_and_leaves_nothing(tmp_path: Path) -> None:
    """A real partial write: the file size limit lets the header through and stops the payload half-way."""
    tier = open_tier(tmp_path)
    grant = tier.index.reserve(key(1))
    assert grant is not None
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (HEADER_BYTES + 1000, hard))
    try:
        with pytest.raises(TierFull, match="could not store 4096 bytes"):
            tier.write(grant, block(key(1)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    tier.index.abandon(grant)
    assert entry_files(tmp_path) == []
    assert key(1) not in tier.index
    store(tier, key(1))
    assert holds(tier, key(1))


@pytest.mark.parametrize(
    ("call", "number", "kind"),
    [
        ("writev", errno.ENOSPC, TierFull),
        ("writev", errno.EDQUOT, TierFull),
        ("writev", errno.EIO, TierError),
        ("open", errno.ENOSPC, TierFull),
        ("open", errno.EMFILE, TierError),
        ("rename", errno.ENOSPC, TierFull),
        ("rename", errno.EIO, TierError),
        ("unlink", errno.EIO, TierError),
    ],
)
def test_a_failed_write_leaves_no_entry_and_no_file_H9(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, kind: type[TierError]
) -> None:
    tier = open_tier(tmp_path, max_entries=1)
    store(tier, key(1))
    grant = tier.index.reserve(key(2))
    assert grant is not None
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing_with(number))
        with pytest.raises(kind) as caught:
            tier.write(grant, block(key(2)))
    assert type(caught.value) is kind
    tier.index.abandon(grant)
    assert not list(tmp_path.glob(f"??/{key(2).hex()}*"))
    store(tier, key(3))
    assert list(tier.index) == [key(3)]
    assert len(entry_files(tmp_path)) == 1


def test_a_file_has_its_entry_name_only_once_it_is_complete_H7(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writev, seen = os.writev, list[str]()

    def write_slowly(fd: int, buffers: list[memoryview]) -> int:
        seen.extend(path.suffix for path in entry_files(tmp_path))
        return writev(fd, [buffers[0][:1500]])

    monkeypatch.setattr(os, "writev", write_slowly)
    store(open_tier(tmp_path), key(1))
    assert len(seen) > 2
    assert set(seen) == {".tmp"}
    assert file_of(tmp_path, key(1)).suffix == ""


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writev, readv = os.writev, os.readv
    monkeypatch.setattr(os, "writev", lambda fd, buffers: writev(fd, [buffers[0][:1500]]))
    monkeypatch.setattr(os, "readv", lambda fd, buffers: readv(fd, [buffers[0][:700]]))
    tier = open_tier(tmp_path)
    store(tier, key(1))
    assert holds(tier, key(1))


def test_a_closed_tier_does_no_io(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store(tier, key(1))
    grant = tier.index.reserve(key(2))
    assert grant is not None
    tier.close()
    tier.close()
    with pytest.raises(InvariantError, match="is closed"):
        load(tier, key(1))
    with pytest.raises(InvariantError, match="is closed"):
        tier.write(grant, block(key(2)))
    assert holds(open_tier(tmp_path), key(1))


def test_a_write_that_failed_after_its_victim_was_deleted_gives_the_room_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(tmp_path, max_entries=1)
    store(tier, key(1))
    grant = tier.index.reserve(key(2))
    assert grant is not None
    with monkeypatch.context() as patch, pytest.raises(TierFull):
        patch.setattr(os, "writev", failing_with(errno.ENOSPC))
        tier.write(grant, block(key(2)))
    tier.index.abandon(grant)
    assert entry_files(tmp_path) == []
    assert tier.index.take_doomed() == []


def failing_with(number: int) -> Callable[..., object]:
    def fail(*_: object, **__: object) -> object:
        raise OSError(number, os.strerror(number))

    return fail


# --- deletions, reads and writes that meet ---------------------------------------------------------------------------------------


def test_an_evicted_file_is_deleted_by_the_write_that_took_its_place(tmp_path: Path) -> None:
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


def test_a_read_of_a_pinned_entry_survives_eviction_pressure_and_a_rewrite(tmp_path: Path) -> None:
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


def test_close_deletes_what_is_doomed(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store(tier, *keys(1, 2))
    tier.index.clear()
    tier.close()
    assert entry_files(tmp_path) == []


def test_reads_and_writes_on_many_threads_keep_every_block_whole(tmp_path: Path) -> None:
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


# --- refusals: value, bound, remedy; nothing changed -----------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path: Path) -> Path:
    tier = open_tier(tmp_path / "tier")
    store(tier, *keys(1, 2, 3))
    tier.close()
    return tmp_path / "tier"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_tokens": 32}, r"block_tokens 16 \(here 32\): give another directory, or delete it"),
        ({"dtype": "float16"}, r"dtype 'bfloat16' \(here 'float16'\)"),
        ({"num_layers": 4, "head_dim": 8}, r"num_layers 2 \(here 4\), head_dim 16 \(here 8\)"),
        ({"num_kv_heads": 1}, r"num_kv_heads 2 \(here 1\)"),
    ],
)
def test_another_layout_is_refused(made: Path, change: dict[str, int], message: str) -> None:
    before = snapshot(made)
    with pytest.raises(ConfigError, match=message):
        open_tier(made, layout=replace(LAYOUT, **change))  # type: ignore[arg-type]
    assert snapshot(made) == before


def test_another_model_is_refused(made: Path) -> None:
    before = snapshot(made)
    with pytest.raises(ConfigError, match=r"fingerprint 'model-a' \(here 'model-b'\): give another directory, or delete it"):
        open_tier(made, fingerprint="model-b", max_entries=1)
    assert snapshot(made) == before


def test_another_format_version_is_refused(made: Path) -> None:
    tier_file = made / "sidestream-tier.json"
    tier_file.write_text(json.dumps({"format_version": 2, "anything": "else"}))
    before = snapshot(made)
    with pytest.raises(ConfigError, match="has format version 2, this version of Sidestream reads and writes 1"):
        open_tier(made)
    assert snapshot(made) == before


@pytest.mark.parametrize("content", ["", "[]", '{"format_', "\xff"])
def test_a_damaged_description_is_refused(made: Path, content: str) -> None:
    (made / "sidestream-tier.json").write_bytes(content.encode("latin-1"))
    before = snapshot(made)
    with pytest.raises(ConfigError, match="is damaged: delete the directory, or give another one"):
        open_tier(made)
    assert snapshot(made) == before


def test_a_capacity_below_one_entry_is_refused(made: Path) -> None:
    before = snapshot(made)
    with pytest.raises(
        ConfigError, match=f"disk_capacity is {ENTRY_BYTES - 1} bytes, one block .* takes {ENTRY_BYTES} .*raise disk_capacity"
    ):
        open_tier(made, capacity_bytes=ENTRY_BYTES - 1)
    assert snapshot(made) == before


def test_a_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("draft 9")
    with pytest.raises(ConfigError, match=r"'thesis.tex' is one of 1\) and no sidestream-tier.json: give an empty or a new directory"):
        open_tier(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is not a directory"):
        open_tier(path)
    with pytest.raises(ConfigError, match="cannot be used: Not a directory"):
        open_tier(path / "below")
    assert path.read_text() == "mine"


@pytest.mark.skipif(not Path("/proc/self/fdinfo").is_dir(), reason="needs a file system that nobody may write")
def test_a_directory_that_not_even_root_may_write_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"/proc/nowhere cannot be used: .*: give a directory"):
        open_tier(Path("/proc/nowhere"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_write_permission_is_refused(made: Path) -> None:
    made.chmod(0o500)
    try:
        with pytest.raises(ConfigError, match="is not writable: give a directory that this user may write"):
            open_tier(made)
    finally:
        made.chmod(0o700)


def test_a_directory_without_write_permission_is_refused_as_root_too(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot(made)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != made)
    with pytest.raises(ConfigError, match="is not writable: give a directory that this user may write"):
        open_tier(made)
    assert snapshot(made) == before


def test_a_second_engine_on_the_directory_is_refused_and_the_first_goes_on(made: Path) -> None:
    first = open_tier(made)
    before = snapshot(made)
    with pytest.raises(ConfigError, match=f"is in use by process {os.getpid()}: stop that one, or give each engine a directory"):
        open_tier(made, max_entries=1)
    assert snapshot(made) == before
    assert holds(first, key(1))
    first.close()
    assert holds(open_tier(made), key(1))


def test_a_refused_open_lets_go_of_the_directory(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", failing_with(errno.EIO))
        with pytest.raises(ConfigError, match="cannot be used: Input/output error"):
            open_tier(made)
    assert holds(open_tier(made), key(1))


def crash(tier: DiskTier) -> None:
    """What kill -9 does to the tier: its lock goes, nothing else happens."""
    assert tier._lock is not None
    os.close(tier._lock)
    tier._lock = None
