"""The tiers of one rank: its part of the bytes, and a directory that no other number of ranks can misread."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidestream.errors import ConfigError
from sidestream_kv.config import OffloadConfig
from sidestream_kv.offload.tiers.stack import share_of_rank


def test_each_rank_has_its_part(tmp_path: Path) -> None:
    config = OffloadConfig(host=4096, disk=tmp_path, disk_capacity=1 << 20)
    shares = [share_of_rank(config, rank, 2) for rank in range(2)]
    assert [share.host_bytes for share in shares] == [2048, 2048]
    assert len({share.disks for share in shares}) == 2
    assert share_of_rank(config, 0, 1) is config


def test_each_rank_has_a_part_of_each_disk(tmp_path: Path) -> None:
    share = share_of_rank(OffloadConfig(host=4096, disk=(tmp_path / "a", tmp_path / "b")), 1, 2)
    assert share.disks == (tmp_path / "a" / "rank-1-of-2", tmp_path / "b" / "rank-1-of-2")


def test_directory_of_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    config = OffloadConfig(host=4096, disk=tmp_path)
    share = share_of_rank(config, 1, 2)
    share.disks[0].mkdir(parents=True)
    share_of_rank(config, 0, 2)
    with pytest.raises(ConfigError, match="which 4 ranks cannot use"):
        share_of_rank(config, 0, 4)


def test_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    (tmp_path / "block").write_bytes(b"")
    with pytest.raises(ConfigError, match="block, which 2 ranks cannot use"):
        share_of_rank(OffloadConfig(host=4096, disk=tmp_path), 0, 2)
