"""Ids, accesses, the fence protocol, and the plans that packages exchange. No tensors, no behaviour.

Plans are frozen values, complete at birth. The scheduler makes them; the model runner and the offload engine carry them
out. None of these three packages imports another. Each preemption of a request increments its `epoch`;
messages of an older epoch are dropped. H1 to H35 are the hazards in docs/ordering.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

BlockId = int
Key = bytes
RequestId = int

DEVICE = "device"
HOST = "host"
"""Names of the tiers that every engine with offload has. Blocks of host memory can be loaded at once; blocks of other
tiers are promoted to host memory first. `offload.tiers.registry` lists those.
"""


@dataclass(frozen=True, slots=True)
class Access:
    """A byte range `[start, stop)` of a named memory (`"kv"`, `"host"`, …) that work on a stream reads or writes."""

    memory: str
    start: int
    stop: int
    write: bool


Accesses = Callable[[], Sequence[Access]]
"""Returns the accesses of a piece of work. A function, so that the list is built only if a tracer asks:
building it can take longer than the work itself.
"""


@runtime_checkable
class Fence(Protocol):
    """A position on a stream, like a CUDA event. It is done when all work enqueued on `stream` up to `tick` is done.

    A fence exists only after its record was enqueued.
    """

    @property
    def stream(self) -> str:
        """Name of the stream."""
        ...

    @property
    def tick(self) -> int:
        """Position on the stream; fences of one stream complete in the order of their ticks."""
        ...

    def poll(self) -> bool:
        """Whether the work is done. Never blocks."""
        ...

    @property
    def failure(self) -> BaseException | None:
        """The exception that the fenced work raised, valid once `poll()` is true; None after success."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """Sampling parameters of one request: the part of `SamplingParams` that the device needs, validated, with defaults.

    options     value of each sampling option, by its name in the table (`SAMPLING_OPTIONS` in config.py)
    penalised   whether a penalty is set, so that sampling needs the counts of earlier tokens
    """

    options: Mapping[str, float]
    penalised: bool
    logit_bias: Mapping[int, float]
    seed: int
    min_tokens: int
    forbidden_until_min: tuple[int, ...]
    """Stop token ids and end-of-sequence ids, which are not sampled before `min_tokens` outputs."""
    top_logprobs: int
    """Number of likeliest tokens that get logprobs besides the sampled token; -1: no logprobs at all."""

    @property
    def greedy(self) -> bool:
        """Whether sampling is an argmax: temperature 0, or `top_k` 1."""
        return self.options["temperature"] == 0 or self.options["top_k"] == 1


@dataclass(frozen=True, slots=True)
class RowStart:
    """Initial device state of a request slot, sent with the first chunk of each epoch."""

    sampling: SamplingSpec
    prompt: tuple[int, ...]
    """The request's prompt; the repetition penalty counts its tokens."""
    outputs: tuple[int, ...]
    """Tokens that were already emitted; empty unless the request resumes after a preemption."""


class StateIds(NamedTuple):
    """Ids of the recurrent states of a row.

    read         state before the row; negative: the sequence begins with this row
    write        state after the row
    checkpoint   state that a decode row also writes if it reaches the end of a block; only the device knows whether it
                 does. Negative: none
    """

    read: int
    write: int
    checkpoint: int = -1


class RowPlan(NamedTuple):
    """One request's share of a step: compute KV for positions `[min_start, stop)`.

    slot              request slot of the request
    tokens            token ids of `[min_start, stop)` (prefill). None (decode): the request's last sampled token, read
                      from device state, and `drafts` draft tokens after it
    block_ids         block table that covers `[0, stop)`
    samples           the chunk ends at the last known token, so its last position yields an output; with drafts, each
                      position yields one
    min_output_index  index of the row's first output
    begin             initial device state, in the first chunk of each epoch
    drafts            number of draft tokens; 0 in prefill
    states            ids of its recurrent states; None: the model has none

    `min_start` and `min_output_index` are exact, unless drafts of an earlier step are in flight. Then only the device
    knows how many of those are accepted: both are lower bounds, and the row's `1 + drafts` tokens lie somewhere in
    `[min_start, stop)`.
    """

    request_id: RequestId
    slot: int
    epoch: int
    min_start: int
    stop: int
    tokens: tuple[int, ...] | None
    block_ids: tuple[BlockId, ...]
    samples: bool
    min_output_index: int
    begin: RowStart | None = None
    drafts: int = 0
    states: StateIds | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes for this request."""
        return 1 + self.drafts if self.tokens is None else self.stop - self.min_start

    @property
    def is_certain(self) -> bool:
        """Whether the host knows the exact positions: no earlier step has drafts to verify."""
        return self.stop - self.min_start == self.num_tokens


class RowColumns(NamedTuple):
    """The rows of a step as columns, one for each field of `RowPlan`: faster where code needs one field of all rows."""

    request_id: tuple[RequestId, ...]
    slot: tuple[int, ...]
    epoch: tuple[int, ...]
    min_start: tuple[int, ...]
    stop: tuple[int, ...]
    tokens: tuple[tuple[int, ...] | None, ...]
    block_ids: tuple[tuple[BlockId, ...], ...]
    samples: tuple[bool, ...]
    min_output_index: tuple[int, ...]
    begin: tuple[RowStart | None, ...]
    drafts: tuple[int, ...]
    states: tuple[StateIds | None, ...]


@dataclass(frozen=True, slots=True, init=False)
class BatchPlan:
    """The batch of one step, in packed order: decode rows without drafts, decode rows with drafts, then prefill.

    columns      the rows by field
    speculates   a row has drafts, or its positions depend on an earlier step with drafts
    num_decodes  number of decode rows
    """

    columns: RowColumns
    speculates: bool
    num_decodes: int = field(repr=False, compare=False)
    _rows: tuple[RowPlan, ...] | None = field(repr=False, compare=False)

    def __init__(self, rows: Iterable[RowPlan] = (), speculates: bool = False) -> None:
        rows = tuple(rows)
        columns = RowColumns._make(zip(*rows, strict=True) if rows else ((),) * len(RowPlan._fields))
        self._set(columns, speculates, rows)

    @classmethod
    def of_columns(cls, columns: RowColumns, speculates: bool) -> BatchPlan:
        """The batch with these columns. Its rows are made when they are used: a plain decode step uses none."""
        batch = cls.__new__(cls)
        batch._set(columns, speculates, None)
        return batch

    def _set(self, columns: RowColumns, speculates: bool, rows: tuple[RowPlan, ...] | None) -> None:
        object.__setattr__(self, "columns", columns)
        object.__setattr__(self, "speculates", speculates)
        object.__setattr__(self, "num_decodes", columns.tokens.count(None))
        object.__setattr__(self, "_rows", rows)

    @property
    def rows(self) -> tuple[RowPlan, ...]:
        """The rows, in packed order."""
        rows = self._rows
        if rows is None:
            rows = tuple(map(RowPlan._make, zip(*self.columns, strict=True)))
            object.__setattr__(self, "_rows", rows)
        return rows

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.columns.slot)

    @property
    def begins(self) -> Sequence[tuple[int, RowStart]]:
        """Request slots to initialise before the step, with their initial state."""
        columns = self.columns
        if not any(columns.begin):  # nearly always
            return ()
        return [(slot, begin) for slot, begin in zip(columns.slot, columns.begin, strict=True) if begin is not None]

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of the prefill rows."""
        columns, decodes = self.columns, self.num_decodes
        if decodes == self.num_rows:  # nearly always
            return 0
        return sum(columns.stop[decodes:]) - sum(columns.min_start[decodes:])

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        if self.speculates:
            return sum(row.num_tokens for row in self.rows)
        return sum(self.columns.stop) - sum(self.columns.min_start)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one emitted token, and of the most likely alternatives at its position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class RowResult:
    """Sampled tokens of one row of a step. Immutable by convention; not frozen, for speed (see `Delta`).

    token_ids   one token, and one more for each accepted draft
    logprobs    of each token, if the request wants them
    finite      False: after these tokens, the logits held NaN or infinity, or every token was forbidden
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finite: bool = True


@dataclass(frozen=True, slots=True, init=False)
class CachedTokens:
    """Prompt tokens whose KV came from a cache, by tier: `CachedTokens(device=16, disk=32)`.

    by_tier   number of tokens by name of the tier; tiers without tokens are left out
    """

    by_tier: Mapping[str, int]

    def __init__(self, **by_tier: int) -> None:
        object.__setattr__(self, "by_tier", {tier: count for tier, count in by_tier.items() if count})

    def __hash__(self) -> int:
        return hash(frozenset(self.by_tier.items()))

    def __repr__(self) -> str:
        counts = {DEVICE: 0, HOST: 0, **self.by_tier}
        return f"CachedTokens({', '.join(f'{tier}={count}' for tier, count in counts.items())})"

    @property
    def device(self) -> int:
        """Tokens of blocks that the device still held."""
        return self.by_tier.get(DEVICE, 0)

    @property
    def host(self) -> int:
        """Tokens of blocks from host memory."""
        return self.by_tier.get(HOST, 0)

    @property
    def disk(self) -> int:
        """Tokens of blocks from disk."""
        return self.by_tier.get("disk", 0)

    @property
    def total(self) -> int:
        """Tokens of all tiers."""
        return sum(self.by_tier.values())


@dataclass(slots=True)
class Delta:
    """Output of one request at one commit: tokens since the previous delta; the final one has the finish reason.

    Immutable by convention. Not frozen: the engine thread makes one for each token, and a frozen dataclass takes four
    times as long to make.

    finish_reason   None while running; then `"stop"`, `"length"`, `"abort"` or `"error"`
    index           number of the sample among the request's `n`, from 0
    text            empty in the engine, which has tokens only; an `OutputProcessor` adds the text. It may lag behind
                    the tokens while a stop string or a UTF-8 sequence is incomplete
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str | None
    prompt_tokens: int
    cached: CachedTokens
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Copy complete device blocks to the host tier (and from there to disk), after the step that filled them.

    after    fences of that step
    prefix   for each stored sequence, the keys of all blocks up to its last stored block. A block is useless without
             the blocks before it, so the store marks the whole prefix as just used
    """

    keys: tuple[Key, ...]
    block_ids: tuple[BlockId, ...]
    after: tuple[Fence, ...]
    prefix: tuple[Key, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Copy blocks from the host tier into fresh device blocks.

    after      fences of the device blocks' earlier uses: the copy waits for them
    prefetch   no step waits for this load yet; other loads go first
    num_whole  number of leading blocks that hold recurrent state. State is not split by layer: these blocks are copied
               whole, before all KV blocks
    covers     number of tokens that this state covers; a state with another number is a miss
    """

    request_id: RequestId
    epoch: int
    keys: tuple[Key, ...]
    block_ids: tuple[BlockId, ...]
    after: tuple[Fence, ...]
    prefetch: bool = False
    num_whole: int = 0
    covers: int = 0


@dataclass(frozen=True, slots=True)
class PromotePlan:
    """Read blocks from disk into the host tier, for a request that waits for them.

    keys   keys of all cached blocks of the request, including blocks that the host tier holds already
    """

    request_id: RequestId
    epoch: int
    keys: tuple[Key, ...]


TransferPlan = StorePlan | LoadPlan | PromotePlan


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Output of one scheduling turn: transfers to submit, and the batch of one step (without rows: no step).

    after       fences that the compute stream waits for before the step: earlier uses of the blocks that it writes
    undrafted   decode rows of speculative requests without drafts in this step, counted by reason: the answer ends
                here (`end`), no free blocks (`blocks`), expected accept length too low for the cost (`chance`), drafts
                would slow other requests too much (`others`), a step without drafts to measure its cost (`measuring`)
    """

    transfers: tuple[TransferPlan, ...]
    batch: BatchPlan
    after: tuple[Fence, ...]
    undrafted: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Health:
    """State of an engine: status `"ok"`, `"draining"` or `"failed"`, and a reason."""

    status: str
    detail: str


@dataclass(frozen=True, slots=True)
class LayerGates:
    """Fences of unfinished loads, by layer: the compute stream waits for them before a step uses the layer's KV.

    by_layer   empty: the step waits for no load
    """

    by_layer: tuple[tuple[Fence, ...], ...] = ()


class Tracer(Protocol):
    """Records all events that ordering depends on, for the order checker. It changes nothing.

    Devices, channels and pools call it, from any thread. For each stream, a device calls `submitted`, `waited`,
    `started`, `touched` and `finished` in the stream's own order. "The host" is one timeline that all submitting
    threads share, except those that called `apart`: each of them is a timeline of its own.
    """

    def apart(self, name: str) -> None:
        """From now on the calling thread is its own timeline, `name`: only messages and fences order it."""
        ...

    def joined(self, name: str) -> None:
        """The caller has joined thread `name`: everything that the thread did happened before."""
        ...

    def sent(self, channel: str, number: int) -> None:
        """The calling thread is about to put message `number` into a channel."""
        ...

    def received(self, channel: str, number: int) -> None:
        """The calling thread took message `number`: everything that the sender did before sending it happened before.
        Earlier messages that were not taken are lost.
        """
        ...

    def submitted(self, fence: Fence, accesses: Accesses, label: str) -> None:
        """The host enqueued work on `fence.stream`, covered by `fence`. Called before the work can start."""
        ...

    def waited(self, stream: str, fence: Fence) -> None:
        """`stream` passed a wait for `fence`, between two pieces of work or inside one."""
        ...

    def started(self, fence: Fence) -> None:
        """The work of `fence` began: from here on it makes the accesses that its submission declared."""
        ...

    def touched(self, stream: str, accesses: Accesses) -> None:
        """From here on, the work that runs on `stream` also makes these accesses."""
        ...

    def finished(self, fence: Fence) -> None:
        """The work ended, successfully or with `fence.failure`. Called before any thread can see the fence done."""
        ...

    def observed(self, fence: Fence) -> None:
        """The calling thread saw that `fence` is done."""
        ...

    def host_touched(self, accesses: Accesses, label: str) -> None:
        """The calling thread itself reads or writes memory that streams use, now."""
        ...

    def stalled(self, reason: str) -> None:
        """A call blocked the calling thread. `reason` is `"step"` when the engine waits for its own step; any other
        reason is a fault.
        """
        ...

    def allocated(self, memory: str, num_bytes: int) -> None:
        """A device made a memory of this size. Called before any access to it."""
        ...

    def backed(self, pool: str, memory: str, block_bytes: int, first: int = 0) -> None:
        """Block `i` of the pool is `block_bytes` bytes of `memory` from byte `first + i * block_bytes` on. Called
        before the pool's first lease, for the pools of one memory in the order of `first`. block_bytes 0: the bytes
        from `first` on belong to no pool.
        """
        ...

    def took(self, pool: str, block_ids: Sequence[int], after: Sequence[Fence]) -> None:
        """A lease for writing began; the blocks' contents are gone. `after`: unfinished fences of earlier uses."""
        ...

    def shared(self, pool: str, block_ids: Sequence[int]) -> None:
        """A lease for reading began."""
        ...

    def released(self, pool: str, block_ids: Sequence[int], after: Sequence[Fence]) -> None:
        """A lease ended; `after` covers all of its uses that were not observed yet."""
        ...

    def published(self, pool: str, block_id: int, key: Key) -> None:
        """The block became findable under `key`: its bytes are complete, and stay until it is taken again."""
        ...

    def forgot(self, pool: str, block_ids: Sequence[int]) -> None:
        """The blocks lost their keys."""
        ...
