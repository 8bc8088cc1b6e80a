"""Turns of the offload worker, resets during its transfers, its errors, and its close."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from transfer_rig import Rig, key, keys

from sidestream.errors import InvariantError
from sidestream_kv.device.host import HostStream
from sidestream_kv.offload import pacing, worker
from sidestream_kv.offload.tickets import LoadJob
from sidestream_kv.types import Key, LoadPlan, PromotePlan, StorePlan


def test_a_turn_takes_a_bounded_number_of_commands(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shares the interpreter lock with the engine thread."""
    monkeypatch.setattr(rig._thread, "wake", lambda: None)
    lease = rig.blocks.take(16)
    step = rig.fill(lease.ids, keys(*range(16)))
    for number in range(100):
        rig.store(keys(*(f"{number}.{index}" for index in range(16))), lease.ids, step)
    before, most = len(rig.transfers._commands), 0
    while (left := len(rig.transfers._commands)) > 0:
        rest = rig._thread._turn()
        most = max(most, left - len(rig.transfers._commands))
        assert rest.until_s is not None or not len(rig.transfers._commands)  # it comes back for the rest by itself
    assert (before, most) == (100, pacing.BLOCKS_PER_TURN)
    lease.release()


def test_idle_turns_yield_the_interpreter_lock(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a hundred thousand orders behind a step, the engine thread would wait for it in each of its steps."""
    monkeypatch.setattr(rig._thread, "wake", lambda: None)
    monkeypatch.setattr(worker, "_CROWDED_LANE", 2)
    lease = rig.blocks.take(1)
    with rig.hold("compute"):
        step = rig.compute.submit(lambda: None)
        for number in range(60):
            rig.store(keys(number), lease.ids, step)
        rests = [rig._thread._turn().until_s for _ in range(3)]
    assert len(rig.transfers._commands) > 0  # there is more to do
    assert [rest and rest - rig.clock() for rest in rests][-1] == pytest.approx(worker._PAUSE_S)
    while len(rig.transfers._commands):
        rig._thread._turn()
    rig.finish("compute", "store")
    lease.release()


def test_blocks_of_a_skipped_store_are_released_at_once(rig: Rig) -> None:
    busy = rig.host.pool.take(8)
    lease = rig.blocks.take(1)
    with rig.late():
        rig.store(keys("a"), lease.ids, rig.fill(lease.ids, keys("a")))
        rig.let_go(lease)
    assert rig.blocks.num_used == 1
    rig.poll()
    assert rig.blocks.num_used == 0
    busy.release()


def test_transfers_submitted_before_a_reset_and_begun_after_it_publish_nothing(
    disk_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:  # H8
    rig = disk_rig
    rig.on_disk_only(keys("read"))
    rig.stored(keys("held"))
    lease = rig.blocks.take(2)
    step = rig.fill(lease.ids[:1], keys("stored"))
    with monkeypatch.context() as late:
        late.setattr(rig._thread, "wake", lambda: None)
        rig.store(keys("stored"), lease.ids[:1], step)
        rig.load(keys("held"), lease.ids[1:])
        rig.transfers.submit([PromotePlan(1, 0, keys("read"))])
        rig.transfers.forget_all()
        assert not rig.transfers.has_forgotten
    rig.finish("compute", "store", "load", "disk-read-0", "disk-read-1")
    assert rig.transfers.has_forgotten
    for name in ("stored", "read", "held"):
        assert rig.transfers.locate(keys(name)) == []
    assert rig.blocks.match(keys("held")) == []
    lease.release()


def test_after_a_worker_error_poll_raises_it_and_flush_and_close_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path)
    lease = rig.blocks.take(1)

    def broken(*_: object) -> None:
        raise InvariantError("injected: a bug")

    monkeypatch.setattr(rig.transfers._worker._stores, "begin_pieces", broken)
    rig.transfers.submit([StorePlan(keys("a"), tuple(lease.ids), ())])
    with pytest.raises(InvariantError, match="injected: a bug"):
        rig.transfers.poll()
    rig.transfers.forget_all()
    assert rig.transfers.has_forgotten  # nothing more is waited for
    assert not rig.transfers.flush(timeout_s=10)
    rig.device.close()
    rig.transfers.close()
    assert rig.disk is not None
    reopened = Rig(tmp_path)  # the disk was let go of
    reopened.close()


def test_close_drops_commands_that_the_worker_has_not_received(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path)
    rig.on_disk_only(keys("on disk"))
    rig.stored(keys("in host"))
    lease = rig.blocks.take(2)
    step = rig.fill(lease.ids[:1], keys("new"))
    rig.drain("compute")
    monkeypatch.setattr(rig._thread, "wake", lambda: None)
    for number in range(80):  # more than a turn takes
        rig.store(keys(f"new {number}"), lease.ids[:1], step)
    rig.load(keys("in host"), lease.ids[1:])
    rig.promote(keys("on disk"))
    lease.release()
    rig.device.close()  # from here on a submission raises
    rig.transfers.close()
    rig.blocks.check()
    assert (rig.blocks.num_used, rig.host.pool.num_used, len(rig.transfers._commands)) == (0, 0, 0)
    assert not rig.transfers.has_work
    assert rig.host_holds(key("in host"))
    again = Rig(tmp_path)
    assert again.transfers.locate(keys("on disk", "in host")) == ["disk", "disk"]
    again.close()


def test_a_reset_during_a_publication_drops_the_published_blocks_too(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:  # H8
    publish = rig.host.pool.publish_all
    forgotten: list[bool] = []

    def after_reset(slots: Sequence[int], of: Sequence[Key]) -> None:
        with rig.late():  # by the engine thread, behind the offload worker's back
            rig.transfers.forget_all()
        forgotten.append(rig.transfers.has_forgotten)
        publish(slots, of)

    monkeypatch.setattr(rig.host.pool, "publish_all", after_reset)
    rig.stored(keys("a", "b"))
    assert forgotten == [False]
    assert rig.transfers.has_forgotten
    assert rig.transfers.locate(keys("a")) == rig.transfers.locate(keys("b")) == []


@pytest.mark.parametrize("kind", ["load", "store"])
@pytest.mark.usefixtures("one_block_a_turn")
def test_close_between_two_pieces_of_a_load_and_of_a_store_releases_both(kind: str) -> None:
    rig = Rig()
    rig.stored(keys("a", "b", "c"))
    lease = rig.blocks.take(3)
    step = rig.fill(lease.ids, keys("d", "e", "f"))
    rig.drain("compute")
    with rig.late():
        if kind == "load":
            rig.load(keys("a", "b", "c"), lease.ids)
        else:
            rig.store(keys("d", "e", "f"), lease.ids, step)
        rig._thread._turn()  # takes it, and begins the first piece
        rig.store(keys("g"), lease.ids[:1])  # is all that a turn takes: no further piece is begun
        rig.let_go(lease)
    closed(rig)
    assert [rig.host_holds(of) for of in keys("d", "e", "f")] == [kind == "store", False, False]


@pytest.mark.usefixtures("one_block_a_turn")
def test_close_releases_a_load_of_which_no_piece_has_begun() -> None:
    rig = Rig()
    rig.stored(keys("a", "b", "c"))
    lease = rig.blocks.take(3)
    with rig.late():
        rig.load(keys("a", "b"), lease.ids[:2])
        rig.load(keys("c"), lease.ids[2:])
        for _ in range(2):
            rig._thread._turn()  # takes one of the two, and begins a piece of the first
        rig.let_go(lease)
    closed(rig)


@pytest.mark.usefixtures("one_block_a_turn")
@pytest.mark.parametrize("turns", [1, 2, 3, 9])
def test_close_releases_a_failing_load_only_once(turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    names = [f"block {number}" for number in range(8)]
    rig.stored(keys(*names))
    lease = rig.blocks.take(8)

    def fail(*_: object) -> None:
        raise OSError("injected: the copy failed")

    monkeypatch.setattr(HostStream, "copy", fail)
    with rig.late():
        rig.load(keys(*names), lease.ids)
        for _ in range(turns):
            rig._thread._turn()
        rig.let_go(lease)
    closed(rig)


def test_close_does_not_end_a_failed_load_a_second_time(rig: Rig) -> None:
    """A piece may fail, and the load be settled, while the load waits for its turn to begin the next one."""
    rig.stored(keys("a"))
    loads, failure = rig._thread._turn.__self__._loads, OSError("injected: the copy failed")
    slots = rig.host.pool.share(rig.host.pool.match(keys("a")))
    job = LoadJob(1, LoadPlan(1, 0, tuple(keys("a")), (0,), ()), slots, 0.0, [1], failure=failure)
    slots.release()
    loads._waiting.append(job)
    loads.drop(OSError("the engine closes"))
    assert not loads.waiting and job.failure is failure
    assert rig.host.pool.num_used == 0


def closed(rig: Rig) -> None:
    """Close the engine, which must leave nothing in use."""
    rig.device.close()
    rig.transfers.close()
    assert rig.transfers.transfers_fence() is None
    assert not rig.transfers.has_work
    assert (rig.blocks.num_used, rig.host.pool.num_used) == (0, 0)
    rig.check_nothing_is_held()
