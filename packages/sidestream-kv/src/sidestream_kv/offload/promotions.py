"""Promotions: reads of KV blocks from persistent tiers (such as the disk) into host memory, for requests that wait for
these blocks. Called on the offload worker's thread only.

A slot is host memory for one block. A lease is the right to use slots: the blocks in leased slots are not evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from sidestream_kv.kv.pool import Lease
from sidestream_kv.offload.messages import Promoted
from sidestream_kv.offload.tickets import ReadTicket, Switches, Waiter
from sidestream_kv.offload.tier_io import TierIO
from sidestream_kv.offload.tiers.stack import TierStack
from sidestream_kv.types import Key, PromotePlan


class Promotions:
    """All requests that wait for blocks of persistent tiers.

    io       reads and writes of each persistent tier, by the tier's name
    report   function that sends an event to the engine thread
    """

    def __init__(
        self,
        *,
        tiers: TierStack,
        io: dict[str, TierIO],
        switches: Switches,
        clock: Callable[[], float],
        deadline_s: float,
        report: Callable[[Promoted], None],
    ) -> None:
        self._tiers = tiers
        self._host = tiers.host
        self._io = io
        self._switches = switches
        self._clock = clock
        self._deadline_s = deadline_s
        self._report = report
        self._waiters: list[Waiter] = []

    @property
    def has_work(self) -> bool:
        """Whether any request waits."""
        return bool(self._waiters)

    def sizes(self) -> dict[str, int]:
        """Number of objects that are kept, by kind."""
        return {"waiters": len(self._waiters)}

    def deadlines(self) -> list[float]:
        """The time at which each waiting request stops waiting."""
        return [waiter.deadline_s for waiter in self._waiters]

    def submit(self, plans: Sequence[PromotePlan], generation: int) -> None:
        """Begin the promotions of one step. First, lease the host slots that hold blocks of these plans already, so
        that the reads of one plan do not evict blocks of another plan.
        """
        promotions = [(plan, self._keep(plan)) for plan in plans]  # rule: loads-come-before-promotions
        for plan, kept in promotions:
            self._promote(plan, kept, generation)

    def _keep(self, plan: PromotePlan) -> Lease:
        """Lease the host slots that hold blocks of the plan already."""
        # rule: kept-slots-are-held
        return self._host.pool.share([slot for key in plan.keys if (slot := self._host.pool.get(key)) is not None])

    def _promote(self, plan: PromotePlan, kept: Lease, generation: int) -> None:
        """Begin to read the plan's blocks that are not in host memory. If a block is being read for another request,
        wait for that read. If host slots run out, read only the first blocks.
        """
        reads: dict[Key, ReadTicket] = {}
        complete = True
        for key in plan.keys:
            if self._host.pool.get(key) is not None:
                continue
            read = next((io.reads[key] for io in self._io.values() if key in io.reads), None)
            if read is None:
                source = self._tiers.find(key)
                if source is None or not self._host.pool.num_available or self._switches.abandoned:
                    complete = False
                    break
                read = self._io[source].read(key, generation)
            reads[key] = read
        deadline_s = self._clock() + self._deadline_s
        self._waiters.append(Waiter(plan.request_id, plan.epoch, reads, kept, complete, deadline_s))

    def finish_reads(self) -> None:
        """Handle reads that have ended."""
        for io in self._io.values():
            io.finish_reads(self._keep_for_waiters)

    def _keep_for_waiters(self, ticket: ReadTicket) -> None:
        """Lease the slot of a promoted block for each request that waits for it, so that the block is not evicted while
        the request still waits for other blocks.
        """
        for waiter in self._waiters:
            if waiter.reads.get(ticket.key) is ticket and (slot := self._host.pool.get(ticket.key)) is not None:
                waiter.kept.extend(self._host.pool.share([slot]))  # rule: promoted-block-is-held-for-its-request

    def finish_waits(self) -> None:
        """End each wait whose reads have ended or whose deadline has passed: report it, and release its slots."""
        now = self._clock()
        for waiter in list(self._waiters):
            done = all(read.taken_in for read in waiter.reads.values())
            if not done and now < waiter.deadline_s:  # rule: promotion-has-a-deadline
                continue
            self._waiters.remove(waiter)
            waiter.kept.release()  # rule: promotion-releases-its-slots
            good = done and all(read.failure() is None for read in waiter.reads.values())
            reason: Literal["done", "deadline", "failed", "no_room"]
            reason = "deadline" if not done else "failed" if not good else "done" if waiter.complete else "no_room"
            # rule: ended-promotion-is-reported
            self._report(Promoted(waiter.request_id, waiter.epoch, reason == "done", reason))
