"""Ids, accesses, the fence protocol, and the plans that travel between rooms. No tensors, no behaviour.

Plans are frozen values, complete at birth. The scheduler makes them, the executor and the transfer engine carry them
out; neither of the three rooms imports another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

BlockId = int
SlotId = int
Key = bytes
RequestId = int


@dataclass(frozen=True, slots=True)
class Access:
    """One byte range `[start, stop)` of a named memory (`"kv"`, `"host"`, …) that a piece of work reads or writes."""

    memory: str
    start: int
    stop: int
    write: bool


Accesses = Callable[[], Sequence[Access]]
"""Says what a piece of work touches, to a device that asks; building the list costs more than some work does."""


@runtime_checkable
class Fence(Protocol):
    """Proof that everything enqueued on `stream` up to `tick` is done. Exists only once its record is enqueued."""

    @property
    def stream(self) -> str:
        """Name of the stream that this fence was recorded on."""
        ...

    @property
    def tick(self) -> int:
        """Position on that stream; fences of one stream complete in the order of their ticks."""
        ...

    def poll(self) -> bool:
        """Whether the work is done. Never blocks."""
        ...

    @property
    def failure(self) -> BaseException | None:
        """What the fenced piece of work raised, once `poll()` is true; None when it went well."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """How one row's tokens are drawn; the device's share of `SamplingParams`, complete and validated."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    min_tokens: int
    forbidden_until_min: tuple[int, ...]
    """Token ids that may not be drawn before `min_tokens` outputs: the end of sequence and the stop ids."""
    top_logprobs: int
    """-1: no logprobs; k >= 0: the drawn token's and the k most likely ones'."""

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is drawn. `top_k` 1 leaves no choice either."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def penalised(self) -> bool:
        """Whether a draw depends on the tokens before it."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, slots=True)
class RowStart:
    """What the device state of a row is set to before the row's first chunk of an epoch."""

    sampling: SamplingSpec
    prompt: tuple[int, ...]
    """The request's prompt (repetition penalty counts it)."""
    outputs: tuple[int, ...]
    """Tokens already emitted, for a request that was preempted and comes back."""


class RowPlan(NamedTuple):
    """One request's share of a step: compute KV for positions `[start, stop)`.

    tokens        ids for `[start, stop)`; None: the last one drawn for this row, taken from device state, and `drafts`
                  drafted behind it
    block_ids     block table that covers `[0, stop)`
    samples       the chunk ends at the last known token, so its last position yields output number `output_index`;
                  behind drafts, each does
    begin         set with a row's first chunk of an epoch
    drafts        0 with tokens. How many drafts of steps on their way are right only the device knows: then the `1 +
                  drafts` tokens lie somewhere in `[start, stop)`, and `output_index` is the least that it may be
    """

    request_id: RequestId
    row: int
    epoch: int
    start: int
    stop: int
    tokens: tuple[int, ...] | None
    block_ids: tuple[BlockId, ...]
    samples: bool
    output_index: int
    begin: RowStart | None = None
    drafts: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes for it."""
        return 1 + self.drafts if self.tokens is None else self.stop - self.start

    @property
    def is_certain(self) -> bool:
        """Whether the host knows where it begins."""
        return self.stop - self.start == self.num_tokens


class RowColumns(NamedTuple):
    """The rows of a step by field, each of `RowPlan` under its name: what is asked of all rows in a step is asked of a
    column.
    """

    request_id: tuple[RequestId, ...]
    row: tuple[int, ...]
    epoch: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]
    tokens: tuple[tuple[int, ...] | None, ...]
    block_ids: tuple[tuple[BlockId, ...], ...]
    samples: tuple[bool, ...]
    output_index: tuple[int, ...]
    begin: tuple[RowStart | None, ...]
    drafts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One step: rows in the order they are packed. Those that decode come first, and of these those without drafts.

    speculates   some row has drafts, or begins where only the device knows because a step before it has drafts
    columns      the same rows by field
    num_decodes  rows that decode
    """

    rows: tuple[RowPlan, ...]
    speculates: bool = False
    columns: RowColumns = field(init=False, repr=False, compare=False)
    num_decodes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        columns = RowColumns._make(zip(*self.rows, strict=True) if self.rows else ((),) * len(RowPlan._fields))
        object.__setattr__(self, "columns", columns)
        object.__setattr__(self, "num_decodes", columns.tokens.count(None))

    @property
    def begins(self) -> Sequence[tuple[int, RowStart]]:
        """Rows whose device state is set first, and to what."""
        columns = self.columns
        if not any(columns.begin):  # nearly always
            return ()
        return [(row, begin) for row, begin in zip(columns.row, columns.begin, strict=True) if begin is not None]

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens that rows which do not decode compute."""
        columns, decodes = self.columns, self.num_decodes
        if decodes == len(self.rows):  # nearly always
            return 0
        return sum(columns.stop[decodes:]) - sum(columns.start[decodes:])

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        if self.speculates:
            return sum(row.num_tokens for row in self.rows)
        return sum(self.columns.stop) - sum(self.columns.start)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one emitted token, and of the most likely alternatives at its position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class RowResult:
    """What one row of a step drew. Not frozen, though nobody changes one: it is made as often as a `Delta`.

    token_ids   one, and one more for each draft that was accepted
    logprobs    of each of them, if the request asked for any
    finite      False: behind these tokens the logits held NaN or infinity, or every token was forbidden
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finite: bool = True


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Prompt tokens that were not computed again, by the tier they came from."""

    device: int = 0
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.device + self.host + self.disk


@dataclass(slots=True)
class Delta:
    """News of one request at one commit: text and tokens since the last delta, and how it ended, if it did.

    Not frozen, though nobody changes one: the engine thread makes one for each token, and a frozen one takes it four
    times as long.

    finish_reason   None while running; `"stop"`, `"length"`, `"abort"` or `"error"` once
    index           which of the request's `n` samples this belongs to
    text            empty from the engine, which knows tokens only; an `OutputProcessor` adds it. May lag behind the
                    tokens while a stop string or a UTF-8 sequence is incomplete
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
    """Copy complete device blocks to the host tier (and from there to disk), behind the step that filled them.

    prefix   keys of the sequences that these blocks continue, up to and with them, each sequence from its start: a
             block is of no use without those before it, so they count as used whenever one is added
    """

    keys: tuple[Key, ...]
    block_ids: tuple[BlockId, ...]
    after: tuple[Fence, ...]
    prefix: tuple[Key, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Copy blocks from the host tier into fresh device blocks, behind the fences of those blocks' last uses.

    prefetch   nobody waits for it yet: loads that somebody waits for go first
    """

    request_id: RequestId
    epoch: int
    keys: tuple[Key, ...]
    block_ids: tuple[BlockId, ...]
    after: tuple[Fence, ...]
    prefetch: bool = False


@dataclass(frozen=True, slots=True)
class PromotePlan:
    """Read blocks from disk into the host tier for a request that waits for them; `keys` holds the whole run, host part
    too.
    """

    request_id: RequestId
    epoch: int
    keys: tuple[Key, ...]


TransferPlan = StorePlan | LoadPlan | PromotePlan


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step does: transfers to hand over, and a step to launch (no rows: none).

    after       fences that the compute stream waits for before the step: last uses of the blocks it writes
    undrafted   how many rows that may have drafts have none, by why: the answer ends (end), there is no room (blocks),
                drafts are not likely enough to be right for what they cost (chance), others would wait for them too
                long (others), or the step goes without to measure what that takes (measuring)
    """

    transfers: tuple[TransferPlan, ...]
    batch: BatchPlan
    after: tuple[Fence, ...]
    undrafted: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Health:
    """Whether an engine serves: status `"ok"`, `"draining"` or `"failed"`, and why."""

    status: str
    detail: str


@dataclass(frozen=True, slots=True)
class LayerGates:
    """What the compute stream waits for before a step touches a layer's KV: fences of loads still on their way.

    by_layer   fences by layer; empty: nothing is being loaded
    """

    by_layer: tuple[tuple[Fence, ...], ...] = ()


class Tracer(Protocol):
    """Is told of everything that ordering depends on, as it happens, by devices and by pools; judges, and never takes
    part.

    From any thread. A device calls `submitted`, `waited`, `started`, `touched` and `finished` of one stream in the
    order in which that stream goes through them. "The host" is whoever submits: all such threads together are one, but
    for those that called `apart`.
    """

    def apart(self, name: str) -> None:
        """The calling thread is a host of its own from now on, under this name: it knows nothing but what it is
        sent.
        """
        ...

    def joined(self, name: str) -> None:
        """That thread has ended, and the caller waited for its end: it knows what the thread knew."""
        ...

    def sent(self, channel: str, number: int) -> None:
        """The caller is about to put message `number` into a channel between threads of the host."""
        ...

    def received(self, channel: str, number: int) -> None:
        """The caller took message `number` out of the channel: it knows what its sender knew. Earlier ones that were
        not taken never will be.
        """
        ...

    def submitted(self, fence: Fence, accesses: Accesses, label: str) -> None:
        """The host enqueued work on `fence.stream`; `fence` covers it. Called before the work can start."""
        ...

    def waited(self, stream: str, fence: Fence) -> None:
        """`stream` went past a wait for `fence`, between two pieces of work or inside one."""
        ...

    def started(self, fence: Fence) -> None:
        """The work that `fence` covers began: what it declared at submission it touches from here on."""
        ...

    def touched(self, stream: str, accesses: Accesses) -> None:
        """The work that runs on `stream` declares, from inside, what it touches from here on."""
        ...

    def finished(self, fence: Fence) -> None:
        """The work ended, well or with `fence.failure`. Called before anybody can see the fence done."""
        ...

    def observed(self, fence: Fence) -> None:
        """The host saw that `fence` is done."""
        ...

    def host_touched(self, accesses: Accesses, label: str) -> None:
        """The host itself reads or writes memory that streams touch, here and now."""
        ...

    def stalled(self, reason: str) -> None:
        """The host was held up inside a call: `"step"` in the commit, or by what may hold it up nowhere."""
        ...

    def backed(self, pool: str, memory: str, item_bytes: int) -> None:
        """Id `i` of the pool stands for bytes `[i * item_bytes, (i + 1) * item_bytes)` of `memory`. Before the pool's
        first lease.
        """
        ...

    def took(self, pool: str, ids: Sequence[int], after: Sequence[Fence]) -> None:
        """A lease for writing was given out; what the ids held is gone. `after`: their unfinished last uses."""
        ...

    def shared(self, pool: str, ids: Sequence[int]) -> None:
        """A lease for reading was given out."""
        ...

    def released(self, pool: str, ids: Sequence[int], after: Sequence[Fence]) -> None:
        """A lease of these ids ended; `after` covers every use that was made under it and is not yet observed."""
        ...

    def published(self, pool: str, item: int, key: Key) -> None:
        """The id became findable under `key`: its bytes are complete and will not change until it is taken again."""
        ...

    def forgot(self, pool: str, ids: Sequence[int]) -> None:
        """The ids are not findable any more."""
        ...
