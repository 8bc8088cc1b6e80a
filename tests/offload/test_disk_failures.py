"""Damaged files, full and failing disks: a miss or an error, never wrong bytes."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from disk_fixtures import (
    FILE_BYTES,
    LAYOUT,
    block,
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

from sidestream.errors import ConfigError, InvariantError, TierCorrupt, TierError, TierFull
from sidestream_kv.offload.tiers.disk import HEADER_BYTES


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


def listen_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, pytest.MonkeyPatch.context() as patch:
        patch.chdir(path.parent)  # the name of a socket has at most 107 bytes
        listener.bind(path.name)


# What a file may be besides a regular file; what is made takes the file's place.
OTHER_KINDS: dict[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo,
    "link to a FIFO": lambda path: (os.mkfifo(path.with_name("fifo")), path.symlink_to("fifo")),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "socket": listen_at,
}


@pytest.fixture
def bounded() -> Iterator[None]:
    """A call that waits for ever fails instead."""

    def give_up(*_: object) -> None:
        raise AssertionError("it still waits after ten seconds")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_a_miss_and_is_deleted_and_counted(tmp_path: Path, damage: str) -> None:
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


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_an_entry_that_is_no_regular_file_is_a_miss_and_is_deleted(tmp_path: Path, bounded: None, kind: str) -> None:
    tier = open_tier(tmp_path)
    store(tier, *keys(1, 2))
    entry, path = entry_of(tier, key(1)), file_of(tmp_path, key(1))
    path.unlink()
    OTHER_KINDS[kind](path)
    with pytest.raises(TierCorrupt, match="is not a regular file; deleted"):
        load(tier, key(1))
    assert not os.path.lexists(path)
    tier.index.forget(entry)
    store(tier, key(1))
    assert holds(tier, key(1))
    assert holds(tier, key(2))


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_opening_removes_and_counts_entries_that_are_no_regular_files(tmp_path: Path, bounded: None, kind: str) -> None:
    tier = open_tier(tmp_path)
    store(tier, *keys(1, 2))
    path = file_of(tmp_path, key(1))
    path.unlink()
    OTHER_KINDS[kind](path)
    tier.close()
    again = open_tier(tmp_path)
    assert list(again.index) == [key(2)]
    assert not os.path.lexists(path)
    assert again.index.stats.corrupt == 1


def test_a_directory_in_place_of_an_entry_is_a_miss_and_is_kept(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, max_entries=2)
    store(tier, *keys(1, 2))
    entry, path = entry_of(tier, key(1)), file_of(tmp_path, key(1))
    path.unlink()
    path.mkdir()
    (path / "notes.txt").write_text("mine")
    with pytest.raises(TierCorrupt, match="is not a regular file; not deleted"):
        load(tier, key(1))
    tier.index.forget(entry)
    store(tier, *keys(1, 3))  # the first of them deletes what was forgotten
    assert holds(tier, key(1))
    assert holds(tier, key(3))
    tier.close()
    assert open_tier(tmp_path).index.stats.corrupt == 0
    assert (path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("kind", OTHER_KINDS)
@pytest.mark.parametrize("name", ["sidestream-tier.json", "sidestream-tier.lock"])
def test_a_tier_whose_lock_or_description_is_no_regular_file_is_refused(
    tmp_path: Path, bounded: None, name: str, kind: str
) -> None:
    open_tier(tmp_path).close()
    (tmp_path / name).unlink()
    OTHER_KINDS[kind](tmp_path / name)
    with pytest.raises(ConfigError, match=rf"{name} is not a regular file"):
        open_tier(tmp_path)


def test_creating_a_tier_replaces_an_old_temporary_file(tmp_path: Path, bounded: None) -> None:
    os.mkfifo(tmp_path / "sidestream-tier.json.tmp")
    tier = open_tier(tmp_path)
    store(tier, key(1))
    assert holds(tier, key(1))


def test_a_truncated_file_is_a_miss_even_when_the_buffer_holds_the_missing_bytes(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store(tier, key(1))
    os.truncate(file_of(tmp_path, key(1)), FILE_BYTES - 100)
    with pytest.raises(TierCorrupt, match="shorter than one block"):
        tier.read(entry_of(tier, key(1)), block(key(1)))


def test_a_file_with_the_entry_of_another_key_is_a_miss(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store(tier, *keys(1, 2))
    shutil.copyfile(file_of(tmp_path, key(2)), file_of(tmp_path, key(1)))
    with pytest.raises(TierCorrupt, match="header of another block or tier"):
        load(tier, key(1))


def test_an_entry_written_by_another_model_is_a_miss_H14(tmp_path: Path) -> None:
    ours, theirs = open_tier(tmp_path / "a"), open_tier(tmp_path / "b", fingerprint="model-b")
    store(ours, key(1))
    store(theirs, key(1))
    shutil.copyfile(file_of(tmp_path / "b", key(1)), file_of(tmp_path / "a", key(1)))
    with pytest.raises(TierCorrupt, match="header of another block or tier"):
        load(ours, key(1))


def test_an_unreadable_entry_raises_tier_error_and_is_deleted_once_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_write_beyond_the_file_size_limit_raises_tier_full(tmp_path: Path) -> None:
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


def test_a_file_gets_its_final_name_only_once_complete_H7(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_write_that_fails_after_deleting_its_victim_frees_the_capacity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
