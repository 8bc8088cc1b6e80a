"""What a device offers: streams that run work in order, fences between them, and memory.

`stream.submit(work, accesses)` is the only door to the device. Called from the engine thread and from mover threads; work
runs wherever the device runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from sidestream.types import Access, Accesses, Fence


def no_accesses() -> Sequence[Access]:
    """Of work that touches no shared memory."""
    return ()


class Stream(Protocol):
    """A FIFO of work. Order holds inside one stream; between streams only fences order anything."""

    @property
    def name(self) -> str:
        """Unique on its device; the timeline's track."""
        ...

    def submit(self, work: Callable[[], None], accesses: Accesses = no_accesses, *, label: str = "") -> Fence:
        """Enqueue `work` and return the fence that covers it and everything before it. Never blocks.

        `accesses` says which byte ranges the work reads and writes, to a device that checks them. What the work raises is kept in the fence;
        later work on the stream still runs.
        """
        ...

    def wait(self, fence: Fence) -> None:
        """Order everything submitted after this call behind `fence`, on the device; the caller does not wait.

        Called from inside work that runs on this very stream, it takes effect at that point of the work.
        """
        ...


class Device(Protocol):
    """Owns streams and memory; counts what the host waits for."""

    @property
    def kind(self) -> str:
        """`"cpu"`, `"cuda"` or `"sim"`."""
        ...

    def stream(self, name: str) -> Stream:
        """A new stream; `name` must not be in use."""
        ...

    def allocate(self, name: str, num_bytes: int) -> torch.Tensor:
        """Device memory: uint8 `[num_bytes]`, known to accesses as `name`. Raises ConfigError when it does not fit."""
        ...

    def allocate_host(self, name: str, num_bytes: int) -> torch.Tensor:
        """Host memory that the device can copy from and to asynchronously: uint8 `[num_bytes]`."""
        ...

    def wait_host(self, fence: Fence, *, reason: str, timeout_s: float | None = None) -> bool:
        """Block this thread until `fence` is done; False when `timeout_s` passed first. Counted under `reason`."""
        ...

    def host_waits(self) -> dict[str, int]:
        """How often a thread waited for a fence that was not done yet, by reason."""
        ...

    def rest(self) -> None:
        """Nothing is on its way, nor was a moment ago: give memory that is free back to the system."""
        ...

    def close(self) -> None:
        """Run what was submitted, then end the streams. Idempotent."""
        ...
