"""Transfers on their way: what each one holds, and what ends it. Owned by the mover, on its thread.

A ticket's leases end with its fences and never by time (H6, H10): a request that stops waiting leaves its ticket
behind, and the bytes still land where nobody else is.

number       by which the engine thread knows the order; it holds the device blocks until it is told of the end
generation   how often everything had been forgotten when the order was given; a ticket of an earlier one publishes
             nothing (H8). A load's is kept by the engine thread, which publishes its blocks
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sidestream.kv.pool import Lease
from sidestream.tiers.index import ReadLease, WriteGrant
from sidestream.transfer.pacing import Copy
from sidestream.types import Fence, Key, LoadPlan, RequestId, StorePlan


@dataclass(slots=True, eq=False)
class Stopwatch:
    """Time that a ticket's work took on its stream; written by the stream, read after its fence."""

    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class StoreOrder:
    """A store that was ordered. It is carried out in pieces, so that no turn of the mover takes long (P8).

    begun    blocks that were looked at
    pieces   tickets that are on their way
    cut      some of its blocks found no slot
    invalidated keys that nobody may find, because what computed them came to nothing good; a ticket publishes none of
    them
    """

    number: int
    plan: StorePlan
    generation: int
    invalidated: set[Key] = field(default_factory=set)
    begun: int = 0
    pieces: int = 0
    cut: bool = False

    @property
    def settled(self) -> bool:
        """Whether nothing of it is to come or on its way."""
        return self.begun == len(self.plan.keys) and not self.pieces


@dataclass(slots=True, eq=False)
class StoreTicket:
    """Device to host, a piece of an order. Holds the slots that it writes. `prefix`: see StorePlan; of the last piece
    only.
    """

    order: StoreOrder
    keys: tuple[Key, ...]
    prefix: tuple[Key, ...]
    slots: Lease
    copy: Copy
    ordered_s: float


@dataclass(slots=True, eq=False)
class LoadOrder:
    """Host to device. Holds the slots that it reads. Carried out in pieces, too: all but the last by whole blocks, the
    last by layer groups.

    begun    blocks of which there are copies
    copies   pieces, in order; on their way or ended
    given    how many of them the device was given all of
    ended    how many of them have ended
    failure  of the first piece that failed; none is begun after that
    """

    number: int
    plan: LoadPlan
    slots: Lease
    ordered_s: float
    begun: int = 0
    copies: list[Copy] = field(default_factory=list)
    given: int = 0
    ended: int = 0
    failure: BaseException | None = None

    @property
    def all_begun(self) -> bool:
        """Whether there are copies of all its blocks."""
        return self.begun == len(self.plan.keys)

    @property
    def settled(self) -> bool:
        """Whether nothing of it is to come or on its way."""
        return self.ended == len(self.copies) and (self.all_begun or self.failure is not None)


@dataclass(frozen=True, slots=True, eq=False)
class WriteTicket:
    """Host to disk, one block. Holds the slot it reads.

    prefix   of the store that brought the block to the host; one object for all its blocks
    """

    key: Key
    prefix: tuple[Key, ...]
    slot: Lease
    grant: WriteGrant
    fence: Fence
    ordered_s: float
    work: Stopwatch
    generation: int


@dataclass(slots=True, eq=False)
class ReadTicket:
    """Disk to host, one block. Holds the slot it writes; the entry is pinned on disk. `invalidated`: as of a store, its
    key.
    """

    key: Key
    slot: Lease
    pin: ReadLease
    fence: Fence
    ordered_s: float
    work: Stopwatch
    generation: int
    invalidated: bool = False

    def failure(self) -> BaseException | None:
        """What the read raised, once done."""
        return self.fence.failure


@dataclass(slots=True, eq=False)
class Waiter:
    """A request that waits for promotions, some of them begun for others. Ends at the latest at `deadline_s`.

    kept   host slots that the request will want beside the promoted ones; held so that the promotion does not evict
           them
    """

    request_id: RequestId
    epoch: int
    reads: dict[Key, ReadTicket]
    kept: Lease
    complete: bool
    deadline_s: float
