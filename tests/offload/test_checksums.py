"""Checksums of blocks in host memory: a block that changed there is not loaded; all others are."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from transfer_rig import LAYOUT, Rig, content, key, keys

from sidestream_kv.offload import pacing
from sidestream_kv.offload.connector import LoadFailed
from sidestream_kv.types import Key


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Device, host and disk; every block in host memory has a checksum."""
    rig = Rig(tmp_path, self_check=1.0)
    try:
        yield rig
    finally:
        rig.close()
    rig.check_nothing_is_held()


def flip(rig: Rig, of: Key) -> None:
    """Change the last byte of a block in host memory."""
    slot = rig.host.pool.get(of)
    assert slot is not None
    rig.host.slot(slot)[LAYOUT.block_bytes - 1] ^= 1


def compared(rig: Rig) -> tuple[int, int]:
    """Numbers of blocks that matched their checksums, and that did not."""
    match, mismatch = (rig.metrics.value("self_check_blocks_total", result) for result in ("match", "mismatch"))
    return int(match), int(mismatch)


def test_unchanged_blocks_are_loaded(rig: Rig) -> None:
    rig.stored(keys("a", "b"))
    lease = rig.blocks.take(2)
    rig.load(keys("a", "b"), lease.ids)
    assert rig.finish("load") == []
    assert [rig.block(block) for block in lease.ids] == [content(key(name)).tobytes() for name in "ab"]
    assert compared(rig) == (2, 0)
    rig.let_go(lease)


def test_a_block_with_a_flipped_bit_fails_its_load_and_is_counted(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.stored(keys("a", "b", "c"))
    flip(rig, key("b"))
    lease = rig.blocks.take(3)
    rig.rows()[lease.ids[1]] = 7
    rig.load(keys("a", "b", "c"), lease.ids)
    with caplog.at_level(logging.ERROR):
        assert rig.finish("load") == [LoadFailed(1, 0, "load_failed")]
    assert rig.ready == []
    assert (rig.rows()[lease.ids[1]] == 7).all()
    assert compared(rig) == (2, 1)
    assert rig.counted("load", "failed") == 1
    assert "1 of 3 blocks in host memory changed after they were stored" in caplog.text
    assert rig.transfers.locate(keys("b")) == []  # not on disk either: its entry may have the changed byte
    assert rig.transfers.locate(keys("a")) == rig.transfers.locate(keys("c")) == ["host"]
    rig.let_go(lease)
    rig.poll()
    assert rig.blocks.num_used == 0


def test_a_flipped_bit_in_a_later_piece_fails_the_load(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOAD_PIECE_BYTES", "LAST_PIECE_BYTES"):
        monkeypatch.setattr(pacing, name, 0)
    monkeypatch.setattr(pacing, "BLOCKS_PER_TURN", 1)
    rig.stored(keys("a", "b", "c"))
    flip(rig, key("c"))
    lease = rig.blocks.take(3)
    with rig.hold("load"):
        rig.load(keys("a", "b", "c"), lease.ids)
        assert rig.poll() == []
        fence = rig.transfers.transfers_fence()
        assert fence is not None and not fence.poll()
    assert rig.finish("load") == [LoadFailed(1, 0, "load_failed")]
    assert fence.poll()
    assert rig.ready == []
    rig.let_go(lease)


def test_the_checksum_of_a_slots_previous_block_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(num_slots=1, self_check=0.5)
    chances = iter((0.0, 0.9))
    monkeypatch.setattr(rig.transfers._worker._stores._context.checksums._random, "random", lambda: next(chances))
    rig.stored(keys("a"))
    rig.host.pool.forget_all()
    rig.stored(keys("b"))
    lease = rig.blocks.take(1)
    rig.load(keys("b"), lease.ids)
    assert rig.finish("load") == []
    assert compared(rig) == (0, 0)
    lease.release()
    rig.close()
    rig.check_nothing_is_held()


def test_a_block_that_was_read_from_disk_has_a_checksum(rig: Rig) -> None:
    rig.on_disk_only(keys("a"))
    rig.promote(keys("a"))
    rig.finish("disk-read-0", "disk-read-1")
    flip(rig, key("a"))
    lease = rig.blocks.take(1)
    rig.load(keys("a"), lease.ids)
    assert rig.finish("load") == [LoadFailed(1, 0, "load_failed")]
    assert compared(rig) == (0, 1)
    rig.let_go(lease)


def test_no_checksum_is_computed_without_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zlib, "crc32", lambda *_: pytest.fail("a checksum"))
    rig = Rig()
    rig.stored(keys("a"))
    lease = rig.blocks.take(1)
    rig.load(keys("a"), lease.ids)
    assert rig.finish("load") == []
    assert rig.metrics.value("self_check_seconds_total", "checksums") == 0
    lease.release()
    rig.close()
    rig.check_nothing_is_held()
