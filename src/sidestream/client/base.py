"""The protocol between front ends and an engine, and the queue of one request's outputs on an event loop.

A front end converts between text and token ids, and serves clients. `InProcessClient` implements the protocol for an
engine in this process, and `RemoteClient` for an engine in another process; the same tests run on both.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from sidestream.config import SamplingDefaults, SamplingParams
from sidestream.errors import EngineStopped, RequestError, SidestreamError
from sidestream.types import CachedPrefix, CacheExplanation, Delta, Health, PrefixQuery
from sidestream_kv.metrics import MetricsSnapshot, Recent

MAX_UNREAD = 8192
"""Maximum number of unread deltas (new tokens of a sample) of one request. With more, the request is aborted."""

PREFIX_TIMEOUT_S = 60.0
"""Time for an operation on prefixes."""


class EngineClient(Protocol):
    """A front end's view of an engine. Only one event loop's thread uses it at a time; no method blocks.

    While a running loop has unfinished requests, requests from another loop raise RuntimeError. After a loop was
    closed, the next request from another loop aborts the closed loop's unfinished requests.
    """

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of prompt and output together."""
        ...

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of the KV cache."""
        ...

    @property
    def max_loras(self) -> int:
        """Number of LoRA adapters for which the engine has room."""
        ...

    @property
    def room(self) -> int:
        """Number of samples that the engine may still take from this front end, if other front ends send none."""
        ...

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """The model's sampling defaults."""
        ...

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        name: str = "",
    ) -> OutputQueue:
        """Queue a request of `params.n` samples; its deltas come through the returned queue, on the running event loop.

        Raises RequestRejected, ContextTooLong or EngineStopped. `OutputQueue.read` may raise QueueFull or
        EngineStopped.
        """
        ...

    def abort(self, outputs: OutputQueue, reason: str = "abort", *, index: int | None = None) -> None:
        """End all unfinished samples of a request (or the sample `index`) for `reason`. They get no more deltas.
        Idempotent.
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

    async def explain_cache(self, name: str) -> CacheExplanation | None:
        """See `Engine.explain_cache`. Raises EngineStopped and CallTimeout."""
        ...

    async def recent_spans(self, since: int) -> Recent:
        """The newest spans of the streams after position `since`; see `Timeline.read`. Raises EngineStopped."""
        ...

    async def operate(self, operation: str, *, timeout_s: float = 60.0, name: str | None = None) -> dict[str, int]:
        """Carry out an operation, and wait for its end; see `Operations.run`. Raises EngineStopped, CallTimeout, and
        the errors of the operation.
        """
        ...

    async def operate_on_prefix(self, operation: str, prefix: PrefixQuery) -> Sequence[CachedPrefix]:
        """As `operate`, for an operation of `Prefixes.run`, within `PREFIX_TIMEOUT_S`."""
        ...


class AdapterCalls:
    """The LoRA adapters of an engine: requests with `SamplingParams(adapter=name)` use one, beside others in the same
    batch. Made by a front end. Methods raise EngineStopped and CallTimeout.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    @property
    def room(self) -> int:
        """Number of adapters that may be loaded at a time; see `EngineConfig.max_loras`."""
        return self._client.max_loras

    async def load(self, name: str, path: str, *, timeout_s: float = 60.0) -> None:
        """Read an adapter in PEFT's format from a directory, and serve it under a name. Running requests go on.

        Raises RequestRejected, and changes nothing, if the name is taken, all slots are in use, or the adapter cannot
        be read or does not fit.
        """
        await self._client.operate("load_adapter", timeout_s=timeout_s, name=f"{name}={path}")

    async def unload(self, name: str) -> None:
        """Serve an adapter no more. Requests that use it go on. Raises ModelNotFound."""
        await self._client.operate("unload_adapter", name=name)

    async def names(self) -> list[str]:
        """Names of the loaded adapters."""
        return [*await self._client.operate("adapters")]


class OutputQueue:
    """The deltas of one request, for one reader on one event loop. Made by an EngineClient.

    number   the EngineClient's id of the request
    """

    __slots__ = ("_deltas", "_error", "_waiter", "num_samples", "number")

    def __init__(self, number: int, num_samples: int) -> None:
        self.number = number
        self.num_samples = num_samples
        self._deltas: deque[Delta] = deque()
        self._error: SidestreamError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_full(self) -> bool:
        """Whether `MAX_UNREAD` deltas are unread. If so, the EngineClient aborts the request and calls `fail` on the
        next delta.
        """
        return len(self._deltas) >= MAX_UNREAD

    def put(self, delta: Delta) -> None:
        """Add a delta. Called on the reader's event loop."""
        self._deltas.append(delta)
        self._wake()

    def fail(self, error: SidestreamError) -> None:
        """Make `read` raise `error` once all earlier deltas were read. Called on the reader's event loop."""
        self._error = self._error or error
        self._wake()

    async def read(self) -> Delta:
        """Wait for the next delta. Raises the error of `fail`."""
        while not self._deltas:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._deltas.popleft()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def other_loop_error() -> RuntimeError:
    """The error for a request while another running event loop has unfinished requests."""
    return RuntimeError("another event loop waits for answers of this engine: use one loop, or one AsyncLLM for each")


def unread_error() -> RequestError:
    """The error of a request with more than `MAX_UNREAD` unread deltas."""
    return RequestError(f"the answer was not read: at most {MAX_UNREAD} deltas may be unread; read them as they arrive")


def stopped_error(health: Health) -> EngineStopped:
    """The error for a request to an engine that does not serve."""
    return EngineStopped(f"the engine is {health.status}: {health.detail or 'send the request to another engine'}")
