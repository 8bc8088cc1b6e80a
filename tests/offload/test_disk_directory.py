"""The directory of the disk tier: owners, permissions and links, and its loss while an engine uses it."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import transfer_rig
from disk_fixtures import block, entry_of, holds, key, keys, load, open_tier, records, snapshot, store

from sidestream.errors import ConfigError, TierError, TierLost
from sidestream_kv.offload.tier_io import PAUSE_S
from sidestream_kv.offload.tiers.disk import DiskTier, Medium

# ---------------------------------------------------------------------- whom the directory trusts


@pytest.mark.parametrize("name", ["sidestream-tier.json", "sidestream-tier.table"])
def test_a_link_as_a_tiers_own_file_is_refused_and_its_target_kept(made: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / "target"
    (made / name).rename(target)
    content = target.read_bytes()
    (made / name).symlink_to(target)
    with pytest.raises(ConfigError, match=rf"{name} is not a regular file"):
        open_tier(made)
    assert target.read_bytes() == content


@pytest.mark.parametrize("name", ["sidestream-tier.json.tmp"])
def test_a_link_under_a_temporary_name_is_replaced_and_keeps_its_target(tmp_path: Path, name: str) -> None:
    (tmp_path / "target").write_text("mine")
    (tmp_path / "tier").mkdir()
    (tmp_path / "tier" / name).symlink_to(tmp_path / "target")
    open_tier(tmp_path / "tier")
    assert (tmp_path / "target").read_text() == "mine"


@pytest.mark.parametrize("name", ["sidestream-tier.table", "segment-000000"])
def test_a_file_with_another_name_outside_is_not_written(made: Path, tmp_path: Path, name: str) -> None:
    (made / name).rename(tmp_path / "target")
    os.link(tmp_path / "target", made / name)
    content = (tmp_path / "target").read_bytes()
    with pytest.raises((ConfigError, TierError), match=rf"{name} is not a regular file"):
        store(open_tier(made), key(4))
    assert (tmp_path / "target").read_bytes() == content


def test_segment_that_becomes_a_link_is_not_followed(made: Path, tmp_path: Path) -> None:
    tier = open_tier(made)
    (made / "segment-000000").rename(tmp_path / "moved")
    (made / "segment-000000").symlink_to(tmp_path / "moved")
    before = (tmp_path / "moved").read_bytes()
    with pytest.raises(TierError, match="is not a regular file"):
        load(tier, key(1))
    grant = tier.index.reserve(key(4))
    assert grant is not None
    with pytest.raises(TierError, match="could not store"):
        tier.write(grant, block(key(4)))
    assert (tmp_path / "moved").read_bytes() == before


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777])
def test_a_directory_that_other_users_may_write_is_refused(made: Path, mode: int) -> None:
    made.chmod(mode)
    before = snapshot(made)
    with pytest.raises(ConfigError, match=f"{made} has mode {mode:04o}.*: .*chmod -R go-w {made}"):
        open_tier(made)
    assert snapshot(made) == before
    made.chmod(0o755)
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
    other = open_tier(made)
    store(tier, key(4))
    other.refresh()
    assert holds(other, key(4))


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


def test_a_directory_that_is_removed_while_it_is_opened_is_created_again(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_records = Medium.load

    def removing(medium: Medium) -> object:
        shutil.rmtree(made)
        monkeypatch.undo()
        return load_records(medium)

    monkeypatch.setattr(Medium, "load", removing)
    tier = open_tier(made)
    with pytest.raises(TierLost, match="it was made anew"):
        store(tier, key(4))


@pytest.mark.parametrize("lose", LOSSES)
def test_a_write_notices_a_lost_directory_and_creates_it_again(
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
    assert len(records(tier)) == 4
    tier.close()
    again = open_tier(made)
    assert sorted(again.index) == sorted(keys(5, 6, 7, 8))


@pytest.mark.parametrize("lose", [removed, emptied])
def test_a_read_notices_a_lost_directory(made: Path, lose: Callable[[Path], None]) -> None:
    tier = open_tier(made)
    lose(made)
    with pytest.raises(TierLost, match="was removed or replaced while in use"):
        load(tier, key(1))


def test_engine_of_a_lost_directory_joins_the_new_one_at_the_path(made: Path) -> None:
    first = open_tier(made)
    entry = entry_of(first, key(1))
    removed(made)
    second = open_tier(made)
    store(second, *keys(1, 2))
    with pytest.raises(TierLost):
        load(first, key(1))
    assert "made anew" in fails_to_write(first, 4)
    first.index.clear()
    first.refresh()
    assert entry_of(first, key(1)) == entry_of(second, key(1)) != entry
    assert holds(first, key(1))
    store(first, key(4))
    second.refresh()
    assert holds(second, key(4))
    third = open_tier(made)
    store(third, *keys(5))
    assert len({entry.serial for entry in records(third)}) == 4


def test_engine_of_a_lost_directory_does_not_use_that_of_another_model(made: Path) -> None:
    first = open_tier(made)
    removed(made)
    second = open_tier(made, fingerprint="model-b")
    store(second, key(1))
    before = snapshot(made)
    assert "cannot be made anew: disk directory" in (message := fails_to_write(first, 4))
    assert "was written by another model" in message
    first.close()  # deletes its dropped entries, of its own directory
    assert snapshot(made) == before
    second.close()
    removed(made)


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
        rig.disk._inner._medium.slots.segments._fds.clear()  # type: ignore[attr-defined]  # an open file is still read
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
