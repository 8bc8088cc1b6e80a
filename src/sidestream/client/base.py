"""The border between front ends and an engine: what one may ask of it, and the news of one request on an event loop.

Two implementations, tested by the same tests: `InProcessClient` for an engine in this process, `RemoteClient` for one
in its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from sidestream.config import SamplingDefaults, SamplingParams
from sidestream.errors import EngineStopped, RequestError, SidestreamError
from sidestream.metrics import MetricsSnapshot
from sidestream.types import Delta, Health

MOST_UNREAD = 8192
"""News of one request that may wait for their reader. More: it does not read, and the request is aborted."""


class EngineClient(Protocol):
    """What a front end asks of an engine. Every member is used from one event loop's thread at a time; none blocks.

    A request on another event loop is fine once no requests are unfinished on a loop that runs; else it raises
    RuntimeError. The first one after its loop was closed aborts what that loop has left unfinished.
    """

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together."""
        ...

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """Sampling options of requests that leave them out."""
        ...

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, *, priority: int = 0, cache_salt: str = ""
    ) -> Answer:
        """Queue a request of `params.n` samples; its news come through the answer, on the running event loop.

        Raises RequestRejected, ContextTooLong or EngineStopped. QueueFull, and EngineStopped too, may come from
        `Answer.read`.
        """
        ...

    def end(self, answer: Answer, reason: str = "abort", *, index: int | None = None) -> None:
        """End the samples that have not ended (`index`: one of them), for `reason`. Harmless for ended ones; no news of
        them follow.
        """
        ...

    def health(self) -> Health:
        """Whether the engine serves."""
        ...

    def count(self, name: str, value: float, *labels: str) -> None:
        """Add to one of the engine's counters."""
        ...

    async def metrics_snapshot(self) -> MetricsSnapshot:
        """A copy of all values. Raises EngineStopped."""
        ...

    async def flush(self, *, timeout_s: float) -> bool:
        """Wait until what is complete rests in the tiers; False when `timeout_s` passed first. Raises EngineStopped."""
        ...

    async def reset_cache(self) -> None:
        """Make every stored block of every tier unreachable at once. Raises EngineStopped."""
        ...


class Answer:
    """News of one request, for one reader on one event loop. Made by an EngineClient.

    number   the client's name for the request
    """

    __slots__ = ("_error", "_news", "_waiter", "num_samples", "number")

    def __init__(self, number: int, num_samples: int) -> None:
        self.number = number
        self.num_samples = num_samples
        self._news: deque[Delta] = deque()
        self._error: SidestreamError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_full(self) -> bool:
        """Whether `MOST_UNREAD` news wait for the reader: the client ends the request, and fails the answer."""
        return len(self._news) >= MOST_UNREAD

    def put(self, news: Delta) -> None:
        """Add news. On the reader's event loop."""
        self._news.append(news)
        self._wake()

    def fail(self, error: SidestreamError) -> None:
        """Nothing more comes: `read` raises `error` once what came before is read. On the reader's event loop."""
        self._error = self._error or error
        self._wake()

    async def read(self) -> Delta:
        """The next news. Raises what `fail` was given."""
        while not self._news:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._news.popleft()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def other_loop() -> RuntimeError:
    """The error for a request on an event loop while requests of another one, which runs, are unfinished."""
    return RuntimeError("another event loop waits for answers of this engine: use one loop, or one AsyncLLM for each")


def fell_behind() -> RequestError:
    """What a reader gets whose news were too many."""
    return RequestError(
        f"the answer was not read: {MOST_UNREAD} pieces of it wait, which is the bound; read it as it comes"
    )


def stopped(health: Health) -> EngineStopped:
    """What a request gets that an engine does not take any more."""
    return EngineStopped(f"the engine is {health.status}: {health.detail or 'send the request to another one'}")
