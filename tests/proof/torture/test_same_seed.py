"""Same seed, same run: in one process, in another, under any hash seed, and however many processes share the work."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from proof.torture import POLICIES, Outcome, Reference, Report, Workload, campaign, draw_workload, run_schedule, torture
from sidestream_order.sim import make_policy

pytestmark = pytest.mark.slow

SCHEDULES = 2 * len(POLICIES)
FORGETS = 47  # a schedule that forgets several blocks at once: their slots are freed in one order in every process


def digest() -> str:
    """Everything that a few schedules did, down to the last interleaved line."""
    found = hashlib.sha256()
    for number in (*range(len(POLICIES)), FORGETS):
        policy = make_policy(POLICIES[number % len(POLICIES)], random.Random(number))
        outcome = run_schedule(draw_workload(number), policy, trace=True)
        found.update(repr(outcome).encode())
    return found.hexdigest()


def test_new_tensors_of_a_schedule_do_not_show_what_was_in_memory_before(monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[bool] = []

    class Schedule:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def run(self) -> None:
            filled.append(bool(torch.empty(1000).isnan().all()))

    monkeypatch.setattr("proof.torture.run._Schedule", Schedule)
    run_schedule(draw_workload(0), make_policy("random", random.Random(0)))
    assert filled == [True]
    assert not torch.are_deterministic_algorithms_enabled()


def test_inputs_that_were_never_kept_do_not_fail_a_schedule() -> None:
    """A batch replays as many drafts as its row with the most; other rows read inputs that were never written, and drop
    what they compute. The workload has such rows.
    """
    policy = make_policy("starve:store", random.Random(64_002_554))
    assert run_schedule(draw_workload(64_002_553), policy).findings == ()


def test_an_interrupt_leaves_the_schedules_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two schedules share a workload."""
    run, started = campaign.run_one, list[int]()

    def interrupted(workload: Workload, policy: str, seed: int, reference: Reference | None = None) -> Outcome:
        started.append(seed)
        if len(started) == 15:
            raise KeyboardInterrupt
        return run(workload, policy, seed, reference)

    monkeypatch.setattr(campaign, "run_one", interrupted)
    report = torture(schedules=24, seed=3)
    assert (report.schedules, report.interrupted) == (14, True)


def said(report: Report) -> tuple[object, ...]:
    return report.schedules, report.steps, report.decisions, report.digest, report.num_failures, report.failures


def test_a_schedule_runs_the_same_twice_in_a_process_and_in_others() -> None:
    here = digest()
    assert digest() == here
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "7",
        "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)]),
    }
    code = "from test_same_seed import digest; print(digest())"
    there = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert there.stdout.strip() == here


def test_two_processes_give_the_results_of_one() -> None:
    assert said(torture(schedules=SCHEDULES, seed=3, workers=2)) == said(torture(schedules=SCHEDULES, seed=3))


def test_another_seed_is_another_campaign() -> None:
    assert said(torture(schedules=8, seed=1)) != said(torture(schedules=8, seed=2))
