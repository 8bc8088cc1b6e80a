"""`exhaust` runs a small program in all orders that can make a difference. The runs that it leaves out are equivalent
to others: shown by comparison with every single order of some small programs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial

import pytest

from sidestream.errors import ConfigError
from sidestream_kv.device.base import WakeUp
from sidestream_order.exhaust import all_orders, exhaust
from sidestream_order.explore import Rules, replay
from sidestream_order.sim import SimDevice, SimFence

CELLS = 3


def two_writers(device: SimDevice, *, waits: bool) -> None:
    """Two streams write one cell; the host expects the value of the second."""
    cell = device.allocate("cell", 1).data
    first, second = device.stream("first"), device.stream("second")
    done = first.submit(partial(cell.fill_, 1), writes=[cell], label="first")
    if waits:
        second.wait(done)
    last = second.submit(partial(cell.fill_, 2), writes=[cell], label="second")
    for fence in (done, last):
        device.wait_host(fence, reason="step")
    device.host_touched(reads=[cell], label="compare")
    assert cell.item() == 2


def test_a_race_is_found_and_shrunk() -> None:
    found = exhaust(partial(two_writers, waits=False))
    assert found.problem is not None and found.problem.kind == ("checker", "race") and not found.complete
    assert found.shrunk is not None
    assert "again: replay(program, " in str(found) and "first" in str(found)
    assert replay(partial(two_writers, waits=False), found.shrunk.turns).problems[0].kind == ("checker", "race")


def test_all_orders_of_a_correct_program_need_fewer_than_five_runs() -> None:
    done = exhaust(partial(two_writers, waits=True))
    assert (done.complete, done.problem) == (True, None)
    assert done.schedules < 5
    assert str(done).startswith("no finding in ") and str(done).endswith(": all orders")


def test_streams_without_shared_memory_need_one_run() -> None:
    def program(device: SimDevice) -> None:
        for number in range(4):
            own = device.allocate(f"memory {number}", 1).data
            device.stream(f"stream {number}").submit(partial(own.fill_, 1), writes=[own], label="work")

    done = exhaust(program)
    assert (done.schedules, done.complete) == (1, True)
    assert str(done) == "no finding in 1 run: all orders"
    assert len(list(zip(range(200), all_orders(program, reduce=False), strict=False))) == 200


def test_work_without_declared_accesses_runs_in_both_orders() -> None:
    seen = list[list[int]]()

    def program(device: SimDevice) -> None:
        order = list[int]()
        seen.append(order)
        for number in (1, 2):
            device.stream(f"stream {number}").submit(partial(order.append, number), label="work")

    assert exhaust(program).complete
    assert {tuple(order) for order in seen} == {(1, 2), (2, 1)}


def test_a_poll_runs_before_and_after_the_end_of_its_work() -> None:
    seen = set[bool]()

    def program(device: SimDevice) -> None:
        seen.add(device.stream("work").submit(lambda: None, lambda: (), label="work").poll())

    assert exhaust(program).complete
    assert seen == {True, False}


@pytest.mark.parametrize("sleeps", [False, True])
def test_a_loop_over_polls_ends(sleeps: bool) -> None:
    polls = set[int]()

    def program(device: SimDevice) -> None:
        done, count = device.stream("work").submit(lambda: None, lambda: (), label="work"), 1
        while not done.poll():
            count += 1
            if sleeps:
                device.sleep(1e-3)
        polls.add(count)

    assert exhaust(program, patience=2).complete
    assert {1, 2, 3} <= polls and max(polls) < 9


def test_host_and_thread_run_in_both_orders() -> None:
    seen = list[str]()

    def program(device: SimDevice) -> None:
        order = list[str]()

        def turn() -> WakeUp:
            order.append("thread")
            return WakeUp()

        thread = device.thread("worker", turn)
        thread.wake()
        order.append("host")
        thread.close()
        seen.append(" ".join(order))

    assert exhaust(program).complete
    assert {"host thread", "thread host"} <= set(seen)


def test_a_hang_is_found() -> None:
    def program(device: SimDevice) -> None:
        flag, cell = device.stream("flag"), device.allocate("cell", 1).data
        early = flag.submit(partial(cell.fill_, 1), writes=[cell], label="work").poll()
        if early:
            device.wait_host(SimFence(device, "flag", 99), reason="step")

    found = exhaust(program)
    assert found.problem is not None and found.problem.oracle == "deadlock"


def test_exhaust_stops_at_the_limit_and_reports_it() -> None:
    def program(device: SimDevice) -> None:
        for number in range(4):
            device.stream(f"stream {number}").submit(lambda: None, label="work")

    done = exhaust(program, limit=7)
    assert (done.schedules, done.complete) == (7, False)
    assert str(done) == "no finding in 7 runs: the limit; some are left"


def test_a_program_that_differs_from_run_to_run_is_refused() -> None:
    runs = list[int]()

    def program(device: SimDevice) -> None:
        runs.append(1)
        for number in range(2 + len(runs) % 2):
            device.stream(f"stream {number}").submit(lambda: None, label="work")

    with pytest.raises(ConfigError, match="the program depends on something else"):
        exhaust(program)


def test_a_program_whose_only_order_differs_in_the_second_run_is_refused() -> None:
    runs = list[int]()

    def once_alone(device: SimDevice) -> None:
        runs.append(1)
        for number in range(min(len(runs), 2)):
            own = device.allocate(f"memory {number}", 1).data
            device.stream(f"stream {number}").submit(partial(own.fill_, 1), writes=[own], label="work")

    with pytest.raises(ConfigError, match=r"differs when it runs again: .* decisions instead of"):
        exhaust(once_alone)


@pytest.mark.parametrize("wrong", [{"limit": 0}, {"patience": 0}])
def test_arguments_out_of_range_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="give whole numbers from 1"):
        exhaust(partial(two_writers, waits=True), **wrong)


# ------------------------------------------------------------------ the reduction against every order


@dataclass(frozen=True, slots=True)
class Op:
    """One statement of a small program. `source` and `target` are cells, `fence` an earlier fence."""

    kind: str
    stream: int
    source: int
    target: int
    fence: int
    pauses: bool


def small_program(seed: int) -> tuple[int, list[Op]]:
    """Number of streams, and statements."""
    rng = random.Random(seed)
    streams, fences, ops = rng.choice([1, 2, 2, 3]), 0, list[Op]()
    for _ in range(rng.randrange(2, 6)):
        kind = rng.choice(
            ["work", "work", "work", "wait", "poll", "touch", "wait_host", "undeclared", "waits and works"]
        )
        stream, cells = rng.randrange(streams), [rng.randrange(CELLS) for _ in range(2)]
        if kind in ("wait", "poll", "wait_host", "waits and works") and not fences:
            kind = "work"
        ops.append(Op(kind, stream, *cells, rng.randrange(max(fences, 1)), rng.random() < 0.5))
        fences += kind in ("work", "undeclared", "waits and works")
    return streams, ops


def play(device: SimDevice, streams: int, ops: list[Op], seen: list[object]) -> None:
    """Run the statements. `seen` gets all values that the work and the host read."""
    memory = device.allocate("cells", CELLS).data
    device.host_touched(writes=[memory], label="zero")
    memory.zero_()
    lanes, fences, undeclared = (
        [device.stream(f"s{number}") for number in range(streams)],
        list[SimFence](),
        list[int](),
    )

    def work(number: int, op: Op) -> None:
        value = int(memory[op.source])
        if op.pauses:
            lanes[op.stream].touch(lambda: ())
        memory[op.target] = (value * 3 + number + 1) % 200
        seen.append(("work", number, value))

    for number, op in enumerate(ops):
        lane = lanes[op.stream]
        reads, writes = [memory[op.source : op.source + 1]], [memory[op.target : op.target + 1]]
        match op.kind:
            case "work" | "waits and works":
                if op.kind == "waits and works":
                    lane.wait(fences[op.fence])
                fences.append(lane.submit(partial(work, number, op), reads=reads, writes=writes, label=f"{number}"))
            case "undeclared":
                fences.append(lane.submit(partial(undeclared.append, number), label=f"{number}"))
            case "wait":
                lane.wait(fences[op.fence])
            case "poll":
                seen.append(("poll", number, fences[op.fence].poll()))
            case "wait_host":
                device.wait_host(fences[op.fence], reason="step")
            case "touch":
                device.host_touched(reads=reads, writes=writes, label="touch")
                seen.append(("touch", number, int(memory[op.source])))
                memory[op.target] = number + 7
    for fence in fences:
        device.wait_host(fence, reason="step")
    seen.append(("end", tuple(memory.tolist()), tuple(undeclared)))


def outcomes(seed: int, *, reduce: bool) -> tuple[set[object], int]:
    """Everything that the orders of a small program can show, and the number of runs."""
    streams, ops = small_program(seed)
    found, seen, runs = set[object](), list[object](), 0

    def program(device: SimDevice) -> None:
        seen.clear()
        play(device, streams, ops, seen)

    for run in all_orders(program, reduce=reduce, rules=Rules(faults=(Exception,))):
        runs += 1
        found.add((frozenset(seen), tuple(sorted({problem.kind for problem in run.problems}))))
    return found, runs


# The first seven need a rule each that earlier versions lacked: a poll and a wait that did not block must not count as
# enabled by the end of the work.
def test_the_reduced_set_of_orders_has_every_outcome() -> None:
    for seed in [10, 79, 104, 139, 227, 255, 368, 3, 5, 7, 12, 31, 36]:
        every, all_runs = outcomes(seed, reduce=False)
        some, runs = outcomes(seed, reduce=True)
        assert some == every
        assert runs <= all_runs


def test_the_reduction_needs_less_than_a_tenth_of_the_runs() -> None:
    every, some = outcomes(10, reduce=False)[1], outcomes(10, reduce=True)[1]
    assert some * 10 < every
