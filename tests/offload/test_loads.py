"""Loads: their gates, their reports to the engine, and the estimated time of their arrival."""

from __future__ import annotations

import itertools
import math
from itertools import pairwise

import pytest
from transfer_rig import LAYOUT, Rig, content, key, keys

from sidestream_kv.device.base import CopyBatch
from sidestream_kv.device.host import HostStream
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.offload import pacing
from sidestream_kv.offload.connector import LoadFailed, LoadReady
from sidestream_kv.offload.loads import _HEALTHY_HOST, layers_per_group, piece_ends
from sidestream_kv.offload.pacing import Copy
from sidestream_kv.types import LoadPlan


def test_a_load_that_is_not_ready_has_no_fences_for_a_step(rig: Rig) -> None:
    """Its request is in no step before it is ready."""
    rig.stored(keys("a"))
    lease = rig.blocks.take(1)
    with rig.hold("load"):
        rig.load(keys("a"), lease.ids)
        assert rig.transfers.gates([(1, 0)]).by_layer == ()
        rig.poll()
        assert rig.ready == [(1, 0)]
        assert len(rig.transfers.gates([(1, 0)]).by_layer) == LAYOUT.num_layers
    rig.finish("load")
    lease.release()


def test_a_load_that_misses_its_last_block_holds_no_slot(rig: Rig) -> None:
    rig.stored(keys("a", "b"))
    lease = rig.blocks.take(3)
    rig.load(keys("a", "b", "never stored"), lease.ids)
    assert rig.poll() == [LoadFailed(1, 0, "gone")]
    assert rig.host.pool.num_used == 0
    lease.release()


def test_a_loads_remaining_time_is_zero_once_all_its_copies_are_done(rig: Rig) -> None:
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


def test_a_step_may_begin_before_its_load_ends_if_each_layer_arrives_in_time(
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


def test_the_remaining_time_of_a_load_follows_its_remaining_bytes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_remaining_time_of_a_load_includes_earlier_loads(rig: Rig) -> None:
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


def test_the_remaining_time_of_a_failed_load_is_infinite(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_only_the_last_piece_of_a_load_is_large_and_copied_by_layers(
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
def test_failed_load_is_reported_once_by_worker_or_engine(
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
        assert rig.transfers.poll() == [LoadFailed(1, 0, "load_failed")]
    else:
        assert rig.transfers.poll() == []  # the offload worker has not looked
        assert rig.transfers.failed_loads() == [LoadFailed(1, 0, "load_failed")]
    assert rig.transfers.poll() == rig.transfers.failed_loads() == []
    assert rig.poll() == rig.transfers.failed_loads() == []
    lease.release()


def test_a_load_that_ends_during_a_poll_is_reported_by_the_next_poll(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert rig.transfers.poll() == [LoadFailed(1, 0, "gone")]
    lease.release()


@pytest.mark.parametrize("windows", [(), (9, 0, 9), (9, 9, 9)])
def test_pieces_cover_a_load_in_order_within_the_size_limit(
    windows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block has 3 layers of 8 bytes. Only the last piece may be split by layers, so it holds no states."""
    layout = KVLayout(3, 1, 1, 1, "float32", windows)
    monkeypatch.setattr(pacing, "BLOCKS_PER_TURN", 2)
    monkeypatch.setattr(pacing, "LOAD_PIECE_BYTES", 100)
    monkeypatch.setattr(pacing, "LAST_PIECE_BYTES", 150)
    sizes = {"whole": 24, "partial": 8 * windows.count(0) if windows else 24}
    for states, partial, whole in itertools.product((0, 1, 9), (0, 1, 7, 40) if windows else (0,), (0, 1, 5, 6, 7, 40)):
        if not states + whole or partial > 40 * whole:  # the last block is always whole
            continue
        names = ["whole"] * states + ["partial"] * partial + ["whole"] * whole
        plan = LoadPlan(1, 0, tuple(keys(*range(len(names)))), (), (), num_whole=states, num_partial=partial)
        ends = piece_ends(plan, layout)
        assert ends == sorted({*ends}) and ends[-1] == len(names)
        for number, (start, stop) in enumerate(pairwise([0, *ends])):
            num_bytes = sum(sizes[name] for name in names[start:stop])
            is_last = stop == len(names) and start >= states
            assert num_bytes <= (150 if is_last else 100) or stop - start <= 2, (number, ends)
            assert num_bytes > 0
            assert stop <= states or start >= states


def test_pieces_with_blocks_of_few_layers_have_the_usual_bytes() -> None:
    """One layer in eight has no window: eight times the blocks. A turn of the worker takes as long for each piece."""
    layout = KVLayout(8, 8, 128, 16, "bfloat16", (1024,) * 7)
    count = 8 * pacing.LOAD_PIECE_BYTES // layout.block_bytes
    num_last = pacing.LAST_PIECE_BYTES // layout.block_bytes
    numbers = tuple(keys(*range(3 * count + num_last)))
    plan = LoadPlan(1, 0, numbers, (), (), num_partial=3 * count)
    assert piece_ends(plan, layout) == [count, 2 * count, 3 * count, len(numbers)]


@pytest.mark.parametrize(
    ("num_layers", "segment_bytes", "expected"),
    [(8, 128 << 10, 2), (8, 512 << 10, 8), (8, 513 << 10, 8), (2, 128 << 10, 2), (36, 128 << 10, 9), (7, 64 << 10, 2)],
)
def test_layer_groups_have_at_least_the_segment_size_and_are_few(
    num_layers: int, segment_bytes: int, expected: int
) -> None:
    """A layer of these blocks has 64 KiB."""
    layout = KVLayout(num_layers, 8, 128, 16, "bfloat16")
    assert layers_per_group(layout, segment_bytes) == expected


def test_there_are_at_most_four_groups_of_layers() -> None:
    for num_layers in range(1, 81):
        layers = layers_per_group(KVLayout(num_layers, 1, 8, 1, "float32"), 1)
        assert min(num_layers, 3) <= -(-num_layers // layers) <= 4
