"""Planner and carriers in a miniature of an engine, in random schedules: no step reads wrong KV, and the checker finds
nothing. Without one of the connectors' rules, some schedule fails.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest
from foreign_engine import RULES, program

from proof.mutations import applied, find
from sidestream_order.explore import Run, replay

SCHEDULES, WITH_STATES = 64, 24
POLICIES = ("random", "late", "early", "starve:load", "starve:store", "starve:compute", "starve:offload", "pct:3:1500")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.ERROR)  # faults are injected
    yield
    logging.disable(logging.NOTSET)


def schedule(seed: int, told: Counter[str], *, states: bool) -> Run:
    return replay(program(seed, told, states=states), POLICIES[seed % len(POLICIES)], seed, rules=RULES, trace=False)


@pytest.mark.parametrize("states", [False, True])
def test_no_schedule_reads_wrong_kv(states: bool) -> None:
    told: Counter[str] = Counter()
    schedules = WITH_STATES if states else SCHEDULES
    for seed in range(schedules):
        run = schedule(seed, told, states=states)
        assert not run.problems, f"seed {seed}: {run.problems[0]}"
    happened = ("loads", "failed loads", "hits in disk", "preempted", "aborted", "resets", "stores put off")
    early = () if states else ("loads told early",)
    assert not [what for what in (*happened, *early) if told[what] < schedules // 10], told


@pytest.mark.parametrize(
    "rule",
    [
        "store-waits-for-its-step",
        "store-holds-its-device-blocks",
        "block-behind-the-window-is-not-stored",
        "load-waits-for-earlier-steps",
        "load-is-told-after-its-fences",
        "step-waits-for-loads-told-early",
        "failed-load-is-told",
        "blocks-are-held-until-settled",
        "blocks-are-held-until-all-ranks-settled",
        "resumed-request-has-new-blocks",
        "key-has-the-group",
        "state-is-stored-when-it-is-handed",
        "state-is-stored-with-its-own-tokens",
        "state-arrives-before-its-step",
    ],
)
def test_without_a_rule_some_schedule_fails(rule: str) -> None:
    states = rule.startswith("state-")
    with applied(find(rule)):
        assert any(
            schedule(seed, Counter(), states=states).problems for seed in range(WITH_STATES if states else SCHEDULES)
        )
