"""The simulated device: some seed gives each order that the fences allow, none gives another, and seeds repeat."""

from __future__ import annotations

import functools
import itertools
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from sidestream.errors import ConfigError, DeviceLost, InvariantError, OutOfDeviceMemory
from sidestream_kv.device.base import CopyBatch, WakeUp
from sidestream_kv.device.channel import Bell
from sidestream_kv.types import Accesses, Fence
from sidestream_order.sim import Deadlock, SimDevice, SimFence, make_policy
from sidestream_order.sim.device import POISON
from sidestream_order.sim.policies import Choice, Policy
from sidestream_order.sim.stream import QUEUE_LIMIT, SimEvent, SimStream

ALL_POLICIES = ("random", "late", "early", "starve:a", "starve:host", "pct:1", "pct:3")
SEEDS = range(40)


@contextmanager
def simulated(policy: str | Policy = "random", seed: int = 0, tracer: object = None) -> Iterator[SimDevice]:
    chosen = make_policy(policy, random.Random(seed)) if isinstance(policy, str) else policy
    device = SimDevice(chosen, tracer=tracer)
    try:
        yield device
    finally:
        device.kill()


def order_of(program: Callable[[SimDevice, Callable[[str], Callable[[], None]]], None], policy: str, seed: int) -> str:
    """The letters of a program's pieces of work, in the order in which they ran."""
    ran: list[str] = []
    with simulated(policy, seed) as device:
        program(device, lambda letter: lambda: ran.append(letter))
        device.close()
    return "".join(ran)


def two_and_two(device: SimDevice, work: Callable[[str], Callable[[], None]]) -> None:
    a, b = device.stream("a"), device.stream("b")
    for letters in ("ab", "AB"):
        a.submit(work(letters[0]))
        b.submit(work(letters[1]))


# ---------------------------------------------------------------------- determinism and reach


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_the_same_policy_and_seed_give_the_same_schedule(policy: str) -> None:
    def log() -> tuple[list[str], float, int]:
        with simulated(policy, 7) as device:
            streams = [device.stream(name) for name in "abc"]
            for index in range(5):
                fences = [stream.submit(lambda: device.sleep(1e-5)) for stream in streams]
                streams[index % 3].wait(fences[(index + 1) % 3])
            device.wait_host(fences[0], reason="step")
            device.close()
            return device.turns.log, device.now(), device.turns.points

    assert log() == log()
    assert log()[0]


def test_different_seeds_give_different_schedules() -> None:
    assert len({order_of(two_and_two, "random", seed) for seed in SEEDS}) > 1


def test_exactly_the_orders_that_the_fences_allow_occur() -> None:
    def program(device: SimDevice, work: Callable[[str], Callable[[], None]]) -> None:
        a, b, c = (device.stream(name) for name in "abc")
        first = a.submit(work("a"))
        a.submit(work("A"))
        b.wait(first)
        b.submit(work("b"))
        c.submit(work("c"))

    orders = ("".join(letters) for letters in itertools.permutations("aAbc"))
    allowed = {order for order in orders if order.index("a") < order.index("A") and order.index("a") < order.index("b")}
    assert {order_of(program, "random", seed) for seed in range(300)} == allowed
    for policy in ALL_POLICIES:
        assert {order_of(program, policy, seed) for seed in SEEDS} <= allowed


def test_unordered_streams_interleave_in_every_way() -> None:
    ways = {"".join(letters) for letters in itertools.permutations("aAbB")}
    expected = {way for way in ways if way.index("a") < way.index("A") and way.index("b") < way.index("B")}
    assert {order_of(two_and_two, "random", seed) for seed in range(300)} == expected


# ---------------------------------------------------------------------- what each policy promises


@pytest.mark.parametrize("seed", range(5))
def test_policy_late_runs_only_work_that_the_host_waits_for(seed: int) -> None:
    ran: list[str] = []
    with simulated("late", seed) as device:
        a, b, c = (device.stream(name) for name in "abc")
        needed = a.submit(lambda: ran.append("a"))
        b.wait(needed)
        wanted = b.submit(lambda: ran.append("b"))
        c.submit(lambda: ran.append("c"))
        assert not wanted.poll() and ran == []
        device.wait_host(wanted, reason="step")
        assert ran == ["a", "b"]


def test_a_delayed_stream_runs_while_the_host_sleeps_repeatedly() -> None:
    for seed in range(5):
        for policy in ["late", "starve:a"]:
            with simulated(policy, seed) as device:
                fence = device.stream("a").submit(lambda: None)
                naps = 0
                while not fence.poll():
                    device.sleep(1e-3)
                    naps += 1
                assert 1 < naps < 50


def test_policy_early_runs_all_possible_work_before_the_host_continues() -> None:
    for seed in range(5):
        with simulated("early", seed) as device:
            a, b = device.stream("a"), device.stream("b")
            for _ in range(3):
                fence = a.submit(lambda: None)
                assert fence.done
                b.wait(fence)
                assert b.submit(lambda: None).done


@pytest.mark.parametrize("seed", range(5))
def test_a_starved_stream_runs_only_when_no_other_actor_can(seed: int) -> None:
    ran: list[str] = []
    with simulated("starve:a", seed) as device:
        a, b = device.stream("a"), device.stream("b")
        last = a.submit(lambda: ran.append("a"))
        for _ in range(4):
            b.submit(lambda: ran.append("b"))
        device.wait_host(last, reason="step")
    assert ran == ["b"] * 4 + ["a"]


def test_a_starved_family_runs_only_when_no_other_actor_can() -> None:
    ran: list[str] = []
    with simulated("starve:load", 0) as device:
        names = ("load-0", "load-1", "loader", "other")
        fences = [device.stream(name).submit(functools.partial(ran.append, name)) for name in names]
        for fence in fences:
            device.wait_host(fence, reason="step")
    assert set(ran[:2]) == {"loader", "other"}
    assert set(ran[2:]) == {"load-0", "load-1"}


def test_pct_of_depth_one_never_preempts_and_of_depth_two_once() -> None:
    def program(device: SimDevice, work: Callable[[str], Callable[[], None]]) -> None:
        a, b = device.stream("a"), device.stream("b")
        gate = device.stream("gate").submit(lambda: device.sleep(1.0))  # until the host has submitted all
        a.wait(gate)
        b.wait(gate)
        for _ in range(100):
            a.submit(work("a"))
            b.submit(work("b"))

    def switches(depth: int | str) -> set[int]:
        orders = [order_of(program, f"pct:{depth}", seed) for seed in range(30)]
        return {sum(left != right for left, right in itertools.pairwise(order)) for order in orders}

    assert switches(1) == {1}
    assert switches(2) > {1}
    assert max(switches(2)) <= 3
    assert switches("2:1000000") == {1}, "the one preemption lies far behind the end"


@pytest.mark.parametrize(
    "spec", ["sometimes", "starve", "pct", "pct:0", "pct:x", "pct:2:", "pct:2:0", "pct:2:9:9", "late:1", ""]
)
def test_an_unknown_policy_is_an_error_that_names_the_known_ones(spec: str) -> None:
    with pytest.raises(ConfigError, match="give random, late, early, starve:STREAM or pct:DEPTH\\[:POINTS\\]"):
        make_policy(spec, random.Random(0))


# ---------------------------------------------------------------------- fences and events


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_a_wait_orders_later_work_and_not_earlier_work(policy: str) -> None:
    def program(device: SimDevice, work: Callable[[str], Callable[[], None]]) -> None:
        a, b = device.stream("a"), device.stream("b")
        b.submit(work("1"))
        fence = a.submit(work("2"))
        b.wait(fence)
        b.submit(work("3"))

    orders = {order_of(program, policy, seed) for seed in SEEDS}
    assert orders <= {"123", "213"}


def test_a_wait_inside_work_takes_effect_at_that_point() -> None:
    ran: list[str] = []

    def halves() -> None:
        ran.append("b1")
        b.wait(fence)
        ran.append("b2")

    orders = set()
    for seed in SEEDS:
        ran.clear()
        with simulated("random", seed) as device:
            a, b = device.stream("a"), device.stream("b")
            fence = a.submit(lambda: ran.append("a"))
            b.submit(halves)
            device.close()
        orders.add("".join(ran))
    assert orders == {"ab1b2", "b1ab2"}


def test_waiting_for_an_event_that_was_never_recorded_does_nothing() -> None:
    def program(device: SimDevice, work: Callable[[str], Callable[[], None]]) -> None:
        a, b = device.stream("a"), device.stream("b")
        event = device.event("filled")
        b.wait_event(event)
        a.submit(work("a"))
        event.record(a)
        b.submit(work("b"))

    assert {order_of(program, "random", seed) for seed in SEEDS} == {"ab", "ba"}


def test_only_blocking_streams_are_ordered_with_the_default_stream() -> None:
    def program(device: SimDevice, work: Callable[[str], Callable[[], None]]) -> None:
        default, other = device.default_stream(), device.stream("other")
        a, b = (device.stream(name, blocking=True) for name in "ab")
        a.submit(work("a"))
        b.submit(work("b"))
        other.submit(work("o"))
        default.submit(work("D"))
        a.submit(work("A"))
        assert device.default_stream() is default

    orders = {order_of(program, "random", seed) for seed in range(300)}
    blocking = {order.replace("o", "") for order in orders}
    assert blocking == {"abDA", "baDA"}
    assert {order.index("o") for order in orders} == {0, 1, 2, 3, 4}


def test_on_a_device_with_sticky_errors_failed_work_fails_all_later_work() -> None:
    with simulated("late") as device:
        device.sticky, ran = True, list[str]()
        a, b = device.stream("a"), device.stream("b")
        first = a.submit(lambda: ran.append("first"))
        broken = a.submit(lambda: 1 // 0, label="divide")
        b.wait(broken)
        later = b.submit(lambda: ran.append("later"))
        device.wait_host(later, reason="step")
        assert (ran, first.failure) == (["first"], None)
        assert isinstance(broken.failure, ZeroDivisionError)
        assert isinstance(later.failure, DeviceLost) and later.failure is device.lost
        with pytest.raises(DeviceLost, match="`divide` has failed, and all later work fails with it"):
            b.submit(lambda: None)


def test_on_a_device_without_sticky_errors_failed_work_fails_alone() -> None:
    with simulated() as device:
        a = device.stream("a")
        a.submit(lambda: 1 // 0)
        assert a.submit(lambda: None).failure is None


def test_an_allocator_reuses_freed_memory_at_once_on_its_own_stream_only() -> None:
    with simulated("starve:b") as device:
        a, b = device.stream("a"), device.stream("b")
        allocator = device.allocator("cached", 64)
        one = allocator.allocate(16, a)
        one_at = one.data_ptr()
        allocator.free(one)
        with pytest.raises(InvariantError, match="byte 0 of cached begins no allocated block"):
            allocator.free(one)
        assert allocator.allocate(16, b).data_ptr() != one_at
        assert allocator.allocate(8, a).data_ptr() != one_at
        again = allocator.allocate(16, a)
        assert again.data_ptr() == one_at
        allocator.record_stream(again, b)
        used = b.submit(lambda: None)
        allocator.free(again)
        assert allocator.allocate(16, a).data_ptr() != one_at  # the work of `b` may still use it
        device.wait_host(used, reason="step")
        assert allocator.allocate(16, a).data_ptr() == one_at
        with pytest.raises(OutOfDeviceMemory, match="16 bytes of cached asked for, 8 are left"):
            allocator.allocate(16, a)


def test_a_wait_for_an_event_covers_its_last_record_before_the_wait() -> None:
    def program(device: SimDevice, work: Callable[[str], Callable[[], None]]) -> None:
        a, b, c = (device.stream(name) for name in "abc")
        event = device.event("filled")
        a.submit(work("1"))
        event.record(a)
        b.wait_event(event)
        a.submit(work("2"))
        event.record(a)
        c.wait_event(event)
        b.submit(work("b"))
        c.submit(work("c"))

    orders = {order_of(program, "random", seed) for seed in range(200)}
    assert orders == {"1b2c", "12bc", "12cb"}


def test_a_fence_of_another_device_is_refused() -> None:
    with simulated() as mine, simulated() as other:
        foreign = other.stream("a").submit(lambda: None)
        stream = mine.stream("a")
        with pytest.raises(InvariantError, match="not of this device"):
            stream.wait(foreign)
        with pytest.raises(InvariantError, match="not of this device"):
            mine.wait_host(foreign, reason="step")


# ---------------------------------------------------------------------- graphs


def replayed(capture_wait: str, policy: str, seed: int) -> list[str]:
    """Replay a captured read twice, each behind its own load, gated in the way `capture_wait` says."""
    ran: list[str] = []
    with simulated(policy, seed) as device:
        load, compute = device.stream("load"), device.stream("compute")
        loaded = device.event("loaded")

        def build() -> None:
            if capture_wait == "host":
                compute.wait_event(loaded)  # it was never recorded, so this does nothing
            else:
                compute.wait_external(loaded)
            compute.submit(lambda: ran.append("read"))

        graph = compute.capture(build)
        assert ran == []
        for _ in range(2):
            load.submit(lambda: ran.append("load"))
            loaded.record(load)
            device.wait_host(compute.replay(graph), reason="step")
        device.close()
    return ran


def test_an_event_is_queried_and_synchronized_as_on_cuda() -> None:
    ran: list[int] = []
    with simulated("late", 0) as device:
        stream, event = device.stream("compute"), device.event("done")
        assert event.query()
        event.synchronize()  # never recorded: both return at once
        stream.submit(lambda: ran.append(1))
        event.record(stream)
        assert not event.query()
        event.synchronize()
        assert event.query() and ran == [1]
        stream.submit(lambda: ran.append(2))
        assert event.query()  # work behind the record does not count
        stream.synchronize()
        stream.synchronize()  # there is nothing left to wait for
        assert ran == [1, 2]
        assert device.host_waits() == {"event": 1, "stream": 1}


def test_a_stream_without_work_needs_no_wait() -> None:
    with simulated("late", 0) as device:
        device.stream("compute").synchronize()
        assert device.host_waits() == {}


def test_a_capture_that_waits_for_another_stream_raises() -> None:
    with simulated("random", 0) as device:
        load, compute = device.stream("load"), device.stream("compute")
        own, other = compute.submit(lambda: None), load.submit(lambda: None)
        with pytest.raises(InvariantError, match=r"fence\(load:1\) during a capture.*use `wait_external`"):
            compute.capture(lambda: compute.wait(other))
        assert compute.capture(lambda: compute.wait(own)).nodes == ()
        compute.wait(other)  # the capture has ended


def test_a_captured_graph_ignores_a_wait_for_an_unrecorded_event() -> None:
    assert {"read", "load"} == {replayed("host", "random", seed)[0] for seed in SEEDS}
    assert replayed("host", "starve:load", 0) == ["read", "read", "load", "load"]


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_each_replay_waits_for_the_latest_record_of_an_external_event(policy: str) -> None:
    for seed in range(10):
        assert replayed("external", policy, seed) == ["load", "read", "load", "read"]


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_a_graph_inside_work_waits_for_events_as_of_its_submission(policy: str) -> None:
    """And for nothing later: a load that comes behind this very work would never end."""
    for seed in range(10):
        ran: list[str] = []
        with simulated(policy, seed) as device:
            load, compute = device.stream("load"), device.stream("compute")
            loaded = device.event("loaded")

            def read(ran: list[str] = ran, compute: SimStream = compute, loaded: SimEvent = loaded) -> None:
                compute.wait_external(loaded)
                ran.append("read")

            graph = compute.capture(lambda: compute.submit(read))  # noqa: B023 - called here
            load.submit(lambda: ran.append("load"))  # noqa: B023 - done before the next seed
            loaded.record(load)
            step = compute.submit(lambda: compute.enqueue(graph))  # noqa: B023
            load.wait(step)
            load.submit(lambda: ran.append("load behind it"))  # noqa: B023
            loaded.record(load)
            device.close()
        assert ran == ["load", "read", "load behind it"]


def test_the_fence_of_a_replay_covers_even_a_wait_at_the_end_of_the_graph() -> None:
    with simulated("late") as device:
        load, compute = device.stream("load"), device.stream("compute")
        loaded = device.event("loaded")

        def build() -> None:
            compute.submit(lambda: None)
            compute.wait_external(loaded)

        graph = compute.capture(build)
        empty = compute.capture(lambda: None)
        fence = loaded.record(load)
        assert device.wait_host(compute.replay(graph), reason="step")
        assert fence.done
        assert device.wait_host(compute.replay(empty), reason="step")


def test_a_deleted_graph_cannot_run() -> None:
    with simulated() as device:
        compute = device.stream("compute")
        graph = compute.capture(lambda: None)
        graph.delete()
        graph.delete()
        with pytest.raises(InvariantError, match="the graph was deleted"):
            compute.replay(graph)
        failed = compute.submit(lambda: compute.enqueue(graph))
        device.wait_host(failed, reason="step")
        assert "the graph was deleted" in str(failed.failure)


def test_an_external_wait_outside_a_capture_is_an_error() -> None:
    with simulated() as device, pytest.raises(InvariantError, match="outside `capture`"):
        device.stream("a").wait_external(device.event("loaded"))


# ---------------------------------------------------------------------- memory and copies


def halves_seen(seed: int, *, ordered: bool) -> tuple[int, int]:
    """What a reader finds in the two segments that a copy fills with sevens."""
    seen: list[int] = []
    with simulated("random", seed) as device:
        source, target = device.allocate_host("host", 2), device.allocate("kv", 2)
        source.data.fill_(7)
        load, compute = device.stream("load"), device.stream("compute")
        batch = CopyBatch(source, target, np.array([0, 1]), np.array([0, 1]), 1)
        loaded = load.submit(lambda: load.copy(batch), batch.accesses)
        if ordered:
            compute.wait(loaded)
        compute.submit(lambda: seen.extend(target.data.tolist()))
        device.close()
    return seen[0], seen[1]


def test_a_copy_is_torn_between_its_segments_unless_a_fence_orders_the_reader() -> None:
    assert {halves_seen(seed, ordered=False) for seed in SEEDS} == {(POISON, POISON), (7, POISON), (7, 7)}
    assert {halves_seen(seed, ordered=True) for seed in SEEDS} == {(7, 7)}


def test_a_fence_may_be_unfinished_although_its_bytes_were_copied() -> None:
    seen = set()
    for seed in SEEDS:
        with simulated("random", seed) as device:
            moved: list[bool] = []
            fence = device.stream("a").submit(lambda moved=moved: moved.append(True))
            while not moved:
                device.sleep(1e-6)
            seen.add(fence.done)
    assert seen == {False, True}


def test_new_memory_is_poisoned_and_has_a_unique_name() -> None:
    with simulated() as device:
        for memory in (device.allocate("kv", 3), device.allocate_host("host", 3), device.allocate_pageable("list", 3)):
            assert memory.data.tolist() == [POISON] * 3
        with pytest.raises(InvariantError, match="memory kv exists already"):
            device.allocate_host("kv", 1)
        device.stream("a")
        for taken in ("a", "host"):
            with pytest.raises(InvariantError, match=f"stream {taken} exists already"):
                device.stream(taken)


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_bytes_are_poisoned_after_the_last_of_their_uses_is_done(policy: str) -> None:
    seen: list[list[int]] = []
    with simulated(policy) as device:
        memory = device.allocate("kv", 4)
        memory.data.zero_()
        uses = [device.stream(name).submit(lambda: seen.append(memory.data[1:3].tolist())) for name in "ab"]
        device.poison("kv", 1, 3, uses)
        while not all(fence.poll() for fence in uses):
            assert memory.data[1:3].tolist() == [0, 0] or all(fence.done for fence in uses)
            device.sleep(1e-3)
        assert seen == [[0, 0]] * 2
        assert memory.data.tolist() == [0, POISON, POISON, 0]
        device.poison("kv", 0, 1, uses)
        assert memory.data.tolist() == [POISON, POISON, POISON, 0]


def test_a_pageable_copy_is_counted() -> None:
    with simulated() as device:
        stream = device.stream("load")
        batch = CopyBatch(
            device.allocate_pageable("list", 1), device.allocate("kv", 1), np.array([0]), np.array([0]), 1
        )
        stream.submit(lambda: stream.copy(batch), batch.accesses)
        device.close()
        assert device.host_waits() == {"pageable copy": 1}


def test_a_host_wait_is_counted_under_its_reason_and_only_when_it_waits() -> None:
    with simulated("late") as device:
        fence = device.stream("a").submit(lambda: None)
        assert device.wait_host(fence, reason="step")
        assert device.wait_host(fence, reason="step")
        assert device.host_waits() == {"step": 1}


def test_a_host_wait_ends_when_an_actor_rings_before_its_fence_is_done() -> None:
    with simulated("late") as device:
        fence, bell = device.stream("a").submit(lambda: device.sleep(1.0)), Bell()
        device.stream("b").submit(bell.ring)
        assert not device.wait_host(fence, reason="step", bell=bell)
        assert (fence.poll(), bell.rung) == (False, False)
        assert device.wait_host(fence, reason="step", bell=bell)


# ---------------------------------------------------------------------- the queue


def test_the_host_waits_only_when_a_stream_queue_is_full() -> None:
    with simulated("late") as device:
        stream = device.stream("a")
        for _ in range(QUEUE_LIMIT):
            stream.submit(lambda: None)
        assert device.host_waits() == {}
        stream.submit(lambda: None)
        assert device.host_waits() == {"queue full": 1}


def test_stream_waits_count_towards_the_queue_limit() -> None:
    with simulated("late") as device:
        other = device.stream("b").submit(lambda: None)
        stream = device.stream("a")
        for _ in range(QUEUE_LIMIT + 1):
            stream.wait(other)
        assert device.host_waits() == {"queue full": 1}


# ---------------------------------------------------------------------- time


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_virtual_time_advances_while_an_actor_sleeps(policy: str) -> None:
    with simulated(policy) as device:
        stream = device.stream("a")
        start = device.now()
        fence = stream.submit(lambda: device.sleep(3600.0))
        device.sleep(7200.0)
        assert device.now() - start == pytest.approx(7200.0, abs=1.0)
        device.wait_host(fence, reason="step")
        device.close()


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_a_host_wait_with_a_deadline_ends_at_the_deadline(policy: str) -> None:
    with simulated(policy) as device:
        fence = device.stream("a").submit(lambda: device.sleep(10.0))
        assert not device.wait_host(fence, reason="tier", timeout_s=1.0)
        assert device.now() == pytest.approx(1.0, abs=0.01)
        assert device.wait_host(fence, reason="tier", timeout_s=100.0) or policy in (
            "late",
            "starve:a",
        )  # a device may be slower still


def test_the_shorter_sleep_ends_first() -> None:
    ran: list[str] = []
    with simulated("random") as device:
        for name, seconds in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
            stream = device.stream(name)
            stream.submit(lambda seconds=seconds: device.sleep(seconds))
            stream.submit(lambda name=name: ran.append(name))
        device.close()
    assert ran == ["b", "c", "a"]


# ---------------------------------------------------------------------- when nothing goes on


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_a_deadlock_error_names_the_chain_of_waits(policy: str) -> None:
    with simulated(policy) as device:
        a, b = device.stream("a"), device.stream("b")
        box: list[SimFence] = []
        hold = device.stream("gate").submit(lambda: device.sleep(1.0))
        a.wait(hold)
        first = a.submit(lambda: a.wait(box[0]))
        b.wait(first)
        box.append(b.submit(lambda: None))
        with pytest.raises(Deadlock, match=r"host waits for b, a waits for b, b waits for a, gate waits for work"):
            device.wait_host(box[0], reason="step")
        with pytest.raises(Deadlock):
            device.close()


def test_a_host_wait_for_captured_work_is_a_deadlock() -> None:
    with simulated() as device:
        compute = device.stream("compute")
        captured: list[SimFence] = []
        compute.capture(lambda: captured.append(compute.submit(lambda: None)))
        with pytest.raises(Deadlock, match="host waits for compute"):
            device.wait_host(captured[0], reason="step")


def test_a_loop_over_polls_that_never_sleeps_is_an_error_and_not_a_hang() -> None:
    with simulated("late") as device:
        fence = device.stream("a").submit(lambda: None)
        with pytest.raises(Deadlock, match="a loop over polls must sleep"):
            while not fence.poll():
                pass


def test_host_threads_that_wake_each_other_for_ever_are_an_error_and_not_a_hang() -> None:
    class Busiest:
        """Threads first, in turn: no stream ever runs."""

        def choose(self, choice: Choice) -> str:
            threads = [name for name in choice.able if name in ("one", "other") and name != choice.current]
            return threads[0] if threads else choice.able[0]

    with simulated(Busiest()) as device:
        work = device.stream("a").submit(lambda: None)
        threads = [device.thread(name, lambda: WakeUp((), device.now())) for name in ("one", "other")]
        with pytest.raises(Deadlock, match=r"the last of them (one|other): a loop over polls must sleep"):
            for thread in threads:
                thread.wake()
            device.wait_host(work, reason="step")


# ---------------------------------------------------------------------- ends and failures


def sim_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("sidestream-sim")]


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_close_runs_submitted_work_and_leaves_no_thread(policy: str) -> None:
    ran: list[int] = []
    with simulated(policy) as device:
        streams = [device.stream(name) for name in "abc"]
        for index in range(9):
            streams[index % 3].submit(lambda index=index: ran.append(index))
        device.close()
        assert sorted(ran) == list(range(9))
        assert sim_threads() == []
        device.close()
        with pytest.raises(InvariantError, match="closed"):
            streams[0].submit(lambda: None)
        with pytest.raises(InvariantError, match="closed"):
            device.stream("d")


def test_kill_interrupts_running_work_drops_the_rest_and_leaves_no_thread() -> None:
    ran: list[str] = []

    def slow() -> None:
        try:
            ran.append("begun")
            device.sleep(10.0)
            ran.append("never")
        finally:
            ran.append("unwound")
            fence.poll()  # a point inside a dying actor neither hangs nor revives anybody

    with simulated("early") as device:
        a = device.stream("a")
        device.stream("idle")
        fence = device.stream("b").submit(lambda: device.sleep(20.0))
        a.submit(slow)
        a.submit(lambda: ran.append("later"))
        device.kill()
        assert ran == ["begun", "unwound"]
        assert not fence.done and sim_threads() == []
        device.kill()


def test_an_exception_of_work_is_kept_in_its_fence_and_later_work_runs() -> None:
    def broken() -> None:
        raise ValueError("torn cable")

    with simulated() as device:
        stream = device.stream("a")
        failed, fine = stream.submit(broken), stream.submit(lambda: None)
        device.close()
        assert isinstance(failed.failure, ValueError) and failed.done
        assert fine.failure is None and fine.done


class Held:
    pass


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_references_of_work_are_dropped_before_its_fence_is_done(policy: str) -> None:
    with simulated(policy) as device:
        held = Held()
        alive = weakref.ref(held)
        fence = device.stream("a").submit(lambda held=held: None)
        del held
        device.wait_host(fence, reason="step")
        assert alive() is None


class Journal:
    """A tracer that writes down what it is told, and fails where it is asked to."""

    def __init__(self, fail_at: str = "") -> None:
        self.lines: list[str] = []
        self._fail_at = fail_at

    def _note(self, what: str, detail: str) -> None:
        self.lines.append(f"{what} {detail}")
        if what == self._fail_at:
            raise RuntimeError(f"tracer fails at {what}")

    def submitted(self, fence: Fence, accesses: Accesses, label: str) -> None:
        self._note("submitted", label)

    def waited(self, stream: str, fence: Fence) -> None:
        self._note("waited", f"{stream} for {fence.stream}:{fence.tick}")

    def started(self, fence: Fence) -> None:
        self._note("started", f"{fence.stream}:{fence.tick}")

    def touched(self, stream: str, accesses: Accesses) -> None:
        self._note("touched", stream)

    def finished(self, fence: Fence) -> None:
        self._note("finished", f"{fence.stream}:{fence.tick} {'not seen' if not fence.poll() else 'seen'}")

    def observed(self, fence: Fence) -> None:
        self._note("observed", f"{fence.stream}:{fence.tick}")

    def stalled(self, reason: str) -> None:
        self._note("stalled", reason)


def test_a_tracer_records_all_events_in_order() -> None:
    journal = Journal()
    with simulated("late", tracer=journal) as device:
        a, b = device.stream("a"), device.stream("b")
        fence = a.submit(lambda: a.touch(lambda: ()), label="fill")
        b.wait(fence)
        last = b.submit(lambda: None, label="copy")
        device.wait_host(last, reason="step")
        assert [line for line in journal.lines if not line.startswith("finished")] == [
            "submitted fill",
            "submitted copy",
            "stalled step",
            "started a:1",
            "touched a",
            "waited b for a:1",
            "started b:1",
            "observed b:1",
        ]
        assert [line for line in journal.lines if line.startswith("finished")] == [
            "finished a:1 not seen",
            "finished b:1 not seen",
        ]


def test_polling_a_fence_inside_work_is_no_observation_of_the_host() -> None:
    journal = Journal()
    with simulated("early", tracer=journal) as device:
        fence = device.stream("a").submit(lambda: None)
        device.stream("b").submit(lambda: fence.poll() and None)
        device.close()
        assert not [line for line in journal.lines if line.startswith("observed")]


@pytest.mark.parametrize("call", ["submitted", "started", "waited", "finished", "touched"])
@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_an_exception_of_a_tracer_is_raised_on_the_host_or_kept_in_the_fence(policy: str, call: str) -> None:
    with simulated(policy, tracer=Journal(fail_at=call)) as device:
        a, b = device.stream("a"), device.stream("b")
        if call == "touched":  # told from inside work: the work's own failure
            fence = a.submit(lambda: a.touch(lambda: ()))
            device.close()
            assert str(fence.failure) == "tracer fails at touched"
            return
        with pytest.raises(RuntimeError, match=f"tracer fails at {call}"):
            b.wait(a.submit(lambda: None))
            b.submit(lambda: None)
            device.close()


def test_a_touch_outside_of_the_streams_work_raises() -> None:
    with simulated() as device, pytest.raises(InvariantError, match="only its own work may declare"):
        device.stream("a").touch(lambda: ())


def test_simulated_memory_holds_real_bytes() -> None:
    with simulated() as device:
        memory = device.allocate("kv", 16)
        numbers = memory.data.numpy().view(np.int64)
        device.stream("a").submit(lambda: numbers.__setitem__(1, -1))
        device.close()
        assert memory.data[8:].tolist() == [255] * 8
