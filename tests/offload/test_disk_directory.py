"""The directory of the disk tier: owners, permissions and links, and its loss while an engine uses it."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import transfer_rig
from disk_fixtures import (
    FILE_BYTES,
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

from sidestream.errors import ConfigError, TierCorrupt, TierError, TierLost
from sidestream_kv.offload.tier_io import PAUSE_S
from sidestream_kv.offload.tiers.disk import DiskTier


@pytest.fixture
def made(tmp_path: Path) -> Path:
    tier = open_tier(tmp_path / "tier")
    store(tier, *keys(1, 2, 3))
    tier.close()
    return tmp_path / "tier"


# ---------------------------------------------------------------------- whom the directory trusts


@pytest.mark.parametrize("name", ["sidestream-tier.json", "sidestream-tier.lock"])
def test_a_link_as_a_tiers_own_file_is_refused_and_its_target_kept(made: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / "target"
    (made / name).rename(target)
    content = target.read_bytes()
    (made / name).symlink_to(target)
    with pytest.raises(ConfigError, match=rf"{name} is not a regular file"):
        open_tier(made)
    assert target.read_bytes() == content


@pytest.mark.parametrize("name", ["sidestream-tier.json.tmp", "sidestream-tier.lock.tmp"])
def test_a_link_under_a_temporary_name_is_replaced_and_keeps_its_target(tmp_path: Path, name: str) -> None:
    (tmp_path / "target").write_text("mine")
    (tmp_path / "tier").mkdir()
    (tmp_path / "tier" / name).symlink_to(tmp_path / "target")
    open_tier(tmp_path / "tier")
    assert (tmp_path / "target").read_text() == "mine"


def test_hard_link_in_place_of_the_lock_file_keeps_its_content(made: Path, tmp_path: Path) -> None:
    (tmp_path / "target").write_text("mine")
    (made / "sidestream-tier.lock").unlink()
    os.link(tmp_path / "target", made / "sidestream-tier.lock")
    open_tier(made)
    assert (tmp_path / "target").read_text() == "mine"


def test_entry_that_is_a_link_to_a_valid_entry_is_not_followed(made: Path, tmp_path: Path) -> None:
    tier = open_tier(made)
    moved = tmp_path / "moved"
    path = file_of(made, key(1))
    path.rename(moved)
    path.symlink_to(moved)
    with pytest.raises(TierCorrupt, match="is not a regular file; deleted"):
        load(tier, key(1))
    assert moved.stat().st_size == FILE_BYTES


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_link_or_file_in_place_of_a_subdirectory_is_refused_by_name(made: Path, tmp_path: Path, kind: str) -> None:
    folder = file_of(made, key(1)).parent
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved") if kind == "link" else folder.write_text("mine")
    with pytest.raises(ConfigError, match=f"{folder} is a file or a link.*: move it away"):
        open_tier(made)
    assert len(list((tmp_path / "moved").iterdir())) == 1


def test_subdirectory_that_becomes_a_link_is_not_followed(made: Path, tmp_path: Path) -> None:
    tier = open_tier(made)
    folder = file_of(made, key(1)).parent
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    with pytest.raises(TierCorrupt, match="is gone"):
        load(tier, key(1))
    tier.index.forget(entry_of(tier, key(1)))
    grant = tier.index.reserve(key(1))
    assert grant is not None
    assert grant.victim is not None  # the old entry behind the link
    with pytest.raises(TierError, match="could not store"):
        tier.write(grant, block(key(1)))
    tier.close()
    assert len(list((tmp_path / "moved").iterdir())) == 1


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777])
def test_a_directory_that_other_users_may_write_is_refused(made: Path, inner: bool, mode: int) -> None:
    directory = file_of(made, key(1)).parent if inner else made
    directory.chmod(mode)
    before = snapshot(made)
    with pytest.raises(ConfigError, match=f"{directory} has mode {mode:04o}.*: .*chmod -R go-w {directory}"):
        open_tier(made)
    assert snapshot(made) == before
    directory.chmod(0o755)
    assert holds(open_tier(made), key(1))


def test_directory_of_another_user_is_refused(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, user = snapshot(made), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {user}, but this process runs as user {user + 1}: .*chown"):
        open_tier(made)
    assert snapshot(made) == before


def test_the_path_may_be_a_link_to_the_directory(made: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(made)
    tier = open_tier(tmp_path / "link")
    assert holds(tier, key(1))
    with pytest.raises(ConfigError, match="is in use by"):
        open_tier(made)


def test_a_second_engine_is_refused_even_if_the_lock_file_was_deleted(made: Path) -> None:
    first = open_tier(made)
    (made / "sidestream-tier.lock").unlink()
    with pytest.raises(ConfigError, match="is in use by another process"):
        open_tier(made)
    store(first, key(4))
    assert holds(first, key(4))


def test_a_file_with_the_largest_serial_number_is_ignored(made: Path) -> None:
    path = file_of(made, key(1))
    path.rename(path.with_name(f"{key(1).hex()}-{'f' * 16}"))
    tier = open_tier(made)
    assert sorted(tier.index) == sorted(keys(2, 3))
    store(tier, *keys(1, 4))
    tier.close()
    assert sorted(open_tier(made).index) == sorted(keys(1, 2, 3, 4))


# ---------------------------------------------------------------------- its loss


def removed(path: Path) -> None:
    shutil.rmtree(path)


def emptied(path: Path) -> None:
    for inner in list(path.iterdir()):
        shutil.rmtree(inner) if inner.is_dir() else inner.unlink()


def renamed(path: Path) -> None:
    path.rename(path.with_name("renamed"))


def replaced(path: Path) -> None:
    renamed(path)
    path.mkdir(0o700)


LOSSES: list[Callable[[Path], None]] = [removed, emptied, renamed, replaced]


def fails_to_write(tier: DiskTier, number: int) -> str:
    """The message of the TierLost that a write raises."""
    grant = tier.index.reserve(key(number))
    assert grant is not None
    with pytest.raises(TierLost) as caught:
        tier.write(grant, block(key(number)))
    tier.index.abandon(grant)
    return str(caught.value)


@pytest.mark.parametrize("lose", LOSSES)
def test_a_write_notices_a_lost_directory_and_creates_it_again_locked(
    made: Path, lose: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier(made, max_entries=4)
    lose(made)
    with caplog.at_level(logging.WARNING):
        assert "was removed or replaced while in use: it was made anew, empty" in fails_to_write(tier, 4)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    tier.index.clear()
    store(tier, *keys(1, 5, 6, 7, 8))
    assert all(holds(tier, one) for one in keys(5, 6, 7, 8))
    assert len(entry_files(made)) == 4
    with pytest.raises(ConfigError, match=f"is in use by process {os.getpid()}"):
        open_tier(made)
    tier.close()
    again = open_tier(made)
    assert sorted(again.index) == sorted(keys(5, 6, 7, 8))


@pytest.mark.parametrize("lose", [removed, emptied])
def test_a_read_notices_a_lost_directory(made: Path, lose: Callable[[Path], None]) -> None:
    tier = open_tier(made)
    lose(made)
    with pytest.raises(TierLost, match="was removed or replaced while in use"):
        load(tier, key(1))


def test_engine_of_a_lost_directory_shares_nothing_with_the_new_owner_of_the_path(made: Path) -> None:
    first = open_tier(made)
    entry = entry_of(first, key(1))
    removed(made)
    second = open_tier(made)
    store(second, *keys(1, 2))
    before = snapshot(made)
    assert "cannot be made anew: disk directory" in (message := fails_to_write(first, 4))
    assert "is in use by process" in message
    with pytest.raises(TierLost):
        load(first, key(1))
    first.index.drop([key(1)])
    assert entry_of(second, key(1)) == entry  # the same name
    second.close()
    assert "holds files of another engine" in fails_to_write(first, 4)
    first.close()  # deletes the dropped entry, of its own directory
    assert snapshot(made) == before
    assert holds(open_tier(made), key(1))


def test_two_engines_never_share_a_directory_created_again(made: Path) -> None:
    first = open_tier(made)
    removed(made)
    second = open_tier(made)
    removed(made)
    assert "made anew" in fails_to_write(second, 4)
    assert "is in use by process" in fails_to_write(first, 4)
    second.close()
    removed(made)
    assert "it was made anew" in fails_to_write(first, 4)
    first.index.clear()
    store(first, key(4))
    assert holds(first, key(4))


def test_a_directory_that_cannot_be_read_is_an_error_and_not_lost(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(made)
    stat = os.stat

    def refuse(path: object, **options: object) -> object:
        if str(path) == str(made):
            raise PermissionError(13, "Permission denied")
        return stat(path, **options)  # type: ignore[arg-type, call-overload]

    grant = tier.index.reserve(key(4))
    assert grant is not None
    with monkeypatch.context() as patch, pytest.raises(TierError, match="Permission denied") as caught:
        patch.setattr(os, "stat", refuse)
        tier.write(grant, block(key(4)))
    assert not isinstance(caught.value, TierLost)
    tier.index.abandon(grant)
    assert holds(tier, key(1))


def test_close_after_losing_the_directory_reports_that_no_block_is_left(
    made: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier(made)
    removed(made)
    with caplog.at_level(logging.INFO):
        tier.close()
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "closed, but its directory was removed or replaced: no block is left"
    ]


@pytest.mark.parametrize("by", ["write", "read"])
def test_a_lost_directory_drops_all_entries_until_the_next_write(
    disk_rig: transfer_rig.Rig, tmp_path: Path, by: str
) -> None:
    rig = disk_rig
    assert rig.disk is not None
    rig.on_disk_only(transfer_rig.keys("a", "b"))
    assert (rig.transfers.tier_faults, rig.metrics.value("tier_works", "disk")) == ([], 1)
    removed(tmp_path)
    if by == "read":
        rig.promote(transfer_rig.keys("a"))
        rig.finish("disk-read-0", "disk-read-1")
    else:
        rig.stored(transfer_rig.keys("c"))
    assert len(rig.disk.index) == 0
    (fault,) = rig.transfers.tier_faults
    assert f"disk directory {tmp_path} was removed or replaced" in fault
    assert rig.metrics.value("tier_works", "disk") == 0
    if by == "read":
        rig.stored(transfer_rig.keys("c"))
    rig.clock.now_s += PAUSE_S * 1.1
    rig.stored(transfer_rig.keys("d"))
    assert list(rig.disk.index) == [transfer_rig.key("d")]
    assert (rig.transfers.tier_faults, rig.metrics.value("tier_works", "disk")) == ([], 1)
    rig.on_disk_only(transfer_rig.keys("a"))
    rig.promote(transfer_rig.keys("a"))
    rig.finish("disk-read-0", "disk-read-1")
    assert rig.host_holds(transfer_rig.key("a"))
