"""Runs a program on the simulated device in all orders that can make a difference.

    exhaust(program)    every order, until one has a finding; `Exhaustion.complete`: every order was run

An actor is the host, a stream or a thread. Two turns of different actors are independent if exchanging them changes
nothing: neither accesses memory that the other writes, and neither reads a fence that the other finishes. Runs that
differ only in the order of independent turns are equivalent, and one of them is enough. `exhaust` finds one run of each
kind by dynamic partial-order reduction (Flanagan and Godefroid, POPL 2005) with sleep sets (Godefroid 1996): it runs
the program again and again from its start, and after each run looks for pairs of dependent turns that could also have
come in the other order.

    step   what an actor does between two points, that is one turn
    node   a decision of the policy on the path of the present run
    race   two dependent steps, and nothing orders the first before the second
    sleep  actors whose next step need not be tried here, because an equivalent run was tried before

"All orders" has these bounds:

- If work declares accesses, it makes no others. Work that declares none counts as dependent on all other work without
  declarations, and on every step of a host thread. Host threads are dependent on each other at every step.
- An actor polls a fence that is not done, or sleeps, at most `patience` times in a row if other actors can run. A
  sleeping stream wakes when no other actor can run, or when the host has slept longer, as always on this device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from sidestream_kv.device.base import no_accesses
from sidestream_kv.errors import ConfigError
from sidestream_kv.types import Access, Accesses, Fence
from sidestream_order import shadow
from sidestream_order.checker import Checker
from sidestream_order.explore import (
    DEFAULT_RULES,
    DEPENDS,
    Problem,
    Program,
    Rules,
    Run,
    check_repeats,
    run_program,
    shrink,
)
from sidestream_order.sim import SimDevice
from sidestream_order.sim.policies import HOST, Choice
from sidestream_order.sim.turns import Actor
from sidestream_order.trace import Recorder, TraceLine

LIMIT = 20_000
"""Default number of runs after which `exhaust` gives up."""

PATIENCE = 4
"""Default number of vain polls or sleeps in a row."""

_FENCE = "fence "
_UNDECLARED_READ = Access("undeclared", 0, 1, False)
_UNDECLARED_WRITE = Access("undeclared", 0, 1, True)
shadow.hide_frames_of(__file__)


@dataclass(frozen=True, slots=True)
class Exhaustion:
    """The result of `exhaust`.

    schedules  number of runs, not counting those for shrinking
    complete   whether all orders that can make a difference were run; False if a run had a finding, or at the limit
    problem    the first problem of the first run that had one
    shrunk     a short run with the same kind of problem; `replay(program, shrunk.turns)` repeats it
    """

    schedules: int
    complete: bool
    problem: Problem | None = None
    shrunk: Run | None = None

    def __str__(self) -> str:
        """The events of the shrunk run, or what was tried."""
        if self.shrunk is not None:
            return f"found by run {self.schedules}:\n{self.shrunk}\nagain: replay(program, {dict(self.shrunk.turns)})"
        runs = "1 run" if self.schedules == 1 else f"{self.schedules} runs"
        return f"no finding in {runs}: {'all orders' if self.complete else 'the limit; some are left'}"


def exhaust(
    program: Program, *, limit: int = LIMIT, patience: int = PATIENCE, rules: Rules = DEFAULT_RULES
) -> Exhaustion:
    """Run `program` in all orders that can make a difference, until one has a finding, and shrink that one. Blocks; the
    number of runs grows fast with the number of dependent steps, so `program` should be small.

    limit     largest number of runs
    patience  how often in a row an actor polls the same fence or sleeps, while others can run

    Raises ConfigError for a number out of range, or a program that does something else each time.
    """
    if limit < 1 or patience < 1:
        raise ConfigError(f"limit is {limit}, patience {patience}: give whole numbers from 1")
    schedules, first = 0, None
    for schedules, run in enumerate(all_orders(program, patience=patience, rules=rules), 1):
        first = first or run
        if run.problems:
            return Exhaustion(schedules, False, run.problems[0], shrink(program, run, rules)[0])
        if schedules == limit:
            return Exhaustion(limit, False)
    if first is not None:
        check_repeats(program, first, rules)
    return Exhaustion(schedules, True)


def all_orders(
    program: Program, *, patience: int = PATIENCE, rules: Rules = DEFAULT_RULES, reduce: bool = True
) -> Iterator[Run]:
    """Run `program` in all orders that can make a difference; yields each run. See `exhaust`.

    reduce   False: in every order, including equivalent orders, to show what the reduction leaves out
    """
    search = _Search(patience, reduce=reduce)
    while True:
        yield search.run(program, rules)
        if not search.go_on():
            return


Footprint = list[Access]


@dataclass(slots=True, eq=False)
class _Step:
    """One turn. `node`: the decision that led to it. `after`: earlier steps that it must follow. `clock`: of each
    actor, the number of its last step that this one must follow.
    """

    actor: str
    is_host: bool
    node: _Node | None
    footprint: Footprint = field(default_factory=list)
    after: list[_Step] = field(default_factory=list)
    clock: dict[str, int] = field(default_factory=dict)
    number: int = 0

    def depends_on(self, other: _Step) -> bool:
        """Whether the order of the two steps can make a difference."""
        if self.is_host and other.is_host:
            return True
        return any(
            (one.write or two.write) and one.memory == two.memory and one.start < two.stop and two.start < one.stop
            for one in self.footprint
            for two in other.footprint
        )


@dataclass(slots=True, eq=False)
class _Node:
    """A decision. `chosen`: the actor of the present run. `todo`: actors to try. `tried` and `sleep`: first steps of
    actors that were tried here, or whose run here would be equivalent to an earlier one.
    """

    able: tuple[str, ...]
    chosen: str
    todo: set[str]
    sleep: dict[str, _Step]
    tried: dict[str, _Step] = field(default_factory=dict)


class _Search:
    """The depth-first search: a policy that follows `path` and extends it, and the analysis of each run."""

    def __init__(self, patience: int, *, reduce: bool) -> None:
        self._patience = patience
        self._reduce = reduce
        self._path: list[_Node] = []
        self._begin()

    def _begin(self) -> None:
        self._depth = 0
        self._steps = [_Step(HOST, True, None, [_UNDECLARED_READ])]
        self._sleep: dict[str, _Step] = {}
        self._redundant = self._ended = False
        self._tried_from = 0
        self._next: _Node | None = None
        self._in_vain: Counter[object] = Counter()
        self._working: dict[str, Footprint] = {}
        self._submitted: dict[tuple[str, int], tuple[_Step, Accesses]] = {}
        self._finished: dict[tuple[str, int], _Step] = {}

    def run(self, program: Program, rules: Rules) -> Run:
        """Run the program once along the path."""
        self._begin()

        def watched(device: SimDevice) -> object:
            device.turns.watch = self
            return program(device)

        run = run_program(watched, self, rules=rules, make_recorder=partial(_Footprints, self))
        if self._depth < len(self._path):
            raise ConfigError(f"the program made {self._depth} decisions, and {len(self._path)} before: {DEPENDS}")
        return run

    def go_on(self) -> bool:
        """Analyse the last run, and turn to the next path. Returns False if no order is left."""
        if self._reduce:
            self._find_races()
        while self._path:
            node = self._path[-1]
            if left := [one for one in node.able if one in node.todo and one not in node.tried | node.sleep]:
                node.chosen = left[0]
                return True
            self._path.pop()
        return False

    # ------------------------------------------------------------------ the policy

    def choose(self, choice: Choice) -> str:
        self._end_step()
        able: tuple[str, ...] = (*choice.able, *((HOST,) if choice.may_nap and HOST not in choice.able else ()))
        last = self._steps[-1]
        if len(able) > 1 and any(count >= self._patience for count in self._in_vain.values()):
            able = tuple(name for name in able if name != last.actor)
        awake = [name for name in able if name not in self._sleep]
        if self._redundant or not awake:
            self._is_redundant()
            return able[0]
        if self._depth < len(self._path):
            node = self._path[self._depth]
            if node.able != able:
                raise ConfigError(f"{able} could run at decision {self._depth}, and {node.able} before: {DEPENDS}")
        else:
            first = last.actor if last.actor in awake and last.actor in choice.able else awake[0]
            node = _Node(able, first, {first} if self._reduce else set(able), dict(self._sleep))
            self._path.append(node)
        self._depth += 1
        self._next = node
        if node.chosen not in choice.able:
            self._in_vain["naps"] += 1
        if self._reduce:
            self._sleep = {name: step for name, step in (node.sleep | node.tried).items() if name != node.chosen}
        return node.chosen

    # ------------------------------------------------------------------ what a step does

    def turn(self, actor: Actor) -> None:
        self._end_step()
        if actor.name in self._sleep:
            self._is_redundant()  # no other actor can run
        if actor.name != self._step.actor:
            self._in_vain.clear()
        begins = [_UNDECLARED_READ] if actor.is_host else [*self._working.get(actor.name, ())]
        self._steps.append(_Step(actor.name, actor.is_host, self._next, begins))
        self._next, self._ended = None, False

    def _end_step(self) -> None:
        """The running step has ended: its accesses are known now."""
        if self._ended:
            return
        self._ended, step = True, self._step
        if step.node is not None:
            step.node.tried.setdefault(step.actor, step)
        self._sleep = {name: other for name, other in self._sleep.items() if not step.depends_on(other)}

    def _is_redundant(self) -> None:
        """All that follows in this run was tried in an equivalent run."""
        if not self._redundant:
            self._redundant, self._tried_from = True, len(self._steps)

    @property
    def _step(self) -> _Step:
        return self._steps[-1]

    def polled(self, stream: str, tick: int, *, done: bool) -> None:
        self._step.footprint.append(Access(_FENCE + stream, tick, tick + 1, False))
        if not done:
            self._in_vain[stream, tick] += 1

    def poisoned(self, memory: str, start: int, stop: int) -> None:
        self._step.footprint.append(Access(memory, start, stop, True))

    def submitted(self, fence: Fence, accesses: Accesses) -> None:
        """The running actor has put work into a stream's queue."""
        self._submitted[fence.stream, fence.tick] = self._step, accesses
        self._step.footprint.append(Access(f"end of {fence.stream}", 0, 1, True))

    def started(self, fence: Fence) -> None:
        """The running stream begins a piece of work."""
        submitted, accesses = self._submitted[fence.stream, fence.tick]
        self._step.after.append(submitted)
        self._working[fence.stream] = [_UNDECLARED_WRITE] if accesses is no_accesses else [*accesses()]
        self._step.footprint += self._working[fence.stream]

    def touched(self, stream: str, accesses: Sequence[Access]) -> None:
        """The work of a stream touches more, from here on."""
        self._working.setdefault(stream, []).extend(accesses)
        self._step.footprint += accesses

    def finished(self, fence: Fence) -> None:
        """The running stream ends a piece of work. Its last step moves no bytes: see `SimStream._do`."""
        self._working.pop(fence.stream, None)
        self._step.footprint = [Access(_FENCE + fence.stream, fence.tick, fence.tick + 1, True)]
        self._finished[fence.stream, fence.tick] = self._step

    def saw(self, fence: Fence) -> None:
        """The running actor has seen that the fence is done. If it did not poll, it had to wait for that."""
        if Access(_FENCE + fence.stream, fence.tick, fence.tick + 1, False) in self._step.footprint:
            return
        if (finish := self._finished.get((fence.stream, fence.tick))) is not None:
            self._step.after.append(finish)

    def host_touched(self, accesses: Sequence[Access]) -> None:
        """The running host thread touches memory itself."""
        self._step.footprint += accesses

    # ------------------------------------------------------------------ races of a run

    def _find_races(self) -> None:
        """Find steps that could also have run before an earlier one, and add them to the decision at that earlier step.
        Steps after the point at which the run became redundant belong to runs that were tried.
        """
        last: dict[str, _Step] = {}
        steps = self._steps[: self._tried_from] if self._redundant else self._steps
        for number, step in enumerate(steps):
            step.number = number
            clock: dict[str, int] = {}
            for one in (*([last[step.actor]] if step.actor in last else []), *step.after):
                _join(clock, one.clock)
            for earlier in reversed(steps[:number]):
                if earlier.actor == step.actor or clock.get(earlier.actor, -1) >= earlier.number:
                    continue
                if step.depends_on(earlier):
                    self._reverse(earlier, step, clock)
                    _join(clock, earlier.clock)
            clock[step.actor] = number
            step.clock = clock
            last[step.actor] = step
        for step in steps:
            if step.node is not None:  # one that could run here, and never did, because another step prevented it
                never = (name for name in step.node.able if name not in last or last[name].number < step.number)
                step.node.todo.update(never)

    def _reverse(self, earlier: _Step, step: _Step, clock: dict[str, int]) -> None:
        """Let `step`, or a step that leads to it, run before `earlier` in a later run."""
        node = earlier.node
        if node is None:
            return  # no other actor could run
        leading = {step.actor}
        leading.update(
            between.actor
            for between in self._steps[earlier.number + 1 : step.number]
            if clock.get(between.actor, -1) >= between.number
        )
        possible = [name for name in node.able if name in leading]
        if not possible:
            node.todo.update(node.able)
        elif not node.todo.intersection(possible):
            node.todo.add(step.actor if step.actor in possible else possible[0])


def _join(clock: dict[str, int], other: dict[str, int]) -> None:
    for actor, number in other.items():
        if number > clock.get(actor, -1):
            clock[actor] = number


class _Footprints(Recorder):
    """A recorder that also tells a search what each step does."""

    def __init__(
        self, search: _Search, checker: Checker, actor: Callable[[], str], lines: list[TraceLine] | None
    ) -> None:
        super().__init__(checker, actor, lines)
        self.search = search

    def submitted(self, fence: Fence, accesses: Accesses, label: str) -> None:
        self.search.submitted(fence, accesses)
        super().submitted(fence, accesses, label)

    def started(self, fence: Fence) -> None:
        self.search.started(fence)
        super().started(fence)

    def touched(self, stream: str, accesses: Accesses) -> None:
        self.search.touched(stream, accesses())
        super().touched(stream, accesses)

    def finished(self, fence: Fence) -> None:
        self.search.finished(fence)
        super().finished(fence)

    def waited(self, stream: str, fence: Fence) -> None:
        self.search.saw(fence)
        super().waited(stream, fence)

    def observed(self, fence: Fence) -> None:
        self.search.saw(fence)
        super().observed(fence)

    def host_touched(self, accesses: Accesses, label: str) -> None:
        self.search.host_touched(accesses())
        super().host_touched(accesses, label)
