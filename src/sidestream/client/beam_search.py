"""Beam search above an engine: each step asks for one token behind each beam, in ordinary requests that share their
beginning by the prefix cache. Knows token ids and log-probabilities, not the engine. Used on one thread or event loop.

The rules are those of transformers' beam search with its defaults (`early_stopping=False`): an answer that ends is kept
if it is among the best `width` continuations, its score is its log-probability divided by its length to the power of
`length_penalty`, and the search ends when no beam has a better score than the worst of `width` kept answers.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple

from sidestream.config import SamplingParams
from sidestream.errors import EngineStopped, RequestError, RequestRejected
from sidestream.text import TokenizerLike
from sidestream.types import CachedTokens, Delta, TokenLogprob

_MOST_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class BeamSequence:
    """One answer of a beam search. `score`: what answers are ranked by. `finish_reason`: `"stop"` or `"length"`."""

    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float
    score: float
    finish_reason: str


class _Beam(NamedTuple):
    score: float
    tokens: tuple[int, ...]
    logprob: float


class BeamSearch:
    """The search behind one prompt.

    params   parameters of the one-token requests
    """

    def __init__(
        self,
        prompt: Sequence[int],
        *,
        width: int,
        max_tokens: int,
        length_penalty: float = 1.0,
        end_ids: Collection[int] = (),
        param: str = "beam_width",
    ) -> None:
        """
        width            number of beams
        max_tokens       largest number of tokens of an answer
        length_penalty   above 0 prefers longer answers, below 0 shorter ones
        end_ids          tokens that end an answer

        Raises RequestRejected, naming `param`, for a width that needs more log-probabilities than an engine gives: a
        step needs so many continuations of each beam that `width` of them do not end the answer.
        """
        each = max(2, 1 + len(end_ids))
        if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width * each <= _MOST_LOGPROBS:
            raise RequestRejected(
                f"{param} is {width!r}: it must be a whole number in [1, {_MOST_LOGPROBS // each}], because the "
                f"{_MOST_LOGPROBS} likeliest tokens are known, {each} for each beam",
                param=param,
            )
        self.prompt = tuple(prompt)
        self.width = width
        self.params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=width * each, max_drafts=0)
        self._max_tokens = max_tokens
        self._length_penalty = length_penalty
        self._end_ids = frozenset(end_ids)
        self._num_candidates = width * each
        self._beams = [_Beam(0.0, (), 0.0)]
        self._finished: list[_Beam] = []
        self._is_over = False

    @property
    def prompts(self) -> list[list[int]]:
        """Token ids behind which the next token is wanted; empty: the search is over."""
        return [] if self._is_over else [[*self.prompt, *beam.tokens] for beam in self._beams]

    def advance(self, tokens: Sequence[TokenLogprob]) -> None:
        """Take the likeliest tokens behind each of `prompts`."""
        found = (
            (beam.logprob + logprob, (*beam.tokens, token))
            for beam, likeliest in zip(self._beams, tokens, strict=True)
            for token, logprob in likeliest.top
        )
        candidates = heapq.nlargest(self._num_candidates, found, key=lambda candidate: candidate[0])
        length = len(self._beams[0].tokens) + 1
        divisor = length**self._length_penalty
        beams, ended = [], []
        for rank, (logprob, answer) in enumerate(candidates):
            beam = _Beam(logprob / divisor, answer, logprob)
            if answer[-1] not in self._end_ids and length < self._max_tokens:
                beams.append(beam)
            elif rank < self.width:
                ended.append(beam)
        self._finished = heapq.nlargest(self.width, [*self._finished, *ended], key=lambda beam: beam.score)
        self._beams = beams[: self.width]
        can_improve = len(self._finished) < self.width or (bool(beams) and beams[0].score > self._finished[-1].score)
        self._is_over = not beams or not can_improve

    def answers(
        self,
        tokenizer: TokenizerLike,
        *,
        after: Sequence[int] = (),
        shown: Collection[str] | None = (),
        include_stop: bool = False,
    ) -> list[BeamSequence]:
        """The answers so far, the best first. For `after` and `shown` see `TokenizerLike.detokenizer`."""
        found = []
        for score, tokens, logprob in self._finished:
            ends = tokens[-1] in self._end_ids
            text = tokenizer.detokenizer(after, shown).decode(tokens[:-1] if ends and not include_stop else tokens)
            found.append(BeamSequence(text, tokens, logprob, score, "stop" if ends else "length"))
        return found


Generate = Callable[[list[int], SamplingParams], AsyncGenerator[Delta, None]]
"""Function that yields the deltas of one request."""


async def run_search(search: BeamSearch, generate: Generate) -> CachedTokens:
    """Run a search to its end; a cancellation aborts its requests. Returns the cached tokens of the prompt's first
    request. Raises what `generate` raises, and RequestError or EngineStopped for a request that fails.
    """
    cached: CachedTokens | None = None

    async def next_tokens(prompt: list[int]) -> Delta:
        async with aclosing(generate(prompt, search.params)) as deltas:
            async for delta in deltas:
                if delta.finish_reason == "error":
                    raise RequestError(delta.error or "the request failed")
                if delta.logprobs:
                    return delta
        raise EngineStopped("the engine stopped a request of a beam search: try again later")

    while prompts := search.prompts:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(next_tokens(prompt)) for prompt in prompts]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        deltas = [task.result() for task in tasks]
        cached = cached or deltas[0].cached
        search.advance([delta.logprobs[0] for delta in deltas])
    return cached or CachedTokens()
