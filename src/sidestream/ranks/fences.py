"""Fences of work that every rank does, and the progress that the other ranks have reported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from sidestream.errors import DeviceLost
from sidestream_kv.types import Fence, LayerGates

FenceName = tuple[str, int]
"""A stream, and the number of a piece of work: rank 0 numbers the work that it sends for each stream, from 1."""

# Number of failures of other ranks that are kept. A failure is read when its fence is observed.
_MAX_FAILURES = 4096


class Progress:
    """The work that the other ranks have reported as done. One thread writes it, any thread reads it.

    size      number of ranks
    observed  called when a thread learns that a rank has done some work: rank, and stream and tick of rank 0's fence
    """

    def __init__(self, size: int, *, observed: Callable[[int, str, int], None] | None = None) -> None:
        self._done: tuple[dict[str, int], ...] = tuple({} for _ in range(1, size))
        self._failures: dict[FenceName, BaseException] = {}
        self._observed = observed
        self._lost: DeviceLost | None = None

    def passed(self, name: FenceName, fence: Fence) -> bool:
        """Whether the work is done on every other rank. Raises DeviceLost if a rank has ended. `fence`: rank 0's."""
        if not self.done(name):
            return False
        stream, _ = name
        if self._observed is not None:
            for rank in range(1, len(self._done) + 1):
                self._observed(rank, stream, fence.tick)
        return True

    def done(self, name: FenceName) -> bool:
        """As `passed`, for work that rank 0 does not do on a stream."""
        if self._lost is not None:
            raise self._lost
        return self.behind(name) is None

    def behind(self, name: FenceName) -> int | None:
        """The first rank that has not reported the work as done."""
        stream, number = name
        for rank, done in enumerate(self._done, start=1):  # rule: fence-of-all-ranks-waits-for-each-rank
            if done.get(stream, 0) < number:
                return rank
        return None

    def failure(self, name: FenceName) -> BaseException | None:
        """The failure of the work on any other rank."""
        return self._failures.get(name)

    # ------------------------------------------------------------------ the thread that reads reports

    def raise_to(self, rank: int, names: Iterable[FenceName]) -> None:
        """Record that the work of each stream up to its number is done on `rank`."""
        self._done[rank - 1].update(names)

    def fail(self, name: FenceName, error: BaseException) -> None:
        """Record that the work failed on another rank. Called before `raise_to`."""
        while len(self._failures) >= _MAX_FAILURES:
            del self._failures[next(iter(self._failures))]
        self._failures[name] = error  # rule: failure-on-any-rank-fails-all

    @property
    def lost(self) -> DeviceLost | None:
        """The error if a rank has ended."""
        return self._lost

    def lose(self, error: DeviceLost) -> None:
        """Record that a rank has ended: every later question raises `error`. The first error stays."""
        self._lost = self._lost or error


class JointFence:
    """The fence of work that every rank does. Done when every rank has done the work.

    local   rank 0's own fence, for waits on rank 0's device
    name    the fence's name in messages
    """

    __slots__ = ("_progress", "local", "name")

    def __init__(self, local: Fence, name: FenceName, progress: Progress) -> None:
        self.local = local
        self.name = name
        self._progress = progress

    @property
    def stream(self) -> str:
        """Name of the stream, on each rank."""
        return self.local.stream

    @property
    def tick(self) -> int:
        """Position on rank 0's stream."""
        return self.local.tick

    def poll(self) -> bool:
        """Whether the work is done on all ranks. Never blocks. Raises DeviceLost if a rank has ended."""
        return self._progress.passed(self.name, self.local) and self.local.poll()

    @property
    def failure(self) -> BaseException | None:
        """The exception that the work raised on any rank."""
        return self.local.failure or self._progress.failure(self.name)

    def __repr__(self) -> str:
        return f"joint {self.local!r}"


def local_fence(fence: Fence) -> Fence:
    """Rank 0's own part of a fence."""
    return fence.local if isinstance(fence, JointFence) else fence


def local_gates(gates: LayerGates) -> LayerGates:
    """Rank 0's own part of the fences."""
    return LayerGates(tuple(tuple(map(local_fence, fences)) for fences in gates.by_layer))


def names_of(fences: Sequence[Fence]) -> tuple[FenceName, ...]:
    """The names of fences in messages. A fence of rank 0 alone has no name: the other ranks have no such work."""
    return tuple(fence.name for fence in fences if isinstance(fence, JointFence))
