"""The scheduler's pages: blocks of layers with a sliding window."""

from __future__ import annotations

import pytest
from scheduler_world import GREEDY, SimFence, SimStream, SimTiers

from sidestream.errors import InvariantError
from sidestream.schedule.limits import Limits
from sidestream.schedule.request import Request
from sidestream.schedule.scheduler import Scheduler
from sidestream.types import RowResult
from sidestream_kv.kv.keys import BlockKeys
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.kv.pool import FencedPool
from sidestream_kv.kv.window_layout import WindowedLayers
from sidestream_kv.types import HOST, LoadPlan

SIZE = 4
LAYOUT = KVLayout(3, 1, 2, SIZE, "float32", windows=(6, 0, 6))


def request_of(number: int, num_tokens: int) -> Request:
    return Request(number, tuple(range(1, 1 + num_tokens)), GREEDY, 8, frozenset(), 0)


class World:
    """A scheduler with pages of two blocks, and chunks of 8 tokens."""

    def __init__(self, num_blocks: int) -> None:
        windows = WindowedLayers.of(LAYOUT)
        assert windows is not None
        self.windows = windows
        self.blocks = FencedPool("blocks", num_blocks)
        self.tiers = SimTiers()
        self.scheduler = Scheduler(
            limits=Limits(SIZE, 8, 16),
            blocks=self.blocks,
            slots=FencedPool("rows", 4),
            keys=BlockKeys(fingerprint="toy", layout=windows.blocks),
            windows=windows,
            tiers=self.tiers,
        )
        self.compute = SimStream("compute")

    def step(self) -> tuple[list[int], tuple[object, ...]]:
        """Plan, launch and commit a step. Returns the requests with a row, and the fences for which it waits."""
        plan = self.scheduler.plan()
        fence = self.compute.submit(lambda: None)
        self.scheduler.launched(plan.batch, fence)
        while self.compute.queue:
            self.compute.run()
        results = [RowResult((1,)) for samples in plan.batch.columns.samples if samples]
        committed = self.scheduler.commit(plan.batch, results, fence)
        self.scheduler.publish(committed)
        self.scheduler.trim(committed)
        return [*plan.batch.columns.request_id], plan.after


def test_a_chunk_waits_for_the_last_uses_of_its_new_pages() -> None:
    world = World(40)
    used = SimFence(SimStream("load"), 1)
    world.blocks.take(40).release(after=(used,))
    world.scheduler.submit(request_of(1, 20))
    for _ in range(2):  # the first chunk also takes the blocks of the whole prompt, the second one only pages
        assert used in world.step()[1]


def test_a_load_waits_for_the_last_uses_of_its_pages() -> None:
    world = World(60)
    world.scheduler.submit(first := request_of(1, 17))
    while first.num_outputs < 1:
        world.step()
    world.scheduler.finish(first, "length")
    keys = world.scheduler.keys_of(first.prompt)
    world.blocks.forget([block for key in world.scheduler.part_keys(keys) for block in world.blocks.match([key])])
    used = SimFence(SimStream("compute"), 1)
    free = world.blocks.take(world.blocks.num_free)
    free.split(4).release(after=(used,))  # for the pages, which are taken first
    free.release()
    world.tiers.where = dict.fromkeys(world.scheduler.part_keys(keys), HOST)
    world.scheduler.submit(request_of(2, 17))
    (load,) = world.scheduler.plan().transfers
    assert isinstance(load, LoadPlan)
    assert (load.keys, load.num_whole) == (tuple(world.scheduler.end_parts(keys)), 4)
    assert used in load.after


def test_a_page_behind_the_window_waits_for_its_step_on_all_ranks() -> None:
    world = World(60)
    world.scheduler.submit(request_of(1, 40))
    world.step()
    plan, late = world.scheduler.plan(), SimFence(SimStream("other ranks"), 1)
    world.scheduler.launched(plan.batch, late)
    committed = world.scheduler.commit(plan.batch, [], late)
    world.scheduler.publish(committed)
    assert late not in world.blocks.take(world.blocks.num_available).after
    world.scheduler.trim(committed)
    assert late in world.blocks.take(world.blocks.num_available).after


def test_a_request_holds_no_page_behind_its_window() -> None:
    world = World(60)
    world.scheduler.submit(request := request_of(1, 40))
    for _ in range(8):
        world.step()
        pages = request.pages
        assert pages is not None
        assert pages.first >= world.windows.behind(request.committed_len // SIZE * SIZE)
        assert len(pages.lease.ids) == len(pages.table) - 2 * pages.first
        assert world.blocks.num_used == 10 + (request.launched_len > 40) + len(pages.lease.ids)
    world.scheduler.finish(request, "abort")
    world.blocks.check()
    assert world.blocks.num_used == 0


def test_a_chunk_without_room_for_its_pages_waits_until_a_request_leaves() -> None:
    world = World(30)
    asked = [request_of(number, 16) for number in (1, 2, 3)]
    for request in asked:
        world.scheduler.submit(request)
    while any(request.finish_reason is None for request in asked):
        assert world.step()[0]  # some request always goes on
        for request in asked:
            if request.num_outputs == request.max_outputs:
                world.scheduler.finish(request, "length")
    world.blocks.check()


def test_a_split_lease_keeps_the_blocks_that_were_not_split_off() -> None:
    pool = FencedPool("blocks", 5)
    lease = pool.take(4)
    lease.split(3).release()
    assert (lease.ids, pool.num_used) == ([3], 1)
    with pytest.raises(InvariantError, match="cannot be split off"):
        lease.split(2)
    lease.release()
    pool.check()
