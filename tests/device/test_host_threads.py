"""Threads of the host that take turns, and their messages: no wake-up is lost, no message comes twice."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest

from sidestream.errors import DeviceLost
from sidestream_kv.device.base import WakeUp
from sidestream_kv.device.channel import Channel, Mark
from sidestream_kv.device.cpu import CpuDevice
from sidestream_kv.device.host import TurnTaker
from sidestream_kv.types import Access
from sidestream_order.checker import simulated
from sidestream_order.sim import SimDevice, make_policy

PATIENCE_S = 20.0


class HandFence:
    """Done when the test says so."""

    stream, tick, failure = "elsewhere", 1, None

    def __init__(self) -> None:
        self.done = threading.Event()

    def poll(self) -> bool:
        return self.done.is_set()


class Turns:
    """Turns that return the wake-up that the test sets; `taken` counts them."""

    def __init__(self, wake_up: WakeUp | None = None) -> None:
        self.wake_up = wake_up or WakeUp()
        self.taken = 0
        self.happened = threading.Semaphore(0)

    def __call__(self) -> WakeUp:
        self.taken += 1
        self.happened.release()
        return self.wake_up

    def expect(self) -> None:
        assert self.happened.acquire(timeout=PATIENCE_S), "no turn was taken"


@pytest.fixture
def turns() -> Turns:
    return Turns()


@pytest.fixture
def taker(turns: Turns) -> Iterator[TurnTaker]:
    thread = TurnTaker("t", turns, clock=time.monotonic)
    yield thread
    thread.close()


def test_a_thread_takes_no_turn_before_it_is_woken(turns: Turns, taker: TurnTaker) -> None:
    assert turns.taken == 0
    taker.wake()
    turns.expect()


def test_a_wake_during_a_turn_causes_another_turn() -> None:
    entered, go_on, taken = threading.Event(), threading.Event(), threading.Semaphore(0)

    def turn() -> WakeUp:
        entered.set()
        assert go_on.wait(PATIENCE_S)
        taken.release()
        return WakeUp()

    thread = TurnTaker("t", turn, clock=time.monotonic)
    thread.wake()
    assert entered.wait(PATIENCE_S)
    thread.wake()
    go_on.set()
    assert taken.acquire(timeout=PATIENCE_S)
    assert taken.acquire(timeout=PATIENCE_S), "the wake was lost"
    thread.close()


def test_no_wake_of_a_thread_is_lost(turns: Turns, taker: TurnTaker) -> None:
    for _ in range(200):
        before = turns.taken
        taker.wake()
        until = time.monotonic() + PATIENCE_S
        while turns.taken == before:
            assert time.monotonic() < until, "a wake was lost"


def test_a_finished_fence_wakes_only_threads_that_wait_for_one() -> None:
    device = CpuDevice(compute_threads=1)
    waiting, idle = Turns(WakeUp((HandFence(),))), Turns()
    threads = [device.thread("waiting", waiting), device.thread("idle", idle)]
    for thread, turns in zip(threads, (waiting, idle), strict=True):
        thread.wake()
        turns.expect()
    stream = device.stream("s")
    for _ in range(2):
        device.wait_host(stream.submit(lambda: None), reason="test")
        waiting.expect()
    device.close()
    assert idle.taken == 1


def test_a_thread_wakes_up_at_its_requested_time(turns: Turns) -> None:
    turns.wake_up = WakeUp(until_s=time.monotonic() + 0.01)
    thread = TurnTaker("t", turns, clock=time.monotonic)
    thread.wake()
    turns.expect()
    turns.expect()
    thread.close()


def test_a_fence_with_a_polling_interval_is_polled_until_done() -> None:
    fence = HandFence()
    turns = Turns(WakeUp((fence,)))
    thread = TurnTaker("t", turns, clock=time.monotonic, poll_s=1e-4)
    thread.wake()
    turns.expect()
    assert turns.taken == 1
    fence.done.set()
    turns.expect()
    thread.close()


def test_a_fence_that_raises_device_lost_causes_a_turn() -> None:
    class Lost(HandFence):
        def poll(self) -> bool:
            raise DeviceLost("gone")

    turns = Turns(WakeUp((Lost(),)))
    thread = TurnTaker("t", turns, clock=time.monotonic, poll_s=1e-4)
    thread.wake()
    turns.expect()
    turns.expect()
    thread.close()
    assert thread.failure is None


def test_sleeps_of_microseconds_always_end() -> None:
    """A queue's `get` with such a timeout blocks for ever once in some hundred times."""
    clock, turns = time.monotonic, Turns()

    def turn() -> WakeUp:
        turns()
        thread._bell.ring()  # as somebody does who saw it asleep a moment ago
        return WakeUp(until_s=clock() + 2e-6 * (turns.taken % 16)) if turns.taken % 2 else WakeUp()

    thread = TurnTaker("t", turn, clock=clock)
    for _ in range(4000):
        thread.wake()
        turns.expect()
        turns.expect()
    thread.close()


def test_a_turn_that_raises_is_the_last_one() -> None:
    def turn() -> WakeUp:
        raise OSError("injected")

    thread = TurnTaker("t", turn, clock=time.monotonic)
    thread.wake()
    thread._thread.join(PATIENCE_S)
    assert isinstance(thread.failure, OSError)
    thread.wake()
    thread.close()


def test_close_waits_for_the_running_turn() -> None:
    inside, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def turn() -> WakeUp:
        inside.set()
        assert may_end.wait(PATIENCE_S)
        ended.set()
        return WakeUp()

    thread = TurnTaker("t", turn, clock=time.monotonic)
    thread.wake()
    assert inside.wait(PATIENCE_S)
    threading.Timer(0.2, may_end.set).start()
    thread.close()
    assert ended.is_set()


def test_messages_are_received_once_and_in_order() -> None:
    woken: list[int] = []
    channel: Channel[str] = Channel("c", wake=lambda: woken.append(len(channel)))
    assert channel.take() is None
    channel.put("a")
    channel.put("b")
    assert (len(channel), woken) == (2, [1, 2])
    assert [channel.take(), channel.take(), channel.take()] == ["a", "b", None]


def test_a_mark_only_grows_and_wakes_once_per_value() -> None:
    woken: list[int] = []
    mark = Mark("m", wake=lambda: woken.append(mark.read()))
    assert mark.read() == 0
    for number in (3, 3, 2, 5):
        mark.raise_to(number)
    assert (mark.read(), woken) == (5, [3, 5])


# ------------------------------------------------------------------ simulated


@pytest.mark.parametrize("policy", ["random", "early"])
def test_a_simulated_thread_takes_a_turn_for_a_wake_a_fence_and_a_time(policy: str) -> None:
    device = SimDevice(make_policy(policy, random.Random(0)))
    stream, seen = device.stream("s"), list[str]()
    fence = stream.submit(lambda: device.sleep(1.0))

    def turn() -> WakeUp:
        seen.append("done" if fence.done else "not done")
        return WakeUp((fence,)) if not fence.done else WakeUp(until_s=5.0) if device.now() < 5.0 else WakeUp()

    thread = device.thread("t", turn)
    assert seen == []
    thread.wake()
    device.sleep(2.0)
    assert seen[-1] == "done"
    count = len(seen)
    device.sleep(10.0)
    assert len(seen) == count + 1
    device.close()


def test_a_simulated_thread_whose_turn_raises_takes_no_other_turn() -> None:
    device = SimDevice(make_policy("random", random.Random(0)))

    def turn() -> WakeUp:
        raise OSError("injected")

    thread = device.thread("t", turn)
    for _ in range(3):
        thread.wake()
        device.sleep(1.0)
    assert isinstance(thread.failure, OSError)
    device.close()


# ------------------------------------------------------------------ what the checker makes of two hosts


def race(*, tell: bool) -> list[str]:
    """The host writes bytes, tells a thread or not, and the thread gives a stream work that reads them."""
    device, checker = simulated("early", 0)
    device.allocate("m", 8)
    stream = device.stream("s")
    channel: Channel[str] = Channel("c", tracer=checker)
    checker.host_touched(lambda: [Access("m", 0, 8, True)], "write")

    def turn() -> WakeUp:
        channel.take()
        stream.submit(lambda: None, lambda: [Access("m", 0, 8, False)], label="read")
        return WakeUp()

    thread = device.thread("t", turn)
    checker.host_touched(lambda: [Access("m", 0, 8, True)], "write again")
    if tell:
        channel.put("go")
    thread.wake()
    device.close()
    return [finding.kind for finding in checker.findings]


def test_accesses_of_two_threads_race_unless_a_message_orders_them() -> None:
    assert race(tell=True) == []
    assert race(tell=False) == ["race"]
