"""One sample of one request, as the scheduler sees it: a state machine over token counts; and the queues of waiting and
running requests. Single writer: the scheduler.

    WAITING ──start──▶ RUNNING ──finish──▶ FINISHED
     ▲  │ ▲               │
     │  └─promote─▶ LOADING   (blocks are read from disk into the host tier, or tiers are asked for blocks)
     │         ◀──done────┘
     └────────preempt─────┘   epoch + 1: results of steps that were launched before are dropped

A finish (stop, length, abort, error) is possible from every state.

Positions of one running request:
    [0, committed_len)             reused (perhaps still being loaded), or computed by a committed step
    [committed_len, launched_len)  computed by a step in flight
    [launched_len, len(blocks) * block_tokens)   allocated, not computed

While drafts are in flight, `launched_len` is an upper bound: it counts every draft as accepted. If `drafts_in_flight`
is subtracted, it is a lower bound. A commit subtracts the rejected drafts from the upper bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from sidestream.config import CacheOptions
from sidestream.grammar import TokenGrammar
from sidestream.types import BatchPlan, CachedTokens, Forced, SamplingSpec
from sidestream_kv.kv.pool import Lease
from sidestream_kv.types import BlockId, Fence, Key, RequestId


class State(Enum):
    """State of a request; see the picture in the module's docstring."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


class Lookup(NamedTuple):
    """What an admission found of the blocks that the request may reuse.

    found     number of leading blocks that are reused
    located   number of leading blocks that were on the device or in a tier, or that a load was to supply; those after
              the first `found` are computed
    reason    why: `load_failed`, `load_late` (or the read failed), `cost`, `load_limit`, `no_checkpoint`, `window`,
              `request_limit`; empty: there are none
    tier      holds the block after the first `found`
    """

    found: int
    located: int
    reason: str = ""
    tier: str = ""


@dataclass(slots=True, eq=False)
class Turn:
    """The keys of a request's checkpoints at the end of its prompt and of its answer, and the number of requests that
    have started from one of them.
    """

    keys: list[Key] = field(default_factory=list)
    starts: int = 0


@dataclass(slots=True, eq=False)
class Turns:
    """What a request knows of its conversation, also after it was preempted.

    earlier   checkpoints of the turn that the request continues
    own       checkpoints at the ends of the request's own prompt and answer
    """

    earlier: Turn | None = None
    own: Turn = field(default_factory=Turn)


@dataclass(slots=True)
class RequestStates:
    """The recurrent states of one running request (`states.py`).

    own          the request's own state, which its steps write
    source       the checkpoint that the next step reads; None: the next step reads `own`
    unpublished  checkpoints that steps in flight write, each with the number of tokens that it covers
    read         checkpoints that steps in flight read, each with the position at which its step ends
    candidates   states that steps in flight write if they reach the end of a block, in order of the steps
    covered      lower bound of the tokens that the state covers after the last planned step
    reached      tokens that the state covers after the last committed step
    latest       id and key of the last checkpoint that was made while decoding
    loaded       if the request started from a checkpoint that was loaded from a tier: number of tokens that this
                 checkpoint covers; else -1
    """

    own: Lease
    source: Lease | None
    turns: Turns
    unpublished: list[tuple[int, Lease]] = field(default_factory=list)
    read: list[tuple[int, Lease]] = field(default_factory=list)
    candidates: list[Lease] = field(default_factory=list)
    covered: int = 0
    reached: int = 0
    latest: tuple[int, Key] | None = None
    loaded: int = -1


@dataclass(slots=True)
class WindowPages:
    """The pages of one running request (`windows.py`): blocks that hold the layers with a sliding window.

    lease      the blocks of all pages that the request holds, in the order of the sequence
    first      number of the block to which the first of these pages belongs
    table      the blocks of the pages from the sequence's first block on. Those before `first` are not its any more, or
               never were
    published  pages of blocks before this number are findable, or were never the request's
    found      number of blocks that the request reused: their pages were on the device or in a tier
    """

    lease: Lease
    first: int
    table: list[BlockId]
    published: int
    found: int


@dataclass(slots=True, eq=False)
class Request:
    """One sample of one request. The caller sets the first fields; the scheduler changes the others."""

    id: RequestId
    prompt: tuple[int, ...]
    sampling: SamplingSpec
    max_outputs: int
    """Largest number of emitted tokens: the smallest of the limits of the user, the model and the pool."""
    stop_ids: frozenset[int]
    min_tokens: int
    priority: int = 0
    """Requests with smaller numbers run first."""
    max_drafts: int = 0
    """Largest number of drafts in a step."""
    keys: list[Key] = field(default_factory=list)
    """Keys of the first complete blocks of `tokens`. The caller may give the keys of the prompt. The scheduler appends
    keys as blocks complete.
    """
    cache_salt: str = ""
    """Part of every key: KV is shared only between requests with the same salt."""
    keys_version: int = 0
    """The scheduler's `keys_version` when `keys` were computed."""
    cache: CacheOptions | None = None
    """What tiers may do for it; None: the usual."""
    grammar: TokenGrammar | None = None
    """Follows its answer, and says which tokens may come next; None: any. The engine changes it with each commit."""
    forced: Forced = field(default_factory=Forced)
    """The only continuation that its grammar leaves, as of the last sampled step. The engine changes it with each."""
    name: str = ""
    """The caller's name of the request."""

    # written by the scheduler only
    tokens: list[int] = field(init=False)
    """Prompt and committed outputs."""
    last_len: int = field(init=False)
    """Largest number of its tokens that are computed: all but the last of `max_outputs`."""
    state: State = field(init=False, default=State.WAITING)
    finish_reason: str | None = field(init=False, default=None)
    epoch: int = field(init=False, default=0)
    """Grows with each preemption: results of steps of an earlier epoch are dropped."""
    slot: Lease | None = field(init=False, default=None)
    """Its request slot on the device, while it runs."""
    slot_id: int = field(init=False, default=-1)
    """The index of this slot."""
    blocks: Lease | None = field(init=False, default=None)
    block_table: tuple[BlockId, ...] = field(init=False, default=())
    """Block table of its last row: a prefix of `blocks`. Stays the same object while it covers the request's tokens."""
    states: RequestStates | None = field(init=False, default=None)
    """Its recurrent states, while it runs; None: the model has no recurrent state."""
    pages: WindowPages | None = field(init=False, default=None)
    """Its pages, while it runs; None: the layers with a sliding window have no blocks of their own."""
    window_table: tuple[BlockId, ...] = field(init=False, default=())
    """The blocks of the pages of `block_table`."""
    turns: Turns | None = field(init=False, default=None)
    """Checkpoints of its conversation, from its first admission on; None: the model has no recurrent state."""
    branch_blocks: int = field(init=False, default=0)
    """Number of leading blocks that its last admission found. The prompt probably branches there from an earlier
    prompt, so prefill makes a checkpoint there (it keeps the recurrent state).
    """
    launched_len: int = field(init=False, default=0)
    drafts_in_flight: int = field(init=False, default=0)
    """Drafts of steps that were launched and not committed."""
    spec_record: int = field(init=False, default=-1)
    """Index of its record in `SpecPolicy`."""
    committed_len: int = field(init=False, default=0)
    published_blocks: int = field(init=False, default=0)
    found_blocks: int = field(init=False, default=0)
    """Blocks that its last admission found on the device or in a tier."""
    partial_blocks: int = field(init=False, default=0)
    """Of these, the leading blocks on the device, and after them the blocks that were loaded without the layers with a
    sliding window.
    """
    own_blocks: int | None = field(init=False, default=None)
    """Index of the first block that the request computed itself: the smallest `found_blocks` of its admissions. None:
    it was never admitted.
    """
    prefill_end: int = field(init=False, default=0)
    """Number of tokens known at admission. They are computed in chunks. Later tokens are computed one by one."""
    shares: bool = field(init=False, default=True)
    """Whether its blocks may be published. False from a reset of the cache until its next admission."""
    loading: bool = field(init=False, default=False)
    """True while a load into its blocks is planned but not completely submitted: it lacks fences for which a step could
    wait.
    """
    arriving: bool = field(init=False, default=False)
    """True from the plan of a load into its blocks until its next row is planned. The step of this row may have to wait
    for the load.
    """
    begun: bool = field(init=False, default=False)
    """Whether the device state of its slot was initialised in this epoch."""
    stepped: bool = field(init=False, default=False)
    """Whether a step of this epoch was committed. Until then, only the request of the highest rank may preempt it
    (hazard H26).
    """
    waited_steps: int = field(init=False, default=0)
    """Number of steps without a row of this request although it had work."""
    last_fence: Fence | None = field(init=False, default=None)
    """Fence of the last step with a row of this request."""
    cached: CachedTokens | None = field(init=False, default=None)
    """Numbers of cached tokens that its first admission found, by tier; None before that admission."""
    lookup: Lookup | None = field(init=False, default=None)
    """Of the same admission."""
    promotions: int = field(init=False, default=0)
    promoted_from: dict[Key, str] = field(init=False, default_factory=dict)
    """Maps the key of each promoted block to the tier that held it before the promotion (a copy from disk to host
    memory).
    """
    has_asked: bool = field(init=False, default=False)
    """Whether tiers were asked for blocks that another process may have stored."""
    avoid_disk: bool = field(init=False, default=False)
    avoid_tiers: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.last_len = len(self.prompt) + self.max_outputs - 1

    @property
    def num_outputs(self) -> int:
        """Tokens emitted so far."""
        return len(self.tokens) - len(self.prompt)

    @property
    def has_begun(self) -> bool:
        """Whether it was admitted once."""
        return self.cached is not None or self.epoch > 0

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether logits of all positions of its prompt are wanted, and may not have been computed yet."""
        return self.sampling.prompt_logprobs >= 0 and not self.num_outputs

    def may_load(self, num_blocks: int, block_tokens: int) -> int:
        """How many of `num_blocks` blocks tiers may supply."""
        limit = None if self.cache is None else self.cache.max_load_tokens
        return num_blocks if limit is None else min(num_blocks, limit // block_tokens)

    def may_store(self, num_blocks: int, block_tokens: int) -> int:
        """How many of its first `num_blocks` blocks may be stored in tiers."""
        limit = None if self.cache is None else self.cache.max_offload_tokens
        return num_blocks if limit is None else min(num_blocks, limit // block_tokens)

    @property
    def in_prefill(self) -> bool:
        """Whether some known tokens are neither computed nor in flight."""
        return self.launched_len < self.prefill_end

    @property
    def can_decode(self) -> bool:
        """Whether the request may have one more token, after all tokens in flight."""
        return self.prefill_end <= self.launched_len < self.last_len

    def level(self, aging_steps: int) -> int:
        """Its priority, improved by one for every `aging_steps` skipped steps, so that no request starves."""
        return self.priority - self.waited_steps // aging_steps

    def start(self, *, num_hits: int, num_found: int, num_partial: int, block_tokens: int) -> None:
        """Reset the counts at admission, with `num_found` reused blocks. The first `num_hits` are on the device, and
        the others up to `num_partial` are loaded without the layers with a sliding window.
        """
        self.launched_len = self.committed_len = num_found * block_tokens
        self.published_blocks, self.found_blocks, self.partial_blocks = num_hits, num_found, num_partial
        self.own_blocks = num_found if self.own_blocks is None else min(self.own_blocks, num_found)
        self.drafts_in_flight = 0
        self.prefill_end = len(self.tokens)
        self.begun = self.stepped = False  # rule: slot-begins-with-each-epoch
        self.shares = True  # rule: fresh-start-shares-again

    def settle_drafts(self, drafts: int, drawn: int) -> None:
        """Subtract rejected drafts from the upper bound, after the commit of a row with `drafts` drafts that sampled
        `drawn` tokens.
        """
        self.drafts_in_flight -= drafts
        self.launched_len -= 1 + drafts - drawn  # rule: bounds-come-down-at-commit

    def append_outputs(self, token_ids: Sequence[int]) -> tuple[int, str | None]:
        """Append tokens up to the first one that ends the request. Returns the number of appended tokens, and the
        finish reason or None.
        """
        tokens, count = self.tokens, len(token_ids)
        if len(tokens) + count <= self.last_len and self.stop_ids.isdisjoint(token_ids):  # nearly always
            tokens.extend(token_ids)
            return count, None
        outputs = self.num_outputs
        count = 0
        for token_id in token_ids:
            tokens.append(token_id)
            count += 1
            if token_id in self.stop_ids and outputs + count >= self.min_tokens:
                return count, "stop"  # rule: tokens-after-the-last-one-are-dropped
            if outputs + count >= self.max_outputs:
                return count, "length"
        return count, None


class RequestQueues:
    """Unfinished requests by id. Other parts of the scheduler read the three mappings; only this class changes them.

    unfinished  all requests that have not finished
    waiting     requests in the states WAITING and LOADING
    running     requests in the state RUNNING; they have a request slot and blocks
    arrived     new requests, in the order of arrival, of which the admission has not read ahead

    Invariants: `waiting` and `running` are disjoint, and `unfinished` is their union. Requests are ranked by level (the
    priority, improved by aging), then by arrival: an earlier request has a smaller id.
    """

    def __init__(self, aging_steps: int) -> None:
        self.unfinished: dict[RequestId, Request] = {}
        self.waiting: dict[RequestId, Request] = {}
        self.running: dict[RequestId, Request] = {}
        self.arrived: deque[Request] = deque()
        self._aging_steps = aging_steps
        self._ranked: list[Request] | None = None  # running requests by rank; None: to be sorted again

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self.unfinished[request.id] = request
        self.waiting[request.id] = request
        self.arrived.append(request)

    def start(self, request: Request) -> None:
        """Move a request from `waiting` to `running`."""
        request.state = State.RUNNING
        del self.waiting[request.id]
        self.running[request.id] = request
        self._ranked = None

    def requeue(self, request: Request) -> None:
        """Move a request from `running` back to `waiting`, and begin its next epoch: results of steps that were
        launched before are dropped.
        """
        self._stop(request)
        request.state = State.WAITING
        request.epoch += 1  # rule: preemption-begins-an-epoch
        request.promotions = 0
        self.waiting[request.id] = request

    def remove(self, request: Request) -> None:
        """Remove a finished request."""
        self._stop(request)
        self.waiting.pop(request.id, None)  # rule: finish-leaves-the-queue
        self.unfinished.pop(request.id, None)
        request.state = State.FINISHED  # rule: finished-request-is-finished

    def _stop(self, request: Request) -> None:
        if self.running.pop(request.id, None) is not None:
            self._ranked = None

    def by_rank(self, requests: Iterable[Request]) -> list[Request]:
        """Sort requests by rank, highest first."""
        aging = self._aging_steps
        # The code of `Request.level`, inlined: hundreds of calls would cost more than the computation.
        return sorted(requests, key=lambda request: (request.priority - request.waited_steps // aging, request.id))

    def running_by_rank(self) -> Sequence[Request]:
        """The running requests by rank, highest first."""
        if self._ranked is None:
            self._ranked = self.by_rank(self.running.values())
        return self._ranked

    def age(self, batch: BatchPlan) -> None:
        """Count one more skipped step for every request that has work but no row in the planned step. Ignores a plan
        without rows.
        """
        if not batch.num_rows:
            return
        for request in self.waiting.values():
            request.waited_steps += 1
        if batch.num_rows < len(self.running):
            served = set(batch.columns.request_id)
            for request in self.running.values():
                if request.id not in served and (request.in_prefill or request.can_decode):
                    request.waited_steps += 1
                    self._ranked = None
