"""Messages between the engine thread and the offload worker. Frozen values: the sender does not touch them again."""

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
    """Command: make the blocks of these keys unreachable, in the tiers and in flight to them. None: the blocks of all
    keys.
    """

    keys: frozenset[Key] | None = None


Command = SubmitPlans | Forget


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a load: its bytes, and the fences of its slices in stream order. The slices have about equal sizes."""

    fences: tuple[Fence, ...]
    num_bytes: int

    def bytes_left(self) -> float:
        """Bytes that have not arrived yet. Never blocks."""
        return self.num_bytes * sum(not fence.poll() for fence in self.fences) / len(self.fences)


@dataclass(frozen=True, slots=True)
class LoadSubmitted:
    """Event: all of a load was submitted to the device, so all of its fences exist.

    before   every piece but the last; each layer needs all of them
    groups   the last piece by layer group
    """

    job_id: int
    before: tuple[Part, ...]
    groups: tuple[Part, ...]

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
    """Event: a load failed, or its source blocks were `gone`; the content of its device blocks must not be used."""

    job_id: int
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Promoted:
    """Event: a request's wait for a persistent tier ended. `complete`: all its blocks are in the host tier."""

    request_id: RequestId
    epoch: int
    complete: bool
    reason: Literal["done", "deadline", "failed", "no_room"]


@dataclass(frozen=True, slots=True)
class StoreAgain:
    """Event: the host tier has grown, and has slots for these blocks now, which were deferred."""

    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """Event: the offload worker ended with `error`; no transfer in flight will be reported."""

    error: BaseException


WorkerEvent = LoadSubmitted | LoadMissed | Promoted | StoreAgain | WorkerFailed
