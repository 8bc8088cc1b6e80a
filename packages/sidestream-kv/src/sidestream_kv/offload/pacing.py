"""Describes copies of KV blocks as byte ranges, and decides when each part of a copy is submitted to the device.

A lane is the queue for one copy direction: device to host, or host to device. The device executes copies in the order
of submission, so an urgent copy cannot overtake earlier copies. Therefore a lane cuts each copy into slices, keeps few
slices in flight, and queues the other slices by urgency. A copy consists of segments: byte ranges of one size. A fence
is a position on a stream, like a CUDA event.

A lane knows copies and streams, not blocks, keys or tiers. Only the offload worker's thread calls it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np

from sidestream_kv.device.base import CopyBatch, Stream
from sidestream_kv.kv.eight_bit import EightBitLayout
from sidestream_kv.offload.tiers.stack import BlockMemory
from sidestream_kv.types import Fence

# Maximum number of blocks whose transfer the worker begins in one turn of its loop, and number of blocks in a piece of
# a store. The limit keeps turns short, because the worker holds the GIL for about 3 us per block.
BLOCKS_PER_TURN = 16
# Size of the pieces of a load, and maximum size of its last piece. The last piece is copied layer by layer while the
# forward pass runs already, so its size is about the number of bytes that the link moves during one pass.
LOAD_PIECE_BYTES = 64 << 20
LAST_PIECE_BYTES = 384 << 20
# Only this many copies at the head of a queue are searched for a copy that is ready, because a queue may hold a hundred
# thousand copies.
_LOOK_AHEAD = 16


class Urgency(IntEnum):
    """Urgency of a copy. Copies with a lower number are submitted first."""

    DEMAND = 0
    PREFETCH = 1
    STORE = 2


@dataclass(frozen=True, slots=True)
class Pace:
    """Limits of one copy direction.

    slice_bytes, slice_segments           maximum size of a slice. One call submits one slice, and a call with 8,192
                                          segments takes 8 ms of the calling thread
    bytes_in_flight, segments_in_flight   maximum size of all slices in flight together, large enough to keep the link
                                          busy while the worker does other work
    streams                               number of streams, which alternate; each slice waits for the previous slice
    """

    slice_bytes: int
    slice_segments: int
    bytes_in_flight: int
    segments_in_flight: int
    streams: int


# Slices to the host alternate between two streams, and each slice waits for the previous slice on the other stream.
# While the device resolves this wait, the copy engine is free for a short time and can start a copy of a third stream.
# So a copy of another library waits for only one slice; with one stream, it would wait for all slices in flight
# (docs/decisions/0014-copies-are-paced.md).
TO_HOST = Pace(slice_bytes=18 << 20, slice_segments=512, bytes_in_flight=126 << 20, segments_in_flight=4096, streams=2)
# Slices to the device compete with no other copies, because the inputs of a step are fetched by kernels
# (docs/decisions/0018-numbers-go-up-by-kernels-and-steps-follow-loads.md). A step can be launched once its load was
# submitted completely. These limits are so large that this happens more than one step before the load ends.
TO_DEVICE = Pace(slice_bytes=32 << 20, slice_segments=512, bytes_in_flight=1 << 30, segments_in_flight=4096, streams=1)
# For an engine that copies the inputs of its steps to the device: such a copy waits for one slice, as it does TO_HOST.
TO_DEVICE_BESIDE_COPIES = Pace(
    slice_bytes=18 << 20, slice_segments=288, bytes_in_flight=1 << 30, segments_in_flight=4096, streams=2
)


class Copy:
    """One piece of a transfer: groups of segments, each group with its own fences. Only the lane that holds the copy
    changes it.

    after    fences that must be done before the first slice is submitted
    groups   groups of segments, which are copied one after another
    fences   fences of the submitted slices, by group
    failure  failure of the first slice that failed; no slice is submitted after that
    seconds  time that the link spent on the copy, once the copy is done. Copies that are found done at the same time
             share the elapsed time in proportion to their bytes
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
        self._left = sum(group.num_bytes for group in groups)  # bytes not submitted yet
        self._segments_left = sum(len(group.source_starts) for group in groups)
        self._in_flight = 0  # number of slices
        self._began_s = 0.0

    @property
    def submitted(self) -> bool:
        """Whether every slice was submitted, or the copy has failed."""
        return self._group == len(self.groups) or self.failure is not None  # rule: failed-copy-ends

    @property
    def done(self) -> bool:
        """Whether every slice was submitted (or the copy has failed), and the fences of all submitted slices are
        done.
        """
        return self.submitted and not self._in_flight  # rule: copy-is-done

    def is_ready(self) -> bool:
        """Whether the fences `after` are done. Never blocks."""
        while self._after and self._after[0].poll():  # rule: copy-drops-only-finished-fences
            del self._after[0]
        return not self._after


class _Slice(NamedTuple):
    """A submitted slice whose end the lane has not seen yet."""

    fence: Fence
    copy: Copy
    num_bytes: int
    num_segments: int


class Lane:
    """The queue for one copy direction: slices in flight, and a queue of copies for each urgency.

    streams   function that returns the stream with a given number, from 0 to `pace.streams` - 1
    """

    def __init__(self, pace: Pace, streams: Callable[[int], Stream], *, clock: Callable[[], float]) -> None:
        self._pace = pace
        self._streams = deque(
            streams(number) for number in range(pace.streams)
        )  # the next slice goes to the first stream
        self._clock = clock
        # Only the first copy of each queue may have submitted slices.
        self._queues: tuple[deque[Copy], ...] = tuple(deque() for _ in Urgency)
        self._in_flight: deque[_Slice] = deque()  # in the order in which the device executes them
        self._bytes = self._segments = 0  # bytes and segments in flight
        self._left = self._segments_left = 0  # bytes and segments of queued copies that were not submitted
        self._num_copies = 0
        self._last_end_s = 0.0

    def __len__(self) -> int:
        """Number of copies that are not done."""
        return self._num_copies

    def add(self, copy: Copy) -> None:
        """Queue a copy behind the other copies of its urgency."""
        self._queues[copy.urgency].append(copy)
        self._num_copies += 1
        self._left += copy._left
        self._segments_left += copy._segments_left

    def retire(self) -> list[Copy]:
        """Poll the slices in flight. Removes and returns the copies that have ended. Never blocks."""
        ended = []
        while self._in_flight and self._in_flight[0].fence.poll():  # rule: slice-counts-after-its-fence
            slice_ = self._in_flight.popleft()
            copy = slice_.copy
            self._bytes -= slice_.num_bytes
            self._segments -= slice_.num_segments
            copy._in_flight -= 1
            if slice_.fence.failure is not None and not copy.submitted:  # rule: failed-copy-submits-no-more-slices
                self._queues[copy.urgency].popleft()  # so that no further slice of this copy is submitted
                self._left -= copy._left
                self._segments_left -= copy._segments_left
            copy.failure = copy.failure or slice_.fence.failure  # rule: copy-fails-with-any-of-its-slices
            if copy.done:
                ended.append(copy)
        if ended:  # divide the time since the last end among the copies that have ended now, by bytes
            now_s, sizes = self._clock(), [sum(group.num_bytes for group in copy.groups) for copy in ended]
            seconds = now_s - max(min(copy._began_s for copy in ended), self._last_end_s)
            for copy, size in zip(ended, sizes, strict=True):
                copy.seconds = seconds * size / sum(sizes)
            self._last_end_s = now_s
        self._num_copies -= len(ended)
        return ended

    def fill(self) -> list[Copy]:
        """Submit as many slices as `pace` allows. Returns the copies whose last slice was submitted. Never blocks."""
        submitted = []
        while self._has_room and (copy := self._next_copy()) is not None:
            self._submit_slice(copy)
            if copy.submitted:  # rule: submitted-copy-leaves-its-queue
                self._queues[copy.urgency].popleft()
                submitted.append(copy)  # rule: load-is-ready-after-its-last-slice-was-submitted
        return submitted

    def cancel(self, reason: BaseException) -> list[Copy]:
        """Submit no further slice of any queued copy. Returns the copies without a slice in flight, which end now. The
        other copies end when their slices in flight have ended.
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
        """Fences whose end should wake the worker. Call it after `retire` and `fill`, which drop finished fences.

        If copies are queued, this is the fence of the slice in flight whose end makes space for more slices
        (`_wake_index`). If no copy is queued, it is the fence of the last slice of the oldest copy. If there is space
        for a slice, the first unfinished fence of each queued copy is returned as well.
        """
        if self._in_flight:
            yield self._in_flight[self._wake_index() if self.has_more else self._last_of_first()].fence
        if self._has_room:
            for queue in self._queues:
                for copy in islice(queue, _LOOK_AHEAD):
                    if copy._after:
                        yield copy._after[0]

    @property
    def has_more(self) -> bool:
        """Whether any copy has slices that were not submitted."""
        return any(self._queues)

    @property
    def runs_low(self) -> bool:
        """Whether less than half of the allowed bytes and segments are in flight."""
        return 2 * self._bytes < self._pace.bytes_in_flight and 2 * self._segments < self._pace.segments_in_flight

    def _wake_index(self) -> int:
        """Index of the slice in flight whose end wakes the worker. This is the middle slice, or an earlier slice if its
        end makes space for all queued copies: a step can be launched only when its load was submitted completely, so
        the worker then wakes as early as possible.
        """
        half, pace = len(self._in_flight) // 2, self._pace
        over, segments_over = (
            self._bytes + self._left - pace.bytes_in_flight,
            self._segments + self._segments_left - pace.segments_in_flight,
        )
        if over <= 0 and segments_over <= 0:
            return half  # there is room for everything queued, so the queued copies only wait for their fences
        for index, slice_ in enumerate(islice(self._in_flight, half)):
            over, segments_over = over - slice_.num_bytes, segments_over - slice_.num_segments
            if over <= 0 and segments_over <= 0:
                return index
        return half

    def _last_of_first(self) -> int:
        """Index of the last slice of the oldest copy in flight."""
        return self._in_flight[0].copy._in_flight - 1

    @property
    def _has_room(self) -> bool:
        """Whether there is space for a slice of full size. Always True if no slice is in flight."""
        pace = self._pace
        return not self._bytes or (
            self._bytes + pace.slice_bytes <= pace.bytes_in_flight
            and self._segments + pace.slice_segments <= pace.segments_in_flight
        )

    def _next_copy(self) -> Copy | None:
        """The most urgent copy that is ready; among equally urgent copies, the oldest. Moves it to the head of its
        queue.

        A copy is submitted only when its fences are done (hazards H1, H3 in docs/glossary.md). If the device waited for
        these fences, all later copies would wait, too.
        """
        for queue in self._queues:  # rule: urgent-copies-go-first
            for index, copy in enumerate(islice(queue, _LOOK_AHEAD)):
                if copy.is_ready():  # rule: copy-is-submitted-after-its-fences
                    if index:
                        del queue[index]
                        queue.appendleft(copy)
                    return copy
        return None

    def _submit_slice(self, copy: Copy) -> None:
        """Submit the next slice of `copy`. The device executes it after all slices that were submitted before."""
        stream, group = self._streams[0], copy.groups[copy._group]
        self._streams.rotate(-1)
        if not copy._group and not copy._segment:
            copy._began_s = self._clock()
        if self._in_flight and len(self._streams) > 1:
            stream.wait(self._in_flight[-1].fence)  # rule: slice-waits-for-the-one-before
        first, count = copy._segment, len(group.source_starts)
        most = max(1, min(self._pace.slice_segments, self._pace.slice_bytes // group.size))
        slices = -(-(count - first) // most)
        # Slices have equal sizes, because submitting a small slice at the end would take as long as a large slice.
        stop = first + -(-(count - first) // slices)
        fence = stream.submit_copy(group, first, stop, label=copy.label)
        copy.fences[copy._group].append(fence)
        copy._in_flight += 1
        num_bytes, num_segments = (stop - first) * group.size, stop - first
        self._in_flight.append(_Slice(fence, copy, num_bytes, num_segments))
        self._bytes += num_bytes
        self._left -= num_bytes
        self._segments_left -= num_segments
        copy._left -= num_bytes
        copy._segments_left -= num_segments
        self._segments += num_segments
        copy._segment = stop
        if stop == count:  # rule: copy-has-all-its-slices
            copy._group, copy._segment = copy._group + 1, 0


def layers_batch(
    source: BlockMemory,
    source_ids: Sequence[int],
    target: BlockMemory,
    target_ids: Sequence[int],
    layers: Sequence[int],
) -> CopyBatch:
    """A copy of some layers of each block: from `source_ids[i]` to the same layers of `target_ids[i]`. `layers` ascend,
    and are neighbours if their sizes differ.
    Neighbouring layers are one segment if all runs of neighbours have the same length, else several segments. They are
    packed, or unpacked, if only the target, or only the source, has an `EightBitLayout`.
    """
    breaks = [0, *(at for at in range(1, len(layers)) if layers[at] != layers[at - 1] + 1), len(layers)]
    size = math.gcd(*(stop - start for start, stop in pairwise(breaks)))
    sides = [
        (each.layout, each.layout.layer_borders, ids) for each, ids in ((source, source_ids), (target, target_ids))
    ]
    starts, targets = (
        np.add.outer(np.array(ids, np.int64) * layout.block_bytes, [borders[at] for at in layers[::size]]).ravel()
        for layout, borders, ids in sides
    )
    return CopyBatch(
        source.memory,
        target.memory,
        starts,
        targets,
        min(borders[layers[0] + size] - borders[layers[0]] for _, borders, _ in sides),
        packs=target.layout.packed if isinstance(target.layout, EightBitLayout) else None,
        unpacks=source.layout.packed if isinstance(source.layout, EightBitLayout) else None,
    )
