"""Plans a step: its rows, and which requests it starts and preempts for them. `Scheduler.plan` calls

Preemption        takes the slot and the blocks of a running request for a request of higher rank
DecodePlanner     adds one token, and drafts after it, for each running request whose prompt is computed
PrefillPlanner    adds the next chunk of each running request whose prompt is not completely computed
Admission         starts waiting requests: each gets a slot, blocks whose KV it reuses (from the device or from
                  tiers, such as host memory) and new blocks, and its first chunk
StepBuilder       collects their rows, transfers and fences
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress, takewhile
from operator import add

import numpy as np
import numpy.typing as npt

from sidestream.config import most_prompt_logits
from sidestream.schedule.allocation import Allocator, Reuse, ReuseFinder
from sidestream.schedule.limits import Limits, chunk_stop, reusable_tokens
from sidestream.schedule.prefix_cache import PrefixCache, TierLoads, TierView
from sidestream.schedule.request import Lookup, Request, RequestQueues, State
from sidestream.schedule.spec_policy import SpecPolicy
from sidestream.types import BatchPlan, RowColumns, RowPlan, RowStart, StateIds, StepPlan
from sidestream_kv.types import DEVICE, HOST, BlockId, Fence, Key, LoadPlan, RequestId, TransferPlan


@dataclass(slots=True, eq=False)
class DecodeColumns:
    """Requests with a decode row, as columns. Those without drafts go on from step to step: then a step only counts
    `stops` on, and looks at those requests that need a block.

    running    all running requests, by rank, when these were chosen
    in_flight  drafts in flight of each request
    prompts    length of each prompt
    stops      `launched_len` of each request
    limits     number of tokens that each block table covers
    ends       `last_len` of each request
    """

    requests: Sequence[Request]
    running: Sequence[Request]
    ids: tuple[RequestId, ...]
    slots: tuple[int, ...]
    epochs: tuple[int, ...]
    tables: list[tuple[BlockId, ...]]
    windows: list[tuple[BlockId, ...]]
    in_flight: npt.NDArray[np.int64]
    prompts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]
    limits: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    @classmethod
    def of(cls, requests: Sequence[Request], running: Sequence[Request], block_tokens: int) -> DecodeColumns:
        """The columns of these requests, as they are now."""
        return cls(
            requests,
            running,
            tuple([request.id for request in requests]),
            tuple([request.slot_id for request in requests]),
            tuple([request.epoch for request in requests]),
            [request.block_table for request in requests],
            [request.window_table for request in requests],
            np.array([request.drafts_in_flight for request in requests], np.int64),
            np.array([len(request.prompt) for request in requests], np.int64),
            np.array([request.launched_len for request in requests], np.int64),
            np.array([len(request.block_table) for request in requests], np.int64) * block_tokens,
            np.array([request.last_len for request in requests], np.int64),
        )

    def extended(self, rows: Sequence[int], block_tokens: int) -> None:
        """The block tables of these requests were extended."""
        for at in rows:
            request = self.requests[at]
            self.tables[at], self.windows[at] = request.block_table, request.window_table
            self.limits[at] = len(request.block_table) * block_tokens

    def go_on(self, running: Sequence[Request]) -> bool:
        """Whether these are all of the running requests, and each may have one more token."""
        return running is self.running and len(running) == len(self.requests) and bool((self.stops < self.ends).all())


@dataclass(slots=True)
class StepBuilder:
    """Exists during one call of `Scheduler.plan`, or of `Scheduler.plan_loads` (`loads_only`: there is no step).

    prefill_budget  number of prompt tokens that may still be added
    lead_s, step_s  see `Scheduler.plan`
    speculates      some row has drafts, or begins at a position that depends on drafts of a step in flight
    has_prompt_logits  a chunk of a request that needs logits of its prompt; a step has one such chunk at most
    decoding        requests with a decode row, first those without drafts
    drafts          numbers of drafts of the last requests in `decoding`
    states          recurrent states of decode rows
    prefills        rows that compute a chunk of a prompt
    after           fences that the step waits for: last uses of the blocks that were allocated for it
    undrafted       number of rows without drafts by reason, see `StepPlan`
    arriving        requests, by rank, that get no row because their loads end later than the step could begin
    short           requests, by rank, that get no row because blocks are missing for their next chunk
    """

    prefill_budget: int
    lead_s: float
    step_s: float
    loads_only: bool = False
    speculates: bool = False
    has_prompt_logits: bool = False
    decoding: DecodeColumns | None = None
    drafts: list[int] = field(default_factory=list)
    states: dict[RequestId, StateIds] = field(default_factory=dict)
    prefills: list[RowPlan] = field(default_factory=list)
    transfers: list[TransferPlan] = field(default_factory=list)
    after: list[Fence] = field(default_factory=list)
    undrafted: Counter[str] = field(default_factory=Counter)
    arriving: list[Request] = field(default_factory=list)
    short: list[Request] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether the step has no row."""
        return not (self.prefills or (self.decoding and self.decoding.requests))

    def build(self) -> StepPlan:
        """The finished plan. Its rows: decode rows without drafts, decode rows with drafts, prefill rows."""
        columns = self._decode_columns()
        if self.prefills:
            columns = RowColumns._make(map(add, columns, zip(*self.prefills, strict=True)))
        batch = BatchPlan.of_columns(columns, self.speculates)
        return StepPlan(tuple(self.transfers), batch, tuple(self.after), self.undrafted)

    def _decode_columns(self) -> RowColumns:
        """The decode rows; the counts of their requests include them already."""
        rows = self.decoding
        if rows is None:
            return RowColumns._make(((),) * len(RowColumns._fields))
        count, starts = len(rows.requests), rows.stops - 1 - rows.in_flight
        none = (None,) * count
        # rule: decode-row
        return RowColumns(
            rows.ids,
            rows.slots,
            rows.epochs,
            tuple(starts.tolist()),
            tuple(rows.stops.tolist()),
            none,
            tuple(rows.tables),
            (True,) * count,
            tuple((starts + 1 - rows.prompts).tolist()),
            none,
            (*(0,) * (count - len(self.drafts)), *self.drafts),
            tuple(map(self.states.get, rows.ids)) if self.states else none,
            tuple(rows.windows),
        )


@dataclass(eq=False)
class PrefillPlanner:
    """Adds a request's next chunk to a step.

    Invariants:
    - Where outputs are bitwise equal (`tail_apart`), a chunk is never cut to fit the budget, because its shape affects
      the rounding of the result: a chunk that does not fit waits. Elsewhere it is cut at a block border, so that the
      waiting prompts fill the step.
    - No chunk is planned before all copies of the request's load were submitted, so that the step can wait for their
      fences (hazard H5).
    - A token is sampled only after the chunk that ends at the last known token (hazard H25).
    """

    _limits: Limits
    _tiers: TierView
    _allocator: Allocator

    def plan(self, request: Request, step: StepBuilder) -> None:
        """Add the request's next chunk, if it has one and the step's token budget allows it."""
        if not request.in_prefill or request.state is not State.RUNNING or request.loading:  # rule: prefill-is-possible
            return
        if request.arriving:
            if self._tiers.seconds_left(request.id, request.epoch, step_s=step.step_s) > step.lead_s:
                step.arriving.append(request)  # otherwise all rows of the step would wait for the load of this one
                return
            request.arriving = False
        self._add_chunk(request, step)

    def plan_arriving(self, step: StepBuilder) -> None:
        """If the step is empty because all its requests wait for long loads, add the first of these requests: there is
        no other row to delay.
        """
        if step.arriving and step.is_empty:
            request = step.arriving[0]
            request.arriving = False
            self.plan(request, step)

    def plan_short(self, step: StepBuilder, make_room: Callable[[Request, int], bool]) -> None:
        """If the step is empty because blocks are missing, preempt requests of lower rank for the first chunk. No row
        of this step uses their blocks.
        """
        if step.short and step.is_empty:
            request = step.short[0]
            stop = min(request.prefill_end, request.launched_len + self._limits.chunk_tokens)
            if make_room(request, self._allocator.missing_blocks(request, stop)):
                self.plan(request, step)

    def _add_chunk(self, request: Request, step: StepBuilder) -> None:
        start, known, limits = request.launched_len, request.prefill_end, self._limits
        wants_logits, chunk_tokens = request.needs_prompt_logits, limits.chunk_tokens
        if wants_logits:
            if step.has_prompt_logits:
                return
            chunk_tokens = min(chunk_tokens, most_prompt_logits(limits.block_tokens))
        stop = chunk_stop(
            start,
            known,
            chunk_tokens=chunk_tokens,
            block_tokens=limits.block_tokens,
            tail_apart=limits.tail_apart or request.states is not None,
        )
        if request.states is not None:
            stop = self._cut_for_state(request, start, stop)
        if stop - start > step.prefill_budget:
            stop = (start + step.prefill_budget) // limits.block_tokens * limits.block_tokens
            if limits.tail_apart or request.states is not None or stop <= start:
                return
        if missing := self._allocator.missing_blocks(request, stop):
            # rule: chunk-has-its-pages
            if not self._allocator.has_blocks(missing):
                step.short.append(request)
                return
            step.after.extend(self._allocator.grow(request, stop))  # rule: page-of-a-chunk-waits-for-its-last-use
        step.prefill_budget -= stop - start
        step.has_prompt_logits |= wants_logits
        states, after = self._allocator.plan_states(
            request, start, stop, checkpoint=self._wants_checkpoint(request, stop)
        )
        step.after.extend(after)  # rule: checkpoint-waits-for-its-last-use
        # rule: only-the-last-chunk-samples
        step.prefills.append(self._row(request, start, stop, states, samples=stop == known))

    def _cut_for_state(self, request: Request, start: int, stop: int) -> int:
        """The end of the chunk `[start, stop)`: `stop`, or an earlier position at which to make a checkpoint (a
        recurrent state that is kept for reuse).
        """
        size = self._limits.block_tokens
        branch, interval = request.branch_blocks * size, self._limits.state_interval * size
        wanted = [branch] if start < branch else []
        if interval:
            wanted.append((start // interval + 1) * interval)
        return min([stop, *wanted])

    def _wants_checkpoint(self, request: Request, stop: int) -> bool:
        """Whether to make a checkpoint at `stop`. True at the last block border of the prompt, where earlier prompts
        branch off, and at the configured interval.
        """
        size = self._limits.block_tokens
        interval = self._limits.state_interval * size
        return stop > 0 and (
            stop == reusable_tokens(request.prefill_end, size)
            or stop == request.branch_blocks * size
            or (interval > 0 and stop % interval == 0)
        )

    def _row(self, request: Request, start: int, stop: int, states: StateIds | None, *, samples: bool) -> RowPlan:
        begin, tokens = None, tuple(request.tokens[start:stop])
        if not request.begun:
            begin = RowStart(request.sampling, request.prompt, tuple(request.tokens[len(request.prompt) :]))
            request.begun = True
        self._allocator.extend_block_table(request, stop)
        row = RowPlan(
            request.id,
            request.slot_id,
            request.epoch,
            start,
            stop,
            tokens,
            request.block_table,
            samples,
            request.num_outputs,
            begin,
            states=states,
            window_table=request.window_table,
        )
        request.launched_len = stop
        return row


@dataclass(eq=False)
class Admission:
    """Starts waiting requests in order of rank.

    Invariants:
    - While a request waits for a slot or for free blocks, no request of lower rank starts (hazard H26). While a request
      waits for the disk, or for blocks that a running request is about to complete, requests of lower rank may start.
    - Reused blocks are leased before new blocks are allocated, so the request cannot evict its own prefix (hazard H11).
    - While admission is paused, only preempted requests are admitted (hazard H8).
    """

    _limits: Limits
    _queues: RequestQueues
    _prefix_cache: PrefixCache
    _allocator: Allocator
    _tiers: TierLoads
    _reuse: ReuseFinder
    _prefill: PrefillPlanner
    paused: frozenset[str] = frozenset()
    """Why requests that were never admitted stay in the queue; empty: they do not."""
    _ahead: dict[RequestId, int] = field(default_factory=dict)  # blocks that requests in the queue read ahead

    def admit(self, step: StepBuilder) -> None:
        """Start waiting requests in order of rank, until there are too few slots or blocks for the next one. Adds their
        loads and first chunks to the step.
        """
        if self._queues.waiting and self._allocator.has_free_slot:
            for request in self._queues.by_rank(self.candidates())[: self._limits.max_probes]:
                if not self._allocator.has_free_slot or not self._try_admit(request, step):
                    break
        self._read_ahead(step)

    def candidates(self) -> list[Request]:
        """Waiting requests that may start now, if there is room."""
        return [request for request in self._queues.waiting.values() if self._may_start(request)]

    def asks(self, request: Request, wanted: Sequence[Key], reuse: Reuse) -> float:
        """Seconds that the request may wait for tiers that are asked for the blocks after those that were found; 0: it
        does not ask, for example because a running request computes them.
        """
        missing = wanted[reuse.num_joinable :]
        return 0.0 if self._prefix_cache.is_pending(missing[:1]) else self._tiers.patience(request, missing)

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
        if self._waits_for_tiers(request, wanted, reuse, step):
            return True
        located, reuse = reuse, self._reuse.loadable(request, wanted, reuse)
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
                    num_whole=reuse.num_parts,
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
            loaded = tuple(reuse.keys[reuse.num_parts :])
            request.cached = self._tiers.cached_tokens(request, num_hits=num_hits, loaded=loaded)
            request.lookup = self._lookup(request, wanted, located, num_found)
        self._prefill.plan(request, step)
        return True

    def _waits_for_tiers(self, request: Request, wanted: Sequence[Key], reuse: Reuse, step: StepBuilder) -> bool:
        """Let the request ask tiers, or wait until its blocks are in host memory. Returns False if it need not."""
        if patience_s := self.asks(request, wanted, reuse):
            missing = wanted[reuse.num_joinable :]
            keys = [*missing, *self._prefix_cache.part_keys(missing)]
            step.transfers.append(self._tiers.find(request, keys, patience_s))
            return True
        promotion = self._tiers.promote(request, reuse.keys, reuse.sources, num_partial=reuse.num_partial)
        if promotion is not None:
            step.transfers.append(promotion)
        return promotion is not None

    def _read_ahead(self, step: StepBuilder) -> None:
        """Let requests that arrived, and found no slot or blocks, wait for tiers meanwhile. At most half as many do so
        as may run, so that a request of higher rank can as well.
        """
        arrived, waiting, ahead = self._queues.arrived, self._queues.waiting, self._ahead
        for request_id in [other for other in ahead if other not in waiting]:
            del ahead[request_id]
        while arrived:
            request = arrived[0]
            if request.state is State.WAITING and request.id in waiting and self._limits.read_ahead_blocks:
                # rule: reads-for-the-queue-are-bounded
                if not self._may_start(request) or not self._tiers.may_read_ahead(sum(ahead.values())):
                    return
                wanted = self._prefix_cache.wanted_keys(request)
                reuse = self._reuse.find(request, wanted)
                if self._waits_for_tiers(request, wanted, reuse, step):
                    ahead[request.id] = len(reuse.keys)
            arrived.popleft()

    def _lookup(self, request: Request, wanted: Sequence[Key], located: Reuse, num_found: int) -> Lookup:
        """The record of this admission. `located`: all blocks that were found; `num_found` of them are reused."""
        if request.avoid_tiers and request.lookup is not None:
            return Lookup(num_found, max(num_found, request.lookup.found), "load_failed")
        if request.avoid_disk:
            late = sum(1 for _ in takewhile(request.promoted_from.__contains__, wanted[num_found:]))
            if late:
                return Lookup(num_found, num_found + late, "load_late", request.promoted_from[wanted[num_found]])
        if located.num_joinable <= num_found:  # nearly always
            if request.cache is not None and (tier := self._tiers.beyond(wanted[num_found : num_found + 1])):
                return Lookup(num_found, num_found + 1, "request_limit", tier)
            return Lookup(num_found, num_found)
        tier = next(iter(self._tiers.locate(request, wanted[num_found : num_found + 1])), DEVICE)
        if request.states is not None:
            reason = "no_checkpoint"
        elif tier == DEVICE or located.num_blocks < located.num_joinable:
            reason = "window"
        else:
            worth = self._tiers.num_worth_waiting(located.sources, num_partial=located.num_partial)
            reason = "load_limit" if worth and tier != HOST else "cost"
        return Lookup(num_found, located.num_joinable, reason, tier)


@dataclass(eq=False)
class Preemption:
    """Chooses victims (requests to preempt) and preempts them.

    Invariants (hazard H26):
    - A victim ranks below the request that takes its blocks. So the request of the highest rank is never preempted, and
      it ends.
    - A request that has not run a step since its admission is preempted only for the request of the highest rank. So
      every admission makes progress.
    - Aging improves the rank of a waiting request, but causes no preemption: otherwise two requests of one priority
      would preempt each other again and again.
    """

    _aging_steps: int
    _queues: RequestQueues
    _prefix_cache: PrefixCache
    _allocator: Allocator
    _tiers: TierLoads
    _admission: Admission
    _reuse: ReuseFinder
    count: int = 0
    """Requests preempted to make room for others."""

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
        if self._admission.asks(first, wanted, reuse):
            return
        if self._tiers.num_to_promote(first, reuse.sources, num_partial=reuse.num_partial):
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


@dataclass(eq=False)
class DecodePlanner:
    """Adds the decode rows of a step. `plan` is hot code: it handles every running request in every step.

    Invariants:
    - A row is planned only if the request's blocks cover every token that it may write (hazard H11).
    - A request may be preempted to get a block for a token of a request of higher rank, but never for drafts.
    - While drafts are in flight, `launched_len` is an upper bound; if `drafts_in_flight` is subtracted, it is a lower
      bound (hazard H19).
    """

    _limits: Limits
    _policy: SpecPolicy
    _allocator: Allocator
    _preemption: Preemption
    _has_states: bool
    _last: DecodeColumns | None = None  # of the last step, if its rows had neither drafts nor states

    def choose(self, running: Sequence[Request]) -> Sequence[Request]:
        """Those of the running requests, by rank, that may have one more token after all tokens in flight."""
        if self._last is not None and self._last.go_on(running):  # nearly always
            return self._last.requests
        # The code of `Request.can_decode`, inlined: hundreds of property calls would cost more than the comparison.
        return [request for request in running if request.prefill_end <= request.launched_len < request.last_len]

    def plan(self, requests: Sequence[Request], running: Sequence[Request], step: StepBuilder) -> None:
        """Add a row for each of these requests, by rank, that has enough blocks or gets them. `running`: see `choose`.

        Looks at one request after another only if all may have drafts or states, or if a block table ends.
        """
        size, drafts, rows = self._limits.block_tokens, self._choose_drafts(requests, step), self._last
        if self._policy.max_drafts or self._has_states:
            busy: Iterable[int] = range(len(requests))
        else:
            if rows is None or rows.requests is not requests:
                rows = DecodeColumns.of(requests, running, size)
            busy = np.flatnonzero(rows.stops >= rows.limits).tolist()  # rule: decode-gets-its-block
            if busy and (after := self._allocator.grow_by_one([requests[at] for at in busy])) is not None:
                step.after.extend(after)  # rule: grown-blocks-wait-for-their-last-use
                rows.extended(busy, size)
                busy = ()
        preempted = self._preemption.count
        left_out: list[int] = []
        for at in busy:
            request = requests[at]
            # rule: preempted-request-is-not-planned
            if request.state is not State.RUNNING:  # it was preempted for an earlier row of this step
                continue
            if request.launched_len + drafts[at] >= len(request.block_table) * size:
                room = self._make_room(request, drafts[at], step)
                if room is None:
                    left_out.append(at)
                    continue
                drafts[at] = room
                if rows is not None:
                    rows.extended([at], size)
            if request.states is not None:
                self._plan_states(request, step)
        if left_out or self._preemption.count > preempted:
            # rule: request-preempted-for-another-row-is-not-planned
            kept = [at for at, one in enumerate(requests) if one.state is State.RUNNING and at not in left_out]
            rows = None
            requests, drafts = [requests[at] for at in kept], [drafts[at] for at in kept]
        for request in requests:
            request.launched_len += 1
        if rows is not None:
            rows.stops += 1
        self._last = rows
        if self._policy.max_drafts:
            requests = self._add_drafts(requests, drafts, step)
        step.decoding = DecodeColumns.of(requests, running, size) if rows is None else rows

    def _add_drafts(self, requests: Sequence[Request], drafts: Sequence[int], step: StepBuilder) -> Sequence[Request]:
        """Count these numbers of drafts of the requests. Returns the requests with a row, those with drafts last."""
        for request, count in zip(requests, drafts, strict=True):
            request.launched_len += count
            request.drafts_in_flight += count
        step.speculates = any(request.drafts_in_flight for request in requests)
        step.drafts = [count for count in drafts if count]
        plain = [request for request, count in zip(requests, drafts, strict=True) if not count]
        return [*plain, *compress(requests, drafts)]

    def _plan_states(self, request: Request, step: StepBuilder) -> None:
        states, after = self._allocator.plan_decode_states(request)
        step.after.extend(after)  # rule: candidate-waits-for-its-last-use
        if states is not None:
            step.states[request.id] = states

    def _choose_drafts(self, requests: Sequence[Request], step: StepBuilder) -> list[int]:
        """Number of drafts for each request."""
        if not (self._policy.max_drafts and requests):
            return [0] * len(requests)
        # Drafts in flight count as accepted: the row's last token is then the one at `launched_len`.
        forced = [max(0, one.forced.end - one.launched_len - 1) if one.forced.tokens else 0 for one in requests]
        chosen = None if any(forced) else self._policy.reuse(len(requests))
        if chosen is None:
            room = [request.last_len - request.launched_len - 1 for request in requests]
            chosen = self._policy.choose([request.spec_record for request in requests], room, forced)
        step.undrafted.update(chosen.undrafted)
        return [*chosen.counts]

    def _make_room(self, request: Request, wanted: int, step: StepBuilder) -> int | None:
        """Extend the block table to cover one token and `wanted` drafts, or only the token if there are too few blocks.
        Returns the number of drafts; None: there is no block even for the token.
        """
        drafts = wanted
        # rule: drafts-reserve-their-blocks
        if drafts and not self._reserve(request, request.launched_len + 1 + drafts, step, preempting=False):
            drafts = 0
        stop = request.launched_len + 1 + drafts
        # rule: decode-reserves-its-block
        if not (drafts or self._reserve(request, stop, step, preempting=not request.drafts_in_flight)):
            return None
        self._allocator.extend_block_table(request, stop)
        if drafts < wanted:
            step.undrafted["blocks"] += 1
        return drafts

    def _reserve(self, request: Request, length: int, step: StepBuilder, *, preempting: bool) -> bool:
        """Make the request's blocks cover `length` tokens. Returns False if that is impossible in this step."""
        missing = self._allocator.missing_blocks(request, length)
        if not missing:
            return True
        if not self._allocator.has_blocks(missing) and not (
            preempting and self._preemption.make_room(request, missing)
        ):
            return False
        step.after.extend(self._allocator.grow(request, length))  # rule: grown-block-waits-for-its-last-use
        return True
