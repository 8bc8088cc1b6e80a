"""Reduces a failing schedule to a short one that still fails: fewer requests, fewer events, fewer switches between
actors (host, streams, threads). Each step tries a simpler schedule, and keeps it if the same oracle (check) still
reports a failure. The number of runs is bounded, so that shrinking takes seconds, not minutes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from proof.mutations import Mutation, applied
from proof.torture.campaign import Failure
from proof.torture.oracle import Reference, reference_of
from proof.torture.run import Outcome, run_schedule
from proof.torture.workload import Asked, Workload, blocks_for
from sidestream.errors import ConfigError
from sidestream_order.sim import make_policy
from sidestream_order.sim.policies import Policy, Steered
from sidestream_order.steering import minimise

MAX_RUNS = 300


@dataclass(frozen=True, slots=True)
class Shrunk:
    """A short failing schedule.

    turns    decision number → chosen actor; at all other decisions the running actor continues (`policies.Steered`)
    runs     number of schedules that were run to shrink it
    """

    workload: Workload
    turns: dict[int, str]
    outcome: Outcome
    runs: int


def shrink(failure: Failure, *, mutation: Mutation | None = None, max_runs: int = MAX_RUNS) -> Shrunk:
    """Find a short schedule in which the same oracle reports a failure; at worst, this is `failure` itself. Blocks.
    `mutation` is the removed rule, if any. Raises ConfigError when the failure cannot be reproduced.
    """
    return _Shrinking(failure, mutation, max_runs).run()


def rerun(workload: Workload, turns: dict[int, str], *, mutation: Mutation | None = None) -> Outcome:
    """Run a shrunk schedule again, and record its events in `Outcome.lines`."""
    reference = reference_of(workload)
    with _without(mutation):
        return run_schedule(workload, Steered(turns), trace=True, reference=reference)


class _Shrinking:
    def __init__(self, failure: Failure, mutation: Mutation | None, max_runs: int) -> None:
        self._mutation = mutation
        self._left = max_runs
        self._max_runs = max_runs
        self._oracle = failure.outcome.oracles[0]
        self._failure = failure
        self._references: dict[Workload, Reference] = {}

    def run(self) -> Shrunk:
        failure = self._failure
        workload = failure.workload
        outcome = self._try(workload, lambda: make_policy(failure.policy, random.Random(failure.seed)))
        if outcome is None:
            raise self._is_lost()
        turns = outcome.deviations
        # Half of the runs go to the workload: a smaller workload makes the other half faster.
        floor = self._left // 2
        at = refused = 0
        while self._left > floor:
            options = list(simpler_workloads(workload))
            if refused >= len(options):
                break
            simpler = options[at % len(options)]
            found = self._fails_somehow(simpler, turns)
            if found is not None:  # go on with the next change: a change that failed before rarely succeeds now
                workload, turns, refused = simpler, found.deviations, 0
            else:
                at, refused = at + 1, refused + 1
        kept = minimise(sorted(turns.items()), lambda items: self._steered(workload, dict(items)) is not None)
        last = self._once(workload, lambda: Steered(dict(kept)), trace=True)
        if self._oracle not in last.oracles:
            raise self._is_lost()
        return Shrunk(workload, dict(kept), last, self._max_runs - self._left)

    def _is_lost(self) -> ConfigError:
        failure = self._failure
        return ConfigError(
            f"workload {failure.workload.seed} under policy {failure.policy} with seed {failure.seed} does not fail "
            "again: it depends on something else"
        )

    def _fails_somehow(self, workload: Workload, turns: dict[int, str]) -> Outcome | None:
        """Find decisions under which the changed workload still fails: try the original policy, then the recorded
        decisions, then no switches at all.
        """
        failure = self._failure
        policies: tuple[Callable[[], Policy], ...] = (
            lambda: make_policy(failure.policy, random.Random(failure.seed)),
            lambda: Steered(turns),
        )
        for policy in policies:
            outcome = self._try(workload, policy)
            if outcome is not None:
                return outcome
        return None

    def _steered(self, workload: Workload, turns: dict[int, str]) -> Outcome | None:
        return self._try(workload, lambda: Steered(turns))

    def _try(self, workload: Workload, policy: Callable[[], Policy]) -> Outcome | None:
        """Run a schedule. Returns its outcome if the same oracle reports a failure, else None. Also None if the limit
        of runs is reached.
        """
        if self._left <= 0:
            return None
        self._left -= 1
        outcome = self._once(workload, policy)
        return outcome if self._oracle in outcome.oracles else None

    def _once(self, workload: Workload, policy: Callable[[], Policy], *, trace: bool = False) -> Outcome:
        if workload not in self._references:
            self._references[workload] = reference_of(workload)
        with _without(self._mutation):
            return run_schedule(workload, policy(), trace=trace, reference=self._references[workload])


def simpler_workloads(workload: Workload) -> Iterator[Workload]:
    """Workloads with one part removed or made smaller; the largest changes come first."""
    for name in ("requests", "events", "faults"):
        things = getattr(workload, name)
        for chunk in (len(things) // 2, 1):
            for start in range(0, len(things), chunk) if chunk else ():
                rest = (*things[:start], *things[start + chunk :])
                if name != "requests" or rest:
                    yield _changed(workload, **{name: rest})
            if chunk == 1:
                break
    if workload.closes_at is not None:
        yield _changed(workload, closes_at=None)
    for number, asked in enumerate(workload.requests):
        for simpler in _simpler_requests(asked):
            yield _changed(workload, requests=(*workload.requests[:number], simpler, *workload.requests[number + 1 :]))
    for name in ("store", "shared_memory", "shared_disk"):
        if getattr(workload, name):
            yield _changed(workload, **{name: False})
    if workload.disk_blocks:
        yield _changed(workload, disk_blocks=0, shared_disk=False)
    elif workload.slots:
        yield _changed(workload, slots=0, store=False, shared_memory=False)
    if workload.front_ends:
        yield _changed(
            workload, front_ends=0, events=tuple(event for event in workload.events if event.kind != "hang_up")
        )
        if workload.front_ends > 1:
            yield _changed(workload, front_ends=1)
    if workload.pin_s:
        yield _changed(workload, pin_s=0.0)
    for number, fault in enumerate(workload.faults):
        if fault.every:
            once = dataclasses.replace(fault, every=0)
            yield _changed(workload, faults=(*workload.faults[:number], once, *workload.faults[number + 1 :]))
    if workload.layer_groups:
        yield _changed(workload, layer_groups=False)
    if workload.states:
        yield _changed(workload, states=0)
    if workload.drafts:
        yield _changed(workload, drafts=0)
    if workload.captured:
        yield _changed(workload, captured=False)
    if workload.eos_every:
        yield _changed(workload, eos_every=0)
    if workload.meanwhile:
        yield _changed(workload, meanwhile=False)


def _simpler_requests(asked: Asked) -> Iterator[Asked]:
    if asked.abort_at is not None:
        yield dataclasses.replace(asked, abort_at=None)
    plain = {"n": 1, "priority": 0, "hot": False, "penalties": None, "bias": (), "min_tokens": 0, "logprobs": None}
    if asked.grammar:
        yield dataclasses.replace(asked, grammar="")
    for name, value in plain.items():
        if getattr(asked, name) != value:
            yield dataclasses.replace(asked, **{name: value})  # type: ignore[arg-type]
    length = len(asked.prompt)
    for shorter in sorted({length // 2, length - 4, length - 1}):
        if 0 < shorter < length:
            yield dataclasses.replace(asked, prompt=asked.prompt[:shorter])
    for fewer in sorted({asked.max_tokens // 2, asked.max_tokens - 1}):
        if asked.min_tokens <= fewer and 0 < fewer < asked.max_tokens:
            yield dataclasses.replace(asked, max_tokens=fewer)
    if asked.at:
        abort_at = None if asked.abort_at is None else max(0, asked.abort_at - asked.at + asked.at // 2)
        yield dataclasses.replace(asked, at=asked.at // 2, abort_at=abort_at)


def _changed(workload: Workload, **changes: object) -> Workload:
    """The workload with `changes`. If its largest request shrinks, the block pool shrinks too, so that blocks stay
    scarce.
    """
    changed = dataclasses.replace(workload, **changes)  # type: ignore[arg-type]
    spare = workload.blocks - max(blocks_for(asked) for asked in workload.requests)
    largest = max(blocks_for(asked) for asked in changed.requests)
    return dataclasses.replace(changed, blocks=max(largest + spare, 2))


def _without(mutation: Mutation | None) -> AbstractContextManager[None]:
    return contextlib.nullcontext() if mutation is None else applied(mutation)
