"""One direction of the link: order, slices, limits in flight and streams of copies, and failed copies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sidestream_kv.device.base import CopyBatch, Memory
from sidestream_kv.offload.pacing import Copy, Lane, Pace, Urgency
from sidestream_kv.types import Fence

MEMORY = Memory("m", (torch.zeros(1 << 20, dtype=torch.uint8),))
WIDE = Pace(slice_bytes=1 << 20, slice_segments=100, bytes_in_flight=1 << 30, segments_in_flight=1 << 20, streams=8)


class HandFence:
    """Done when the test says so; counts how often it was looked at."""

    def __init__(self, stream: str = "elsewhere", tick: int = 1) -> None:
        self.stream = stream
        self.tick = tick
        self.failure: BaseException | None = None
        self.done = False
        self.looks = 0

    def poll(self) -> bool:
        self.looks += 1
        return self.done


class HandStream:
    """Keeps what it was given, in order; nothing runs."""

    def __init__(self, name: str, given: list[tuple[str, str, int]]) -> None:
        self.name = name
        self.fences: list[HandFence] = []
        self.waits: list[Fence] = []
        self._given = given

    def submit_copy(self, batch: CopyBatch, first: int, stop: int, *, label: str = "") -> HandFence:
        assert 0 <= first < stop <= len(batch.source_starts)
        fence = HandFence(self.name, len(self.fences) + 1)
        self.fences.append(fence)
        self._given.append((self.name, label, stop - first))
        return fence

    def wait(self, fence: Fence) -> None:
        self.waits.append(fence)


class World:
    """A lane over streams that the test drives. `given`: stream, label and segments of each slice."""

    def __init__(self, pace: Pace = WIDE) -> None:
        self.given: list[tuple[str, str, int]] = []
        self.streams: list[HandStream] = []
        self.now_s = 7.0
        self.lane = Lane(pace, self._make, clock=lambda: self.now_s)  # type: ignore[arg-type, return-value]

    def _make(self, number: int) -> HandStream:
        assert number == len(self.streams)
        self.streams.append(HandStream(f"s{number}", self.given))
        return self.streams[-1]

    def copy(
        self,
        label: str,
        *groups: int,
        size: int = 10,
        urgency: Urgency = Urgency.STORE,
        after: tuple[HandFence, ...] = (),
    ) -> Copy:
        """Queue a copy of groups of so many segments."""
        copy = Copy([batch(count, size) for count in groups or (1,)], after=after, urgency=urgency, label=label)
        self.lane.add(copy)
        return copy

    def labels(self) -> list[str]:
        return [label for _, label, _ in self.given]

    def end(self, label: str, *, error: BaseException | None = None) -> None:
        """The oldest slice of that copy that is not done ends."""
        ticks: dict[str, int] = {}
        for stream, other, _ in self.given:
            ticks[stream] = ticks.get(stream, 0) + 1
            fence = next(each for each in self.streams if each.name == stream).fences[ticks[stream] - 1]
            if other == label and not fence.done:
                fence.done, fence.failure = True, error
                return
        raise AssertionError(f"nothing of {label} is on the device")


def batch(count: int, size: int) -> CopyBatch:
    starts = np.arange(count, dtype=np.int64) * size
    return CopyBatch(MEMORY, MEMORY, starts, starts, size)


def test_urgent_copies_run_first_and_equally_urgent_ones_in_order() -> None:
    world = World()
    for label, urgency in (
        ("s1", Urgency.STORE),
        ("p1", Urgency.PREFETCH),
        ("d1", Urgency.DEMAND),
        ("s2", Urgency.STORE),
        ("d2", Urgency.DEMAND),
    ):
        world.copy(label, urgency=urgency)
    world.lane.fill()
    assert world.labels() == ["d1", "d2", "p1", "s1", "s2"]


def test_an_urgent_copy_runs_between_slices_of_a_begun_copy() -> None:
    world = World(Pace(slice_bytes=1 << 20, slice_segments=1, bytes_in_flight=1 << 30, segments_in_flight=2, streams=8))
    world.copy("store", 4)
    world.lane.fill()
    world.copy("load", 2, urgency=Urgency.DEMAND)
    for label in ("store", "store", "load", "load"):
        world.end(label)
        world.lane.retire()
        world.lane.fill()
    assert world.labels() == ["store", "store", "load", "load", "store", "store"]


def test_slices_have_bounded_segments_and_bytes_and_at_least_one_segment() -> None:
    for size, limit, slices in ((10, 100, [3, 2, 2]), (10, 25, [2, 2, 2, 1]), (10, 5, [1] * 7)):
        world = World(
            Pace(slice_bytes=limit, slice_segments=3, bytes_in_flight=1 << 30, segments_in_flight=100, streams=1)
        )
        world.copy("a", 7, size=size)
        world.lane.fill()
        assert [count for *_, count in world.given] == slices


@pytest.mark.parametrize(
    ("bytes_in_flight", "segments_in_flight"), [(40, 1000), (59, 1000), (1 << 20, 4), (1 << 20, 5)]
)
def test_bytes_and_segments_in_flight_stay_within_the_pace(bytes_in_flight: int, segments_in_flight: int) -> None:
    world = World(
        Pace(
            slice_bytes=20,
            slice_segments=2,
            bytes_in_flight=bytes_in_flight,
            segments_in_flight=segments_in_flight,
            streams=8,
        )
    )
    for label in "abc":
        world.copy(label, 4, size=10)
    world.lane.fill()
    assert [count for *_, count in world.given] == [2, 2]
    world.lane.fill()
    assert len(world.given) == 2
    world.end("a")
    world.lane.retire()
    world.lane.fill()
    assert world.labels() == ["a", "a", "b"]


def test_slices_alternate_streams_and_wait_for_the_slice_before() -> None:  # P5
    world = World(Pace(slice_bytes=20, slice_segments=2, bytes_in_flight=1 << 30, segments_in_flight=1000, streams=2))
    for label in "ab":
        world.copy(label, 3)
    world.lane.fill()
    assert world.given == [("s0", "a", 2), ("s1", "a", 1), ("s0", "b", 2), ("s1", "b", 1)]
    (a1, b1), (a2, b2) = (stream.fences for stream in world.streams)
    assert [stream.waits for stream in world.streams] == [[a2], [a1, b1]]
    for label in "aabb":
        world.end(label)
    world.lane.retire()
    world.copy("c")
    world.lane.fill()
    assert world.given[-1] == ("s0", "c", 1)
    assert world.streams[0].waits == [a2]  # the one before was seen done
    assert b2.done


def test_slices_on_a_single_stream_wait_for_no_fence() -> None:
    world = World(Pace(slice_bytes=20, slice_segments=2, bytes_in_flight=1 << 30, segments_in_flight=1000, streams=1))
    world.copy("a", 6)
    world.lane.fill()
    assert (world.labels(), world.streams[0].waits) == (["a"] * 3, [])


def test_a_ready_copy_overtakes_a_copy_that_waits_for_a_fence() -> None:
    world, step = World(), HandFence()
    world.copy("first")
    world.copy("waits", after=(step,))
    world.copy("ready")
    world.lane.fill()
    assert world.labels() == ["first", "ready"]
    assert step in list(world.lane.awaited())
    step.done = True
    world.lane.fill()
    assert world.labels() == ["first", "ready", "waits"]


def test_no_slice_of_a_copy_is_submitted_before_all_its_fences_are_done() -> None:  # H1, H3
    """On the device it would hold up what comes behind it."""
    world, first, second = World(), HandFence(), HandFence()
    world.copy("waits", 6, after=(first, second))
    for fence in (first, second):
        world.lane.fill()
        assert world.given == []
        assert list(world.lane.awaited()) == [fence]
        fence.done = True
    world.lane.fill()
    assert world.labels() == ["waits"]


def test_a_begun_copy_continues_before_an_older_copy_that_became_ready() -> None:
    world, step = World(Pace(1 << 20, 1, 1 << 30, 2, streams=2)), HandFence()
    world.copy("late", 2, after=(step,))
    world.copy("begun", 4)
    world.lane.fill()
    step.done = True
    for label in ("begun", "begun", "begun", "begun"):
        world.end(label)
        world.lane.retire()
        world.lane.fill()
    assert world.labels() == ["begun"] * 4 + ["late"] * 2


@pytest.mark.parametrize(("bytes_in_flight", "segments_in_flight"), [(40, 1000), (1 << 20, 4)])
def test_a_lane_runs_low_below_half_of_its_limit_in_flight(bytes_in_flight: int, segments_in_flight: int) -> None:
    world = World(
        Pace(
            slice_bytes=10,
            slice_segments=1,
            bytes_in_flight=bytes_in_flight,
            segments_in_flight=segments_in_flight,
            streams=1,
        )
    )
    low = [world.lane.runs_low]
    for label in "ab":
        world.copy(label, 1)
        world.lane.fill()
        low.append(world.lane.runs_low)
    assert low == [True, True, False]


def test_the_worker_wakes_when_half_of_the_flight_or_a_copy_is_done() -> None:
    """So it has time, and little to do."""
    world = World(Pace(slice_bytes=10, slice_segments=1, bytes_in_flight=40, segments_in_flight=100, streams=2))
    world.copy("a", 3)
    world.copy("b", 3)
    world.copy("c", 1)
    world.lane.fill()
    (a1, a3), (a2, b1) = (stream.fences for stream in world.streams)
    assert list(world.lane.awaited()) == [a3]  # a1, a2, then this one, then b1
    for fence in (a1, a2):
        fence.done = True
    world.lane.retire()
    world.lane.fill()
    assert list(world.lane.awaited()) == [a3]  # what is left, c, fits as soon as the first one ends
    assert world.lane.cancel(RuntimeError("closed")) != []
    assert not world.lane.has_more
    assert list(world.lane.awaited()) == [a3]  # the last one of a
    a3.done = True
    assert [copy.label for copy in world.lane.retire()] == ["a"]
    assert list(world.lane.awaited()) == [world.streams[1].fences[2]]
    assert b1.tick == 2


@pytest.mark.parametrize(("bytes_in_flight", "segments_in_flight"), [(80, 100), (1000, 8)])
def test_the_worker_wakes_as_soon_as_all_remaining_slices_fit(bytes_in_flight: int, segments_in_flight: int) -> None:
    """Until all of a load was given, no step may be launched behind it."""
    for slices, awaited in [(9, 0), (11, 2), (12, 3), (13, 4), (40, 4)]:
        world = World(Pace(10, 1, bytes_in_flight, segments_in_flight, streams=1))
        failing = world.copy("failing", 30, urgency=Urgency.DEMAND)
        world.lane.fill()
        for _ in range(8):
            world.end("failing", error=OSError("injected"))
        assert world.lane.retire() == [failing]  # what was left of it is not left any more
        world.copy("a", slices)
        world.lane.fill()
        assert list(world.lane.awaited()) == [world.streams[0].fences[8 + awaited]]


def test_a_copy_that_waits_for_a_fence_does_not_wake_the_worker_early() -> None:
    world = World(Pace(slice_bytes=10, slice_segments=1, bytes_in_flight=80, segments_in_flight=100, streams=1))
    world.copy("a", 6)
    waiting = HandFence()
    world.copy("b", 1, after=(waiting,))
    world.lane.fill()
    assert list(world.lane.awaited()) == [world.streams[0].fences[3], waiting]


def test_a_copy_is_reported_at_its_last_slice_and_ends_after_all_slices() -> None:
    world = World(Pace(slice_bytes=1 << 20, slice_segments=2, bytes_in_flight=1 << 30, segments_in_flight=4, streams=1))
    copy = world.copy("a", 2, 3)
    assert world.lane.fill() == []  # two of three slices
    assert [len(fences) for fences in copy.fences] == [1, 1]
    world.end("a")
    assert world.lane.retire() == []
    assert world.lane.fill() == [copy]
    assert [[fence.tick for fence in fences] for fences in copy.fences] == [[1], [2, 3]]
    world.end("a")
    assert world.lane.retire() == []
    assert len(world.lane) == 1
    world.end("a")
    assert world.lane.retire() == [copy]
    assert (len(world.lane), copy.failure, copy.seconds) == (0, None, 0.0)


def test_time_of_a_copy_excludes_time_spent_on_earlier_copies() -> None:
    world = World()
    first, second = world.copy("a"), world.copy("b")
    world.lane.fill()
    world.now_s = 9.0
    world.end("a")
    world.lane.retire()
    world.now_s = 10.0
    world.end("b")
    world.lane.retire()
    assert (first.seconds, second.seconds) == (2.0, 1.0)
    third = world.copy("c")
    world.now_s = 20.0
    world.lane.fill()
    world.now_s = 20.5
    world.end("c")
    world.lane.retire()
    assert third.seconds == 0.5


def test_copies_that_end_together_share_the_time_by_bytes() -> None:
    world = World()
    copies = [world.copy("a", 3), world.copy("b", 1), world.copy("c", 4)]
    world.lane.fill()
    world.now_s = 9.0
    for label in "abc":
        world.end(label)
    assert world.lane.retire() == copies
    assert [copy.seconds for copy in copies] == [0.75, 0.25, 1.0]
    later = world.copy("d")
    world.lane.fill()
    world.now_s = 10.0
    world.end("d")
    world.lane.retire()
    assert later.seconds == 1.0


def test_a_failed_copy_ends_once_its_submitted_slices_are_done() -> None:  # H9, H15
    world = World(Pace(slice_bytes=1 << 20, slice_segments=1, bytes_in_flight=1 << 30, segments_in_flight=2, streams=2))
    copy, error = world.copy("a", 4), OSError("injected")
    world.lane.fill()
    world.end("a", error=error)
    assert world.lane.retire() == []
    assert world.lane.fill() == []
    world.end("a")
    assert world.lane.retire() == [copy]
    assert copy.failure is error
    assert len(world.given) == 2
    world.copy("b")
    world.lane.fill()
    assert world.labels() == ["a", "a", "b"]


def test_cancel_drops_queued_copies_and_waits_for_submitted_slices() -> None:
    world = World(Pace(slice_bytes=1 << 20, slice_segments=1, bytes_in_flight=1 << 30, segments_in_flight=3, streams=2))
    whole, begun, queued = world.copy("whole", 1), world.copy("begun", 4), world.copy("queued", 1)
    world.lane.fill()
    reason = RuntimeError("closed")
    assert world.lane.cancel(reason) == [queued]
    assert (whole.failure, begun.failure, queued.failure) == (None, reason, reason)
    assert world.lane.fill() == world.lane.retire() == []
    for label in ("whole", "begun", "begun"):
        world.end(label)
    assert set(world.lane.retire()) == {whole, begun}
    assert (len(world.lane), len(world.given)) == (0, 3)
    world.copy("later", 4)  # nothing is left of what was cut: one more ends, and it fits
    world.lane.fill()
    assert list(world.lane.awaited()) == [world.streams[1].fences[1]]


def test_the_worker_never_waits_for_a_finished_fence() -> None:
    """A full lane looks at nobody's waits; were it to name them, a thread that rests for them would spin."""
    world = World(Pace(slice_bytes=1 << 20, slice_segments=1, bytes_in_flight=1 << 30, segments_in_flight=1, streams=8))
    step = HandFence()
    world.copy("a")
    world.copy("b", after=(step,))
    world.lane.fill()
    step.done = True
    world.lane.retire()
    world.lane.fill()
    assert [fence.poll() for fence in world.lane.awaited()] == [False]


def test_a_turn_polls_few_of_100_000_queued_copies() -> None:
    world, step = World(Pace(1 << 20, 1, 1 << 30, 4, 2)), HandFence()
    shared = [batch(1, 10)]
    for _ in range(100_000):
        world.lane.add(Copy(shared, after=(step,), urgency=Urgency.STORE, label="waits"))
    world.copy("urgent", urgency=Urgency.DEMAND)
    for _ in range(10):
        world.lane.retire()
        world.lane.fill()
        list(world.lane.awaited())
    assert world.labels() == ["urgent"]
    assert step.looks <= 10 * 2 * 16


def test_a_begun_urgent_copy_runs_before_a_copy_that_began_earlier() -> None:
    world = World(Pace(slice_bytes=1 << 20, slice_segments=1, bytes_in_flight=1 << 30, segments_in_flight=2, streams=2))
    world.copy("store", 4)
    world.lane.fill()
    world.copy("load", 3, urgency=Urgency.DEMAND)
    for label in ("store", "store"):
        world.end(label)
        world.lane.retire()
        world.lane.fill()
    world.end("load")
    world.lane.retire()
    world.lane.fill()
    assert world.labels() == ["store", "store", "load", "load", "load"]
