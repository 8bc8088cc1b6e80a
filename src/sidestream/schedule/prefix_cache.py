"""Blocks that requests can reuse. On the device: the keys (block hashes) of requests, the blocks that are findable
under keys, and the keys of blocks that are being computed. In other tiers: whether a request loads blocks from host
memory, waits for their promotion (a copy from a slower tier to host memory), or computes their tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sidestream.schedule.limits import Limits, reusable_tokens
from sidestream.schedule.request import Request, RequestQueues, State
from sidestream.schedule.states import Source, StateCache
from sidestream.schedule.windows import WindowCache
from sidestream.types import CachedTokens
from sidestream_kv.kv.key_log import DeviceKeyLog
from sidestream_kv.kv.keys import BlockKeys
from sidestream_kv.kv.pool import FencedPool, Lease
from sidestream_kv.types import DEVICE, HOST, BlockId, Fence, FindPlan, Key, PromotePlan, RequestId, StorePlan


class PrefixCache:
    """Publishes complete blocks under their keys, and finds published blocks.

    Invariants:
    - Only blocks of committed tokens are published, never blocks of a step in flight (hazard H12).
    - A key is pending while a running request loads or computes its block: from the start of the request until it
      publishes the block or releases its blocks. Other requests wait for a pending block instead of computing it too.
    """

    def __init__(
        self,
        limits: Limits,
        blocks: FencedPool,
        keys: BlockKeys,
        states: StateCache | None = None,
        key_log: DeviceKeyLog | None = None,
        *,
        windows: WindowCache | None = None,
    ) -> None:
        self.keys_version = 0
        """Version of the keys. It grows when the weights change, because then all keys change."""
        self._limits = limits
        self._blocks = blocks
        self._keys = keys
        self._pending: dict[Key, RequestId] = {}
        self._states = states
        self._windows = windows
        self._key_log = blocks.key_log = key_log
        if states is not None:
            blocks.on_evict += (states.forget,)  # rule: state-is-forgotten-with-its-block

    # ------------------------------------------------------------------ keys

    @property
    def key_root(self) -> Key:
        """Root from which another process derives the same keys (`BlockKeys.from_root`); empty if the prefix cache is
        off.
        """
        return self._keys.root if self._limits.prefix_cache else b""

    def keys_of(self, tokens: Sequence[int] | npt.NDArray[np.int64], *, salt: str = "") -> list[Key]:
        """Keys of the complete blocks of `tokens` in a request with this cache salt. Callable from any thread."""
        keys: list[Key] = []
        if self._limits.prefix_cache:
            self._keys.extend(keys, tokens, salt=salt)
        return keys

    def drop_stale_keys(self, request: Request) -> None:
        """Drop the request's keys if they were made before the last change of the weights."""
        if request.keys_version != self.keys_version:
            request.keys.clear()
            request.keys_version = self.keys_version

    def rekey(self, keys: BlockKeys) -> None:
        """Use `keys` for all blocks from now on. Blocks that were published earlier keep their old keys until
        `forget_all`.
        """
        self._keys = keys
        self.keys_version += 1

    # ------------------------------------------------------------------ finding

    def wanted_keys(self, request: Request) -> list[Key]:
        """Keys of the blocks that the request may reuse instead of computing them."""
        if not self._limits.prefix_cache:
            return []
        if request.needs_prompt_logits:  # rule: prompt-with-log-probabilities-is-computed
            return []
        self._keys.extend(request.keys, request.tokens, salt=request.cache_salt)
        size = self._limits.block_tokens
        return request.keys[: reusable_tokens(len(request.tokens), size) // size]

    def on_device(self, keys: Sequence[Key]) -> list[BlockId]:
        """Blocks of the longest run of leading `keys` that are on the device. Some may be partial: see `num_usable`."""
        return self._blocks.match(keys)  # rule: blocks-on-the-device-are-reused

    def num_usable(self, hits: Sequence[BlockId], num_blocks: int) -> int:
        """How many of `hits`, the request's first blocks on the device, it may use if it reuses `num_blocks` blocks:
        those before the first partial block to which a layer with a sliding window would attend.
        """
        if not self._limits.window:
            return len(hits)
        first = self._limits.blocks_before_window(num_blocks)
        partial = self._blocks.first_partial(hits[first:])  # rule: hit-is-whole-in-its-window
        return len(hits) if partial is None else first + partial

    @property
    def num_pending(self) -> int:
        """The pending keys: running requests load or compute their blocks."""
        return len(self._pending)

    def is_pending(self, keys: Sequence[Key]) -> bool:
        """Whether a running request loads or computes a block of these keys now."""
        return not self._pending.keys().isdisjoint(keys)

    def add_pending(self, request: Request, keys: Iterable[Key]) -> None:
        """Call it when the request starts. Marks the keys of the blocks that it will load or compute as pending."""
        for key in keys:
            self._pending.setdefault(key, request.id)

    def drop_pending(self, request: Request, keys: Iterable[Key]) -> None:
        """End the pending state of these keys. Call it when the request has published the blocks, or will not complete
        them.
        """
        pending, own = self._pending, request.id
        for key in keys:
            if pending.get(key) == own:
                del pending[key]

    # ------------------------------------------------------------------ publishing and forgetting

    def publish(self, request: Request, complete: int) -> Sequence[tuple[Key, BlockId]]:
        """Make the first `complete` blocks findable, and the checkpoints at their ends. For one request, `complete`
        must grow with every call. Returns the newly published blocks that were not loaded from a tier, including the
        parts of checkpoints.
        """
        assert request.blocks is not None
        if not self._limits.prefix_cache or not request.shares:  # rule: blocks-from-before-a-reset-stay-private
            return ()
        self._keys.extend(request.keys, request.tokens, salt=request.cache_salt)
        first = request.published_blocks
        keys, ids = request.keys[first:complete], request.blocks.ids[first:complete]
        self.drop_pending(request, keys)  # rule: published-block-is-not-pending
        request.published_blocks = complete
        if (found := min(complete, request.found_blocks) - first) > 0:
            partial = min(max(0, request.partial_blocks - first), found)
            # rule: block-without-all-layers-is-published-as-partial
            self._blocks.publish_all(ids[:partial], keys[:partial], partial=True)
            self._blocks.publish_all(ids[partial:found], keys[partial:found])
            keys, ids = keys[found:], ids[found:]
        fresh = [(key, block) for key, block in zip(keys, ids, strict=True) if self._blocks.publish(block, key)]
        if self._key_log is not None:
            self._key_log.sequence(request.keys, request.tokens, first=first, stop=complete, salt=request.cache_salt)
        if request.states is not None and self._states is not None:
            # rule: states-are-published-with-their-blocks
            fresh += self._states.publish(
                request.states,
                request.keys,
                complete,
                num_prompt_tokens=len(request.prompt),
                findable=lambda key: self._blocks.get(key) is not None,
            )
        if self._windows is not None:
            fresh += self._windows.publish(request, complete)  # rule: pages-are-published-with-their-blocks
        return fresh

    def storable(self, request: Request, fresh: Sequence[tuple[Key, BlockId]]) -> Sequence[tuple[Key, BlockId]]:
        """Those of the published blocks that the request lets tiers store."""
        keys = request.keys[: request.may_store(request.published_blocks, self._limits.block_tokens)]
        if len(keys) == request.published_blocks:  # rule: request-bounds-its-stores
            return fresh
        allowed = {*keys, *self.part_keys(keys)}
        return [(key, block) for key, block in fresh if key in allowed]

    def invalidate(self, request: Request) -> Sequence[Key]:
        """Make all blocks that the request computed itself unfindable, because its logits are not finite: KV of earlier
        chunks may be broken as well. Of recurrent states, also the checkpoint from which it started. Returns the keys.
        """
        assert request.own_blocks is not None and request.blocks is not None
        own = slice(request.own_blocks, max(request.published_blocks, request.found_blocks))
        keys = request.keys[own]
        # rule: non-finite-logits-invalidate-blocks
        self._blocks.forget(
            [block for key, block in zip(keys, request.blocks.ids[own], strict=False) if self._blocks.get(key) == block]
        )
        if self._states is not None:
            # rule: broken-request-invalidates-its-first-state
            of_states = request.keys[max(0, own.start - 1) : own.stop]
            self._states.forget(of_states)  # rule: broken-request-invalidates-its-states
            keys = [*keys, *(part for key in of_states for part in self._states.part_keys(key))]
        if self._windows is not None:
            self._windows.forget(keys)  # rule: broken-request-invalidates-its-pages
            keys = [*keys, *self.part_keys(keys)]
        return keys

    def forget_all(self, running: Iterable[Request]) -> None:
        """Make every block unfindable, including the blocks that running requests will complete (hazard H8)."""
        self._blocks.forget_all()  # rule: reset-drops-keys-on-the-device
        if self._states is not None:
            self._states.forget_all()  # rule: reset-drops-keys-of-states
        if self._windows is not None:
            self._windows.forget_all()
        self._pending.clear()  # rule: reset-ends-joining
        for request in running:  # rule: reset-makes-running-requests-private
            request.shares = False

    def reach(self, keys: Sequence[Key], tiers: TierView) -> tuple[list[Key], list[Key]]:
        """What a request could reuse now of the blocks with these keys, on the device or in tiers: the leading keys of
        blocks, and the keys of the parts that a prefix of these blocks needs: see `end_parts`.
        """
        found: list[Key] = []
        for key in keys:
            if self._blocks.get(key) is None and not tiers.locate((key,)):
                break
            found.append(key)
        if self._states is not None:
            count, _ = self._states.reach(found, len(found), tiers.locate)
            del found[count:]
        if self._windows is not None:
            del found[self._windows.reach(found, len(found), tiers.locate)[0] :]
        return found, self.end_parts(found)

    def drop(self, keys: Sequence[Key]) -> int:
        """Make these blocks unfindable on the device, and checkpoints at their ends. Returns how many there were."""
        found = [block for key in keys if (block := self._blocks.get(key)) is not None]
        self._blocks.forget(found)
        if self._states is not None:
            self._states.forget(keys)
        if self._windows is not None:
            self._windows.forget(keys)
        return len(found)

    def part_keys(self, keys: Sequence[Key]) -> list[Key]:
        """Keys under which tiers hold the parts of checkpoints at the ends of these blocks, and of their pages."""
        parts = self._states or self._windows
        return [] if parts is None else [part for key in keys for part in parts.part_keys(key)]

    def end_parts(self, keys: Sequence[Key]) -> list[Key]:
        """Keys of the parts that a request needs beside the first blocks of a sequence, which have these keys: of the
        checkpoint at their end, or of the pages in the window before their end.
        """
        first = self._windows.window(len(keys)).start if self._windows is not None else max(0, len(keys) - 1)
        return self.part_keys(keys[first:])

    def store_again(self, keys: Iterable[Key], after: tuple[Fence, ...]) -> tuple[StorePlan, Lease] | None:
        """Plan to store the blocks of `keys` that are still on the device. The caller submits the plan, then releases
        the lease. `after`: the fence of the last committed step.
        """
        # rule: partial-block-is-not-stored
        found = {
            key: block
            for key in keys
            if (block := self._blocks.get(key)) is not None and not self._blocks.is_partial(block)
        }
        if not found:
            return None
        # A block becomes findable when rank 0 has ended the step that filled it. Other ranks may still run that step,
        # so the store must wait for it.
        plan = StorePlan(  # rule: deferred-store-waits-for-every-rank
            tuple(found), tuple(found.values()), after, tuple(found)
        )
        return plan, self._blocks.share([*found.values()])  # rule: deferred-store-leases-its-blocks


class TierView(Protocol):
    """The interface of tiers and transfers for the scheduler. Read-only; never blocks. Without tiers, nothing is there
    to load or to wait for, as the methods say here.
    """

    def locate(self, keys: Sequence[Key]) -> list[Source]:
        """The tier of each block in the longest run of leading `keys` whose blocks are all in tiers."""
        return []

    def worth_loading(self, sources: Sequence[Source], *, num_blocks: int | None = None, num_partial: int = 0) -> bool:
        """Whether to load blocks from the tiers `sources`: True if that is expected to be faster than computing the
        tokens of `num_blocks` blocks (None: of the loaded blocks). `num_partial` of the blocks are loaded without the
        layers with a sliding window.
        """
        return False

    def head(self, sources: Sequence[Source], *, num_partial: int = 0) -> int:
        """How many of the first blocks to load, before the others are computed, so that all are there soonest; 0: none.
        For the arguments see `worth_loading`.
        """
        return 0

    def find_patience(self, num_blocks: int) -> float:
        """Seconds that a request may wait while tiers are asked for `num_blocks` blocks that another process may have
        stored; 0: it does not ask.
        """
        return 0.0

    def seconds_left(self, request_id: RequestId, epoch: int, *, step_s: float) -> float:
        """Seconds until a step that takes `step_s` can begin without waiting for the request's loads; 0: now."""
        return 0.0

    def transfers_fence(self) -> Fence | None:
        """A fence that is done when all transfers submitted so far have released their device blocks. None: they all
        have released them already.
        """
        return None


class NoTiers(TierView):
    """The view of an engine without tiers other than the device."""


@dataclass(eq=False)
class TierLoads:
    """Decides between loading, promoting from disk and computing, and handles the ends of loads and promotions.

    Invariants:
    - Only blocks in the host tier are loaded into the device. If some blocks of a run are in a slower tier, they are
      promoted first. Meanwhile the request is LOADING, and it is admitted when the promotion ends.
    - A promotion or load that failed counts as a cache miss. The request does not try that tier again, so it makes
      progress (hazards H9, H26).
    - At most as many requests are LOADING as may run, so that their blocks do not fill the host tier.

    divides   whether a part of a prefix can be loaded; not if recurrent states are needed, which are at its end
    """

    _limits: Limits
    _view: TierView
    _queues: RequestQueues
    _max_running: int
    divides: bool

    # ------------------------------------------------------------------ decisions

    def locate(self, request: Request, keys: Sequence[Key]) -> list[Source]:
        """The tier of each block in the longest run of leading `keys` that the request may load."""
        if request.avoid_tiers:
            return []
        sources, cache = self._view.locate(keys), request.cache
        if cache is None or cache.load_tiers is None:  # rule: request-names-the-tiers-that-it-reads
            return sources
        return list(takewhile(cache.may_load, sources))

    def beyond(self, keys: Sequence[Key]) -> str:
        """The tier that holds the first of `keys`, whatever a request allows; empty: none."""
        return next(iter(self._view.locate(keys)), "")

    def patience(self, request: Request, missing: Sequence[Key]) -> float:
        """Seconds that the request may wait while tiers are asked for the blocks `missing`, which no tier is known to
        hold; 0: it does not ask. A request asks once.
        """
        if not missing or request.has_asked or request.avoid_disk or request.avoid_tiers:  # rule: request-asks-once
            return 0.0
        if request.may_load(len(missing), self._limits.block_tokens) < len(missing):  # a bound: computing is wanted
            return 0.0
        return self._view.find_patience(len(missing))

    def find(self, request: Request, keys: Sequence[Key], patience_s: float) -> FindPlan:
        """Plan to ask tiers for `keys`, and make the request wait for the answer."""
        request.has_asked = True
        request.state = State.LOADING  # rule: request-waits-for-its-answer
        return FindPlan(request.id, request.epoch, tuple(keys), patience_s)

    def num_to_promote(self, request: Request, sources: Sequence[Source], *, num_partial: int) -> int:
        """Number of leading blocks for which the request may wait until they are in host memory, because some of them
        are in slower tiers; 0: it does not wait. For `num_partial` see `TierView.worth_loading`.
        """
        # rule: promoting-requests-are-bounded
        loading = sum(other.state is State.LOADING for other in self._queues.waiting.values())
        # rule: request-promotes-a-bounded-number-of-times
        may = (
            self.num_in_host(sources) < len(sources)
            and not request.avoid_disk
            and request.promotions < self._limits.max_promotions
            and loading < self._max_running
        )
        if not may:
            return 0
        return self.num_worth_waiting(sources, num_partial=num_partial)

    def num_worth_waiting(self, sources: Sequence[Source], *, num_partial: int) -> int:
        """Number of leading blocks that a request should wait for, some of them in tiers slower than host memory; 0: it
        should not wait.
        """
        if not self.divides:  # rule: checkpoint-is-loaded-with-its-whole-prefix
            return len(sources) if self._view.worth_loading(sources, num_partial=num_partial) else 0
        count = self._view.head(sources, num_partial=num_partial)
        return count if count > self.num_in_host(sources) else 0

    def may_read_ahead(self, num_blocks: int) -> bool:
        """Whether one more request in the queue may read blocks, if those before it have read `num_blocks`."""
        loading = sum(other.state is State.LOADING for other in self._queues.waiting.values())
        return num_blocks < self._limits.read_ahead_blocks and 2 * loading < self._max_running

    def promote(
        self, request: Request, keys: Sequence[Key], sources: Sequence[Source], *, num_partial: int
    ) -> PromotePlan | None:
        """Plan a promotion of some of the first `keys`, which are in the tiers `sources`, and make the request wait for
        it. Returns None if no promotion is worth the time, or if the request has waited too often.
        """
        count = self.num_to_promote(request, sources, num_partial=num_partial)
        if not count:
            return None
        plan = PromotePlan(request.id, request.epoch, tuple(keys[:count]))
        request.promotions += 1
        request.promoted_from.update(
            (key, source) for key, source in zip(plan.keys, sources, strict=False) if source != HOST
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
