"""Slots and blocks: released at once, and reused after the last step and the transfers that use them."""

from __future__ import annotations

from plans import crowded_world, prompt, row_epochs, steps_until
from scheduler_world import World

from sidestream.schedule.request import State
from sidestream_kv.types import LoadPlan


def test_blocks_and_row_of_an_aborted_request_keep_the_fence_of_its_step() -> None:
    """H2, H16: given back at once, while the step still reads and writes."""
    world = World()
    request = world.submit(prompt(18))
    world.step()
    assert world.previous is not None
    fence = world.previous.fence
    world.abort(request)
    assert (world.blocks.num_used, world.slots.num_used) == (0, 0)
    blocks, rows = world.blocks.take(16), world.slots.take(4)
    assert (blocks.after, rows.after) == ((fence,), (fence,))
    blocks.release()
    rows.release()
    world.settle()


def test_launching_a_plan_ignores_requests_preempted_or_aborted_since() -> None:
    world = World()
    request = world.submit(prompt(6))
    plan = world.scheduler.plan()
    fence = world.device.compute.submit(lambda: None)
    world.scheduler.preempt(request)
    world.scheduler.launched(plan.batch, fence)
    assert request.last_fence is None
    world.abort(request)
    world.scheduler.launched(plan.batch, fence)
    assert request.last_fence is None


def test_blocks_of_a_finished_request_stay_in_use_until_transfers_settle() -> None:
    """H2, H10: no stream can wait for a transfer that the device has not been given yet, so the ledger does."""
    world = World()
    request = world.submit(prompt(18))
    world.tiers.where = dict.fromkeys(world.keys_of(request)[:2], "host")
    world.step()
    (ticket,) = world.tickets
    assert request.blocks is not None
    used = len(request.blocks.ids)
    world.abort(request)
    assert (world.blocks.num_used, world.slots.num_used) == (used, 0)
    assert world.blocks.is_settling
    assert not set(ticket.plan.block_ids) & set(world.blocks.take(world.blocks.num_available).ids)
    world.end_transfers()
    assert (world.blocks.num_available, world.blocks.is_settling) == (used, False)


def test_a_finished_request_keeps_the_fence_of_the_step_after_its_end() -> None:
    """The token that ends it is seen one step late: another step of it is in the air by then."""
    world = World()
    reference = world.submit(prompt(6), outputs=8)
    world.run()
    world.blocks.forget_all()
    stop = next(token for token in world.said(reference) if world.said(reference).index(token) > 0)
    request = world.submit(prompt(6), outputs=8, stop_ids=[stop])
    steps_until(world, lambda: request.state is State.FINISHED)
    overrun = world.previous
    assert overrun is not None and row_epochs(overrun.batch.rows, request) == [0]
    world.end_transfers()
    lease = world.blocks.take(world.blocks.num_available)
    assert overrun.fence in lease.after
    lease.release()
    world.settle()


def test_a_step_waits_for_the_last_use_of_the_blocks_that_it_writes() -> None:
    world = World(num_blocks=5)
    request = world.submit(prompt(18))
    world.step()
    assert world.previous is not None
    fence = world.previous.fence
    world.abort(request)
    world.submit(prompt(18, beginning=11))
    assert fence in world.step().after
    world.run()


def test_a_decode_row_that_grows_waits_for_the_last_use_of_its_new_block() -> None:
    world, _, young = crowded_world()
    steps_until(world, lambda: young.epoch == 1)
    assert young.last_fence in world.plans[-1].after
    world.run()


def test_decode_rows_that_grow_wait_for_the_last_uses_of_their_new_blocks() -> None:
    world = World()
    requests = [world.submit(prompt(3, beginning=first), outputs=4) for first in (1, 11)]
    steps_until(world, lambda: [request.launched_len for request in requests] == [4, 4])
    fence = world.device.load.submit(lambda: None)
    world.blocks.take(world.blocks.num_available).release(after=(fence,))
    assert world.step().after == (fence,)
    world.run()


def test_a_load_waits_for_the_last_use_of_the_blocks_that_it_writes() -> None:
    """H3: the old owner's step is still writing them."""
    world = World(num_blocks=5)
    request = world.submit(prompt(18))
    world.step()
    assert world.previous is not None
    fence = world.previous.fence
    world.abort(request)
    loader = world.submit(prompt(18, beginning=11))
    world.tiers.where = dict.fromkeys(world.keys_of(loader)[:4], "host")
    [load] = world.step().transfers
    assert isinstance(load, LoadPlan)
    assert load.after == (fence,)
    world.run()
