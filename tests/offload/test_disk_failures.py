"""Damaged files, full and failing disks: a miss or an error, never wrong bytes."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from mmap import mmap
from pathlib import Path

import numpy as np
import pytest
from disk_fixtures import (
    LAYOUT,
    block,
    entry_of,
    failing_with,
    file_of,
    holds,
    key,
    keys,
    load,
    open_tier,
    records,
    slot_of,
    store,
)

from sidestream.errors import ConfigError, InvariantError, TierCorrupt, TierError, TierFull
from sidestream_kv.offload.tiers.disk import HEADER_BYTES
from sidestream_kv.types import Key

SLOT_BYTES = HEADER_BYTES + LAYOUT.block_bytes


def flip(position: int) -> Callable[[Path, int], None]:
    """Flip a bit at a position of a slot."""

    def damage(path: Path, start: int) -> None:
        content = bytearray(path.read_bytes())
        content[start + position] ^= 0x10
        path.write_bytes(content)

    return damage


def zeros(first: int) -> Callable[[Path, int], None]:
    def damage(path: Path, start: int) -> None:
        content = bytearray(path.read_bytes())
        content[start + first : start + SLOT_BYTES] = bytes(SLOT_BYTES - first)
        path.write_bytes(content)

    return damage


DAMAGE: dict[str, Callable[[Path, int], object]] = {
    "magic": flip(0),
    "version": flip(8),
    "identity": flip(12),
    "key": flip(28),
    "serial": flip(44),
    "length": flip(52),
    "padding": flip(2000),
    "checksum": flip(HEADER_BYTES - 1),
    "first payload byte": flip(HEADER_BYTES),
    "last payload byte": flip(SLOT_BYTES - 1),
    "empty file": lambda path, start: path.write_bytes(b""),
    "header only": lambda path, start: os.truncate(path, start + HEADER_BYTES),
    "one byte short": lambda path, start: os.truncate(path, start + SLOT_BYTES - 1),
    "payload of zeros": zeros(HEADER_BYTES),
    "all zeros": zeros(0),
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
def test_a_damaged_slot_is_a_miss_and_is_deleted_and_counted(tmp_path: Path, damage: str) -> None:
    tier = open_tier(tmp_path)
    store(tier, *keys(2, 1))
    entry = entry_of(tier, key(1))
    DAMAGE[damage](*file_of(tmp_path, tier, entry))
    with pytest.raises(TierCorrupt, match="disk entry "):
        load(tier, key(1))
    assert entry not in records(tier)
    tier.index.forget(entry)
    assert key(1) not in tier.index
    assert tier.index.stats.corrupt == 1
    store(tier, key(1))
    assert holds(tier, key(1))
    assert damage == "empty file" or holds(tier, key(2))


def test_a_lost_segment_is_a_miss_and_is_made_anew(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store(tier, key(1))
    tier.close()
    (tmp_path / "segment-000000").unlink()
    tier = open_tier(tmp_path)
    with pytest.raises(TierCorrupt, match="is in a file that is gone: deleted"):
        load(tier, key(1))
    tier.index.forget(entry_of(tier, key(1)))
    store(tier, key(2))
    (tmp_path / "segment-000000").unlink()  # while it is open
    store(tier, key(3))
    tier.close()
    again = open_tier(tmp_path)
    assert holds(again, key(3))
    with pytest.raises(TierCorrupt, match="header of another block or tier"):
        load(again, key(2))


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_a_segment_that_is_no_regular_file_is_not_read_or_written(tmp_path: Path, bounded: None, kind: str) -> None:
    tier = open_tier(tmp_path)
    store(tier, key(1))
    tier.close()
    path = tmp_path / "segment-000000"
    path.unlink()
    OTHER_KINDS[kind](path)
    tier = open_tier(tmp_path)
    with pytest.raises(TierError, match="is not a regular file"):
        load(tier, key(1))
    grant = tier.index.reserve(key(2))
    assert grant is not None
    with pytest.raises(TierError, match="is not a regular file"):
        tier.write(grant, block(key(2)))


@pytest.mark.parametrize("kind", OTHER_KINDS)
@pytest.mark.parametrize("name", ["sidestream-tier.json", "sidestream-tier.table"])
def test_a_tier_whose_table_or_description_is_no_regular_file_is_refused(
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


def test_a_short_segment_is_a_miss_even_when_the_buffer_holds_the_missing_bytes(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store(tier, key(1))
    path, start = file_of(tmp_path, tier, entry_of(tier, key(1)))
    os.truncate(path, start + SLOT_BYTES - 100)
    with pytest.raises(TierCorrupt, match="is cut short"):
        tier.read(entry_of(tier, key(1)), block(key(1)))


def test_a_slot_with_the_entry_of_another_key_is_a_miss(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store(tier, *keys(1, 2))
    tier._medium.slots.segments.copy(slot_of(tier, entry_of(tier, key(2))), slot_of(tier, entry_of(tier, key(1))))
    with pytest.raises(TierCorrupt, match="header of another block or tier"):
        load(tier, key(1))


def test_an_entry_written_by_another_model_is_a_miss_H14(tmp_path: Path) -> None:
    ours, theirs = open_tier(tmp_path / "a"), open_tier(tmp_path / "b", fingerprint="model-b")
    store(ours, key(1))
    store(theirs, key(1))
    shutil.copyfile(tmp_path / "b" / "segment-000000", tmp_path / "a" / "segment-000000")
    with pytest.raises(TierCorrupt, match="header of another block or tier"):
        load(ours, key(1))


def test_an_unreadable_entry_raises_tier_error_and_is_deleted_once_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(tmp_path)
    store(tier, key(1))
    entry = entry_of(tier, key(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing_with(errno.EIO))
        with pytest.raises(TierError, match="could not be read: Input/output error") as caught:
            load(tier, key(1))
    assert not isinstance(caught.value, TierCorrupt)
    assert entry in records(tier)
    tier.index.forget(entry)
    store(tier, key(2))
    assert [found.key for found in records(tier)] == [key(2)]


def test_a_write_beyond_the_file_size_limit_raises_tier_full(tmp_path: Path) -> None:
    """A segment is allocated whole, so nothing is written."""
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
    assert records(tier) == []
    assert key(1) not in tier.index
    store(tier, key(1))
    assert holds(tier, key(1))


@pytest.mark.parametrize(
    ("call", "number", "kind"),
    [
        ("pwritev", errno.ENOSPC, TierFull),
        ("pwritev", errno.EDQUOT, TierFull),
        ("pwritev", errno.EIO, TierError),
        ("pwrite", errno.ENOSPC, TierFull),
        ("pwrite", errno.EIO, TierError),
        ("pread", errno.EIO, TierError),
    ],
)
def test_a_failed_write_leaves_no_entry_H9(
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
    assert not grant.written
    tier.index.abandon(grant)
    assert key(2) not in {entry.key for entry in records(tier)}
    store(tier, key(3))
    assert list(tier.index) == [key(3)]
    assert [entry.key for entry in records(tier)] == [key(3)]


@pytest.mark.parametrize("call", ["posix_fallocate", "open"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE])
def test_a_segment_that_cannot_be_made_fails_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    tier = open_tier(tmp_path)
    grant = tier.index.reserve(key(1))
    assert grant is not None
    with monkeypatch.context() as patch, pytest.raises(TierFull if number == errno.ENOSPC else TierError):
        patch.setattr(os, call, failing_with(number))
        tier.write(grant, block(key(1)))
    tier.index.abandon(grant)
    store(tier, key(1))
    assert holds(tier, key(1))


def test_a_record_is_valid_only_while_its_slot_is_complete_H7(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev, seen = os.pwritev, list[list[Key]]()
    tier = open_tier(tmp_path, max_entries=2)
    tier._medium.slots.segments.direct = False  # direct I/O, which blocks in aligned memory get, has no parts of a page
    store(tier, *keys(1, 2))

    def write_slowly(fd: int, buffers: list[memoryview], offset: int) -> int:
        seen.append([entry.key for entry in records(tier)])
        return pwritev(fd, [buffers[0][:1500]], offset)

    monkeypatch.setattr(os, "pwritev", write_slowly)
    store(tier, key(3))
    assert len(seen) > 2
    assert {tuple(found) for found in seen} == {(key(2),)}
    assert {entry.key for entry in records(tier)} == set(keys(2, 3))


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev, preadv = os.pwritev, os.preadv
    tier = open_tier(tmp_path)
    tier._medium.slots.segments.direct = False  # direct I/O has no parts of a page
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, at: pwritev(fd, [buffers[0][:1500]], at))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:700]], at))
    store(tier, key(1))
    assert holds(tier, key(1))


@pytest.mark.parametrize("aligned", [True, False])
def test_blocks_in_memory_of_any_alignment_are_written_and_read(tmp_path: Path, aligned: bool) -> None:
    tier = open_tier(tmp_path)
    memory = np.frombuffer(mmap(-1, 3 * LAYOUT.block_bytes), np.uint8)
    out = memory[0 if aligned else 5 :][: LAYOUT.block_bytes]
    out[:] = block(key(1))
    grant = tier.index.reserve(key(1))
    assert grant is not None
    tier.write(grant, out)
    out[:] = 0
    tier.read(grant.entry, out)
    assert (out == block(key(1))).all()


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
        patch.setattr(os, "pwritev", failing_with(errno.ENOSPC))
        tier.write(grant, block(key(2)))
    tier.index.abandon(grant)
    assert records(tier) == []
    store(tier, key(2))
    assert holds(tier, key(2))
