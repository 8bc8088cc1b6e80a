"""What a device offers: streams that run work in order, fences between them, memory, and threads of the host that drive
them.

`stream.submit(work, accesses)` is the only door to the device. Called from the engine thread and from the mover's
thread; work runs wherever the device runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from sidestream.device.channel import Bell
from sidestream.types import Access, Accesses, Fence, Tracer

Starts = npt.NDArray[np.int64]


def no_accesses() -> Sequence[Access]:
    """Of work that touches no shared memory."""
    return ()


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """Bytes that streams touch, under the name that accesses use.

    parts      uint8 tensors of equal size, on one device. Offsets run through all of them: each `stripe` bytes in turn
               lie in the next part, so that a block of layers that were allocated one by one has consecutive offsets,
               like a block of one allocation
    stripe     bytes; with one part it says nothing
    pageable   host memory that the device cannot copy from or to by itself: such a copy stalls the thread that asks for
               it (P1)
    """

    name: str
    parts: tuple[torch.Tensor, ...]
    stripe: int = 0
    pageable: bool = False

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return sum(part.numel() for part in self.parts)

    @property
    def data(self) -> torch.Tensor:
        """All of it, uint8 `[num_bytes]`. Of memory in one part only."""
        (part,) = self.parts
        return part

    def locate(self, starts: Starts) -> tuple[Starts, Starts]:
        """Part and offset inside it of each start."""
        if len(self.parts) == 1:
            return np.zeros_like(starts), starts
        stripes, inside = np.divmod(starts, self.stripe)
        rows, parts = np.divmod(stripes, len(self.parts))
        return parts, rows * self.stripe + inside


@dataclass(frozen=True, slots=True, eq=False)
class CopyBatch:
    """Segments of one size, copied from one memory to another in one call: pair by pair, in no particular order.

    source_starts, target_starts   int64 byte offsets, as many of one as of the other
    size                           bytes of each segment
    prepared                       what the device made of it (`Device.prepare`)
    """

    source: Memory
    target: Memory
    source_starts: Starts
    target_starts: Starts
    size: int
    prepared: object = None

    @property
    def num_bytes(self) -> int:
        """Of all segments together."""
        return len(self.source_starts) * self.size

    def part(self, first: int, stop: int) -> CopyBatch:
        """Some of the segments."""
        return CopyBatch(
            self.source, self.target, self.source_starts[first:stop], self.target_starts[first:stop], self.size
        )

    def accesses(self) -> Sequence[Access]:
        """What the copy reads and writes."""
        reads = [Access(self.source.name, start, start + self.size, False) for start in self.source_starts.tolist()]
        return [
            *reads,
            *(Access(self.target.name, start, start + self.size, True) for start in self.target_starts.tolist()),
        ]

    def contiguous(self) -> CopyBatch:
        """The same bytes in segments that lie in one piece each: cut at the stripes of both memories."""
        stripes = [
            memory.stripe
            for memory in (self.source, self.target)
            if len(memory.parts) > 1 and memory.stripe < self.size
        ]
        if not stripes:
            return self
        piece = min(stripes)
        offsets = np.arange(0, self.size, piece, dtype=np.int64)
        source, target = ((starts[:, None] + offsets).ravel() for starts in (self.source_starts, self.target_starts))
        return CopyBatch(self.source, self.target, source, target, piece)

    def segments(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The segments as pairs `(source, target)` of uint8, each in one piece."""
        batch = self.contiguous()
        for (from_part, from_), (to_part, to) in zip(
            *(
                zip(*(array.tolist() for array in memory.locate(starts)), strict=True)
                for memory, starts in ((batch.source, batch.source_starts), (batch.target, batch.target_starts))
            ),
            strict=True,
        ):
            yield (
                batch.source.parts[from_part][from_ : from_ + batch.size],
                batch.target.parts[to_part][to : to + batch.size],
            )

    def runs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The bytes as pairs `(source, target)` of uint8 `[n, size]`, one for each run of segments with equal steps in
        both.
        """
        batch = self.contiguous()
        (source_parts, source_starts), (target_parts, target_starts) = (
            memory.locate(starts)
            for memory, starts in ((batch.source, batch.source_starts), (batch.target, batch.target_starts))
        )
        first, count, size = 0, len(batch.source_starts), batch.size
        steps = _steps(source_parts, source_starts, target_parts, target_starts, size)
        sources, targets = (
            [(part, part.storage_offset()) for part in memory.parts] for memory in (batch.source, batch.target)
        )
        located = zip(
            *(array.tolist() for array in (source_parts, source_starts, target_parts, target_starts)), strict=True
        )
        for index, (source_part, source_start, target_part, target_start) in enumerate(located):
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
    source_parts: Starts, source_starts: Starts, target_parts: Starts, target_starts: Starts, size: int
) -> list[int]:
    """Bytes from each segment to the next, if it is the same forward step inside one part of both memories; else 0, as
    behind the last one.
    """
    step = np.diff(source_starts)
    alike = (
        (np.diff(source_parts) == 0) & (np.diff(target_parts) == 0) & (np.diff(target_starts) == step) & (step >= size)
    )
    return [*np.where(alike, step, 0).tolist(), 0]


@dataclass(frozen=True, slots=True)
class Rest:
    """What a thread of the host waits for between two turns, besides being woken.

    fences   when one of them is done, the next turn comes
    until_s  on the device's clock: then it comes at the latest
    """

    fences: Sequence[Fence] = ()
    until_s: float | None = None


class HostThread(Protocol):
    """A thread of the host besides the engine's, that takes turns whenever there may be something to do."""

    @property
    def failure(self) -> BaseException | None:
        """What a turn raised; then there are no more turns."""
        ...

    def wake(self) -> None:
        """Have another turn soon. Never blocks; any thread."""
        ...

    def close(self) -> None:
        """End behind the turn that runs now, if any; what one more turn would do is left to the caller. Blocks.
        Idempotent.
        """
        ...


class Graph(Protocol):
    """Work that was captured on a stream: it runs again on the same memory, as often as it is enqueued."""


class Stream(Protocol):
    """A FIFO of work. Order holds inside one stream; between streams only fences order anything."""

    @property
    def name(self) -> str:
        """Unique on its device; the timeline's track."""
        ...

    def submit(self, work: Callable[[], None], accesses: Accesses = no_accesses, *, label: str = "") -> Fence:
        """Enqueue `work` and return the fence that covers it and everything before it. Never blocks.

        `accesses` says which byte ranges the work reads and writes, to a device that has a tracer. What the work raises
        is kept in the fence; later work on the stream still runs.
        """
        ...

    def wait(self, fence: Fence) -> None:
        """Order everything submitted after this call behind `fence`, on the device; the caller does not wait.

        Called from inside work that runs on this very stream, it takes effect at that point of the work.
        """
        ...

    def touch(self, accesses: Accesses) -> None:
        """Declare what the work touches from here on, when not all of it may be touched from the start. Inside work of
        this stream.
        """
        ...

    def copy(self, batch: CopyBatch) -> None:
        """Copy the segments. Inside work of this stream; the work declares `batch.accesses`."""
        ...

    def submit_copy(self, batch: CopyBatch, first: int, stop: int, *, label: str = "") -> Fence:
        """Enqueue a copy of segments `[first, stop)` and nothing else: `submit` of `copy`, for less of the caller's
        time.
        """
        ...

    def capture(self, build: Callable[[], None], *, beside: Any = None) -> Graph:
        """What `build` submits to this stream, as a graph; nothing runs. Blocks until the device is idle: before
        serving only.

        `beside` is a graph of this stream's with which it shares memory for what is only needed while it runs: the two
        never run at once.
        """
        ...

    def enqueue(self, graph: Any) -> None:
        """Run everything in the graph, which this stream captured, behind what its work enqueued so far. Inside work of
        this stream.
        """
        ...

    def aside(self, work: Callable[[], None]) -> None:
        """Enqueue `work` behind what was enqueued so far, what is aside included, and beside what comes next, until
        `join`. Inside work of this stream.

        Until then what it reads stays as it is, and what it writes is left alone: it may have run at once, or not
        begun. A device may have no second stream for it.
        """
        ...

    def join(self) -> None:
        """Have what comes next wait for all that is aside. Inside the same work, which must not end before."""
        ...

    def stamp(self, times: torch.Tensor) -> None:
        """Write the device's clock, in ns, into the first of `times`, int64 on the device, when the work gets here.
        Inside work of this stream.
        """
        ...

    def deliver(self, values: torch.Tensor, memory: Memory, start: int | torch.Tensor, *, further: int = 0) -> None:
        """Write the bytes of `values`, contiguous and on the device, to host memory, past the queue of bulk copies
        (P5): `further` bytes behind `start`, which is a number or, for work that is captured, int64 `[1]` on the
        device, a multiple of 8.

        Inside work of this stream; the work declares the write. The host reads them behind the work's fence.
        """
        ...


class Device(Protocol):
    """Owns streams and memory; counts what the host waits for."""

    @property
    def kind(self) -> str:
        """`"cpu"`, `"cuda"` or `"sim"`."""
        ...

    @property
    def segment_bytes(self) -> int:
        """Segments of fewer bytes waste its copies. A fact of the hardware: where it could cut finer, nobody should."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """Where tensors of its streams' work live."""
        ...

    @property
    def tracer(self) -> Tracer | None:
        """Who is told of everything that ordering depends on; pools of this device's memory tell it, too."""
        ...

    def stream(self, name: str) -> Stream:
        """A new stream; `name` must not be in use."""
        ...

    def worker(self, name: str) -> Stream:
        """A new stream for work of the host, such as files: a thread that may block. It must be seen done, not waited
        for, by other streams.
        """
        ...

    def thread(self, name: str, turn: Callable[[], Rest]) -> HostThread:
        """Start a thread that calls `turn` whenever it was woken, or what the last turn rests for has happened."""
        ...

    def prepare(self, batch: CopyBatch) -> CopyBatch:
        """The same batch, of which parts can be copied at little cost: whatever can be worked out for all of it at once
        is.
        """
        ...

    def allocate(self, name: str, num_bytes: int) -> Memory:
        """Device memory. Raises ConfigError when it does not fit."""
        ...

    def allocate_host(self, name: str, num_bytes: int, *, item_bytes: int = 1) -> Memory:
        """Host memory that the device can copy from and to asynchronously, its beginning at first, all of it in time
        (P7): see `ready_bytes`.

        No multiple of `item_bytes` is cut by a border between what is ready and what is not, nor by one inside what is
        ready.
        """
        ...

    def mapped(self, memory: Memory) -> torch.Tensor:
        """Host memory as kernels of the device see it: uint8 `[num_bytes]`, what is ready of it, the same bytes.

        For kernels only, which read it when they run: a copy between the two goes through the copy engine. Whoever
        writes it on the host meanwhile changes what they read.
        """
        ...

    def ready_bytes(self, memory: Memory) -> int:
        """How many bytes of host memory, from its start on, can be copied asynchronously by now. Never falls."""
        ...

    def grows(self, memory: Memory) -> bool:
        """Whether `ready_bytes` will rise. Ask before reading `ready_bytes`: after False, that is final."""
        ...

    def wait_host(self, fence: Fence, *, reason: str, timeout_s: float | None = None, bell: Bell | None = None) -> bool:
        """Block this thread until `fence` is done; False when `timeout_s` passed first, or somebody rang `bell`.
        Counted under `reason`.

        The fence's end is noticed no later for a bell, but for what is done when it rings: where that takes the
        thread's whole attention, nobody listens.
        """
        ...

    def host_waits(self) -> dict[str, int]:
        """How often a thread waited for a fence that was not done yet, by reason."""
        ...

    def now(self) -> float:
        """Seconds on the device's clock, which never goes back."""
        ...

    def sleep(self, seconds: float) -> None:
        """Hold this thread up for so long, by the device's clock."""
        ...

    def rest(self) -> None:
        """Nothing is on its way, nor was a moment ago: give memory that is free back to the system."""
        ...

    def close(self) -> None:
        """Run what was submitted, then end the streams. Idempotent."""
        ...
