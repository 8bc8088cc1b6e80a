"""Builds the replies of the two APIs as JSON values: choices, logprobs, usage. The input is deltas, the new text and
tokens of a sample.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sidestream.errors import InvariantError
from sidestream.formats import (
    AnswerParser,
    Arguments,
    CallBegun,
    CallEnded,
    Content,
    Event,
    Message,
    Reasoning,
    message_of,
)
from sidestream.server.fields import Api, Call
from sidestream.text import Detokenizer, TokenizerLike
from sidestream.types import Delta, TokenLogprob
from sidestream_kv.offload.tiers.stack import names

Json = dict[str, Any]

_LOWEST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI sends this for a token that cannot occur


def _finite(logprob: float) -> float:
    """A logprob that JSON can represent. Raises InvariantError for NaN and +inf, which are bugs of the sampler."""
    if logprob < math.inf:
        return max(logprob, _LOWEST_LOGPROB)
    raise InvariantError(f"a token's log-probability is {logprob}: it must be a number of 0 or less")


@dataclass(slots=True)
class SpelledToken:
    """A token of a choice, or an alternative to it, with the text and the bytes that it adds to the choice's text.

    logprob  None for the first token of a prompt
    text     empty for a token that ends inside a character; the token that completes the character has it
    start    the token's position in the choice's text, in characters
    pending  number of bytes at the end that belong to an incomplete character
    """

    token_id: int
    logprob: float | None
    text: str
    data: bytes
    start: int
    pending: int = 0
    alternatives: list[SpelledToken] = field(default_factory=list)

    def cut(self, end: int) -> None:
        """Remove the characters from position `end` on, because the choice's text ends there."""
        kept = max(end - self.start, 0)
        if kept <= len(self.text):
            removed = len(self.text[kept:].encode()) + self.pending
            self.text, self.data = self.text[:kept], self.data[: max(len(self.data) - removed, 0)]
            self.start = min(self.start, end)


class TokenSpeller:
    """Spells the tokens of one choice, so that their texts, joined, are the choice's text, and their bytes, too."""

    def __init__(self, detokenizer: Detokenizer, *, start: int = 0) -> None:
        """`start`: number of characters of the choice's text before the first token."""
        self._detokenizer = detokenizer
        self._length = start  # characters of the tokens' text
        self._shown = start  # characters of the choice's text
        self._waiting = deque[tuple[int, SpelledToken]]()  # with the length of text at which the choice has the token

    def add(self, tokens: Sequence[TokenLogprob], text: str, *, ended: bool) -> list[SpelledToken]:
        """Add tokens and text of the choice. Returns the tokens whose text the choice has. Other tokens wait, because
        the text may end before them: at a stop string, or in front of a stop token.
        """
        self._shown += len(text)
        self._waiting += [self._spell(token) for token in tokens]
        ready: list[SpelledToken] = []
        while self._waiting and (ended or self._waiting[0][0] <= self._shown):
            ready.append(self._waiting.popleft()[1])
        if ended:
            for token in ready:
                token.cut(self._shown)
            if ready and self._shown > self._length:
                ready[-1].text += self._detokenizer.finish()
        return ready

    def _spell(self, token: TokenLogprob) -> tuple[int, SpelledToken]:
        spelled = self._peek(token.token_id, token.logprob)
        spelled.alternatives = [self._peek(*other) for other in token.top]
        self._detokenizer.push(token.token_id)
        self._length += len(spelled.text)
        pending = len(self._detokenizer.pending)
        spelled.pending = min(pending, len(spelled.data))
        return self._length + (pending > 0), spelled

    def _peek(self, token_id: int, logprob: float) -> SpelledToken:
        return SpelledToken(token_id, _finite(logprob), *self._detokenizer.peek(token_id), self._length)


class ChatFormat:
    """`/v1/chat/completions`."""

    id_prefix = "chatcmpl-"
    response_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def first_chunk(self, index: int, echo: str) -> Json | None:
        """A sample's first chunk, before the model's text: a choice whose delta has the role. `echo`: its text."""
        return self._delta(index, {"role": "assistant", "content": echo}, None, None)

    def chunk(self, index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
        """A choice with a delta."""
        return self._delta(index, {"content": text} if text or logprobs else {}, logprobs, finish_reason)

    def choice(self, index: int, text: str, logprobs: Json | None, finish_reason: str) -> Json:
        """A choice with a message."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}

    def parsed_chunk(self, index: int, event: Event | None, logprobs: Json | None, finish_reason: str | None) -> Json:
        """A choice whose delta is a part of a parsed answer."""
        return self._delta(index, {} if event is None else _delta_of(event), logprobs, finish_reason)

    def parsed_choice(self, index: int, answer: Message, logprobs: Json | None, finish_reason: str) -> Json:
        """A choice with a parsed answer."""
        choice = self.choice(index, answer.content, logprobs, finish_reason)
        message = choice["message"]
        if answer.reasoning:
            message |= {"reasoning_content": answer.reasoning, "reasoning": answer.reasoning}
        if answer.calls:
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
                for call_id, name, arguments in answer.calls
            ]
        if not answer.content and (answer.reasoning or answer.calls):
            message["content"] = None
        return choice

    def logprobs(self, tokens: Sequence[SpelledToken], *, as_ids: bool) -> Json:
        """Log-probabilities of consecutive tokens. `content`: one entry per token with its bytes and its alternatives.
        `as_ids`: a token is named `token_id:7` in place of its text.
        """

        def entry(token: SpelledToken) -> Json:
            return {"token": _name(token, as_ids), "logprob": token.logprob, "bytes": list(token.data)}

        content = [{**entry(token), "top_logprobs": [entry(other) for other in token.alternatives]} for token in tokens]
        return {"content": content, "refusal": None}

    @staticmethod
    def _delta(index: int, delta: Json, logprobs: Json | None, finish_reason: str | None) -> Json:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


class CompletionFormat:
    """`/v1/completions`."""

    id_prefix = "cmpl-"
    response_object = "text_completion"
    chunk_object = "text_completion"

    def first_chunk(self, index: int, echo: str) -> Json | None:
        """A choice with the text `echo`, if there is any: a text has no role."""
        return self.chunk(index, echo, None, None) if echo else None

    def chunk(self, index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
        """A choice with some text."""
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def choice(self, index: int, text: str, logprobs: Json | None, finish_reason: str) -> Json:
        """A choice with all its text."""
        return self.chunk(index, text, logprobs, finish_reason)

    def logprobs(self, tokens: Sequence[SpelledToken], *, as_ids: bool) -> Json:
        """Lists of equal length. The alternatives include the sampled token; if two alternatives have the same text,
        the second is named by its id.
        """
        return {
            "tokens": [_name(token, as_ids) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [None if token.logprob is None else _by_name(token, as_ids) for token in tokens],
            "text_offset": [token.start for token in tokens],
        }


Generate = Callable[[Callable[[int, Delta], Awaitable[None]]], Awaitable[None]]
"""Function that awaits its argument for each delta of a request's samples, until they have finished."""


async def whole_answer(generate: Generate, read: Callable[[Delta], list[Event]]) -> Message:
    """The answer of one sample. `read` returns the parts of it that a delta brings."""
    events: list[Event] = []

    async def emit(index: int, delta: Delta) -> None:
        events.extend(read(delta))

    await generate(emit)
    return message_of(events)


def answer_events(call: Call, parser: AnswerParser, delta: Delta) -> list[Event]:
    """The parts of the answer that the delta brings, without those that the request leaves out."""
    events = parser.feed(delta.text) + (parser.finish() if delta.finish_reason is not None else [])
    if not call.include_reasoning:
        events = [event for event in events if not isinstance(event, Reasoning)]
    if not call.parallel_tool_calls:
        events = [event for event in events if isinstance(event, Content | Reasoning) or event.index == 0]
    return events


def _delta_of(event: Event) -> Json:
    """A part of a parsed answer in OpenAI's delta format; reasoning has vLLM's older name, too."""
    match event:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text, "reasoning": text}
        case CallBegun(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case Arguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case CallEnded():
            return {}


def _name(token: SpelledToken, as_ids: bool) -> str:
    return f"token_id:{token.token_id}" if as_ids else token.text


def prompt_logprobs_json(logprobs: Sequence[TokenLogprob], top: int, decode: Callable[[list[int]], str]) -> list[Any]:
    """vLLM's list for a prompt: for each token, the token and its `top` likeliest alternatives by id; the first token
    has none. `decode`: the text of token ids.
    """
    names: dict[int, str] = {}

    def entry(token_id: int, logprob: float, rank: int) -> Json:
        if token_id not in names:
            names[token_id] = decode([token_id])
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": names[token_id]}

    found: list[Any] = [None]
    for one in logprobs:
        likeliest = {str(other): entry(other, value, rank) for rank, (other, value) in enumerate(one.top[:top], 1)}
        found.append({str(one.token_id): entry(one.token_id, one.logprob, one.rank)} | likeliest)
    return found


def spelled_prompt(
    prompt: Sequence[int], logprobs: Sequence[TokenLogprob], top: int, text: str, tokenizer: TokenizerLike
) -> list[SpelledToken]:
    """The tokens of an echoed prompt with this text; `top`: number of alternatives. The first token has no logprob.
    Special tokens have a text if they are part of `text`: the tokenizer adds some that the client has not sent.
    """
    are_sent = tokenizer.detokenizer((), None).decode(prompt) == text
    detokenizer = tokenizer.detokenizer((), None if are_sent else ())
    cut = [TokenLogprob(one.token_id, one.logprob, one.top[:top]) for one in logprobs]
    spelled = TokenSpeller(detokenizer).add([TokenLogprob(prompt[0], 0.0, ()), *cut], text, ended=True)
    spelled[0].logprob = None
    return spelled


def _by_name(token: SpelledToken, as_ids: bool) -> dict[str, float | None]:
    sampled = _name(token, as_ids)
    logprobs: dict[str, float | None] = {}
    for other in token.alternatives:
        name = _name(other, as_ids or other.text == sampled or other.text in logprobs)
        logprobs[sampled if other.token_id == token.token_id else name] = other.logprob
    logprobs.setdefault(sampled, token.logprob)
    return logprobs


CHAT_FORMAT = ChatFormat()
RESPONSE_FORMATS: dict[Api, ChatFormat | CompletionFormat] = {"chat": CHAT_FORMAT, "text": CompletionFormat()}
"""The names and the structure of each API's replies."""


@dataclass(slots=True)
class Usage:
    """Tokens of one reply, counted as deltas come. Written by the request's task only."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_by_tier: dict[str, int] = field(default_factory=lambda: dict.fromkeys(names(stores=False), 0))

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
