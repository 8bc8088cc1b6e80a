"""Promotions read blocks of persistent tiers into host slots, for requests that wait. Worker thread only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from sidestream.kv.pool import Lease
from sidestream.offload.bookkeeping import Switches
from sidestream.offload.messages import Promoted
from sidestream.offload.tickets import ReadTicket, Waiter
from sidestream.offload.tier_io import TierIO
from sidestream.offload.tiers.stack import TierStack
from sidestream.types import Key, PromotePlan


class Promotions:
    """The requests that wait for persistent tiers.

    io       reads and writes of each tier, by name
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
    def busy(self) -> bool:
        """Whether a request waits."""
        return bool(self._waiters)

    def sizes(self) -> dict[str, int]:
        """Number of objects that are kept, by kind."""
        return {"waiters": len(self._waiters)}

    def deadlines(self) -> list[float]:
        """Deadlines of the waits."""
        return [waiter.deadline_s for waiter in self._waiters]

    def submit(self, plans: Sequence[PromotePlan], generation: int) -> None:
        """Begin the promotions of one step. First, every promotion leases those slots of its run that are in the host
        tier already, so that no promotion evicts a block of another promotion.
        """
        promotions = [(plan, self._keep(plan)) for plan in plans]  # rule: loads-come-before-promotions
        for plan, kept in promotions:
            self._promote(plan, kept, generation)

    def _keep(self, plan: PromotePlan) -> Lease:
        """Lease the slots of the run's blocks that are in the host tier already."""
        # rule: kept-slots-are-held
        return self._host.pool.share([slot for key in plan.keys if (slot := self._host.pool.get(key)) is not None])

    def _promote(self, plan: PromotePlan, kept: Lease, generation: int) -> None:
        """Join the reads of blocks that are in flight, and begin the other reads. If there are too few host slots, read
        only the beginning of the run.
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
        """Lease a promoted block for requests that still wait for other blocks, so that it is not evicted before they
        load it.
        """
        for waiter in self._waiters:
            if waiter.reads.get(ticket.key) is ticket and (slot := self._host.pool.get(ticket.key)) is not None:
                waiter.kept.extend(self._host.pool.share([slot]))  # rule: promoted-block-is-held-for-its-request

    def finish_waits(self) -> None:
        """Report each wait that is complete or past its deadline, and release its slots."""
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
