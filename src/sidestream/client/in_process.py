"""The client of an engine in this process. The engine thread and the event loop share the interpreter lock, so outputs
come in bursts under load. A delta is new tokens of one sample.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from sidestream.client.base import PREFIX_TIMEOUT_S, OutputQueue, other_loop_error, stopped_error, unread_error
from sidestream.config import SamplingDefaults, SamplingParams
from sidestream.engine import Engine, Handle
from sidestream.types import CachedPrefix, CacheExplanation, Delta, Health, PrefixQuery
from sidestream_kv.metrics import MetricsSnapshot, Recent


class _LoopQueue:
    """Hands deltas from the engine thread to one event loop. It wakes the loop once for all deltas of a step, because
    waking the loop takes longer than making a delta.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: deque[tuple[InProcessClient, OutputQueue, Delta]] = deque()
        self._called = False

    def put(self, client: InProcessClient, outputs: OutputQueue, delta: Delta) -> None:
        """Hand a delta to the loop. On the engine thread; does nothing for a closed loop."""
        if self.loop.is_closed():
            return
        self._waiting.append((client, outputs, delta))
        if not self._called:
            self._called = True
            self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._called = False  # before the queue is emptied, so that a later delta schedules another call
        while self._waiting:
            client, outputs, delta = self._waiting.popleft()
            client.on_output(outputs, delta)


@dataclass(slots=True)
class _Request:
    """A request with the indices of its unfinished samples."""

    handle: Handle
    unfinished: set[int]


class InProcessClient:
    """An `EngineClient` of an engine in this process. It never closes the engine; the engine's owner does."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._queue: _LoopQueue | None = None
        self._requests: dict[int, _Request] = {}  # by the number of their OutputQueue
        self._number = 0

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together."""
        return self._engine.checker.bounds.longest

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of the KV cache."""
        return self._engine.checker.bounds.block_tokens

    @property
    def max_loras(self) -> int:
        """Room for adapters."""
        return self._engine.adapters.room

    @property
    def room(self) -> int:
        unfinished = sum(len(request.unfinished) for request in self._requests.values())
        return self._engine.checker.bounds.max_unfinished - unfinished

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """The model's sampling defaults."""
        return self._engine.parts.defaults

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        name: str = "",
    ) -> OutputQueue:
        """See `EngineClient`. QueueFull is raised here, not by `OutputQueue.read`."""
        queue = self._queue_of(asyncio.get_running_loop())
        if (health := self._engine.health()).status == "stalled":
            raise stopped_error(health)
        outputs = OutputQueue(self._number + 1, params.n)
        sink = functools.partial(queue.put, self, outputs)
        handle = self._engine.submit(prompt, params, sink, priority=priority, cache_salt=cache_salt, name=name)
        self._number = outputs.number
        self._requests[outputs.number] = _Request(handle, set(range(params.n)))
        return outputs

    def on_output(self, outputs: OutputQueue, delta: Delta) -> None:
        """Put a delta into its queue, unless its sample has ended. On the event loop."""
        request = self._requests.get(outputs.number)
        if request is None or delta.index not in request.unfinished:
            return
        if outputs.is_full:
            self.abort(outputs)
            outputs.fail(unread_error())
            return
        if delta.finish_reason is not None:
            self._forget(outputs.number, {delta.index})
        outputs.put(delta)

    def abort(self, outputs: OutputQueue, reason: str = "abort", *, index: int | None = None) -> None:
        request = self._requests.get(outputs.number)
        if request is None:
            return
        ended = request.unfinished if index is None else request.unfinished & {index}
        if ended:
            self._engine.abort(Handle(tuple(request.handle.request_ids[one] for one in sorted(ended))), reason)
        self._forget(outputs.number, ended)

    def _forget(self, number: int, ended: set[int]) -> None:
        """Ignore further deltas of the samples `ended` of request `number`."""
        request = self._requests[number]
        request.unfinished = request.unfinished - ended
        if not request.unfinished:
            del self._requests[number]

    def _queue_of(self, loop: asyncio.AbstractEventLoop) -> _LoopQueue:
        """The queue to this loop. Raises RuntimeError while another loop has unfinished requests."""
        queue = self._queue
        if queue is not None and queue.loop is loop:
            return queue
        if queue is not None and queue.loop.is_running() and self._requests:
            raise other_loop_error()
        if queue is not None and queue.loop.is_closed():
            for request in self._requests.values():
                self._engine.abort(request.handle)
            self._requests.clear()
        self._queue = _LoopQueue(loop)
        return self._queue

    def health(self) -> Health:
        """Whether the engine serves."""
        return self._engine.health()

    def count(self, name: str, value: float, *labels: str) -> None:
        """Add to one of the engine's counters."""
        self._engine.parts.metrics.inc(name, value, *labels)

    async def metrics_snapshot(self) -> MetricsSnapshot:
        """A copy of all values."""
        return self._engine.parts.metrics.snapshot()

    async def explain_cache(self, name: str) -> CacheExplanation | None:
        return await asyncio.to_thread(self._engine.explain_cache, name)

    async def recent_spans(self, since: int) -> Recent:
        """The newest spans."""
        return self._engine.recent_spans(since)

    async def operate(self, operation: str, *, timeout_s: float = 60.0, name: str | None = None) -> dict[str, int]:
        return await asyncio.to_thread(self._engine.operations.run, operation, timeout_s=timeout_s, name=name)

    async def operate_on_prefix(self, operation: str, prefix: PrefixQuery) -> Sequence[CachedPrefix]:
        return await asyncio.to_thread(self._engine.prefixes.run, operation, prefix, timeout_s=PREFIX_TIMEOUT_S)
