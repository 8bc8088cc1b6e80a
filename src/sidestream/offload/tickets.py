"""Jobs and tickets: the transfers in flight, and the leases that each transfer holds. Worker thread only.

A job is one plan of the engine thread. A ticket's leases end with its fences and never by time (H6, H10): when a
request stops waiting, its ticket stays, and the bytes still arrive in slots that have no other owner.

job_id       the engine thread's id of the job; device blocks stay in use until the job has settled
generation   number of resets when the job was submitted; a ticket of an earlier generation publishes nothing (H8).
             A load has none: the engine thread publishes its blocks
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sidestream.kv.pool import Lease
from sidestream.offload.pacing import Copy
from sidestream.offload.tiers.index import ReadLease, WriteGrant
from sidestream.types import Fence, Key, LoadPlan, RequestId, StorePlan


@dataclass(slots=True, eq=False)
class Stopwatch:
    """Seconds of stream time that a ticket took. Written by the stream, and read after the ticket's fence."""

    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class StoreJob:
    """A store plan. Executed in pieces, so that each turn of the worker is short.

    begun        number of blocks that were copied or skipped
    pieces       number of tickets in flight
    cut          whether some blocks found no slot
    invalidated  keys of blocks that a failed step computed; no ticket publishes them
    """

    job_id: int
    plan: StorePlan
    generation: int
    invalidated: set[Key] = field(default_factory=set)
    begun: int = 0
    pieces: int = 0
    cut: bool = False

    @property
    def settled(self) -> bool:
        """Whether all pieces have begun and none is in flight."""
        return self.begun == len(self.plan.keys) and not self.pieces  # rule: store-is-settled


@dataclass(slots=True, eq=False)
class StoreTicket:
    """One piece of a store, device to host. Holds its target slots. `prefix` is that of the StorePlan, for the last
    piece.
    """

    job: StoreJob
    keys: tuple[Key, ...]
    prefix: tuple[Key, ...]
    slots: Lease
    copy: Copy
    submitted_s: float


@dataclass(slots=True, eq=False)
class LoadJob:
    """A load plan, host to device. Holds its source slots. All pieces except the last are copied by whole blocks, and
    the last by layer groups.

    begun      number of blocks that have copies
    copies     the pieces that have begun, in order
    submitted  number of copies that were submitted to the device completely
    ended      number of copies that have ended
    failure    failure of the first piece that failed; no piece begins after it
    """

    job_id: int
    plan: LoadPlan
    slots: Lease
    submitted_s: float
    begun: int = 0
    copies: list[Copy] = field(default_factory=list)
    submitted: int = 0
    ended: int = 0
    failure: BaseException | None = None

    @property
    def all_begun(self) -> bool:
        """Whether every block has its copy."""
        return self.begun == len(self.plan.keys)

    @property
    def settled(self) -> bool:
        """Whether no piece is in flight, and none will begin."""
        return self.ended == len(self.copies) and (self.all_begun or self.failure is not None)  # rule: load-is-settled


@dataclass(frozen=True, slots=True, eq=False)
class WriteTicket:
    """The write of one block, from the host to a persistent tier. Holds its source slot.

    prefix   prefix of the store that brought the block to the host; the same object for all blocks of that store
    """

    key: Key
    prefix: tuple[Key, ...]
    slot: Lease
    grant: WriteGrant
    fence: Fence
    submitted_s: float
    work: Stopwatch
    generation: int


@dataclass(slots=True, eq=False)
class ReadTicket:
    """The read of one block, from a persistent tier to the host. Holds its target slot, and a pin on the tier's entry.

    invalidated   a failed step computed the block, so the ticket publishes nothing
    taken_in      the worker has handled the end of the read
    """

    key: Key
    tier: str
    slot: Lease
    pin: ReadLease
    fence: Fence
    submitted_s: float
    work: Stopwatch
    generation: int
    invalidated: bool = False
    taken_in: bool = False

    def failure(self) -> BaseException | None:
        """The read's exception, after its fence."""
        return self.fence.failure


@dataclass(slots=True, eq=False)
class Waiter:
    """A request that waits for promotions, at most until `deadline_s`. Some promotions may have begun for other
    requests.

    kept       lease of the run's host slots, so that no promotion evicts them
    complete   every block that is not in the host tier is being read
    """

    request_id: RequestId
    epoch: int
    reads: dict[Key, ReadTicket]
    kept: Lease
    complete: bool
    deadline_s: float
