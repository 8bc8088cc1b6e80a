"""What a device offers: streams that run work in order, fences between them, and memory.

`stream.submit(work, accesses)` is the only door to the device. Called from the engine thread and from mover threads; work
runs wherever the device runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sidestream.types import Access, Accesses, Fence, Witness


def no_accesses() -> Sequence[Access]:
    """Of work that touches no shared memory."""
    return ()


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """Bytes that streams touch, under the name that accesses use.

    data       uint8 `[num_bytes]`
    pageable   host memory that the device cannot copy from or to by itself: such a copy stalls the thread that asks for it (P1)
    """

    name: str
    data: torch.Tensor
    pageable: bool = False

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self.data.numel()


@dataclass(frozen=True, slots=True, eq=False)
class CopyBatch:
    """Segments of one size, copied from one memory to another in one call: pair by pair, in no particular order.

    source_starts, target_starts   byte offsets, as many of one as of the other
    size                           bytes of each segment
    """

    source: Memory
    target: Memory
    source_starts: Sequence[int]
    target_starts: Sequence[int]
    size: int

    def accesses(self) -> Sequence[Access]:
        """What the copy reads and writes."""
        reads = [Access(self.source.name, start, start + self.size, False) for start in self.source_starts]
        return [*reads, *(Access(self.target.name, start, start + self.size, True) for start in self.target_starts)]

    def runs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The segments as pairs `(source, target)` of uint8 `[n, size]`, one for each run with equal steps in both."""
        first, count = 0, len(self.source_starts)
        while first < count:
            stop, step = first + 1, self._step(first)
            while step is not None and stop < count and self._step(stop - 1) == step:
                stop += 1
            shape, stride = (stop - first, self.size), (step or self.size, 1)
            source, target = self.source.data, self.target.data
            yield (
                source.as_strided(shape, stride, source.storage_offset() + self.source_starts[first]),
                target.as_strided(shape, stride, target.storage_offset() + self.target_starts[first]),
            )
            first = stop

    def _step(self, index: int) -> int | None:
        """Bytes from one segment to the next, if it is the same forward step in both memories."""
        if index + 1 >= len(self.source_starts):
            return None
        step = self.source_starts[index + 1] - self.source_starts[index]
        return step if step >= self.size and step == self.target_starts[index + 1] - self.target_starts[index] else None


class Stream(Protocol):
    """A FIFO of work. Order holds inside one stream; between streams only fences order anything."""

    @property
    def name(self) -> str:
        """Unique on its device; the timeline's track."""
        ...

    def submit(self, work: Callable[[], None], accesses: Accesses = no_accesses, *, label: str = "") -> Fence:
        """Enqueue `work` and return the fence that covers it and everything before it. Never blocks.

        `accesses` says which byte ranges the work reads and writes, to a device that has a witness. What the work raises is kept in the
        fence; later work on the stream still runs.
        """
        ...

    def wait(self, fence: Fence) -> None:
        """Order everything submitted after this call behind `fence`, on the device; the caller does not wait.

        Called from inside work that runs on this very stream, it takes effect at that point of the work.
        """
        ...

    def touch(self, accesses: Accesses) -> None:
        """Declare what the work touches from here on, when not all of it may be touched from the start. Inside work of this stream."""
        ...

    def copy(self, batch: CopyBatch) -> None:
        """Copy the segments. Inside work of this stream; the work declares `batch.accesses`."""
        ...


class Device(Protocol):
    """Owns streams and memory; counts what the host waits for."""

    @property
    def kind(self) -> str:
        """`"cpu"`, `"cuda"` or `"sim"`."""
        ...

    @property
    def witness(self) -> Witness | None:
        """Who is told of everything that ordering depends on; pools of this device's memory tell it, too."""
        ...

    def stream(self, name: str) -> Stream:
        """A new stream; `name` must not be in use."""
        ...

    def allocate(self, name: str, num_bytes: int) -> Memory:
        """Device memory. Raises ConfigError when it does not fit."""
        ...

    def allocate_host(self, name: str, num_bytes: int) -> Memory:
        """Host memory that the device can copy from and to asynchronously."""
        ...

    def wait_host(self, fence: Fence, *, reason: str, timeout_s: float | None = None) -> bool:
        """Block this thread until `fence` is done; False when `timeout_s` passed first. Counted under `reason`."""
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
