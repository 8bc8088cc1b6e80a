"""One sample of one request, as the scheduler sees it: a state machine over token counts. Single writer: the scheduler.

    WAITING ──admit──▶ RUNNING ──finish──▶ FINISHED
     ▲  │ ▲               │
     │  └─promote─▶ LOADING   (blocks come from disk to the host tier)
     │         ◀──done────┘
     └────────preempt─────┘   epoch + 1: results of steps launched before are dropped

A finish (stop, length, abort, error) is possible from every state.

Positions of one running request:
    [0, committed_len)             KV computed, its step's fence observed
    [committed_len, launched_len)  computed by a step, or copied by a load, that is still on its way
    [launched_len, len(blocks) * block_tokens)   reserved

With drafts on their way `launched_len` and `launched_outputs` are upper bounds, as if all were right; they come down to
what is true when their step is committed. The lower bound is `drafts_on_way` less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from sidestream.kv.pool import Lease
from sidestream.types import BlockId, CachedTokens, Fence, Key, RequestId, SamplingSpec


class State(Enum):
    """Where a request is; see the module's picture."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """Complete at birth; what changes later is below the line."""

    id: RequestId
    prompt: tuple[int, ...]
    sampling: SamplingSpec
    max_outputs: int
    """Tokens to emit at most: the user's limit, the model's and the pool's, whichever is least."""
    stop_ids: frozenset[int]
    min_tokens: int
    priority: int = 0
    """Lower runs earlier."""
    max_drafts: int = 0
    """Tokens to draft in a step at most."""
    keys: list[Key] = field(default_factory=list)
    """Of the first complete blocks of `tokens`; may be given for the prompt's, and grows as blocks complete."""
    cache_salt: str = ""
    """Part of every key: the request finds KV of requests with the same salt only, and they alone find its KV."""
    keys_version: int = 0
    """Which of the scheduler's keys `keys` were made with."""

    # written by the scheduler only
    tokens: list[int] = field(init=False)
    """Prompt and committed outputs."""
    state: State = field(init=False, default=State.WAITING)
    finish_reason: str | None = field(init=False, default=None)
    epoch: int = field(init=False, default=0)
    row: Lease | None = field(init=False, default=None)
    blocks: Lease | None = field(init=False, default=None)
    table: tuple[BlockId, ...] = field(init=False, default=())
    """What its last step was told of `blocks`: the same object as long as it is the same blocks."""
    launched_len: int = field(init=False, default=0)
    launched_outputs: int = field(init=False, default=0)
    drafts_on_way: int = field(init=False, default=0)
    """Drafts of steps that were not committed."""
    drafting: int = field(init=False, default=-1)
    """Its number among the records of what became of drafts."""
    committed_len: int = field(init=False, default=0)
    published_blocks: int = field(init=False, default=0)
    found_blocks: int = field(init=False, default=0)
    """On the device or in a tier, when the row was taken."""
    own_blocks: int | None = field(init=False, default=None)
    """How many blocks it found at the least when it began or came back: those behind it has computed itself. None: it
    never began.
    """
    prefill_end: int = field(init=False, default=0)
    """Tokens that were known when the row was taken: below this, chunks; from here on, one token a step."""
    shares: bool = field(init=False, default=True)
    """Its blocks may be found by others; False once the cache was reset under it, until it starts anew."""
    loading: bool = field(init=False, default=False)
    """Blocks of it come from the host tier, and no step may be gated by that load yet."""
    arriving: bool = field(init=False, default=False)
    """Blocks of it come from the host tier, and no step of it was planned yet: the first one may have to wait for them.
    """
    begun: bool = field(init=False, default=False)
    """The row's state was set in this epoch."""
    stepped: bool = field(init=False, default=False)
    """A step of this epoch was committed; until then the request may not be preempted for a younger one's sake (H26).
    """
    waited_steps: int = field(init=False, default=0)
    """Steps that left without it while it had work."""
    last_fence: Fence | None = field(init=False, default=None)
    """Fence of the last step that this request was in."""
    cached: CachedTokens | None = field(init=False, default=None)
    """What the first admission found; None before."""
    promotions: int = field(init=False, default=0)
    promoted_keys: set[Key] = field(init=False, default_factory=set)
    """Blocks that were on disk when it set out to wait for them."""
    avoid_disk: bool = field(init=False, default=False)
    avoid_tiers: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def num_outputs(self) -> int:
        """Tokens emitted so far."""
        return len(self.tokens) - len(self.prompt)

    @property
    def in_prefill(self) -> bool:
        """Whether known tokens are still to be computed."""
        return self.launched_len < self.prefill_end

    @property
    def can_decode(self) -> bool:
        """Whether one more token may be drawn, counting those on their way."""
        return self.prefill_end <= self.launched_len and self.launched_outputs < self.max_outputs

    def level(self, aging_steps: int) -> int:
        """Priority, improved by one for every `aging_steps` steps that left without it: nobody waits for ever."""
        return self.priority - self.waited_steps // aging_steps

    def append_outputs(self, token_ids: Sequence[int]) -> tuple[int, str | None]:
        """Append committed tokens, up to the first that ends the request: how many that are, and why it ends, if it
        does.
        """
        tokens, count, outputs = self.tokens, len(token_ids), len(self.tokens) - len(self.prompt)
        if outputs + count < self.max_outputs and self.stop_ids.isdisjoint(
            token_ids
        ):  # nearly always: none of them ends it
            tokens.extend(token_ids)
            return count, None
        count = 0
        for token_id in token_ids:
            tokens.append(token_id)
            count += 1
            if token_id in self.stop_ids and outputs + count >= self.min_tokens:
                return count, "stop"
            if outputs + count >= self.max_outputs:
                return count, "length"
        return count, None
