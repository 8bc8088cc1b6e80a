"""Who runs next. Blocks hold 4 tokens, chunks 8, and four rows share 16 blocks unless a test says otherwise."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from scheduler_world import World

from sidestream.errors import SidestreamError
from sidestream.schedule.request import Request, State
from sidestream.schedule.scheduler import Limits, NoTiers, Scheduler
from sidestream.types import CachedTokens, LoadPlan, PromotePlan, RowPlan, RowResult, StepPlan


def prompt(length: int, *, beginning: int = 1) -> list[int]:
    """Prompts of one beginning are prefixes of one another."""
    return [beginning + position % 7 for position in range(length)]


def small_limits(**changes: int | bool) -> Limits:
    return Limits(**{"block_tokens": 4, "chunk_tokens": 8, "token_budget": 12, **changes})  # type: ignore[arg-type]


def spans(plan: StepPlan, request: Request) -> list[tuple[int, int]]:
    return [(row.start, row.stop) for row in plan.batch.rows if row.request_id == request.id]


def row_of(plan: StepPlan, request: Request) -> RowPlan:
    [row] = [row for row in plan.batch.rows if row.request_id == request.id]
    return row


def states(requests: Iterable[Request]) -> list[State]:
    return [request.state for request in requests]


def steps_until(world: World, condition: object, *, at_most: int = 50) -> int:
    """Step until `condition()`; how many steps it took."""
    for taken in range(at_most + 1):
        if condition():  # type: ignore[operator]
            return taken
        world.step()
    raise AssertionError(f"not within {at_most} steps")


# ---------------------------------------------------------------------- one request


def test_a_prompt_is_computed_in_chunks_and_then_one_token_a_step() -> None:
    world = World()
    request = world.submit(prompt(18), outputs=3)
    assert [spans(world.step(), request) for _ in range(6)] == [[(0, 8)], [(8, 16)], [(16, 18)], [(18, 19)], [(19, 20)], []]
    rows = [row for plan in world.plans for row in plan.batch.rows]
    assert [row.samples for row in rows] == [False, False, True, True, True]
    assert [row.output_index for row in rows if row.samples] == [0, 1, 2]
    assert [row.tokens is None for row in rows] == [False, False, False, True, True]
    assert [row.begin is not None for row in rows] == [True, False, False, False, False]
    assert request.finish_reason == "length"
    world.settle()


def test_a_step_is_launched_before_the_one_before_is_seen() -> None:
    world = World()
    request = world.submit(prompt(3), outputs=4)
    world.step()
    assert request.num_outputs == 0
    plan = world.step()  # continues from a token that the host does not know yet
    assert row_of(plan, request).tokens is None
    assert request.num_outputs == 1


def test_a_stop_token_ends_a_request_and_the_token_drawn_beyond_it_is_dropped() -> None:
    world = World()
    reference = world.submit(prompt(6), outputs=8)
    world.run()
    stop = world.said(reference)[3]
    request = world.submit(prompt(6), outputs=8, stop_ids=[stop])
    world.run()
    assert request.finish_reason == "stop"
    assert world.said(request) == world.said(reference)[: world.said(reference).index(stop) + 1]


def test_a_stop_token_before_min_tokens_does_not_end_a_request() -> None:
    request = Request(id=0, prompt=(1,), sampling=World().submit([1]).sampling, max_outputs=3, stop_ids=frozenset([5]), min_tokens=2)
    reasons = []
    for token in (5, 5, 5):
        request.tokens.append(token)
        reasons.append(request.stop_reason())
    assert reasons == [None, "stop", "stop"]
    assert Request(id=0, prompt=(5,), sampling=request.sampling, max_outputs=3, stop_ids=frozenset([5]), min_tokens=0).stop_reason() is None


def test_a_result_that_is_not_of_a_live_row_is_dropped_and_the_others_keep_their_own() -> None:
    """H21: the result of an aborted request comes in between two others."""
    world = World()
    one, two, three = (world.submit(prompt(3, beginning=beginning), outputs=4) for beginning in (1, 11, 21))
    world.step()
    world.abort(two)
    world.run()
    assert world.said(two) == []
    assert (world.said(one), world.said(three)) == (world.expected(one), world.expected(three))


# ---------------------------------------------------------------------- admission and the token budget


def test_requests_are_admitted_in_the_order_of_their_arrival() -> None:
    world = World(num_rows=2)
    requests = [world.submit(prompt(3, beginning=10 * index), outputs=2) for index in range(4)]
    world.step()
    assert states(requests) == [State.RUNNING, State.RUNNING, State.WAITING, State.WAITING]
    steps_until(world, lambda: State.FINISHED in states(requests))
    world.step()
    assert states(requests[2:]) == [State.RUNNING, State.RUNNING]


def test_nobody_overtakes_the_first_in_line_for_lack_of_room() -> None:
    world = World(num_blocks=8)
    running = world.submit(prompt(17), outputs=4)
    world.step()
    long, short = world.submit(prompt(20, beginning=11)), world.submit(prompt(2, beginning=21))
    steps_until(world, lambda: running.state is State.FINISHED or State.RUNNING in states([long, short]))
    assert states([running, long, short]) == [State.FINISHED, State.WAITING, State.WAITING]
    world.step()
    assert states([long, short]) == [State.RUNNING, State.RUNNING]
    world.run()


def test_admission_leaves_every_running_request_a_block_to_grow() -> None:
    world = World(num_blocks=4)
    talker, guest = world.submit(prompt(3), outputs=4), world.submit(prompt(9, beginning=11), outputs=3)
    world.step()
    assert states([talker, guest]) == [State.RUNNING, State.WAITING]  # three blocks are free, and the guest needs three
    world.run()
    assert (talker.epoch, guest.epoch) == (0, 0)


def test_decode_goes_first_and_prefill_takes_whole_chunks_from_what_is_left() -> None:
    world = World(num_blocks=32)
    talkers = [world.submit(prompt(2, beginning=10 * index), outputs=12) for index in (1, 2)]
    world.step()
    long, other = world.submit(prompt(30, beginning=51)), world.submit(prompt(30, beginning=61))
    plan = world.step()
    assert [row.tokens is None for row in plan.batch.rows] == [True, True, False]
    assert [spans(plan, request) for request in (*talkers, long, other)] == [[(2, 3)], [(2, 3)], [(0, 8)], []]
    assert other.state is State.RUNNING  # it has its room; of the budget, 2 tokens were left, and no chunk is cut to fit
    assert plan.batch.num_tokens == 10
    world.run()


def test_a_step_looks_at_a_bounded_number_of_those_in_line() -> None:
    world = World(limits=small_limits(max_probes=2))
    _, joined, behind = world.submit(prompt(18)), world.submit(prompt(18)), world.submit(prompt(3, beginning=11))
    world.step()
    assert states([joined, behind]) == [State.WAITING, State.WAITING]
    world.run()
    assert world.said(behind) == world.expected(behind)


def test_a_short_tail_goes_along_where_a_chunk_does_not_fit() -> None:
    world = World(limits=small_limits(token_budget=12))
    long, short = world.submit(prompt(30)), world.submit(prompt(3, beginning=11))
    plan = world.step()
    assert (spans(plan, long), spans(plan, short)) == ([(0, 8)], [(0, 3)])
    world.run()


def test_the_oldest_prefill_gets_a_chunk_every_step_however_many_decode() -> None:
    world = World(num_blocks=32, num_rows=4)
    for index in range(3):
        world.submit(prompt(2, beginning=10 * index), outputs=20)
    world.step()
    long = world.submit(prompt(30, beginning=41))
    assert [spans(world.step(), long) for _ in range(5)] == [[(0, 8)], [(8, 16)], [(16, 24)], [(24, 28)], [(28, 30)]]
    world.run()


def test_a_finite_set_of_requests_ends_in_a_bounded_number_of_steps() -> None:
    world = World(num_blocks=10, num_rows=3, seed=1)
    for index in range(20):
        world.submit(prompt(1 + index % 17, beginning=index), outputs=1 + index % 9, priority=index % 3)
    assert world.run() <= 120


# ---------------------------------------------------------------------- what is found on the device


def test_a_second_request_computes_only_what_the_first_did_not() -> None:
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


def test_what_a_request_said_is_found_by_the_next_turn() -> None:
    world = World()
    first = world.submit(prompt(6), outputs=7)
    world.run()
    world.submit([*prompt(6), *world.said(first), 3, 3], outputs=2)
    world.run()
    assert world.stories[1].request.cached == CachedTokens(device=12)


def test_blocks_in_use_by_another_are_shared() -> None:
    world = World(num_blocks=8)
    talker = world.submit(prompt(17), outputs=9)
    steps_until(world, lambda: talker.num_outputs > 0)
    guest = world.submit(prompt(17), outputs=3)
    plan = world.step()
    assert guest.cached == CachedTokens(device=16)
    assert row_of(plan, guest).block_ids[:4] == row_of(plan, talker).block_ids[:4]
    world.run()


def test_without_a_prefix_cache_nothing_is_found_stored_or_waited_for() -> None:
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


def test_two_samples_of_one_prompt_compute_it_once() -> None:
    world = World(num_blocks=32)
    one, two = world.submit(prompt(18), outputs=3), world.submit(prompt(18), outputs=3)
    world.run()
    assert world.computed_positions(one) == list(range(20))
    assert world.computed_positions(two) == list(range(16, 20))
    assert two.cached == CachedTokens(device=16)


def test_one_that_joins_does_not_hold_up_those_behind_it() -> None:
    world = World()
    _, joined, other = world.submit(prompt(18)), world.submit(prompt(18)), world.submit(prompt(3, beginning=11))
    world.step()
    assert states([joined, other]) == [State.WAITING, State.RUNNING]
    world.run()


@pytest.mark.parametrize("after_steps", [1, 2, 3])
def test_when_the_one_that_was_joined_is_aborted_the_other_goes_on_by_itself(after_steps: int) -> None:
    world = World()
    one, two = world.submit(prompt(18)), world.submit(prompt(18))
    for _ in range(after_steps):
        world.step()
    world.abort(one)
    world.run()
    assert world.said(two) == world.expected(two)


def test_requests_that_need_the_same_blocks_join_the_load_in_flight() -> None:
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


def test_a_load_that_is_done_is_nothing_to_join() -> None:
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


def test_when_a_joined_load_fails_the_other_joins_the_computation() -> None:
    world = World(num_blocks=32)
    loader = world.submit(prompt(18))
    world.tiers.where = dict.fromkeys(world.keys_of(loader)[:4], "host")
    joined = world.submit(prompt(18))
    world.fail_loads = True
    world.run()
    assert world.computed_positions(joined)[0] == 16
    assert (loader.cached, joined.cached) == (CachedTokens(), CachedTokens(device=16))


# ---------------------------------------------------------------------- publishing and storing


def test_nothing_is_findable_before_its_flight_was_seen() -> None:
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


def test_a_store_waits_for_the_flight_that_filled_its_blocks() -> None:
    """H1. `World` looks at every store: its blocks are complete, and their flight's fence is in `after`."""
    world = World()
    world.submit(prompt(18))
    world.run()
    assert [len(store.keys) for store in world.stored] == [2, 2]
    assert [store.after[0].tick for store in world.stored] == [1, 2]


def test_a_store_names_the_whole_prefix_that_its_blocks_continue() -> None:
    """What it continues was used too: a tier that evicts the start of a sequence before its end keeps nothing of use."""
    world = World()
    request = world.submit(prompt(18))
    world.run()
    keys = world.keys_of(request)
    assert [store.prefix for store in world.stored] == [tuple(keys[:2]), tuple(keys[:4])]


def test_what_another_request_published_is_not_stored_again() -> None:
    world = World(num_blocks=32, limits=small_limits(token_budget=20))
    for _ in range(2):
        world.submit(prompt(15))
        world.run()
    keys = [key for store in world.stored for key in store.keys]
    assert len(keys) == len(set(keys))


def test_what_came_from_a_tier_is_not_stored_again() -> None:
    world = World()
    request = world.submit(prompt(18))
    keys = world.keys_of(request)
    world.tiers.where = dict.fromkeys(keys[:4], "host")
    world.run()
    assert not set(keys[:4]) & {key for store in world.stored for key in store.keys}


def test_blocks_behind_logits_that_are_not_finite_are_not_published() -> None:
    world = World()
    request = world.submit(prompt(18))
    world.step()
    plan = [world.step(), world.step()][1]
    assert row_of(plan, request).samples
    world.step()  # 16 tokens are published by now, the tail is not
    assert world.blocks.num_keys == 4
    other = world.submit(prompt(8, beginning=31), outputs=3)
    steps_until(world, lambda: other.launched_outputs == 1)
    flight = world.previous
    assert flight is not None
    world.device.run_until(flight.fence)
    broken = [RowResult(0, finite=False) for _ in flight.results]
    committed = world.scheduler.commit(flight.batch, broken, flight.fence)
    assert [drawn.request for drawn in committed.drawn][-1] is other
    assert committed.store is None
    assert world.blocks.get(world.keys_of(other)[1]) is None


# ---------------------------------------------------------------------- retraction


def crowded_world(*, limits: Limits | None = None) -> tuple[World, Request, Request]:
    """Two talkers that do not fit together: the older one's growth will cost the younger one its room."""
    world = World(num_blocks=8, limits=limits)
    old, young = world.submit(prompt(9), outputs=13), world.submit(prompt(9, beginning=21), outputs=13)
    return world, old, young


def test_the_younger_one_is_retracted_when_the_pool_is_full() -> None:
    world, old, young = crowded_world()
    steps_until(world, lambda: young.epoch == 1)
    assert states([old, young]) == [State.RUNNING, State.WAITING]
    assert world.scheduler.num_preemptions == 1
    assert (young.row, young.blocks) == (None, None)
    world.run()
    assert old.epoch == 0


def test_a_retracted_request_says_what_it_would_have_said() -> None:
    world, old, young = crowded_world()
    steps_until(world, lambda: young.epoch == 1)
    said_before = len(world.said(young))
    assert 0 < said_before < 13
    world.run()
    assert world.said(young) == world.expected(young)
    assert world.said(old) == world.expected(old)
    begins = [row.begin for plan in world.plans for row in plan.batch.rows if row.request_id == young.id and row.begin]
    assert [len(begin.outputs) for begin in begins] == [0, said_before]


def test_late_results_of_a_retracted_request_are_dropped() -> None:
    """H12, H16: the flight in the air at the retraction belongs to an epoch that is over."""
    world, _, young = crowded_world()
    flying = None
    for _ in range(30):
        if young.epoch == 0:
            flying = world.previous  # in the air when the next plan is made: the last such plan retracts
            world.step()
    assert young.epoch == 1
    assert flying is not None and row_epochs(flying.batch.rows, young) == [0]
    outputs = young.num_outputs
    world.step()
    assert young.num_outputs == outputs
    assert young.state is not State.FINISHED
    world.run()


def row_epochs(rows: Iterable[RowPlan], request: Request) -> list[int]:
    return [row.epoch for row in rows if row.request_id == request.id]


def test_a_late_result_is_dropped_even_when_its_request_runs_again() -> None:
    """The retracted request is back in a row, in epoch 1, when the flight of epoch 0 lands."""
    world = World()
    request = world.submit(prompt(6), outputs=6)
    world.step()
    world.step()
    world.scheduler._retract(request)
    flying = world.previous
    assert flying is not None and row_epochs(flying.batch.rows, request) == [0]
    world.step()  # admits it again, then commits the late flight
    assert (request.state, request.epoch, request.num_outputs) == (State.RUNNING, 1, 0)
    assert not request.stepped  # H26: the late flight was no step of this epoch
    world.step()
    assert request.stepped
    world.run()
    assert world.said(request) == world.expected(request)


def test_complete_blocks_of_a_retracted_request_are_found_again() -> None:
    world, _, young = crowded_world()
    steps_until(world, lambda: young.epoch == 1)
    world.run()
    again = [row.start for plan in world.plans for row in plan.batch.rows if row_epochs([row], young) == [1]]
    assert again[0] >= 4  # the block that the older one took was the youngest's last


def test_a_readmitted_request_runs_a_step_before_it_is_retracted_again() -> None:
    """H26: otherwise two requests could throw each other out for ever."""
    world = World(num_blocks=10, num_rows=4)
    requests = [world.submit(prompt(2, beginning=11 * index), outputs=30) for index in range(6)]
    chosen: list[Request] = []
    victim_for = world.scheduler._victim_for

    def watched(request: Request) -> Request | None:
        victim = victim_for(request)
        if victim is not None:
            first = min((other for other in requests if other.state is State.RUNNING), key=lambda other: (other.level(256), other.id))
            assert victim.stepped or request is first
            chosen.append(victim)
        return victim

    world.scheduler._victim_for = watched  # type: ignore[method-assign]
    steps = world.run(max_steps=400)
    assert len(chosen) > len(set(chosen))  # somebody was retracted more than once
    assert steps <= 200


def test_only_the_first_in_line_may_throw_out_one_that_has_not_stepped() -> None:
    world = World(num_blocks=16, num_rows=4)
    first, second, third = (world.submit(prompt(4, beginning=11 * index), outputs=9) for index in range(3))
    world.step()
    victim_for = world.scheduler._victim_for
    assert [request.stepped for request in (first, second, third)] == [False, False, False]
    assert (victim_for(first), victim_for(second), victim_for(third)) == (third, None, None)
    second.stepped = True
    assert victim_for(first) is second  # younger ones that stepped go before younger ones that did not
    third.stepped = True
    assert (victim_for(first), victim_for(second), victim_for(third)) == (third, third, None)
    world.run()


# ---------------------------------------------------------------------- what was used is fenced


def test_blocks_and_row_of_an_aborted_request_wait_for_its_flight() -> None:
    """H2, H16: given back at once, while the flight still reads and writes."""
    world = World()
    request = world.submit(prompt(18))
    world.step()
    assert world.previous is not None
    fence = world.previous.fence
    world.abort(request)
    assert (world.blocks.num_used, world.rows.num_used) == (0, 0)
    blocks, rows = world.blocks.take(16), world.rows.take(4)
    assert (blocks.after, rows.after) == ((fence,), (fence,))
    blocks.release()
    rows.release()
    world.settle()


def test_a_request_that_finished_by_itself_is_fenced_by_its_overrun_flight() -> None:
    """The token that ends it is seen one flight late: another flight of it is in the air by then."""
    world = World()
    reference = world.submit(prompt(6), outputs=8)
    world.run()
    world.blocks.forget_all()
    stop = next(token for token in world.said(reference) if world.said(reference).index(token) > 0)
    request = world.submit(prompt(6), outputs=8, stop_ids=[stop])
    steps_until(world, lambda: request.state is State.FINISHED)
    overrun = world.previous
    assert overrun is not None and row_epochs(overrun.batch.rows, request) == [0]
    lease = world.blocks.take(world.blocks.num_available)
    assert overrun.fence in lease.after
    lease.release()
    world.settle()


def test_a_flight_waits_for_the_last_use_of_the_blocks_it_writes() -> None:
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


def test_a_load_waits_for_the_last_use_of_the_blocks_it_writes() -> None:
    """H3: the old owner's flight is still writing them."""
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


# ---------------------------------------------------------------------- abort


def waiting(world: World) -> Request:
    for index in range(4):
        world.submit(prompt(3, beginning=10 * index), outputs=9)
    request = world.submit(prompt(9, beginning=51))
    world.step()
    assert request.state is State.WAITING
    return request


def joined(world: World) -> Request:
    world.submit(prompt(18))
    request = world.submit(prompt(18))
    world.step()
    assert request.state is State.WAITING
    return request


def promoting(world: World) -> Request:
    request = world.submit(prompt(18))
    world.tiers.where = dict.fromkeys(world.keys_of(request)[:4], "disk")
    world.step()
    assert request.state is State.LOADING
    return request


def loading(world: World) -> Request:
    request = world.submit(prompt(18))
    world.tiers.where = dict.fromkeys(world.keys_of(request)[:4], "host")
    world.step()
    assert request.state is State.RUNNING and not world.tickets[0].fence.poll()
    return request


def flying(world: World) -> Request:
    request = world.submit(prompt(18), outputs=4)
    for _ in range(4):
        world.step()
    assert world.previous is not None and not world.previous.fence.poll()
    assert row_epochs(world.previous.batch.rows, request) == [0]
    return request


def retracted(world: World) -> Request:
    request = world.submit(prompt(6), outputs=6)
    world.step()
    world.step()
    world.scheduler._retract(request)
    assert request.state is State.WAITING
    return request


def readmitted(world: World) -> Request:
    request = retracted(world)
    world.step()
    assert (request.state, request.epoch) == (State.RUNNING, 1)
    return request


@pytest.mark.parametrize("reach", [waiting, joined, promoting, loading, flying, retracted, readmitted])
def test_an_abort_gives_everything_back_whatever_the_request_was_doing(reach: object) -> None:
    """H21, H22. `World.run` ends with empty pools; what is in the air at the abort comes in afterwards."""
    world = World()
    request = reach(world)  # type: ignore[operator]
    said = list(world.said(request))
    world.abort(request)
    assert (request.state, request.finish_reason, request.row, request.blocks) == (State.FINISHED, "abort", None, None)
    assert world.scheduler.get(request.id) is None
    world.abort(request)  # a second one is harmless
    world.run()
    assert world.said(request) == said
    again = world.submit(request.prompt, outputs=3)
    world.run()
    assert world.said(again) == world.expected(again)


# ---------------------------------------------------------------------- priorities


def test_a_lower_number_runs_earlier() -> None:
    world = World(num_rows=1)
    requests = [world.submit(prompt(3, beginning=10 * index), priority=priority) for index, priority in enumerate([5, 0, 5, -1])]
    ended: list[int] = []
    for _ in range(20):
        world.step()
        ended.extend(request.id for request in requests if request.state is State.FINISHED and request.id not in ended)
    assert ended == [3, 1, 0, 2]


def test_room_is_taken_from_lower_priorities_only() -> None:
    world = World(num_rows=2)
    equal, lower = world.submit(prompt(3), outputs=9, priority=0), world.submit(prompt(3, beginning=11), outputs=9, priority=1)
    for _ in range(2):
        world.step()
    urgent = world.submit(prompt(3, beginning=21), priority=0)
    world.step()
    assert states([equal, lower, urgent]) == [State.RUNNING, State.WAITING, State.RUNNING]
    another = world.submit(prompt(3, beginning=31), priority=0)
    world.step()
    assert states([equal, another, urgent]) == [State.RUNNING, State.WAITING, State.RUNNING]
    world.run()
    assert world.said(lower) == world.expected(lower)


def test_room_is_not_taken_from_one_that_has_not_stepped() -> None:
    world = World(num_rows=1)
    lower = world.submit(prompt(3), outputs=5, priority=1)
    world.step()
    urgent = world.submit(prompt(3, beginning=11), priority=0)
    world.step()
    assert states([lower, urgent]) == [State.RUNNING, State.WAITING]
    world.step()
    assert states([lower, urgent]) == [State.WAITING, State.RUNNING]
    world.run()


def test_nobody_is_retracted_when_that_would_not_make_enough_room() -> None:
    world = World(num_blocks=11)
    large, small = world.submit(prompt(17), outputs=10, priority=0), world.submit(prompt(3, beginning=11), outputs=10, priority=1)
    for _ in range(4):
        world.step()
    urgent = world.submit(prompt(25, beginning=21), priority=0)
    world.step()
    assert states([large, small, urgent]) == [State.RUNNING, State.RUNNING, State.WAITING]
    steps_until(world, lambda: small.epoch > 0 or large.state is State.FINISHED)
    assert small.epoch == 0
    world.run()


def test_nobody_is_retracted_for_blocks_that_are_shared() -> None:
    """The urgent one finds most of its prompt in blocks that a running request of lower priority uses."""
    world = World(num_blocks=9)
    lower = world.submit(prompt(17), outputs=10, priority=1)
    steps_until(world, lambda: lower.num_outputs > 0)
    urgent = world.submit(prompt(18), outputs=2, priority=0)
    world.step()
    assert states([lower, urgent]) == [State.RUNNING, State.RUNNING]
    assert lower.epoch == 0
    world.run()


def test_nobody_is_retracted_for_one_that_waits_for_blocks_another_computes() -> None:
    world = World(num_rows=2, num_blocks=32)
    lower = world.submit(prompt(3, beginning=11), outputs=12, priority=1)
    steps_until(world, lambda: lower.stepped)
    for _ in range(2):
        world.submit(prompt(30), outputs=2, priority=0)
    world.step()
    assert world.scheduler.num_waiting == 1
    world.step()
    assert (lower.state, lower.epoch) == (State.RUNNING, 0)
    world.run()


def test_waiting_improves_a_place_in_line_but_takes_no_room_from_equals_or_betters() -> None:
    """Else two requests of equal priority, or an aged one and a better one, would throw each other out in turns."""
    world = World(num_rows=1, num_blocks=32, limits=small_limits(aging_steps=2))
    talker = world.submit(prompt(3), outputs=30, priority=0)
    world.step()
    equal, lower = world.submit(prompt(3, beginning=11), priority=0), world.submit(prompt(3, beginning=21), priority=1)
    for _ in range(20):
        world.step()
    assert min(equal.level(2), lower.level(2)) < talker.level(2)
    world.run()
    assert [request.epoch for request in (talker, equal, lower)] == [0, 0, 0]


def test_one_that_waited_long_enough_keeps_its_room() -> None:
    world = World(num_rows=1, num_blocks=32, limits=small_limits(aging_steps=2))
    world.submit(prompt(3), outputs=8, priority=0)
    world.step()
    aged = world.submit(prompt(3, beginning=11), outputs=8, priority=1)
    steps_until(world, lambda: aged.stepped)
    assert aged.level(2) < 0
    world.submit(prompt(3, beginning=21), priority=0)
    for _ in range(3):
        world.step()
        assert (aged.state, aged.epoch) == (State.RUNNING, 0)
    world.run()


def test_nobody_starves_in_line_under_a_stream_of_better_requests() -> None:
    world = World(num_rows=1, num_blocks=32, limits=small_limits(aging_steps=3))
    low = world.submit(prompt(3), outputs=4, priority=4)
    for index in range(60):
        if world.scheduler.num_waiting < 3:
            world.submit(prompt(3, beginning=100 + index), outputs=1, priority=0)
        world.step()
        if low.state is State.FINISHED:
            break
    assert low.finish_reason == "length"
    world.run()


def test_nobody_starves_in_a_row_under_a_stream_of_better_prompts() -> None:
    """Admitted, but passed over: the chunks of better requests would take the whole budget of every step."""
    world = World(num_rows=4, num_blocks=64, limits=small_limits(aging_steps=3))
    low = world.submit(prompt(30), outputs=2, priority=4)
    world.step()
    for index in range(60):
        while len(world.scheduler.requests()) < 4:  # two of them have a chunk to compute at any time
            world.submit(prompt(40, beginning=100 * len(world.stories)), outputs=1, priority=0)
        world.step()
        assert index >= 10 or low.launched_len == 16  # what it got while it was alone, and then nothing
        if low.state is State.FINISHED:
            break
    assert low.finish_reason == "length"
    assert low.epoch == 0
    world.run()


def test_a_turn_of_the_loop_without_a_flight_makes_nobody_older() -> None:
    """An idle engine looks at its transfers two thousand times a second; that is not waiting for others."""
    world = World()
    request = promoting(world)
    for _ in range(100):
        world.step()
    assert request.waited_steps == 0
    world.run()


# ---------------------------------------------------------------------- tiers


def test_blocks_in_the_host_tier_are_loaded_and_the_rest_is_computed() -> None:
    world = World()
    request = world.submit(prompt(22))
    world.tiers.where = dict.fromkeys(world.keys_of(request)[:4], "host")
    plan = world.step()
    [load] = plan.transfers
    assert isinstance(load, LoadPlan)
    assert load.keys == tuple(world.keys_of(request)[:4])
    assert load.block_ids == row_of(plan, request).block_ids[:4]
    assert spans(plan, request) == [(16, 20)]
    assert request.cached == CachedTokens(host=16)
    world.run()


def test_what_is_on_the_device_is_not_loaded() -> None:
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


def test_a_load_that_is_not_worth_it_is_computed() -> None:
    world = World()
    request = world.submit(prompt(22))
    world.tiers.where = dict.fromkeys(world.keys_of(request)[:4], "host")
    world.tiers.worth = False
    assert world.step().transfers == ()
    world.run()
    assert request.cached == CachedTokens()


def test_a_request_waits_for_the_disk_without_holding_anything_or_anyone() -> None:
    world = World()
    request = world.submit(prompt(18))
    keys = world.keys_of(request)
    world.tiers.where = {**dict.fromkeys(keys[:2], "host"), **dict.fromkeys(keys[2:4], "disk")}
    other = world.submit(prompt(3, beginning=11))
    [promotion] = world.step().transfers
    assert promotion == PromotePlan(request.id, 0, tuple(keys[:4]))
    assert states([request, other]) == [State.LOADING, State.RUNNING]
    assert (request.row, request.blocks) == (None, None)
    assert world.step().transfers == ()
    world.end_promotion(world.promotions[0], complete=True)
    assert request.state is State.WAITING
    world.run()
    assert request.cached == CachedTokens(host=8, disk=8)


def test_no_more_requests_wait_for_the_disk_than_there_are_rows_to_come_to() -> None:
    world = World(num_rows=2, num_blocks=32)
    requests = [world.submit(prompt(18, beginning=20 * index)) for index in range(3)]
    for request in requests:
        world.tiers.where.update(dict.fromkeys(world.keys_of(request)[:4], "disk"))
    world.step()
    assert states(requests) == [State.LOADING, State.LOADING, State.RUNNING]  # the third computes what it could have waited for
    world.run()


def test_nobody_is_retracted_for_one_that_will_wait_for_the_disk() -> None:
    world = World(num_rows=2, num_blocks=8)
    lower = world.submit(prompt(17), outputs=8, priority=1)
    steps_until(world, lambda: lower.num_outputs > 0)
    urgent = world.submit(prompt(18, beginning=21))
    world.tiers.where = dict.fromkeys(world.keys_of(urgent)[:4], "disk")
    world.step()
    assert states([lower, urgent]) == [State.RUNNING, State.LOADING]
    assert lower.epoch == 0
    world.run()


def test_after_an_incomplete_promotion_the_disk_is_left_alone() -> None:
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


def test_a_request_gives_up_on_a_disk_whose_blocks_are_always_gone_again() -> None:
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


def test_a_retracted_request_may_wait_for_the_disk_again() -> None:
    world = World()
    request = promoting(world)
    world.end_promotion(world.promotions[0], complete=True)
    for _ in range(2):
        world.step()
    world.scheduler._retract(request)
    world.device.run_all()
    world.evict_everything()
    for _ in range(world.limits.max_promotions):
        world.tiers.where = dict.fromkeys(world.keys_of(request)[:4], "disk")
        world.step()
        world.end_promotion(world.promotions[0], complete=True)
    world.run()
    assert world.said(request) == world.expected(request)


def test_news_of_a_promotion_or_load_that_nobody_waits_for_are_ignored() -> None:
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
    assert (request.state, request.epoch, request.avoid_disk, request.avoid_tiers) == (State.RUNNING, 0, False, False)
    world.run()


def test_a_failed_load_is_a_miss() -> None:
    """H9, H10: computed again, without the tiers, in blocks that the load may still write to behind a fence."""
    world = World()
    request = loading(world)
    world.scheduler.load_failed(request.id, epoch=0)
    assert (request.state, request.epoch) == (State.WAITING, 1)
    assert world.scheduler.num_preemptions == 0  # the pool was not full
    late = set(world.tickets[0].plan.block_ids)
    plan = world.step()
    assert plan.transfers == ()
    assert spans(plan, request) == [(0, 8)]
    assert not late & set(row_of(plan, request).block_ids)
    assert request.cached == CachedTokens()
    world.run()
    assert world.said(request) == world.expected(request)


def test_a_load_that_fails_after_the_first_token_does_not_change_what_was_reported_as_cached() -> None:
    world = World()
    request = loading(world)
    steps_until(world, lambda: request.num_outputs == 1)
    world.scheduler._retract(request)
    world.device.run_all()
    world.evict_everything()
    world.fail_loads = True
    world.run()
    assert request.epoch == 2
    assert request.cached == CachedTokens(host=16)


def test_a_failed_load_voids_the_flight_that_read_it() -> None:
    world = World()
    world.fail_loads = True
    request = world.submit(prompt(18), outputs=3)
    world.tiers.where = dict.fromkeys(world.keys_of(request)[:4], "host")
    world.step()
    world.step()  # the flight lands, its load had failed: neither token nor block of it is believed
    assert (request.num_outputs, request.epoch, world.blocks.num_keys) == (0, 1, 0)
    world.run()
    assert world.said(request) == world.expected(request)


def test_a_retracted_request_comes_back_from_the_host_tier() -> None:
    """Its complete blocks were stored as they were committed; by the time it runs again, the device has lost them."""
    world = World()
    request = world.submit(prompt(18), outputs=6)
    steps_until(world, lambda: request.num_outputs == 3)
    world.scheduler._retract(request)
    world.device.run_all()
    world.evict_everything()
    plan = world.step()
    [load] = plan.transfers
    assert isinstance(load, LoadPlan)
    assert load.keys == tuple(world.keys_of(request)[:5])
    assert spans(plan, request) == [(20, 21)]
    world.run()
    assert world.said(request) == world.expected(request)


# ---------------------------------------------------------------------- the rest


@pytest.mark.parametrize("after_steps", range(6))
def test_a_reset_changes_no_token_of_those_who_run_or_wait(after_steps: int) -> None:
    """H8: one computes, another waits to join it."""
    world = World(num_blocks=32)
    one, two = world.submit(prompt(18), outputs=3), world.submit(prompt(18), outputs=3)
    for _ in range(after_steps):
        world.step()
    world.scheduler.forget_all()
    world.run()
    assert (world.said(one), world.said(two)) == (world.expected(one), world.expected(two))


@pytest.mark.parametrize("after_steps", range(1, 4))
def test_what_a_request_began_before_a_reset_is_never_found_or_stored(after_steps: int) -> None:
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


def test_nobody_waits_to_join_what_was_begun_before_a_reset() -> None:
    world = World(num_blocks=32)
    one, two = world.submit(prompt(18), outputs=9), world.submit(prompt(18))
    world.step()
    assert states([one, two]) == [State.RUNNING, State.WAITING]
    world.scheduler.forget_all()
    world.step()
    assert states([one, two]) == [State.RUNNING, State.RUNNING]
    world.run()


def test_a_request_that_starts_anew_after_a_reset_shares_its_blocks_again() -> None:
    world = World()
    request = world.submit(prompt(18), outputs=4)
    steps_until(world, lambda: request.num_outputs == 1)
    world.scheduler.forget_all()
    world.scheduler._retract(request)
    world.device.run_all()
    world.tiers.where.clear()
    world.run()
    assert world.blocks.match(world.keys_of(request)) != []


def test_a_scheduler_without_tiers_finds_nothing_in_them() -> None:
    world = World()
    scheduler = Scheduler(limits=world.limits, blocks=world.blocks, rows=world.rows, keys=world.keys)
    assert scheduler.plan() == StepPlan((), type(scheduler.plan().batch)(()), ())
    assert NoTiers().locate([b"key"]) == []
    assert not NoTiers().worth_loading(["host"])


def test_requests_are_listed_in_the_order_of_their_arrival_whatever_they_do() -> None:
    world = World(num_rows=1)
    requests = [world.submit(prompt(3, beginning=10 * index), priority=-index) for index in range(3)]
    world.step()
    assert world.scheduler.requests() == requests
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (1, 2)
    assert world.scheduler.get(1) is requests[1]
    assert issubclass(SidestreamError, Exception)
    world.run()
