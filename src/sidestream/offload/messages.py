"""Messages between the engine thread and the offload worker. They are frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sidestream.types import Fence, Key, RequestId, TransferPlan


@dataclass(frozen=True, slots=True)
class SubmitPlans:
    """Command: execute the plans of one step, each under its job id.

    generation   number of resets before this command
    """

    plans: tuple[tuple[int, TransferPlan], ...]
    generation: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Command: make the blocks of these keys unreachable, both in the tiers and in transfers to them. None: all
    keys.
    """

    keys: frozenset[Key] | None = None


Command = SubmitPlans | Forget


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a load: its bytes, and the fences of its slices in stream order. The slices have about the same
    size.
    """

    fences: tuple[Fence, ...]
    num_bytes: int

    def bytes_left(self) -> float:
        """Bytes that have not arrived yet. Never blocks."""
        return self.num_bytes * sum(not fence.poll() for fence in self.fences) / len(self.fences)


@dataclass(frozen=True, slots=True)
class LoadSubmitted:
    """Event: a load was submitted to the device completely, so all of its fences exist.

    before   all pieces except the last; every layer needs all of them
    groups   the last piece, by layer group
    """

    job_id: int
    before: tuple[Part, ...]
    groups: tuple[Part, ...]

    def group(self, number: int) -> Part:
        """The part that layers of a group wait for. A load that ends with a recurrent state has one for all of them."""
        return self.groups[min(number, len(self.groups) - 1)]

    @property
    def fences(self) -> list[Fence]:
        """The fences of every slice."""
        return [fence for part in (*self.before, *self.groups) for fence in part.fences]

    @property
    def num_bytes(self) -> int:
        """Size of the load."""
        return sum(part.num_bytes for part in (*self.before, *self.groups))


@dataclass(frozen=True, slots=True)
class LoadMissed:
    """Event: the device blocks of a load must not be used. `reason`: `"load_failed"`; `"gone"`, its source blocks had
    been evicted; `"coverage"`, its recurrent state does not cover the tokens that the plan says.
    """

    job_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Promoted:
    """Event: a request's wait for a persistent tier has ended. `complete`: all its blocks are in the host tier."""

    request_id: RequestId
    epoch: int
    complete: bool
    reason: Literal["done", "deadline", "failed", "no_room"]


@dataclass(frozen=True, slots=True)
class StoreAgain:
    """Event: these blocks were deferred, but the host tier has grown and now has slots for them."""

    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """Event: the offload worker ended with `error`. The ends of transfers in flight will not be reported."""

    error: BaseException


WorkerEvent = LoadSubmitted | LoadMissed | Promoted | StoreAgain | WorkerFailed
