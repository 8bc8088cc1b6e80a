"""Records of transfers: messages between the engine thread and the offload worker, the worker's jobs and tickets (the
transfers in flight), and state that several parts of the worker share.

Messages are frozen: the engine thread sends commands, and the worker sends events. A plan describes one transfer:
blocks to store, to load, or to read from a slower tier. A fence is a position on a stream, like a CUDA event.

A job executes one plan of the engine thread. A ticket is one piece of a store, or one read or write of a block. Load
jobs and tickets hold leases of host slots (memory for one block each): a leased slot is neither evicted nor given to
another block. The leases end when the transfer has ended, and never after a time (hazards H6, H10 in docs/glossary.md).
If a request stops waiting, its transfer goes on, and its bytes still arrive in slots that have no other owner.

job_id       id of the job, from the engine thread. A job has settled when it no longer uses device blocks
generation   number of cache resets when the job was submitted. A ticket from before a reset makes no block findable
             (H8). Loads need no generation: the engine thread decides whether their blocks become findable
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from sidestream_kv.kv.pool import Lease
from sidestream_kv.metrics import Metrics
from sidestream_kv.offload.pacing import Copy
from sidestream_kv.offload.tiers.index import ReadLease, WriteGrant
from sidestream_kv.types import Fence, Key, LoadPlan, RequestId, StorePlan, TransferPlan


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

    tiers     the tiers to drop them from; None: all tiers
    dropped   the worker adds the number of these blocks that each of these tiers held
    """

    keys: tuple[Key, ...] | None = None
    tiers: tuple[str, ...] | None = None
    dropped: dict[str, int] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class WriteRest:
    """Command: write the blocks that are in host memory only to the persistent tiers. `generation`: see SubmitPlans."""

    generation: int


Command = SubmitPlans | Forget | WriteRest


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a load, copied in slices of about the same size.

    fences     one fence for each slice, in stream order
    """

    fences: tuple[Fence, ...]
    num_bytes: int

    def bytes_left(self) -> float:
        """Estimate of the bytes that have not arrived yet, from the number of unfinished slices. Never blocks."""
        # Slices end in their order, so few of them are polled.
        done = bisect_left(self.fences, True, key=lambda fence: not fence.poll())
        return self.num_bytes * (1 - done / len(self.fences))


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

    def bytes_left(self) -> list[float]:
        """Estimate of the bytes that have not arrived yet, by part: `before`, then `groups`. Never blocks."""
        left: list[float] = []
        for part in (*self.before, *self.groups):
            # Parts arrive in their order, but for few, so those behind an unfinished one are not polled.
            left.append(part.num_bytes if left and left[-1] else part.bytes_left())
        return left

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


logger = logging.getLogger(__name__)

# Minimum time between two logged failures, because a broken tier fails often. The metric transfers_total counts all
# failures.
_WARNING_PERIOD_S = 1.0


@dataclass(slots=True, eq=False)
class Outcome:
    """How a ticket's work on its stream ended. Written by the stream, and read after the ticket's fence.

    seconds  that it took; a share of the time of all blocks that were read or written at once
    failure  of this block only; None if it succeeded, or if all of them failed, see the fence
    """

    seconds: float = 0.0
    failure: BaseException | None = None


@dataclass(slots=True, eq=False)
class StoreJob:
    """A submitted StorePlan. It is executed in pieces, so that each turn of the worker is short.

    begun        number of blocks that were queued for a copy or skipped
    pieces       number of tickets in flight
    cut          whether some blocks found no host slot
    failed       whether the copy of a piece has failed
    invalidated  keys of blocks that a failed step computed; they do not become findable
    """

    job_id: int
    plan: StorePlan
    generation: int
    invalidated: set[Key] = field(default_factory=set)
    begun: int = 0
    pieces: int = 0
    cut: bool = False
    failed: bool = False

    @property
    def settled(self) -> bool:
        """Whether all pieces have begun and no piece is in flight."""
        return self.begun == len(self.plan.keys) and not self.pieces  # rule: store-is-settled


@dataclass(slots=True, eq=False)
class StoreTicket:
    """One piece of a store. Holds its target slots. `last`: whether it is the job's last piece."""

    job: StoreJob
    keys: tuple[Key, ...]
    last: bool
    slots: Lease
    copy: Copy
    submitted_s: float

    @property
    def prefix(self) -> tuple[Key, ...]:
        """The prefix of the StorePlan if this is the last piece, else empty."""
        return self.job.plan.prefix if self.last else ()


@dataclass(slots=True, eq=False)
class LoadJob:
    """A submitted LoadPlan. Holds its source slots. The last piece is copied by groups of layers, the other pieces by
    whole blocks.

    ends       where the pieces end, in blocks
    begun      number of blocks that were queued for a copy
    copies     copies of the pieces, in order
    batches    number of batches in each group of layers of the last piece
    submitted  number of copies that were submitted to the device completely
    ended      number of copies that have ended
    failure    failure of the first piece that failed; no piece is queued after it
    """

    job_id: int
    plan: LoadPlan
    slots: Lease
    submitted_s: float
    ends: list[int]
    begun: int = 0
    copies: list[Copy] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    submitted: int = 0
    ended: int = 0
    failure: BaseException | None = None

    @property
    def all_begun(self) -> bool:
        """Whether every block was queued for a copy."""
        return self.begun == len(self.plan.keys)

    @property
    def settled(self) -> bool:
        """Whether no piece is in flight, and no piece will begin."""
        return self.ended == len(self.copies) and (self.all_begun or self.failure is not None)  # rule: load-is-settled


@dataclass(frozen=True, slots=True, eq=False)
class WriteTicket:
    """The write of one block from host memory to a persistent tier. Holds its source slot.

    prefix   keys that are marked as just used after the write; all writes of one StoreTicket have the same tuple object
    """

    key: Key
    prefix: tuple[Key, ...]
    slot: Lease
    grant: WriteGrant
    fence: Fence
    submitted_s: float
    work: Outcome
    generation: int

    def failure(self) -> BaseException | None:
        """The exception of the write, valid after its fence is done; None after success."""
        return self.fence.failure or self.work.failure


@dataclass(slots=True, eq=False)
class ReadTicket:
    """The read of one block from a persistent tier to host memory. Holds its target slot, and protects the tier's entry
    from eviction (`pin`).

    invalidated   whether a failed step computed the block; it then does not become findable
    taken_in      whether the worker has handled the end of the read
    """

    key: Key
    tier: str
    slot: Lease
    pin: ReadLease
    fence: Fence
    submitted_s: float
    work: Outcome
    generation: int
    invalidated: bool = False
    taken_in: bool = False

    def failure(self) -> BaseException | None:
        """The exception of the read, valid after its fence is done; None after success."""
        return self.fence.failure or self.work.failure


@dataclass(slots=True, eq=False)
class Waiter:
    """A request that waits for reads from persistent tiers, at most until `deadline_s`. Some of these reads may have
    begun for other requests.

    kept       lease of the host slots that hold its blocks already, so that these blocks are not evicted
    complete   whether every block that is not in host memory is being read
    """

    request_id: RequestId
    epoch: int
    reads: dict[Key, ReadTicket]
    kept: Lease
    complete: bool
    deadline_s: float


@dataclass(slots=True)
class Switches:
    """Values that the engine thread (or the thread that closes the engine) sets, and that the worker reads.

    generation   number of cache resets so far. A transfer that was submitted before the last reset must not make its
                 blocks findable (hazard H8 in docs/glossary.md)
    abandoned    whether the engine is closing: then no transfer begins any more. Never set back to False
    """

    generation: int = 0
    abandoned: bool = False


class UnsettledJobs:
    """Ids of stores and loads that still use device blocks, in the order of submission. Worker thread only."""

    def __init__(self) -> None:
        self._unsettled: dict[int, None] = {}
        self._last = 0  # id of the last job that was received

    def __len__(self) -> int:
        return len(self._unsettled)

    def opened(self, job_ids: Iterable[int], *, last: int) -> None:
        """Add the jobs of one command. `last` is the highest job id of the command."""
        self._unsettled.update(dict.fromkeys(job_ids))
        self._last = last

    def settle(self, job_id: int) -> None:
        """Remove a job that no longer uses device blocks. Raises KeyError if the job is unknown."""
        del self._unsettled[job_id]  # rule: job-settles-once

    def settled_through(self) -> int:
        """The largest id such that this job and all jobs before it no longer use device blocks."""
        return next(iter(self._unsettled), self._last + 1) - 1  # rule: only-settled-jobs-count-as-settled


class TransferLog:
    """Counts how transfers end, and logs failures. Worker thread only."""

    def __init__(self, metrics: Metrics, *, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._next_warning_s = 0.0

    def ended(self, kind: str, error: BaseException | None, num_bytes: int, since_s: float) -> bool:
        """Count the end of a transfer that was submitted at `since_s`. Returns whether it succeeded."""
        self._metrics.inc("transfers_total", 1, kind, "done" if error is None else "failed")
        if error is None:
            self._metrics.inc("transfer_bytes_total", num_bytes, kind)
            self._metrics.observe("transfer_seconds", self._clock() - since_s, kind)
        elif self._clock() >= self._next_warning_s:
            self._next_warning_s = self._clock() + _WARNING_PERIOD_S
            logger.warning("%s failed and counts as a cache miss: %s: %s", kind, type(error).__name__, error)
        return error is None

    def tier_works(self, tier: str, works: bool) -> None:
        """Record whether the last write to a persistent tier succeeded."""
        self._metrics.set("tier_works", float(works), tier)

    def kv_error(self, part: str, error: float) -> None:
        """Record the relative error of KV in 8 bits: of its keys, values or latents."""
        self._metrics.set("kv_error", error, part)

    def left_out(self, kind: str, outcome: str) -> None:
        """Count a transfer that will not be executed, with its outcome: `"skipped"`, `"deferred"`, `"full"` or
        `"not_reused"`.
        """
        self._metrics.inc("transfers_total", 1, kind, outcome)
