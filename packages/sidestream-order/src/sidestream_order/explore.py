"""Runs a program on the simulated device in many orders, and reduces the first failing order to a short interleaving.

    explore(program)                    run different schedules until one has a finding, then shrink that schedule
    replay(program, "late", 17)         repeat the schedule of this policy and seed
    replay(program, found.turns)        repeat the shrunk schedule

An actor is the host, a stream or a thread. Actors run in turns; a schedule is the sequence of decisions about which
actor runs next, and a policy makes these decisions. An oracle is a check of the run.

A program is a function of a `SimDevice`. It allocates memories, makes streams, submits work that declares the tensors
it reads and writes (`SimStream.submit`, `SimDevice.host_touched`), and orders the streams. It raises AssertionError
when its results are wrong. It does not need Sidestream's engine.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from sidestream_kv.errors import ConfigError
from sidestream_kv.types import Fence
from sidestream_order import shadow
from sidestream_order.checker import Checker
from sidestream_order.findings import Finding
from sidestream_order.guard import Guard
from sidestream_order.sim import Deadlock, Policy, SimDevice, make_policy
from sidestream_order.sim.policies import HOST, Steered
from sidestream_order.steering import Watched, minimise
from sidestream_order.trace import Recorder, TraceLine, explain, render

Program = Callable[[SimDevice], object]

SCHEDULES = 300
"""Default number of schedules of `explore`."""

DEPENDS = "the program depends on something else, such as a clock, or objects that an earlier run has changed"
_SHRINK_RUNS = 200
shadow.hide_frames_of(__file__)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a run.

    oracle     "checker": the order checker has a finding; `objection` is that finding. "assertion": the program or
               its work raised AssertionError. "deadlock": no thread or stream can continue. "error": any other
               exception
    text       the finding as a sentence
    """

    oracle: str
    text: str
    objection: Finding | None = None

    @property
    def kind(self) -> tuple[str, str]:
        """The oracle, and for the checker the kind of the finding."""
        return self.oracle, "" if self.objection is None else self.objection.kind

    def __str__(self) -> str:
        return f"{self.oracle}: {self.text}"


@dataclass(frozen=True, slots=True)
class Run:
    """The result of one schedule.

    problems   all findings, those of the order checker first; empty: the run is correct
    turns      decisions that switched to another actor: decision number → chosen actor. Give it to `replay` to repeat
               the schedule
    decisions  number of decisions
    actors     names of all actors that the policy could choose at some decision
    lines      the events of all actors in their order; empty unless requested
    """

    problems: tuple[Problem, ...]
    turns: Mapping[int, str]
    decisions: int
    actors: tuple[str, ...]
    lines: tuple[TraceLine, ...] = ()

    @property
    def oracles(self) -> tuple[str, ...]:
        """The oracles with findings, without duplicates."""
        return tuple(dict.fromkeys(problem.oracle for problem in self.problems))

    def __str__(self) -> str:
        """The interleaving and the first problem."""
        problem = self.problems[0] if self.problems else None
        objection = problem.objection if problem is not None else None
        parts = [render(self.lines, objection)]
        if problem is not None:
            parts += ["", str(problem), *([explain(objection)] if objection is not None else [])]
        return "\n".join(parts).rstrip()


@dataclass(frozen=True, slots=True)
class Found:
    """A failing schedule, and a short one with the same kind of problem.

    schedule      number of the failing schedule, from 1
    policy, seed  give both to `replay` to repeat the schedule
    problem       the first problem of the failing schedule
    turns         the forced switches of the shrunk schedule: decision number → actor
    shrunk        the shrunk schedule's run, with its interleaving
    runs          number of runs that shrinking took
    """

    schedule: int
    policy: str
    seed: int
    problem: Problem
    turns: Mapping[int, str]
    shrunk: Run
    runs: int


@dataclass(frozen=True, slots=True)
class Exploration:
    """The result of `explore`.

    schedules   number of schedules that were run, not counting those for shrinking
    found       the failing schedule; None: no schedule failed
    """

    schedules: int
    found: Found | None

    def __str__(self) -> str:
        """The events of the shrunk schedule, and the calls that repeat it."""
        found = self.found
        if found is None:
            return f"no finding in {self.schedules} schedules"
        again = f"replay(program, {found.policy!r}, {found.seed}); shrunk: replay(program, {dict(found.turns)})"
        switches = "1 forced switch" if len(found.turns) == 1 else f"{len(found.turns)} forced switches"
        head = f"found by schedule {found.schedule}, shrunk in {found.runs} runs to {switches}:"
        return "\n".join([head, str(found.shrunk), f"again: {again}"])


@dataclass(frozen=True, slots=True)
class Rules:
    """Things that a program may do without a finding.

    waits    reasons for which the host may block: those of `SimDevice.wait_host`, `"event"` and `"stream"` (of
             `synchronize`), `"queue full"` and `"pageable copy"`
    faults   exceptions that work may raise, such as injected faults. The program can read them from the fences
    sticky   work that raises an exception loses the device, as on CUDA: see `SimDevice`
    """

    waits: Collection[str] = ("step",)
    faults: tuple[type[BaseException], ...] = ()
    sticky: bool = False


DEFAULT_RULES = Rules()


def explore(
    program: Program,
    *,
    schedules: int = SCHEDULES,
    seed: int = 0,
    policies: Sequence[str] = (),
    rules: Rules = DEFAULT_RULES,
) -> Exploration:
    """Run `program` under up to `schedules` schedules until one has a finding, and shrink that schedule. Blocks.

    The policies take turns (see `sidestream_order.sim.policies`). The default is random, late, early, PCT
    (probabilistic concurrency testing) of depth 2 and 3, and one policy for each stream or thread that runs it as late
    as possible. Schedule `n` has seed `seed + n`. The result depends only on the arguments. To make sure of that, a
    failing schedule is run again, and without one the first schedule: directly after itself, and after the last.

    Raises ConfigError for an unknown policy, a number out of range, or a program whose second run differs.
    """
    if schedules < 1:
        raise ConfigError(f"schedules is {schedules}: give a whole number from 1")
    first: Run | None = None
    for number, (policy, run) in enumerate(_schedules(program, schedules, seed, policies, rules)):
        first = first or run
        if run.problems:
            shrunk, runs = shrink(program, run, rules)
            found = Found(number + 1, policy, seed + number, run.problems[0], shrunk.turns, shrunk, runs)
            return Exploration(number + 1, found)
        if number in (0, schedules - 1):
            check_repeats(program, first, rules)
    return Exploration(schedules, None)


def replay(
    program: Program,
    policy: str | Mapping[int, str],
    seed: int = 0,
    *,
    rules: Rules = DEFAULT_RULES,
    trace: bool = True,
) -> Run:
    """Run one schedule: that of a policy and seed, or the `turns` of a shrunk schedule (`Found.turns`).

    `trace`: record the events in `Run.lines`. Raises ConfigError for an unknown policy.
    """
    chosen = make_policy(policy, random.Random(seed)) if isinstance(policy, str) else Steered(dict(policy))
    return run_program(program, chosen, rules=rules, trace=trace)


def run_program(
    program: Program,
    policy: Policy,
    *,
    rules: Rules = DEFAULT_RULES,
    trace: bool = False,
    make_recorder: Callable[[Checker, Callable[[], str], list[TraceLine] | None], Recorder] = Recorder,
) -> Run:
    """Run `program` once on a new device, run its unfinished work to the end, and apply the oracles. A guard verifies
    the accesses that work declares.

    Never raises for an error of the program, except for an interrupt.
    """
    lines: list[TraceLine] = []

    def actor() -> str:
        return device.turns.current.name

    def poison(memory: str, start: int, stop: int, after: Sequence[Fence]) -> None:
        device.poison(memory, start, stop, after)

    checker = Checker(poison=poison, allowed_waits=frozenset(rules.waits))
    recorder = make_recorder(checker, actor, lines if trace else None)
    watched = Watched(policy)
    device = SimDevice(watched, tracer=recorder, guard=Guard(checker))
    device.sticky = rules.sticky
    raised: list[Problem] = []
    try:
        try:
            program(device)
        except AssertionError as error:  # findings about the unfinished work may name the cause
            raised.append(_problem(error, ""))
        device.close()
        if not raised:
            checker.check_idle()
    except Exception as error:
        raised.append(_problem(error, ""))
    finally:
        device.kill()
    failed = [_problem(error, work) for work, error in recorder.failures if not isinstance(error, rules.faults)]
    objections = [Problem("checker", str(finding), finding) for finding in checker.findings]
    return Run((*objections, *raised, *failed), watched.deviations, watched.count, tuple(watched.actors), tuple(lines))


def _schedules(
    program: Program, schedules: int, seed: int, policies: Sequence[str], rules: Rules
) -> Iterator[tuple[str, Run]]:
    """Run the schedules one by one; yields policy and run of each, the first run with its events. The default policies
    depend on the stream names and the number of decisions of earlier runs.
    """
    for number in range(schedules):
        policy = policies[number % len(policies)] if policies else "random"
        run = replay(program, policy, seed + number, rules=rules, trace=number == 0)
        if not policies:
            length = max(run.decisions, 1)
            starving = (f"starve:{name}" for name in run.actors if name != HOST)
            policies = ("random", "late", "early", f"pct:2:{length}", f"pct:3:{length}", *starving)
        yield policy, run


def check_repeats(program: Program, run: Run, rules: Rules) -> None:
    """Run the schedule of `run` again. Raises ConfigError if a decision, an event or a problem differs."""
    again = replay(program, run.turns, rules=rules, trace=bool(run.lines))
    if again == run:
        return
    if again.problems:
        differs = f"it ends with {again.problems[0]}"
    elif pair := next((pair for pair in zip_longest(run.lines, again.lines) if pair[0] != pair[1]), None):
        texts = [f"`{line.actor}` {line.text}" if line is not None else "nothing" for line in pair]
        differs = f"{texts[1]} instead of {texts[0]}"
    else:
        differs = f"{again.decisions} decisions instead of {run.decisions}"
    raise ConfigError(f"the same schedule differs when it runs again: {differs}: {DEPENDS}")


def shrink(program: Program, run: Run, rules: Rules) -> tuple[Run, int]:
    """Find a shorter schedule whose first problem has the same kind as that of `run`. Returns the run of the shorter
    schedule, and the number of replays.

    Raises ConfigError when `run` cannot be repeated.
    """
    kind, left = run.problems[0].kind, _SHRINK_RUNS

    def fails(turns: Sequence[tuple[int, str]]) -> bool:
        nonlocal left
        if left <= 0:
            return False
        left -= 1
        again = replay(program, dict(turns), rules=rules, trace=False)
        return bool(again.problems) and again.problems[0].kind == kind

    turns = sorted(run.turns.items())
    if not fails(turns):
        raise ConfigError(f"the same schedule does not fail again with {run.problems[0]}: {DEPENDS}")
    shrunk = replay(program, dict(minimise(turns, fails)), rules=rules)
    return shrunk, _SHRINK_RUNS - left


def _problem(error: BaseException, work: str) -> Problem:
    """The problem for an exception of the program. If work raised the exception, `work` is the work's label."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{work + ', ' if work else ''}{Path(at.filename).name}:{at.lineno} {at.name}"
    match error:
        case AssertionError():
            return Problem("assertion", f"{str(error) or at.line or 'a result is wrong'} ({where})")
        case Deadlock():
            return Problem("deadlock", str(error))
        case _:
            return Problem("error", f"{type(error).__name__}: {error} ({where})")
