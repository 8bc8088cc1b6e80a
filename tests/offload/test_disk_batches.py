"""Several blocks that a stream of the disk tier reads or writes at once: few system calls, and each fails alone."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from disk_fixtures import LAYOUT, block, entry_of, file_of, holds, key, keys, open_tier, records, slot_of, store
from test_disk_transfers import DONE, MISSED, READERS
from transfer_rig import Rig
from transfer_rig import keys as names

from proof import faults
from sidestream_kv.errors import TierCorrupt, TierError, TierFull
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.offload.tiers import disk
from sidestream_kv.offload.tiers.base import TierStreams, batch_blocks
from sidestream_kv.offload.tiers.disk import HEADER_BYTES, DiskTier
from sidestream_kv.offload.tiers.index import Entry
from sidestream_kv.offload.tiers.slots import SlotLocks
from sidestream_kv.types import Key

SLOT_BYTES = HEADER_BYTES + LAYOUT.block_bytes
FIVE = keys(1, 2, 3, 4, 5)


def write_all(tier: DiskTier, wanted: Sequence[Key]) -> list[TierError | None]:
    """Write blocks at once, and publish those that were written."""
    grants = [grant for one in wanted if (grant := tier.index.reserve(one)) is not None]
    failures = tier.write_all(grants, [block(grant.entry.key) for grant in grants])
    for grant, failure in zip(grants, failures, strict=True):
        assert grant.written == (failure is None)
        tier.index.publish(grant) if grant.written else tier.index.abandon(grant)
    return failures


def read_all(tier: DiskTier, entries: Sequence[Entry]) -> list[type | bool]:
    """For each entry, the class of its failure, or whether its own bytes arrived."""
    outs = [np.zeros(LAYOUT.block_bytes, np.uint8) for _ in entries]
    failures = tier.read_all(entries, outs)
    return [
        bool((out == block(entry.key)).all()) if failure is None else type(failure)
        for entry, out, failure in zip(entries, outs, failures, strict=True)
    ]


def entries_of(tier: DiskTier, wanted: Sequence[Key]) -> list[Entry]:
    return [entry_of(tier, one) for one in wanted]


def counted(patch: pytest.MonkeyPatch, *calls: str) -> list[str]:
    """The names of the system calls that are made from now on."""
    made: list[str] = []

    def count(name: str, call: Callable[..., int]) -> Callable[..., int]:
        def counting(*arguments: object) -> int:
            made.append(name)
            return call(*arguments)

        return counting

    for name in calls:
        patch.setattr(os, name, count(name, getattr(os, name)))
    return made


def failing_at(slot: int, call: Callable[..., int]) -> Callable[..., int]:
    """A read or write that fails if it touches the slot of the first segment."""

    def fail(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset <= slot * SLOT_BYTES < offset + sum(buffer.nbytes for buffer in buffers):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call(fd, buffers, offset)

    return fail


def test_a_batch_of_blocks_takes_one_read_and_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(tmp_path)
    made = counted(monkeypatch, "pwritev", "preadv")
    assert write_all(tier, FIVE) == [None] * 5
    assert made.count("pwritev") == 1
    made.clear()
    assert read_all(tier, entries_of(tier, FIVE)[::-1]) == [True] * 5
    assert made == ["preadv"]
    tier.close()
    again = open_tier(tmp_path)
    assert all(holds(again, one) for one in FIVE)


def test_a_batch_in_place_of_others_takes_their_slots(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, max_entries=5)
    store(tier, *FIVE)
    assert write_all(tier, keys(6, 7, 8)) == [None] * 3
    assert sorted(tier.index) == sorted(keys(4, 5, 6, 7, 8)) == sorted(entry.key for entry in records(tier))
    assert [slot_of(tier, entry) for entry in entries_of(tier, keys(6, 7, 8))] == [0, 1, 2]


def test_the_last_blocks_of_a_batch_are_evicted_first_after_a_restart(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, max_entries=5)
    write_all(tier, FIVE)
    tier.close()
    tier = open_tier(tmp_path, max_entries=4)
    assert sorted(tier.index) == sorted(FIVE[:4])
    store(tier, key(6))
    assert sorted(tier.index) == sorted([*FIVE[:3], key(6)])


def test_no_read_or_write_of_a_batch_crosses_the_end_of_a_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "SEGMENT_BYTES", 2 * SLOT_BYTES)
    tier = open_tier(tmp_path, max_entries=6)
    assert write_all(tier, FIVE) == [None] * 5
    assert read_all(tier, entries_of(tier, FIVE)) == [True] * 5
    assert [path.stat().st_size for path in sorted(tmp_path.glob("segment-*"))] == [2 * SLOT_BYTES] * 3


def test_blocks_of_a_batch_that_are_no_whole_pages_do_not_touch(tmp_path: Path) -> None:
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=10, block_tokens=3, dtype="bfloat16")
    tier = open_tier(tmp_path, layout=layout)
    blocks = [np.full(layout.block_bytes, number, np.uint8) for number in range(4)]
    grants = [grant for one in FIVE[:4] if (grant := tier.index.reserve(one)) is not None]
    assert tier.write_all(grants, blocks) == [None] * 4
    outs = [np.zeros(layout.block_bytes, np.uint8) for _ in blocks]
    assert tier.read_all([grant.entry for grant in grants], outs) == [None] * 4
    assert np.array_equal(outs, blocks)


@pytest.mark.parametrize("damage", ["flipped", "gone", "unreadable", "overwritten", "cut short"])
def test_a_bad_block_of_a_batch_is_one_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    tier = open_tier(tmp_path)
    write_all(tier, FIVE)
    entries = entries_of(tier, FIVE)
    path, start = file_of(tmp_path, tier, entries[4 if damage == "cut short" else 2])
    if damage == "flipped":
        content = bytearray(path.read_bytes())
        content[start + HEADER_BYTES] ^= 1
        path.write_bytes(content)
    elif damage == "gone":
        tier._medium.delete(entries[2])
    elif damage == "unreadable":
        monkeypatch.setattr(os, "preadv", failing_at(2, os.preadv))
    elif damage == "overwritten":
        other = open_tier(tmp_path)
        other.index.drop([key(3)])
        store(other, key(9))
    else:
        os.truncate(path, start + HEADER_BYTES)
    expected: list[type | bool] = [True] * 5
    expected[4 if damage == "cut short" else 2] = TierError if damage == "unreadable" else TierCorrupt
    assert read_all(tier, entries) == expected
    assert tier._medium._locks._readers == {}


def test_a_slot_that_cannot_be_written_fails_one_block_of_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", failing_at(2, os.pwritev))
        failures = write_all(tier, FIVE)
    assert [type(failure) for failure in failures] == [*[type(None)] * 2, TierError, *[type(None)] * 2]
    assert sorted(entry.key for entry in records(tier)) == sorted(keys(1, 2, 4, 5))
    assert tier._medium._locks._readers == {}
    assert write_all(tier, [key(3)]) == [None]
    assert all(holds(tier, one) for one in FIVE)


def test_records_of_a_batch_are_valid_only_while_its_slots_are_complete_H7(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwritev, seen = os.pwritev, set[tuple[Key, ...]]()
    tier = open_tier(tmp_path, max_entries=4)
    tier._medium.slots.segments.direct = False  # direct I/O, which blocks in aligned memory get, has no parts of a page
    store(tier, *keys(1, 2, 3, 4))

    def write_slowly(fd: int, buffers: list[memoryview], offset: int) -> int:
        seen.add(tuple(entry.key for entry in records(tier)))
        return pwritev(fd, [buffers[0][:1500]], offset)

    monkeypatch.setattr(os, "pwritev", write_slowly)
    write_all(tier, keys(5, 6, 7))
    assert seen == {(key(4),)}
    assert {entry.key for entry in records(tier)} == set(keys(4, 5, 6, 7))


def test_a_batch_leaves_slots_alone_that_another_engine_leases(tmp_path: Path) -> None:
    one, other = open_tier(tmp_path, max_entries=5), open_tier(tmp_path, max_entries=5)
    store(one, *FIVE)
    other.refresh()
    lease = other.index.pin([key(2)])
    one.index.drop(keys(1, 2, 3))  # the victims of the batch
    assert write_all(one, keys(6, 7, 8)) == [None] * 3
    assert read_all(other, lease.entries) == [True]
    assert {entry.key for entry in records(one)} == {*keys(2, 6, 7, 8, 5)}  # in place of the oldest one
    assert all(holds(one, wanted) for wanted in keys(6, 7, 8))


def test_blocks_that_find_no_slot_fail_and_the_others_of_their_batch_are_written(tmp_path: Path) -> None:
    one, other = open_tier(tmp_path, max_entries=3), open_tier(tmp_path, max_entries=3)
    store(one, *keys(1, 2, 3))
    other.refresh()
    other.index.pin(keys(1, 3))
    failures = write_all(one, keys(4, 5, 6))
    assert [type(failure) for failure in failures] == [type(None), TierFull, TierFull]
    assert {entry.key for entry in records(one)} == {*keys(1, 3, 4)}


def test_slots_are_leased_all_together_or_not_at_all(tmp_path: Path) -> None:
    tables = [open_tier(tmp_path)._medium._table for _ in range(2)]
    one, other = (SlotLocks(table.fd) for table in tables)
    assert other.own(3)
    assert not one.share(2, 3)
    assert not one.own(1, 3)
    assert other.share(1) and other.share(5)
    assert one.share(1, 2)  # a lease of both, beside the other's of the first
    assert one.share(2)
    one.release(1, 2)
    assert not other.own(2)
    one.release(2)
    assert other.own(2)
    assert not other.share(2, 2)  # its own write


def test_batches_are_of_small_blocks_of_one_rank_only(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    sizes = {64 << 10: 32, 128 << 10: 16, 1 << 20: 2, (1 << 20) + 1: 1, 4 << 20: 1, 1024: 64}
    assert {size: batch_blocks(tier, size) for size in sizes} == sizes
    ranked = DiskTier.open(tmp_path / "rank", layout=LAYOUT, fingerprint="a", capacity_bytes=1 << 20, batches=False)
    assert batch_blocks(ranked, 1024) == 1


# ---------------------------------------------------------------------- by the offload worker


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """A disk whose stream reads and writes four blocks at once."""
    batch_bytes = 4 * Rig().host.layout.block_bytes
    rig = Rig(tmp_path, disk_streams=TierStreams(readers=2, batch_bytes=batch_bytes))
    yield rig
    rig.close()
    rig.check_nothing_is_held()


A_TO_F = names(*"abcdef")


def test_blocks_of_a_store_are_written_at_once_and_found_after_their_fence(rig: Rig) -> None:
    assert rig.disk is not None
    with rig.hold("disk-write-0"):
        rig.store(names(*"abcd"), range(4))
        rig.finish("compute", "store")
        assert len(rig.disk.index) == 0
        assert len(list(rig.transfers._worker._io["disk"].awaited())) == 1
    rig.finish("disk-write-0")
    assert sorted(rig.disk.index) == sorted(names(*"abcd"))


def test_a_failed_write_of_a_batch_leaves_the_other_entries(rig: Rig) -> None:
    assert rig.disk is not None
    rig.disk.on_write = faults.flapping(faults.healthy, faults.broken, faults.healthy)
    rig.stored(names(*"abc"))
    assert sorted(rig.disk.index) == sorted(names("a", "c"))
    assert rig.counted("disk-write", "failed") == 1


def test_a_promotion_reads_batches_on_all_streams(rig: Rig) -> None:
    rig.on_disk_only(names(*"abcd"))
    rig.stored(names("e", "f"))
    rig.host.pool.forget_all()
    with rig.hold("disk-read-0"), rig.hold("disk-read-1"):
        rig.promote(A_TO_F)
        rig.poll()
        assert len(set(rig.transfers._worker._io["disk"].awaited())) == 2
    assert rig.finish(*READERS) == [DONE]
    assert all(rig.host_holds(one) for one in A_TO_F)


def test_a_damaged_block_of_a_batch_is_a_miss_and_the_others_are_found(rig: Rig) -> None:
    assert rig.disk is not None
    rig.on_disk_only(names(*"abcd"))
    rig.disk.on_read = faults.flapping(faults.healthy, faults.torn, faults.healthy, faults.healthy)
    rig.promote(names(*"abcd"))
    assert rig.finish(*READERS) == [MISSED]
    assert [rig.host_holds(one) for one in names(*"abcd")] == [True, False, True, True]
    assert names("b")[0] not in rig.disk.index


def test_a_promotion_reads_as_many_blocks_at_once_as_there_are_slots(rig: Rig) -> None:
    rig.stored(names(*"abcd"))
    rig.stored(names("e", "f"))
    rig.host.pool.forget_all()
    busy = rig.host.pool.take(5)
    rig.promote(A_TO_F)
    rig.finish(*READERS)
    assert [rig.host_holds(one) for one in A_TO_F] == [True] * 3 + [False] * 3
    busy.release()


def test_a_key_that_is_wanted_twice_is_read_once(rig: Rig) -> None:
    assert rig.disk is not None
    rig.on_disk_only(names("a"))
    rig.promote(names("a", "a"))
    assert rig.finish(*READERS) == [DONE]
    assert rig.disk.reads == [*names("a")]
