"""Any program on the simulated device: found, shrunk, replayed and printed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from sidestream.errors import ConfigError
from sidestream_order.exhaust import exhaust
from sidestream_order.explore import Program, Rules, explore, replay
from sidestream_order.sim import SimDevice


def store(device: SimDevice, *, waits: bool) -> None:
    """A store that reads a block; without the wait, perhaps before the step has written it."""
    kv = device.allocate("kv", 64).data.view(4, 16)
    host = device.allocate_host("host", 64).data.view(4, 16)
    compute, copies = device.stream("compute"), device.stream("store")
    step = compute.submit(partial(kv[1].fill_, 7), writes=[kv[1]], label="step")
    if waits:
        copies.wait(step)
    stored = copies.submit(partial(host[2].copy_, kv[1]), reads=[kv[1]], writes=[host[2]], label="store")
    device.wait_host(stored, reason="step")
    device.host_touched(reads=[host[2]], label="the host reads")
    assert host[2].tolist() == [7] * 16


def third_turn(device: SimDevice) -> None:
    """Declares nothing; goes wrong only if the second stream runs between two pieces of work of the first."""
    first, second, seen = device.stream("first"), device.stream("second"), list[str]()
    for name in ("a", "b", "c"):
        first.submit(partial(seen.append, name))
    second.submit(partial(seen.append, "X"))
    device.close()
    assert seen != ["a", "b", "X", "c"], "X came third"


def circle(device: SimDevice) -> None:
    first, second = device.stream("first"), device.stream("second")
    gate = first.capture(lambda: None)
    captured = list[object]()
    second.capture(lambda: captured.append(second.submit(lambda: None)))
    first.wait(captured[0])  # a fence of captured work is never done
    device.wait_host(first.replay(gate), reason="step")


def test_a_race_is_found_with_its_bytes_and_the_missing_wait() -> None:
    exploration = explore(partial(store, waits=False))
    assert exploration.found is not None
    objection = exploration.found.problem.objection
    assert objection is not None
    assert (objection.kind, objection.memory, objection.start, objection.stop) == ("race", "kv", 16, 32)
    text = str(exploration)
    assert "missing: compute:1 ──▶ store:1" in text
    assert "submits store:1 `store` reads kv[16:32], not after compute:1" in text


def test_a_program_with_its_wait_has_no_finding_in_any_schedule() -> None:
    exploration = explore(partial(store, waits=True), schedules=60)
    assert (exploration.schedules, exploration.found) == (60, None)
    assert str(exploration) == "no finding in 60 schedules"


def test_a_wrong_result_is_found_and_shrunk_to_the_necessary_switches() -> None:
    exploration = explore(third_turn)
    assert exploration.found is not None
    assert exploration.found.problem.kind == ("assertion", "")
    assert "X came third" in exploration.found.problem.text and "test_explore.py" in exploration.found.problem.text
    drawn = replay(third_turn, exploration.found.policy, exploration.found.seed)
    assert len(exploration.found.turns) <= 3
    assert len(exploration.found.turns) <= len(drawn.turns)
    for at in exploration.found.turns:
        fewer = {turn: name for turn, name in exploration.found.turns.items() if turn != at}
        assert not replay(third_turn, fewer).problems, "every switch that is left is needed"


def test_shrinking_keeps_the_kind_of_problem() -> None:
    """Without switches this program fails with another exception."""

    def program(device: SimDevice) -> None:
        third_turn(device)
        raise KeyError("not third")

    seed = next(seed for seed in range(100) if replay(program, "random", seed).oracles == ("assertion",))
    found = explore(program, schedules=1, seed=seed, policies=("random",)).found
    assert found is not None
    assert found.problem.oracle == found.shrunk.problems[0].oracle == "assertion"
    assert replay(program, {}).oracles == ("error",)


def test_shrinking_ends_after_200_runs_and_its_result_still_fails() -> None:
    """Eighty switches are needed, and each of them is tried."""

    def alternating(device: SimDevice) -> None:
        first, second, seen = device.stream("first"), device.stream("second"), list[int]()
        for turn in range(80):
            (second if turn % 2 else first).submit(partial(seen.append, turn))
        device.close()
        assert seen != list(range(80))

    found = explore(alternating, policies=("early",)).found
    assert found is not None and found.runs == 200
    assert replay(alternating, found.turns).oracles == ("assertion",)


def test_work_still_queued_at_the_end_of_a_program_is_run_and_checked() -> None:
    def program(device: SimDevice) -> None:
        kv, first, second = device.allocate("kv", 8).data, device.stream("first"), device.stream("second")
        for stream in (first, second):
            stream.submit(kv.zero_, writes=[kv])

    assert replay(program, "late").oracles == ("checker",)


def test_policy_and_seed_repeat_a_finding_and_so_do_the_shrunk_turns() -> None:
    found = explore(third_turn, seed=5).found
    assert found is not None
    assert replay(third_turn, found.policy, found.seed).problems[0] == found.problem
    again = replay(third_turn, found.turns)
    assert again == found.shrunk
    assert again.problems[0].kind == found.problem.kind


def test_the_same_arguments_give_the_same_exploration() -> None:
    assert explore(third_turn) == explore(third_turn)


def test_some_policy_starves_each_stream() -> None:
    """Only a starved stream `slow` lets a hundred pieces of work of `fast` pass."""

    def overtaken(device: SimDevice) -> None:
        slow, fast, seen = device.stream("slow"), device.stream("fast"), list[str]()
        slow.submit(partial(seen.append, "slow"))
        for _ in range(100):
            fast.submit(partial(seen.append, "fast"))
        device.close()
        assert seen[-1] != "slow"

    found = explore(overtaken, schedules=20).found
    assert found is not None
    assert explore(overtaken, schedules=20, policies=("random", "early")).found is None


def test_a_hang_is_a_finding() -> None:
    found = explore(circle).found
    assert found is not None
    assert found.problem.oracle == "deadlock"
    assert "first waits for second" in found.problem.text


def test_exceptions_of_work_are_findings_unless_the_rules_expect_them() -> None:
    def raising(error: BaseException) -> None:
        raise error

    def program(device: SimDevice, error: BaseException) -> None:
        device.stream("disk").submit(partial(raising, error), label="read")

    wrong, broken = (explore(partial(program, error=error)).found for error in (AssertionError("7, not 8"), OSError()))
    assert wrong is not None and wrong.problem.oracle == "assertion" and "7, not 8 (disk:1" in wrong.problem.text
    assert broken is not None and broken.problem.oracle == "error" and "OSError" in broken.problem.text
    assert explore(partial(program, error=OSError()), schedules=5, rules=Rules(faults=(OSError,))).found is None

    def buggy(device: SimDevice) -> None:
        raise KeyError("block")

    outside = explore(buggy).found
    assert outside is not None and outside.problem.oracle == "error" and "KeyError" in outside.problem.text


def offload_and_free(device: SimDevice, *, recorded: bool) -> None:
    """Tensors are copied to the host on another stream and freed; the next tensor gets the same bytes."""
    cached = device.allocator("cached", 64)
    host = device.allocate_host("host", 64).data.view(4, 16)
    compute, copies = device.stream("compute"), device.stream("copies")
    for turn in range(2):
        tensor = cached.allocate(16, compute)
        made = compute.submit(partial(tensor.fill_, turn), writes=[tensor], label="make")
        copies.wait(made)
        if recorded:
            cached.record_stream(tensor, copies)
        copies.submit(partial(host[turn].copy_, tensor), reads=[tensor], writes=[host[turn]], label="copy")
        cached.free(tensor)
    device.wait_host(copies.submit(lambda: None), reason="step")
    device.host_touched(reads=[host[:2]], label="the host reads")
    assert [row[0].item() for row in host[:2]] == [0, 1]


def test_freeing_a_tensor_that_another_stream_reads_is_a_race() -> None:
    found = explore(partial(offload_and_free, recorded=False)).found
    assert found is not None and found.problem.kind == ("checker", "race")
    assert "`make` (compute:2" in found.problem.text and "`copy` (copies:1" in found.problem.text
    assert explore(partial(offload_and_free, recorded=True)).found is None


def through_the_default_stream(device: SimDevice, *, blocking: bool) -> None:
    """Work on the default stream reads what another stream wrote. The program makes no stream wait."""
    kv = device.allocate("kv", 16).data
    writer, default = device.stream("writer", blocking=blocking), device.default_stream()
    writer.submit(partial(kv.fill_, 7), writes=[kv], label="write")
    default.submit(lambda: None, reads=[kv], label="read")


def test_the_default_stream_orders_the_work_of_blocking_streams_only() -> None:
    assert explore(partial(through_the_default_stream, blocking=True)).found is None
    found = explore(partial(through_the_default_stream, blocking=False)).found
    assert found is not None and found.problem.kind[0] == "checker"


def test_after_a_sticky_error_all_later_work_fails() -> None:
    def fails(device: SimDevice) -> None:
        first, second = device.stream("first"), device.stream("second")
        second.wait(first.submit(lambda: 1 // 0, label="divide"))
        second.submit(lambda: None, label="after")

    alone = replay(fails, "late", rules=Rules(faults=(ZeroDivisionError,)))
    assert not alone.problems
    sticky = replay(fails, "late", rules=Rules(faults=(ZeroDivisionError,), sticky=True))
    assert [problem.text.startswith("DeviceLost: `divide` has failed") for problem in sticky.problems] == [True]


def test_a_host_wait_for_a_reason_outside_of_the_rules_is_found() -> None:
    def flush(device: SimDevice) -> None:
        device.wait_host(device.stream("store").submit(lambda: None), reason="flush")

    late = ("late",)
    found = explore(flush, policies=late).found
    assert found is not None and found.problem.kind == ("checker", "stall")
    assert "waited for the reason `flush` (host" in found.problem.text and "`Rules.waits`" in found.problem.text
    assert explore(flush, policies=late, schedules=3, rules=Rules(waits=("flush",))).found is None


def test_a_program_with_state_from_an_earlier_run_is_refused() -> None:
    runs = list[int]()

    def once(device: SimDevice) -> None:
        runs.append(1)
        assert len(runs) > 1, "only the first run fails"

    with pytest.raises(ConfigError, match="does not fail again with assertion: only the first run fails"):
        explore(once)


@pytest.mark.parametrize("differs", [lambda run: run % 2, lambda run: run > 5])
def test_a_program_whose_second_run_differs_is_refused_without_a_finding(differs: Callable[[int], bool]) -> None:
    """One program alternates, the other changes after its fifth run: its first schedule runs again after the last."""
    runs = list[int]()

    def changing(device: SimDevice) -> None:
        runs.append(1)
        device.stream("copies").submit(lambda: None, label="long" if differs(len(runs)) else "short")

    with pytest.raises(ConfigError, match=r"submits copies:1 `(long|short)` instead of .* an earlier run has changed"):
        explore(changing, schedules=10)


def nothing_declared(device: SimDevice) -> None:
    kv = device.allocate("kv", 64).data
    device.stream("compute").submit(partial(kv.fill_, 1), label="step")


def another_memory_declared(device: SimDevice) -> None:
    kv, other = device.allocate("kv", 64).data, device.allocate("other", 64).data
    device.stream("compute").submit(partial(kv.fill_, 1), writes=[other], label="step")


def producer_undeclared(device: SimDevice) -> None:
    """The producer and its consumer race, and only the consumer declares what it touches."""
    kv, out = device.allocate("kv", 64).data, device.allocate("out", 64).data
    device.stream("compute").submit(partial(kv.fill_, 1), label="step")
    device.stream("store").submit(partial(out.copy_, kv), reads=[kv], writes=[out], label="store")


@pytest.mark.parametrize("program", [nothing_declared, another_memory_declared, producer_undeclared])
def test_an_undeclared_write_is_found_in_every_schedule(program: Program) -> None:
    for policy in ("random", "late", "early"):
        kinds = [problem.kind for problem in replay(program, policy).problems]
        assert ("checker", "undeclared") in kinds
    assert explore(program).found is not None
    assert exhaust(program).problem is not None


def test_an_undeclared_read_gives_a_wrong_result() -> None:
    def program(device: SimDevice) -> None:
        kv, out = device.allocate("kv", 64).data, device.allocate("out", 64).data
        compute = device.stream("compute")
        compute.submit(partial(kv.fill_, 1), writes=[kv], label="step")
        device.wait_host(compute.submit(partial(out.copy_, kv), writes=[out], label="store"), reason="step")
        device.host_touched(reads=[out], label="compare")
        assert out.tolist() == [1] * 64

    found = explore(program).found
    assert found is not None and found.problem.oracle == "assertion"


def test_a_wrong_number_of_schedules_or_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="schedules is 0"):
        explore(third_turn, schedules=0)
    with pytest.raises(ConfigError, match="policy is 'sometimes'"):
        explore(third_turn, policies=("sometimes",))
