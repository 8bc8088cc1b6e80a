"""Prefix cache: reuse of blocks, waiting for pending blocks, publication and stores."""

from __future__ import annotations

import pytest
from plans import prompt, row_of, small_limits, states, steps_until
from scheduler_world import World

from sidestream.schedule.request import State
from sidestream.types import CachedTokens, RowResult

# ---------------------------------------------------------------------- what is found on the device


def test_a_second_request_computes_only_tokens_after_the_shared_prefix() -> None:
    world = World()
    first = world.submit(prompt(16))
    world.run()
    second = world.submit(prompt(22))
    world.run()
    assert second.cached == CachedTokens(device=16)
    assert world.computed_positions(second)[:6] == list(range(16, 22))
    assert first.cached == CachedTokens()


def test_the_last_token_is_always_computed_for_its_logits() -> None:
    world = World()
    world.submit(prompt(16))
    world.run()
    again = world.submit(prompt(16))
    world.run()
    assert again.cached == CachedTokens(device=12)
    assert world.computed_positions(again)[0] == 12


def test_the_next_turn_reuses_blocks_of_the_answer_before() -> None:
    world = World()
    first = world.submit(prompt(6), outputs=7)
    world.run()
    world.submit([*prompt(6), *world.said(first), 3, 3], outputs=2)
    world.run()
    assert world.stories[1].request.cached == CachedTokens(device=12)


def test_blocks_of_a_running_request_are_shared() -> None:
    world = World(num_blocks=8)
    talker = world.submit(prompt(17), outputs=9)
    steps_until(world, lambda: talker.num_outputs > 0)
    guest = world.submit(prompt(17), outputs=3)
    plan = world.step()
    assert guest.cached == CachedTokens(device=16)
    assert row_of(plan, guest).block_table[:4] == row_of(plan, talker).block_table[:4]
    world.run()


def test_without_a_prefix_cache_no_block_is_reused_stored_or_waited_for() -> None:
    world = World(limits=small_limits(prefix_cache=False))
    one, two = world.submit(prompt(17)), world.submit(prompt(17))
    world.step()
    assert states([one, two]) == [State.RUNNING, State.RUNNING]
    world.run()
    world.submit(prompt(17))
    world.run()
    assert world.stories[2].request.cached == CachedTokens()
    assert (world.stored, world.blocks.num_keys) == ([], 0)


# ---------------------------------------------------------------------- joining what another one does


def test_two_samples_of_a_prompt_compute_its_blocks_once() -> None:
    world = World(num_blocks=32)
    one, two = world.submit(prompt(18), outputs=3), world.submit(prompt(18), outputs=3)
    world.run()
    assert world.computed_positions(one) == list(range(20))
    assert world.computed_positions(two) == list(range(16, 20))
    assert two.cached == CachedTokens(device=16)


def test_a_request_that_waits_for_anothers_blocks_does_not_delay_others() -> None:
    world = World()
    _, joined, other = world.submit(prompt(18)), world.submit(prompt(18)), world.submit(prompt(3, beginning=11))
    world.step()
    assert states([joined, other]) == [State.WAITING, State.RUNNING]
    world.run()


@pytest.mark.parametrize("after_steps", [1, 2, 3])
def test_a_request_computes_blocks_itself_if_their_first_request_is_aborted(after_steps: int) -> None:
    world = World()
    one, two = world.submit(prompt(18)), world.submit(prompt(18))
    for _ in range(after_steps):
        world.step()
    world.abort(one)
    world.run()
    assert world.said(two) == world.expected(two)


def test_a_request_waits_for_another_ones_load_of_the_same_blocks() -> None:
    world = World(num_blocks=32)
    loader = world.submit(prompt(18))
    world.tiers.where = dict.fromkeys(world.keys_of(loader)[:4], "host")
    joined = world.submit(prompt(18))
    plan = world.step()
    assert len(plan.transfers) == 1
    assert states([loader, joined]) == [State.RUNNING, State.WAITING]
    world.run()
    assert [plan for step in world.plans for plan in step.transfers] == list(plan.transfers)
    assert (loader.cached, joined.cached) == (CachedTokens(host=16), CachedTokens(device=16))


def test_requests_with_different_cache_salts_share_no_blocks() -> None:
    world = World(num_blocks=48)
    loader = world.submit(prompt(18), cache_salt="a")
    world.tiers.where = dict.fromkeys(world.keys_of(loader)[:4], "host")
    same = world.submit(prompt(18), cache_salt="a")
    other, plain = world.submit(prompt(18), cache_salt="b"), world.submit(prompt(18))
    plan = world.step()
    assert [transfer.request_id for transfer in plan.transfers] == [loader.id]
    assert states([loader, same, other, plain]) == [State.RUNNING, State.WAITING, State.RUNNING, State.RUNNING]
    world.run()
    late = [world.submit(prompt(18), cache_salt=salt) for salt in ("a", "b", "c")]
    world.run()
    assert [request.cached for request in (loader, same, other, plain)] == [
        CachedTokens(host=16),
        CachedTokens(device=16),
        CachedTokens(),
        CachedTokens(),
    ]
    assert [request.cached for request in late] == [CachedTokens(device=16), CachedTokens(device=16), CachedTokens()]


def test_a_request_does_not_wait_for_a_finished_load() -> None:
    """Its blocks are on the device; when they are forgotten there, the next one starts at once."""
    world = World(num_blocks=32)
    loader = world.submit(prompt(18), outputs=20)
    world.tiers.where = dict.fromkeys(world.keys_of(loader)[:4], "host")
    steps_until(world, lambda: loader.num_outputs == 2)
    world.blocks.forget_all()
    world.tiers.where.clear()
    other = world.submit(prompt(18))
    world.step()
    assert states([loader, other]) == [State.RUNNING, State.RUNNING]
    world.run()


def test_after_a_failed_load_waiting_requests_share_the_computation() -> None:
    world = World(num_blocks=32)
    loader = world.submit(prompt(18))
    world.tiers.where = dict.fromkeys(world.keys_of(loader)[:4], "host")
    joined = world.submit(prompt(18))
    world.fail_loads = True
    world.run()
    assert world.computed_positions(joined)[0] == 16
    assert (loader.cached, joined.cached) == (CachedTokens(), CachedTokens(device=16))


# ---------------------------------------------------------------------- publishing and storing


def test_blocks_are_found_only_after_their_step_is_committed() -> None:
    """H7, H12: launched is not computed."""
    world = World()
    request = world.submit(prompt(18))
    keys = world.keys_of(request)
    found = [len(world.blocks.match(keys)) for _ in range(5) if world.step()]
    assert found == [0, 2, 4, 4, 4]
    assert request.finish_reason == "length"


def test_an_incomplete_block_is_never_published_or_stored() -> None:
    world = World()
    request = world.submit(prompt(7), outputs=4)
    world.run()  # 10 tokens computed: the third block holds two of them
    keys = world.keys_of(request)
    assert len(keys) == 3
    assert [world.blocks.get(key) is not None for key in keys] == [True, True, False]
    assert [key for store in world.stored for key in store.keys] == keys[:2]


def test_a_store_waits_for_the_step_that_filled_its_blocks() -> None:
    """H1. `World` looks at every store: its blocks are complete, and their step's fence is in `after`."""
    world = World()
    world.submit(prompt(18))
    world.run()
    assert [len(store.keys) for store in world.stored] == [2, 2]
    assert [store.after[0].tick for store in world.stored] == [1, 2]


def test_a_store_has_the_keys_of_its_blocks_whole_prefix() -> None:
    """What it continues was used too: a tier that evicts the start of a sequence before its end keeps nothing
    of use.
    """
    world = World()
    request = world.submit(prompt(18))
    world.run()
    keys = world.keys_of(request)
    assert [store.prefix for store in world.stored] == [tuple(keys[:2]), tuple(keys[:4])]


def test_blocks_that_another_request_published_are_not_stored_again() -> None:
    world = World(num_blocks=32, limits=small_limits(token_budget=20))
    for _ in range(2):
        world.submit(prompt(15))
        world.run()
    keys = [key for store in world.stored for key in store.keys]
    assert len(keys) == len(set(keys))


def test_blocks_loaded_from_a_tier_are_not_stored_again() -> None:
    world = World()
    request = world.submit(prompt(18))
    keys = world.keys_of(request)
    world.tiers.where = dict.fromkeys(keys[:4], "host")
    world.run()
    assert not set(keys[:4]) & {key for store in world.stored for key in store.keys}


@pytest.mark.parametrize(("tokens", "returns"), [(22, True), (38, False)])
def test_a_store_names_found_blocks_and_all_of_a_request_that_found_a_third(tokens: int, returns: bool) -> None:
    world = World(num_blocks=48, limits=small_limits(token_budget=20))
    world.submit(prompt(10))
    world.run()
    assert not any(store.returning for store in world.stored)
    before = len(world.stored)
    request = world.submit(prompt(tokens))
    world.run()
    keys = world.keys_of(request)
    assert request.cached == CachedTokens(device=8)
    stores = world.stored[before:]
    assert frozenset(keys[:2]) <= stores[0].returning
    assert all(store.returning == frozenset(store.keys) for store in stores[1:]) is returns
    assert all(store.returning >= frozenset(store.keys) for store in stores) is returns
    assert all(keys[0] not in store.returning for store in stores[1:])  # named once


def test_blocks_of_a_request_with_non_finite_logits_are_not_published() -> None:
    world = World()
    request = world.submit(prompt(18))
    world.step()
    plan = [world.step(), world.step()][1]
    assert row_of(plan, request).samples
    world.step()  # 16 tokens are published by now, the tail is not
    assert world.blocks.num_keys == 4
    other = world.submit(prompt(8, beginning=31), outputs=3)
    steps_until(world, lambda: other.launched_len == 8)
    launched = world.previous
    assert launched is not None
    world.device.run_until(launched.fence)
    broken = [RowResult((), finite=False) for _ in launched.results]
    committed = world.scheduler.commit(launched.batch, broken, launched.fence)
    assert committed.outputs[-1][0] is other
    assert world.scheduler.publish(committed) is None
    assert world.blocks.get(world.keys_of(other)[1]) is None
