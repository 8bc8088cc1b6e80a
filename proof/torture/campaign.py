"""Runs many schedules of the unmodified code.

A workload is a set of requests and faults; a schedule is one run of it in one order of execution, which a policy
decides. Several schedules share a workload, because its reference (the expected output) takes long to compute. The
result of each schedule depends on the seed only; a time limit changes only the number of schedules.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from proof.torture.choice import Coverage
from proof.torture.drawing import draw_workload
from proof.torture.oracle import Reference, reference_of
from proof.torture.run import Outcome, run_schedule
from proof.torture.workers import spread
from proof.torture.workload import Workload
from sidestream.errors import ConfigError
from sidestream_order.sim import make_policy

POLICIES = (
    "random",
    "late",
    "early",
    "starve:compute",
    "starve:store",
    "starve:load",
    "starve:offload",
    "starve:rank1",
    "pct:2",
    "pct:3",
    "pct:4",
)
SCHEDULES_PER_WORKLOAD = 8
"""Number of schedules that share a workload and its reference, after the first `SHORT_CAMPAIGN` schedules."""

SHORT_CAMPAIGN = 5000
"""The first schedules of a campaign, of which fewer share a workload: pairs of features before more orders of each."""

_OF_SHORT_CAMPAIGN = 2

_REPORT_EVERY_S = 0.2
_MAX_FAILURES = 20
_DIGEST_BITS = 48  # a JSON number holds it exactly


@dataclass(frozen=True, slots=True)
class Failure:
    """A schedule in which an oracle (check) reported a failure, with all data to repeat it."""

    workload: Workload
    policy: str
    seed: int
    outcome: Outcome


@dataclass(slots=True)
class Report:
    """The result of a campaign.

    failures       the first failures, in the order of seeds; `num_failures` is the number of all
    steps          total number of engine steps
    decisions      total number of decisions of the policies about which actor runs next
    seconds        seconds of wall time
    pairs_missing  number of possible pairs of features that no workload had (`Coverage.missing`)
    digest         sum of the hashes of all outcomes: equal for equal schedules with equal outcomes, in any order
    """

    schedules: int = 0
    num_failures: int = 0
    failures: list[Failure] = field(default_factory=list)
    steps: int = 0
    decisions: int = 0
    seconds: float = 0.0
    workers: int = 1
    interrupted: bool = False
    pairs_missing: int = 0
    digest: int = 0

    @property
    def schedules_per_minute(self) -> float:
        """Schedules per minute and worker process. Each worker uses one core."""
        return self.schedules / self.seconds * 60 / self.workers if self.seconds else 0.0


Progress = Callable[[Report], None]


def torture(
    *,
    schedules: int = 2000,
    seed: int = 0,
    policies: Sequence[str] = POLICIES,
    features: Collection[str] = (),
    minutes: float | None = None,
    workers: int = 1,
    first: bool = False,
    on_progress: Progress | None = None,
) -> Report:
    """Run `schedules` schedules; if `minutes` is given, run as many as fit into this time. Blocks.

    The policies take turns. `on_progress` is called at each failure, and otherwise at most five times a second. An
    interrupt (KeyboardInterrupt) ends the campaign early and returns the results so far.

    features   run only workloads that have all these features (`FEATURES`)
    first      end the campaign at the first failure

    Raises ConfigError for an unknown policy or feature, for features that no workload has together, and for a number
    out of range.
    """
    _check(schedules, policies, minutes, workers)
    report, start = Report(workers=workers), time.monotonic()
    until = None if minutes is None else start + minutes * 60
    coverage = Coverage(seed, features)
    jobs = _jobs(seed, policies, None if minutes is not None else schedules, coverage, first=first)
    reported_s = start
    try:
        for results in spread(jobs, workers=workers):
            known = report.num_failures
            for failure, steps, decisions, digest in results.schedules:
                report.schedules += 1
                report.steps += steps
                report.decisions += decisions
                report.digest = (report.digest + digest) % (1 << _DIGEST_BITS)
                if failure is not None:
                    report.num_failures += 1
                    report.failures.append(failure)
            report.failures = sorted(report.failures, key=lambda failure: (failure.workload.seed, failure.seed))[
                :_MAX_FAILURES
            ]
            now = time.monotonic()
            report.seconds, report.pairs_missing = now - start, coverage.missing
            if on_progress is not None and (now - reported_s >= _REPORT_EVERY_S or report.num_failures > known):
                reported_s = now
                on_progress(report)
            report.interrupted = results.interrupted
            ended = (first and report.num_failures > 0) or (until is not None and now >= until)
            if report.interrupted or ended:
                break
    except KeyboardInterrupt:
        report.interrupted = True
    report.seconds = time.monotonic() - start
    return report


def run_one(workload: Workload, policy: str, seed: int, reference: Reference | None = None) -> Outcome:
    """Run one schedule under the policy with this name and seed."""
    return run_schedule(workload, make_policy(policy, random.Random(seed)), reference=reference)


def deal(number: int, policies: Sequence[str]) -> str:
    """The policy of schedule `number`. Every second time that all of rank 1 would be starved, only its compute stream
    is: then the rank receives its orders, and its steps fall behind those of rank 0.
    """
    turn, index = divmod(number, len(policies))
    policy = policies[index]
    return f"{policy}/compute" if policy == "starve:rank1" and turn % 2 else policy


@dataclass(frozen=True, slots=True)
class _Results:
    """The results of one workload.

    schedules    of each schedule: the failure, the number of steps, the number of decisions, a hash of its outcome
    interrupted  an interrupt has ended it early
    """

    schedules: tuple[tuple[Failure | None, int, int, int], ...]
    interrupted: bool


@dataclass(frozen=True, slots=True)
class _Job:
    """The schedules of one workload: policies and seeds. `first`: stop at the first failure."""

    workload_seed: int
    runs: tuple[tuple[str, int], ...]
    first: bool

    def run(self) -> _Results:
        results: list[tuple[Failure | None, int, int, int]] = []
        try:
            workload = draw_workload(self.workload_seed)
            reference = reference_of(workload)
            for policy, seed in self.runs:
                outcome = run_one(workload, policy, seed, reference)
                failure = Failure(workload, policy, seed, outcome) if outcome.findings else None
                results.append((failure, outcome.steps, outcome.decisions, _digest(policy, seed, outcome)))
                if self.first and failure is not None:
                    break
        except KeyboardInterrupt:
            return _Results(tuple(results), interrupted=True)
        return _Results(tuple(results), interrupted=False)


def _digest(policy: str, seed: int, outcome: Outcome) -> int:
    order = (policy, seed, outcome.steps, outcome.decisions, sorted(outcome.deviations.items()), outcome.oracles)
    return int.from_bytes(hashlib.blake2b(repr(order).encode(), digest_size=_DIGEST_BITS // 8).digest(), "big")


def num_workloads(schedules: int) -> int:
    """Number of workloads that so many schedules of a campaign have."""
    short = min(schedules, SHORT_CAMPAIGN)
    return -(-short // _OF_SHORT_CAMPAIGN) + -(-(schedules - short) // SCHEDULES_PER_WORKLOAD)


def _jobs(
    seed: int, policies: Sequence[str], schedules: int | None, coverage: Coverage, *, first: bool
) -> Iterator[_Job]:
    number, first_seed = 0, seed * SCHEDULES_PER_WORKLOAD  # campaigns with other seeds have other schedules
    while schedules is None or number < schedules:
        stop = number + (_OF_SHORT_CAMPAIGN if number < SHORT_CAMPAIGN else SCHEDULES_PER_WORKLOAD)
        if schedules is not None:
            stop = min(stop, schedules)
        runs = tuple((deal(at, policies), at) for at in range(first_seed + number, first_seed + stop))
        yield _Job(coverage.choose(), runs, first)
        number = stop


def _check(schedules: int, policies: Sequence[str], minutes: float | None, workers: int) -> None:
    if schedules < 1:
        raise ConfigError(f"schedules is {schedules}: give a whole number from 1")
    if minutes is not None and not 0 < minutes < float("inf"):
        raise ConfigError(f"minutes is {minutes:g}: give a positive number")
    if workers < 1:
        raise ConfigError(f"workers is {workers}: give a whole number from 1")
    if not policies:
        raise ConfigError("no policy is given: omit the option to use all of them")
    for policy in policies:
        make_policy(policy, random.Random(0))
