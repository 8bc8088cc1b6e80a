"""One sample as its client sees it: the deltas sent to it, and when tokens came last. Engine thread only.

Knows nothing of blocks, steps or text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from sidestream.schedule.request import Request
from sidestream.types import CachedTokens, Delta, RequestId, RowResult

logger = logging.getLogger(__name__)

Sink = Callable[[Delta], None]
"""Takes a request's deltas, on the engine thread; must not block. One that raises is told nothing more, and its sample
is aborted.
"""


@dataclass(frozen=True, slots=True)
class Handle:
    """The samples of one submitted request, for aborting them."""

    request_ids: tuple[RequestId, ...]

    def sample(self, index: int) -> Handle:
        """One of them: `Delta.index`."""
        return Handle((self.request_ids[index],))


_NOTHING = CachedTokens()


class Session:
    """One sample's client side."""

    def __init__(self, request: Request, *, index: int, sink: Sink, arrival_s: float) -> None:
        self.request = request
        self._index = index
        self._prompt_tokens = len(request.prompt)
        self._sink = sink
        self.is_new = True
        """No token came yet."""
        self.last_s = arrival_s
        """When tokens came last, or it arrived."""

    def news_of(self, result: RowResult, count: int, stop_reason: str | None) -> Delta:
        """The delta of the first `count` tokens of a result, which were committed; `stop_reason` is the last one's."""
        token_ids, logprobs = result.token_ids, result.logprobs
        if count < len(token_ids):
            token_ids, logprobs = token_ids[:count], logprobs[:count]
        return Delta(
            self._index, "", token_ids, logprobs, stop_reason, self._prompt_tokens, self.request.cached or _NOTHING
        )

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
        self.tell(Delta(self._index, "", (), (), reason, self._prompt_tokens, self.request.cached or _NOTHING, error))
