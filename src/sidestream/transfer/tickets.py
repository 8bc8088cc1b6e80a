"""Transfers on their way: what each one holds, and the fence that ends it. Owned by the transfer engine, on the engine thread.

A ticket's leases end with its fence and never by time (H6, H10): a request that stops waiting leaves its ticket behind, and the
bytes still land where nobody else is.

generation   how often everything had been forgotten when the ticket was made; a ticket of an earlier one publishes nothing (H8)
"""

from __future__ import annotations

from dataclasses import dataclass

from sidestream.kv.pool import Lease
from sidestream.tiers.index import ReadLease, WriteGrant
from sidestream.types import Fence, Key, LoadPlan, RequestId


@dataclass(slots=True, eq=False)
class Stopwatch:
    """Time that a ticket's work took on its stream; written by the stream, read after its fence."""

    seconds: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class StoreTicket:
    """Device to host. Holds the slots; the device blocks were released behind the fence at submission. `prefix`: see StorePlan."""

    keys: tuple[Key, ...]
    prefix: tuple[Key, ...]
    slots: Lease
    fence: Fence
    submitted_s: float
    work: Stopwatch
    generation: int


@dataclass(frozen=True, slots=True, eq=False)
class LoadTicket:
    """Host to device, by layer groups. Holds the slots it reads and the blocks it writes.

    fences   one a group, in the order of the layers
    """

    plan: LoadPlan
    slots: Lease
    blocks: Lease
    fences: tuple[Fence, ...]
    submitted_s: float
    work: Stopwatch
    generation: int

    def done(self) -> bool:
        """Whether the last group was copied; groups are copied in order."""
        return self.fences[-1].poll()


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
    submitted_s: float
    work: Stopwatch


@dataclass(frozen=True, slots=True, eq=False)
class ReadTicket:
    """Disk to host, one block. Holds the slot it writes; the entry is pinned on disk."""

    key: Key
    slot: Lease
    pin: ReadLease
    fence: Fence
    submitted_s: float
    work: Stopwatch
    generation: int

    def failure(self) -> BaseException | None:
        """What the read raised, once done."""
        return self.fence.failure


@dataclass(slots=True, eq=False)
class Waiter:
    """A request that waits for promotions, some of them begun for others. Ends at the latest at `deadline_s`.

    kept   host slots that the request will want beside the promoted ones; held so that the promotion does not evict them
    """

    request_id: RequestId
    epoch: int
    reads: dict[Key, ReadTicket]
    kept: Lease
    complete: bool
    deadline_s: float
