"""The offload worker's turns, what the two ends tell each other, and how it ends."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from transfer_rig import LAYOUT, Rig, content, key, keys, step_of

from sidestream.device.base import CopyBatch
from sidestream.device.host import HostStream
from sidestream.errors import InvariantError
from sidestream.offload import pacing, worker
from sidestream.offload.connector import LoadFailed, LoadReady, TransferEvent
from sidestream.offload.costs import _HEALTHY_HOST
from sidestream.offload.messages import StoreAgain
from sidestream.offload.pacing import Copy, Lane, Pace
from sidestream.types import Key, PromotePlan, StorePlan

PATIENCE_S = 10.0


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


def test_others_get_the_interpreter_lock_between_turns_that_can_give_the_link_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_blocks_whose_store_is_not_worth_a_copy_are_given_back_at_once(rig: Rig) -> None:
    busy = rig.host.pool.take(8)
    lease = rig.blocks.take(1)
    with rig.late():
        rig.store(keys("a"), lease.ids, rig.fill(lease.ids, keys("a")))
        rig.let_go(lease)
    assert rig.blocks.num_used == 1
    rig.poll()
    assert rig.blocks.num_used == 0
    busy.release()


def test_load_that_was_not_submitted_gates_nobody(rig: Rig) -> None:
    """Its request is in no step before it is ready."""
    rig.stored(keys("a"))
    lease = rig.blocks.take(1)
    with rig.hold("load"):
        rig.load(keys("a"), lease.ids)
        assert rig.transfers.gates(step_of((1, 0))).by_layer == ()
        rig.poll()
        assert rig.ready == [(1, 0)]
        assert len(rig.transfers.gates(step_of((1, 0))).by_layer) == LAYOUT.num_layers
    rig.finish("load")
    lease.release()


def test_a_load_has_arrived_when_all_of_it_is_done(rig: Rig) -> None:
    rig.stored(keys("ab"))
    lease = rig.blocks.take(2)
    with rig.hold("load"):
        rig.load(keys("ab"), lease.ids)
        assert rig.transfers.seconds_left(1, 0, step_s=0) == math.inf  # not all of it was given to the device
        assert rig.transfers.seconds_left(1, 1, step_s=0) == 0  # not its own
        assert rig.transfers.seconds_left(2, 0, step_s=0) == 0
        rig.poll()
        assert rig.ready == [(1, 0)]
        assert rig.transfers.seconds_left(1, 0, step_s=0) == pytest.approx(LAYOUT.block_bytes / _HEALTHY_HOST)
    rig.drain("load")
    assert rig.transfers.seconds_left(1, 0, step_s=0) == 0
    rig.finish("load")
    assert rig.transfers.seconds_left(1, 0, step_s=0) == 0
    lease.release()


def test_a_step_may_begin_before_a_load_has_ended_if_each_layer_is_there_when_it_comes_to_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.device, "segment_bytes", LAYOUT.layer_bytes)
    rig.stored(keys("a", "b"))
    lease = rig.blocks.take(2)
    with rig.hold("load"):
        rig.load(keys("a", "b"), lease.ids)
        rig.poll()
        whole_s = 2 * LAYOUT.block_bytes / _HEALTHY_HOST
        assert LAYOUT.num_layers == 3
        # A third of it for the first layer; the second and the third are there in time, a third of a step later each.
        assert rig.transfers.seconds_left(1, 0, step_s=whole_s) == pytest.approx(whole_s / 3)
        assert rig.transfers.seconds_left(1, 0, step_s=whole_s / 2) == pytest.approx(whole_s - whole_s / 3)
        assert rig.transfers.seconds_left(1, 0, step_s=0) == pytest.approx(whole_s)
    rig.drain("load")
    assert rig.transfers.seconds_left(1, 0, step_s=1.0) == 0
    rig.finish("load")
    lease.release()


def test_what_is_left_of_a_load_counts_by_its_bytes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of a whole piece has several times the bytes of one that is a layer of the last piece."""
    monkeypatch.setattr(pacing, "BLOCKS_PER_TURN", 1)
    monkeypatch.setattr(pacing, "LOAD_PIECE_BYTES", 2 * LAYOUT.block_bytes)
    monkeypatch.setattr(pacing, "LAST_PIECE_BYTES", LAYOUT.block_bytes)
    monkeypatch.setattr(rig.device, "segment_bytes", LAYOUT.layer_bytes)
    rig.stored(keys("a", "b", "c"))
    lease = rig.blocks.take(4)
    block_s = LAYOUT.block_bytes / _HEALTHY_HOST
    with rig.hold("load"):
        rig.load(keys("a", "b", "c"), lease.ids[:3], request_id=1)
        rig.load(keys("a"), lease.ids[3:], request_id=2)
        rig.poll()
        assert rig.transfers.seconds_left(1, 0, step_s=block_s) == pytest.approx(
            (2 + 1 / 3) * block_s
        )  # two blocks, and a layer of the third
        assert rig.transfers.seconds_left(2, 0, step_s=block_s) == pytest.approx((3 + 1 / 3) * block_s)
        load = rig.transfers._loads[max(rig.transfers._loads) - 1]
        assert load.submitted is not None
        assert [len(part.fences) for part in (*load.submitted.before, *load.submitted.groups)] == [1] * 4
        monkeypatch.setattr(
            type(load.submitted.before[0].fences[0]), "poll", lambda self: self is load.submitted.before[0].fences[0]
        )
        assert rig.transfers.seconds_left(1, 0, step_s=block_s) == pytest.approx(block_s / 3)
        assert rig.transfers.seconds_left(2, 0, step_s=block_s) == pytest.approx((1 + 1 / 3) * block_s)
        monkeypatch.undo()
    rig.finish("load")
    lease.release()


def test_what_is_loaded_for_others_first_counts(rig: Rig) -> None:
    rig.stored(keys("a", "b", "c"))
    lease = rig.blocks.take(3)
    block_s = LAYOUT.block_bytes / _HEALTHY_HOST
    with rig.hold("load"):
        rig.load(keys("a", "b"), lease.ids[:2], request_id=1)
        rig.load(keys("c"), lease.ids[2:], request_id=2)
        rig.poll()
        assert rig.transfers.seconds_left(1, 0, step_s=0) == pytest.approx(2 * block_s)
        assert rig.transfers.seconds_left(2, 0, step_s=0) == pytest.approx(3 * block_s)
        assert rig.transfers.seconds_left(3, 0, step_s=0) == 0
    rig.drain("load")
    assert rig.transfers.seconds_left(2, 0, step_s=0) == 0
    rig.finish("load")
    lease.release()


def test_a_load_that_failed_is_not_waited_for_as_one_that_comes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.stored(keys("a"))
    lease = rig.blocks.take(1)

    def fail(self: HostStream, batch: CopyBatch) -> None:
        raise OSError("injected")

    monkeypatch.setattr(HostStream, "copy", fail)
    with rig.hold("load"):
        rig.load(keys("a"), lease.ids)
        rig.poll()
    rig.drain("load")
    assert rig.transfers.seconds_left(1, 0, step_s=0) == math.inf
    rig.finish("load")
    lease.release()


@pytest.mark.parametrize(("last", "pieces"), [(0, [1, 1, 1]), (2, [1, 2]), (3, [3])])
def test_the_last_piece_of_a_load_is_a_large_one_and_the_only_one_by_layers(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, last: int, pieces: list[int]
) -> None:
    monkeypatch.setattr(pacing, "BLOCKS_PER_TURN", 1)
    monkeypatch.setattr(pacing, "LOAD_PIECE_BYTES", 0)
    monkeypatch.setattr(pacing, "LAST_PIECE_BYTES", last * LAYOUT.block_bytes)
    monkeypatch.setattr(rig.device, "segment_bytes", LAYOUT.layer_bytes)
    copies: list[Copy] = []
    add = rig.transfers._worker._to_device.add
    monkeypatch.setattr(rig.transfers._worker._to_device, "add", lambda copy: copies.append(copy) or add(copy))  # type: ignore[func-returns-value]
    rig.stored(keys("a", "b", "c"))
    lease = rig.blocks.take(3)
    rig.load(keys("a", "b", "c"), lease.ids)
    rig.finish("load")
    assert [rig.block(block) for block in lease.ids] == [content(key(name)).tobytes() for name in "abc"]
    lease.release()
    assert [len(copy.groups[0].source_starts) for copy in copies] == pieces
    assert [len(copy.groups) for copy in copies] == [1] * (len(pieces) - 1) + [LAYOUT.num_layers]


@pytest.mark.parametrize("fence_first", [True, False])
def test_failed_load_is_told_once_whoever_sees_it_first(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, fence_first: bool
) -> None:
    """A step that waited for the load may be read before the offload worker has seen the load's end."""
    rig.stored(keys("a"))
    lease = rig.blocks.take(1)

    def fail(stream: HostStream, batch: CopyBatch) -> None:
        raise OSError("injected: the copy failed")

    monkeypatch.setattr(HostStream, "copy", fail)
    with rig.hold("load"):
        rig.load(keys("a"), lease.ids)
        assert rig.transfers.poll() == [LoadReady(1, 0)]
    rig.pass_through("load-0")
    if not fence_first:
        rig.settle()
        assert rig.transfers.poll() == [LoadFailed(1, 0)]
    else:
        assert rig.transfers.poll() == []  # the offload worker has not looked
        assert rig.transfers.failed_loads() == [LoadFailed(1, 0)]
    assert rig.transfers.poll() == rig.transfers.failed_loads() == []
    assert rig.poll() == rig.transfers.failed_loads() == []
    lease.release()


def test_what_was_ordered_before_a_reset_and_begun_after_it_publishes_nothing(
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


def again(events: Sequence[TransferEvent]) -> list[Key]:
    """Keys of the blocks that the offload worker asks to have stored again."""
    return [key for event in events if isinstance(event, StoreAgain) for key in event.keys]


def test_tier_grows_while_it_is_in_use() -> None:
    """Its memory is pinned in the background (P7)."""
    rig = Rig(ready_slots=2)
    rig.stored(keys("a", "b"))
    assert rig.host.pool.size == 2
    assert rig.transfers.locate(keys("a", "b")) == ["host", "host"]
    rig.ready_slots = 5
    rig.clock.now_s += 1.0
    rig.stored(keys("c", "d", "e"))
    assert rig.host.pool.size == 5
    assert all(rig.host_holds(of) for of in keys("a", "b", "c", "d", "e"))
    rig.ready_slots = 8
    rig.clock.now_s += 1.0
    rig.poll()
    assert rig.host.pool.size == 8
    rig.close()
    rig.check_nothing_is_held()


def test_blocks_without_a_slot_are_asked_for_again_oldest_first_as_memory_gets_ready() -> None:
    rig = Rig(ready_slots=2)
    rig.stored(keys("a", "b", "c", "d"))
    rig.stored(keys("e"))
    assert [rig.host_holds(of) for of in keys("a", "b", "c", "d", "e")] == [True, True, False, False, False]
    assert rig.counted("store", "deferred") == 2
    assert rig.counted("store", "skipped") == 0
    assert rig.transfers.busy  # a flush waits for them
    rig.ready_slots = 4
    rig.clock.now_s += 1.0
    assert again(rig.poll()) == [*keys("c", "d")]
    rig.ready_slots = 8
    rig.clock.now_s += 1.0
    assert again(rig.poll()) == [*keys("e")]
    assert not rig.transfers.busy
    rig.close()
    rig.check_nothing_is_held()


def test_a_tier_whose_memory_is_being_pinned_evicts_nothing_for_a_store() -> None:
    """With a third of its memory, least recently used first would lose each conversation just before it comes back."""
    rig = Rig(ready_slots=2)
    rig.stored(keys("a", "b"))
    rig.stored(keys("c", "d"))
    assert rig.transfers.locate(keys("a", "b")) == ["host", "host"]
    rig.close()


def test_when_pinning_ends_early_the_tier_evicts_as_usual() -> None:
    rig = Rig(ready_slots=2)
    rig.stored(keys("a", "b", "c"))
    rig.pins = False  # the limit of locked memory was reached
    rig.clock.now_s += 1.0
    assert again(rig.poll()) == [*keys("c")]
    rig.stored(keys("c"))
    assert rig.host_holds(key("c"))
    rig.stored(keys("d", "e", "f"))
    assert rig.counted("store", "skipped") == 1
    rig.close()
    rig.check_nothing_is_held()


def test_a_reset_forgets_deferred_stores() -> None:
    rig = Rig(ready_slots=2)
    rig.stored(keys("a", "b", "c"))
    rig.transfers.forget_all()
    rig.ready_slots = 8
    rig.clock.now_s += 1.0
    assert again(rig.poll()) == []
    assert not rig.transfers.busy
    rig.close()


def test_deferred_stores_are_at_most_as_many_as_the_tier_will_have_slots() -> None:
    rig = Rig(ready_slots=1, num_blocks=16)
    rig.stored(keys(*"abcdefghijkl"))
    rig.ready_slots = 8
    rig.clock.now_s += 1.0
    assert again(rig.poll()) == [*keys(*"efghijkl")]
    rig.close()


def test_worker_that_raises_tells_it_and_flush_and_close_return(
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


def test_close_with_orders_that_nobody_took_loses_cache_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert not rig.transfers.busy
    assert rig.host_holds(key("in host"))
    again = Rig(tmp_path)
    assert again.transfers.locate(keys("on disk", "in host")) == ["disk", "disk"]
    again.close()


def test_reset_while_the_worker_publishes_a_store_is_over_once_that_is_forgotten_too(
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


# ------------------------------------------------------------------ pieces


@pytest.fixture
def one_block_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "BLOCKS_PER_TURN", 1)
    monkeypatch.setattr(pacing, "LOAD_PIECE_BYTES", 0)
    monkeypatch.setattr(pacing, "LAST_PIECE_BYTES", 0)


def narrow(rig: Rig, *, segments_in_flight: int) -> None:
    """Loads get so much of the device at a time."""
    rig.transfers._worker._to_device._pace = Pace(1 << 20, 1, 1 << 30, segments_in_flight, streams=1)


@pytest.mark.usefixtures("one_block_a_turn")
def test_rests_are_short_while_the_link_lacks_what_is_ordered(rig: Rig) -> None:
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
def test_books_are_kept_beside_blocks_that_are_gone_before_the_next_one_was_given(
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
def test_load_is_ready_when_all_its_pieces_were_given_in_whatever_order(rig: Rig) -> None:  # H5
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
def test_load_of_which_a_piece_has_failed_is_never_said_to_be_ready(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:  # H9
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
    assert rig.finish("load") == [LoadFailed(1, 0)]
    assert (failed, rig.ready) == (["load-0"], [])
    lease.release()


def test_layer_waits_for_the_last_slice_of_every_piece(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:  # H5
    monkeypatch.setattr(pacing, "BLOCKS_PER_TURN", 2)
    monkeypatch.setattr(pacing, "LOAD_PIECE_BYTES", 0)
    monkeypatch.setattr(pacing, "LAST_PIECE_BYTES", 0)
    rig.stored(keys("a", "b", "c", "d"))
    lease = rig.blocks.take(4)
    narrow(rig, segments_in_flight=8)
    with rig.hold("load"):
        rig.load(keys("a", "b", "c", "d"), lease.ids)
        rig.poll()
        gates = rig.transfers.gates(step_of((1, 0))).by_layer
        waited = [("load-0", 5)]  # the hold was tick 1; what was given before it is done before it
        assert [[(fence.stream, fence.tick) for fence in fences] for fences in gates] == [waited] * LAYOUT.num_layers
    rig.finish("load")
    assert [rig.block(block) for block in lease.ids] == [content(key(name)).tobytes() for name in "abcd"]
    lease.release()


@pytest.mark.usefixtures("one_block_a_turn")
def test_store_lets_go_of_its_blocks_when_its_last_piece_has_ended(rig: Rig) -> None:  # H2
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


def test_load_that_settles_while_the_engine_polls_is_kept_until_its_events_were_polled(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = rig.blocks.take(1)
    with rig.late():
        rig.load(keys("never stored"), lease.ids)
    take, settled = rig.transfers._events.take, []

    def then_settle() -> object:
        news = take()
        if news is None and not settled:
            settled.append(True)
            rig.settle()
        return news

    monkeypatch.setattr(rig.transfers._events, "take", then_settle)
    assert rig.transfers.poll() == []
    assert settled
    assert rig.transfers.poll() == [LoadFailed(1, 0, gone=True)]
    lease.release()


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
def test_load_of_which_all_that_has_begun_has_ended_goes_on_to_hold_its_slots(rig: Rig) -> None:  # H10
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
def test_load_of_which_a_piece_fails_before_the_next_began_fails_and_begins_no_more(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:  # H10
    lease = rig.blocks.take(2)
    copied: list[str] = []

    def fail(stream: HostStream, batch: CopyBatch) -> None:
        copied.append(stream.name)
        raise OSError("injected: the copy failed")

    with monkeypatch.context() as failing:
        failing.setattr(HostStream, "copy", fail)
        rig.load(keys("a", "b"), lease.ids)
        rig.drain("load")
        assert rig.finish("load") == [LoadFailed(1, 0)]
    assert (copied, rig.ready) == (["load-0"], [])
    assert rig.host.pool.num_used == 1  # of the one that waits
    lease.release()


# ------------------------------------------------------------------ a close between two pieces


@pytest.mark.parametrize("kind", ["load", "store"])
@pytest.mark.usefixtures("one_block_a_turn")
def test_close_between_two_pieces_of_a_load_and_of_a_store_lets_go_of_both(kind: str) -> None:
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
def test_close_lets_go_of_a_load_of_which_no_piece_has_begun() -> None:
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
def test_close_lets_go_once_of_a_load_that_fails(turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
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


def closed(rig: Rig) -> None:
    """Close the engine, which must leave nothing in use."""
    rig.device.close()
    rig.transfers.close()
    assert rig.transfers.uses() is None
    assert not rig.transfers.busy
    assert (rig.blocks.num_used, rig.host.pool.num_used) == (0, 0)
    rig.check_nothing_is_held()
