"""Messages between the engine thread and the offload worker, as frozen values. The engine thread sends commands, and
the worker sends events.

A plan describes one transfer: blocks to store, to load, or to read from a slower tier. A fence is a position on a
stream, like a CUDA event.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sidestream_kv.types import Fence, Key, RequestId, TransferPlan


@dataclass(frozen=True, slots=True)
class SubmitPlans:
    """Command: execute the plans of one step.

    plans        each plan with the id of its job
    generation   number of cache resets before this command
    """

    plans: tuple[tuple[int, TransferPlan], ...]
    generation: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Command: make the blocks of `keys` unreachable, also blocks that a transfer is still bringing to a tier. None:
    all blocks. The tiers free the slots in the order of the keys.
    """

    keys: tuple[Key, ...] | None = None


Command = SubmitPlans | Forget


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a load, copied in slices of about the same size.

    fences     one fence for each slice, in stream order
    """

    fences: tuple[Fence, ...]
    num_bytes: int

    def bytes_left(self) -> float:
        """Estimate of the bytes that have not arrived yet, from the number of unfinished slices. Never blocks."""
        return self.num_bytes * sum(not fence.poll() for fence in self.fences) / len(self.fences)


@dataclass(frozen=True, slots=True)
class LoadSubmitted:
    """Event: a load was submitted to the device completely, so all of its fences exist.

    before   all pieces of the load except the last: whole blocks, so every layer waits for all of them
    groups   the last piece, split into groups of layers
    """

    job_id: int
    before: tuple[Part, ...]
    groups: tuple[Part, ...]

    def group(self, number: int) -> Part:
        """The part of the last piece that layer group `number` waits for. If the last piece holds recurrent states, it
        has a single part, and all layers wait for this part.
        """
        return self.groups[min(number, len(self.groups) - 1)]

    @property
    def fences(self) -> list[Fence]:
        """The fences of all slices."""
        return [fence for part in (*self.before, *self.groups) for fence in part.fences]

    @property
    def num_bytes(self) -> int:
        """Size of the load."""
        return sum(part.num_bytes for part in (*self.before, *self.groups))


@dataclass(frozen=True, slots=True)
class LoadMissed:
    """Event: a load failed, so its device blocks must not be used.

    reason   `"load_failed"`: a copy failed, or the engine is closing; `"gone"`: a source block was evicted before;
             `"coverage"`: the recurrent state covers another number of tokens than planned
    """

    job_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Promoted:
    """Event: a request need no longer wait for reads from persistent tiers. `complete`: all blocks that it waited for
    are in host memory.
    """

    request_id: RequestId
    epoch: int
    complete: bool
    reason: Literal["done", "deadline", "failed", "no_room"]


@dataclass(frozen=True, slots=True)
class StoreAgain:
    """Event: the store of these blocks was deferred, but host memory has grown and has slots for them now."""

    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """Event: the offload worker ended with `error`. No events of transfers in flight will follow."""

    error: BaseException


WorkerEvent = LoadSubmitted | LoadMissed | Promoted | StoreAgain | WorkerFailed
