"""The interface of a device: streams that run work in order, fences, memory, and host threads.

A fence is a position on a stream; it is done when all work up to this position is done, like a CUDA event. Only fences
order the work of different streams. `Stream.submit` and `Stream.submit_copy` are the only ways to give work to a
device. The engine thread and the offload worker's thread call this interface. In tests, a tracer records every event
that the order of work depends on, and the memory that each piece of work accesses, to find races.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from mmap import mmap
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from sidestream_kv.device.channel import Bell
from sidestream_kv.device.eight_bit import pack, unpack
from sidestream_kv.errors import InvariantError
from sidestream_kv.types import Access, Accesses, Fence, Tracer, Vectors

Starts = npt.NDArray[np.int64]


def no_accesses() -> Sequence[Access]:
    """The accesses of work that neither reads nor writes shared memory."""
    return ()


def wait_in_capture(stream: str, fence: Fence) -> InvariantError:
    """The error for a wait during a capture: see `Stream.wait`."""
    return InvariantError(
        f"stream {stream} cannot wait for {fence!r} during a capture, because the graph's replays would not: wait for "
        "it before the replay, or use `wait_external`"
    )


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """Memory that streams read and write.

    name       identifies the memory in an `Access`
    parts      uint8 tensors on one device. Byte offsets are striped over the parts: each row has `stripes[i]` bytes of
               part `i`, one part after another. So a KV block has consecutive offsets even if each layer is a separate
               allocation
    stripes    bytes of a row in each part; not used if there is one part
    borders    where each part begins in a row, and where the row ends
    pageable   whether this is host memory that is not pinned: a copy from or to it would block the submitting thread
    """

    name: str
    parts: tuple[torch.Tensor, ...]
    stripes: tuple[int, ...] = ()
    pageable: bool = False
    borders: Starts = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "borders", np.cumsum((0, *self.stripes)))

    @property
    def num_bytes(self) -> int:
        """Size of all parts."""
        return sum(part.numel() for part in self.parts)

    @property
    def data(self) -> torch.Tensor:
        """All bytes, uint8 `[num_bytes]`. Only for memory with one part."""
        (part,) = self.parts
        return part

    def locate(self, starts: Starts) -> tuple[Starts, Starts]:
        """For each byte offset of `starts`, the index of its part and the offset inside that part."""
        if len(self.parts) == 1:
            return np.zeros_like(starts), starts
        rows, inside = np.divmod(starts, self.borders[-1])
        stops = self.borders.searchsorted(inside, side="right")
        begins = self.borders[stops - 1]
        return stops - 1, rows * (self.borders[stops] - begins) + inside - begins

    def cuts(self, starts: Starts, size: int) -> list[int]:
        """The offsets inside segments of `size` bytes at which they go on in the next part."""
        if len(self.parts) == 1 or not len(starts):
            return []
        stops = self.borders[1:2] if len(set(self.stripes)) == 1 else self.borders[1:]
        inside = starts % stops[-1]
        if (inside != inside[0]).any():  # rule: segments-are-cut-alike
            raise InvariantError(f"{self.name}: the segments of a copy begin at different places of their stripes")
        offsets = np.add.outer(np.arange(size // stops[-1] + 2) * stops[-1] - inside[0], stops).ravel()
        cuts: list[int] = offsets[(offsets > 0) & (offsets < size)].tolist()
        return cuts


@dataclass(frozen=True, slots=True, eq=False)
class CopyBatch:
    """Segments of equal size to copy from one memory to another, in any order. In striped memory, all of them begin at
    the same place of a stripe, and of a row if its stripes differ.

    source_starts, target_starts   int64 byte offsets, of equal length
    size                           bytes of each segment; those of its packed form, if it is packed or unpacked
    prepared                       data from `Device.prepare`; None: not prepared
    packs, unpacks                 the vectors of the segments, which are packed (or unpacked) on the way: see
                                   `kv/eight_bit.py`. Both memories then have one part
    """

    source: Memory
    target: Memory
    source_starts: Starts
    target_starts: Starts
    size: int
    prepared: object = None
    packs: Vectors | None = None
    unpacks: Vectors | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all segments, as they travel."""
        return len(self.source_starts) * self.size

    @property
    def converts(self) -> bool:
        """Whether the segments are packed or unpacked."""
        return self.packs is not None or self.unpacks is not None

    @property
    def source_size(self) -> int:
        """Bytes of each segment in the source."""
        return self.size if self.packs is None else self.size // self.packs.packed_bytes * self.packs.plain_bytes

    @property
    def target_size(self) -> int:
        """Bytes of each segment in the target."""
        return self.size if self.unpacks is None else self.size // self.unpacks.packed_bytes * self.unpacks.plain_bytes

    def part(self, first: int, stop: int) -> CopyBatch:
        """Segments `[first, stop)`."""
        sources, targets = self.source_starts[first:stop], self.target_starts[first:stop]
        return CopyBatch(self.source, self.target, sources, targets, self.size, packs=self.packs, unpacks=self.unpacks)

    def accesses(self) -> Sequence[Access]:
        """The byte ranges that the copy reads and writes."""
        name, size = self.source.name, self.source_size
        # rule: copy-declares-what-it-reads
        reads = [Access(name, start, start + size, False) for start in self.source_starts.tolist()]
        name, size = self.target.name, self.target_size
        # rule: copy-declares-what-it-writes
        return [*reads, *(Access(name, start, start + size, True) for start in self.target_starts.tolist())]

    def pieces(self) -> tuple[Starts, Starts, Starts]:
        """The segments, one after another, cut into pieces that are contiguous in both memories: where each piece
        begins in the source and in the target, and its size in bytes.
        """
        if self.converts and len(self.source.parts) + len(self.target.parts) > 2:
            raise InvariantError(f"{self.source.name} to {self.target.name}: striped KV cannot be packed or unpacked")
        sides = (self.source, self.source_starts), (self.target, self.target_starts)
        cuts = sorted({offset for memory, starts in sides for offset in memory.cuts(starts, self.size)})
        if not cuts:
            return self.source_starts, self.target_starts, np.full(len(self.source_starts), self.size)
        source, target = (np.add.outer(starts, [0, *cuts]).ravel() for _, starts in sides)
        return source, target, np.tile(np.diff([0, *cuts, self.size]), len(self.source_starts))

    def segments(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Contiguous segments as pairs `(source, target)` of uint8 tensors."""
        sources, targets, sizes = self.pieces()
        located = *self.source.locate(sources), *self.target.locate(targets), sizes
        for from_part, from_, to_part, to, size in zip(*(array.tolist() for array in located), strict=True):
            yield (
                self.source.parts[from_part][from_ : from_ + size + self.source_size - self.size],
                self.target.parts[to_part][to : to + size + self.target_size - self.size],
            )

    def converted(self, segment: torch.Tensor) -> torch.Tensor:
        """A segment of the source as the target holds it: packed, unpacked, or as it is."""
        if self.packs is not None:
            return pack(segment, self.packs)
        return segment if self.unpacks is None else unpack(segment, self.unpacks)

    def runs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The copy as pairs `(source, target)` of uint8 `[n, size]`. Each pair combines as many consecutive pieces as
        have the same size, and the same distance in source and target.
        """
        source_starts, target_starts, sizes = self.pieces()
        located = *self.source.locate(source_starts), *self.target.locate(target_starts), sizes
        first, count, steps = 0, len(sizes), _steps(*located)
        sources, targets = (
            [(part, part.storage_offset()) for part in memory.parts] for memory in (self.source, self.target)
        )
        pieces = zip(*(array.tolist() for array in located), strict=True)
        for index, (source_part, source_start, target_part, target_start, size) in enumerate(pieces):
            if index < first:
                continue
            step, first = steps[index], index + 1
            while step and first < count and steps[first - 1] == step:
                first += 1
            shape, stride = (first - index, size), (step or size, 1)
            (from_, from_offset), (to, to_offset) = sources[source_part], targets[target_part]
            yield (
                from_.as_strided(shape, stride, from_offset + source_start),
                to.as_strided(shape, stride, to_offset + target_start),
            )


def _steps(
    source_parts: Starts, source_starts: Starts, target_parts: Starts, target_starts: Starts, sizes: Starts
) -> list[int]:
    """Bytes from each piece to the next piece. 0 if this distance differs between source and target, if the next piece
    has another size or is in another part, and for the last piece.
    """
    step = np.diff(source_starts)
    alike = (np.diff(target_starts) == step) & (step >= sizes[:-1])
    for equal in (source_parts, target_parts, sizes):
        alike &= np.diff(equal) == 0
    return [*np.where(alike, step, 0).tolist(), 0]


@dataclass(frozen=True, slots=True)
class WakeUp:
    """When a host thread takes its next turn, unless it is woken earlier.

    fences    take the turn after any of these fences is done
    until_s   take the turn at this time on the device's clock
    """

    fences: Sequence[Fence] = ()
    until_s: float | None = None


class HostThread(Protocol):
    """A host thread that takes turns: in each turn, it calls a function once. It takes a turn when it is woken, and
    when the condition of the last turn's `WakeUp` holds.
    """

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended the thread; None while it takes turns."""
        ...

    def wake(self) -> None:
        """Make the thread take another turn soon. Never blocks. Any thread may call it."""
        ...

    def close(self) -> None:
        """End the thread after its current turn. Blocks until the thread has ended. Idempotent."""
        ...


class Graph(Protocol):
    """Captured work of a stream, like a CUDA graph. Each time it is enqueued, it runs again on the same memory."""

    def delete(self) -> None:
        """Free the graph's memory, even if there are other references to the graph. The graph must not be running, and
        cannot be enqueued afterwards. Idempotent.
        """
        ...


class GraphEvent(Protocol):
    """An event that graphs wait for when they are replayed. A wait applies to the most recent `record`; before the
    first `record`, a wait has no effect.
    """

    def record(self, stream: Any) -> Fence:
        """Record all work submitted to `stream` so far."""
        ...


class Stream(Protocol):
    """A queue of work that runs in order. Only fences order the work of two streams.

    Some methods may be called "inside work" only: by the function that was given to `submit`, while it runs.
    """

    @property
    def name(self) -> str:
        """Unique on its device. Also the name of the stream's track in the timeline."""
        ...

    def submit(self, work: Callable[[], None], accesses: Accesses = no_accesses, *, label: str = "") -> Fence:
        """Enqueue `work`. The fence is done when this work and all earlier work of the stream are done. Never blocks.

        `accesses` returns the byte ranges that the work reads and writes; it is called only if there is a tracer. If
        the work raises an exception, the fence keeps the exception, and later work still runs.
        """
        ...

    def wait(self, fence: Fence) -> None:
        """Make all work that is submitted after this call wait for `fence`, on the device. The caller does not wait.

        If it is called inside work of this stream, the rest of that work waits, too. Raises InvariantError inside
        `capture` for a fence of another stream: the graph would not wait, and CUDA would end the capture with error
        905 (capture isolation). Use `wait_external`.
        """
        ...

    def touch(self, accesses: Accesses) -> None:
        """Declare more byte ranges, which the work accesses from this point on. Inside work of this stream only. Inside
        captured work, `accesses` is called at each replay by `enqueue`.
        """
        ...

    def copy(self, batch: CopyBatch) -> None:
        """Copy the segments. Inside work of this stream only; the work declares `batch.accesses`."""
        ...

    def submit_copy(self, batch: CopyBatch, first: int, stop: int, *, label: str = "") -> Fence:
        """Submit a copy of segments `[first, stop)`. Faster than `submit` with work that calls `copy`."""
        ...

    def capture(self, build: Callable[[], None], *, beside: Any = None) -> Graph:
        """Capture everything that `build` submits to this stream, without running it. Blocks until the device is idle:
        call it before serving.

        `beside` is an earlier graph of this stream. Both graphs share the memory of temporary tensors, so they must not
        run at the same time.
        """
        ...

    def enqueue(self, graph: Any) -> None:
        """Run a graph of this stream after everything that the work has enqueued so far. Inside work of this stream
        only.
        """
        ...

    def wait_external(self, event: Any) -> None:
        """Make the rest of a graph wait for the most recent record of `event`, at each replay. Inside `capture` only.

        Raises InvariantError on a device without events (`Device.event`).
        """
        ...

    def on_side_stream(self, work: Callable[[], None]) -> None:
        """Enqueue `work` on a side stream. It runs after everything enqueued so far, and concurrently with later work
        until `join`. Inside work of this stream only.

        Until `join`, no other work may write the memory that `work` reads, or use the memory that it writes. A device
        may run `work` at once instead.
        """
        ...

    def join(self) -> None:
        """Make later work wait for the side stream. The work that used the side stream must call it before it ends."""
        ...

    def stamp(self, times: torch.Tensor) -> None:
        """Write the device's clock in ns to the first element of `times` (int64, on the device) when the work reaches
        this point. Inside work of this stream only.
        """
        ...

    def deliver(self, values: torch.Tensor, memory: Memory, start: int | torch.Tensor, *, further: int = 0) -> None:
        """Write `values`, contiguous on the device, to host memory at byte `start + further`, without queueing behind
        bulk copies. Inside work of this stream only; the work declares the write.

        For captured work, `start` is an int64 tensor `[1]` on the device that holds a multiple of 8. The host reads the
        bytes after the work's fence.
        """
        ...


class Device(Protocol):
    """Owns streams, memory and host threads, and counts how often the host waits."""

    @property
    def kind(self) -> str:
        """`"cpu"`, `"cuda"` or `"sim"`."""
        ...

    @property
    def segment_bytes(self) -> int:
        """Least size of a segment in the last piece of a load, whose segments hold some layers of a block. Smaller
        segments would be copied too slowly.
        """
        ...

    @property
    def torch_device(self) -> torch.device:
        """The torch device of the tensors that submitted work uses."""
        ...

    @property
    def tracer(self) -> Tracer | None:
        """Recorder of all events that the order of work depends on, in tests; None: nothing is recorded. The pools of
        this device's memory use it, too.
        """
        ...

    def stream(self, name: str) -> Stream:
        """A new stream; `name` must not be in use."""
        ...

    def worker(self, name: str) -> Stream:
        """A new stream for host work that may block, such as file I/O. Other streams cannot wait for the fences of this
        stream; the host polls them.
        """
        ...

    def thread(self, name: str, turn: Callable[[], WakeUp]) -> HostThread:
        """Start a thread that calls `turn` when it is woken, and when the condition of the last turn's `WakeUp`
        holds.
        """
        ...

    def event(self, name: str) -> GraphEvent:
        """A new event, not recorded yet. Raises InvariantError on a CPU, whose graphs cannot wait."""
        ...

    def prepare(self, batch: CopyBatch) -> CopyBatch:
        """The same batch with resolved addresses, so that submitting parts of it costs less."""
        ...

    def allocate(self, name: str, num_bytes: int) -> Memory:
        """Device memory. Raises ConfigError when it does not fit."""
        ...

    def allocate_host(self, name: str, num_bytes: int, *, item_bytes: int = 1) -> Memory:
        """Host memory for asynchronous copies. The first bytes are ready at once, and the others later: see
        `ready_bytes`.

        Memory becomes ready in chunks. No chunk begins or ends inside an item of `item_bytes`.
        """
        ...

    def adopt_host(self, name: str, pages: mmap, *, item_bytes: int = 1) -> Memory:
        """Like `allocate_host`, but of `pages`, which other processes have mapped, too. Changes none of their bytes."""
        ...

    def mapped(self, memory: Memory) -> torch.Tensor:
        """The ready bytes of host memory as a uint8 tensor that kernels of the device can read. Not for copies.

        The tensor shares the memory, so a kernel sees what the host has written before the kernel runs.
        """
        ...

    def ready_bytes(self, memory: Memory) -> int:
        """Number of bytes, from the start of `memory`, that can be copied asynchronously now. Never decreases."""
        ...

    def grows(self, memory: Memory) -> bool:
        """Whether `ready_bytes` will still increase. Call it before `ready_bytes`: after False, the number is final."""
        ...

    def wait_host(self, fence: Fence, *, reason: str, timeout_s: float | None = None, bell: Bell | None = None) -> bool:
        """Block this thread until `fence` is done; False after `timeout_s`, or when `bell` rings. The wait is counted
        under `reason`.

        A device may ignore the bell when the fence is almost done, because handling the bell would take longer than the
        remaining wait.
        """
        ...

    def host_waits(self) -> dict[str, int]:
        """How often a thread waited for an unfinished fence, by reason."""
        ...

    def now(self) -> float:
        """Seconds on the device's monotonic clock."""
        ...

    def sleep(self, seconds: float) -> None:
        """Block the calling thread for this time on the device's clock."""
        ...

    def trim_memory(self) -> None:
        """Return free memory to the system. The engine calls it when it becomes idle."""
        ...

    def close(self) -> None:
        """Run all submitted work, then end all streams and threads. Idempotent."""
        ...


class FenceOwner(Protocol):
    """The stream of a fence: it knows its own progress."""

    @property
    def name(self) -> str:
        """Name of the stream."""
        ...

    @property
    def done_tick(self) -> int:
        """Last position that is known to be done."""
        ...

    def has_passed(self, fence: Any) -> bool:
        """Whether `fence` is done. If so, tells the tracer that the calling thread has observed it."""
        ...


Owner = TypeVar("Owner", bound=FenceOwner)


class StreamFence(Generic[Owner]):
    """A position on one stream; done when the stream has passed it. `owner` distinguishes streams of equal names."""

    __slots__ = ("_failure", "_tick", "owner")

    def __init__(self, owner: Owner, tick: int) -> None:
        self.owner = owner
        self._tick = tick
        self._failure: BaseException | None = None

    @property
    def stream(self) -> str:
        """Name of the stream."""
        return self.owner.name

    @property
    def tick(self) -> int:
        """Position on the stream; 0 for work inside a captured graph."""
        return self._tick

    @property
    def failure(self) -> BaseException | None:
        """The exception that the work raised."""
        return self._failure

    def poll(self) -> bool:
        """Whether the stream has passed this position. Never blocks. Raises DeviceLost if the stream has failed and
        will never pass it.
        """
        return self.owner.has_passed(self)

    def fail(self, error: BaseException) -> None:
        """Set the failure. Clears the local variables in its traceback, which may hold tensors and leases (hazard H24
        in docs/glossary.md).
        """
        for raised in (error, error.__cause__):
            if raised is not None:
                traceback.clear_frames(raised.__traceback__)
        self._failure = error

    def __repr__(self) -> str:
        return f"fence({self.stream}:{self.tick}{' done' if 0 < self.tick <= self.owner.done_tick else ''})"
