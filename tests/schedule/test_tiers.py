"""Requests whose blocks are in host memory or on disk."""

from __future__ import annotations

import pytest
from plans import loading, promoting, prompt, row_of, spans, states, steps_until
from scheduler_world import SimTiers, World

from sidestream.schedule.limits import Limits
from sidestream.schedule.prefix_cache import TierLoads
from sidestream.schedule.request import Request, RequestQueues, State
from sidestream.types import CachedTokens
from sidestream_kv.types import FindPlan, LoadPlan, PromotePlan


def test_blocks_in_the_host_tier_are_loaded_and_others_computed() -> None:
    world = World()
    request = world.submit(prompt(22))
    world.tiers.where = dict.fromkeys(world.keys_of(request)[:4], "host")
    plan = world.step()
    [load] = plan.transfers
    assert isinstance(load, LoadPlan)
    assert load.keys == tuple(world.keys_of(request)[:4])
    assert plan.batch.rows == ()  # no step could be gated by it yet
    assert request.cached == CachedTokens(host=16)
    plan = world.step()
    assert load.block_ids == row_of(plan, request).block_table[:4]
    assert spans(plan, request) == [(16, 20)]
    world.run()


def test_a_request_joins_a_step_only_once_its_load_is_ready() -> None:  # H5
    world = World()
    request, other = world.submit(prompt(22)), world.submit(prompt(6, beginning=11))
    world.tiers.where = dict.fromkeys(world.keys_of(request)[:4], "host")
    plan = world.scheduler.plan()
    assert {row.request_id for row in plan.batch.rows} == {other.id}
    assert request.state is State.RUNNING
    assert request.id not in {row.request_id for row in world.scheduler.plan().batch.rows}
    world.scheduler.load_ready(request.id, epoch=0)
    assert request.id in {row.request_id for row in world.scheduler.plan().batch.rows}


def test_decoding_requests_do_not_wait_for_the_load_of_another_request() -> None:
    world = World()
    other = world.submit(prompt(6, beginning=11), outputs=20)
    steps_until(world, lambda: other.begun and other.can_decode)
    request = world.submit(prompt(22))
    world.tiers.where = dict.fromkeys(world.keys_of(request)[:4], "host")
    world.tiers.left_s = 0.003
    assert world.scheduler.plan().transfers
    world.scheduler.load_ready(request.id, epoch=0)
    assert [row.request_id for row in world.scheduler.plan(lead_s=0.002).batch.rows] == [other.id]
    world.tiers.left_s = 0.002  # the device is busy until it is there
    assert [row.request_id for row in world.scheduler.plan(lead_s=0.002).batch.rows] == [other.id, request.id]
    world.tiers.left_s = 1.0  # of the first step only: the others run behind it
    assert request.id in {row.request_id for row in world.scheduler.plan().batch.rows}


def arriving(world: World, count: int) -> list[Request]:
    """Requests whose blocks come from host memory, with fences for them, and a second to go."""
    requests = [world.submit(prompt(22, beginning=1 + 100 * number)) for number in range(count)]
    world.tiers.where = dict.fromkeys((key for request in requests for key in world.keys_of(request)[:4]), "host")
    world.tiers.left_s = 1.0
    assert len(world.scheduler.plan().transfers) == count
    for request in requests:
        world.scheduler.load_ready(request.id, epoch=0)
    return requests


def test_a_prompt_without_a_load_does_not_wait_for_the_load_of_another_request() -> None:
    world = World()
    [request] = arriving(world, 1)
    cold = world.submit(prompt(6, beginning=11))
    assert [row.request_id for row in world.scheduler.plan().batch.rows] == [cold.id]
    world.scheduler.finish(cold, "abort")
    assert [row.request_id for row in world.scheduler.plan().batch.rows] == [request.id]  # nobody else waits now


def test_the_first_of_two_loading_requests_does_not_wait_for_the_second() -> None:
    world = World()
    first, _ = arriving(world, 2)
    assert [row.request_id for row in world.scheduler.plan().batch.rows] == [first.id]


def test_a_single_request_begins_while_its_load_runs() -> None:
    world = World()
    [request] = arriving(world, 1)
    assert [row.request_id for row in world.scheduler.plan().batch.rows] == [request.id]


def test_the_end_of_a_load_of_an_earlier_epoch_is_ignored() -> None:  # H5
    world = World()
    request = world.submit(prompt(22))
    world.tiers.where = dict.fromkeys(world.keys_of(request)[:4], "host")
    world.scheduler.plan()
    world.scheduler.preempt(request)
    [load] = world.scheduler.plan().transfers
    assert (load.epoch, request.loading) == (1, True)
    world.scheduler.load_ready(request.id, epoch=0)
    world.scheduler.load_ready(99, epoch=0)
    assert world.scheduler.plan().batch.rows == ()
    world.scheduler.load_ready(request.id, epoch=1)
    assert len(world.scheduler.plan().batch.rows) == 1


def test_blocks_on_the_device_are_not_loaded() -> None:
    world = World()
    world.submit(prompt(9))
    world.run()
    request = world.submit(prompt(22))
    world.tiers.where = dict.fromkeys(world.keys_of(request)[:4], "host")
    [load] = world.step().transfers
    assert isinstance(load, LoadPlan)
    assert load.keys == tuple(world.keys_of(request)[2:4])
    assert request.cached == CachedTokens(device=8, host=8)
    world.run()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_blocks_whose_load_does_not_pay_are_computed(tier: str) -> None:
    world = World()
    request = world.submit(prompt(22))
    world.tiers.where = dict.fromkeys(world.keys_of(request)[:4], tier)
    world.tiers.worth = False
    assert world.step().transfers == ()
    world.run()
    assert request.cached == CachedTokens()


def test_a_request_waiting_for_the_disk_holds_no_blocks_and_delays_no_request() -> None:
    world = World()
    request = world.submit(prompt(18))
    keys = world.keys_of(request)
    world.tiers.where = {**dict.fromkeys(keys[:2], "host"), **dict.fromkeys(keys[2:4], "disk")}
    other = world.submit(prompt(3, beginning=11))
    [promotion] = world.step().transfers
    assert promotion == PromotePlan(request.id, 0, tuple(keys[:4]))
    assert states([request, other]) == [State.LOADING, State.RUNNING]
    assert (request.slot, request.blocks) == (None, None)
    assert world.step().transfers == ()
    world.end_promotion(world.promotions[0], complete=True)
    assert request.state is State.WAITING
    world.run()
    assert request.cached == CachedTokens(host=8, disk=8)


def test_the_head_of_a_prefix_is_loaded_and_its_tail_computed() -> None:
    world = World()
    request = world.submit(prompt(18))
    keys = world.keys_of(request)
    world.tiers.where = {**dict.fromkeys(keys[:1], "host"), **dict.fromkeys(keys[1:4], "disk")}
    world.tiers.most = 3
    assert world.step().transfers == (PromotePlan(request.id, 0, tuple(keys[:3])),)
    world.end_promotion(world.promotions[0], complete=True)
    world.tiers.where.update(dict.fromkeys(keys[:3], "host"))
    world.run()
    assert request.cached == CachedTokens(host=4, disk=8) and request.promotions == 1


def test_a_prefix_with_recurrent_state_is_loaded_whole_or_not_at_all() -> None:
    view, limits = SimTiers(), Limits(block_tokens=4, chunk_tokens=8, token_budget=10)
    view.most = 2
    loads = TierLoads(limits, view, RequestQueues(limits.aging_steps), 1, divides=False)
    assert loads.num_worth_waiting(["disk"] * 4, num_partial=0) == 4
    view.worth = False
    assert loads.num_worth_waiting(["disk"] * 4, num_partial=0) == 0


def test_at_most_as_many_requests_wait_for_the_disk_as_there_are_rows() -> None:
    world = World(num_rows=2, num_blocks=32)
    requests = [world.submit(prompt(18, beginning=20 * index)) for index in range(3)]
    for request in requests:
        world.tiers.where.update(dict.fromkeys(world.keys_of(request)[:4], "disk"))
    world.step()
    assert states(requests) == [
        State.LOADING,
        State.LOADING,
        State.RUNNING,
    ]  # the third computes what it could have waited for
    world.run()


def queue_behind(world: World, count: int) -> list[Request]:
    """Requests with blocks on disk, behind requests that have all slots."""
    for index in range(2):
        world.submit(prompt(5, beginning=90 + 3 * index), outputs=8)
    world.step()
    requests = [world.submit(prompt(18, beginning=20 * index)) for index in range(count)]
    for request in requests:
        world.tiers.where.update(dict.fromkeys(world.keys_of(request)[:4], "disk"))
    return requests


def reading_ahead(blocks: int) -> Limits:
    return Limits(block_tokens=4, chunk_tokens=8, token_budget=10, read_ahead_blocks=blocks)


def test_a_request_in_the_queue_reads_its_blocks_before_it_has_a_slot() -> None:
    world = World(num_rows=2, num_blocks=32, limits=reading_ahead(4))
    [request] = queue_behind(world, 1)
    assert world.step().transfers == (PromotePlan(request.id, 0, tuple(world.keys_of(request)[:4])),)
    assert states([request]) == [State.LOADING] and request.slot is None
    world.end_promotion(world.promotions[0], complete=True)
    world.run()
    assert request.cached == CachedTokens(disk=16) and request.promotions == 1


def test_requests_in_the_queue_read_one_after_another_and_a_bounded_number_of_blocks() -> None:
    world = World(num_rows=2, num_blocks=32, limits=reading_ahead(8))
    requests = queue_behind(world, 4)
    for count in (1, 2):
        world.step()
        assert [request.promotions for request in requests] == [1] * count + [0] * (4 - count)
        world.end_promotion(world.promotions[0], complete=True)
    world.step()
    assert [request.promotions for request in requests] == [1, 1, 0, 0]  # 8 blocks are read ahead
    world.run()
    assert all(request.cached == CachedTokens(disk=16) for request in requests)


def test_a_request_in_the_queue_asks_tiers_for_blocks_that_none_is_known_to_hold() -> None:
    world = World(num_rows=2, num_blocks=32, limits=reading_ahead(8))
    world.tiers.patience_s = 0.02
    for index in range(2):
        world.submit(prompt(5, beginning=90 + 3 * index), outputs=8).has_asked = True
    world.step()
    request = world.submit(prompt(18))
    assert world.step().transfers == (FindPlan(request.id, 0, tuple(world.keys_of(request)[:4]), 0.02),)
    world.answer(world.questions[0], found=0)
    world.run()


def test_no_request_is_preempted_for_one_that_waits_for_the_disk() -> None:
    world = World(num_rows=2, num_blocks=8)
    lower = world.submit(prompt(17), outputs=8, priority=1)
    steps_until(world, lambda: lower.num_outputs > 0)
    urgent = world.submit(prompt(18, beginning=21))
    world.tiers.where = dict.fromkeys(world.keys_of(urgent)[:4], "disk")
    world.step()
    assert states([lower, urgent]) == [State.RUNNING, State.LOADING]
    assert lower.epoch == 0
    world.run()


def test_a_request_asks_once_for_blocks_that_no_tier_is_known_to_hold() -> None:
    world = World()
    world.tiers.patience_s = 0.02
    request = world.submit(prompt(18))
    keys = world.keys_of(request)[:4]
    world.tiers.where = {keys[0]: "host"}
    other = world.submit(prompt(3, beginning=11))
    assert world.step().transfers == (FindPlan(request.id, 0, tuple(keys[1:]), 0.02),)
    assert states([request, other]) == [State.LOADING, State.RUNNING]
    assert (request.slot, request.blocks) == (None, None)
    assert world.step().transfers == ()
    world.answer(world.questions[0], found=2)
    assert world.step().transfers == (PromotePlan(request.id, 0, tuple(keys[:3])),)
    world.run()
    assert request.cached == CachedTokens(host=4, disk=8)


def test_no_question_about_blocks_that_a_running_request_computes() -> None:
    world = World()
    first = world.submit(prompt(18))
    world.step()
    world.tiers.patience_s = 0.02
    second = world.submit(prompt(18))
    assert world.step().transfers == ()
    assert states([first, second]) == [State.RUNNING, State.WAITING]
    world.run()
    assert second.cached is not None
    assert second.cached.device == 16
    assert not second.has_asked


def test_no_request_is_preempted_for_one_that_asks() -> None:
    world = World(num_rows=2, num_blocks=8)
    lower = world.submit(prompt(17), outputs=8, priority=1)
    steps_until(world, lambda: lower.num_outputs > 0)
    world.tiers.patience_s = 0.02
    urgent = world.submit(prompt(18, beginning=21))
    world.step()
    assert states([lower, urgent]) == [State.RUNNING, State.LOADING]
    world.run()


def test_a_request_whose_load_failed_asks_no_more() -> None:
    world = World()
    request = world.submit(prompt(18))
    world.tiers.where = dict.fromkeys(world.keys_of(request)[:4], "host")
    world.fail_loads = True
    world.step()
    world.tiers.patience_s = 0.02
    world.run()
    assert request.epoch == 1
    assert not request.has_asked


def test_after_an_incomplete_promotion_a_request_does_not_wait_for_the_disk() -> None:
    world = World()
    request = world.submit(prompt(18))
    keys = world.keys_of(request)
    world.tiers.where = {**dict.fromkeys(keys[:2], "host"), **dict.fromkeys(keys[2:4], "disk")}
    world.step()
    world.end_promotion(world.promotions[0], complete=False)
    [load] = world.step().transfers
    assert isinstance(load, LoadPlan)
    assert load.keys == tuple(keys[:2])
    world.run()
    assert request.cached == CachedTokens(host=8)


def test_a_request_stops_promoting_blocks_that_are_evicted_each_time() -> None:
    """Another request's promotion evicts them from the host tier each time: bounded, not for ever."""
    world = World()
    request = world.submit(prompt(18))
    on_disk = dict.fromkeys(world.keys_of(request)[:4], "disk")
    promotions = 0
    for _ in range(10):
        world.tiers.where = dict(on_disk)
        world.step()
        for plan in list(world.promotions):
            promotions += 1
            world.end_promotion(plan, complete=True)
    assert promotions == world.limits.max_promotions
    world.run()
    assert request.cached == CachedTokens()


def test_a_preempted_request_may_wait_for_the_disk_again() -> None:
    world = World()
    request = promoting(world)
    world.end_promotion(world.promotions[0], complete=True)
    for _ in range(3):
        world.step()
    world.scheduler.preempt(request)
    world.device.run_all()
    world.evict_everything()
    for _ in range(world.limits.max_promotions):
        world.tiers.where = dict.fromkeys(world.keys_of(request)[:4], "disk")
        world.step()
        world.end_promotion(world.promotions[0], complete=True)
    world.run()
    assert world.said(request) == world.expected(request)


def test_events_of_abandoned_promotions_and_loads_are_ignored() -> None:
    world = World()
    request = promoting(world)
    world.scheduler.promoted(request.id, epoch=7, again=True)
    world.scheduler.promoted(99, epoch=0, again=True)
    world.scheduler.load_failed(request.id, epoch=0)
    assert (request.state, request.epoch, request.avoid_disk, request.avoid_tiers) == (State.LOADING, 0, False, False)
    world.end_promotion(world.promotions[0], complete=True)
    world.step()
    world.scheduler.promoted(request.id, epoch=0, again=False)
    world.scheduler.load_failed(request.id, epoch=7)
    world.scheduler.load_failed(99, epoch=0)
    assert (request.state, request.epoch, request.avoid_disk, request.avoid_tiers) == (State.RUNNING, 0, False, False)
    world.run()


def test_blocks_of_a_failed_load_are_computed() -> None:
    """H9, H10: computed again, without the tiers, in other blocks than those that the load may still write to."""
    world = World()
    request = loading(world)
    world.scheduler.load_failed(request.id, epoch=0)
    assert (request.state, request.epoch) == (State.WAITING, 1)
    assert world.scheduler.num_preemptions == 0  # the pool was not full
    late = set(world.tickets[0].plan.block_ids)
    plan = world.step()
    assert plan.transfers == ()
    assert spans(plan, request) == [(0, 8)]
    assert not late & set(row_of(plan, request).block_table)
    assert request.cached == CachedTokens()
    world.run()
    assert world.said(request) == world.expected(request)


def test_a_load_that_fails_late_does_not_change_the_reported_cached_tokens() -> None:
    world = World()
    request = loading(world)
    steps_until(world, lambda: request.num_outputs == 1)
    world.scheduler.preempt(request)
    world.device.run_all()
    world.evict_everything()
    world.fail_loads = True
    world.run()
    assert request.epoch == 2
    assert request.cached == CachedTokens(host=16)


def test_a_failed_load_voids_the_step_that_read_it() -> None:
    world = World()
    world.fail_loads = True
    request = world.submit(prompt(18), outputs=3)
    world.tiers.where = dict.fromkeys(world.keys_of(request)[:4], "host")
    world.step()
    world.step()
    world.step()  # the step lands, its load had failed: neither token nor block of it is believed
    assert (request.num_outputs, request.epoch, world.blocks.num_keys) == (0, 1, 0)
    world.run()
    assert world.said(request) == world.expected(request)


def test_a_preempted_request_loads_its_blocks_from_the_host_tier() -> None:
    """Its complete blocks were stored as they were committed; by the time it runs again, the device has lost them."""
    world = World()
    request = world.submit(prompt(18), outputs=6)
    steps_until(world, lambda: request.num_outputs == 3)
    world.scheduler.preempt(request)
    world.device.run_all()
    world.evict_everything()
    plan = world.step()
    [load] = plan.transfers
    assert isinstance(load, LoadPlan)
    assert load.keys == tuple(world.keys_of(request)[:5])
    assert spans(world.step(), request) == [(20, 21)]
    world.run()
    assert world.said(request) == world.expected(request)
