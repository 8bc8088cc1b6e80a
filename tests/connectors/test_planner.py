"""The planner against counted blocks and requests like vLLM's: what it finds, loads, stores, holds and lets go."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from foreign_engine import Pool

from sidestream_kv.connectors.key_events import BlockEvent, KeyEvents
from sidestream_kv.connectors.orders import LoadOrder, Order, Orders, PromoteOrder, Report, StoreOrder, TierKeys
from sidestream_kv.connectors.planner import STATE_WINDOW, Group, Planner, _State
from sidestream_kv.kv.key_log import KeysRemoved, KeysStored
from sidestream_kv.types import HOST, Key

FULL, WINDOW = Group(4, 1), Group(4, 1, window=6)  # a window of two blocks where a hit ends
STATES = Group(4, 1, window=STATE_WINDOW, handed=True)


class Rig:
    """A planner whose workers have reported, and a pool of blocks."""

    def __init__(self, *groups: Group, ranks: int = 1, most_held: int = 100, boundary: int = 4) -> None:
        self.now_s = 0.0
        self.groups = groups or (FULL,)
        self.events = KeyEvents()
        self.planner = Planner(
            groups=self.groups,
            boundary=boundary,
            num_ranks=ranks,
            most_held=most_held,
            events=self.events,
            clock=lambda: self.now_s,
        )
        self.pool = Pool(64)
        self.planner.bind(self.pool)
        for rank in range(ranks):
            self.report(rank)

    def report(self, rank: int = 0, *, resets: int = 0, settled: int = 0, **fields: Any) -> None:
        self.planner.take(Report(rank=rank, step=0, resets=resets, settled=settled, **fields))

    def request(self, num_tokens: int, name: str = "r", text: str = "a") -> Any:
        hashes = [hashlib.sha256(f"{text}{at}".encode()).digest() for at in range(num_tokens // 4)]
        return SimpleNamespace(request_id=name, num_tokens=num_tokens, num_computed_tokens=0, block_hashes=hashes)

    def keys(self, request: Any, group: int = 0, *blocks: int) -> tuple[Key, ...]:
        tokens = self.groups[group].hashes
        keys = [
            request.block_hashes[at][:15] + bytes([group])
            for at in range(tokens - 1, len(request.block_hashes), tokens)
        ]
        return tuple(keys[block] for block in blocks) if blocks else tuple(keys)

    def hold(self, *keys: Key, tier: str = HOST, ranks: Sequence[int] = (0,)) -> None:
        """Let the tiers of these ranks hold these keys."""
        for rank in ranks:
            self.report(rank, changes=(KeysStored(tier, keys),))

    def hold_all(self, request: Any, tier: str = HOST) -> None:
        for group in range(len(self.groups)):
            self.hold(*self.keys(request, group), tier=tier)

    def blocks(self, count: int) -> list[int]:
        return [block.block_id for block in self.pool.take(count)]

    def free(self, block_ids: Sequence[int]) -> None:
        self.pool.free_blocks(self.pool.blocks[block_id] for block_id in block_ids)

    def step(
        self, request: Any = None, count: int = 0, ids: Any = (), *states: tuple[int, int, int], again: bool = True
    ) -> Orders:
        """A step with these tokens of the request, which has these new blocks, by group, and these complete states."""
        scheduled = [] if request is None else [(request.request_id, ids, again)]
        counts = {} if request is None else {request.request_id: count}
        orders = self.planner.plan_step(scheduled, counts, dict.fromkeys(counts, states))
        if request is not None:
            request.num_computed_tokens += count
        return orders

    def start(self, request: Any, count: int, *ids: list[int]) -> Orders:
        """Begin a request without a load."""
        assert not self.planner.match(request, 0)
        self.planner.allocated(request, ids, 0)
        return self.step(request, count, ids)

    def load(self, request: Any, *ids: list[int]) -> LoadOrder:
        found = self.planner.match(request, 0)
        assert found
        self.planner.allocated(request, ids, found)
        request.num_computed_tokens = found
        (order,) = self.step().orders
        assert isinstance(order, LoadOrder)
        return order


# ---------------------------------------------------------------------- hits


def test_a_hit_ends_before_the_last_token_and_at_the_first_missing_block() -> None:
    rig = Rig()
    rig.hold_all(rig.request(40))
    assert [rig.planner.match(rig.request(tokens, f"{tokens}"), 0) for tokens in (4, 5, 16, 17)] == [0, 4, 12, 16]
    other = rig.request(40, "other", "b")
    rig.hold(*rig.keys(other, 0, 0, 1, 3))
    assert rig.planner.match(other, 0) == 8


def test_a_hit_begins_at_the_tokens_that_are_computed() -> None:
    rig = Rig()
    request = rig.request(17)
    rig.hold(*rig.keys(request, 0, 2))
    assert rig.planner.match(request, 0) == 0
    assert rig.planner.match(request, 8) == 4
    rig.planner.allocated(request, [ids := rig.blocks(3)], 4)
    (order,) = rig.step().orders
    assert order == LoadOrder("r", rig.keys(request, 0, 2), (ids[2],))


@pytest.mark.parametrize(("held", "found"), [((3, 4), 20), ((4,), 0), ((0, 1, 3), 8), ((1, 2, 4), 12), ((0,), 4)])
def test_a_hit_needs_the_whole_sliding_window(held: tuple[int, ...], found: int) -> None:
    rig = Rig(FULL, WINDOW)
    request = rig.request(21)
    rig.hold(*rig.keys(request))
    rig.hold(*rig.keys(request, 1, *held))
    assert rig.planner.match(request, 0) == found


def test_a_hit_is_shortened_until_all_groups_have_their_windows() -> None:
    rig = Rig(FULL, WINDOW, WINDOW)
    request = rig.request(21)
    rig.hold(*rig.keys(request))
    rig.hold(*rig.keys(request, 1, 0, 1, 3, 4))
    rig.hold(*rig.keys(request, 2, 0, 1, 2, 3))
    assert rig.planner.match(request, 0) == 8


def test_a_load_leaves_out_blocks_before_the_window_and_empty_blocks() -> None:
    rig = Rig(FULL, WINDOW)
    request = rig.request(17)
    rig.hold_all(request)
    full, window = rig.blocks(4), [0, 0, *rig.blocks(2)]
    order = rig.load(request, full, window)
    assert order.block_ids == (*full, *window[2:])
    assert order.keys == (*rig.keys(request), *rig.keys(request, 1, 2, 3))


def test_a_hit_ends_where_all_groups_have_a_state_and_loads_only_these() -> None:
    rig = Rig(FULL, STATES, STATES)
    request = rig.request(21)
    rig.hold(*rig.keys(request))
    rig.hold(*rig.keys(request, 1, 0, 2, 4))
    rig.hold(*rig.keys(request, 2, 0, 1, 2))
    full, one, two = rig.blocks(3), *rig.blocks(2)
    order = rig.load(request, full, [0, 0, one], [0, 0, two])
    assert order.block_ids == (*full, one, two)
    assert order.keys == (*rig.keys(request)[:3], *rig.keys(request, 1, 2), *rig.keys(request, 2, 2))


def test_groups_with_other_block_sizes_agree_on_a_boundary() -> None:
    rig = Rig(FULL, Group(8, 2), boundary=8)
    request = rig.request(24)
    rig.hold_all(request)
    assert rig.planner.match(request, 0) == 16
    rig.report(changes=(KeysRemoved(HOST, rig.keys(request, 0, 3)),))
    assert rig.planner.match(request, 0) == 8


def test_equal_hashes_of_two_groups_are_two_blocks() -> None:
    rig = Rig(FULL, FULL)
    request = rig.request(9)
    orders = rig.start(request, 9, rig.blocks(2), rig.blocks(2))
    (order,) = orders.orders
    assert isinstance(order, StoreOrder)
    assert len(set(order.keys)) == 4
    rig.hold(*rig.keys(request))
    assert rig.planner.match(rig.request(9, "other"), 0) == 0


def test_blocks_on_disk_are_promoted_and_then_loaded_from_host_memory() -> None:
    rig = Rig()
    request = rig.request(17)
    rig.hold(*rig.keys(request, 0, 0))
    rig.hold(*rig.keys(request), tier="disk")
    assert rig.planner.match(request, 0) is None
    assert rig.step().orders == (PromoteOrder(rig.keys(request)),)
    assert rig.planner.match(request, 0) is None and rig.planner.busy
    rig.hold(*rig.keys(request, 0, 1))  # a third block could not be read
    rig.report(promoted=(1,))
    assert rig.planner.match(request, 0) == 8
    assert rig.step().orders == ()
    assert rig.planner.came_from("r") == "disk"


def test_nothing_is_found_until_all_workers_have_reported() -> None:
    planner = Planner(groups=(FULL,), boundary=4, num_ranks=2, most_held=1)
    rig = Rig()
    planner.take(Report(rank=0, step=1, resets=0))
    assert planner.match(rig.request(9), 0) is None
    planner.take(Report(rank=1, step=1, resets=0))
    assert planner.match(rig.request(9), 0) == 0


def test_a_block_that_one_rank_lacks_is_not_found() -> None:
    rig = Rig(ranks=2)
    request = rig.request(17)
    rig.hold(*rig.keys(request))
    assert rig.planner.match(request, 0) == 0
    rig.hold(*rig.keys(request), ranks=[1])
    assert rig.planner.match(request, 0) == 16
    rig.report(1, changes=(KeysRemoved(HOST, rig.keys(request, 0, 2)),))
    assert rig.planner.match(request, 0) == 8
    rig.hold(*rig.keys(request, 0, 2), tier="disk", ranks=[1])
    assert rig.planner.match(request, 0) is None  # promoted, although rank 0 has all blocks in host memory


def test_blocks_are_computed_if_that_takes_less_time() -> None:
    rig = Rig()
    rig.start(rig.request(1024, "first", "b"), 1024, rig.blocks(0))
    rig.now_s = 1.0
    rig.planner.take(Report(rank=0, step=1, resets=0, seconds={HOST: (0.0, 1e-3)}))  # 1,024 tokens in a second
    rig.hold_all(rig.request(17))
    assert rig.planner.match(rig.request(17), 0) == 16
    rig.report(seconds={HOST: (0.0, 1e-2)})
    assert rig.planner.match(rig.request(17), 0) == 0


# ---------------------------------------------------------------------- device blocks of transfers


@pytest.mark.parametrize("kind", ["load", "store"])
def test_a_transfer_holds_its_device_blocks_until_all_ranks_have_settled(kind: str) -> None:
    rig = Rig(ranks=2)
    request = rig.request(9)
    ids = rig.blocks(3)
    if kind == "load":
        rig.hold(*rig.keys(request), ranks=[0, 1])
        rig.load(request, ids)
    else:
        rig.start(request, 9, ids)
    rig.planner.request_ended("r", [ids])
    rig.free(ids)
    assert [rig.pool.blocks[block].users for block in ids] == [1, 1, 0]
    rig.report(0, settled=1)
    assert rig.planner.holds_blocks and rig.planner.busy
    rig.report(1, settled=1)
    assert not rig.planner.holds_blocks
    assert list(rig.pool.free)[-2:] == [rig.pool.blocks[block] for block in reversed(ids[:2])]  # the last goes first


def test_an_ended_request_stores_blocks_of_its_last_step() -> None:
    rig = Rig()
    request = rig.request(7)
    ids = rig.blocks(2)
    assert rig.start(request, 7, ids).orders == (StoreOrder(rig.keys(request), (ids[0],), rig.keys(request)),)
    longer = rig.request(8)
    request.num_tokens, request.num_computed_tokens, request.block_hashes = 8, 8, longer.block_hashes
    rig.planner.request_ended("r", [ids])
    assert rig.step().orders == (StoreOrder(rig.keys(longer, 0, 1), (ids[1],), rig.keys(longer)),)
    assert not rig.planner._states


def test_an_ended_request_that_lost_its_blocks_stores_nothing() -> None:
    rig = Rig(most_held=0)
    request = rig.request(9)
    rig.start(request, 9, rig.blocks(3))
    rig.report(again=True)  # its blocks would be stored now, but it was preempted
    rig.planner._most_held = 100
    rig.planner.request_ended("r", [[]])
    assert rig.step().orders == ()


def test_a_resumed_request_stores_its_new_blocks() -> None:
    rig = Rig()
    request = rig.request(13)
    rig.start(request, 5, rig.blocks(2))
    request.num_computed_tokens = 0
    new = rig.blocks(4)
    (order,) = rig.step(request, 13, [new]).orders
    assert isinstance(order, StoreOrder)
    assert order.block_ids == tuple(new[1:3])  # the first is being stored already


def test_blocks_are_stored_once_and_not_before_their_tokens_are_known() -> None:
    rig = Rig()
    request = rig.request(7)
    rig.start(request, 6, rig.blocks(2))
    assert rig.step(request, 3, None, again=False).orders == ()  # drafts: the block's last tokens are unknown
    rig.report(settled=1, changes=(KeysStored(HOST, rig.keys(request)),))
    assert rig.start(rig.request(4, "other"), 4, rig.blocks(1)).orders == ()


def test_blocks_without_room_are_stored_in_order_at_later_steps_and_at_the_end() -> None:
    rig = Rig(most_held=2)
    request = rig.request(21)
    ids = rig.blocks(6)
    (first,) = rig.start(request, 21, ids).orders
    assert rig.step(request, 1, None, again=False).orders == ()
    rig.report(settled=1, changes=(KeysStored(HOST, rig.keys(request, 0, 0, 1)),))
    (second,) = rig.step(request, 1, None, again=False).orders
    rig.report(settled=2, changes=(KeysStored(HOST, rig.keys(request, 0, 2, 3)),))
    rig.planner.request_ended("r", [ids])
    (last,) = rig.step().orders
    stores = [order for order in (first, second, last) if isinstance(order, StoreOrder)]
    assert [order.block_ids for order in stores] == [tuple(ids[:2]), tuple(ids[2:4]), tuple(ids[4:5])]
    assert [order.keys for order in stores] == [rig.keys(request, 0, *blocks) for blocks in ((0, 1), (2, 3), (4,))]
    assert rig.planner.counts.stores == 5 and rig.planner.counts.stores_put_off == 3


def test_states_are_stored_when_they_are_handed_over_and_with_their_own_tokens() -> None:
    rig = Rig(FULL, STATES, most_held=0)  # each state is handed over once, so room for waiting ones does not matter
    request = rig.request(15)
    rig.planner.match(request, 0)
    full, states = rig.blocks(4), rig.blocks(4)
    (order,) = rig.step(request, 15, (full, states), (1, states[1], 8), (1, states[2], 14), (1, 0, 4)).orders
    assert order == StoreOrder(rig.keys(request, 1, 1), (states[1],))
    assert rig.pool.blocks[states[1]].users == 2
    assert rig.step(request, 1, None, (1, states[1], 8), again=False).orders == ()  # it is being stored


def test_a_step_without_room_looks_at_one_block_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(most_held=0)
    request = rig.request(200)
    rig.start(request, 200, rig.blocks(50))
    looked: list[Key] = []
    outside = rig.planner._keys.outside_host_memory
    monkeypatch.setattr(rig.planner._keys, "outside_host_memory", lambda keys: looked.extend(keys) or outside(keys))
    rig.step(request, 1, None, again=False)
    assert looked == list(rig.keys(request, 0, 0))


def test_stores_of_all_requests_of_a_step_are_one_order() -> None:
    rig = Rig()
    one, two = rig.request(9, "one", "a"), rig.request(9, "two", "b")
    ids, others = rig.blocks(3), rig.blocks(3)
    for request in (one, two):
        rig.planner.match(request, 0)
    new = [("one", [ids], True), ("two", [others], True)]
    (order,) = rig.planner.plan_step(new, {"one": 9, "two": 9}).orders
    keys = rig.keys(one) + rig.keys(two)
    assert order == StoreOrder(keys, (*ids[:2], *others[:2]), keys)
    rig.planner.request_ended("one", [ids])
    rig.report(settled=1)
    assert not rig.planner.busy and not rig.planner._holds.storing


def test_a_prompt_that_two_requests_compute_in_one_step_is_stored_once() -> None:
    rig = Rig()
    ids = rig.blocks(3)
    for name in ("one", "two"):
        rig.planner.match(rig.request(9, name), 0)
    new = [("one", [ids], True), ("two", [rig.blocks(3)], True)]
    (order,) = rig.planner.plan_step(new, {"one": 9, "two": 9}).orders
    assert isinstance(order, StoreOrder) and order.block_ids == tuple(ids[:2])


def test_a_step_looks_only_at_requests_whose_next_block_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(FULL, WINDOW)
    request = rig.request(12)
    request.num_tokens = 9
    rig.start(request, 9, rig.blocks(3), rig.blocks(3))
    with monkeypatch.context() as patch:
        patch.setattr(rig.planner, "_not_held", None)
        patch.setattr(_State, "extend_keys", None)
        assert rig.step(request, 2, None, again=False).orders == ()
    (order,) = rig.step(request, 1, None, again=False).orders
    assert isinstance(order, StoreOrder) and order.keys == (*rig.keys(request, 0, 2), *rig.keys(request, 1, 2))


def test_a_new_prompt_gets_the_keys_of_its_first_blocks_only() -> None:
    rig = Rig()
    rig.hold_all(rig.request(400, "other", "b"))
    request = rig.request(400)
    assert rig.planner.match(request, 0) == 0
    assert rig.planner._states["r"].keys == [list(rig.keys(request, 0, 0))]


@pytest.mark.parametrize("group", [0, 1])
def test_keys_of_many_blocks_are_those_of_each_block(group: int) -> None:
    rig = Rig(FULL, Group(8, 2), boundary=8)
    request = rig.request(800)
    orders = rig.start(request, 800, rig.blocks(30), rig.blocks(30))
    (order,) = orders.orders
    assert isinstance(order, StoreOrder)
    assert order.keys[30 * group : 30 * (group + 1)] == rig.keys(request, group)[:30]


def test_a_block_that_fell_behind_its_window_is_not_stored_later() -> None:
    rig = Rig(WINDOW, most_held=1)
    request = rig.request(25)
    ids = rig.blocks(6)
    rig.start(request, 12, ids[:3])
    rig.step(request, 4, [ids[3:4]], again=False)  # the engine frees the first block
    rig.report(settled=1, changes=(KeysStored(HOST, rig.keys(request, 0, 0)),))
    (order,) = rig.step(request, 4, [ids[4:5]], again=False).orders  # and the second one
    assert isinstance(order, StoreOrder) and order.block_ids == (ids[2],)


def test_stores_that_failed_are_tried_again_but_for_groups_with_a_window() -> None:
    rig = Rig(FULL, WINDOW)
    request = rig.request(12)
    rig.start(request, 9, rig.blocks(3), rig.blocks(3))
    rig.report(settled=1, again=True, changes=(KeysStored(HOST, rig.keys(request, 0, 0)),))
    (order,) = rig.step(request, 1, None, again=False).orders
    assert isinstance(order, StoreOrder)
    assert order.keys == rig.keys(request, 0, 1)  # blocks behind a sliding window may have other owners by now


def test_blocks_of_an_unfinished_load_are_not_stored() -> None:
    rig = Rig()
    request = rig.request(9)
    rig.hold_all(request)
    rig.load(request, ids := rig.blocks(3))
    rig.report(changes=(KeysRemoved(HOST, rig.keys(request)),))
    assert rig.step(request, 1, [ids]).orders == ()
    rig.planner.request_ended("r", [ids])
    assert rig.step().orders == ()
    rig.report(settled=1, loaded={1: True})
    assert not rig.planner.busy


def test_a_request_computes_everything_after_a_load_failed_on_any_rank() -> None:
    rig = Rig(ranks=2)
    request = rig.request(9)
    rig.hold(*rig.keys(request), ranks=[0, 1])
    rig.load(request, rig.blocks(3))
    rig.report(0, loaded={1: False})
    rig.report(1, settled=1, loaded={1: True})
    assert rig.planner.match(request, 0) == 0
    assert rig.planner.match(rig.request(9, "other"), 0) == 8


def test_after_a_reset_nothing_is_found_until_all_ranks_have_executed_it() -> None:
    rig = Rig(ranks=2)
    request = rig.request(9)
    rig.hold(*rig.keys(request), ranks=[0, 1])
    rig.planner.reset()
    assert rig.step().resets == 1
    rig.hold(*rig.keys(request), ranks=[0, 1])
    rig.report(0, resets=1)
    assert rig.planner.match(request, 0) == 0
    rig.report(1, resets=1)
    assert rig.planner.match(request, 0) == 8


def test_blocks_are_stored_again_at_once_after_a_reset() -> None:
    rig = Rig()
    request = rig.request(4)
    rig.hold(*rig.keys(request))
    rig.planner.reset()
    assert rig.start(request, 4, rig.blocks(1)).orders != ()


def test_the_pool_can_be_reset_while_transfers_hold_blocks() -> None:
    rig = Rig()
    ids = rig.blocks(3)
    rig.start(rig.request(9), 9, ids)
    rig.planner.request_ended("r", [ids])
    rig.free(ids)
    assert rig.pool.reset_prefix_cache()
    assert [rig.pool.blocks[block].users for block in ids] == [1, 1, 0]
    rig.report(settled=1)
    assert len(rig.pool.free) == len(rig.pool.blocks) - 1


def test_a_store_that_was_not_sent_before_a_reset_is_not_executed() -> None:
    rig = Rig()
    request = rig.request(9)
    rig.planner.match(request, 0)
    request.num_computed_tokens = 9
    rig.planner.request_ended("r", [rig.blocks(3)])
    rig.planner.reset()
    assert rig.step().orders == (StoreOrder((), ()),)
    assert rig.start(rig.request(9, "other"), 9, rig.blocks(3)).orders != ()


def test_states_from_before_a_reset_are_not_stored() -> None:
    rig = Rig(FULL, STATES)
    request = rig.request(9)
    states = rig.blocks(3)
    rig.start(request, 4, rig.blocks(1), states[:1])
    rig.planner.reset()
    assert rig.step(request, 4, ([], []), (1, states[0], 4), again=False).orders == ()


@pytest.mark.parametrize("when", ["running", "loading", "loaded"])
def test_blocks_from_before_a_reset_are_not_stored_until_the_request_starts_again(when: str) -> None:
    rig = Rig()
    request = rig.request(17)
    ids = rig.blocks(5)
    if when == "running":
        rig.start(request, 9, ids)
    else:
        rig.hold(*rig.keys(request, 0, 0))
        rig.load(request, ids)
    if when == "loaded":
        rig.report(settled=1, loaded={1: True})
    rig.planner.reset()
    forgotten = (KeysRemoved(HOST, rig.keys(request)),)
    rig.report(resets=1, settled=1, loaded={1: True} if when == "loading" else {}, changes=forgotten)
    assert rig.step(request, 4, [[] if when == "running" else ids], again=when != "running").orders == ()
    request.num_computed_tokens = 0
    assert rig.start(request, 17, rig.blocks(5)).orders != ()  # it was preempted


def test_the_work_for_long_prompts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(FULL, Group(4, 1, window=400), Group(4, 1, window=400))
    request = rig.request(40_001)
    rig.hold(*rig.keys(request))
    rig.hold(*(key for at, key in enumerate(rig.keys(request, 1)) if at % 90))
    rig.hold(*rig.keys(request, 2)[:9_000])
    looked = 0
    missing = TierKeys.missing

    def counted(keys: TierKeys, asked: Sequence[Key]) -> Collection[Key]:
        nonlocal looked
        looked += len(asked)
        return missing(keys, asked)

    monkeypatch.setattr(TierKeys, "missing", counted)
    assert rig.planner.match(request, 0) == 0 and looked <= 30_000 + 300
    looked = 0
    assert rig.planner.match(rig.request(40_001, "other", "b"), 0) == 0 and looked <= 1
    rig.start(rig.request(40_001, "third", "b"), 40_000, *[[0] * 10_000] * 3)
    looked = 0
    third = rig.planner._states["third"].request
    assert rig.step(third, 1, None, again=False).orders == () and looked == 0


def test_orders_have_consecutive_numbers_and_survive_a_process_border() -> None:
    rig = Rig()
    orders: list[Order] = []
    for number in range(3):
        request = rig.request(9, f"{number}", f"{number}")
        sent = rig.start(request, 9, rig.blocks(3))
        assert (sent.step, sent.first) == (number + 1, len(orders) + 1)
        orders += sent.orders
        assert pickle.loads(pickle.dumps(sent)) == sent
    assert len(orders) == 3


# ---------------------------------------------------------------------- events


def test_events_name_the_engines_hashes_until_no_tier_holds_a_block() -> None:
    rig = Rig()
    request = rig.request(9)
    rig.start(request, 9, rig.blocks(3))
    first, second = rig.keys(request)
    rig.report(
        changes=(KeysStored(HOST, (first, second)), KeysStored("disk", (first, b"of an earlier start"))), settled=1
    )
    rig.report(changes=(KeysRemoved(HOST, (first, second)), KeysRemoved("disk", (first,))))
    hashes = tuple(request.block_hashes[:2])
    assert rig.events.take() == [
        BlockEvent(HOST, True, 0, hashes),
        BlockEvent("disk", True, 0, hashes[:1]),
        BlockEvent(HOST, False, 0, hashes),
        BlockEvent("disk", False, 0, hashes[:1]),
    ]
    assert rig.events.sizes() == {"hashes": 0, "events": 0}


def test_a_block_that_found_no_slot_has_no_event_and_is_forgotten() -> None:
    rig = Rig()
    rig.start(rig.request(9), 9, rig.blocks(3))
    rig.report(settled=1)
    assert rig.events.take() == [] and rig.events.sizes()["hashes"] == 0
