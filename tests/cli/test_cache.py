"""`sidestream cache`: what the directory of a disk tier holds, also while engines use it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from proof.disk_slots import DiskSlots
from sidestream.cli.app import app
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.offload.tiers import slots
from sidestream_kv.offload.tiers.disk import DiskTier, entry_bytes

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, block_tokens=16, dtype="bfloat16")


def run(*arguments: object, status: int = 0) -> Any:
    """The parsed output of a command with `--json`, or its text."""
    result = CliRunner().invoke(app, ["cache", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return json.loads(result.stdout) if "--json" in arguments else result.output


def tier_at(directory: Path, *keys: bytes, fingerprint: str = "model") -> DiskTier:
    capacity = 8 * entry_bytes(LAYOUT)
    tier = DiskTier.open(directory, layout=LAYOUT, fingerprint=fingerprint, capacity_bytes=capacity)
    for key in keys:
        grant = tier.index.reserve(key)
        assert grant is not None
        tier.write(grant, memoryview(bytes(LAYOUT.block_bytes)))
        tier.index.publish(grant)
    return tier


KEYS = [bytes([number]) * 16 for number in range(3)]


def test_directories_are_listed_while_engines_use_them(tmp_path: Path) -> None:
    tier = tier_at(tmp_path / "rank-0-of-2", *KEYS)
    tier_at(tmp_path / "rank-1-of-2", *KEYS[:2]).close()
    found = run("ls", tmp_path, "--json")["directories"]
    assert [(row["blocks"], row["in_use"]) for row in found] == [(3, True), (2, False)]
    assert "in use" in run("ls", tmp_path)
    assert run("stat", tmp_path / "rank-0-of-2", "--json")["capacity_blocks"] == 8
    assert "format_version: 2" in run("describe", tmp_path / "rank-0-of-2")
    tier.close()


@pytest.mark.parametrize("in_use", [True, False])
def test_a_directory_on_a_read_only_mount_is_inspected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_use: bool
) -> None:
    tier, opened = tier_at(tmp_path, *KEYS), os.open
    if not in_use:
        tier.close()
    DiskSlots(tmp_path).flip(KEYS[1])

    def refuse_writers(path: str, flags: int, *mode: int, dir_fd: int | None = None) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return opened(path, flags, *mode, dir_fd=dir_fd)

    with monkeypatch.context() as mount:
        mount.setattr(os, "open", refuse_writers)
        mount.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
        mount.setattr(os, "geteuid", lambda: 4711)  # nor does the directory belong to this user
        assert run("ls", tmp_path, "--json")["directories"][0]["in_use"] == in_use
        assert run("stat", tmp_path, "--json")["blocks"] == 3
        assert "fingerprint: model" in run("describe", tmp_path)
        assert run("verify", tmp_path, "--json", status=1)["good"] == 2
        for command in ("verify --delete", "gc --keep=1", "clear"):
            result = CliRunner().invoke(app, ["cache", *command.split(), str(tmp_path)])
            assert "is not writable" in str(result.exception) + result.output
    assert len(DiskSlots(tmp_path).slots) == 3
    tier.close()


@pytest.mark.parametrize(
    ("error", "told"), [(errno.EIO, "slot 0 cannot be read: "), (errno.EACCES, "run the command as the user of")]
)
def test_a_verified_segment_that_cannot_be_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, told: str
) -> None:
    tier_at(tmp_path, *KEYS).close()

    def fail(*_: object) -> int:
        raise OSError(error, os.strerror(error))

    opened = slots.open_regular
    monkeypatch.setattr(
        slots, "open_regular", lambda name, *rest, **at: fail() if "segment" in name else opened(name, *rest, **at)
    )
    result = CliRunner().invoke(app, ["cache", "verify", str(tmp_path)])
    assert told in str(result.exception) + result.output


def test_damaged_blocks_are_found_and_removed_while_an_engine_uses_the_others(tmp_path: Path) -> None:
    tier = tier_at(tmp_path, *KEYS)
    assert run("verify", tmp_path, "--json") == {"good": 3, "faults": [], "skipped": 0}
    DiskSlots(tmp_path).flip(KEYS[1])
    assert "does not match its checksum" in run("verify", tmp_path, status=1)
    assert "1 damaged, removed" in run("verify", "--delete", tmp_path, status=1)
    assert run("verify", tmp_path, "--json")["good"] == 2
    tier.refresh()
    assert sorted(tier.index) == [KEYS[0], KEYS[2]]


def test_unused_blocks_are_deleted_while_an_engine_uses_the_others(tmp_path: Path) -> None:
    tier, most = tier_at(tmp_path, *KEYS), 8 * entry_bytes(LAYOUT)
    before = run("stat", tmp_path, "--json")["disk_bytes"]
    assert run("gc", tmp_path, "--unused-days", 1, "--keep", most, "--json")["directories"][0]["deleted"] == 0
    run("gc", tmp_path, "--keep", 2 * entry_bytes(LAYOUT))
    tier.refresh()
    assert sorted(tier.index) == KEYS[1:]  # the least recently used one is gone
    assert run("stat", tmp_path, "--json")["disk_bytes"] == before - entry_bytes(LAYOUT)
    lease = tier.index.pin([KEYS[2]])
    (found,) = run("gc", tmp_path, "--unused-days", 0, "--json")["directories"]
    assert (found["deleted"], found["kept"], found["in_use"]) == (1, 1, 1)
    lease.release()
    tier.refresh()
    assert sorted(tier.index) == KEYS[2:]
    for key in KEYS:  # and freed slots are written again
        if key not in tier.index:
            grant = tier.index.reserve(key)
            assert grant is not None
            tier.write(grant, memoryview(bytes(LAYOUT.block_bytes)))
            tier.index.publish(grant)
    assert run("verify", tmp_path, "--json")["good"] == 3
    tier.close()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((), "give --unused-days, --keep or both"),
        (("--unused-days", -1), "--unused-days is -1: give 0 to 36500"),
        (("--unused-days", "nan"), "--unused-days is nan"),
        (("--keep", "some"), "--keep is 'some'"),
    ],
)
def test_a_collection_without_a_bound_or_with_a_wrong_one_is_refused(
    options: tuple[object, ...], told: str, tmp_path: Path
) -> None:
    tier_at(tmp_path, *KEYS).close()
    result = CliRunner().invoke(app, ["cache", "gc", str(tmp_path), *map(str, options)])
    assert told in str(result.exception) + result.output
    assert run("stat", tmp_path, "--json")["blocks"] == 3


def test_a_directory_is_cleared_only_when_no_engine_uses_it(tmp_path: Path) -> None:
    tier = tier_at(tmp_path, *KEYS)
    (tmp_path / "notes.txt").write_text("mine")
    result = CliRunner().invoke(app, ["cache", "clear", str(tmp_path)])
    assert result.exit_code != 0
    assert len(DiskSlots(tmp_path).slots) == 3
    tier.close()
    run("clear", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_clear_takes_one_tier_or_its_ranks_and_not_every_tier_below(tmp_path: Path) -> None:
    for name in ("one", "two", "both/rank-0-of-2", "both/rank-1-of-2"):
        tier_at(tmp_path / name, *KEYS).close()
    result = CliRunner().invoke(app, ["cache", "clear", str(tmp_path)])
    assert result.exit_code != 0
    assert len(run("ls", tmp_path, "--json")["directories"]) == 4
    run("clear", tmp_path / "both")
    run("clear", tmp_path / "one")
    assert [each["path"] for each in run("ls", tmp_path, "--json")["directories"]] == [str(tmp_path / "two")]


def test_a_directory_of_format_version_1_is_cleared(tmp_path: Path) -> None:
    (tmp_path / "sidestream-tier.json").write_text('{"format_version": 1}')
    (tmp_path / "sidestream-tier.lock").write_text("4711")
    (tmp_path / "3f").mkdir()
    (tmp_path / "3f" / f"3f{'0' * 30}-{'0' * 16}").write_bytes(b"a block")
    (tmp_path / "notes").mkdir()
    assert "has format version 1" in run("ls", tmp_path, "--json")["directories"][0]["error"]
    run("clear", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_the_parts_that_keep_two_directories_from_sharing_are_printed(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    tier_at(one, *KEYS)
    tier_at(other, fingerprint="another")
    assert run("diff", one, other, "--json", status=1) == {"fingerprint": ["model", "another"]}
    assert "same model and layout" in run("diff", one, one)


@pytest.mark.parametrize("command", ["ls", "stat", "describe", "verify", "gc --keep=1", "clear"])
def test_a_directory_without_a_tier_is_refused(tmp_path: Path, command: str) -> None:
    result = CliRunner().invoke(app, ["cache", *command.split(), str(tmp_path)])
    assert result.exit_code != 0
    assert list(tmp_path.iterdir()) == []
