"""The scheduler under random requests, aborts, tiers, failures and stream orders: no leak, no wrong token, nobody
starves.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from scheduler_world import World

from sidestream.schedule.limits import Limits
from sidestream.schedule.prefix_cache import Source

pytestmark = pytest.mark.slow

PICK = st.integers(0, 1 << 16)
# Few beginnings, so that requests meet in the cache; few lengths, so that block and chunk borders are hit often.
BEGINNINGS = st.sampled_from([1, 2])
LENGTHS = st.integers(1, 10)


class SchedulerMachine(RuleBasedStateMachine):
    """`World.step` checks after every step; these rules only make trouble."""

    @initialize(
        seed=PICK,
        num_blocks=st.integers(8, 10),
        num_rows=st.integers(1, 4),
        prefix_cache=st.sampled_from([True, True, True, False]),
        drafts=st.sampled_from([0, 0, 1, 3]),
    )
    def create(self, seed: int, num_blocks: int, num_rows: int, prefix_cache: bool, drafts: int) -> None:
        limits = Limits(
            block_tokens=2, chunk_tokens=4, token_budget=4 + num_rows, prefix_cache=prefix_cache, aging_steps=4
        )
        self.world = World(num_blocks=num_blocks, num_rows=num_rows, seed=seed, limits=limits, drafts=drafts)

    @rule(
        beginning=BEGINNINGS,
        length=LENGTHS,
        differs_at=st.integers(1, 20),
        outputs=st.integers(2, 6),
        priority=st.sampled_from([0, 0, 0, 1, 5]),
        copies=st.integers(1, 3),
        stops=st.booleans(),
    )
    def arrive(
        self, beginning: int, length: int, differs_at: int, outputs: int, priority: int, copies: int, stops: bool
    ) -> None:
        prompt = [beginning + (position >= differs_at) for position in range(length)]
        for _ in range(copies):
            self.world.submit(prompt, outputs=outputs, priority=priority, stop_ids=range(0, 50, 5) if stops else ())

    @rule(beginning=BEGINNINGS, length=LENGTHS, priority=st.sampled_from([0, 0, 1]), pick=st.none() | PICK)
    def arrive_while_a_step_is_awaited(self, beginning: int, length: int, priority: int, pick: int | None) -> None:
        """And somebody may leave, and a wait for the disk may end."""

        def meanwhile() -> None:
            if pick is not None:
                self.abort(pick)
            if self.world.promotions:
                self.world.end_promotion(self.world.promotions[0], complete=True)
            self.world.submit([beginning] * length, priority=priority)

        self.world.step(meanwhile)

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    @rule(count=st.integers(1, 4))
    def let_streams_run(self, count: int) -> None:
        self.world.device.run_some(count)

    @precondition(lambda self: len(self.world.scheduler.requests()) > 3)
    @rule(pick=PICK)
    def leave(self, pick: int) -> None:
        self.abort(pick)

    def abort(self, pick: int) -> None:
        if requests := self.world.scheduler.requests():
            self.world.abort(requests[pick % len(requests)])

    @precondition(lambda self: self.world.stories)
    @rule(pick=PICK, first=st.integers(0, 4), count=st.integers(1, 7), source=st.sampled_from(["host", "disk"]))
    def something_rests_in_a_tier(self, pick: int, first: int, count: int, source: Source) -> None:
        story = self.world.stories[pick % len(self.world.stories)]
        for key in self.world.keys_of(story.request)[first : first + count]:
            self.world.tiers.where[key] = source

    @precondition(lambda self: self.world.tiers.where)
    @rule(pick=PICK)
    def a_tier_loses_something(self, pick: int) -> None:
        keys = list(self.world.tiers.where)
        del self.world.tiers.where[keys[pick % len(keys)]]

    @rule(worth=st.sampled_from([True, True, False]), next_load_fails=st.sampled_from([False, False, True]))
    def tiers_change_their_mood(self, worth: bool, next_load_fails: bool) -> None:
        self.world.tiers.worth, self.world.fail_loads = worth, next_load_fails

    @precondition(lambda self: self.world.promotions)
    @rule(pick=PICK, complete=st.sampled_from([True, True, False]))
    def a_promotion_ends(self, pick: int, complete: bool) -> None:
        plans = self.world.promotions
        self.world.end_promotion(plans[pick % len(plans)], complete=complete)

    @rule()
    def everything_is_forgotten(self) -> None:
        self.world.scheduler.forget_all()

    def teardown(self) -> None:
        """Nobody starves: what is left ends within a number of steps that only depends on its tokens."""
        tokens = sum(len(request.prompt) + request.max_outputs for request in self.world.scheduler.requests())
        self.world.run(max_steps=20 + 2 * tokens)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=400, stateful_step_count=50, deadline=None, derandomize=True)
