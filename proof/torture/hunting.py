"""Measures how many schedules it takes until an oracle (check) detects a removed rule.

A mutation removes one rule from the real code (`proof.mutations`). A miniature is a small model of a
published bug, which runs with or without its fix (`proof.miniatures`). A mutation or miniature is killed
when an oracle reports a failure; otherwise it survives. The expected outputs come from the unmodified code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, Self, TypeVar

from proof.miniatures import MINIATURES, Miniature, run_miniature
from proof.mutations import MUTATIONS, Feature, Mutation, applied
from proof.torture.campaign import POLICIES, SCHEDULES_PER_WORKLOAD, Failure, deal, run_one
from proof.torture.drawing import draw_workload
from proof.torture.oracle import reference_of
from proof.torture.workers import Job, spread
from proof.torture.workload import Workload
from sidestream.errors import ConfigError, InvariantError
from sidestream_kv.config import unknown_name

MAX_SCHEDULES = 500
"""A mutation that survives this many schedules counts as undetected."""

# Fewer schedules per workload than in a campaign: most workloads cannot detect a given mutation, so more workloads
# help.
_TRIES_PER_WORKLOAD = 4


@dataclass(frozen=True, slots=True)
class Killed:
    """A detected mutation or miniature.

    after     number of schedules until the detection, including the last
    oracle    the first oracle that reported a failure; `detail` is its message
    failure   for a mutation: the schedule that detected it
    """

    after: int
    oracle: str
    detail: str
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """The result for one mutation or miniature. `killed`: None for a survivor."""

    name: str
    hazard: str
    miniature: bool
    killed: Killed | None


class Tried(Protocol):
    """A row of a result table, with the name of a removed rule and the schedule that detected it."""

    @property
    def name(self) -> str: ...  # see the class
    @property
    def killed(self) -> Killed | None: ...


R = TypeVar("R", bound=Tried)


@dataclass(slots=True)
class Table(Generic[R]):
    """The rows of a result table, sorted by name. Worker processes compute them.

    total       expected number of rows
    schedules   total number of schedules
    """

    total: int
    rows: list[R] = field(default_factory=list)
    schedules: int = 0
    seconds: float = 0.0
    interrupted: bool = False

    def collect(
        self,
        jobs: Mapping[str, Job[R]],
        *,
        max_schedules: int,
        workers: int,
        on_progress: Callable[[Self], None] | None,
    ) -> None:
        """Run the jobs (row name → job) and add their rows. Blocks; an interrupt ends it early. A row that survived
        counts as `max_schedules` schedules.
        """
        order, start = {name: at for at, name in enumerate(jobs)}, time.monotonic()
        try:
            for row in spread(jobs.values(), workers=workers):
                self.rows.append(row)
                self.rows.sort(key=lambda row: order[row.name])
                self.schedules += row.killed.after if row.killed is not None else max_schedules
                self.seconds = time.monotonic() - start
                if on_progress is not None:
                    on_progress(self)
        except KeyboardInterrupt:
            self.interrupted = True


@dataclass(slots=True)
class Hunt(Table[Row]):
    """The results of all mutations and miniatures."""

    @property
    def survivors(self) -> list[Row]:
        """The mutations that no schedule detected."""
        return [row for row in self.rows if row.killed is None]


def hunt(
    names: Sequence[str] = (),
    *,
    max_schedules: int = MAX_SCHEDULES,
    seed: int = 0,
    workers: int = 1,
    on_progress: Callable[[Hunt], None] | None = None,
) -> Hunt:
    """Try to kill the mutations and miniatures with these names; None: all. Blocks; an interrupt ends it early.

    Raises ConfigError for an unknown name; InvariantError when a miniature fails with its fix, or a mutation does not
    match the code.
    """
    known = {
        **{mutation.name: mutation for mutation in MUTATIONS},
        **{miniature.name: miniature for miniature in MINIATURES},
    }
    for name in names:
        if name not in known:
            raise ConfigError(unknown_name("mutation", name, known))
    chosen = list(dict.fromkeys(names)) or list(known)
    report, jobs = Hunt(len(chosen)), {name: _Kill(name, max_schedules, seed) for name in chosen}
    report.collect(jobs, max_schedules=max_schedules, workers=workers, on_progress=on_progress)
    return report


def kill(mutation: Mutation, *, max_schedules: int = MAX_SCHEDULES, seed: int = 0) -> Killed | None:
    """Run schedules with the mutation until an oracle reports a failure. Returns None if no schedule detects the
    mutation.

    Only workloads with the features that the mutation needs are run.
    """
    tried = 0
    for workload in workloads_with(mutation.needs, seed=seed):
        reference = reference_of(workload)
        for turn in range(_TRIES_PER_WORKLOAD):
            if tried == max_schedules:
                return None
            policy, run_seed = deal(tried, POLICIES), workload.seed * SCHEDULES_PER_WORKLOAD + turn
            with applied(mutation):
                outcome = run_one(workload, policy, run_seed, reference)
            tried += 1
            if outcome.findings:
                first = outcome.findings[0]
                return Killed(tried, first.oracle, first.text, Failure(workload, policy, run_seed, outcome))
    raise InvariantError("the generator of workloads is infinite")


def kill_miniature(miniature: Miniature, *, max_schedules: int = MAX_SCHEDULES, seed: int = 0) -> Killed | None:
    """Run the miniature without its fix until an oracle detects the bug, then the same number of times with its fix.
    Returns None if the bug is never detected. Raises InvariantError if the miniature fails with its fix.
    """
    for tried in range(max_schedules):
        policy = deal(tried, POLICIES)
        caught = run_miniature(miniature, policy, seed + tried, protected=False)
        clean = run_miniature(miniature, policy, seed + tried, protected=True)
        if clean is not None:
            raise InvariantError(
                f"miniature {miniature.name} fails with its protection in place, under policy {policy}: {clean.detail}"
            )
        if caught is not None:
            return Killed(tried + 1, caught.oracle, caught.detail)
    return None


def workloads_with(needs: frozenset[Feature], *, seed: int) -> Iterator[Workload]:
    """An endless sequence of workloads with these features, from `seed` on."""
    number = seed
    while True:
        workload = draw_workload(number)
        if needs <= workload.features:
            yield workload
        number += 1


@dataclass(frozen=True, slots=True)
class _Kill:
    name: str
    max_schedules: int
    seed: int

    def run(self) -> Row:
        for mutation in MUTATIONS:
            if mutation.name == self.name:
                return Row(
                    self.name, mutation.hazard, False, kill(mutation, max_schedules=self.max_schedules, seed=self.seed)
                )
        (miniature,) = (one for one in MINIATURES if one.name == self.name)
        return Row(
            self.name,
            miniature.hazard,
            True,
            kill_miniature(miniature, max_schedules=self.max_schedules, seed=self.seed),
        )
