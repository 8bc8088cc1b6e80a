"""Types that several packages share: plans of steps, and their results. No tensors, no behaviour.

A plan is a frozen value that describes future work. The scheduler makes plans; the model runner and the offload engine
execute them. None of these three packages imports another, so plans are all that they share.

The `epoch` of a request is the number of its preemptions. Results of an older epoch are dropped.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

import sidestream_kv
from sidestream.errors import RequestRejected
from sidestream.moved import warn
from sidestream_kv.types import DEVICE, HOST, BlockId, Fence, RequestId, TransferPlan


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """Sampling parameters of one request: the part of `SamplingParams` that the device needs. The values are validated,
    and defaults are filled in.

    options     value of each sampling option, by its name in the table (`SAMPLING_OPTIONS` in config.py)
    penalised   a penalty is set, so sampling needs the counts of the request's earlier tokens
    """

    options: Mapping[str, float]
    penalised: bool
    logit_bias: Mapping[int, float]
    seed: int
    min_tokens: int
    forbidden_until_min: tuple[int, ...]
    """Stop token ids and end-of-sequence ids. They are not sampled before the request has `min_tokens` outputs."""
    top_logprobs: int
    """Number of likeliest tokens whose logprobs are returned, besides the sampled token; -1: no logprobs at all."""
    prompt_logprobs: int = -1
    """As `top_logprobs`, for the tokens of the prompt."""
    masked: bool = False
    """Whether a grammar decides which tokens may be sampled."""
    adapter: int = 0
    """Slot of the request's LoRA adapter; 0: none."""

    @property
    def is_typical(self) -> bool:
        """Whether `typical_p` may drop tokens."""
        return self.options["typical_p"] < 1 and not self.greedy

    @property
    def greedy(self) -> bool:
        """Whether sampling is an argmax: temperature 0, or `top_k` 1."""
        return self.options["temperature"] == 0 or self.options["top_k"] == 1


@dataclass(frozen=True, slots=True)
class RowStart:
    """Initial device state of a request, sent with the first chunk of each epoch."""

    sampling: SamplingSpec
    prompt: tuple[int, ...]
    """The request's prompt. The repetition penalty applies to its tokens."""
    outputs: tuple[int, ...]
    """Tokens that were sampled before; empty unless the request resumes after a preemption."""


class StateIds(NamedTuple):
    """Ids of the recurrent states (of a hybrid model) that a row reads and writes.

    A row is one request's part of a batch.

    read         state before the row; negative: the sequence begins with this row
    write        state after the row
    checkpoint   second state that a decode row writes if it reaches the end of a block, for the prefix cache. Only the
                 device knows whether it reaches the end. Negative: no checkpoint
    """

    read: int
    write: int
    checkpoint: int = -1


class RowPlan(NamedTuple):
    """One request's part of a batch: compute KV for positions `[min_start, stop)`.

    slot              request slot: index of the request in the device state
    tokens            prefill: token ids of `[min_start, stop)`. Decode: None; the row has the request's last sampled
                      token, read from device state, and `drafts` draft tokens after it
    block_table       block ids that cover `[0, stop)`
    samples           the row yields outputs. Prefill: the chunk ends at the last known token, so its last position
                      yields one output. With drafts, each position yields an output
    min_output_index  index of the row's first output among the request's outputs
    begin             initial device state, in the first chunk of each epoch
    drafts            number of draft tokens; 0 in prefill
    states            ids of the request's recurrent states; None: the model has none
    window_table      block ids of the pages of `block_table`, if layers with a sliding window have blocks of their own;
                      those behind the row's windows belong to others

    `min_start` and `min_output_index` are exact, unless drafts of an earlier step are in flight. Then only the device
    knows how many of those drafts are accepted. So both values are lower bounds, and the row's `1 + drafts` tokens lie
    somewhere in `[min_start, stop)`.
    """

    request_id: RequestId
    slot: int
    epoch: int
    min_start: int
    stop: int
    tokens: tuple[int, ...] | None
    block_table: tuple[BlockId, ...]
    samples: bool
    min_output_index: int
    begin: RowStart | None = None
    drafts: int = 0
    states: StateIds | None = None
    window_table: tuple[BlockId, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes for this request."""
        return 1 + self.drafts if self.tokens is None else self.stop - self.min_start

    @property
    def is_certain(self) -> bool:
        """Whether the host knows the row's exact positions. It does, unless drafts of an earlier step are in flight."""
        return self.stop - self.min_start == self.num_tokens


class RowColumns(NamedTuple):
    """The rows of a step as columns, one column for each field of `RowPlan`. Columns are faster for code that needs one
    field of all rows.
    """

    request_id: tuple[RequestId, ...]
    slot: tuple[int, ...]
    epoch: tuple[int, ...]
    min_start: tuple[int, ...]
    stop: tuple[int, ...]
    tokens: tuple[tuple[int, ...] | None, ...]
    block_table: tuple[tuple[BlockId, ...], ...]
    samples: tuple[bool, ...]
    min_output_index: tuple[int, ...]
    begin: tuple[RowStart | None, ...]
    drafts: tuple[int, ...]
    states: tuple[StateIds | None, ...]
    window_table: tuple[tuple[BlockId, ...], ...]


@dataclass(frozen=True, slots=True, init=False)
class BatchPlan:
    """The batch of one step. The order of its rows: decode rows without drafts, decode rows with drafts, prefill rows.

    columns      the rows as columns, one for each field
    speculates   a row has drafts, or its positions depend on an earlier step with drafts
    self_check   run the forward pass twice, and compare both runs (the self-check); every rank does it
    num_decodes  number of decode rows
    """

    columns: RowColumns
    speculates: bool
    self_check: bool
    num_decodes: int = field(repr=False, compare=False)
    _rows: tuple[RowPlan, ...] | None = field(repr=False, compare=False)

    def __init__(self, rows: Iterable[RowPlan] = (), speculates: bool = False) -> None:
        rows = tuple(rows)
        columns = RowColumns._make(zip(*rows, strict=True) if rows else ((),) * len(RowPlan._fields))
        self._set(columns, speculates, rows)

    @classmethod
    def of_columns(cls, columns: RowColumns, speculates: bool, *, self_check: bool = False) -> BatchPlan:
        """The batch with these columns. Its rows are made on first use, because a decode step without drafts needs only
        columns.
        """
        batch = cls.__new__(cls)
        batch._set(columns, speculates, None, self_check=self_check)
        return batch

    def with_self_check(self) -> BatchPlan:
        """The same batch, to be run twice."""
        batch = type(self).__new__(type(self))
        batch._set(self.columns, self.speculates, self._rows, self_check=True)
        return batch

    def _set(
        self, columns: RowColumns, speculates: bool, rows: tuple[RowPlan, ...] | None, *, self_check: bool = False
    ) -> None:
        object.__setattr__(self, "columns", columns)
        object.__setattr__(self, "speculates", speculates)
        object.__setattr__(self, "self_check", self_check)
        object.__setattr__(self, "num_decodes", columns.tokens.count(None))
        object.__setattr__(self, "_rows", rows)

    @property
    def rows(self) -> tuple[RowPlan, ...]:
        """The rows, in the batch's order."""
        rows = self._rows
        if rows is None:
            rows = tuple(map(RowPlan._make, zip(*self.columns, strict=True)))
            object.__setattr__(self, "_rows", rows)
        return rows

    @property
    def prefill_rows(self) -> tuple[RowPlan, ...]:
        """The prefill rows, without making the others."""
        decodes = self.num_decodes
        if decodes == self.num_rows:  # nearly always
            return ()
        return tuple(map(RowPlan._make, zip(*(column[decodes:] for column in self.columns), strict=True)))

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.columns.slot)

    def prefill_requests(self) -> Iterator[tuple[RequestId, int]]:
        """Id and epoch of each prefill row's request: the requests whose loads the step may have to wait for. The first
        step of a request that decodes has waited for its loads.
        """
        columns, decodes = self.columns, self.num_decodes
        return zip(columns.request_id[decodes:], columns.epoch[decodes:], strict=True)

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
    """Log-probability of one emitted token, or of a token of a prompt, and of the most likely tokens at its position.

    rank   number of likelier tokens, plus one; 0 for emitted tokens, whose rank is not computed
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int = 0


class Forced(NamedTuple):
    """The only continuation that a grammar leaves an answer.

    start   number of tokens of the request before it
    """

    start: int = 0
    tokens: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Number of tokens of the request with all of them."""
        return self.start + len(self.tokens)

    def after(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The rest of it behind all tokens of the request; empty if they are not its beginning."""
        drawn = len(tokens) - self.start
        if not 0 <= drawn <= len(self.tokens):
            return ()
        if self.tokens[:drawn] != tuple(tokens[self.start :]):  # rule: forced-drafts-are-known-to-the-host
            return ()
        return self.tokens[drawn:]


class RowResult(msgspec.Struct, frozen=True, gc=False):
    """Sampled tokens of one row of a step.

    token_ids   one token, and one more token for each accepted draft
    logprobs    one entry for each token, if the request wants logprobs
    finite      False: the logits after these tokens held NaN or infinity, or no token was allowed
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finite: bool = True


Result = int | RowResult
"""The result of a sampling row. A number is a token, without more: nearly all results, so they need no object each."""


@dataclass(frozen=True, slots=True, init=False)
class CachedTokens:
    """Number of prompt tokens whose KV came from a cache, by tier: `CachedTokens(device=16, disk=32)`.

    by_tier   number of tokens by the tier's name; tiers with no tokens are left out
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
        """Tokens whose blocks the device still held."""
        return self.by_tier.get(DEVICE, 0)

    @property
    def host(self) -> int:
        """Tokens whose blocks came from host memory."""
        return self.by_tier.get(HOST, 0)

    @property
    def disk(self) -> int:
        """Tokens whose blocks came from disk, from all directories."""
        return sum(count for tier, count in self.by_tier.items() if tier.partition("-")[0] == "disk")

    @property
    def total(self) -> int:
        """Tokens of all tiers."""
        return sum(self.by_tier.values())


class Delta(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """New output of one sample: the tokens since its previous delta. The final delta has the finish reason. A struct,
    because the engine thread makes one for each token, and making a dataclass takes twice as long.

    finish_reason   None while running; then `"stop"`, `"length"`, `"abort"` or `"error"`
    index           number of the sample among the request's `n` samples, from 0
    text            empty in the engine, which knows only tokens; an `OutputProcessor` adds the text. The text may lag
                    behind the tokens while a stop string or a UTF-8 sequence is incomplete
    prompt_logprobs log-probabilities of the prompt's tokens from the second on; only in the first delta, if the request
                    wants them
    queue_s         seconds from the sample's arrival in the engine to the launch of its first step; only in the first
                    delta with tokens
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str | None
    prompt_tokens: int
    cached: CachedTokens
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    queue_s: float | None = None


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive tokens `[start, stop)` of a prompt, and why they were reused or computed.

    reason       a key of `REASONS` in server/cache_explanation.py
    tier         the tier that held them, or the last one that did; empty: none, or unknown
    seconds_ago  for `evicted`: the time since then
    """

    start: int
    stop: int
    reason: str
    tier: str = ""
    seconds_ago: float | None = None


@dataclass(frozen=True, slots=True)
class Relative:
    """The earlier request that shares the most leading tokens with a prompt, under the same cache salt.

    shared_tokens   number of these tokens, prompt and answer; only whole blocks if the tokens were forgotten
    seconds_ago     time since it ended; 0: it has not
    start           position of the first of the tokens below
    own, other      tokens of the prompt and of the earlier request around the first difference. `other` is empty if
                    its tokens were forgotten, or if it has no further ones
    """

    shared_tokens: int
    seconds_ago: float
    start: int = 0
    own: tuple[int, ...] = ()
    other: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CacheExplanation:
    """Which tokens of a prompt were reused or computed, and why, as far as the engine remembers.

    relative     None: no remembered request of the same cache salt begins with the same tokens
    requests     number of earlier requests that the engine remembers
    seconds      time for which it remembers them
    complete     whether these are all requests since the engine's start
    """

    prompt_tokens: int
    block_tokens: int
    stretches: tuple[Stretch, ...]
    relative: Relative | None
    requests: int
    seconds: float
    complete: bool


@dataclass(frozen=True, slots=True)
class PrefixQuery:
    """Which prefix an operation on the KV cache is about, and what to do with it; see `sidestream.engine.prefixes`.

    tokens      token ids, 32-bit little-endian
    cache_salt  the salt of the requests that share the prefix; UTF-8, which may contain lone surrogates
    name        `CachedPrefix.name` in place of tokens
    ttl_s       seconds for which a pin lasts
    hint        a request asks for the pin, not an operator
    tier        the tier from which to drop the prefix; None: all tiers
    limit       bound of a list
    """

    tokens: bytes = b""
    cache_salt: bytes = b""
    name: str = ""
    ttl_s: float = 0.0
    hint: bool = False
    tier: str | None = None
    limit: int = 0

    @classmethod
    def of(
        cls,
        token_ids: Sequence[int],
        cache_salt: str = "",
        *,
        ttl_s: float = 0.0,
        hint: bool = False,
        tier: str | None = None,
    ) -> PrefixQuery:
        """A query about the prefix of these tokens. Raises RequestRejected."""
        try:
            tokens = struct.pack(f"<{len(token_ids)}i", *token_ids)
        except struct.error:
            raise RequestRejected("prompt: token ids are whole numbers in [0, 2^31)", param="prompt") from None
        return cls(tokens, cache_salt.encode("utf-8", "surrogatepass"), ttl_s=ttl_s, hint=hint, tier=tier)


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """A prefix of prompts, as far as the KV cache has whole blocks of it.

    name      identifies the prefix, with its cache salt and the model's weights
    tokens    number of tokens in its blocks
    tiers     number of its blocks by tier; in the result of a drop, of the dropped blocks
    ttl_s     seconds until its pin ends; None: no pin holds it
    hint      its pin was asked for by a request, not by an operator
    hits      number of remembered requests that begin with it
    age_s     seconds since the last of them ended; None: none is remembered
    token_ids its first tokens, if they are remembered
    """

    name: str
    tokens: int
    tiers: dict[str, int]
    ttl_s: float | None = None
    hint: bool = False
    hits: int = 0
    age_s: float | None = None
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The scheduler's output for one step.

    transfers   copies between tiers, to be submitted before the step
    batch       the batch of the step; without rows, no step is launched
    after       fences of earlier uses of the blocks that the step writes; the compute stream waits for them
    undrafted   number of decode rows that get no drafts although speculative decoding is on, by reason: the answer ends
                with this step (`end`), no free blocks (`blocks`), too few drafts would be accepted (`chance`), drafts
                would slow other requests too much (`others`), a step without drafts is timed (`measuring`)
    """

    transfers: tuple[TransferPlan, ...]
    batch: BatchPlan
    after: tuple[Fence, ...]
    undrafted: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Health:
    """State of an engine.

    status   `"ok"`, `"stalled"` (it hangs, and may go on), `"draining"` or `"failed"`
    detail   the reason; with `"ok"`, why a tier fails or new requests wait at present, else empty
    paused   whether new requests wait until `resume`
    """

    status: str
    detail: str
    paused: bool = False


CANCELLED = "the request was cancelled"
"""`Delta.error` of the last delta of a cancelled sample, whose finish reason is `abort`."""
NO_TOKEN_LEFT = (
    "no token may come next: structured_outputs, tools, allowed_token_ids, bad_words, min_tokens and stop_token_ids "
    "together leave none: loosen one of them"
)
"""`Delta.error` of the last delta of a sample whose options forbid every token. Its finish reason is `error`."""


@dataclass(frozen=True, slots=True)
class Flushed:
    """The result of `flush`; true if nothing is left.

    left   unfinished work of the transfers, by kind
    """

    left: Mapping[str, int]

    def __bool__(self) -> bool:
        return not self.left


_MOVED = ("Access", "Accesses", "Key", "LayerGates", "LoadPlan", "PromotePlan", "StorePlan", "Tracer")


def __getattr__(name: str) -> object:
    if name not in _MOVED:
        raise AttributeError(f"module 'sidestream.types' has no attribute {name!r}")
    warn(f"sidestream.types.{name}", f"sidestream_kv.{name}")
    return getattr(sidestream_kv, name)
