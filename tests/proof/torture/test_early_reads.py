"""The self-check reports a step that reads KV before its load has brought it, on the simulated device."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from proof.mutations import applied, find
from proof.torture import Asked, Outcome, Reference, Workload, draw_workload, reference_of, run_schedule
from sidestream.runner.second_run import SecondRun
from sidestream_order.sim import make_policy
from sidestream_order.sim.policies import HOST, Choice

FIRST, OTHER = tuple(range(1, 22)), tuple(range(30, 60))


def again_after_another(*, captured: bool) -> Workload:
    """A prompt that comes again after another prompt took its device blocks."""
    requests = (Asked(0, FIRST, 2), Asked(20, OTHER, 2), Asked(40, FIRST, 2))
    return Workload(0, requests, blocks=9, slots=24, max_running=1, captured=captured, self_check=1.0)


class LateLoads:
    """Random, but loads rarely run, except between the two runs of a step."""

    def __init__(self, seed: int) -> None:
        self.between = False
        self._rng = random.Random(seed)
        self._random = make_policy("random", self._rng)

    def choose(self, choice: Choice) -> str:
        loads = [name for name in choice.able if name.startswith("load")]
        if loads and self.between:
            return loads[0]
        others = [name for name in choice.able if name not in loads]
        if self._rng.random() < 0.9:
            if not others and choice.may_nap:
                return HOST
            choice = dataclasses.replace(choice, able=others or choice.able)
        return self._random.choose(choice)


def run(workload: Workload, reference: Reference, seed: int, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    policy = LateLoads(seed)
    second = SecondRun.compare

    def of(self: Any, run: Any, batch: Any) -> Any:
        runs: list[int] = []

        def counted() -> Any:
            runs.append(0)
            given = run()
            policy.between = len(runs) == 1
            return given

        return second(self, counted, batch)

    with monkeypatch.context() as changed:
        changed.setattr(SecondRun, "compare", of)
        return run_schedule(workload, policy, reference=reference)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_a_step_that_reads_blocks_before_their_load_is_reported(
    captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = again_after_another(captured=captured)
    reference = reference_of(workload)
    rule = find("captured-layer-waits-for-its-load" if captured else "layer-waits-for-its-load")
    assert run(workload, reference, 0, monkeypatch).findings == ()
    with applied(rule):
        assert any("self-check" in run(workload, reference, seed, monkeypatch).oracles for seed in range(30))


def test_some_workloads_are_drawn_with_the_self_check() -> None:
    shares = [draw_workload(seed).self_check for seed in range(200)]
    assert {*shares} == {0.0, 0.5, 1.0}
    assert 10 < sum(share > 0 for share in shares) < 60
