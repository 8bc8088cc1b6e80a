"""An engine in this process, for event loops. The engine thread and the loop share one interpreter, so answers come in
lumps under load.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from sidestream.client.base import Answer, fell_behind, other_loop
from sidestream.config import SamplingDefaults, SamplingParams
from sidestream.engine import Engine, Handle
from sidestream.metrics import MetricsSnapshot
from sidestream.types import Delta, Health


class _Post:
    """Brings news from the engine thread to one event loop: all of a commit at once, because to wake a loop takes
    longer than to make the news.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: deque[tuple[InProcessClient, Answer, Delta]] = deque()
        self._called = False

    def put(self, client: InProcessClient, answer: Answer, news: Delta) -> None:
        """Have `news` given to an answer of the loop; on the engine thread. A loop that was closed hears nothing."""
        if self.loop.is_closed():
            return
        self._waiting.append((client, answer, news))
        if not self._called:
            self._called = True
            self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._called = False  # first: news that are added behind the last one that is taken here call again
        while self._waiting:
            client, answer, news = self._waiting.popleft()
            client.take(answer, news)


@dataclass(slots=True)
class _Request:
    """A request with samples that have not ended: their numbers are `left`."""

    handle: Handle
    left: set[int]


class InProcessClient:
    """An `EngineClient` of an engine in this process. The engine's owner closes it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._post: _Post | None = None
        self._requests: dict[int, _Request] = {}  # by the number of their answer
        self._number = 0

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together."""
        return self._engine.checker.bounds.longest

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """Sampling options of requests that leave them out."""
        return self._engine.parts.defaults

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, *, priority: int = 0, cache_salt: str = ""
    ) -> Answer:
        """See `EngineClient`; QueueFull is raised here."""
        post = self._post_of(asyncio.get_running_loop())
        answer = Answer(self._number + 1, params.n)
        sink = functools.partial(post.put, self, answer)
        handle = self._engine.submit(prompt, params, sink, priority=priority, cache_salt=cache_salt)
        self._number = answer.number
        self._requests[answer.number] = _Request(handle, set(range(params.n)))
        return answer

    def take(self, answer: Answer, news: Delta) -> None:
        """Give news to an answer, unless their sample has ended. On the event loop."""
        request = self._requests.get(answer.number)
        if request is None or news.index not in request.left:
            return
        if answer.is_full:
            self.end(answer)
            answer.fail(fell_behind())
            return
        if news.finish_reason is not None:
            self._forget(answer.number, {news.index})
        answer.put(news)

    def end(self, answer: Answer, reason: str = "abort", *, index: int | None = None) -> None:
        """See `EngineClient`."""
        request = self._requests.get(answer.number)
        if request is None:
            return
        ended = request.left if index is None else request.left & {index}
        if ended:
            self._engine.abort(Handle(tuple(request.handle.request_ids[one] for one in sorted(ended))), reason)
        self._forget(answer.number, ended)

    def _forget(self, number: int, ended: set[int]) -> None:
        """Take no more news of these samples of a request."""
        request = self._requests[number]
        request.left = request.left - ended
        if not request.left:
            del self._requests[number]

    def _post_of(self, loop: asyncio.AbstractEventLoop) -> _Post:
        """What brings news to this loop. Raises RuntimeError while another one waits for answers."""
        post = self._post
        if post is not None and post.loop is loop:
            return post
        if post is not None and post.loop.is_running() and self._requests:
            raise other_loop()
        if post is not None and post.loop.is_closed():
            for request in self._requests.values():
                self._engine.abort(request.handle)
            self._requests.clear()
        self._post = _Post(loop)
        return self._post

    def health(self) -> Health:
        """Whether the engine serves."""
        return self._engine.health()

    def count(self, name: str, value: float, *labels: str) -> None:
        """Add to one of the engine's counters."""
        self._engine.parts.metrics.inc(name, value, *labels)

    async def metrics_snapshot(self) -> MetricsSnapshot:
        """A copy of all values."""
        return self._engine.parts.metrics.snapshot()

    async def flush(self, *, timeout_s: float) -> bool:
        """See `EngineClient`."""
        return await asyncio.to_thread(self._engine.flush, timeout_s=timeout_s)

    async def reset_cache(self) -> None:
        """See `EngineClient`."""
        await asyncio.to_thread(self._engine.reset_cache)
