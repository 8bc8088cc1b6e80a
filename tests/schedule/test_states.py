"""Recurrent states in the scheduler: which state each row reads and writes, where checkpoints are made, and when they
are a hit. Steps end at once, unless a test holds back their fences.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from scheduler_world import GREEDY, SimTiers

from sidestream.schedule.limits import Limits
from sidestream.schedule.planning import StepBuilder
from sidestream.schedule.request import Request
from sidestream.schedule.scheduler import Scheduler
from sidestream.schedule.states import BEGINS, StateCache, part_keys
from sidestream.types import RowPlan, RowResult, StateIds, StepPlan
from sidestream_kv.kv.keys import BlockKeys
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.kv.pool import FencedPool
from sidestream_kv.kv.state_layout import RESERVED_STATES, StateLayout, StateRegion, StateTensor
from sidestream_kv.types import LoadPlan, StorePlan

SIZE = 4
LAYOUT = KVLayout(1, 1, 8, SIZE, "float32")  # 256 bytes a block
STATES = StateLayout((StateTensor(0, "recurrent", 0, (4,), "float32"),), 4, "float32")  # 512 bytes a state: two blocks


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The fence of a step; `tick` is its number."""

    tick: int
    done: bool = True
    stream: str = "compute"
    failure: BaseException | None = None

    def poll(self) -> bool:
        return self.done


class Turns:
    """A scheduler, and steps that are committed as soon as they are planned. Every token drawn is 1."""

    def __init__(
        self,
        *,
        num_states: int = 12,
        num_blocks: int = 64,
        num_slots: int = 2,
        interval: int = 0,
        layout: KVLayout = LAYOUT,
    ) -> None:
        limits = Limits(SIZE, 16, 16 + num_slots, state_interval=interval)
        self.blocks, self.slots = FencedPool("blocks", num_blocks), FencedPool("rows", num_slots)
        self.states = FencedPool("states", num_states)
        self.region = StateRegion(STATES, layout.block_bytes, num_blocks, num_states)
        self.keys = BlockKeys(fingerprint="turns", layout=layout, states=STATES)
        self.tiers = SimTiers()
        self.scheduler = Scheduler(
            limits=limits,
            blocks=self.blocks,
            slots=self.slots,
            keys=self.keys,
            tiers=self.tiers,
            states=(self.states, self.region),
        )
        self.plans: list[StepPlan] = []
        self.stored: list[StorePlan] = []
        self._ids = 0

    def submit(self, prompt: list[int], outputs: int = 1) -> Request:
        self._ids += 1
        request = Request(self._ids, tuple(prompt), GREEDY, outputs, frozenset(), 0)
        self.scheduler.submit(request)
        return request

    def plan(self) -> StepPlan:
        self.plans.append(self.scheduler.plan())
        return self.plans[-1]

    def commit(self, plan: StepPlan, *, finite: bool = True) -> None:
        fence = Step(len(self.plans))
        self.scheduler.launched(plan.batch, fence)
        results = [RowResult((1,) if finite else (), finite=finite) for row in plan.batch.rows if row.samples]
        committed = self.scheduler.commit(plan.batch, results, fence)
        if (store := self.scheduler.publish(committed)) is not None:
            self.stored.append(store)
        for request, _, _, reason in committed.outputs:
            if reason is not None or not finite:
                self.scheduler.finish(request, reason or "error")

    def run(self, request: Request) -> list[RowPlan]:
        """All rows of the request, to its end."""
        rows: list[RowPlan] = []
        while request.finish_reason is None:
            plan = self.plan()
            rows += [row for row in plan.batch.rows if row.request_id == request.id]
            self.commit(plan)
        return rows

    def answer(self, prompt: list[int], outputs: int = 1) -> list[RowPlan]:
        return self.run(self.submit(prompt, outputs))

    def key(self, tokens: list[int]) -> bytes:
        keys: list[bytes] = []
        self.keys.extend(keys, tokens)
        return keys[-1]


def spans(rows: list[RowPlan]) -> list[tuple[int, int]]:
    return [(row.min_start, row.stop) for row in rows]


def test_a_chunk_ends_at_each_checkpoint_and_the_next_chunk_reads_it() -> None:
    turns = Turns()
    first, tail = turns.answer(list(range(10)))
    assert spans([first, tail]) == [(0, 8), (8, 10)]
    assert first.states is not None and tail.states is not None
    assert first.states.read == BEGINS
    assert tail.states.read == first.states.write
    assert tail.states.write not in (tail.states.read, BEGINS)
    assert turns.states.get(turns.key(list(range(8)))) == first.states.write


def test_decoding_changes_its_state_only_at_the_end_of_a_block() -> None:
    turns = Turns()
    rows = turns.answer([5, 6], outputs=8)  # no checkpoint in the prompt: it has no complete block
    states = [row.states for row in rows]
    assert all(ids is not None for ids in states)
    own = states[0].write  # type: ignore[union-attr]
    for row, before in zip(rows[1:], rows, strict=False):
        assert row.states is not None and before.states is not None
        assert row.states.read == before.states.write
        assert (row.states.write == own) == (row.stop % SIZE != 0)


def test_a_repeated_prompt_continues_from_its_checkpoint() -> None:
    turns = Turns()
    first = turns.answer(list(range(10)))
    again = turns.answer(list(range(10)))
    assert spans(again) == [(8, 10)]
    assert first[0].states is not None and again[0].states is not None
    assert again[0].states.read == first[0].states.write


def test_a_conversation_continues_from_the_end_of_its_last_answer() -> None:
    turns = Turns()
    turns.answer(list(range(6)), outputs=8)  # its last token was never computed: 13 tokens, 12 of them in whole blocks
    rows = turns.answer([*range(6), *[1] * 8, 7, 8])
    assert rows[0].min_start == 12


def test_blocks_without_a_checkpoint_at_their_end_are_no_hit() -> None:
    turns = Turns()
    turns.answer(list(range(20)))
    rows = turns.answer([*range(10), *range(40, 50)])  # 8 tokens in common; the only checkpoint covers 16
    assert rows[0].min_start == 0


def test_a_checkpoint_is_made_where_prompts_were_seen_to_branch() -> None:
    turns = Turns()
    turns.answer(list(range(20)))
    second = turns.answer([*range(10), *range(40, 50)])
    assert spans(second)[0] == (0, 8)
    third = turns.answer([*range(10), *range(60, 70)])
    assert third[0].min_start == 8


def test_checkpoints_are_made_at_the_configured_interval() -> None:
    turns = Turns(interval=2)
    rows = turns.answer(list(range(30)))
    assert [row.stop for row in rows] == [8, 16, 24, 28, 30]
    assert all(turns.states.get(turns.key(list(range(stop)))) is not None for stop in (8, 16, 24, 28))


def test_the_newest_checkpoint_of_an_answer_replaces_the_previous_one() -> None:
    turns = Turns()
    turns.answer(list(range(10)), outputs=12)
    kept = [
        len(tokens)
        for stop in range(4, 24, 4)
        if turns.states.get(turns.key(tokens := [*range(10), *[1] * 12][:stop])) is not None
    ]
    assert kept == [8, 20]


def test_a_checkpoint_is_made_only_if_each_waiting_request_still_gets_a_state() -> None:
    turns = Turns(num_states=3, num_slots=2)
    first = turns.submit(list(range(10)), outputs=2)
    plan = turns.plan()
    assert [row.states.write for row in plan.batch.rows if row.states] != [first.states and first.states.own.ids[0]]
    turns.commit(plan)
    tight = Turns(num_states=2, num_slots=2)
    request = tight.submit(list(range(10)), outputs=2)
    plan = tight.plan()
    assert request.states is not None
    assert [row.states.write for row in plan.batch.rows if row.states] == [request.states.own.ids[0]]


def test_a_request_without_a_state_waits() -> None:
    turns = Turns(num_states=1, num_slots=2)
    turns.submit([1, 2, 3], outputs=3)
    late = turns.submit([4, 5, 6], outputs=1)
    turns.commit(turns.plan())
    assert late.states is None and turns.slots.num_available == 1
    turns.run(late)
    assert late.finish_reason == "length"


def test_the_next_writer_of_a_state_waits_for_its_last_uses() -> None:
    turns = Turns(num_states=1, num_slots=1)
    request = turns.submit([1, 2, 3], outputs=3)
    plan = turns.plan()
    fence = Step(7, done=False)
    turns.scheduler.launched(plan.batch, fence)
    turns.scheduler.finish(request, "abort")
    turns.submit([4, 5, 6])
    assert fence in turns.plan().after

    turns = Turns(num_states=3, num_slots=1)
    first, others = turns.states.take(1), turns.states.take(2)
    first.release()
    others.release(after=(fence,))
    request = turns.submit(list(range(10)))
    assert fence in turns.plan().after  # of the checkpoint: its own state was not in use
    assert request.states is not None and request.states.own.ids == first.ids and request.states.source is not None


@pytest.mark.parametrize("missing", [None, 0, 1])
def test_a_checkpoint_in_a_tier_is_a_hit_only_with_all_its_parts(missing: int | None) -> None:
    turns = Turns()
    prompt = list(range(10))
    keys: list[bytes] = []
    turns.keys.extend(keys, prompt)
    parts = part_keys(keys[1], turns.region.blocks_per_state)
    assert len(parts) == 2
    turns.tiers.where = dict.fromkeys([*keys, *parts], "host")
    if missing is not None:
        del turns.tiers.where[parts[missing]]
    request = turns.submit(prompt)
    plan = turns.plan()
    loads = [transfer for transfer in plan.transfers if isinstance(transfer, LoadPlan)]
    if missing is not None:
        assert not loads and spans(list(plan.batch.rows)) == [(0, 8)]
        return
    (load,) = loads
    assert load.keys == (*parts, *keys) and load.num_whole == len(parts)
    assert request.states is not None and request.states.source is not None
    assert load.block_ids[:2] == tuple(turns.region.block_ids(request.states.source.ids[0]))
    assert request.cached is not None and request.cached.host == 8
    turns.scheduler.load_ready(request.id, request.epoch)
    plan = turns.plan()
    (row,) = plan.batch.rows
    assert (row.min_start, row.stop) == (8, 10)
    assert row.states is not None and row.states.read == request.states.read[0][1].ids[0]
    turns.commit(plan)
    assert turns.states.get(keys[1]) == row.states.read  # it is on the device from now on
    assert not turns.stored  # and came from a tier


def test_a_request_that_loads_a_checkpoint_needs_two_free_states() -> None:
    turns = Turns(num_states=2, num_slots=2, layout=KVLayout(1, 1, 16, SIZE, "float32"))
    assert turns.region.blocks_per_state == 1
    first, prompt = turns.submit([1, 2, 3], outputs=3), list(range(10))
    turns.commit(turns.plan())
    keys: list[bytes] = []
    turns.keys.extend(keys, prompt)
    turns.tiers.where = dict.fromkeys([*keys, *part_keys(keys[1], 1)], "host")
    second = turns.submit(prompt)
    turns.commit(turns.plan())
    assert second.states is None, "one state is left, and the request needs one for itself and one for the checkpoint"
    turns.run(first)
    assert any(isinstance(transfer, LoadPlan) for transfer in turns.plan().transfers)


def test_checkpoints_of_prompts_are_stored_with_their_blocks() -> None:
    turns = Turns()
    rows = turns.answer(list(range(10)))
    (store,) = turns.stored
    assert rows[0].states is not None
    assert store.keys[2:] == tuple(part_keys(turns.key(list(range(8))), 2))
    assert store.block_ids[2:] == tuple(turns.region.block_ids(rows[0].states.write))


def test_the_newest_checkpoint_is_stored_when_its_request_ends() -> None:
    turns = Turns()
    turns.answer(list(range(10)), outputs=12)
    latest = turns.scheduler.store_latest()
    assert latest is not None
    plan, lease = latest
    assert plan.keys == tuple(part_keys(turns.key([*range(10), *[1] * 10]), 2))
    assert not plan.returning
    assert not turns.states.is_cached(lease.ids[0])
    lease.release()
    assert turns.scheduler.store_latest() is None
    turns.answer([*range(10), *[1] * 12, *range(20, 30)], outputs=12)
    latest = turns.scheduler.store_latest()
    assert latest is not None
    assert latest[0].returning == frozenset(latest[0].keys)  # it continued an earlier turn
    latest[1].release()


def superseded(turns: Turns) -> list[bytes]:
    """Keys of all checkpoints that were superseded so far, by the key of their first part."""
    plans = list(turns.stored)
    if (latest := turns.scheduler.store_latest()) is not None:
        plans.append(latest[0])
        latest[1].release()
    return [key for plan in plans for key in plan.superseded]


def test_the_next_turn_supersedes_the_states_of_the_previous_turn() -> None:
    turns = Turns(num_states=6)
    first = [*range(10)]
    turns.answer(first, outputs=12)
    prompt_end, answer_end = turns.key(first[:8]), turns.key([*first, *[1] * 10])
    assert superseded(turns) == []
    second = [*first, *[1] * 12, *range(20, 30)]
    turns.answer(second, outputs=12)
    parts = [*part_keys(prompt_end, 2), *part_keys(answer_end, 2)]
    assert superseded(turns) == parts
    assert [turns.states.get(key) is not None for key in (prompt_end, answer_end)] == [True, True]
    turns.states.take(turns.states.num_free + 2)
    assert [turns.states.get(key) for key in (prompt_end, answer_end)] == [None, None]
    assert turns.states.get(turns.key([*second, *[1] * 10])) is not None


def test_a_turn_that_continues_the_previous_prompt_supersedes_its_answer_too() -> None:
    """As with models whose reasoning is left out of the next prompt."""
    turns = Turns()
    first = [*range(10)]
    turns.answer(first, outputs=12)
    turns.answer([*first[:9], *range(50, 60)], outputs=12)
    parts = [*part_keys(turns.key(first[:8]), 2), *part_keys(turns.key([*first, *[1] * 10]), 2)]
    assert superseded(turns) == parts


@pytest.mark.parametrize("steps", [1, 8])
def test_a_preempted_request_supersedes_states_as_if_it_was_not_preempted(steps: int) -> None:
    """It supersedes the turn before, from which it has started twice, and the next turn its own checkpoints."""
    turns = Turns(num_states=12)
    first = [*range(10)]
    turns.answer(first, outputs=12)
    second = [*first, *[1] * 12, *range(20, 40)]
    request = turns.submit(second, outputs=12)
    for _ in range(steps):
        turns.commit(turns.plan())
    turns.scheduler.preempt(request)
    turns.run(request)
    assert superseded(turns) == [*part_keys(turns.key(first[:8]), 2), *part_keys(turns.key([*first, *[1] * 10]), 2)]
    turns.stored.clear()
    turns.answer([*second, *[1] * 12, *range(50, 60)])
    own = [*part_keys(turns.key(second[:40]), 2), *part_keys(turns.key([*second, *[1] * 10]), 2)]
    assert {*own} <= {*superseded(turns)}


def test_a_repeated_prompt_supersedes_no_state() -> None:
    turns = Turns()
    turns.answer([*range(10)], outputs=12)
    turns.answer([*range(10)], outputs=5)
    assert superseded(turns) == []


def test_a_state_continued_by_two_turns_in_sequence_is_superseded_once() -> None:
    turns = Turns()
    first = [*range(10)]
    turns.answer(first)
    turns.answer([*first[:9], *range(50, 60)])
    assert superseded(turns) == part_keys(turns.key(first[:8]), 2)
    turns.stored.clear()
    turns.answer([*first[:9], *range(70, 80)])
    assert superseded(turns) == []


def test_a_state_continued_by_two_turns_at_once_is_not_superseded() -> None:
    turns = Turns()
    first = [*range(10)]
    turns.answer(first)
    both = [turns.submit([*first[:9], *range(start, start + 10)]) for start in (50, 70)]
    for request in both:
        turns.run(request)
    assert superseded(turns) == []


def test_a_state_where_prompts_branch_is_not_superseded() -> None:
    turns = Turns()
    shared = [*range(12)]
    turns.answer([*shared, *range(20, 30)])
    turns.answer([*shared, *range(30, 40)])  # makes a checkpoint at the branch
    branch = turns.key(shared)
    assert turns.states.get(branch) is not None
    rows = turns.answer([*shared, *range(40, 50)])
    assert rows[0].min_start == 12
    assert superseded(turns) == []


def test_a_bounded_number_of_states_can_be_superseded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidestream.schedule.states._NUM_REMEMBERED", 2)
    turns = Turns()
    prompts = [[number] * 10 for number in (1, 2, 3)]
    for prompt in prompts:
        turns.answer(prompt)
    for prompt in (prompts[0], prompts[2]):
        turns.answer([*prompt, *range(50, 60)])
    assert superseded(turns) == part_keys(turns.key(prompts[2][:8]), 2)


def test_after_a_reset_no_state_is_superseded() -> None:
    turns = Turns()
    first = [*range(10)]
    turns.answer(first)
    turns.scheduler.forget_all()
    turns.answer(first)
    assert superseded(turns) == []


def test_a_state_is_evicted_with_its_block_and_by_a_reset() -> None:
    turns = Turns(num_blocks=8, num_slots=1)
    turns.answer(list(range(10)))
    assert turns.states.num_keys == 1
    turns.answer(list(range(100, 130)))  # takes all blocks
    assert turns.states.get(turns.key(list(range(8)))) is None
    assert turns.states.num_keys == 1
    turns.scheduler.forget_all()
    assert turns.states.num_keys == 0


def test_checkpoints_of_a_request_with_non_finite_logits_are_dropped() -> None:
    turns = Turns()
    request = turns.submit(list(range(10)))
    turns.commit(turns.plan())
    assert turns.states.num_keys == 1
    turns.commit(turns.plan(), finite=False)
    assert request.finish_reason == "error"
    assert turns.states.num_keys == 0


def test_non_finite_logits_drop_the_checkpoint_from_which_the_request_began() -> None:
    turns = Turns()
    keys = [turns.key(list(range(4))), turns.key(list(range(8)))]
    for length in (5, 10):
        turns.answer(list(range(length)))
    assert None not in [turns.states.get(key) for key in keys]
    request = turns.submit([*range(8), 20, 21, 22])
    turns.commit(turns.plan(), finite=False)
    assert request.finish_reason == "error"
    assert [turns.states.get(key) is None for key in keys] == [False, True]


@pytest.mark.parametrize("end", ["length", "abort", "preempt"])
def test_all_states_of_a_request_are_released_at_its_end(end: str) -> None:
    turns = Turns()
    request = turns.submit(list(range(10)), outputs=9)
    for _ in range(5):
        turns.commit(turns.plan())
    if end == "length":
        turns.run(request)
    elif end == "abort":
        turns.scheduler.finish(request, "abort")
    else:
        turns.scheduler.preempt(request)
    assert turns.states.num_used == 0
    turns.states.check()


def test_a_preempted_request_continues_from_its_newest_checkpoint() -> None:
    turns = Turns()
    request = turns.submit(list(range(10)), outputs=9)
    for _ in range(6):
        turns.commit(turns.plan())
    computed = request.committed_len
    turns.scheduler.preempt(request)
    rows = turns.run(request)
    assert rows[0].min_start == computed // SIZE * SIZE


class Decoding:
    """The states of one request that decodes behind a prompt of 5 tokens. Steps are committed when told."""

    def __init__(self, num_states: int = 8) -> None:
        self.pool = FencedPool("states", num_states)
        self.cache = StateCache(
            Limits(SIZE, 16, 18),
            self.pool,
            StateRegion(STATES, LAYOUT.block_bytes, 64, num_states),
            FencedPool("rows", 1),
            SimTiers(),
        )
        self.states, _ = self.cache.start(None, stop=0, loads=False)
        ids, _ = self.cache.plan(self.states, 0, 5, checkpoint=False)
        self.cache.commit(self.states, ids, 5, 5, Step(0))
        self.keys = [bytes([number]) * 16 for number in range(8)]

    def plan(self, length: int, in_flight: int = 0) -> StateIds:
        return self.cache.plan_decode(self.states, length, in_flight=in_flight, checkpoint=True)[0]

    def commit(self, ids: StateIds, start: int, committed_len: int, *, findable: bool = True) -> None:
        self.cache.commit(self.states, ids, start + 1, committed_len, Step(0))
        complete = committed_len // SIZE
        self.cache.publish(self.states, self.keys, complete, num_prompt_tokens=5, findable=lambda key: findable)


def test_a_row_that_drafts_gets_a_state_for_a_block_boundary_it_may_reach() -> None:
    decoding = Decoding()
    own = decoding.states.own.ids[0]
    assert decoding.plan(5) == (own, own, -1)  # token 5; 6 and 7 are drafts, and reach no state
    ids = decoding.plan(8, in_flight=2)  # from token 6, 7 or 8 on: its state covers up to 9 tokens
    assert ids[:2] == (own, own) and ids.checkpoint not in (own, -1)
    assert decoding.plan(9, in_flight=2).checkpoint not in (ids.checkpoint, -1)  # it may cover 8 only now


def test_a_checkpoint_is_published_once_accepted_drafts_reach_its_boundary() -> None:
    decoding = Decoding()
    first, second, third = decoding.plan(5), decoding.plan(8, in_flight=2), decoding.plan(9, in_flight=2)
    decoding.commit(first, 5, 6)  # no draft was accepted
    decoding.commit(second, 6, 7)
    assert not decoding.pool.num_keys and len(decoding.states.candidates) == 1
    decoding.commit(third, 7, 8)
    assert decoding.pool.get(decoding.keys[1]) == third.checkpoint
    assert not decoding.states.candidates

    decoding = Decoding()
    first, second, third = decoding.plan(5), decoding.plan(8, in_flight=2), decoding.plan(9, in_flight=2)
    decoding.commit(first, 5, 8)  # both were
    decoding.commit(second, 8, 9)
    assert decoding.pool.get(decoding.keys[1]) == second.checkpoint
    decoding.commit(third, 9, 10)
    assert decoding.pool.num_keys == 1


@pytest.mark.parametrize("findable", [True, False])
def test_a_checkpoint_is_not_published_without_its_block(findable: bool) -> None:
    """The findable block may be of another request, and evicted meanwhile."""
    decoding = Decoding()
    first, second = decoding.plan(5), decoding.plan(8, in_flight=2)
    decoding.commit(first, 5, 8)
    decoding.commit(second, 8, 9, findable=findable)
    assert decoding.pool.num_keys == findable
    decoding.cache.release(decoding.states, ())
    assert decoding.pool.num_used == 0


def test_an_unneeded_checkpoint_is_released_with_the_fence_of_its_step() -> None:
    decoding, fence = Decoding(), Step(3, done=False)
    first, second, third = decoding.plan(5), decoding.plan(8, in_flight=2), decoding.plan(9, in_flight=2)
    decoding.commit(first, 5, 7)
    decoding.commit(second, 7, 8)  # reaches the border at 8 tokens
    decoding.cache.commit(decoding.states, third, 9, 9, fence)
    leases = [decoding.pool.take(1) for _ in range(decoding.pool.num_available)]
    after = {lease.ids[0]: lease.after for lease in leases}
    assert after[third.checkpoint] == (fence,)
    assert after[second.checkpoint] == (fence,)  # it is findable, and other ranks may still read it in this step


def test_a_request_that_stops_drafting_makes_checkpoints_without_a_copy() -> None:
    decoding = Decoding()
    first, second = decoding.plan(5), decoding.plan(8, in_flight=2)
    decoding.commit(first, 5, 7)
    decoding.commit(second, 7, 8)
    assert decoding.pool.get(decoding.keys[1]) == second.checkpoint  # it covers 8 tokens
    own = decoding.states.own.ids[0]
    assert [decoding.plan(length) for length in (8, 9, 10)] == [(own, own, -1)] * 3
    last = decoding.plan(11)
    assert last.write != own and last.checkpoint == -1
    assert decoding.plan(12) == (last.write, own, -1)


@pytest.mark.parametrize("committed", range(4))
def test_all_checkpoints_not_yet_published_are_released(committed: int) -> None:
    decoding = Decoding()
    plans = [decoding.plan(5), decoding.plan(8, in_flight=2), decoding.plan(9, in_flight=2)]
    for number, ids in enumerate(plans[:committed]):
        decoding.commit(ids, 5 + number, 6 + number)
    decoding.cache.release(decoding.states, ())
    assert decoding.pool.num_used == 0


def test_a_step_waits_for_the_last_uses_of_its_new_checkpoint_state() -> None:
    turns, fence = Turns(num_states=4, num_slots=1), Step(7, done=False)
    request = turns.submit([1, 2, 3, 4, 5], outputs=9)
    turns.commit(turns.plan())
    turns.states.take(turns.states.num_available).release(after=(fence,))
    request.launched_len, request.drafts_in_flight = 8, 2  # behind a step with two drafts
    step = StepBuilder(prefill_budget=0, lead_s=0.0, step_s=0.0)
    turns.scheduler._decode.plan([request], [request], step)
    (row,) = step.build().batch.rows
    assert row.states is not None and row.states.checkpoint >= 0
    assert step.after == [fence]


def test_a_draft_row_makes_no_checkpoint_if_a_waiting_request_needs_the_state() -> None:
    decoding = Decoding(num_states=2)
    decoding.plan(5)
    assert decoding.plan(8, in_flight=2).checkpoint == -1


def test_states_use_whole_blocks_after_those_of_the_pool() -> None:
    region = StateRegion(STATES, LAYOUT.block_bytes, 9, 3)
    assert region.blocks_per_state == 2
    assert list(region.block_ids(1)) == [11, 12]
    assert region.span(1) == (11 * 256, 13 * 256)
    assert region.stop_byte == (9 + 2 * (3 + RESERVED_STATES)) * 256
