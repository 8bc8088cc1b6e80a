"""Stores and loads that are copied in several pieces."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from transfer_rig import LAYOUT, Rig, content, key, keys

from sidestream_kv.device.base import CopyBatch
from sidestream_kv.device.host import HostStream
from sidestream_kv.offload import pacing, worker
from sidestream_kv.offload.connector import LoadFailed
from sidestream_kv.offload.pacing import Lane, Pace

PATIENCE_S = 10.0


def narrow(rig: Rig, *, segments_in_flight: int) -> None:
    """Loads get so much of the device at a time."""
    rig.transfers._worker._to_device._pace = Pace(1 << 20, 1, 1 << 30, segments_in_flight, streams=1)


@pytest.mark.usefixtures("one_block_a_turn")
def test_the_worker_pauses_briefly_while_few_copies_are_submitted(rig: Rig) -> None:
    lease = rig.blocks.take(3)
    rig.fill(lease.ids, keys("a", "b", "c"))
    rig.drain("compute")
    with rig.late():
        rig.store(keys("a", "b", "c"), lease.ids)
        rest = rig._thread._turn().until_s  # the first of three pieces has begun
    assert rest is not None
    assert rest - rig.clock() == pytest.approx(worker._SHORT_PAUSE_S)
    rig.finish("store")
    lease.release()


@pytest.mark.usefixtures("one_block_a_turn")
def test_finished_pieces_are_settled_before_the_next_one_is_submitted(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else tickets pile up, and no block is given back, for as long as there are orders."""
    monkeypatch.setattr(worker, "_CROWDED_LANE", 1)
    lease = rig.blocks.take(8)
    rig.fill(lease.ids, keys(*range(8)))
    rig.drain("compute")
    found = 0
    with rig.late():
        rig.store(keys(*range(8)), lease.ids)
        while rig._thread._turn() and rig.transfers._worker._stores.waiting:
            rig.pass_through("store-0")
            rig.pass_through("store-1")
            found = rig.host.pool.num_keys
    assert found > 0
    rig.finish("store")
    lease.release()


class Blink:
    """Done between two looks at it, once two copies wait for it."""

    stream, tick, failure = "elsewhere", 1, None

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._looks = 0

    def poll(self) -> bool:
        self._looks += sum(map(len, self._lane._queues)) == 2
        return self._looks > 1


@pytest.mark.usefixtures("one_block_a_turn")
def test_a_load_is_ready_once_all_pieces_were_submitted_in_any_order(rig: Rig) -> None:  # H5
    rig.stored(keys("a", "b", "other"))
    lease = rig.blocks.take(3)
    narrow(rig, segments_in_flight=2)
    with rig.hold("load"):
        rig.load(keys("other"), lease.ids[2:], request_id=2)
        rig.load(keys("a", "b"), lease.ids[:2], Blink(rig.transfers._worker._to_device))
        rig.poll()
        (job,) = {job for job in rig.transfers._worker._loads._jobs.values() if len(job.copies) == 2}
        assert [len(copy.fences[0]) for copy in job.copies] == [
            0,
            1,
        ]  # the second, because what both wait for ended between two looks
        assert rig.ready == [(2, 0)]
    rig.finish("load")
    rig.finish("load")
    assert rig.ready == [(2, 0), (1, 0)]
    assert [rig.block(block) for block in lease.ids] == [content(key(name)).tobytes() for name in ("a", "b", "other")]
    lease.release()


@pytest.mark.usefixtures("one_block_a_turn")
def test_load_with_a_failed_piece_is_never_reported_as_ready(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:  # H9
    rig.stored(keys("a", "b"))
    lease = rig.blocks.take(2)
    narrow(rig, segments_in_flight=1)
    copy, failed = HostStream.copy, []

    def fail_once(stream: HostStream, batch: CopyBatch) -> None:
        if not failed:
            failed.append(stream.name)
            raise OSError("injected: the copy failed")
        copy(stream, batch)

    monkeypatch.setattr(HostStream, "copy", fail_once)
    with rig.hold("load"):
        rig.load(keys("a", "b"), lease.ids)
        rig.settle()
    rig.drain("load")  # the second piece is given when the first has ended
    assert rig.finish("load") == [LoadFailed(1, 0, "load_failed")]
    assert (failed, rig.ready) == (["load-0"], [])
    lease.release()


def test_a_layer_waits_for_the_last_slice_of_every_piece(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:  # H5
    monkeypatch.setattr(pacing, "BLOCKS_PER_TURN", 2)
    monkeypatch.setattr(pacing, "LOAD_PIECE_BYTES", 0)
    monkeypatch.setattr(pacing, "LAST_PIECE_BYTES", 0)
    rig.stored(keys("a", "b", "c", "d"))
    lease = rig.blocks.take(4)
    narrow(rig, segments_in_flight=8)
    with rig.hold("load"):
        rig.load(keys("a", "b", "c", "d"), lease.ids)
        rig.poll()
        gates = rig.transfers.gates([(1, 0)]).by_layer
        waited = [("load-0", 5)]  # the hold was tick 1; what was given before it is done before it
        assert [[(fence.stream, fence.tick) for fence in fences] for fences in gates] == [waited] * LAYOUT.num_layers
    rig.finish("load")
    assert [rig.block(block) for block in lease.ids] == [content(key(name)).tobytes() for name in "abcd"]
    lease.release()


@pytest.mark.usefixtures("one_block_a_turn")
def test_a_store_releases_its_blocks_after_its_last_piece(rig: Rig) -> None:  # H2
    lease = rig.blocks.take(3)
    step = rig.fill(lease.ids, keys("a", "b", "c"))
    rig.drain("compute")
    hold = rig.hold("store-1")
    rig.store(keys("a", "b", "c"), lease.ids, step)
    rig.let_go(lease)
    until = time.monotonic() + PATIENCE_S
    while rig.transfers.locate(keys("a")) != ["host"]:  # a piece is published by itself
        assert time.monotonic() < until
        rig.poll()
    assert rig.blocks.num_used == 3
    hold.release()
    rig.finish("store")
    assert rig.blocks.num_used == 0
    assert all(rig.host_holds(of) for of in keys("a", "b", "c"))


@pytest.fixture
def crowded(rig: Rig, monkeypatch: pytest.MonkeyPatch, one_block_a_turn: None) -> Iterator[None]:
    """The lane has room for one copy besides one that waits: a piece begins when the one before has ended and its books
    are kept.
    """
    monkeypatch.setattr(worker, "_CROWDED_LANE", 2)
    rig.stored(keys("a", "b", "waits"))
    lease = rig.blocks.take(1)
    with rig.hold("compute"):
        step = rig.compute.submit(lambda: None)
        rig.load(keys("waits"), lease.ids, step, request_id=2)
        yield
    rig.finish("compute", "load")
    lease.release()


@pytest.mark.usefixtures("crowded")
def test_a_load_with_remaining_pieces_keeps_its_host_slots(rig: Rig) -> None:  # H10
    lease = rig.blocks.take(2)
    rig.load(keys("a", "b"), lease.ids)
    rig.pass_through("load-0")  # the first piece, and the offload worker has not looked
    with rig.hold("load"):
        rig.settle()  # the second one is behind the hold
        assert rig.host.pool.num_used == 3
    assert rig.finish("load") == []
    assert rig.ready == [(1, 0)]
    assert rig.host.pool.num_used == 1  # of the one that waits
    assert [rig.block(block) for block in lease.ids] == [content(key(name)).tobytes() for name in "ab"]
    lease.release()


@pytest.mark.usefixtures("crowded")
def test_a_load_with_a_failed_piece_submits_no_more_pieces(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:  # H10
    lease = rig.blocks.take(2)
    copied: list[str] = []

    def fail(stream: HostStream, batch: CopyBatch) -> None:
        copied.append(stream.name)
        raise OSError("injected: the copy failed")

    with monkeypatch.context() as failing:
        failing.setattr(HostStream, "copy", fail)
        rig.load(keys("a", "b"), lease.ids)
        rig.drain("load")
        assert rig.finish("load") == [LoadFailed(1, 0, "load_failed")]
    assert (copied, rig.ready) == (["load-0"], [])
    assert rig.host.pool.num_used == 1  # of the one that waits
    lease.release()
