"""How much of which transfer is given to the device when: one lane for each direction of the link.

What the device was given it does in the order in which it got it, whatever comes later and however urgent; so it is
given little at a time, and the rest waits here, in order of urgency. Knows copies and streams, never blocks, keys or
tiers. Called from the mover's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from typing import NamedTuple

from sidestream.device.base import CopyBatch, Stream
from sidestream.types import Fence

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
    bytes_in_flight, segments_in_flight   given and not seen done: so long is the mover's thread free to do something
                                          else
    streams                               take the slices in turn, each behind the one before
    """

    slice_bytes: int
    slice_segments: int
    bytes_in_flight: int
    segments_in_flight: int
    streams: int


# To the host, by two streams in turn: whenever a slice ends, the copy engine finds its stream waiting for another
# one's, and looks whether anybody else has something for it. So a foreign copy waits for one slice, however many are in
# flight (docs/decisions/0014); by one stream it would wait for all of them (P5).
TO_HOST = Pace(slice_bytes=18 << 20, slice_segments=512, bytes_in_flight=126 << 20, segments_in_flight=4096, streams=2)
# To the device nobody else copies: what a step needs of the host is fetched by kernels (docs/decisions/0018). And the
# more of a load has been given, the sooner a step can be launched behind it: a step and more before the load's end.
TO_DEVICE = Pace(slice_bytes=32 << 20, slice_segments=512, bytes_in_flight=1 << 30, segments_in_flight=4096, streams=1)


class Copy:
    """One transfer's share of a lane: groups of segments, each with fences of its own. Single writer: its lane.

    after    what must be seen done before the first byte is given to the device
    groups   copied one after another
    fences   by group, of the slices that were submitted so far
    failure  of the first slice that failed; what was not submitted by then never is
    seconds  for which the lane had nothing else to do before it, once it is done; its share of them, if others ended
             with it
    """

    def __init__(self, groups: Sequence[CopyBatch], *, after: Sequence[Fence], urgency: Urgency, label: str) -> None:
        self.urgency = urgency
        self.label = label
        self.fences: list[list[Fence]] = [[] for _ in groups]
        self.failure: BaseException | None = None
        self.seconds = 0.0
        self.groups = groups
        self._after = list(after)
        self._group = self._segment = 0
        self._left = sum(group.num_bytes for group in groups)  # not submitted yet
        self._segments_left = sum(len(group.source_starts) for group in groups)
        self._flying = 0  # slices
        self._began_s = 0.0

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


class _Slice(NamedTuple):
    """Given to the device, and not seen done."""

    fence: Fence
    copy: Copy
    num_bytes: int
    num_segments: int


class Lane:
    """One direction of the link: a FIFO on the device, and queues before it.

    streams   makes a stream, by its number, below `pace.streams`
    """

    def __init__(self, pace: Pace, streams: Callable[[int], Stream], *, clock: Callable[[], float]) -> None:
        self._pace = pace
        self._streams = deque(streams(number) for number in range(pace.streams))  # the next slice goes to the first one
        self._clock = clock
        self._queues: tuple[deque[Copy], ...] = tuple(deque() for _ in Urgency)  # the first one of each may have begun
        self._flying: deque[_Slice] = deque()  # in the order in which the device does them
        self._bytes = self._segments = 0  # of these
        self._left = self._segments_left = 0  # bytes and segments that the device was not given yet
        self._num_copies = 0
        self._last_end_s = 0.0

    def __len__(self) -> int:
        """Copies that are not done."""
        return self._num_copies

    def add(self, copy: Copy) -> None:
        """Queue a copy behind those of its urgency."""
        self._queues[copy.urgency].append(copy)
        self._num_copies += 1
        self._left += copy._left
        self._segments_left += copy._segments_left

    def retire(self) -> list[Copy]:
        """Look at what is on the device; the copies that have ended, which are the lane's no more. Never blocks."""
        ended = []
        while self._flying and self._flying[0].fence.poll():
            slice_ = self._flying.popleft()
            copy = slice_.copy
            self._bytes -= slice_.num_bytes
            self._segments -= slice_.num_segments
            copy._flying -= 1
            if slice_.fence.failure is not None and not copy.submitted:
                self._queues[copy.urgency].popleft()  # it is given nothing more
                self._left -= copy._left
                self._segments_left -= copy._segments_left
            copy.failure = copy.failure or slice_.fence.failure
            if copy.done:
                ended.append(copy)
        if ended:  # what was seen done at once shares the time by bytes
            now_s, sizes = self._clock(), [sum(group.num_bytes for group in copy.groups) for copy in ended]
            seconds = now_s - max(min(copy._began_s for copy in ended), self._last_end_s)
            for copy, size in zip(ended, sizes, strict=True):
                copy.seconds = seconds * size / sum(sizes)
            self._last_end_s = now_s
        self._num_copies -= len(ended)
        return ended

    def fill(self) -> list[Copy]:
        """Give the device as much as it may have; the copies of which the last slice was given now. Never blocks."""
        given = []
        while self._has_room and (copy := self._next()) is not None:
            self._give(copy)
            if copy.submitted:
                self._queues[copy.urgency].popleft()
                given.append(copy)
        return given

    def cut(self, reason: BaseException) -> list[Copy]:
        """Give the device nothing more of what is here. The copies of which it has nothing, which are the lane's no
        more; the others end by their fences.
        """
        queued = [copy for queue in self._queues for copy in queue]
        for queue in self._queues:
            queue.clear()
        self._left = self._segments_left = 0
        for copy in queued:
            copy.failure = reason
        dropped = [copy for copy in queued if copy.done]
        self._num_copies -= len(dropped)
        return dropped

    def awaited(self) -> Iterator[Fence]:
        """Fences that, done, let the lane get on: if there is more, half of what is in flight, or as much as makes room
        for all the rest; else a copy's last slice; and what somebody waits for.

        Behind `fill`, which saw that they were not: a thread that rests for one that is done spins.
        """
        if self._flying:
            yield self._flying[self._enough() if self.has_more else self._end_of_first()].fence
        if self._has_room:
            for queue in self._queues:
                for copy in islice(queue, _LOOK_AHEAD):
                    if copy._after:
                        yield copy._after[0]

    @property
    def has_more(self) -> bool:
        """Whether there is something to give besides what the device was given."""
        return any(self._queues)

    @property
    def runs_low(self) -> bool:
        """Whether less than half of what may be in flight is."""
        return 2 * self._bytes < self._pace.bytes_in_flight and 2 * self._segments < self._pace.segments_in_flight

    def _enough(self) -> int:
        """Which of those in flight is worth to be woken for. Not half of them for the end of a load: until all of it
        was given, no step may follow it.
        """
        half, pace = len(self._flying) // 2, self._pace
        over, segments_over = (
            self._bytes + self._left - pace.bytes_in_flight,
            self._segments + self._segments_left - pace.segments_in_flight,
        )
        if over <= 0 and segments_over <= 0:
            return half  # there is room for all of it: it waits for something else
        for index, slice_ in enumerate(islice(self._flying, half)):
            over, segments_over = over - slice_.num_bytes, segments_over - slice_.num_segments
            if over <= 0 and segments_over <= 0:
                return index
        return half

    def _end_of_first(self) -> int:
        """Which of those in flight is the last slice of the copy that comes first."""
        return self._flying[0].copy._flying - 1

    @property
    def _has_room(self) -> bool:
        """Whether a slice fits, as large as they come; one always does when there is none."""
        pace = self._pace
        return not self._bytes or (
            self._bytes + pace.slice_bytes <= pace.bytes_in_flight
            and self._segments + pace.slice_segments <= pace.segments_in_flight
        )

    def _next(self) -> Copy | None:
        """The copy to be given a slice of: of the most urgent ones that can begin the one that came first, brought to
        the head of its queue.

        One that would have to wait is given nothing (H1, H3): on the device it would hold up all that comes behind it.
        """
        for queue in self._queues:
            for index, copy in enumerate(islice(queue, _LOOK_AHEAD)):
                if copy.is_ready():
                    if index:
                        del queue[index]
                        queue.appendleft(copy)
                    return copy
        return None

    def _give(self, copy: Copy) -> None:
        """Submit the next slice of a copy, behind the slice before it, whosever that was."""
        stream, group = self._streams[0], copy.groups[copy._group]
        self._streams.rotate(-1)
        if not copy._group and not copy._segment:
            copy._began_s = self._clock()
        if self._flying and len(self._streams) > 1:
            stream.wait(self._flying[-1].fence)
        first, count = copy._segment, len(group.source_starts)
        most = max(1, min(self._pace.slice_segments, self._pace.slice_bytes // group.size))
        slices = -(-(count - first) // most)
        stop = first + -(
            -(count - first) // slices
        )  # slices of one size: a small one at the end costs as much time to give
        fence = stream.submit_copy(group, first, stop, label=copy.label)
        copy.fences[copy._group].append(fence)
        copy._flying += 1
        num_bytes, num_segments = (stop - first) * group.size, stop - first
        self._flying.append(_Slice(fence, copy, num_bytes, num_segments))
        self._bytes += num_bytes
        self._left -= num_bytes
        self._segments_left -= num_segments
        copy._left -= num_bytes
        copy._segments_left -= num_segments
        self._segments += num_segments
        copy._segment = stop
        if stop == count:
            copy._group, copy._segment = copy._group + 1, 0
