"""Host to disk and back: publish last (H7), failures leave no entry (H9), waits are bounded, and late reads write only
their own slots (H6, H10).
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_fixtures import entry_of, file_of
from transfer_rig import DEADLINE_S, LAYOUT, Rig, content, key, keys

from proof import faults
from proof.disk_slots import DiskSlots
from sidestream.errors import TierError
from sidestream_kv.offload.tickets import Promoted
from sidestream_kv.offload.tier_io import PAUSE_S
from sidestream_kv.offload.tiers.base import Block
from sidestream_kv.offload.tiers.disk import DiskTier, entry_bytes
from sidestream_kv.types import LoadPlan, PromotePlan, StorePlan

READERS = ("disk-read-0", "disk-read-1")
DONE, MISSED = (Promoted(1, 0, True, "done"), Promoted(1, 0, False, "failed"))


# ------------------------------------------------------------------ write


def test_stored_blocks_are_written_to_disk_and_read_back_byte_for_byte(disk_rig: Rig) -> None:
    wanted = keys("a", "b", "c")
    disk_rig.on_disk_only(wanted)
    disk_rig.host.memory.data.zero_()
    disk_rig.promote(wanted)
    assert disk_rig.finish(*READERS) == [DONE]
    assert all(disk_rig.host_holds(of) for of in wanted)
    for kind in ("disk-write", "disk-read"):
        assert disk_rig.metrics.value("transfer_bytes_total", kind) == 3 * LAYOUT.block_bytes


def test_a_key_is_found_on_disk_only_after_its_write(disk_rig: Rig) -> None:  # H7
    gate = threading.Event()
    assert disk_rig.disk is not None
    disk_rig.disk.on_write = faults.late(gate)  # the file is there, the fence is not
    lease, wanted = disk_rig.blocks.take(1), keys("a")
    disk_rig.store(wanted, lease.ids, disk_rig.fill(lease.ids, wanted))
    disk_rig.finish("compute", "store")
    assert key("a") not in disk_rig.disk.index
    assert disk_rig.host.pool.num_used == 1  # the write leases the slot that it reads
    disk_rig.poll()
    assert key("a") not in disk_rig.disk.index
    gate.set()
    disk_rig.finish("disk-write-0")
    assert key("a") in disk_rig.disk.index
    assert disk_rig.host.pool.num_used == 0
    lease.release()


def test_a_host_slot_is_not_reused_while_it_is_written_to_disk(disk_rig: Rig) -> None:
    wanted = keys(*range(8))
    with disk_rig.hold("disk-write-0"):
        lease = disk_rig.blocks.take(8)
        disk_rig.store(wanted, lease.ids, disk_rig.fill(lease.ids, wanted))
        disk_rig.finish("compute", "store")
        assert (
            disk_rig.host.pool.num_used == 4
        )  # a slow disk holds half of the slots at most; the other blocks stay off it
        assert disk_rig.counted("disk-write", "skipped") == 4
        other = disk_rig.blocks.take(8)
        disk_rig.store(keys(*"uvwxy"), other.ids[:5], disk_rig.fill(other.ids[:5], keys(*"uvwxy")))
        disk_rig.finish("compute", "store")
        assert disk_rig.counted("store", "skipped") == 1
    disk_rig.finish("disk-write-0")
    disk_rig.host.pool.forget_all()
    disk_rig.promote(wanted[:4])
    assert disk_rig.finish(*READERS) == [DONE]
    assert all(disk_rig.host_holds(of) for of in wanted[:4])
    lease.release()
    other.release()


def test_a_disk_error_leaves_no_entry_pauses_writes_and_is_counted(disk_rig: Rig) -> None:  # H9
    assert disk_rig.disk is not None
    for fault in (faults.full, faults.broken):
        disk_rig.disk.on_write = fault
        disk_rig.stored([key(fault)])
        assert disk_rig.transfers.locate([key(fault)]) == ["host"]  # serving goes on
        assert key(fault) not in disk_rig.disk.index
        disk_rig.disk.on_write = faults.healthy
        disk_rig.clock.now_s += PAUSE_S * 0.9
        disk_rig.stored([key("during the pause")])
        disk_rig.clock.now_s += PAUSE_S * 0.2
        disk_rig.host.pool.forget_all()
    assert len(disk_rig.disk.index) == 0
    assert disk_rig.counted("disk-write", "failed") == 2
    assert disk_rig.counted("disk-write", "skipped") == 2
    disk_rig.stored(keys("after the pause"))
    assert key("after the pause") in disk_rig.disk.index


def _writes_nothing(proceed: Callable[[], None], block: Block) -> None:
    """A write that ends without an error and without its entry."""


def _writes_and_fails(proceed: Callable[[], None], block: Block) -> None:
    proceed()
    raise TierError("injected: the medium is gone")


@pytest.mark.parametrize("fault", [_writes_nothing, _writes_and_fails])
def test_a_failed_or_missing_write_publishes_no_disk_entry(disk_rig: Rig, fault: faults.Fault) -> None:
    assert disk_rig.disk is not None
    disk_rig.disk.on_write = fault
    disk_rig.stored(keys("a"))
    assert key("a") not in disk_rig.disk.index
    disk_rig.disk.on_write = faults.healthy
    disk_rig.clock.now_s += PAUSE_S * 1.1
    disk_rig.stored(keys("b"))
    assert key("b") in disk_rig.disk.index


def test_a_write_to_a_disk_full_of_pinned_entries_is_skipped_and_counted(tmp_path: Path) -> None:
    rig = Rig(tmp_path, disk_blocks=1)
    assert rig.disk is not None
    rig.on_disk_only(keys("a"))
    with rig.hold("disk-read-0"):
        rig.promote(keys("a"))
        rig.stored(keys("b"))
        assert rig.counted("disk-write", "full") == 1
        assert rig.transfers.locate(keys("b")) == ["host"]
    assert rig.finish(*READERS) == [DONE]
    rig.close()
    rig.check_nothing_is_held()


def test_a_disk_entry_is_not_evicted_while_it_is_read(tmp_path: Path) -> None:
    rig = Rig(tmp_path, disk_blocks=2)
    assert rig.disk is not None
    rig.on_disk_only(keys("a", "b"))
    with rig.hold("disk-read-0"):
        rig.promote(keys("b"))
        rig.stored(keys("c", "d"))
    assert rig.finish(*READERS) == [DONE]
    assert rig.host_holds(key("b"))
    assert key("b") in rig.disk.index
    rig.close()
    rig.check_nothing_is_held()


# ------------------------------------------------------------------ read


def test_a_key_is_found_in_the_host_tier_only_after_its_disk_read(disk_rig: Rig) -> None:  # H7
    gate = threading.Event()
    assert disk_rig.disk is not None
    disk_rig.on_disk_only(keys("a"))
    disk_rig.disk.on_read = faults.late(gate)
    disk_rig.promote(keys("a"))
    assert disk_rig.poll() == []
    assert disk_rig.transfers.locate(keys("a")) == ["disk"]
    assert disk_rig.transfers.has_waiters
    gate.set()
    assert disk_rig.finish(*READERS) == [DONE]
    assert disk_rig.transfers.locate(keys("a")) == ["host"]
    assert not disk_rig.transfers.has_waiters


def test_a_promotion_is_reported_only_once_its_blocks_are_found(disk_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    disk_rig.on_disk_only(keys("a"))
    hold = disk_rig.hold("disk-read-0")
    disk_rig.promote(keys("a"))
    worker = disk_rig.transfers._worker
    finish_reads = worker._promotions.finish_reads

    def finish_reads_just_too_early() -> None:
        finish_reads()
        hold.release()
        for name in READERS:
            disk_rig.pass_through(name)

    monkeypatch.setattr(worker._promotions, "finish_reads", finish_reads_just_too_early)
    worker.turn()
    assert disk_rig.transfers.poll() == []
    worker.turn()
    assert disk_rig.transfers.poll() == [DONE]
    assert disk_rig.transfers.locate(keys("a")) == ["host"]


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_a_damaged_disk_entry_is_a_miss_and_is_dropped(disk_rig: Rig, tmp_path: Path, damage: str) -> None:  # H9
    assert disk_rig.disk is not None
    disk_rig.on_disk_only(keys("a"))
    tier = disk_rig.disk._inner
    assert isinstance(tier, DiskTier)
    entry = entry_of(tier, key("a"))
    DiskSlots(tmp_path).flip(key("a"))
    if damage == "cut":
        path, start = file_of(tmp_path, tier, entry)
        os.truncate(path, start + 10)
    elif damage == "gone":
        tier._medium.delete(entry)
    disk_rig.promote(keys("a"))
    assert disk_rig.finish(*READERS) == [MISSED]
    assert disk_rig.transfers.locate(keys("a")) == []
    assert (disk_rig.disk.index.stats.corrupt, disk_rig.host.pool.num_keys, disk_rig.host.pool.num_free) == (1, 0, 8)
    disk_rig.stored(keys("a"))  # recomputed: it is written anew
    assert disk_rig.transfers.locate(keys("a")) == ["host"]
    assert key("a") in disk_rig.disk.index


@pytest.mark.parametrize("fault", [faults.broken, faults.torn])
def test_an_unreadable_disk_entry_is_a_miss_for_all_waiting_requests(disk_rig: Rig, fault: faults.Fault) -> None:
    assert disk_rig.disk is not None
    disk_rig.on_disk_only(keys("a", "b"))
    disk_rig.disk.on_read = faults.flapping(faults.healthy, fault)
    with disk_rig.hold("disk-read-1"):
        disk_rig.promote(keys("a"))
        disk_rig.drain("disk-read-0")
        disk_rig.promote(keys("a", "b"))
        disk_rig.promote(keys("a", "b"), request_id=2)
    assert set(disk_rig.finish(*READERS)) == {DONE, MISSED, Promoted(2, 0, False, "failed")}
    assert disk_rig.transfers.locate(keys("a", "b")) == ["host"]
    assert key("b") not in disk_rig.disk.index
    assert disk_rig.host_holds(key("a"))


def test_requests_that_share_blocks_read_each_block_from_disk_once(disk_rig: Rig) -> None:
    assert disk_rig.disk is not None
    disk_rig.on_disk_only(keys("a", "b", "c"))
    with disk_rig.hold("disk-read-0"), disk_rig.hold("disk-read-1"):
        disk_rig.transfers.submit([PromotePlan(1, 0, keys("a", "b")), PromotePlan(2, 0, keys("a", "b", "c"))])
        disk_rig.poll()
        disk_rig.promote(keys("a"), request_id=3, epoch=4)
    assert set(disk_rig.finish(*READERS)) == {DONE, Promoted(2, 0, True, "done"), Promoted(3, 4, True, "done")}
    assert sorted(disk_rig.disk.reads) == sorted(keys("a", "b", "c"))


def test_a_promotion_is_cut_if_the_host_tier_is_full(disk_rig: Rig) -> None:
    disk_rig.on_disk_only(keys("a", "b", "c"))
    busy = disk_rig.host.pool.take(6)
    disk_rig.promote(keys("a", "b", "c"))
    assert disk_rig.finish(*READERS) == [Promoted(1, 0, False, "no_room")]
    assert disk_rig.transfers.locate(keys("a", "b", "c")) == ["host", "host", "disk"]
    busy.release()


def test_a_promotion_does_not_evict_its_own_blocks_from_host_memory(disk_rig: Rig) -> None:
    disk_rig.on_disk_only(keys("b"))
    disk_rig.stored(keys("a"))
    disk_rig.stored(keys(*range(7)))  # the host tier is full, and "a" is the least recently used
    disk_rig.promote(keys("a", "b"))
    assert disk_rig.finish(*READERS) == [DONE]
    assert disk_rig.transfers.locate(keys("a", "b")) == ["host", "host"]


def test_promotions_of_one_step_do_not_evict_each_others_blocks(disk_rig: Rig) -> None:
    disk_rig.on_disk_only(keys("b", "d"))
    disk_rig.stored(keys("a", "c", *range(6)))
    for unwanted in keys(*range(6)):  # only "a" and "c" could be evicted
        slot = disk_rig.host.pool.get(unwanted)
        assert slot is not None
        disk_rig.host.pool.share([slot])
    with disk_rig.hold("disk-read-0"), disk_rig.hold("disk-read-1"):
        disk_rig.transfers.submit([PromotePlan(1, 0, keys("a", "b")), PromotePlan(2, 0, keys("c", "d"))])
    assert disk_rig.finish(*READERS) == [Promoted(1, 0, False, "no_room"), Promoted(2, 0, False, "no_room")]
    assert disk_rig.transfers.locate(keys("a")) == disk_rig.transfers.locate(keys("c")) == ["host"]
    disk_rig.host.pool._release([disk_rig.host.pool.match([of])[0] for of in keys(*range(6))], ())


def test_a_promoted_block_is_not_evicted_before_the_whole_promotion_ends(disk_rig: Rig) -> None:
    disk_rig.on_disk_only(keys("a", "b"))
    with disk_rig.hold("disk-read-1"):
        disk_rig.promote(keys("a", "b"))
        assert disk_rig.finish("disk-read-0") == []  # "a" is there, "b" is not
        disk_rig.stored(keys(*range(8)))  # takes every slot that it can get
        assert disk_rig.host_holds(key("a"))
    assert disk_rig.finish(*READERS) == [DONE]
    assert disk_rig.transfers.locate(keys("a", "b")) == ["host", "host"]


# ------------------------------------------------------------------ deadline


def test_a_late_read_keeps_its_slot_past_the_deadline_and_is_published(disk_rig: Rig) -> None:  # H6, H10
    gate = threading.Event()
    assert disk_rig.disk is not None
    disk_rig.on_disk_only(keys("late"))
    disk_rig.disk.on_read = faults.slow(gate)
    disk_rig.promote(keys("late"))
    disk_rig.clock.now_s += DEADLINE_S * 0.99
    assert disk_rig.poll() == []
    disk_rig.clock.now_s += DEADLINE_S * 0.02
    assert disk_rig.poll() == [Promoted(1, 0, False, "deadline")]
    assert disk_rig.poll() == []
    assert not disk_rig.transfers.has_waiters
    assert disk_rig.host.pool.num_used == 1  # the read will still write there

    disk_rig.stored(keys(*range(7)))  # all other slots change hands meanwhile
    disk_rig.stored(keys(*range(10, 17)))
    assert disk_rig.transfers.locate(keys("late")) == ["disk"]
    gate.set()
    assert disk_rig.finish(*READERS) == []
    assert disk_rig.host_holds(key("late"))
    assert all(disk_rig.host_holds(of) for of in keys(*range(10, 17)))


def test_a_promotion_after_a_missed_deadline_joins_the_running_read(disk_rig: Rig) -> None:
    gate = threading.Event()
    assert disk_rig.disk is not None
    disk_rig.on_disk_only(keys("a"))
    disk_rig.disk.on_read = faults.slow(gate)
    disk_rig.promote(keys("a"))
    disk_rig.clock.now_s += DEADLINE_S
    assert disk_rig.poll() == [Promoted(1, 0, False, "deadline")]
    disk_rig.promote(keys("a"), request_id=2)
    gate.set()
    assert disk_rig.finish(*READERS) == [Promoted(2, 0, True, "done")]
    assert disk_rig.disk.reads == [key("a")]


# ------------------------------------------------------------------ the whole


def test_forget_removes_only_its_keys_in_tiers_and_in_flight(disk_rig: Rig) -> None:  # H9
    assert disk_rig.disk is not None
    bad = keys("on disk", "being read", "in both", "being written", "being stored", "ordered")
    disk_rig.on_disk_only(keys("on disk", "being read", "good, read"))
    disk_rig.stored(keys("in both", "good, in both"))
    writing = disk_rig.hold("disk-write-0")
    lease = disk_rig.blocks.take(4)
    step = disk_rig.fill(lease.ids, keys("being stored", "good, stored", "ordered", "being written"))
    disk_rig.store(keys("being written"), lease.ids[3:], step)
    disk_rig.finish("compute", "store")
    assert disk_rig.host_holds(key("being written"))
    held = [disk_rig.hold(name) for name in ("store", *READERS)]
    disk_rig.store(keys("being stored", "good, stored"), lease.ids[:2], step)
    disk_rig.promote(keys("being read"))
    disk_rig.promote(keys("good, read"), request_id=2)
    with disk_rig.late():
        disk_rig.store(keys("ordered"), lease.ids[2:3], step)
        disk_rig.transfers.forget([*bad, key("never seen")])
    for hold in (writing, *held):
        hold.release()
    disk_rig.finish("compute", "store", *READERS)
    disk_rig.finish("disk-write-0")
    assert [disk_rig.transfers.locate([of]) for of in bad] == [[]] * len(bad)
    assert not any(of in disk_rig.disk.index or disk_rig.host_holds(of) for of in bad)
    assert all(disk_rig.host_holds(of) for of in keys("good, read", "good, in both", "good, stored"))
    assert key("good, stored") in disk_rig.disk.index
    disk_rig.stored(keys("being stored"))  # computed anew
    assert disk_rig.host_holds(key("being stored"))
    lease.release()


def test_forget_all_removes_keys_in_tiers_and_in_flight_for_good(disk_rig: Rig) -> None:  # H8
    assert disk_rig.disk is not None
    disk_rig.on_disk_only(keys("on disk", "being read"))
    disk_rig.stored(keys("in both"))
    held = [disk_rig.hold(name) for name in ("store", "load", "disk-write-0", *READERS)]
    lease = disk_rig.blocks.take(3)
    step = disk_rig.fill(lease.ids[:1], keys("being stored"))
    disk_rig.store(keys("being stored"), lease.ids[:1], step)
    disk_rig.promote(keys("being read"))
    disk_rig.load(keys("in both"), lease.ids[1:2], request_id=2)
    disk_rig.transfers.forget_all()
    everything = keys("on disk", "being read", "in both", "being stored")
    assert [disk_rig.transfers.locate([of]) for of in everything] == [[]] * 4
    for hold in held:
        hold.release()
    disk_rig.finish("compute", "store", "load", *READERS)
    disk_rig.finish("disk-write-0")
    assert [disk_rig.transfers.locate([of]) for of in everything] == [[]] * 4
    assert len(disk_rig.disk.index) == 0
    assert disk_rig.blocks.match(keys("in both")) == []
    disk_rig.stored(keys("being stored"))  # what is computed from now on is kept again
    assert disk_rig.host_holds(key("being stored"))
    assert key("being stored") in disk_rig.disk.index
    lease.release()


def test_no_call_of_the_engine_thread_blocks_while_all_streams_hang(disk_rig: Rig) -> None:
    disk_rig.on_disk_only(keys("on disk"))
    disk_rig.stored(keys("in host"))
    lease = disk_rig.blocks.take(4)
    held = [disk_rig.hold(name) for name in disk_rig.stream_names]
    done = threading.Event()

    def everything() -> None:
        transfers, step = disk_rig.transfers, disk_rig.fill(lease.ids[:2], keys("x", "y"))
        transfers.locate(keys("in host", "on disk"))
        transfers.worth_loading(["host", "disk"])
        plans = [
            StorePlan(keys("x", "y"), tuple(lease.ids[:2]), (step,)),
            LoadPlan(1, 0, keys("in host"), (lease.ids[2],), (step,)),
            PromotePlan(2, 0, keys("in host", "on disk")),
        ]
        transfers.submit(plans)
        transfers.gates([(1, 0)])
        assert disk_rig.poll() == []
        assert transfers.has_work
        disk_rig.clock.now_s += 2 * DEADLINE_S
        assert disk_rig.poll() == [Promoted(2, 0, False, "deadline")]
        transfers.forget_all()
        done.set()

    thread = threading.Thread(target=everything, daemon=True)
    thread.start()
    thread.join(10)
    assert done.is_set(), "a call blocked, or failed"
    assert disk_rig.device.host_waits() == {}
    for hold in held:
        hold.release()
    disk_rig.drain(*disk_rig.stream_names)
    lease.release()


def test_blocks_flushed_to_disk_are_served_by_the_next_engine(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    wanted = keys("a", "b")
    lease = rig.blocks.take(2)
    rig.store(wanted, lease.ids, rig.fill(lease.ids, wanted))
    assert rig.transfers.flush(timeout_s=10)
    lease.release()
    rig.close()
    rig.check_nothing_is_held()
    again = Rig(tmp_path)
    assert again.transfers.locate(wanted) == ["disk", "disk"]
    again.promote(wanted)
    again.finish(*READERS)
    assert all(again.host_holds(of) for of in wanted)
    again.close()


def test_close_drops_unstarted_writes_after_the_flush_timeout(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    assert rig.disk is not None
    gate, begun = threading.Event(), threading.Event()

    def stall(proceed: Callable[[], None], block: Block) -> None:
        begun.set()
        faults.late(gate)(proceed, block)

    rig.disk.on_write = stall
    lease, wanted = rig.blocks.take(3), keys("a", "b", "c")
    rig.store(wanted, lease.ids, rig.fill(lease.ids, wanted))
    rig.finish("compute", "store")  # three writes are under way: the first is in the hands of the disk
    lease.release()
    assert begun.wait(10)
    assert not rig.transfers.flush(timeout_s=0)
    assert rig.disk.index.reserve(key("open")) is not None  # the directory is still ours: a write is running
    gate.set()
    rig.close()
    rig.check_nothing_is_held()
    assert rig.disk.writes == [key("a")]
    with_a = DiskTier.open(tmp_path, layout=LAYOUT, fingerprint="rig", capacity_bytes=10 * entry_bytes(LAYOUT))
    assert list(with_a.index) == [key("a")]
    with_a.close()


def test_a_disk_entry_stays_if_close_drops_its_read(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.on_disk_only(keys("a"))
    rig.hold("disk-read-0")
    rig.promote(keys("a"))
    assert not rig.transfers.flush(timeout_s=0)
    rig.close()
    rig.check_nothing_is_held()
    assert rig.disk is not None
    assert rig.disk.reads == []
    assert key("a") in rig.disk.index


def test_the_content_check_finds_a_single_wrong_bit_of_a_tier(disk_rig: Rig) -> None:
    assert disk_rig.disk is not None
    disk_rig.on_disk_only(keys("a"))
    disk_rig.disk.on_read = faults.lying
    disk_rig.promote(keys("a"))
    assert disk_rig.finish(*READERS) == [DONE]
    slot = disk_rig.host.pool.get(key("a"))
    assert slot is not None
    assert not disk_rig.host_holds(key("a"))
    assert bytes(disk_rig.host.slot(slot))[1:] == content(key("a")).tobytes()[1:]
