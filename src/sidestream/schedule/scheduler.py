"""The scheduler: continuous batching with chunked prefill, admission, preemption and priorities. Pure: no tensors, no
clock.

`plan` plans the next step, and `commit` applies its results. Between the two, the step is in flight: requests count its
tokens in `launched_*`, but decisions rely only on committed tokens and blocks (hazard H12). Called from the engine
thread only.

    plan ──▶ planning.py     preempts, adds decode rows and chunks of prompts, starts waiting requests
    commit ─▶ Committer      appends tokens, publishes complete blocks

Both use, from above to below:

    allocation.py            blocks to reuse, and leases of slots and blocks
    prefix_cache.py          keys, the blocks that are findable under them, loads and promotions from other tiers
    states.py                recurrent states and their checkpoints
    windows.py               blocks of layers with a sliding window
    request.py, limits.py    requests and their queues; sizes of a step, where a prompt is cut, checks of requests
    spec_policy.py           numbers of drafts
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sidestream.errors import InvariantError
from sidestream.schedule.allocation import Allocator, ReuseFinder
from sidestream.schedule.limits import Limits
from sidestream.schedule.planning import Admission, DecodePlanner, Preemption, PrefillPlanner, StepBuilder
from sidestream.schedule.prefix_cache import NoTiers, PrefixCache, TierLoads, TierView
from sidestream.schedule.request import Request, RequestQueues, State
from sidestream.schedule.spec_policy import SpecPolicy
from sidestream.schedule.states import StateCache
from sidestream.schedule.windows import WindowCache
from sidestream.types import BatchPlan, Result, RowResult, StepPlan
from sidestream_kv.kv.key_log import DeviceKeyLog
from sidestream_kv.kv.keys import BlockKeys
from sidestream_kv.kv.pool import FencedPool, Lease
from sidestream_kv.kv.state_layout import StateRegion
from sidestream_kv.kv.window_layout import WindowedLayers
from sidestream_kv.types import BlockId, Fence, Key, RequestId, StorePlan, TransferPlan

# A request whose prompt was found in a cache by this share, 1 / N, is returning: see `StorePlan.returning`.
_RETURNING = 3

RowOutput = tuple[Request, RowResult, int, str | None]
"""A request, its result, the number of committed tokens of the result, and the finish reason (None: the request
continues).
"""


@dataclass(frozen=True, slots=True)
class Committed:
    """The effects of one commit.

    outputs      the others of the rows that sampled and were not dropped, in the order of the batch
    going        requests that got one token, and go on
    tokens       these tokens, one for each request of `going`
    completed    requests that completed blocks in this step, each with the number of all its complete blocks
    fence        the step's fence
    invalidated  keys to remove from all tiers: later logits of their requests were not finite, so their KV may be
                 broken
    """

    outputs: Sequence[RowOutput]
    going: Sequence[Request]
    tokens: Sequence[int]
    completed: Sequence[tuple[Request, int]]
    fence: Fence
    invalidated: Sequence[Key]


@dataclass(eq=False)
class Committer:
    """Applies the results of steps that have ended. `commit` is hot code: it handles every row of every step.

    Invariants:
    - Rows of finished or preempted requests are dropped (hazard H10).
    - `committed_len` grows by accepted tokens only, never by rejected drafts (hazard H12).
    - Blocks computed before logits that were not finite are not published (hazard H9).
    """

    _limits: Limits
    _queues: RequestQueues
    _prefix_cache: PrefixCache
    _policy: SpecPolicy
    _states: StateCache | None

    def commit(
        self, batch: BatchPlan, results: Sequence[Result], fence: Fence, forced: Container[RequestId]
    ) -> Committed:
        """Append the step's tokens to its requests. `results`: one for each row that samples, in order. `forced`: see
        `Scheduler.commit`.
        """
        outputs: list[RowOutput] = []
        going: list[Request] = []
        tokens: list[int] = []
        completed: list[tuple[Request, int]] = []
        drafted: list[tuple[int, int, int]] = []
        sure: list[tuple[int, int, int]] = []
        invalidated: list[Key] = []
        requests, size, columns = self._queues.unfinished, self._limits.block_tokens, batch.columns
        exact = not batch.speculates and self._states is None
        results_left = iter(results)
        rows = zip(
            map(requests.get, columns.request_id),
            columns.epoch,
            columns.stop,
            columns.tokens,
            columns.drafts,
            columns.states,
            results if all(columns.samples) else [next(results_left) if each else None for each in columns.samples],
            strict=True,
        )
        for request, epoch, stop, chunk, drafts, states, result in rows:
            # rule: late-results
            if request is None or request.epoch != epoch:  # it ended, or was preempted
                continue
            request.stepped = True
            before, committed_len = request.committed_len, stop
            goes_on = exact and chunk is None and type(result) is int and stop < request.last_len
            if goes_on and result not in request.stop_ids:  # nearly always
                request.tokens.append(result)
                going.append(request)
                tokens.append(result)
                if stop % size:
                    request.committed_len = stop
                    continue
            elif result is not None:
                row = RowResult((result,)) if isinstance(result, int) else result
                count, stop_reason = request.append_outputs(row.token_ids)
                outputs.append((request, row, count, stop_reason))
                if chunk is None:
                    committed_len = before + count  # rule: only-accepted-tokens-are-committed
                    if drafts:
                        request.settle_drafts(drafts, len(row.token_ids))
                        if row.token_ids:  # else the logits were not finite, and no draft was verified
                            outcomes = sure if request.id in forced else drafted
                            outcomes.append((request.spec_record, drafts, len(row.token_ids) - 1))
            request.committed_len = committed_len
            # rule: blocks-of-non-finite-logits-are-not-published
            if isinstance(result, RowResult) and not result.finite:
                invalidated += self._prefix_cache.invalidate(request)
                continue
            if states is not None and request.states is not None and self._states is not None:
                covers = before + 1 if chunk is None else stop
                self._states.commit(request.states, states, covers, committed_len, fence)
            complete = committed_len // size  # rule: only-committed-blocks-are-published
            if complete > request.published_blocks:
                completed.append((request, complete))
        if drafted:
            self._policy.record_accepted(*zip(*drafted, strict=True))
        if sure:
            self._policy.record_forced(*zip(*sure, strict=True))
        return Committed(outputs, going, tokens, completed, fence, invalidated)

    def publish(self, committed: Committed) -> StorePlan | None:
        """Make completed blocks findable, and plan to store the blocks that were not loaded from a tier.

        Call it before any request of the commit is finished. Separate from `commit`, so that clients get their tokens
        first: publishing a thousand loaded blocks takes half a millisecond.
        """
        stored: list[tuple[Key, BlockId]] = []
        prefix: list[Key] = []
        returning: set[Key] = set()
        for request, complete in committed.completed:
            first = request.published_blocks
            if fresh := self._prefix_cache.publish(request, complete):
                if request.cache is not None:
                    fresh = self._prefix_cache.storable(request, fresh)
                stored.extend(fresh)
                prefix.extend(request.keys[: request.may_store(complete, self._limits.block_tokens)])
                found = request.own_blocks or 0
                if first <= found:  # its first blocks that a store gets
                    returning.update(request.keys[:found], self._prefix_cache.end_parts(request.keys[:found]))
                if found * _RETURNING * self._limits.block_tokens > len(request.prompt):
                    returning.update(key for key, _ in fresh)
        if not stored:
            return None
        keys, block_ids = zip(*stored, strict=True)
        superseded = () if self._states is None else self._states.take_superseded()
        return StorePlan(keys, block_ids, (committed.fence,), tuple(prefix), superseded, frozenset(returning))


def _window_cache(
    layers: WindowedLayers | None,
    limits: Limits,
    blocks: FencedPool,
    tiers: TierView,
    max_drafts: int,
    key_log: DeviceKeyLog | None,
) -> WindowCache | None:
    if layers is None:
        return None
    tokens = limits.chunk_tokens + 1 + max_drafts
    return WindowCache(limits, layers, blocks, tiers, tokens, key_log)


class Scheduler:
    """Owner of all requests and of the leases of device blocks and request slots.

    Invariant: a step waits for the last uses of all blocks that were allocated since the step before it (hazard H2).
    """

    def __init__(
        self,
        *,
        limits: Limits,
        blocks: FencedPool,
        slots: FencedPool,
        keys: BlockKeys,
        tiers: TierView | None = None,
        policy: SpecPolicy | None = None,
        states: tuple[FencedPool, StateRegion] | None = None,
        windows: WindowedLayers | None = None,
        key_log: DeviceKeyLog | None = None,
    ) -> None:
        """`policy` None: rows have no drafts. `states` None: the model has no recurrent state. `windows` None: no
        layers have blocks of their own. `key_log`: records which keys are findable on the device.
        """
        view: TierView = tiers or NoTiers()
        self.limits = limits
        self.slots = slots
        self._view = view
        self._policy = policy or SpecPolicy(0)
        self._queues = queues = RequestQueues(limits.aging_steps)
        self._states = None if states is None else StateCache(limits, *states, slots, view)
        self._windows = _window_cache(windows, limits, blocks, view, self._policy.max_drafts, key_log)
        self._prefix_cache = cache = PrefixCache(limits, blocks, keys, self._states, key_log, windows=self._windows)
        # A checkpoint and pages are at the end of what is loaded, so a part of it would be of no use.
        divides = not (states or windows)
        self._tiers = loads = TierLoads(limits, view, queues, slots.size, divides=divides)
        self._allocator = allocator = Allocator(limits, blocks, slots, cache, view, self._states, self._windows)
        reuse = ReuseFinder(limits, cache, loads, self._states, self._windows)
        self._prefill = PrefillPlanner(limits, view, allocator)
        self._admission = Admission(limits, queues, cache, allocator, loads, reuse, self._prefill)
        self._preemption = Preemption(limits.aging_steps, queues, cache, allocator, loads, self._admission, reuse)
        self._decode = DecodePlanner(limits, self._policy, allocator, self._preemption, bool(states))
        self._committer = Committer(limits, queues, cache, self._policy, self._states)
        self._owed: list[Fence] = []
        self._committed: tuple[Fence, ...] = ()  # fences of the last committed step

    # ------------------------------------------------------------------ requests

    @property
    def num_running(self) -> int:
        """Requests with a slot."""
        return len(self._queues.running)

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self._queues.waiting)

    @property
    def num_begun(self) -> int:
        """Requests that were admitted once and have not finished."""
        return sum(request.has_begun for request in self._queues.unfinished.values())  # rule: begun-requests

    @property
    def num_preemptions(self) -> int:
        """Requests preempted so far, because other requests needed their blocks or slots."""
        return self._preemption.count

    def get(self, request_id: RequestId) -> Request | None:
        """A request that has not finished."""
        return self._queues.unfinished.get(request_id)

    def requests(self) -> list[Request]:
        """All requests that have not finished, in order of arrival."""
        return sorted(self._queues.unfinished.values(), key=lambda request: request.id)

    def sizes(self) -> Mapping[str, int]:
        """Number of objects that are kept for requests, by kind; all 0 without requests. For tests and the checker."""
        return {
            "requests": len(self._queues.unfinished),
            "queued requests": len(self._queues.waiting),
            "running requests": len(self._queues.running),
            "pending keys": self._prefix_cache.num_pending,
        }

    def submit(self, request: Request) -> None:
        """Queue a new request. Ids must grow with arrival."""
        self._prefix_cache.drop_stale_keys(request)  # rule: request-that-arrives-late-gets-the-new-keys
        if self._policy.max_drafts:
            request.spec_record = self._policy.add_request(request.max_drafts)
        self._queues.add(request)

    def finish(self, request: Request, reason: str) -> None:
        """End a request in any state. Its blocks and its slot can be reused after its last step (hazards H16, H21)."""
        if request.state is State.FINISHED:  # rule: finish-happens-once
            return
        self._allocator.release(request)  # rule: finish-releases
        self._queues.remove(request)
        request.finish_reason = reason
        if self._policy.max_drafts:
            self._policy.remove_request(request.spec_record)

    def preempt(self, request: Request) -> None:
        """Release a running request's slot and blocks, and queue it again."""
        self._preemption.preempt(request)

    def pause_admission(self, reason: str = "weights") -> None:
        """Admit no new requests. Requests that were admitted before continue to their end, even after a preemption."""
        self._admission.paused |= {reason}

    def resume_admission(self, reason: str = "weights") -> None:
        """Admit all requests again, unless admission is also paused for another reason."""
        self._admission.paused -= {reason}

    # ------------------------------------------------------------------ keys and blocks

    @property
    def keys_version(self) -> int:
        """Version of the keys. It grows when the weights change, because then all keys change."""
        return self._prefix_cache.keys_version

    @property
    def key_root(self) -> Key:
        return self._prefix_cache.key_root

    def keys_of(self, tokens: Sequence[int] | npt.NDArray[np.int64], *, salt: str = "") -> list[Key]:
        """Keys of the complete blocks of `tokens` in a request with this cache salt. Callable from any thread."""
        return self._prefix_cache.keys_of(tokens, salt=salt)

    def forget_all(self) -> None:
        """Make every block unfindable, including the blocks that running requests will complete (hazard H8)."""
        self._prefix_cache.forget_all(self._queues.running.values())

    def rekey(self, keys: BlockKeys) -> None:
        """Use `keys` for all blocks from now on, because the weights changed (hazard H14). Makes every block
        unfindable. Call it only while no request runs.
        """
        if self._queues.running:
            raise InvariantError(f"{self.num_running} requests run: their KV belongs to the keys of the old model")
        self._prefix_cache.rekey(keys)
        for request in self._queues.waiting.values():
            self._prefix_cache.drop_stale_keys(request)  # rule: waiting-requests-get-the-new-keys
        self.forget_all()  # rule: new-keys-drop-the-blocks-on-the-device

    def reach(self, keys: Sequence[Key]) -> tuple[list[Key], list[Key]]:
        """See `PrefixCache.reach`."""
        return self._prefix_cache.reach(keys, self._view)

    def drop(self, keys: Sequence[Key]) -> int:
        """See `PrefixCache.drop`."""
        return self._prefix_cache.drop(keys)

    def part_keys(self, keys: Sequence[Key]) -> list[Key]:
        """See `PrefixCache.part_keys`."""
        return self._prefix_cache.part_keys(keys)

    def store_again(self, keys: Iterable[Key]) -> tuple[StorePlan, Lease] | None:
        return self._prefix_cache.store_again(keys, self._committed)

    def store_latest(self) -> tuple[StorePlan, Lease] | None:
        """Plan to store what is worth keeping only of the ends of requests: see `StateCache` and `WindowCache`."""
        parts = self._states or self._windows
        return None if parts is None else parts.store_latest(self._committed)

    @property
    def has_parts(self) -> bool:
        """Whether a prefix needs more than its blocks: `end_parts`."""
        return self._states is not None or self._windows is not None

    def end_parts(self, keys: Sequence[Key]) -> list[Key]:
        return self._prefix_cache.end_parts(keys)

    # ------------------------------------------------------------------ events of tiers

    def promoted(self, request_id: RequestId, epoch: int, *, again: bool) -> None:
        """Call it when a promotion (a copy from disk to host memory) has ended or passed its deadline. The request
        waits for admission. It may wait for another promotion only if `again`.
        """
        self._tiers.end_promotion(request_id, epoch, again=again)

    def load_ready(self, request_id: RequestId, epoch: int) -> None:
        """Call it when all copies of a load were submitted, so that there are fences for all layers. Steps with the
        load's request may now be launched: each layer waits for its fences.
        """
        self._tiers.mark_load_ready(request_id, epoch)

    def load_failed(self, request_id: RequestId, epoch: int) -> None:
        """Call it when a load has failed. The request is preempted, and computes the blocks instead."""
        request = self._tiers.mark_load_failed(request_id, epoch)
        if request is not None:
            self._preemption.preempt(request)  # rule: failed-load-is-computed

    # ------------------------------------------------------------------ steps

    def plan(self, *, lead_s: float = 0.0, step_s: float = 0.0, prefill_rate: float | None = None) -> StepPlan:
        """Plan the next step: decode rows first, then prefill, then admission, each in order of rank. A plan without
        rows means that there is nothing to compute.

        lead_s   seconds that the device is expected to be busy before the step begins
        step_s   seconds that the step is expected to take
        prefill_rate   see `Limits.prefill_budget`
        """
        self._preemption.make_room_for_priority()
        ranked = self._queues.running_by_rank()
        decoding = self._decode.choose(ranked)
        num_decoding = len(decoding)
        # rule: blocks-taken-before-wait-for-their-last-use
        step = StepBuilder(self.limits.prefill_budget(num_decoding, prefill_rate), lead_s, step_s, after=self._owed)
        self._decode.plan(decoding, ranked, step)
        if num_decoding < len(ranked):
            for request in ranked:
                self._prefill.plan(request, step)
        self._admission.admit(step)
        self._prefill.plan_arriving(step)
        self._prefill.plan_short(step, self._preemption.make_room)
        if step.drafts and step.prefills:
            self._policy.charge([self._queues.running[row.request_id].spec_record for row in step.prefills])
        plan = step.build()
        self._queues.age(plan.batch)
        self._owed = [] if plan.batch.num_rows else step.after
        return plan

    def plan_loads(self) -> Sequence[TransferPlan]:
        """Admit requests that arrived after the last plan and have blocks to load or to promote. Returns their
        transfers, which the caller submits at once.

        Follows the rules and the order of `plan`. Stops at the first request, by rank, that lacks a slot or blocks, or
        that needs no load. The next `plan` continues with this request. Steps may be in flight: a load waits for the
        last uses of its blocks.
        """
        # rule: blocks-taken-during-a-wait-wait-for-their-last-use
        step = StepBuilder(0, 0.0, 0.0, loads_only=True, after=self._owed)
        self._admission.admit(step)
        return step.transfers

    def launched(self, batch: BatchPlan, fence: Fence) -> None:
        """Call it when a step was launched. Once the fence is done, the step uses no block and no slot any more."""
        columns = batch.columns
        requests = map(self._queues.unfinished.get, columns.request_id)
        for request, epoch in zip(requests, columns.epoch, strict=True):
            if request is not None and request.epoch == epoch:  # rule: step-of-an-older-epoch-leaves-no-fence
                request.last_fence = fence  # rule: step-leaves-its-fence

    def commit(
        self, batch: BatchPlan, results: Sequence[Result], fence: Fence, forced: Container[RequestId] = ()
    ) -> Committed:
        """Apply the results of a step that has ended (with several ranks: on rank 0). The caller must then call
        `publish`. `results`: one for each row that samples. `forced`: requests whose drafts were planned as forced
        by their grammars, or are.

        Rows of finished or preempted requests are dropped. The caller must `finish` the requests that end.
        """
        self._committed = (fence,)
        return self._committer.commit(batch, results, fence, forced)

    def publish(self, committed: Committed) -> StorePlan | None:
        """Make the blocks findable that a commit completed. Returns a plan to store those blocks that were not loaded
        from a tier; None: there are none.
        """
        return self._committer.publish(committed)

    def trim(self, committed: Committed) -> None:
        """Release the pages that no window reaches any more. Call it when the plan of `publish` was submitted."""
        if self._windows is not None:
            for request, _ in committed.completed:
                self._windows.trim(request, committed.fence)

    def measured(self, batch: BatchPlan, seconds: float) -> None:
        """Record the duration of a step that has only decode rows."""
        if self._policy.max_drafts:
            rows, columns = batch.num_rows, batch.columns
            self._policy.record_step(rows, max(columns.drafts), seconds, sum(columns.stop) / rows)
