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

SCHEDULES = 32  # without a rule, the twelfth fails at the latest
POLICIES = ("random", "late", "early", "starve:load", "starve:store", "starve:compute", "starve:offload", "pct:3:1500")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.ERROR)  # faults are injected
    yield
    logging.disable(logging.NOTSET)


def schedule(seed: int, told: Counter[str]) -> Run:
    return replay(program(seed, told), POLICIES[seed % len(POLICIES)], seed, rules=RULES, trace=False)


def test_no_schedule_reads_wrong_kv() -> None:
    told: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        run = schedule(seed, told)
        assert not run.problems, f"seed {seed}: {run.problems[0]}"
    happened = ("loads", "failed loads", "loads told early", "hits in disk", "preempted", "aborted", "resets")
    assert not [what for what in (*happened, "stores put off") if told[what] < SCHEDULES // 10], told


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
    ],
)
def test_without_a_rule_some_schedule_fails(rule: str) -> None:
    with applied(find(rule)):
        assert any(schedule(seed, Counter()).problems for seed in range(SCHEDULES))
