"""How the two APIs word a reply: choices, logprobs, usage. Pure: deltas in, JSON values out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sidestream.errors import InvariantError
from sidestream.server.backend import Detokenizer, Tokenizer
from sidestream.server.fields import Api
from sidestream.types import CachedTokens, Delta, TokenLogprob

Json = dict[str, Any]

_LOWEST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI sends this for a token that cannot occur


def _finite(logprob: float) -> float:
    """A logprob as it is sent. Raises InvariantError for NaN and +inf, which no sampler may produce and no JSON can
    hold.
    """
    if logprob < math.inf:
        return max(logprob, _LOWEST_LOGPROB)
    raise InvariantError(f"a token's log-probability is {logprob}: it must be a number of 0 or less")


class Wording(Protocol):
    """One API's names and shapes. `logprobs` is what `_Logprobs` of the same API made, or None."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def opening(self, index: int) -> Json | None:
        """The first streamed choice of a sample, before its text; None: there is none."""
        ...

    def piece(self, index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
        """A streamed choice."""
        ...

    def whole(self, index: int, text: str, logprobs: Json | None, finish_reason: str) -> Json:
        """A complete choice."""
        ...

    def logprobs(self, tokens: Sequence[TokenLogprob], tokenizer: Tokenizer, offsets: Offsets) -> Json:
        """Log-probabilities of consecutive tokens."""
        ...


class Offsets:
    """Where in a sample's text each of its tokens starts; a token that ends within a character starts at that
    character.
    """

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._chars = 0

    def advance(self, token_id: int) -> int:
        """The start of this token; the next one starts after it."""
        start = self._chars
        self._chars += len(self._detokenizer.push(token_id))
        return start


class ChatWording:
    """`/v1/chat/completions`."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> Json | None:
        """Says who speaks."""
        return self._delta(index, {"role": "assistant", "content": ""}, None, None)

    def piece(self, index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
        """A choice with a delta; the text of the last one is the client's to append like any other."""
        return self._delta(index, {"content": text} if text or logprobs else {}, logprobs, finish_reason)

    def whole(self, index: int, text: str, logprobs: Json | None, finish_reason: str) -> Json:
        """A choice with a message."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}

    def logprobs(self, tokens: Sequence[TokenLogprob], tokenizer: Tokenizer, offsets: Offsets) -> Json:
        """`content`: one entry per token with its bytes and its alternatives."""

        def entry(token_id: int, logprob: float) -> Json:
            text = tokenizer.decode([token_id])
            # a token that is a part of a character has bytes that its text does not tell
            spelled = None if "\ufffd" in text else list(text.encode("utf-8"))
            return {"token": text, "logprob": _finite(logprob), "bytes": spelled}

        content = [{**entry(t.token_id, t.logprob), "top_logprobs": [entry(*other) for other in t.top]} for t in tokens]
        return {"content": content, "refusal": None}

    @staticmethod
    def _delta(index: int, delta: Json, logprobs: Json | None, finish_reason: str | None) -> Json:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


class TextWording:
    """`/v1/completions`."""

    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def opening(self, index: int) -> Json | None:
        """Nothing: a text has no role."""
        return None

    def piece(self, index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
        """A choice with some text."""
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def whole(self, index: int, text: str, logprobs: Json | None, finish_reason: str) -> Json:
        """A choice with all its text."""
        return self.piece(index, text, logprobs, finish_reason)

    def logprobs(self, tokens: Sequence[TokenLogprob], tokenizer: Tokenizer, offsets: Offsets) -> Json:
        """Parallel lists; the alternatives include the drawn token, and of two spelled alike the likelier stays."""
        texts = [tokenizer.decode([token.token_id]) for token in tokens]
        alternatives = []
        for token, drawn in zip(tokens, texts, strict=True):
            likeliest: dict[str, float] = {}
            for token_id, logprob in token.top:
                likeliest.setdefault(tokenizer.decode([token_id]), _finite(logprob))
            likeliest.setdefault(drawn, _finite(token.logprob))
            alternatives.append(likeliest)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": alternatives,
            "text_offset": [offsets.advance(token.token_id) for token in tokens],
        }


WORDINGS: dict[Api, Wording] = {"chat": ChatWording(), "text": TextWording()}


@dataclass(slots=True)
class Usage:
    """Tokens of one reply, counted as deltas come. Written by the request's task only."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_device: int = 0
    cached_host: int = 0
    cached_disk: int = 0

    def prompt(self, delta: Delta) -> None:
        """Count a prompt, told by its first delta: once, however many samples it has."""
        cached: CachedTokens = delta.cached
        self.prompt_tokens += delta.prompt_tokens
        self.cached_device += cached.device
        self.cached_host += cached.host
        self.cached_disk += cached.disk

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed again."""
        return self.cached_device + self.cached_host + self.cached_disk

    def json(self) -> Json:
        """OpenAI's usage object; beyond it, the tiers that the cached tokens came from."""
        tiers = {"device": self.cached_device, "host": self.cached_host, "disk": self.cached_disk}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": self.prompt_tokens + self.output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens, "cached_tokens_by_tier": tiers},
        }
