"""The common class of fences, for host threads and CUDA streams. A fence is a position on a stream; it is done when all
work up to this position is done. The positions of one stream are done in order.
"""

from __future__ import annotations

import traceback
from typing import Any, Generic, Protocol, TypeVar


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
