"""Makes text from an engine's token ids, and finds stop strings, on the thread that reads the outputs.

Does not use the engine. If a stop string ends a sample, the caller aborts the sample in the engine, because the engine
knows only token ids. A delta is new tokens of one sample.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sidestream.config import SamplingParams
from sidestream.text import Detokenizer, StopStrings, TokenizerLike
from sidestream.types import Delta

logger = logging.getLogger(__name__)


class OutputProcessor:
    """Adds the text to one request's deltas, in their order. Only one thread may use it at a time.

    A stop string, or a failure of the tokenizer, ends a sample here before it ends in the engine:

        delta = outputs.get()
        processed = output.read(delta)
        if processed is not None and processed.finish_reason is not None and delta.finish_reason is None:
            engine.abort(handle.sample(delta.index), reason=processed.finish_reason)
    """

    def __init__(self, tokenizer: TokenizerLike, params: SamplingParams, after: Sequence[int] = ()) -> None:
        """
        after   token ids of the text that the samples continue; empty: they begin a text

        Raises the tokenizer's errors, so construct the object before the request is submitted.
        """
        self._samples = [_SampleOutput(tokenizer.detokenizer(after), params) for _ in range(params.n)]

    def read(self, delta: Delta) -> Delta | None:
        """The delta with its text; None if its sample has ended already.

        If a stop string is complete, the result is the sample's last delta (finish reason `"stop"`), and ends with the
        token that completed the string. If the tokenizer fails, the result is also the sample's last delta
        (`"error"`); other samples continue.
        """
        sample = self._samples[delta.index]
        if sample.ended:
            return None
        processed = sample.read(delta)
        sample.ended = processed.finish_reason is not None
        return processed


class _SampleOutput:
    """One sample's text so far."""

    def __init__(self, detokenizer: Detokenizer, params: SamplingParams) -> None:
        self.ended = False
        self._detokenizer = detokenizer
        self._stops = StopStrings(params.stop, include=params.include_stop)
        self._include_stop = params.include_stop
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    def read(self, delta: Delta) -> Delta:
        """The next delta, with its text."""
        if delta.finish_reason == "error":
            return delta
        text, count, num_tokens = "", 0, len(delta.token_ids)
        num_with_text = len(tokens_with_text(delta.token_ids, delta.finish_reason, include_stop=self._include_stop))
        try:
            for count, token_id in enumerate(delta.token_ids[:num_with_text], 1):
                more, found = self._push(token_id)
                text += more
                if found:
                    return _with_text(delta, text, count, "stop")
            count = num_tokens
            if delta.finish_reason is not None:
                more, found = self._stops.push(self._detokenizer.finish())
                text += more + self._stops.flush()
                if found:
                    return _with_text(delta, text, count, "stop")
        except Exception as error:  # the tokenizer is third-party code: its failure ends only this sample
            logger.exception("sample %d: the tokenizer failed at token %d of the answer", delta.index, self._num_tokens)
            if delta.finish_reason == "abort":
                return _with_text(delta, text, num_tokens, "abort")
            return _with_text(delta, text, count, "error", f"the tokenizer failed: {error}")
        return _with_text(delta, text, num_tokens, delta.finish_reason)

    def _push(self, token_id: int) -> tuple[str, bool]:
        """The text that is final after this token, and whether a stop string is complete."""
        self._num_tokens += 1
        text = self._detokenizer.push(token_id)
        return self._stops.push(text) if self._num_tokens >= self._min_tokens else (text, False)


def tokens_with_text(token_ids: tuple[int, ...], finish_reason: str | None, *, include_stop: bool) -> tuple[int, ...]:
    """The tokens whose text belongs to the answer. The text of a stop token belongs to it only with `include_stop`."""
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
