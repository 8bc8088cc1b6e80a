"""Limits of the scheduler: sizes of one step, fairness between requests, and where a prompt is cut into chunks; and the
check of a request against the engine's bounds, before it takes any resource. Pure arithmetic; front ends use it too.

Outputs are bitwise equal only if the shapes of the chunks are equal. So a prompt is always cut at the same positions,
whether or not a cache supplies some of its tokens. A prompt of `known` tokens is cut at multiples of `chunk_tokens`,
and at the last block border before its end, so that its tail (the tokens after this border) is a separate chunk. If a
cache supplies all tokens up to that border, the same tail is computed as without a cache: equal shapes, equal bits,
equal tokens. If a cache supplies fewer tokens, the first chunk after them may be shorter, and the output is equal up to
rounding (docs/identity.md).

On a GPU the separate tail is off by default, because it costs one more pass over all weights.
"""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sidestream.config import MOST_PROMPT_LOGPROBS, MOST_SALT_CHARS, SamplingParams
from sidestream.errors import ContextTooLong, RequestRejected
from sidestream_kv.kv.layout import blocks_before_window
from sidestream_kv.types import Key

# Prompt tokens that a step may compute whatever the target of the gap: with fewer, a step takes nearly as long.
_LEAST_PREFILL = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that all parts of the scheduler share.

    token_budget    largest number of tokens in one step, without drafts
    tail_apart      compute the tail of a prompt as a separate chunk, see `chunk_stop`
    target_gap_s    largest time between two tokens of a request that prefill in the same steps should cause; None: no
                    bound. Works only without `tail_apart`, because it cuts chunks
    aging_steps     number of steps without a request after which its priority improves by one
    max_promotions  how often one request may wait for the disk; then it recomputes its blocks
    max_probes      largest number of waiting requests that one step considers for admission
    read_ahead_blocks  largest number of blocks that requests in the queue may have read from slower tiers into host
                    memory; 0: they wait for a slot before they read
    state_interval  number of blocks between two checkpoints (kept recurrent states) in a prompt; 0: none at intervals
    window          tokens of the model's largest sliding window; 0: no layer has one
    """

    block_tokens: int
    chunk_tokens: int
    token_budget: int
    prefix_cache: bool = True
    tail_apart: bool = True
    target_gap_s: float | None = None
    aging_steps: int = 256
    max_promotions: int = 2
    max_probes: int = 64
    read_ahead_blocks: int = 0
    state_interval: int = 0
    window: int = 0

    def num_blocks(self, num_tokens: int) -> int:
        """Number of blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_tokens)

    def prefill_budget(self, num_decoding: int, prefill_rate: float | None) -> int:
        """Number of prompt tokens that a step with `num_decoding` decode rows may compute.

        prefill_rate   measured prompt tokens per second; None: unknown
        """
        room = self.token_budget - num_decoding
        if not num_decoding or self.tail_apart or self.target_gap_s is None or prefill_rate is None:
            return room
        return min(room, max(_LEAST_PREFILL, int(prefill_rate * self.target_gap_s)))

    def blocks_before_window(self, num_blocks: int) -> int:
        """Of the first `num_blocks` blocks of a request that computes only the tokens after them, the number of leading
        blocks that it reads only in layers without a sliding window.
        """
        # rule: window-reaches-back-from-the-first-token
        return blocks_before_window(num_blocks * self.block_tokens, self.window, self.block_tokens)


def reusable_tokens(known: int, block_tokens: int) -> int:
    """Number of tokens that a cache may supply: whole blocks, but never the last token: its logits are needed."""
    return (known - 1) // block_tokens * block_tokens


def chunk_stop(start: int, known: int, *, chunk_tokens: int, block_tokens: int, tail_apart: bool = True) -> int:
    """End of the chunk that begins at `start`, which is below `known`. `tail_apart`: whether the tail is a separate
    chunk.
    """
    tail = reusable_tokens(known, block_tokens)
    border = (start // chunk_tokens + 1) * chunk_tokens
    if not tail_apart:
        return min(border, known)
    return min(border, tail) if start < tail else known


_PRIORITY_BOUND = 1 << 63

KeysOf = Callable[[npt.NDArray[np.int64], str], tuple[list[Key], int]]
"""Function of a prompt and its cache salt that returns the keys of the prompt's complete blocks, and the version of the
keys (`Scheduler.keys_version`).
"""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Upper bounds of the requests that an engine accepts.

    max_model_len   number of tokens of prompt and output together
    pool_tokens     number of tokens that the block pool holds
    max_unfinished  samples that run or wait at the same time
    padding_token   a token that prompts must not contain, because the model would not count its position; None: there
                    is no such token
    """

    max_model_len: int
    pool_tokens: int
    block_tokens: int
    vocab_size: int
    max_unfinished: int
    padding_token: int | None = None

    @property
    def longest(self) -> int:
        """Tokens of prompt and output together that fit both the model and the pool."""
        return min(self.max_model_len, self.pool_tokens)


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A checked request, with the values that take long to compute from its prompt.

    keys         keys of the prompt's complete blocks, computed when the scheduler had this `keys_version`
    seed         seed of the first sample; each further sample adds 1
    max_outputs  tokens that each sample may emit
    adapter      slot of its LoRA adapter; 0: none
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    keys: list[Key]
    keys_version: int
    seed: int
    max_outputs: int
    priority: int
    cache_salt: str
    adapter: int = 0


class RequestChecker:
    """Checks requests for one engine. Callable from any thread."""

    def __init__(self, bounds: Bounds, keys_of: KeysOf) -> None:
        self.bounds = bounds
        self._keys_of = keys_of

    def check(
        self, prompt: Sequence[int], params: SamplingParams, *, seed: int = 0, priority: int = 0, cache_salt: str = ""
    ) -> CheckedRequest:
        """Validate a request. `seed` is used if the params have none. Raises RequestRejected or ContextTooLong."""
        tokens = _whole_numbers(prompt, "prompt")
        (priority,) = _whole_numbers((priority,), "priority")
        if not -_PRIORITY_BOUND <= priority < _PRIORITY_BOUND:
            raise RequestRejected(f"priority is {priority}: give a number of 64 bits", param="priority")
        max_outputs, numbers = self._check(tokens, params, cache_salt)
        keys, version = self._keys_of(numbers, cache_salt)
        chosen = seed if params.seed is None else params.seed
        return CheckedRequest(tokens, params, keys, version, chosen, max_outputs, priority, cache_salt)

    def _check(
        self, prompt: tuple[int, ...], params: SamplingParams, cache_salt: str
    ) -> tuple[int, npt.NDArray[np.int64]]:
        """Check everything except types. Returns the largest number of output tokens, and the prompt as an array. The
        prompt is checked as an array: checking tens of thousands of tokens one by one would delay the first token by
        milliseconds.
        """
        bounds = self.bounds
        if not prompt:
            raise RequestRejected("the prompt is empty: give at least one token", param="prompt")
        if not isinstance(cache_salt, str) or len(cache_salt) > MOST_SALT_CHARS:
            actual = (
                f"{len(cache_salt)} characters long"
                if isinstance(cache_salt, str)
                else f"a {type(cache_salt).__name__}"
            )
            raise RequestRejected(
                f"cache_salt is {actual}: give a text of at most {MOST_SALT_CHARS} characters", param="cache_salt"
            )
        try:
            numbers = np.fromiter(prompt, np.int64, len(prompt))
            lowest, highest = int(numbers.min()), int(numbers.max())
        except OverflowError:  # too large for int64: rejected below
            lowest, highest = min(prompt), max(prompt)
        if lowest < 0 or highest >= bounds.vocab_size:
            bad = lowest if lowest < 0 else highest
            raise RequestRejected(
                f"the prompt has token id {bad}: the model knows 0 to {bounds.vocab_size - 1}", param="prompt"
            )
        if bounds.padding_token is not None and bool((numbers == bounds.padding_token).any()):
            raise RequestRejected(
                f"the prompt has the padding token {bounds.padding_token}, whose position this model does not count: "
                "leave it out",
                param="prompt",
            )
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            ids: Iterable[int] = getattr(params, name)
            for token_id in ids:
                if token_id >= bounds.vocab_size:
                    raise RequestRejected(
                        f"{name} has token id {token_id}: the model knows 0 to {bounds.vocab_size - 1}", param=name
                    )
        if params.n > bounds.max_unfinished:
            raise RequestRejected(
                f"n is {params.n}: the engine takes {bounds.max_unfinished} samples at a time; ask for fewer", param="n"
            )
        self._check_length(len(prompt))
        count = 0 if params.prompt_logprobs is None else len(prompt) * (1 + params.prompt_logprobs)
        if count > MOST_PROMPT_LOGPROBS:
            raise RequestRejected(
                f"prompt_logprobs is {params.prompt_logprobs} for a prompt of {len(prompt)} tokens: {count} "
                f"log-probabilities, at most {MOST_PROMPT_LOGPROBS}; shorten the prompt, or lower it",
                param="prompt_logprobs",
            )
        room = bounds.longest - len(prompt)
        if params.min_tokens > room:
            raise RequestRejected(
                f"min_tokens is {params.min_tokens}: after this prompt, the limit is {room}", param="min_tokens"
            )
        return room if params.max_tokens is None else min(params.max_tokens, room), numbers

    def _check_length(self, length: int) -> None:
        bounds = self.bounds
        if length >= bounds.max_model_len:
            raise ContextTooLong(
                f"prompt has {length} tokens, the model takes {bounds.max_model_len} with at least one of output: "
                "shorten it",
                param="prompt",
            )
        if length >= bounds.pool_tokens:
            blocks = bounds.pool_tokens // bounds.block_tokens
            raise ContextTooLong(
                f"prompt has {length} tokens, the pool holds {bounds.pool_tokens} ({blocks} blocks x "
                f"{bounds.block_tokens}) with at least one of output: raise kv_memory or shorten it",
                param="prompt",
            )


def _whole_numbers(values: Iterable[object], param: str) -> tuple[int, ...]:
    """A copy of the token ids as plain ints. Raises RequestRejected for an id of another type, such as bool."""
    try:
        numbers = tuple(values)
    except TypeError:
        raise RequestRejected(f"{param} is {reprlib.repr(values)}: give a list of whole numbers", param=param) from None
    if list(map(type, numbers)).count(int) == len(numbers):
        return numbers  # type: ignore[return-value]
    return tuple(_whole_number(value, param) for value in numbers)


def _whole_number(value: Any, param: str) -> int:
    try:
        if isinstance(value, bool | np.bool_):  # Python, and numpy before 2.1, accept bools as ints
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise RequestRejected(f"{param} has {reprlib.repr(value)}, which is not a whole number", param=param) from None
