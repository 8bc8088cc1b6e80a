"""One sample as its client sees it: text from tokens, stop strings, and the news sent on. Engine thread only.

Knows nothing of blocks or flights; the scheduler's request knows nothing of text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from sidestream.config import SamplingParams
from sidestream.schedule.request import Request
from sidestream.text import StopStrings
from sidestream.types import CachedTokens, Delta, RequestId, RowResult


class TextSource(Protocol):
    """Text of one sample, as its tokens come: `sidestream.text.Detokenizer`, or a toy."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token."""
        ...

    def finish(self) -> str:
        """The rest."""
        ...


class TokenSource(Protocol):
    """What an engine needs of a tokenizer: `sidestream.tokenizer.Tokenizer`, or a toy. From any thread."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end an answer."""
        ...

    def detokenizer(self) -> TextSource:
        """A fresh incremental decoder, for one sample."""
        ...


logger = logging.getLogger(__name__)

Sink = Callable[[Delta], None]
"""Takes a request's news, on the engine thread; must not block. One that raises is told nothing more, and its sample is aborted."""


@dataclass(frozen=True, slots=True)
class Handle:
    """The samples of one submitted request, for aborting them."""

    request_ids: tuple[RequestId, ...]


_NOTHING = CachedTokens()
_NO_TOKENS = RowResult(())


class Session:
    """One sample's client side."""

    def __init__(
        self,
        request: Request,
        *,
        index: int,
        params: SamplingParams,
        tokenizer: TokenSource | None,
        sink: Sink,
        arrival_s: float,
    ) -> None:
        """`tokenizer` None: its news have no text, and `params` no stop strings."""
        self.request = request
        self._index = index
        self._prompt_tokens = len(request.prompt)
        self._include_stop = params.include_stop
        self._detokenizer = None if tokenizer is None else tokenizer.detokenizer()
        self._stops = StopStrings(params.stop, include=params.include_stop)
        self._min_tokens = params.min_tokens
        self._sink = sink
        self.is_new = True
        """No token came yet."""
        self.last_s = arrival_s
        """When tokens came last, or it arrived."""

    def push(self, result: RowResult, count: int, stop_reason: str | None) -> Delta:
        """Take in the first `count` tokens of a result, which were committed: the news of them, to be told once what they say is true.

        `stop_reason` is the last one's. A stop string may end the sample before: then nothing behind it is told.
        """
        if self._detokenizer is None:
            if count < len(result.token_ids):
                return self._delta("", result, count, stop_reason)
            cached = self.request.cached or _NOTHING  # what `_delta` does, which would be a call for each token
            return Delta(self._index, "", result.token_ids, result.logprobs, stop_reason, self._prompt_tokens, cached)
        text, reason, outputs = "", None, self.request.num_outputs - count
        for taken, token_id in enumerate(result.token_ids[:count], 1):
            try:
                more, reason = self._read(self._detokenizer, token_id, stop_reason if taken == count else None, outputs + taken)
            except Exception as error:  # a tokenizer is foreign code: its fault is this request's alone
                logger.exception("request %d: the text of token %d could not be made", self.request.id, token_id)
                return self._delta(text, result, taken, "error", f"the tokenizer failed: {error}")
            text += more
            if reason is not None:
                break
        return self._delta(text, result, taken, reason)

    def tell(self, news: Delta) -> bool:
        """Whether the client took the news; one that did not is told nothing more."""
        try:
            self._sink(news)
        except BaseException:  # whatever it is, it is not the engine's
            logger.exception("request %d: its client cannot be told its news: it is aborted", self.request.id)
            return False
        return True

    def end(self, reason: str, error: str | None = None) -> None:
        """Send how the sample ended, when no token of its own ended it."""
        text = ""
        if error is None and self._detokenizer is not None:
            try:
                text = self._rest(self._detokenizer)
            except Exception:  # a tokenizer is foreign code
                logger.exception("request %d: the rest of its text could not be made", self.request.id)
        self.tell(self._delta(text, _NO_TOKENS, 0, reason, error))

    def _read(self, source: TextSource, token_id: int, stop_reason: str | None, num_outputs: int) -> tuple[str, str | None]:
        """The text that may be shown with this token, output number `num_outputs`, and why the sample ends, if it does."""
        text, reason = "", stop_reason
        if stop_reason != "stop" or self._include_stop:  # the text ends before the token that stopped it
            text = source.push(token_id)
            if num_outputs >= self._min_tokens:  # before, no stop string counts
                text, found = self._stops.push(text)
                reason = "stop" if found else reason
        return text if reason is None else text + self._rest(source), reason

    def _rest(self, source: TextSource) -> str:
        """What was held back; nothing once a stop string was found."""
        return "" if self._stops.matched is not None else self._stops.push(source.finish())[0] + self._stops.flush()

    def _delta(self, text: str, result: RowResult, count: int, reason: str | None, error: str | None = None) -> Delta:
        token_ids, logprobs = result.token_ids, result.logprobs
        if count < len(token_ids):
            token_ids, logprobs = token_ids[:count], logprobs[:count]
        return Delta(self._index, text, token_ids, logprobs, reason, self._prompt_tokens, self.request.cached or _NOTHING, error)
