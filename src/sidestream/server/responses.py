"""Builds the replies of the two APIs as JSON values: choices, logprobs, usage. The input is deltas, the new text and
tokens of a sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sidestream.errors import InvariantError
from sidestream.offload.tiers.registry import names
from sidestream.server.fields import Api
from sidestream.text import DetokenizerLike, TokenizerLike
from sidestream.types import Delta, TokenLogprob

Json = dict[str, Any]

_LOWEST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI sends this for a token that cannot occur


def _finite(logprob: float) -> float:
    """A logprob that JSON can represent. Raises InvariantError for NaN and +inf, which are bugs of the sampler."""
    if logprob < math.inf:
        return max(logprob, _LOWEST_LOGPROB)
    raise InvariantError(f"a token's log-probability is {logprob}: it must be a number of 0 or less")


class ResponseFormat(Protocol):
    """The names and the structure of one API's replies. The argument `logprobs` of other methods is a result of the
    method `logprobs`.
    """

    id_prefix: str
    response_object: str
    chunk_object: str

    def first_chunk(self, index: int) -> Json | None:
        """A sample's first chunk, before its text; None if the API has no such chunk."""
        ...

    def chunk(self, index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
        """A streamed choice."""
        ...

    def choice(self, index: int, text: str, logprobs: Json | None, finish_reason: str) -> Json:
        """A complete choice."""
        ...

    def logprobs(self, tokens: Sequence[TokenLogprob], tokenizer: TokenizerLike, offsets: TextOffsets) -> Json:
        """Log-probabilities of consecutive tokens."""
        ...


class TextOffsets:
    """The start of each token in its sample's text, in characters. A token that begins within a character starts at
    that character.
    """

    def __init__(self, detokenizer: DetokenizerLike) -> None:
        self._detokenizer = detokenizer
        self._chars = 0

    def advance(self, token_id: int) -> int:
        """The start of the token `token_id`, which is the next token of the sample."""
        start = self._chars
        self._chars += len(self._detokenizer.push(token_id))
        return start


class ChatFormat:
    """`/v1/chat/completions`."""

    id_prefix = "chatcmpl-"
    response_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def first_chunk(self, index: int) -> Json | None:
        """A choice whose delta has the role."""
        return self._delta(index, {"role": "assistant", "content": ""}, None, None)

    def chunk(self, index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
        """A choice with a delta."""
        return self._delta(index, {"content": text} if text or logprobs else {}, logprobs, finish_reason)

    def choice(self, index: int, text: str, logprobs: Json | None, finish_reason: str) -> Json:
        """A choice with a message."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}

    def logprobs(self, tokens: Sequence[TokenLogprob], tokenizer: TokenizerLike, offsets: TextOffsets) -> Json:
        """`content`: one entry per token with its bytes and its alternatives."""

        def entry(token_id: int, logprob: float) -> Json:
            text = tokenizer.decode([token_id])
            # A token with a part of a character decodes to U+FFFD, so its bytes are unknown.
            utf8 = None if "\ufffd" in text else list(text.encode("utf-8"))
            return {"token": text, "logprob": _finite(logprob), "bytes": utf8}

        content = [{**entry(t.token_id, t.logprob), "top_logprobs": [entry(*other) for other in t.top]} for t in tokens]
        return {"content": content, "refusal": None}

    @staticmethod
    def _delta(index: int, delta: Json, logprobs: Json | None, finish_reason: str | None) -> Json:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


class CompletionFormat:
    """`/v1/completions`."""

    id_prefix = "cmpl-"
    response_object = "text_completion"
    chunk_object = "text_completion"

    def first_chunk(self, index: int) -> Json | None:
        """None: a text has no role."""
        return None

    def chunk(self, index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
        """A choice with some text."""
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def choice(self, index: int, text: str, logprobs: Json | None, finish_reason: str) -> Json:
        """A choice with all its text."""
        return self.chunk(index, text, logprobs, finish_reason)

    def logprobs(self, tokens: Sequence[TokenLogprob], tokenizer: TokenizerLike, offsets: TextOffsets) -> Json:
        """Lists of equal length. The alternatives include the sampled token; if two have the same text, the likelier
        one is kept.
        """
        texts = [tokenizer.decode([token.token_id]) for token in tokens]
        alternatives = []
        for token, sampled in zip(tokens, texts, strict=True):
            likeliest: dict[str, float] = {}
            for token_id, logprob in token.top:
                likeliest.setdefault(tokenizer.decode([token_id]), _finite(logprob))
            likeliest.setdefault(sampled, _finite(token.logprob))
            alternatives.append(likeliest)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": alternatives,
            "text_offset": [offsets.advance(token.token_id) for token in tokens],
        }


RESPONSE_FORMATS: dict[Api, ResponseFormat] = {"chat": ChatFormat(), "text": CompletionFormat()}


@dataclass(slots=True)
class Usage:
    """Tokens of one reply, counted as deltas come. Written by the request's task only."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_by_tier: dict[str, int] = field(default_factory=lambda: dict.fromkeys(names(), 0))

    def add_prompt(self, delta: Delta) -> None:
        """Count a prompt's tokens. Call it at the prompt's first delta only, once for all samples of the prompt."""
        self.prompt_tokens += delta.prompt_tokens
        for tier, count in delta.cached.by_tier.items():
            self.cached_by_tier[tier] = self.cached_by_tier.get(tier, 0) + count

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed again."""
        return sum(self.cached_by_tier.values())

    def json(self) -> Json:
        """OpenAI's usage object, with the tiers of the cached tokens added."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": self.prompt_tokens + self.output_tokens,
            "prompt_tokens_details": {
                "cached_tokens": self.cached_tokens,
                "cached_tokens_by_tier": self.cached_by_tier,
            },
        }
