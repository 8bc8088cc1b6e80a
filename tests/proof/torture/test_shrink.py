"""A failure becomes short, stays the same failure, and becomes the same short one each time."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from proof.mutations import Mutation, find
from proof.torture import Failure, Outcome, kill, render, rerun, shrink, shrinking
from proof.torture.drawing import draw_workload
from proof.torture.shrinking import simpler_workloads
from proof.torture.workload import blocks_for
from sidestream.errors import ConfigError
from sidestream_order.steering import minimise

pytestmark = pytest.mark.slow

RULES = ("release-waits-for-the-last-step", "settled-blocks-are-released", "store-waits-for-step")
"""Missed by the checker, by the loop, and by the checker again, in bytes that nobody has written yet."""


def failure_of(mutation: Mutation, *, seed: int = 0) -> Failure:
    killed = kill(mutation, seed=seed, max_schedules=80)
    assert killed is not None
    assert killed.failure is not None
    return killed.failure


def size(workload: object) -> int:
    return len(repr(workload))


@pytest.mark.parametrize("name", RULES)
def test_a_shrunk_failure_is_shorter_and_the_same_oracle_objects(name: str) -> None:
    mutation = find(name)
    failure = failure_of(mutation)
    oracle = failure.outcome.oracles[0]
    short = shrink(failure, mutation=mutation, max_runs=120)
    assert oracle in short.outcome.oracles
    assert size(short.workload) < size(failure.workload) / 2
    assert len(short.turns) < len(failure.outcome.deviations) or not short.turns
    assert short.outcome.decisions < failure.outcome.decisions
    assert short.runs <= 120

    again = rerun(short.workload, short.turns, mutation=mutation)
    assert (again.findings, again.lines) == (short.outcome.findings, short.outcome.lines)
    assert rerun(short.workload, short.turns).findings == ()  # with the rule in place, nothing is wrong


def test_a_shrunk_schedule_that_does_not_fail_again_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mutation, run = find(RULES[0]), shrinking.run_schedule
    failure = failure_of(mutation)

    def passes_when_traced(*arguments: Any, trace: bool = False, **options: Any) -> Outcome:
        outcome = run(*arguments, trace=trace, **options)
        return dataclasses.replace(outcome, findings=()) if trace else outcome

    monkeypatch.setattr(shrinking, "run_schedule", passes_when_traced)
    with pytest.raises(ConfigError, match="does not fail again"):
        shrink(failure, mutation=mutation, max_runs=20)


def test_shrinking_twice_gives_the_same_schedule() -> None:
    mutation = find(RULES[0])
    failure = failure_of(mutation)
    first, second = (shrink(failure, mutation=mutation, max_runs=60) for _ in range(2))
    assert first == second


def test_no_single_simplification_of_a_fully_shrunk_workload_was_left_untried() -> None:
    mutation = find("share-counts-its-reference")
    failure = failure_of(mutation)
    short = shrink(failure, mutation=mutation, max_runs=600)
    assert short.runs < 300  # it ended by itself, not because its runs were spent
    assert len(short.workload.requests) <= 2
    assert not short.turns


def test_a_failure_that_does_not_come_back_is_refused_with_its_seeds() -> None:
    failure = failure_of(find(RULES[0]))
    with pytest.raises(
        ConfigError, match=rf"workload {failure.workload.seed} under policy {failure.policy} .* does not fail again"
    ):
        shrink(failure)  # the rule is in place


def test_every_simpler_workload_differs_and_can_be_served() -> None:
    with_store = dataclasses.replace(draw_workload(0), slots=8, disk_blocks=0, store=True, shared_memory=True)
    with_disk = dataclasses.replace(with_store, disk_blocks=8, shared_disk=True)
    for workload in (*map(draw_workload, range(30)), with_store, with_disk):
        for simpler in simpler_workloads(workload):
            assert simpler != workload
            assert simpler.requests
            assert simpler.blocks >= max(blocks_for(asked) for asked in simpler.requests)
            assert size(simpler) <= size(workload) + len("True") + 2  # a flag may become longer, nothing else


def test_simplification_of_a_workload_ends() -> None:
    workload = draw_workload(2)
    for step in itertools.count():
        simpler = next(simpler_workloads(workload), None)
        if simpler is None:
            break
        workload = simpler
        assert step < 1000
    assert len(workload.requests) == 1
    assert (workload.requests[0].prompt, workload.requests[0].max_tokens) == (workload.requests[0].prompt[:1], 1)


def test_minimise_keeps_only_necessary_items() -> None:
    needed = {3, 17, 30}
    tried = []

    def fails(items: object) -> bool:
        tried.append(items)
        return needed <= set(items)  # type: ignore[call-overload]

    assert minimise(range(40), fails) == sorted(needed)
    assert minimise(range(40), lambda items: True) == []
    assert minimise([1], bool) == [1]


def test_a_race_is_rendered_with_its_two_works_and_the_missing_edge() -> None:
    mutation = find("load-waits-for-the-last-use")
    short = shrink(failure_of(mutation, seed=49), mutation=mutation, max_runs=30)
    objection = short.outcome.objections[0]
    assert objection.kind == "race"
    assert dataclasses.astuple(objection)  # plain values: it travels between processes
    for width in (100, 140):  # the heads of eight actors take 78
        text = render(short.outcome.lines, objection, width=width)
        marks = [line[:3] for line in text.splitlines()[1:]]
        assert sum("A" in mark for mark in marks) >= 2  # where it is given, and where it runs
        assert sum("B" in mark for mark in marks) >= 2
        assert any("!" in mark for mark in marks)
        assert max(map(len, text.splitlines())) <= width
        assert f"not after {objection.works[0]}" in text
