"""Preemption: takes the slot and the blocks of a running request for a request of higher rank. The preempted request
waits again.
"""

from __future__ import annotations

from sidestream.schedule.admission import Admission
from sidestream.schedule.allocation import Allocator
from sidestream.schedule.prefix_cache import PrefixCache
from sidestream.schedule.queues import RequestQueues
from sidestream.schedule.request import Request
from sidestream.schedule.reuse import ReuseFinder
from sidestream.schedule.tiers import TierLoads


class Preemption:
    """Chooses victims (requests to preempt) and preempts them.

    Invariants (hazard H26):
    - A victim ranks below the request that takes its blocks. So the request of the highest rank is never preempted, and
      it ends.
    - A request that has not run a step since its admission is preempted only for the request of the highest rank. So
      every admission makes progress.
    - Aging improves the rank of a waiting request, but causes no preemption: otherwise two requests of one priority
      would preempt each other in turn.
    """

    def __init__(
        self,
        aging_steps: int,
        *,
        queues: RequestQueues,
        prefix_cache: PrefixCache,
        allocator: Allocator,
        tiers: TierLoads,
        admission: Admission,
        reuse: ReuseFinder,
    ) -> None:
        self.count = 0
        """Requests preempted to make room for others."""
        self._aging_steps = aging_steps
        self._queues = queues
        self._prefix_cache = prefix_cache
        self._allocator = allocator
        self._tiers = tiers
        self._admission = admission
        self._reuse = reuse

    def preempt(self, request: Request) -> None:
        """Release the request's slot and blocks at once. Published blocks stay findable. Tokens that a step in flight
        samples are dropped, and sampled again later.
        """
        self._allocator.release(request)
        self._queues.requeue(request)

    def make_room(self, request: Request, num_blocks: int) -> bool:
        """Preempt requests of lower rank than `request` until `num_blocks` blocks are available. Returns False if that
        is impossible in this step.
        """
        while not self._allocator.has_blocks(num_blocks):
            if self._allocator.is_settling:
                return False  # some released blocks become available when a transfer ends
            victim = self.victim_for(request)
            if victim is None:
                return False
            self._take_room_of(victim)
        return True

    def make_room_for_priority(self) -> None:
        """Preempt requests of lower priority and lower rank than the first waiting request, so that it can start.
        Preempts none if that would not free enough blocks.
        """
        if (
            not self._queues.waiting
            or len({request.priority for request in self._queues.unfinished.values()}) == 1
            or not (waiting := self._admission.candidates())
        ):
            return
        first = self._queues.by_rank(waiting)[0]
        victims = self._queues.by_rank(self._lower_priority(first))
        wanted = self._prefix_cache.wanted_keys(first)
        reuse = self._reuse.find(first, wanted)
        if self._tiers.may_promote(first, reuse.sources, num_partial=reuse.num_partial):
            return  # the waiting request will first wait for the disk, and needs no blocks then
        if self._prefix_cache.is_pending(wanted[len(reuse.hits) : len(reuse.hits) + 1]):
            return
        if not self._admission.has_room(first, reuse, preempted=victims):
            return
        while victims and not (self._allocator.has_free_slot and self._admission.has_room(first, reuse)):
            self._take_room_of(victims.pop())

    def _lower_priority(self, first: Request) -> list[Request]:
        aging = self._aging_steps
        # rule: request-steps-before-it-yields-to-priority
        return [
            request
            for request in self._queues.running.values()
            if request.stepped and request.priority > first.priority and request.level(aging) > first.level(aging)
        ]

    def victim_for(self, request: Request) -> Request | None:
        """The request of the lowest rank among those that have run a step since their admission and rank below
        `request`.
        """
        ranked = self._queues.running_by_rank()
        below = ranked[ranked.index(request) + 1 :]  # rule: older-requests-are-not-preempted
        stepped = [other for other in below if other.stepped]  # rule: request-steps-before-it-is-preempted
        if stepped:
            return stepped[-1]
        return below[-1] if below and ranked[0] is request else None

    def _take_room_of(self, victim: Request) -> None:
        self.preempt(victim)
        self.count += 1
