"""Events of a GPU reach the tracer when fences prove them, in an order that the fences allow."""

from __future__ import annotations

import random
from collections.abc import Sequence

from cuda_rig import FakeGpu

from sidestream_kv.device.cuda import CudaDevice
from sidestream_kv.device.cuda.history import History
from sidestream_kv.types import Access, Accesses, Fence
from sidestream_order.checker import Checker


class Mark:
    """A fence by its names only."""

    failure = None

    def __init__(self, stream: str, tick: int) -> None:
        self.stream, self.tick = stream, tick

    def poll(self) -> bool:
        raise AssertionError("a history asks no fence")


class Listener:
    """A tracer that keeps its events."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def submitted(self, fence: Fence, accesses: Accesses, label: str) -> None:
        self.events.append(f"submitted {fence.stream}{fence.tick}")

    def started(self, fence: Fence) -> None:
        self.events.append(f"started {fence.stream}{fence.tick}")

    def finished(self, fence: Fence) -> None:
        self.events.append(f"finished {fence.stream}{fence.tick}")

    def waited(self, stream: str, fence: Fence) -> None:
        self.events.append(f"{stream} waited for {fence.stream}{fence.tick}")

    def touched(self, stream: str, accesses: Accesses) -> None:
        self.events.append(f"{stream} touched {[access.start for access in accesses()]}")


def no_accesses() -> Sequence[Access]:
    return ()


def enqueue(history: History, stream: str, tick: int, *inside: Fence) -> Mark:
    fence = Mark(stream, tick)
    history.submitted(fence, no_accesses, "")
    for waited in inside:
        history.waited(stream, waited)
    history.enqueued(fence)
    return fence


def test_a_submission_is_reported_at_once_and_the_rest_when_the_fence_is_done() -> None:
    tracer = Listener()
    history = History(tracer)  # type: ignore[arg-type]
    first, second = enqueue(history, "a", 1), enqueue(history, "a", 2)
    assert tracer.events == ["submitted a1", "submitted a2"]
    history.report_until(first)
    assert tracer.events[2:] == ["started a1", "finished a1"]
    history.report_until(second)
    assert tracer.events[4:] == ["started a2", "finished a2"]


def test_a_done_fence_reports_everything_before_it_once() -> None:
    tracer = Listener()
    history = History(tracer)  # type: ignore[arg-type]
    first, second = enqueue(history, "a", 1), enqueue(history, "a", 2)
    history.report_until(second)
    history.report_until(first)
    history.report_until(second)
    assert tracer.events[2:] == ["started a1", "finished a1", "started a2", "finished a2"]


def test_the_awaited_work_is_reported_before_the_wait() -> None:
    tracer = Listener()
    history = History(tracer)  # type: ignore[arg-type]
    written = enqueue(history, "a", 1)
    enqueue(history, "a", 2)
    history.waited("b", written)
    stored = enqueue(history, "b", 1)
    history.report_until(stored)
    assert tracer.events[3:] == ["started a1", "finished a1", "b waited for a1", "started b1", "finished b1"]


def test_a_wait_after_a_done_fence_is_not_reported_with_it() -> None:
    tracer = Listener()
    history = History(tracer)  # type: ignore[arg-type]
    other, first = enqueue(history, "b", 1), enqueue(history, "a", 1)
    history.waited("a", other)
    second = enqueue(history, "a", 2)
    for _ in range(2):
        history.report_until(first)
    assert tracer.events[3:] == ["started a1", "finished a1"]
    history.report_until(second)
    assert tracer.events[5:] == ["started b1", "finished b1", "a waited for b1", "started a2", "finished a2"]


def test_waits_and_accesses_inside_work_keep_their_order() -> None:
    tracer = Listener()
    history = History(tracer)  # type: ignore[arg-type]
    loaded, fence = enqueue(history, "load", 1), Mark("a", 1)
    history.submitted(fence, no_accesses, "")
    starts = [10]
    history.touched("a", lambda: [Access("kv", start, start + 1, False) for start in starts])
    starts[:] = [20]  # what is said counts when it is said
    history.waited("a", loaded)
    history.touched("a", lambda: [Access("kv", start, start + 1, False) for start in starts])
    history.enqueued(fence)
    history.report_until(fence)
    assert tracer.events[2:] == [
        "started a1",
        "a touched [10]",
        "started load1",
        "finished load1",
        "a waited for load1",
        "a touched [20]",
        "finished a1",
    ]


def test_streams_that_wait_for_each_other_in_turn_are_reported_in_order() -> None:
    tracer = Listener()
    history = History(tracer)  # type: ignore[arg-type]
    last: Mark = enqueue(history, "a", 1)
    for tick in range(1, 2000):
        last = enqueue(history, "b", tick, last)
        last = enqueue(history, "a", tick + 1, last)
    history.report_until(last)
    finished = [event for event in tracer.events if event.startswith("finished")]
    assert finished[:4] == ["finished a1", "finished b1", "finished a2", "finished b2"]
    assert len(finished) == 3999


def test_a_wait_for_host_work_is_reported_without_its_history() -> None:
    tracer = Listener()
    history = History(tracer)  # type: ignore[arg-type]
    history.waited("load", Mark("disk", 7))
    history.report_until(enqueue(history, "load", 1))
    assert tracer.events[1:] == ["load waited for disk7", "started load1", "finished load1"]


# ---------------------------------------------------------------------- the checker, on a device


def program(seed: int, *, forget_waits: bool) -> list[str]:
    """Random readers and writers of one byte on four streams; fences are asked for in any order. What the checker
    found.
    """
    rng = random.Random(seed)
    checker, gpu = Checker(), FakeGpu()
    device = CudaDevice(driver=gpu, tracer=checker)  # type: ignore[arg-type]
    streams = [device.stream(name) for name in "abcd"]
    fences: list[Fence] = []
    inside = rng.random() < 0.5
    for number in range(60):
        stream = rng.choice(streams)
        access = Access("kv", 0, 8, True)
        previous = fences[-1] if fences and not forget_waits else None
        if previous is not None and not inside:
            stream.wait(previous)

        def work(stream=stream, previous=previous, access=access) -> None:  # type: ignore[no-untyped-def]
            if previous is not None and inside:
                stream.wait(previous)
            stream.touch(lambda: [access])

        fences.append(
            stream.submit(work, label=str(number))
            if inside
            else stream.submit(lambda: None, lambda access=access: [access])
        )  # type: ignore[misc]
        for _ in range(rng.randrange(4)):
            gpu.step(rng.choice(streams).handle)
        rng.choice(fences).poll()
    gpu.run(rng=rng)
    for fence in rng.sample(fences, len(fences)):
        assert fence.poll()
    device.close()
    return [finding.kind for finding in checker.findings]


def test_writers_that_wait_for_the_previous_access_have_no_finding() -> None:
    for seed in range(20):
        assert program(seed, forget_waits=False) == []


def test_writers_that_do_not_wait_have_a_finding() -> None:
    for seed in range(20):
        assert program(seed, forget_waits=True) != []
