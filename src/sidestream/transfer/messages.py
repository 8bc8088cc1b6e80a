"""What the engine thread and the mover tell each other. Frozen values; whoever sent one does not touch it any more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sidestream.types import Fence, Key, RequestId, TransferPlan


@dataclass(frozen=True, slots=True)
class Orders:
    """To the mover: plans of one step, each with the number by which the engine thread knows it.

    generation   how often everything had been forgotten by then
    """

    plans: tuple[tuple[int, TransferPlan], ...]
    generation: int


@dataclass(frozen=True, slots=True)
class Forget:
    """To the mover: what rests in a tier under these keys, or is on its way there, may not be found any more. None:
    under any.
    """

    keys: frozenset[Key] | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """So many bytes of a load, and the fences of the slices that they were cut into, each of about as many; in order of
    their stream.
    """

    fences: tuple[Fence, ...]
    num_bytes: int

    def bytes_left(self) -> float:
        """How many are still on their way. Never blocks."""
        return self.num_bytes * sum(not fence.poll() for fence in self.fences) / len(self.fences)


@dataclass(frozen=True, slots=True)
class LoadSubmitted:
    """To the engine: all of a load was given to the device, so that fences for all of it exist.

    before   each piece but the last; every layer needs all of them
    groups   the last piece by layer group
    """

    number: int
    before: tuple[Part, ...]
    groups: tuple[Part, ...]

    @property
    def fences(self) -> list[Fence]:
        """All of them."""
        return [fence for part in (*self.before, *self.groups) for fence in part.fences]

    @property
    def num_bytes(self) -> int:
        """Of all of it."""
        return sum(part.num_bytes for part in (*self.before, *self.groups))


@dataclass(frozen=True, slots=True)
class LoadMissed:
    """To the engine: a load failed, or what it was to copy was `gone`: what its device blocks hold must not be used."""

    number: int
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Promoted:
    """A request's wait for the disk ended; `complete`: everything it waited for is in the host tier."""

    request_id: RequestId
    epoch: int
    complete: bool
    reason: Literal["done", "deadline", "failed", "no_room"]


@dataclass(frozen=True, slots=True)
class StoreAgain:
    """To the engine: these blocks found no slot while host memory was being pinned. Now there are more slots."""

    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class MoverFailed:
    """The mover has ended, because of `error`; nothing on its way will be heard of any more."""

    error: BaseException


News = LoadSubmitted | LoadMissed | Promoted | StoreAgain | MoverFailed
