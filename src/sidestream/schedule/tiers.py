"""Decides how a request uses blocks in tiers other than the device: it loads them from host memory, waits for their
promotion (a copy from a slower tier to host memory), or computes their tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from sidestream.schedule.limits import Limits
from sidestream.schedule.request import Request, RequestQueues, State
from sidestream.schedule.states import Source
from sidestream.types import CachedTokens
from sidestream_kv.types import DEVICE, HOST, Fence, Key, PromotePlan, RequestId


class TierView(Protocol):
    """The interface of tiers and transfers for the scheduler. Read-only; never blocks."""

    def locate(self, keys: Sequence[Key]) -> list[Source]:
        """The tier of each block in the longest run of leading `keys` whose blocks are all in tiers."""
        ...

    def worth_loading(self, sources: Sequence[Source], *, num_blocks: int | None = None, num_partial: int = 0) -> bool:
        """Whether to load blocks from the tiers `sources`: True if that is expected to be faster than computing the
        tokens of `num_blocks` blocks (None: of the loaded blocks). `num_partial` of the blocks are loaded without the
        layers with a sliding window.
        """
        ...

    def seconds_left(self, request_id: RequestId, epoch: int, *, step_s: float) -> float:
        """Seconds until a step that takes `step_s` can begin without waiting for the request's loads; 0: now."""
        ...

    def transfers_fence(self) -> Fence | None:
        """A fence that is done when all transfers submitted so far have released their device blocks. None: they all
        have released them already.
        """
        ...


class NoTiers:
    """The view of an engine without tiers other than the device."""

    def locate(self, keys: Sequence[Key]) -> list[Source]:
        """No block is in a tier."""
        return []

    def worth_loading(self, sources: Sequence[Source], *, num_blocks: int | None = None, num_partial: int = 0) -> bool:
        """There is nothing to load."""
        return False

    def seconds_left(self, request_id: RequestId, epoch: int, *, step_s: float) -> float:
        """There are no loads."""
        return 0.0

    def transfers_fence(self) -> Fence | None:
        """There are no transfers."""
        return None


class TierLoads:
    """Decides between loading, promoting from disk and computing, and handles the ends of loads and promotions.

    Invariants:
    - Only blocks in the host tier are loaded into the device. If some blocks of a run are in a slower tier, they are
      promoted first. Meanwhile the request is LOADING, and it is admitted when the promotion ends.
    - A promotion or load that failed counts as a cache miss. The request does not try that tier again, so it makes
      progress (hazards H9, H26).
    - At most as many requests are LOADING as may run, so that their blocks do not fill the host tier.
    """

    def __init__(self, limits: Limits, *, view: TierView, queues: RequestQueues, max_running: int) -> None:
        self._limits = limits
        self._view = view
        self._queues = queues
        self._max_running = max_running

    # ------------------------------------------------------------------ decisions

    def locate(self, request: Request, keys: Sequence[Key]) -> list[Source]:
        """The tier of each block in the longest run of leading `keys` that the request may load."""
        return [] if request.avoid_tiers else self._view.locate(keys)

    def may_promote(self, request: Request, sources: Sequence[Source], *, num_partial: int) -> bool:
        """Whether the request may wait for blocks of tiers that are slower than host memory. For `num_partial` see
        `TierView.worth_loading`.
        """
        # rule: promoting-requests-are-bounded
        loading = sum(other.state is State.LOADING for other in self._queues.waiting.values())
        # rule: request-promotes-a-bounded-number-of-times
        return (
            self.num_in_host(sources) < len(sources)
            and not request.avoid_disk
            and request.promotions < self._limits.max_promotions
            and loading < self._max_running
            and self._view.worth_loading(sources, num_partial=num_partial)
        )

    def promote(
        self, request: Request, keys: Sequence[Key], sources: Sequence[Source], *, num_partial: int
    ) -> PromotePlan | None:
        """Plan a promotion of the first `keys`, which are in the tiers `sources`, and make the request wait for it.
        Returns None if the promotion is not worth the time, or if the request has waited too often.
        """
        if not self.may_promote(request, sources, num_partial=num_partial):
            return None
        plan = PromotePlan(request.id, request.epoch, tuple(keys[: len(sources)]))
        request.promotions += 1
        request.promoted_from.update(
            (key, source) for key, source in zip(keys, sources, strict=False) if source != HOST
        )
        request.state = State.LOADING
        return plan

    def num_in_host(self, sources: Sequence[Source]) -> int:
        """Number of leading blocks in host memory, which can be loaded at once; the others must be promoted first."""
        return next((index for index, source in enumerate(sources) if source != HOST), len(sources))

    def is_worth_loading(self, sources: Sequence[Source], *, num_blocks: int | None = None, num_partial: int) -> bool:
        """Whether there are blocks to load and `TierView.worth_loading` returns True."""
        return bool(sources) and self._view.worth_loading(sources, num_blocks=num_blocks, num_partial=num_partial)

    def cached_tokens(self, request: Request, *, num_hits: int, loaded: Sequence[Key]) -> CachedTokens:
        """Numbers of cached tokens that an admission found, by tier: in `num_hits` blocks on the device, and in the
        blocks with the keys `loaded`.
        """
        tiers = Counter({DEVICE: num_hits, HOST: 0})
        tiers.update(request.promoted_from.get(key, HOST) for key in loaded)
        return CachedTokens(**{tier: count * self._limits.block_tokens for tier, count in tiers.items()})

    # ------------------------------------------------------------------ events

    def end_promotion(self, request_id: RequestId, epoch: int, *, again: bool) -> None:
        request = self._queues.unfinished.get(request_id)
        if request is None or request.state is not State.LOADING or request.epoch != epoch:  # rule: late-promotions
            return
        request.state = State.WAITING
        if not again:  # rule: disk-is-not-tried-again
            request.avoid_disk = True

    def mark_load_ready(self, request_id: RequestId, epoch: int) -> None:
        request = self._queues.unfinished.get(request_id)
        if request is not None and request.epoch == epoch:  # rule: load-is-ready-for-its-own-epoch
            request.loading = False

    def mark_load_failed(self, request_id: RequestId, epoch: int) -> Request | None:
        """Handle a failed load. Returns its request, which the caller must preempt; None: the request does not run any
        more.
        """
        request = self._queues.unfinished.get(request_id)
        # rule: failed-load-of-an-older-epoch-is-dropped
        if request is None or request.epoch != epoch or request.state is not State.RUNNING:
            return None
        request.avoid_tiers = True  # rule: failed-load-is-not-tried-again
        if request.num_outputs == 0:
            request.cached = None
        return request
