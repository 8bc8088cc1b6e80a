"""Directories that the disk tier refuses: value, bound, remedy; nothing changed."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from disk_fixtures import ENTRY_BYTES, LAYOUT, failing_with, holds, key, open_tier, snapshot, store

from sidestream.errors import ConfigError
from sidestream_kv.offload.tiers import directory
from sidestream_kv.offload.tiers.directory import TierDirectory


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"block_tokens": 32},
            r"block_tokens 16 \(here 32\): give another directory, or delete it, "
            r"or load the model with block_tokens 16",
        ),
        (
            {"dtype": "float16"},
            r"dtype 'bfloat16' \(here 'float16'\): give another directory, or delete it, "
            r"or load the model with dtype bfloat16",
        ),
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
    with pytest.raises(
        ConfigError, match=r"fingerprint 'model-a' \(here 'model-b'\): give another directory, or delete it"
    ):
        open_tier(made, fingerprint="model-b", max_entries=1)
    assert snapshot(made) == before


def test_another_format_version_is_refused(made: Path) -> None:
    tier_file = made / "sidestream-tier.json"
    tier_file.write_text(json.dumps({"format_version": 1, "anything": "else"}))
    before = snapshot(made)
    remedy = rf"give another directory, or delete it \(sidestream cache clear {made}\)"
    with pytest.raises(ConfigError, match=rf"has format version 1, but this version of Sidestream uses 2: {remedy}"):
        open_tier(made)
    assert snapshot(made) == before


@pytest.mark.parametrize("content", ["", "[]", '{"format_', "\xff", "[" * 20_000, "[" * 200_000])
def test_a_damaged_description_is_refused(made: Path, content: str) -> None:
    (made / "sidestream-tier.json").write_bytes(content.encode("latin-1"))
    before = snapshot(made)
    with pytest.raises(ConfigError, match="is damaged: delete the directory, or give another one"):
        open_tier(made)
    assert snapshot(made) == before


def test_a_capacity_below_one_entry_is_refused(made: Path) -> None:
    before = snapshot(made)
    with pytest.raises(
        ConfigError,
        match=f"disk_capacity is {ENTRY_BYTES - 1} bytes, but one block .* takes {ENTRY_BYTES} .*raise disk_capacity",
    ):
        open_tier(made, capacity_bytes=ENTRY_BYTES - 1)
    assert snapshot(made) == before


def test_a_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("draft 9")
    with pytest.raises(
        ConfigError, match=r"'thesis.tex' is one of 1\) and no sidestream-tier.json: give an empty or a new directory"
    ):
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


def test_a_directory_without_write_permission_is_refused_as_root_too(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(made)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != made)
    with pytest.raises(ConfigError, match="is not writable: give a directory that this user may write"):
        open_tier(made)
    assert snapshot(made) == before


def test_a_directory_that_is_set_up_for_too_long_is_refused(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "_PATIENCE_S", 0.05)
    with TierDirectory.open(made).locked(), pytest.raises(ConfigError, match="has been set up by another process"):
        open_tier(made)
    assert holds(open_tier(made), key(1))


@pytest.mark.parametrize("damage", [b"", b"SIDETAB\n", b"x" * 10_000])
def test_a_damaged_table_is_made_anew_without_entries(made: Path, damage: bytes) -> None:
    (made / "sidestream-tier.table").write_bytes(damage)
    tier = open_tier(made)
    assert len(tier.index) == 0
    store(tier, key(4))
    assert holds(tier, key(4))


def test_a_refused_open_releases_the_lock_on_the_directory(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing_with(errno.EIO))
        with pytest.raises(ConfigError, match="cannot be used: Input/output error"):
            open_tier(made)
    assert holds(open_tier(made), key(1))
