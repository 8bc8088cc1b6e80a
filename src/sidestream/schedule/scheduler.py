"""Who runs next: continuous batching with chunked prefill, admission, preemption, priorities. Pure: no tensors, no
clock.

`plan` reads the ledger and says what the next step does; `commit` takes in what a step yielded. Between the two, steps
and transfers are on their way: the scheduler counts on them (`launched_*`) but believes only what was committed (H12).
Called from the engine thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from sidestream.errors import InvariantError
from sidestream.kv.keys import BlockKeys
from sidestream.kv.pool import FencedPool, Lease
from sidestream.schedule.chunk import chunk_stop, reusable_tokens
from sidestream.schedule.drafting import DraftPolicy
from sidestream.schedule.request import Request, State
from sidestream.types import (
    BatchPlan,
    CachedTokens,
    Fence,
    Key,
    LoadPlan,
    PromotePlan,
    RequestId,
    RowPlan,
    RowResult,
    RowStart,
    StepPlan,
    StorePlan,
    TransferPlan,
)

Source = Literal["host", "disk"]


class TierView(Protocol):
    """What the scheduler asks about the tiers. Read-only, never blocks."""

    def locate(self, keys: Sequence[Key]) -> list[Source]:
        """Where the longest run of leading `keys` rests; its length is the run's."""
        ...

    def worth_loading(self, sources: Sequence[Source]) -> bool:
        """Whether loading these blocks is expected to be faster than computing them."""
        ...

    def seconds_left(self, request_id: RequestId, epoch: int, *, step_s: float) -> float:
        """How soon a step of `step_s` may begin that is expected not to wait for blocks that are loaded for the
        request; 0: at once.
        """
        ...

    def uses(self) -> Fence | None:
        """Done when every transfer ordered so far has let go of the device's blocks; None: it has."""
        ...


class NoTiers:
    """No tier besides the device."""

    def locate(self, keys: Sequence[Key]) -> list[Source]:
        """Nothing rests anywhere."""
        return []

    def worth_loading(self, sources: Sequence[Source]) -> bool:
        """There is nothing to load."""
        return False

    def seconds_left(self, request_id: RequestId, epoch: int, *, step_s: float) -> float:
        """Nothing is on its way."""
        return 0.0

    def uses(self) -> Fence | None:
        """Nothing is."""
        return None


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one step and of fairness.

    tail_apart      see `chunk_stop`
    aging_steps     steps of waiting that improve a request's priority by one
    token_budget    of a step, drafts not counted
    max_promotions  times a request waits for the disk before it recomputes
    max_probes      requests that one step looks at for admission
    """

    block_tokens: int
    chunk_tokens: int
    token_budget: int
    prefix_cache: bool = True
    tail_apart: bool = True
    aging_steps: int = 256
    max_promotions: int = 2
    max_probes: int = 64


Drawn = tuple[Request, RowResult, int, str | None]
"""What a commit added to a request: of the result, the first so many tokens, and why they end the request, if they do.
None follows those.
"""


@dataclass(frozen=True, slots=True)
class Committed:
    """What a commit yields.

    drawn      tokens, in the order of the batch
    completed  of requests that completed blocks, how many they have now, by the step of `fence`
    invalidated   keys that nobody may find in a tier: their KV may be no better than logits that were not finite
    """

    drawn: tuple[Drawn, ...]
    completed: tuple[tuple[Request, int], ...]
    fence: Fence
    invalidated: tuple[Key, ...]


@dataclass(slots=True)
class _Draft:
    """A step in the making; lives inside one `plan` call, or, if no step is to come of it (`loads_only`), one
    `order_loads`.

    arriving  whose blocks are on their way for longer than the device is busy, by rank
    """

    prefill_budget: int
    lead_s: float
    step_s: float
    loads_only: bool = False
    speculates: bool = False
    decodes: list[RowPlan] = field(default_factory=list)
    drafting: list[RowPlan] = field(default_factory=list)
    prefills: list[RowPlan] = field(default_factory=list)
    transfers: list[TransferPlan] = field(default_factory=list)
    after: list[Fence] = field(default_factory=list)
    undrafted: Counter[str] = field(default_factory=Counter)
    arriving: list[Request] = field(default_factory=list)


class Scheduler:
    """Owner of all requests and of the device's block and row pools."""

    def __init__(
        self,
        *,
        limits: Limits,
        blocks: FencedPool,
        rows: FencedPool,
        keys: BlockKeys,
        tiers: TierView | None = None,
        drafts: DraftPolicy | None = None,
    ) -> None:
        """`drafts` None: nothing is drafted."""
        self.limits = limits
        self._drafts = drafts or DraftPolicy(0)
        self.num_preemptions = 0
        self._blocks = blocks
        self._rows = rows
        self._keys = keys
        self.keys_version = 0
        self.admits_new = True
        """False: nobody is admitted who was not before; those who were go on to their end."""
        self._tiers: TierView = tiers or NoTiers()
        self._requests: dict[RequestId, Request] = {}
        self._queue: dict[RequestId, Request] = {}  # WAITING and LOADING, in order of arrival
        self._running: dict[RequestId, Request] = {}
        self._ranked: list[Request] | None = None  # of those, by rank; None: that may have changed
        self._coming: dict[Key, RequestId] = {}  # blocks that a running request loads or is about to complete
        self._owed: list[
            Fence
        ] = []  # last uses of blocks that were taken since a step was last planned: the next one waits for them

    # ------------------------------------------------------------------ what the engine asks

    @property
    def num_running(self) -> int:
        """Requests with a row."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self._queue)

    def get(self, request_id: RequestId) -> Request | None:
        """A request that has not finished."""
        return self._requests.get(request_id)

    def requests(self) -> list[Request]:
        """All requests that have not finished, in order of arrival."""
        return sorted(self._requests.values(), key=lambda request: request.id)

    def keys_of(self, tokens: Sequence[int] | npt.NDArray[np.int64], *, salt: str = "") -> list[Key]:
        """Keys of the complete blocks of `tokens` in a request with this cache salt. Pure: any thread."""
        keys: list[Key] = []
        if self.limits.prefix_cache:
            self._keys.extend(keys, tokens, salt=salt)
        return keys

    @property
    def key_root(self) -> Key:
        """What makes the same keys elsewhere (`BlockKeys.from_root`); empty: there is no prefix cache."""
        return self._keys.root if self.limits.prefix_cache else b""

    # ------------------------------------------------------------------ transitions

    def submit(self, request: Request) -> None:
        """Queue a new request. Ids must grow with arrival."""
        if request.keys_version != self.keys_version:
            request.keys.clear()
            request.keys_version = self.keys_version
        request.drafting = self._drafts.newcomer(request.max_drafts)
        self._requests[request.id] = request
        self._queue[request.id] = request

    def finish(self, request: Request, reason: str) -> None:
        """End a request, whatever it was doing. What it used is released behind its last step (H16, H21)."""
        if request.state is State.FINISHED:
            return
        self._give_up_device(request)
        self._queue.pop(request.id, None)
        self._requests.pop(request.id, None)
        request.state = State.FINISHED
        request.finish_reason = reason
        self._drafts.gone(request.drafting)

    def promoted(self, request_id: RequestId, epoch: int, *, again: bool) -> None:
        """A promotion ended or ran out of time; the request is tried again, without the disk unless `again`."""
        request = self._requests.get(request_id)
        if request is None or request.state is not State.LOADING or request.epoch != epoch:
            return
        request.state = State.WAITING
        if not again:
            request.avoid_disk = True

    def load_ready(self, request_id: RequestId, epoch: int) -> None:
        """A load into the device has fences for all of it: steps of its request may leave, gated by them."""
        request = self._requests.get(request_id)
        if request is not None and request.epoch == epoch:
            request.loading = False

    def load_failed(self, request_id: RequestId, epoch: int) -> None:
        """A load into the device failed: the request recomputes, in other blocks. A failed load is a miss."""
        request = self._requests.get(request_id)
        if request is not None and request.epoch == epoch and request.state is State.RUNNING:
            request.avoid_tiers = True
            if request.num_outputs == 0:
                request.cached = None
            self._preempt(request)

    def forget_all(self) -> None:
        """Make every block unfindable at once, those that running requests are about to complete too (H8)."""
        self._blocks.forget_all()
        self._coming.clear()
        for request in self._running.values():
            request.shares = False

    @property
    def num_begun(self) -> int:
        """Requests that were admitted once and have not finished."""
        return sum(request.cached is not None or request.epoch > 0 for request in self._requests.values())

    def rekey(self, keys: BlockKeys) -> None:
        """Name blocks by other keys from now on, because the model is another (H14). Only while nobody runs; forgets
        every block.
        """
        if self._running:
            raise InvariantError(f"{len(self._running)} requests run: their KV belongs to the keys that were")
        self._keys = keys
        self.keys_version += 1
        for request in self._queue.values():
            request.keys.clear()
            request.keys_version = self.keys_version
        self.forget_all()

    def launched(self, batch: BatchPlan, fence: Fence) -> None:
        """A step was launched; its fence covers every use that its requests make of blocks and rows."""
        requests, columns = self._requests, batch.columns
        for request_id, epoch in zip(columns.request_id, columns.epoch, strict=True):
            request = requests.get(request_id)
            if request is not None and request.epoch == epoch:
                request.last_fence = fence

    def commit(self, batch: BatchPlan, results: Sequence[RowResult], fence: Fence) -> Committed:
        """Take in a step whose fence was observed. `results`: one for each row that samples, in order. `publish` is to
        follow.

        Rows of finished or preempted requests are dropped. Does not finish anything: that is the caller's part.
        """
        drawn: list[Drawn] = []
        completed: list[tuple[Request, int]] = []
        drafted: list[tuple[int, int, int]] = []
        invalidated: list[Key] = []
        results_left, requests, size, running = iter(results), self._requests, self.limits.block_tokens, State.RUNNING
        columns = batch.columns
        rows = zip(
            columns.request_id,
            columns.epoch,
            columns.stop,
            columns.tokens,
            columns.samples,
            columns.drafts,
            strict=True,
        )
        for request_id, epoch, stop, tokens, samples, drafts in rows:
            result = next(results_left) if samples else None
            request = requests.get(request_id)
            if request is None or request.epoch != epoch or request.state is not running:
                continue
            request.stepped = True
            if result is None:
                request.committed_len = stop
            else:
                count, stop_reason = request.append_outputs(result.token_ids)
                drawn.append((request, result, count, stop_reason))
                if tokens is not None:
                    request.committed_len = stop
                else:
                    if drafts:
                        self._re_anchor(request, drafts, len(result.token_ids))
                        if result.token_ids:  # else its logits are not finite, which says nothing of its drafts
                            drafted.append((request.drafting, drafts, len(result.token_ids) - 1))
                    request.committed_len += count
                if not result.finite:
                    invalidated += self._invalidate(request)
                    continue
            complete = request.committed_len // size
            if complete > request.published_blocks:
                completed.append((request, complete))
        if drafted:
            self._drafts.saw(*zip(*drafted, strict=True))
        return Committed(tuple(drawn), tuple(completed), fence, tuple(invalidated))

    def publish(self, committed: Committed) -> StorePlan | None:
        """Make what a commit completed findable; what of it is to be stored. Before anything of it is finished: a
        thousand blocks that came back take half a millisecond, and whoever goes on can be told its token first.
        """
        stored: list[tuple[Key, int]] = []
        prefix: list[Key] = []
        for request, complete in committed.completed:
            if fresh := self._publish(request, complete):
                stored.extend(fresh)
                prefix.extend(request.keys[:complete])
        if not stored:
            return None
        return StorePlan(
            tuple(key for key, _ in stored), tuple(block for _, block in stored), (committed.fence,), tuple(prefix)
        )

    def store_again(self, keys: Iterable[Key]) -> tuple[StorePlan, Lease] | None:
        """A store of those of these blocks that the device still has. The caller releases the lease once the plan is
        submitted.
        """
        found = {key: block for key in keys if (block := self._blocks.get(key)) is not None}
        if not found:
            return None
        # No fence to wait for: a block is findable only after the host saw the end of the step that filled it.
        return StorePlan(tuple(found), tuple(found.values()), (), tuple(found)), self._blocks.share([*found.values()])

    def _invalidate(self, request: Request) -> Sequence[Key]:
        """Make nothing findable that a request computed whose logits are not finite, in chunks before them either: its
        KV may be no better than they are. Which keys those are.
        """
        assert request.own_blocks is not None and request.blocks is not None
        own = slice(request.own_blocks, max(request.published_blocks, request.found_blocks))
        keys = request.keys[own]
        self._blocks.forget(
            [block for key, block in zip(keys, request.blocks.ids[own], strict=False) if self._blocks.get(key) == block]
        )
        return keys

    def _re_anchor(self, request: Request, drafts: int, drawn: int) -> None:
        """Bring the bounds of what was launched down to what came of a step that drafted."""
        request.drafts_on_way -= drafts
        request.launched_len -= 1 + drafts - drawn
        request.launched_outputs -= 1 + drafts - drawn

    def measured(self, batch: BatchPlan, seconds: float) -> None:
        """A step in which every row decodes took so long."""
        if self._drafts.most:
            rows, columns = len(batch.rows), batch.columns
            self._drafts.saw_step(rows, max(columns.drafts), seconds, sum(columns.stop) / rows)

    # ------------------------------------------------------------------ planning

    def plan(self, *, lead_s: float = 0.0, step_s: float = 0.0) -> StepPlan:
        """What the next step does. Oldest first, decode before prefill, then admission; a plan without rows means:
        nothing to compute.

        lead_s   how long the device is expected to be busy before its step begins
        step_s   how long that is expected to take
        """
        self._preempt_for_priority()
        ranked = self._running_by_rank()
        # As `Request.can_decode` says: a call for each of them takes longer than to look.
        decoding = [
            request
            for request in ranked
            if request.prefill_end <= request.launched_len and request.launched_outputs < request.max_outputs
        ]
        num_decoding = len(decoding)
        draft = _Draft(self.limits.token_budget - num_decoding, lead_s, step_s, after=self._owed)
        self._plan_decodes(decoding, draft)
        if num_decoding < len(ranked):
            for request in ranked:
                self._plan_prefill(request, draft)
        self._admit(draft)
        if draft.arriving and not (draft.decodes or draft.drafting or draft.prefills):  # nobody waits with it
            draft.arriving[0].arriving = False
            self._plan_prefill(draft.arriving[0], draft)
        if draft.drafting and draft.prefills:
            self._drafts.held_up([self._running[row.request_id].drafting for row in draft.prefills])
        batch = BatchPlan((*draft.decodes, *draft.drafting, *draft.prefills), draft.speculates)
        self._age(batch)
        self._owed = [] if batch.rows else draft.after
        return StepPlan(tuple(draft.transfers), batch, tuple(draft.after), draft.undrafted)

    def order_loads(self) -> Sequence[TransferPlan]:
        """Admit, behind the last plan, who came too late for it and has blocks to load or to wait for; what is to be
        submitted at once.

        The same line and the same rules as in `plan`, which goes on where this ends: at the first in line that lacks
        room, or that a step would have to compute something of at once. Steps may be on their way, and the loads wait
        for those that they must wait for.
        """
        draft = _Draft(0, 0.0, 0.0, loads_only=True, after=self._owed)
        self._admit(draft)
        return draft.transfers

    def _age(self, batch: BatchPlan) -> None:
        """Count the step for everybody it passed over, with or without a row. A step without a step passes
        nobody over.
        """
        if not batch.rows:
            return
        for request in self._queue.values():
            request.waited_steps += 1
        if len(batch.rows) < len(self._running):
            served = set(batch.columns.request_id)
            for request in self._running.values():
                if request.id not in served and (request.in_prefill or request.can_decode):
                    request.waited_steps += 1
                    self._ranked = None

    def _plan_decodes(self, requests: Sequence[Request], draft: _Draft) -> None:
        """A row for each that may have one: nearly always one token, in a block that the last step was told of."""
        size, running, plain, drafting, new = (
            self.limits.block_tokens,
            State.RUNNING,
            draft.decodes,
            draft.drafting,
            tuple.__new__,
        )
        for request, wanted in zip(requests, self._choose_drafts(requests, draft), strict=True):
            if request.state is not running:  # it was preempted for an older one
                continue
            length, on_way, table = request.launched_len, request.drafts_on_way, request.table
            drafts = wanted
            if length + 1 + drafts > len(table) * size:
                room = self._room(request, wanted, draft)
                if room is None:
                    continue
                drafts, table = room, request.table
            assert request.row is not None
            outputs, row, stop = request.launched_outputs, request.row.ids[0], length + 1 + drafts
            # What a call of the class comes to, at half the time.
            plan = new(
                RowPlan,
                (
                    request.id,
                    row,
                    request.epoch,
                    length - on_way,
                    stop,
                    None,
                    table,
                    True,
                    outputs - on_way,
                    None,
                    drafts,
                ),
            )
            request.launched_len = stop
            request.launched_outputs = outputs + 1 + drafts
            if drafts or on_way:
                request.drafts_on_way = on_way + drafts
                draft.speculates = True
            (drafting if drafts else plain).append(plan)

    def _choose_drafts(self, requests: Sequence[Request], draft: _Draft) -> Sequence[int]:
        """How many tokens to draft for each."""
        if not (self._drafts.most and requests):
            return [0] * len(requests)
        chosen = self._drafts.again(len(requests))
        if chosen is None:
            room = [request.max_outputs - request.launched_outputs - 1 for request in requests]
            chosen = self._drafts.choose([request.drafting for request in requests], room)
        draft.undrafted.update(chosen.undrafted)
        return chosen.counts

    def _room(self, request: Request, wanted: int, draft: _Draft) -> int | None:
        """Have its table cover one token, and the drafts behind it if there is room for them without taking anybody
        else's: how many drafts that are, all or none; None: there is no room even for the token.
        """
        drafts = wanted
        if drafts and not self._reserve(request, request.launched_len + 1 + drafts, draft, preempting=False):
            drafts = 0
        stop = request.launched_len + 1 + drafts
        if not (drafts or self._reserve(request, stop, draft, preempting=not request.drafts_on_way)):
            return None
        self._extend_table(request, stop)
        if drafts < wanted:
            draft.undrafted["blocks"] += 1
        return drafts

    def _extend_table(self, request: Request, length: int) -> None:
        """Make what its steps are told of its blocks cover `length` tokens; the same object if it does."""
        assert request.blocks is not None
        if len(request.table) < (count := -(-length // self.limits.block_tokens)):
            request.table = tuple(request.blocks.ids[:count])

    def _plan_prefill(self, request: Request, draft: _Draft) -> None:
        if not request.in_prefill or request.state is not State.RUNNING or request.loading:
            return
        if request.arriving:
            if self._tiers.seconds_left(request.id, request.epoch, step_s=draft.step_s) > draft.lead_s:
                draft.arriving.append(request)  # whoever else is in the step would wait for its load
                return
            request.arriving = False
        start, known = request.launched_len, request.prefill_end
        limits = self.limits
        stop = chunk_stop(
            start,
            known,
            chunk_tokens=limits.chunk_tokens,
            block_tokens=limits.block_tokens,
            tail_apart=limits.tail_apart,
        )
        if stop - start > draft.prefill_budget:
            return  # a chunk is never cut shorter: its shape is part of the result
        draft.prefill_budget -= stop - start
        draft.prefills.append(self._chunk(request, start, stop, samples=stop == known))

    def _chunk(self, request: Request, start: int, stop: int, *, samples: bool) -> RowPlan:
        """The row of a chunk of prefill."""
        assert request.row is not None
        begin, tokens, outputs = None, tuple(request.tokens[start:stop]), request.launched_outputs
        if not request.begun:
            begin = RowStart(request.sampling, request.prompt, tuple(request.tokens[len(request.prompt) :]))
            request.begun = True
        self._extend_table(request, stop)
        plan = RowPlan(
            request.id, request.row.ids[0], request.epoch, start, stop, tokens, request.table, samples, outputs, begin
        )
        request.launched_len = stop
        request.launched_outputs += samples
        return plan

    def _reserve(self, request: Request, length: int, draft: _Draft, *, preempting: bool = True) -> bool:
        """Make the request's blocks cover `length` tokens, `preempting` younger requests if need be; False: not this
        step.
        """
        assert request.blocks is not None
        missing = -(-length // self.limits.block_tokens) - len(request.blocks.ids)
        if missing <= 0:
            return True
        while self._blocks.num_available < missing:
            if self._blocks.is_settling:
                return False  # blocks come back in a moment: nobody need give up theirs
            victim = self._victim_for(request) if preempting else None
            if victim is None:
                return False
            self._preempt(victim)
            self.num_preemptions += 1
        fresh = self._blocks.take(missing)
        draft.after.extend(fresh.after)
        request.blocks.extend(fresh)
        return True

    # ------------------------------------------------------------------ admission

    def _admit(self, draft: _Draft) -> None:
        if not self._queue or self._rows.num_available == 0:
            return
        waiting = (request for request in self._queue.values() if self._may_start(request))
        for request in self._by_rank(waiting)[: self.limits.max_probes]:
            if self._rows.num_available == 0 or not self._try_admit(request, draft):
                return  # nobody overtakes the first in line for lack of room, or of a step

    def _may_start(self, request: Request) -> bool:
        return request.state is State.WAITING and (self.admits_new or request.cached is not None or request.epoch > 0)

    def _try_admit(self, request: Request, draft: _Draft) -> bool:
        """Admit, or set to load, or leave for a request that computes the same blocks now; False: no room, or no step
        to go by.
        """
        limits = self.limits
        wanted = self._wanted(request)
        hits = self._blocks.match(wanted)
        sources = [] if request.avoid_tiers else self._tiers.locate(wanted[len(hits) :])
        if "disk" in sources and self._promote(request, wanted[len(hits) :], sources, draft):
            return True
        loads = sources.index("disk") if "disk" in sources else len(sources)
        if loads and not self._tiers.worth_loading(sources[:loads]):
            loads = 0
        found = len(hits) + loads
        if self._awaits_another(wanted[len(hits) : found + 1]):
            return True
        if draft.loads_only and not loads:
            return False
        if not self._has_room(request, hits):
            return False
        blocks = self._blocks.share(hits)
        fresh = self._blocks.take(-(-len(request.tokens) // limits.block_tokens) - len(hits))
        draft.after.extend(fresh.after)
        if loads:
            keys, block_ids = tuple(wanted[len(hits) : found]), tuple(fresh.ids[:loads])
            draft.transfers.append(LoadPlan(request.id, request.epoch, keys, block_ids, fresh.after))
        blocks.extend(fresh)
        self._start(request, blocks, num_hits=len(hits), num_found=found)
        request.loading = request.arriving = loads > 0
        if request.cached is None:
            from_disk = sum(key in request.promoted_keys for key in wanted[len(hits) : found])
            size = limits.block_tokens
            request.cached = CachedTokens(len(hits) * size, (loads - from_disk) * size, from_disk * size)
        self._plan_prefill(request, draft)
        return True

    def _promote(self, request: Request, keys: Sequence[Key], sources: list[Source], draft: _Draft) -> bool:
        """Send the request to wait for its blocks on disk; False: not worth it, or tried often enough."""
        if not self._may_promote(request, sources):
            return False
        draft.transfers.append(PromotePlan(request.id, request.epoch, tuple(keys[: len(sources)])))
        request.promotions += 1
        request.promoted_keys.update(key for key, source in zip(keys, sources, strict=False) if source == "disk")
        request.state = State.LOADING
        return True

    def _may_promote(self, request: Request, sources: Sequence[Source]) -> bool:
        """Whether to wait for the disk; no more requests do than have rows to come to, so that they do not crowd the
        host tier.
        """
        loading = sum(other.state is State.LOADING for other in self._queue.values())
        return (
            "disk" in sources
            and not request.avoid_disk
            and request.promotions < self.limits.max_promotions
            and loading < self._rows.size
            and self._tiers.worth_loading(sources)
        )

    def _wanted(self, request: Request) -> list[Key]:
        """Keys of the blocks that the request would rather find than compute."""
        if not self.limits.prefix_cache:
            return []
        self._keys.extend(request.keys, request.tokens, salt=request.cache_salt)
        return request.keys[
            : reusable_tokens(len(request.tokens), self.limits.block_tokens) // self.limits.block_tokens
        ]

    def _awaits_another(self, keys: Sequence[Key]) -> bool:
        """Whether a running request loads or computes one of these blocks now: join it instead of doing the
        same twice.
        """
        return not self._coming.keys().isdisjoint(keys)

    def _has_room(self, request: Request, hits: Sequence[int], *, without: Sequence[Request] = ()) -> bool:
        """Whether all known tokens and one more fit, with a block to grow for each running request.

        `without`: if these running requests were preempted; an upper bound, because others may share their blocks.
        """
        needed = -(-(len(request.tokens) + 1) // self.limits.block_tokens) - len(hits)
        available = self._blocks.num_available - sum(self._blocks.is_cached(item) for item in hits)
        available += sum(len(other.blocks.ids) for other in without if other.blocks is not None)
        return needed + len(self._running) - len(without) <= available

    def _start(self, request: Request, blocks: Lease, *, num_hits: int, num_found: int) -> None:
        length = num_found * self.limits.block_tokens
        request.row = self._rows.take(1)
        request.blocks = blocks
        request.launched_len = request.committed_len = length
        request.published_blocks, request.found_blocks = num_hits, num_found
        request.own_blocks = num_found if request.own_blocks is None else min(request.own_blocks, num_found)
        request.launched_outputs = request.num_outputs
        request.drafts_on_way = 0
        request.prefill_end = len(request.tokens)
        request.begun = request.stepped = False
        request.shares = True
        request.state = State.RUNNING
        del self._queue[request.id]
        self._running[request.id] = request
        self._ranked = None
        for key in request.keys[num_hits:]:
            self._coming.setdefault(key, request.id)

    # ------------------------------------------------------------------ preemption

    def _victim_for(self, request: Request) -> Request | None:
        """The last in rank behind `request`. One that has not run a step since it was admitted goes only for the first
        in rank (H26).
        """
        ranked = self._running_by_rank()
        behind = ranked[ranked.index(request) + 1 :]
        stepped = [other for other in behind if other.stepped]
        if stepped:
            return stepped[-1]
        return behind[-1] if behind and ranked[0] is request else None

    def _preempt_for_priority(self) -> None:
        """Make room for the first in line by preempting requests of lower priority that are behind it in rank; none if
        that would not do.

        Waiting alone improves a place in line, not the right to somebody's room: else two of equal priority would take
        turns.
        """
        if not self._queue or len({request.priority for request in self._requests.values()}) == 1:
            return
        waiting = [request for request in self._queue.values() if self._may_start(request)]
        if not waiting:
            return
        first, aging = self._by_rank(waiting)[0], self.limits.aging_steps
        lower = [
            r
            for r in self._running.values()
            if r.stepped and r.priority > first.priority and r.level(aging) > first.level(aging)
        ]
        wanted, victims = self._wanted(first), self._by_rank(lower)
        hits = self._blocks.match(wanted)
        if not first.avoid_tiers and self._may_promote(first, self._tiers.locate(wanted[len(hits) :])):
            return  # it will wait for the disk: nobody need make room yet
        if self._awaits_another(wanted[len(hits) : len(hits) + 1]) or not self._has_room(first, hits, without=victims):
            return
        while victims and (self._rows.num_available == 0 or not self._has_room(first, hits)):
            self._preempt(victims.pop())
            self.num_preemptions += 1

    def _preempt(self, request: Request) -> None:
        """Take row and blocks back at once. Complete blocks stay findable; tokens drawn but not committed are drawn
        again.
        """
        self._give_up_device(request)
        request.state = State.WAITING
        request.epoch += 1
        request.promotions = 0
        self._queue[request.id] = request

    def _give_up_device(self, request: Request) -> None:
        if self._running.pop(request.id, None) is None:
            return
        self._ranked = None
        assert request.row is not None and request.blocks is not None
        after = () if request.last_fence is None else (request.last_fence,)
        request.row.release(after=after)
        request.blocks.release(after=after, until=self._tiers.uses())
        request.row = request.blocks = None
        request.table = ()
        coming, own = self._coming, request.id
        for key in request.keys:
            if coming.get(key) == own:
                del coming[key]

    # ------------------------------------------------------------------ the rest

    def _publish(self, request: Request, complete: int) -> Sequence[tuple[Key, int]]:
        """Make the first `complete` blocks, more than before, findable; those of them that no tier had are to be
        stored.
        """
        assert request.blocks is not None
        if not self.limits.prefix_cache or not request.shares:
            return ()
        self._keys.extend(request.keys, request.tokens, salt=request.cache_salt)
        first = request.published_blocks
        keys, ids = request.keys[first:complete], request.blocks.ids[first:complete]
        coming, own = self._coming, request.id
        for key in keys:
            if coming.get(key) == own:
                del coming[key]
        request.published_blocks = complete
        if (found := min(complete, request.found_blocks) - first) > 0:
            self._blocks.publish_all(ids[:found], keys[:found])
            keys, ids = keys[found:], ids[found:]
        return [(key, block) for key, block in zip(keys, ids, strict=True) if self._blocks.publish(block, key)]

    def _running_by_rank(self) -> Sequence[Request]:
        if self._ranked is None:
            self._ranked = self._by_rank(self._running.values())
        return self._ranked

    def _by_rank(self, requests: Iterable[Request]) -> list[Request]:
        aging = self.limits.aging_steps
        return sorted(
            requests, key=lambda request: (request.priority - request.waited_steps // aging, request.id)
        )  # its level, and its age
