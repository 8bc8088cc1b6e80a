"""One sample as its client sees it: text from tokens, stop strings, and the news sent on. Engine thread only.

Knows nothing of blocks or flights; the scheduler's request knows nothing of text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sidestream.config import SamplingParams
from sidestream.metrics import Metrics
from sidestream.schedule.request import Request
from sidestream.text import StopStrings, Tokenizer
from sidestream.types import CachedTokens, Delta, RequestId, RowResult

Sink = Callable[[Delta], None]
"""Takes a request's news, on the engine thread; must not block and must not raise."""


@dataclass(frozen=True, slots=True)
class Handle:
    """The samples of one submitted request, for aborting them."""

    request_ids: tuple[RequestId, ...]


class Session:
    """One sample's client side."""

    def __init__(
        self,
        request: Request,
        *,
        index: int,
        params: SamplingParams,
        tokenizer: Tokenizer,
        sink: Sink,
        metrics: Metrics,
        arrival_s: float,
    ) -> None:
        self.request = request
        self._index = index
        self._include_stop = params.include_stop
        self._detokenizer = tokenizer.detokenizer()
        self._stops = StopStrings(params.stop, include=params.include_stop)
        self._min_tokens = params.min_tokens
        self._sink = sink
        self._metrics = metrics
        self._last_s = arrival_s
        self._first = True

    def push(self, result: RowResult, *, stop_reason: str | None, now_s: float) -> str | None:
        """Take in one committed token and send the news; returns why the sample ends, if it does."""
        self._metrics.observe("ttft_seconds" if self._first else "itl_seconds", now_s - self._last_s)
        self._first, self._last_s = False, now_s
        self._metrics.inc("output_tokens_total")
        text, reason = "", stop_reason
        if stop_reason != "stop" or self._include_stop:  # the text ends before the token that stopped it
            text, found = self._stops.push(self._detokenizer.push(result.token_id))
            if found:
                reason = "stop"
        if reason is not None:
            text += self._rest()
        self._send(text, result, reason)
        return reason

    def end(self, reason: str, error: str | None = None) -> None:
        """Send how the sample ended, when no token of its own ended it."""
        self._send(self._rest(), None, reason, error)

    def _rest(self) -> str:
        """What was held back; nothing once a stop string was found."""
        return "" if self._stops.matched is not None else self._stops.push(self._detokenizer.finish())[0] + self._stops.flush()

    def _send(self, text: str, result: RowResult | None, reason: str | None, error: str | None = None) -> None:
        logprobs = (result.logprob,) if result is not None and result.logprob is not None else ()
        tokens = () if result is None else (result.token_id,)
        cached = self.request.cached or CachedTokens()
        self._sink(Delta(self._index, text, tokens, logprobs, reason, len(self.request.prompt), cached, error))
