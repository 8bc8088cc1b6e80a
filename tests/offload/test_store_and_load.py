"""Device to host and back: order by fences (H1 to H5), leases until the fence (H6, H10), publish last (H7, H9)."""

import random

import pytest
import torch
from transfer_rig import LAYOUT, Rig, content, key, keys

from sidestream_kv.connectors.chunks import RegionLayout
from sidestream_kv.device.base import CopyBatch, Memory
from sidestream_kv.device.cpu import CpuDevice
from sidestream_kv.device.host import HostStream
from sidestream_kv.kv.layout import KVLayout, LayeredLayout
from sidestream_kv.kv.pool import PoolExhausted
from sidestream_kv.offload.connector import LoadFailed
from sidestream_kv.offload.pacing import layers_batch
from sidestream_kv.offload.tiers.stack import BlockMemory
from sidestream_kv.types import LoadPlan, StorePlan

# How long something that must not happen is given to happen. A pass never depends on it, a catch does.


@pytest.fixture
def one_layer_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "segment_bytes", LAYOUT.layer_bytes)


@pytest.fixture
def two_layers_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "segment_bytes", LAYOUT.block_bytes // 2)


@pytest.fixture
def failing_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("injected: the copy failed")

    monkeypatch.setattr(HostStream, "copy", fail)


# ------------------------------------------------------------------ bytes


@pytest.mark.parametrize(
    ("from_ids", "to_ids"),
    [
        ([3], [7]),
        ([0, 1, 2, 3], [4, 5, 6, 7]),  # one run in both
        ([3, 2, 1, 0], [0, 1, 2, 3]),  # runs on one side only
        ([0, 1, 2, 9, 10, 5], [8, 9, 2, 3, 4, 15]),  # runs that end at different places
        ([15, 0, 14, 1], [1, 14, 0, 15]),
    ],
)
@pytest.mark.usefixtures("one_layer_a_group")
def test_stored_blocks_are_loaded_byte_for_byte(rig: Rig, from_ids: list[int], to_ids: list[int]) -> None:
    wanted = keys(*from_ids)
    source = rig.taken(from_ids)
    rig.store(wanted, from_ids, rig.fill(from_ids, wanted))
    rig.finish("compute", "store")
    source.release()
    rig.memory.memory.data.zero_()
    target = rig.taken(to_ids)
    rig.load(wanted, to_ids)
    assert rig.finish("load") == []
    rig.let_go(target)
    for of, block in zip(wanted, to_ids, strict=True):
        assert rig.block(block) == content(of).tobytes()
    untouched = set(range(16)) - set(to_ids)
    assert not any(rig.rows()[list(untouched)].flatten().tolist())


@pytest.mark.parametrize("layout", [LAYOUT, RegionLayout(96, 4, parts=(8, 24, 48, 16))], ids=["equal", "unequal"])
def test_copies_of_random_blocks_and_layers_write_exactly_their_bytes(layout: LayeredLayout) -> None:
    rng, torch_rng = random.Random(1), torch.Generator().manual_seed(1)
    for _ in range(50):
        source, target = (_random_memory(name, layout, torch_rng) for name in ("a", "b"))
        before, count = target.memory.data.clone().view(12, -1), rng.randint(0, 12)
        source_ids, target_ids = rng.sample(range(12), count), rng.sample(range(12), count)
        if rng.random() < 0.5:
            source_ids.sort()
            target_ids.sort()
        first, stop = sorted(rng.sample(range(4), 2))
        for from_, to in layers_batch(source, source_ids, target, target_ids, range(first, stop)).runs():
            to.copy_(from_)
        span = slice(layout.layer_borders[first], layout.layer_borders[stop])
        before[target_ids, span] = source.memory.data.view(12, -1)[source_ids, span]
        assert torch.equal(target.memory.data.view(12, -1), before)


@pytest.mark.parametrize("layers", [(0,), (2,), (0, 2), (0, 1, 4, 5), (0, 1, 2, 4), (1, 2, 3, 5), (0, 1, 2, 3, 4, 5)])
def test_a_copy_of_some_layers_does_not_change_other_layers(layers: tuple[int, ...]) -> None:
    layout, rng = KVLayout(6, 1, 2, 4, "float32"), torch.Generator().manual_seed(2)
    source, target = (
        BlockMemory(
            Memory(name, (torch.randint(0, 256, (4 * layout.block_bytes,), dtype=torch.uint8, generator=rng),)), layout
        )
        for name in ("a", "b")
    )
    expected = target.memory.data.clone().view(4, 6, -1)
    for layer in layers:
        expected[[1, 2], layer] = source.memory.data.view(4, 6, -1)[[3, 0], layer]
    batch = layers_batch(source, [3, 0], target, [1, 2], layers)
    assert batch.num_bytes == 2 * len(layers) * layout.layer_bytes
    for from_, to in batch.runs():
        to.copy_(from_)
    assert torch.equal(target.memory.data.view(4, 6, -1), expected)


def _random_memory(name: str, layout: LayeredLayout, rng: torch.Generator) -> BlockMemory:
    data = torch.randint(0, 256, (12 * layout.block_bytes,), dtype=torch.uint8, generator=rng)
    return BlockMemory(Memory(name, (data,)), layout)


# ------------------------------------------------------------------ store


def test_a_store_copies_the_bytes_that_its_step_wrote(rig: Rig) -> None:  # H1
    lease = rig.blocks.take(2)
    wanted = keys("a", "b")
    with rig.hold("compute"):
        step = rig.fill(lease.ids, wanted)
        rig.store(wanted, lease.ids, step)
        assert rig.poll() == []
        assert rig.transfers.locate(wanted) == []
    rig.finish("compute", "store")
    assert all(rig.host_holds(of) for of in wanted)
    lease.release()


def test_blocks_are_not_reused_before_their_store_ends(rig: Rig) -> None:  # H2
    lease = rig.blocks.take(16)
    wanted = keys(*range(3))
    step = rig.fill(lease.ids, (*wanted, *keys(*range(100, 113))))
    rig.drain("compute")
    with rig.hold("store"):
        rig.store(wanted, lease.ids[:3], step)
        rig.let_go(lease)  # the request is gone
        assert rig.poll() == []
        with pytest.raises(PoolExhausted):
            rig.blocks.take(14)
    rig.finish("store")
    again = rig.blocks.take(16)
    assert again.after == ()  # whoever hears of the end has nothing to wait for
    assert all(rig.host_holds(of) for of in wanted)
    again.release()


def test_a_store_waits_for_the_last_use_of_its_host_slots(rig: Rig) -> None:  # H2, in the host tier
    lease, wanted = rig.blocks.take(1), keys("a")
    step = rig.fill(lease.ids, wanted)
    slots = rig.host.pool.take(8)
    seen: list[bytes] = []
    with rig.hold("load"):
        reader = rig.stream("load-0").submit(lambda: seen.append(rig.host.memory.data.numpy().tobytes()))
        slots.release(after=(reader,))
        rig.store(wanted, lease.ids, step)
        rig.drain("compute", "store")
        assert seen == [], "the reader was not held up"
        assert not any(rig.host_holds(of) for of in wanted), "the store overtook the reader"
    rig.finish("load", "store")
    assert seen == [bytes(8 * LAYOUT.block_bytes)]
    assert rig.host_holds(wanted[0])
    lease.release()


def test_a_key_is_found_in_the_host_tier_only_after_its_store(rig: Rig) -> None:  # H7
    lease, wanted = rig.blocks.take(2), keys("a", "b")
    step = rig.fill(lease.ids, wanted)
    with rig.hold("store"):
        rig.store(wanted, lease.ids, step)
        rig.drain("compute")
        rig.poll()
        assert rig.transfers.locate(wanted) == []
        assert rig.host.pool.num_used == 2
    rig.finish("store")
    assert rig.transfers.locate(wanted) == ["host", "host"]
    assert rig.host.pool.num_used == 0
    lease.release()


@pytest.mark.usefixtures("failing_copies")
def test_a_failed_store_leaves_no_entry_and_frees_its_host_slots(rig: Rig) -> None:  # H9
    lease, wanted = rig.blocks.take(2), keys("a", "b")
    rig.store(wanted, lease.ids, rig.fill(lease.ids, wanted))
    assert rig.finish("compute", "store") == []
    assert rig.transfers.locate(wanted) == []
    assert (rig.host.pool.num_free, rig.host.pool.num_keys) == (8, 0)
    assert rig.counted("store", "failed") == 1
    lease.release()


def test_blocks_with_a_finished_or_running_store_are_not_copied_again(rig: Rig) -> None:
    lease, wanted = rig.blocks.take(3), keys("a", "b", "c")
    step = rig.fill(lease.ids, wanted)
    rig.store(wanted[:1], lease.ids[:1], step)
    rig.finish("compute", "store")
    rig.store(wanted[:2], lease.ids[:2], step)
    rig.store(wanted, lease.ids, step)
    rig.store(wanted, lease.ids, step)
    rig.finish("store")
    assert rig.metrics.value("transfer_bytes_total", "store") == 3 * LAYOUT.block_bytes
    assert rig.host.pool.num_cached == 3
    lease.release()


def test_a_store_to_a_full_host_tier_evicts_the_end_of_an_old_sequence(rig: Rig) -> None:
    rig.stored(keys(*range(8)))
    rig.stored(keys(8))
    # a run is evicted from its end: its start is shared by more sequences
    assert rig.transfers.locate(keys(*range(8))) == ["host"] * 7
    assert rig.host_holds(key(8))


def test_a_store_is_cut_and_counted_if_all_host_slots_are_leased(rig: Rig) -> None:
    busy = rig.host.pool.take(6)
    rig.stored(keys(*range(5)))
    assert [rig.host_holds(of) for of in keys(*range(5))] == [True, True, False, False, False]
    more = rig.host.pool.take(2)
    rig.stored(keys("x"))
    assert rig.transfers.locate(keys("x")) == []
    assert rig.counted("store", "skipped") == 2
    busy.release()
    more.release()


# ------------------------------------------------------------------ load


def test_a_load_waits_for_the_last_use_of_its_target_blocks(rig: Rig) -> None:  # H3
    rig.stored(keys("a"))
    old = rig.taken([0])
    with rig.hold("compute"):
        last_step = rig.fill([0], keys("the old owner"))
        old.release(after=(last_step,))
        lease = rig.taken([0])
        assert lease.after == (last_step,)
        rig.load(keys("a"), [0], *lease.after)
        assert rig.poll() == []
    assert rig.finish("compute", "load") == []
    assert rig.block(0) == content(key("a")).tobytes()
    lease.release()


def test_a_running_load_keeps_its_slots_and_blocks_after_an_abort(rig: Rig) -> None:  # H6, H10
    rig.stored(keys("a", "b"))
    lease = rig.taken([4, 5])
    with rig.hold("load"):
        rig.load(keys("a", "b"), [4, 5])
        rig.let_go(lease)  # the request was aborted
        assert rig.blocks.num_used == 2
        assert rig.host.pool.num_used == 2
        with pytest.raises(PoolExhausted):
            rig.host.pool.take(7)
        with pytest.raises(PoolExhausted):
            rig.blocks.take(15)
        assert rig.blocks.match(keys("a")) == []  # H7
        rig.clock.now_s += 1e6  # nothing is released by time
        assert rig.poll() == []
        assert rig.blocks.num_used == 2
    assert rig.finish("load") == []
    assert rig.blocks.match(keys("a", "b")) == []  # nobody computed on: nobody has seen that they are good
    assert rig.blocks.num_used == 0


@pytest.mark.parametrize("failing_layer", [0, 1, 2])
@pytest.mark.usefixtures("one_layer_a_group")
def test_a_failed_load_is_reported_once_and_releases_slots_and_blocks(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, failing_layer: int
) -> None:  # H9
    copy = HostStream.copy

    def fail_at(stream: HostStream, batch: CopyBatch) -> None:
        if batch.target_starts[0] % LAYOUT.block_bytes == failing_layer * LAYOUT.layer_bytes:
            raise OSError("injected: the copy failed")
        copy(stream, batch)

    rig.stored(keys("a"))
    lease = rig.blocks.take(1)
    monkeypatch.setattr(HostStream, "copy", fail_at)
    rig.load(keys("a"), lease.ids, request_id=7, epoch=3)
    assert rig.finish("load") == [LoadFailed(7, 3, "load_failed")]
    assert rig.poll() == []
    assert rig.counted("load", "failed") == 1
    assert rig.transfers.transfers_fence() is None
    lease.release()
    assert (rig.blocks.num_cached, rig.host.pool.num_used) == (0, 0)


def test_a_load_of_evicted_blocks_fails(rig: Rig) -> None:
    rig.stored(keys("a"))
    lease = rig.blocks.take(2)
    rig.load(keys("a", "never stored"), lease.ids, request_id=7, epoch=3)
    assert rig.transfers.has_work
    assert rig.poll() == [LoadFailed(7, 3, "gone")]
    assert rig.transfers.transfers_fence() is None
    lease.release()
    assert rig.host.pool.num_used == 0


def test_stores_of_a_step_do_not_evict_blocks_that_its_loads_read(rig: Rig) -> None:
    rig.stored(keys(*range(8)))
    source, target = rig.blocks.take(8), rig.blocks.take(8)
    store = StorePlan(keys(*range(100, 108)), tuple(source.ids), ())
    load = LoadPlan(1, 0, keys(*range(8)), tuple(target.ids), ())
    with rig.hold("load"), rig.hold("store"):
        rig.transfers.submit([store, load])
    assert rig.finish("load", "store") == []
    assert [rig.block(block) for block in target.ids] == [content(of).tobytes() for of in load.keys]
    source.release()
    target.release()


# ------------------------------------------------------------------ gates (H5)


@pytest.mark.usefixtures("one_layer_a_group")
def test_each_layer_of_a_step_waits_for_the_loads_of_its_own_requests_only(rig: Rig) -> None:
    rig.stored(keys("a", "b"))
    lease = rig.blocks.take(2)
    with rig.hold("load"):
        rig.load(keys("a"), lease.ids[:1], request_id=1, epoch=0)
        rig.load(keys("b"), lease.ids[1:], request_id=2, epoch=5)
        assert rig.transfers.gates([(1, 0)]).by_layer == ()  # nothing was heard of them yet: they have no fences
        rig.poll()
        assert rig.ready == [(1, 0), (2, 5)]
        assert rig.transfers.gates([(3, 0), (2, 4), (1, 1)]).by_layer == ()
        own = rig.transfers.gates([(1, 0), (3, 0)]).by_layer
        assert [[fence.tick for fence in fences] for fences in own] == [[2], [3], [4]]  # the hold was tick 1
        assert {fence.stream for fences in own for fence in fences} == {"load-0"}
        both = rig.transfers.gates([(2, 5), (1, 0)]).by_layer
        assert [[(fence.stream, fence.tick) for fence in fences] for fences in both] == [
            [("load-0", 5)],
            [("load-0", 6)],
            [("load-0", 7)],
        ]  # of one stream, only the last counts
    rig.finish("load")
    assert rig.transfers.gates([(1, 0), (2, 5)]).by_layer == ()
    rig.poll()
    lease.release()


@pytest.mark.usefixtures("two_layers_a_group")
def test_small_layers_are_copied_together_and_share_a_fence(rig: Rig) -> None:
    rig.stored(keys("a"))
    lease = rig.blocks.take(1)
    with rig.hold("load"):
        rig.load(keys("a"), lease.ids)
        rig.poll()
        gates = rig.transfers.gates([(1, 0)]).by_layer
        assert [[fence.tick for fence in fences] for fences in gates] == [[2], [2], [3]]
    rig.finish("load")
    assert rig.block(lease.ids[0]) == content(key("a")).tobytes()
    lease.release()


@pytest.mark.usefixtures("one_layer_a_group")
def test_a_layer_that_waited_for_its_fences_reads_loaded_bytes(rig: Rig) -> None:
    rig.stored(keys("a"))
    lease = rig.blocks.take(1)
    rig.memory.memory.data.zero_()
    seen: list[bytes] = []
    with rig.hold("load"):
        rig.load(keys("a"), lease.ids)
        rig.poll()
        for layer, fences in enumerate(rig.transfers.gates([(1, 0)]).by_layer):
            for fence in fences:
                rig.compute.wait(fence)
            start, stop = LAYOUT.layer_span(lease.ids[0], layer, layer + 1)
            rig.compute.submit(
                lambda start=start, stop=stop: seen.append(rig.memory.memory.data[start:stop].numpy().tobytes())
            )
    rig.finish("load", "compute")
    assert b"".join(seen) == content(key("a")).tobytes()
    lease.release()
