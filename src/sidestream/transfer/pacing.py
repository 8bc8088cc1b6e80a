"""How much of which transfer is given to the device when: one lane for each direction of the link.

What the device was given it does in the order in which it got it, whatever comes later and however urgent; so it is given little at a
time, and the rest waits here, in order of urgency. Knows copies and streams, never blocks, keys or tiers. Called from the mover's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice

from sidestream.device.base import CopyBatch, Stream
from sidestream.types import Fence

# So many copies are given slices in turn: on one stream, each batch waits for the end of the one before, and the link for the batch.
_ABREAST = 2
# So many of a queue are looked at for one that can begin, each time: the queue may hold a hundred thousand.
_LOOK_AHEAD = 16


class Urgency(IntEnum):
    """What goes first."""

    DEMAND = 0
    PREFETCH = 1
    STORE = 2


@dataclass(frozen=True, slots=True)
class Pace:
    """What one direction of the link is given at most.

    slice_bytes, slice_segments           one call: a batch of 8,192 segments costs the calling thread 8 ms (P9)
    bytes_in_flight, segments_in_flight   given and not seen done: whoever else copies in this direction waits for as long as that takes (P5)
    streams                               transfers that are on the device at a time, each on a stream of its own
    """

    slice_bytes: int
    slice_segments: int
    bytes_in_flight: int
    segments_in_flight: int
    streams: int


# bench/results/transfer-h100.json, mailbox-h100.json: two slices of 9 MiB keep the link busy from a thread written in Python, and a small copy of
# somebody else's waits for 0.3 ms. Small copies to the device do not wait for big ones, so that direction may have more.
TO_HOST = Pace(slice_bytes=9 << 20, slice_segments=512, bytes_in_flight=18 << 20, segments_in_flight=1024, streams=8)
TO_DEVICE = Pace(slice_bytes=32 << 20, slice_segments=512, bytes_in_flight=96 << 20, segments_in_flight=1536, streams=8)


class Copy:
    """One transfer's share of a lane: groups of segments, each with fences of its own. Single writer: its lane.

    after    what must be done before the first byte moves
    groups   copied one after another
    fences   by group, of the slices that were submitted so far
    failure  of the first slice that failed; what was not submitted by then never is
    """

    def __init__(self, groups: Sequence[CopyBatch], *, after: Sequence[Fence], urgency: Urgency, label: str) -> None:
        self.urgency = urgency
        self.label = label
        self.fences: list[list[Fence]] = [[] for _ in groups]
        self.failure: BaseException | None = None
        self.began_s: float | None = None
        self.groups = groups
        self._after = list(after)
        self._group = self._segment = 0
        self._flying: deque[tuple[Fence, int, int]] = deque()  # with bytes and segments
        self._stream: Stream | None = None

    @property
    def submitted(self) -> bool:
        """Whether every slice was given to the device, or none will be any more."""
        return self._group == len(self.groups) or self.failure is not None

    @property
    def done(self) -> bool:
        """Whether every slice that was submitted was seen done, and no other comes."""
        return self.submitted and not self._flying

    def is_ready(self) -> bool:
        """Whether what it has to wait for is done. Never blocks."""
        while self._after and self._after[0].poll():
            del self._after[0]
        return not self._after


class Lane:
    """One direction of the link.

    streams   makes a stream, by its number; asked for `pace.streams` at most, each when it is needed first
    """

    def __init__(self, pace: Pace, streams: Callable[[int], Stream], *, clock: Callable[[], float]) -> None:
        self._pace = pace
        self._make_stream = streams
        self._num_streams = 0
        self._clock = clock
        self._idle_streams: list[Stream] = []
        self._queues: tuple[deque[Copy], ...] = tuple(deque() for _ in Urgency)
        self._open: list[Copy] = []  # have a stream, in the order in which they got it
        self._bytes = self._segments = 0  # given and not seen done

    def __len__(self) -> int:
        """Copies that are not done."""
        return len(self._open) + sum(map(len, self._queues))

    def add(self, copy: Copy) -> None:
        """Queue a copy behind those of its urgency."""
        self._queues[copy.urgency].append(copy)

    def retire(self) -> list[Copy]:
        """Look at what is on the device; the copies that have ended, which are the lane's no more. Never blocks."""
        for copy in self._open:
            while copy._flying and copy._flying[0][0].poll():
                fence, num_bytes, num_segments = copy._flying.popleft()
                self._bytes -= num_bytes
                self._segments -= num_segments
                copy.failure = copy.failure or fence.failure
        ended = [copy for copy in self._open if copy.done]
        for copy in ended:
            self._open.remove(copy)
            assert copy._stream is not None
            self._idle_streams.append(copy._stream)
        return ended

    def fill(self) -> list[Copy]:
        """Give the device as much as it may have; the copies of which the last slice was given now. Never blocks."""
        given = []
        while self._has_room and (copy := self._next()) is not None:
            self._give(copy)
            if copy.submitted:
                given.append(copy)
        return given

    def cut(self, reason: BaseException) -> list[Copy]:
        """Give the device nothing more of what is here. The copies of which it has nothing, which are the lane's no more; the others end by their fences."""
        dropped = [copy for queue in self._queues for copy in queue]
        for queue in self._queues:
            queue.clear()
        for copy in (*dropped, *(copy for copy in self._open if not copy.submitted)):
            copy.failure = reason
        return dropped

    def awaited(self) -> Iterator[Fence]:
        """Fences that, done, let the lane get on. Behind `fill`, which saw that they were not: a thread that rests for one that is done spins."""
        for copy in self._open:
            if copy._flying:
                yield copy._flying[0][0]
        if self._has_room and self._has_stream:
            for queue in self._queues:
                for copy in islice(queue, _LOOK_AHEAD):
                    if copy._after:
                        yield copy._after[0]

    @property
    def has_more(self) -> bool:
        """Whether there is something to give besides what the device was given."""
        return any(self._queues) or any(not copy.submitted for copy in self._open)

    def soonest(self) -> Fence | None:
        """The slice that will be done first, if it has begun: within a fraction of a millisecond."""
        return next((copy._flying[0][0] for copy in self._open if copy._flying and not copy._after), None)

    @property
    def _has_room(self) -> bool:
        """Whether a slice fits, as large as they come; one always does when there is none."""
        pace = self._pace
        return not self._bytes or (
            self._bytes + pace.slice_bytes <= pace.bytes_in_flight and self._segments + pace.slice_segments <= pace.segments_in_flight
        )

    @property
    def _has_stream(self) -> bool:
        return bool(self._idle_streams) or self._num_streams < self._pace.streams

    def _next(self) -> Copy | None:
        """The copy to be given a slice of: of the most urgent ones abreast that with the fewest on their way.

        One that must wait on the device gives no more than its first slice, and is begun only if there is nothing else.
        """
        abreast = [copy for copy in self._open if not copy.submitted and (not copy._flying or copy.is_ready())]
        best = min(abreast, key=_turn, default=None)
        if self._has_stream:
            more_urgent = len(Urgency) if best is None else best.urgency + (len(abreast) < _ABREAST)
            for queue in self._queues[:more_urgent]:
                for index, copy in enumerate(islice(queue, _LOOK_AHEAD)):
                    if copy.is_ready() or not self._open:
                        del queue[index]
                        return self._begin(copy)
        return best

    def _begin(self, copy: Copy) -> Copy:
        """Give a copy its stream, which waits for what is not done yet (H1, H3)."""
        if not self._idle_streams:
            self._idle_streams.append(self._make_stream(self._num_streams))
            self._num_streams += 1
        stream = copy._stream = self._idle_streams.pop()
        for fence in copy._after:
            stream.wait(fence)
        copy.began_s = self._clock()
        self._open.append(copy)
        return copy

    def _give(self, copy: Copy) -> None:
        """Submit the next slice of a copy that has a stream."""
        stream, group = copy._stream, copy.groups[copy._group]
        assert stream is not None
        first, count = copy._segment, len(group.source_starts)
        most = max(1, min(self._pace.slice_segments, self._pace.slice_bytes // group.size))
        slices = -(-(count - first) // most)
        stop = first + -(-(count - first) // slices)  # slices of one size: a small one at the end costs as much time to give
        fence = stream.submit_copy(group, first, stop, label=copy.label)
        copy.fences[copy._group].append(fence)
        copy._flying.append((fence, (stop - first) * group.size, stop - first))
        self._bytes += (stop - first) * group.size
        self._segments += stop - first
        copy._segment = stop
        if stop == count:
            copy._group, copy._segment = copy._group + 1, 0


def _turn(copy: Copy) -> tuple[Urgency, int]:
    return copy.urgency, len(copy._flying)
