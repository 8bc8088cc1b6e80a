"""Many schedules: until something is found, until a mutation is noticed, or until enough is enough.

Several schedules share a workload, and with it the reference. Everything follows from the seed, but for how far `minutes` get.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

from sidestream.device.sim import make_policy
from sidestream.errors import ConfigError, InvariantError
from sidestream.testing.miniatures import Miniature, run_miniature
from sidestream.testing.mutations import Feature, Mutation, applied
from sidestream.testing.torture.oracle import Reference, reference_of
from sidestream.testing.torture.run import Outcome, run_schedule
from sidestream.testing.torture.workload import Workload, draw_workload

POLICIES = ("random", "late", "early", "starve:compute", "starve:store", "starve:load", "pct:2", "pct:3", "pct:4")
MAX_SCHEDULES = 500
"""A mutation that survives so many is not found."""

_SCHEDULES_PER_WORKLOAD = 8
# A mutation is noticed by some workloads and not by others, so each is left sooner.
_TRIES_PER_WORKLOAD = 4
_REPORT_EVERY_S = 0.2
_MAX_FAILURES = 20


@dataclass(frozen=True, slots=True)
class Failure:
    """A schedule that an oracle objects to, and all that it takes to run it again."""

    workload: Workload
    policy: str
    seed: int
    outcome: Outcome


@dataclass(slots=True)
class Report:
    """What a campaign came to.

    failures   the first ones, in the order of the seeds; `num_failures` counts all
    steps      turns of the loop, all together
    decisions  points at which the policy chose, all together
    seconds    of wall time
    """

    schedules: int = 0
    num_failures: int = 0
    failures: list[Failure] = field(default_factory=list)
    steps: int = 0
    decisions: int = 0
    seconds: float = 0.0
    workers: int = 1
    interrupted: bool = False

    @property
    def schedules_per_minute(self) -> float:
        """By each worker, which is one core."""
        return self.schedules / self.seconds * 60 / self.workers if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Killed:
    """A mutation was noticed: after how many schedules, by which oracle, and what that said."""

    after: int
    oracle: str
    detail: str
    failure: Failure | None = None


Progress = Callable[[Report], None]


def torture(
    *,
    schedules: int = 2000,
    seed: int = 0,
    policies: Sequence[str] = POLICIES,
    minutes: float | None = None,
    workers: int = 1,
    on_progress: Progress | None = None,
) -> Report:
    """Run `schedules` schedules, or as many as `minutes` allow if they are given; blocks.

    `policies` are dealt out in turn. An interrupt (KeyboardInterrupt) ends it early, with what was done so far. Raises ConfigError for an
    unknown policy or a number that makes no sense.
    """
    _check(schedules, policies, minutes, workers)
    report, start = Report(workers=workers), time.monotonic()
    until = None if minutes is None else start + minutes * 60
    jobs = _jobs(seed, policies, None if minutes is not None else schedules)
    told = start
    try:
        for results in _results(jobs, workers):
            for failure, steps, decisions in results:
                report.schedules += 1
                report.steps += steps
                report.decisions += decisions
                if failure is not None:
                    report.num_failures += 1
                    report.failures.append(failure)
            report.failures = sorted(report.failures, key=lambda failure: (failure.workload.seed, failure.seed))[:_MAX_FAILURES]
            now = time.monotonic()
            report.seconds = now - start
            if on_progress is not None and now - told >= _REPORT_EVERY_S:
                told = now
                on_progress(report)
            if until is not None and now >= until:
                break
    except KeyboardInterrupt:
        report.interrupted = True
    report.seconds = time.monotonic() - start
    return report


def run_one(workload: Workload, policy: str, seed: int, reference: Reference | None = None) -> Outcome:
    """One schedule under the policy of that name, with its seed."""
    return run_schedule(workload, make_policy(policy, random.Random(seed)), reference=reference)


def kill(mutation: Mutation, *, max_schedules: int = MAX_SCHEDULES, seed: int = 0) -> Killed | None:
    """Run schedules without the mutation's rule until an oracle notices; None: it survived them all.

    Only workloads that have what the mutation needs are run; they are drawn from seeds in order, so the answer is the same each time.
    """
    tried = 0
    for workload in workloads_with(mutation.needs, seed=seed):
        reference = reference_of(workload)
        for turn in range(_TRIES_PER_WORKLOAD):
            if tried == max_schedules:
                return None
            policy, run_seed = _draw_policy(tried, POLICIES), workload.seed * _SCHEDULES_PER_WORKLOAD + turn
            with applied(mutation):
                outcome = run_one(workload, policy, run_seed, reference)
            tried += 1
            if outcome.findings:
                first = outcome.findings[0]
                return Killed(tried, first.oracle, first.text, Failure(workload, policy, run_seed, outcome))
    raise InvariantError("there is always another workload")


def kill_miniature(miniature: Miniature, *, max_schedules: int = MAX_SCHEDULES, seed: int = 0) -> Killed | None:
    """Play the miniature without its protection until it is caught, and as often with it; None: it was never caught.

    Raises InvariantError when something is wrong with the protection in place.
    """
    for tried in range(max_schedules):
        policy = _draw_policy(tried, POLICIES)
        caught = run_miniature(miniature, policy, seed + tried, protected=False)
        clean = run_miniature(miniature, policy, seed + tried, protected=True)
        if clean is not None:
            raise InvariantError(f"miniature {miniature.name} goes wrong though it is protected, with policy {policy}: {clean.detail}")
        if caught is not None:
            return Killed(tried + 1, caught.oracle, caught.detail)
    return None


def workloads_with(needs: frozenset[Feature], *, seed: int) -> Iterator[Workload]:
    """Workloads that have these features, from `seed` on, without end."""
    number = seed
    while True:
        workload = draw_workload(number)
        if needs <= workload.features:
            yield workload
        number += 1


# ------------------------------------------------------------------ jobs


@dataclass(frozen=True, slots=True)
class _Job:
    """The schedules of one workload: policies and seeds."""

    workload_seed: int
    runs: tuple[tuple[str, int], ...]


_Result = tuple[Failure | None, int, int]
"""What went wrong, steps, decisions."""


def _jobs(seed: int, policies: Sequence[str], schedules: int | None) -> Iterator[_Job]:
    number = 0
    while schedules is None or number < schedules:
        stop = number + _SCHEDULES_PER_WORKLOAD
        if schedules is not None:
            stop = min(stop, schedules)
        workload_seed = seed + number // _SCHEDULES_PER_WORKLOAD
        base = workload_seed * _SCHEDULES_PER_WORKLOAD - number
        yield _Job(workload_seed, tuple((_draw_policy(at, policies), base + at) for at in range(number, stop)))
        number = stop


def _draw_policy(number: int, policies: Sequence[str]) -> str:
    return policies[number % len(policies)]


def _do(job: _Job) -> list[_Result]:
    workload = draw_workload(job.workload_seed)
    reference = reference_of(workload)
    results: list[_Result] = []
    for policy, seed in job.runs:
        outcome = run_one(workload, policy, seed, reference)
        failure = Failure(workload, policy, seed, outcome) if outcome.findings else None
        results.append((failure, outcome.steps, outcome.decisions))
    return results


def _results(jobs: Iterator[_Job], workers: int) -> Iterator[list[_Result]]:
    if workers == 1:
        yield from map(_do, jobs)
        return
    # Spawned, not forked: torch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        busy = [pipe for pipe in pipes if _give(pipe, jobs)]
        while busy:
            for pipe in wait(busy):
                assert isinstance(pipe, Connection)
                try:
                    answer = pipe.recv()
                except EOFError:
                    raise InvariantError("a worker process ended: run with one worker to see why") from None
                yield answer
                if not _give(pipe, jobs):
                    busy.remove(pipe)
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.terminate()


def _give(pipe: Connection, jobs: Iterator[_Job]) -> bool:
    """Hand the next job over; False when there is none."""
    job = next(jobs, None)
    if job is not None:
        pipe.send(job)
    return job is not None


def _work(pipe: Connection) -> None:
    """A worker's life: job in, results out, until the other end is closed or the terminal interrupts."""
    try:
        while True:
            pipe.send(_do(pipe.recv()))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return


def _check(schedules: int, policies: Sequence[str], minutes: float | None, workers: int) -> None:
    if schedules < 1:
        raise ConfigError(f"schedules is {schedules}: give a whole number from 1")
    if minutes is not None and not 0 < minutes < float("inf"):
        raise ConfigError(f"minutes is {minutes:g}: give a positive number")
    if workers < 1:
        raise ConfigError(f"workers is {workers}: give a whole number from 1")
    if not policies:
        raise ConfigError("no policy is given: leave the option out for all of them")
    for policy in policies:
        make_policy(policy, random.Random(0))
