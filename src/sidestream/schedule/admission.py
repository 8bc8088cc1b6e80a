"""Admission: starts waiting requests. A request that starts gets a request slot, blocks whose KV it reuses (from the
device or from tiers, such as host memory), and new blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from sidestream.schedule.allocation import Allocator
from sidestream.schedule.limits import Limits
from sidestream.schedule.prefill import PrefillPlanner
from sidestream.schedule.prefix_cache import PrefixCache
from sidestream.schedule.queues import RequestQueues
from sidestream.schedule.request import Request, State
from sidestream.schedule.reuse import Reuse, ReuseFinder
from sidestream.schedule.step_builder import StepBuilder
from sidestream.schedule.tiers import TierLoads
from sidestream_kv.types import LoadPlan


class Admission:
    """Starts waiting requests in order of rank.

    Invariants:
    - While a request waits for a slot or for free blocks, no request of lower rank starts (hazard H26). While a request
      waits for the disk, or for blocks that a running request is about to complete, requests of lower rank may start.
    - Reused blocks are leased before new blocks are allocated, so the request cannot evict its own prefix (hazard H11).
    - While admission is paused, only preempted requests are admitted (hazard H8).
    """

    def __init__(
        self,
        limits: Limits,
        *,
        queues: RequestQueues,
        prefix_cache: PrefixCache,
        allocator: Allocator,
        tiers: TierLoads,
        reuse: ReuseFinder,
        prefill: PrefillPlanner,
    ) -> None:
        self.paused = False
        """If True, requests that were never admitted stay in the queue."""
        self._limits = limits
        self._queues = queues
        self._prefix_cache = prefix_cache
        self._allocator = allocator
        self._tiers = tiers
        self._reuse = reuse
        self._prefill = prefill

    def admit(self, step: StepBuilder) -> None:
        """Start waiting requests in order of rank, until there is no room for the next one. Adds their loads and first
        chunks to the step.
        """
        if not self._queues.waiting or not self._allocator.has_free_slot:
            return
        for request in self._queues.by_rank(self.candidates())[: self._limits.max_probes]:
            if not self._allocator.has_free_slot or not self._try_admit(request, step):
                return

    def candidates(self) -> list[Request]:
        """Waiting requests that may start now, if there is room."""
        return [request for request in self._queues.waiting.values() if self._may_start(request)]

    def has_room(self, request: Request, reuse: Reuse, *, preempted: Sequence[Request] = ()) -> bool:
        """Whether the request finds enough blocks. `preempted`: requests whose blocks count as available."""
        return self._allocator.fits(request, reuse, num_running=len(self._queues.running), preempted=preempted)

    def _may_start(self, request: Request) -> bool:
        return request.state is State.WAITING and (not self.paused or request.has_begun)  # rule: request-may-start

    def _try_admit(self, request: Request, step: StepBuilder) -> bool:
        """Start the request, or leave it waiting for the disk or for blocks of a running request. Returns False if
        there is no room, or if the plan may only start requests with loads (`loads_only`) and this request has none.
        Then no further request is tried.
        """
        wanted = self._prefix_cache.wanted_keys(request)
        reuse = self._reuse.find(request, wanted)
        if self._tiers.promote(request, reuse.keys, reuse.sources, step, num_partial=reuse.num_partial):
            return True
        reuse = self._reuse.loadable(request, wanted, reuse)
        hits = reuse.hits
        # rule: request-joins-one-that-computes-the-same
        if self._prefix_cache.is_pending(wanted[len(hits) : reuse.num_joinable + 1]):
            return True
        if step.loads_only and not reuse.keys:  # rule: order-of-admission-is-kept-during-a-wait
            return False
        if not self.has_room(request, reuse):  # rule: admission-needs-room
            return False
        num_hits, num_found = len(hits), reuse.num_blocks
        loaded_ids, after = self._allocator.start(request, reuse)
        step.after.extend(after)  # rule: fresh-blocks-wait-for-their-last-use
        if reuse.keys:
            # rule: load-waits-for-its-blocks-last-use
            step.transfers.append(
                LoadPlan(
                    request.id,
                    request.epoch,
                    tuple(reuse.keys),
                    tuple(loaded_ids),
                    after,
                    num_whole=reuse.num_state_parts,
                    covers=num_found * self._limits.block_tokens,
                    num_partial=reuse.num_partial,
                )
            )
        request.branch_blocks = reuse.num_joinable  # rule: checkpoint-is-made-where-prompts-branch
        request.start(
            num_hits=num_hits,
            num_found=num_found,
            num_partial=num_hits + reuse.num_partial,
            block_tokens=self._limits.block_tokens,
        )
        self._queues.start(request)
        request.loading = request.arriving = bool(reuse.keys)  # rule: request-with-a-load-is-loading
        if request.cached is None:
            loaded = tuple(reuse.keys[reuse.num_state_parts :])
            request.cached = self._tiers.cached_tokens(request, num_hits=num_hits, loaded=loaded)
        self._prefill.plan(request, step)
        return True
