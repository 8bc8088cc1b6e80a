"""Text from the tokens that an engine returns: detokenising and stop strings, on the thread that reads the answer.

Knows no engine. Where a stop string ends a sample, the caller tells the engine, which knows tokens only.
"""

from __future__ import annotations

import logging
from typing import Protocol

from sidestream.config import SamplingParams
from sidestream.text import StopStrings
from sidestream.types import Delta

logger = logging.getLogger(__name__)


class TextSource(Protocol):
    """Text of one sample, as its tokens come: `sidestream.text.Detokenizer`, or a toy."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token."""
        ...

    def finish(self) -> str:
        """The rest."""
        ...


class TokenSource(Protocol):
    """What an output processor needs of a tokenizer: `sidestream.tokenizer.Tokenizer`, or a toy."""

    def detokenizer(self) -> TextSource:
        """A fresh incremental decoder, for one sample."""
        ...


class OutputProcessor:
    """Adds the text to one request's deltas, which are read in their order, on one thread at a time.

    A sample whose text ends it, with a stop string or because the tokenizer fails, ends here before it ends in the
    engine:

        told = news.get()
        read = output.read(told)
        if read is not None and read.finish_reason is not None and told.finish_reason is None:
            engine.abort(handle.sample(read.index), reason=read.finish_reason)
    """

    def __init__(self, tokenizer: TokenSource, params: SamplingParams) -> None:
        """Raises what the tokenizer raises: make it before the request is submitted."""
        self._samples = [_SampleOutput(tokenizer.detokenizer(), params) for _ in range(params.n)]

    def read(self, delta: Delta) -> Delta | None:
        """The delta with its text; None if its sample has ended before.

        Where a stop string is complete, the returned delta is the sample's last (`"stop"`), and its tokens end with the
        one that completed the string. Where the tokenizer fails, it is the last, too (`"error"`); other samples go on.
        """
        sample = self._samples[delta.index]
        if sample.ended:
            return None
        read = sample.read(delta)
        sample.ended = read.finish_reason is not None
        return read


class _SampleOutput:
    """One sample's text so far."""

    def __init__(self, source: TextSource, params: SamplingParams) -> None:
        self.ended = False
        self._source = source
        self._stops = StopStrings(params.stop, include=params.include_stop)
        self._include_stop = params.include_stop
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    def read(self, delta: Delta) -> Delta:
        """The next delta, with its text."""
        if delta.finish_reason == "error":
            return delta
        text, count, num_tokens = "", 0, len(delta.token_ids)
        num_shown = len(shown_tokens(delta.token_ids, delta.finish_reason, include_stop=self._include_stop))
        try:
            for count, token_id in enumerate(delta.token_ids[:num_shown], 1):
                more, found = self._push(token_id)
                text += more
                if found:
                    return _with_text(delta, text, count, "stop")
            count = num_tokens
            if delta.finish_reason is not None:
                text += self._stops.push(self._source.finish())[0] + self._stops.flush()
        except Exception as error:  # a tokenizer is foreign code: its fault ends this sample alone
            logger.exception("sample %d: the tokenizer failed at token %d of the answer", delta.index, self._num_tokens)
            if delta.finish_reason == "abort":
                return _with_text(delta, text, num_tokens, "abort")
            return _with_text(delta, text, count, "error", f"the tokenizer failed: {error}")
        return _with_text(delta, text, num_tokens, delta.finish_reason)

    def _push(self, token_id: int) -> tuple[str, bool]:
        """Text that may be shown with this token, and whether a stop string is complete."""
        self._num_tokens += 1
        text = self._source.push(token_id)
        return self._stops.push(text) if self._num_tokens >= self._min_tokens else (text, False)


def shown_tokens(token_ids: tuple[int, ...], finish_reason: str | None, *, include_stop: bool) -> tuple[int, ...]:
    """The tokens that text is made of: it ends before the token that stopped the sample, unless `include_stop`."""
    return token_ids[:-1] if finish_reason == "stop" and not include_stop else token_ids


def _with_text(delta: Delta, text: str, count: int, finish_reason: str | None, error: str | None = None) -> Delta:
    """The first `count` tokens of a delta, with their text."""
    return Delta(
        index=delta.index,
        text=text,
        token_ids=delta.token_ids[:count],
        logprobs=delta.logprobs[:count],
        finish_reason=finish_reason,
        prompt_tokens=delta.prompt_tokens,
        cached=delta.cached,
        error=error,
    )
