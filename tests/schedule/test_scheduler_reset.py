"""Resets of the prefix cache, and other small properties of the scheduler."""

from __future__ import annotations

import pytest
from plans import prompt, states, steps_until
from scheduler_world import GREEDY, World

from sidestream.errors import SidestreamError
from sidestream.schedule.prefix_cache import NoTiers
from sidestream.schedule.request import Request, State
from sidestream.schedule.scheduler import Scheduler
from sidestream.types import StepPlan
from sidestream_kv.kv.keys import BlockKeys
from sidestream_kv.kv.layout import KVLayout


@pytest.mark.parametrize("after_steps", range(6))
def test_a_reset_changes_no_token_of_running_or_waiting_requests(after_steps: int) -> None:
    """H8: one computes, another waits to join it."""
    world = World(num_blocks=32)
    one, two = world.submit(prompt(18), outputs=3), world.submit(prompt(18), outputs=3)
    for _ in range(after_steps):
        world.step()
    world.scheduler.forget_all()
    world.run()
    assert (world.said(one), world.said(two)) == (world.expected(one), world.expected(two))


@pytest.mark.parametrize("after_steps", range(1, 4))
def test_blocks_of_a_request_begun_before_a_reset_are_never_published_or_stored(after_steps: int) -> None:
    world = World()
    request = world.submit(prompt(18), outputs=8)
    for _ in range(after_steps):
        world.step()
    world.scheduler.forget_all()
    assert world.blocks.num_keys == 0
    stored = len(world.stored)
    world.run()
    assert (world.blocks.num_keys, len(world.stored)) == (0, stored)
    assert world.said(request) == world.expected(request)


def test_no_request_waits_for_pending_blocks_from_before_a_reset() -> None:
    world = World(num_blocks=32)
    one, two = world.submit(prompt(18), outputs=9), world.submit(prompt(18))
    world.step()
    assert states([one, two]) == [State.RUNNING, State.WAITING]
    world.scheduler.forget_all()
    world.step()
    assert states([one, two]) == [State.RUNNING, State.RUNNING]
    world.run()


def test_a_request_preempted_after_a_reset_publishes_its_blocks_again() -> None:
    world = World()
    request = world.submit(prompt(18), outputs=4)
    steps_until(world, lambda: request.num_outputs == 1)
    world.scheduler.forget_all()
    world.scheduler.preempt(request)
    world.device.run_all()
    world.tiers.where.clear()
    world.run()
    assert world.blocks.match(world.keys_of(request)) != []


def test_a_request_checked_before_a_weight_change_gets_new_keys() -> None:
    """H14: its client's thread computed its keys before the change, and it arrives after it."""
    scheduler, tokens = World().scheduler, prompt(18)
    version, old = scheduler.keys_version, scheduler.keys_of(tokens)
    scheduler.rekey(BlockKeys(fingerprint="retrained", layout=KVLayout(1, 1, 1, 4, "float32")))
    request = Request(0, tuple(tokens), GREEDY, 2, frozenset(), 0, keys=list(old), keys_version=version)
    scheduler.submit(request)
    scheduler.plan()
    assert request.keys_version == scheduler.keys_version
    assert request.keys == scheduler.keys_of(tokens)[: len(request.keys)]
    assert not set(request.keys) & set(old)


def test_blocks_of_old_weights_are_freed() -> None:
    world = World()
    world.submit(prompt(18))
    world.run()
    assert world.blocks.num_cached > 0
    world.scheduler.rekey(BlockKeys(fingerprint="retrained", layout=KVLayout(1, 1, 1, 4, "float32")))
    assert (world.blocks.num_cached, world.blocks.num_free) == (0, world.blocks.size)


def test_a_scheduler_works_without_tiers() -> None:
    world = World()
    scheduler = Scheduler(limits=world.limits, blocks=world.blocks, slots=world.slots, keys=world.keys)
    assert scheduler.plan() == StepPlan((), type(scheduler.plan().batch)(()), ())
    assert NoTiers().locate([b"key"]) == []
    assert not NoTiers().worth_loading(["host"])


def test_requests_are_listed_in_order_of_arrival_in_any_state() -> None:
    world = World(num_rows=1)
    requests = [world.submit(prompt(3, beginning=10 * index), priority=-index) for index in range(3)]
    world.step()
    assert world.scheduler.requests() == requests
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (1, 2)
    assert world.scheduler.get(1) is requests[1]
    assert issubclass(SidestreamError, Exception)
    world.run()
