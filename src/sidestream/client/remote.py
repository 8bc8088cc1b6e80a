"""The client of an engine in another process. Runs on one event loop and never blocks to wait for the engine.

A stream is the number of one sample within the connection. A delta is new tokens of one sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sidestream.client.base import PREFIX_TIMEOUT_S, OutputQueue, other_loop_error, stopped_error, unread_error
from sidestream.client.messages import (
    Abort,
    Call,
    Count,
    EngineInfo,
    Outputs,
    Ping,
    Rejected,
    Reply,
    Status,
    Submit,
    ToEngine,
    Welcome,
    decoder_of_outputs,
)
from sidestream.client.pulse import PULSE_S, Pulse, silence
from sidestream.config import SamplingDefaults, SamplingParams
from sidestream.errors import CallTimeout, ConfigError, EngineStopped
from sidestream.processes.frames import FrameDecoder, FrameEncoder
from sidestream.schedule.limits import Bounds, CheckedRequest, RequestChecker
from sidestream.types import CachedPrefix, CachedTokens, CacheExplanation, Delta, Health, PrefixQuery
from sidestream.version import VERSION
from sidestream_kv.kv.keys import BlockKeys
from sidestream_kv.metrics import MetricsSnapshot, Recent
from sidestream_kv.types import Key

_READ_BYTES = 1 << 16
"""Maximum number of bytes per read. One read must contain fewer than MAX_UNREAD deltas, because readers of outputs run
only between two reads. Otherwise, the backlog after a pause of this process could abort requests.
"""
_GONE = "the engine's process has ended"
_METRICS_S = 2.0
"""Maximum time to wait for new metrics; then the last known ones are given."""

_CALL_GRACE_S = 5.0
_EXPLAIN_S = 10.0  # an explanation takes milliseconds, but other calls may be in front of it
"""After the timeout of a call, the engine has this time for the answer."""

_NOTHING_CACHED = CachedTokens()


@dataclass(slots=True)
class _Stream:
    """One unfinished sample, with the values that are the same in all its deltas."""

    outputs: OutputQueue
    index: int
    prompt_tokens: int = 0
    cached: CachedTokens = _NOTHING_CACHED


class RemoteClient:
    """An `EngineClient` of an engine in another process. It owns the socket to the engine.

    on_lost    function that is called when the connection ends; callers may set it
    why_gone   function that describes how the engine's process ended; None: not known in this process
    """

    def __init__(
        self, connection: socket.socket, info: EngineInfo, *, why_gone: Callable[[], str] | None = None
    ) -> None:
        connection.setblocking(False)
        self.info = info
        self.block_tokens, self.max_loras = info.block_tokens, info.max_loras
        self._socket = connection
        self.on_lost: Callable[[], None] = lambda: None
        self._why_gone = why_gone
        self._keys = BlockKeys.from_root(info.key_root, info.block_tokens)
        self._checker = RequestChecker(_bounds(info), self._keys_of)
        self._encoder = FrameEncoder()
        self._decoder = decoder_of_outputs()
        self._unsent = bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[int, _Stream] = {}
        self._next_stream = 0
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._call_numbers = itertools.count(1)
        self._health = Health("ok", "")
        self._closed = False
        self._pulse = Pulse(lambda: self._send(Ping()))
        self._known_metrics: tuple[float, MetricsSnapshot] | None = None  # when they came

    @classmethod
    def connect(cls, connection: socket.socket, *, why_gone: Callable[[], str] | None = None) -> RemoteClient:
        """Wait for the `Welcome` message, which the engine sends once it serves, and make a client.

        Raises ConfigError if the engine has another version, and EngineStopped for any other failure; then the
        connection is closed.
        """
        connection.setblocking(True)
        decoder = decoder_of_outputs()
        try:
            messages = _first_messages(connection, decoder)
            client = cls(connection, _checked_info(messages[0]), why_gone=why_gone)
        except OSError as error:
            connection.close()
            raise EngineStopped(f"{_GONE} before it served") from error
        except BaseException:
            connection.close()
            raise
        client._decoder = decoder
        for message in messages[1:]:  # for example a change of health right after the Welcome
            client._on_message(message)
        return client

    @property
    def max_model_len(self) -> int:
        return self._checker.bounds.longest

    @property
    def room(self) -> int:
        return self.info.max_unfinished - len(self._streams)

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        return self.info.sampling_defaults

    # ------------------------------------------------------------------ requests

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        name: str = "",
    ) -> OutputQueue:
        """See `EngineClient`. QueueFull is raised by `OutputQueue.read`."""
        checked = self._checker.check(
            prompt, params, seed=secrets.randbits(63), priority=priority, cache_salt=cache_salt
        )
        self.listen()
        if (health := self._known_health()).status != "ok":
            raise stopped_error(health)
        first = self._next_stream  # rule: stream-numbers-are-not-reused
        frame = self._encoder.encode(_submit(first, checked, name))  # before any state changes, because it may raise
        self._next_stream += params.n
        outputs = OutputQueue(first, params.n)
        for index in range(params.n):
            self._streams[first + index] = _Stream(outputs, index)
        self._send_frame(frame)
        return outputs

    def abort(self, outputs: OutputQueue, reason: str = "abort", *, index: int | None = None) -> None:
        first = outputs.number + (index or 0)
        stop = outputs.number + outputs.num_samples if index is None else first + 1
        # rule: ended-stream-receives-no-more-outputs
        ended = [self._streams.pop(stream, None) for stream in range(first, stop)]
        if any(ended) and not self._closed:
            self._send(Abort(first, stop, reason))  # rule: end-is-sent-to-the-engine

    def _keys_of(self, tokens: npt.NDArray[np.int64], cache_salt: str) -> tuple[list[Key], int]:
        keys: list[Key] = []
        if self.info.key_root:
            self._keys.extend(keys, tokens, salt=cache_salt)  # rule: front-ends-compute-keys-with-the-requests-salt
        return keys, self.info.keys_version

    # ------------------------------------------------------------------ the engine

    def health(self) -> Health:
        """Whether the engine serves, or its process does not answer. Asks it at most once a second."""
        if not self._closed and (self._loop is None or not self._loop.is_running()):
            self._read()  # because no event loop does
        if not self._closed:
            self._pulse.ask()
        return self._known_health()

    def _known_health(self) -> Health:
        if not self._closed and self._pulse.is_silent(timeout_s := self.info.watchdog_timeout_s, self._read):
            return Health("stalled", silence(timeout_s)) if self._health.status == "ok" else self._health
        return self._health

    def count(self, name: str, value: float, *labels: str) -> None:
        if not self._closed:
            self._send(Count(name, value, labels))

    async def metrics_snapshot(self) -> MetricsSnapshot:
        """A copy of all values or, if none come within `_METRICS_S`, the last known ones. Raises EngineStopped."""
        reply = await _in_time(self, "metrics")
        return reply.snapshot or _last_known(self._known_metrics)

    async def recent_spans(self, since: int) -> Recent:
        """The newest spans or, if none come within `_METRICS_S`, none. Raises EngineStopped."""
        return (await _in_time(self, "timeline", since)).timeline or Recent(since, 0)

    def request_metrics(self) -> None:
        """Ask for metrics without a wait, so that some are known if the engine hangs later."""
        self._send(Call(next(self._call_numbers), "metrics"))

    async def explain_cache(self, name: str) -> CacheExplanation | None:
        return (await self._call("explain_cache", _EXPLAIN_S, name)).explanation

    async def operate(self, operation: str, *, timeout_s: float = 60.0, name: str | None = None) -> dict[str, int]:
        return (await self._call(operation, timeout_s, name)).counts

    async def operate_on_prefix(self, operation: str, prefix: PrefixQuery) -> Sequence[CachedPrefix]:
        return (await self._call(operation, PREFIX_TIMEOUT_S, prefix=prefix)).prefixes

    def close(self) -> None:
        """Close the connection. The engine then aborts this front end's unfinished requests. Idempotent."""
        self._on_lost("this front end has closed the connection")

    async def _call(self, method: str, timeout_s: float = 0.0, name: str | None = None, **more: Any) -> Reply:
        self.listen()
        if self._closed:
            raise stopped_error(self._health)
        number = next(self._call_numbers)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        until_s = time.monotonic() + timeout_s + _CALL_GRACE_S
        try:
            self._send(Call(number, method, timeout_s, name, **more))
            while not (await asyncio.wait([future], timeout=PULSE_S))[0]:
                if (health := self.health()).status == "stalled":
                    raise stopped_error(health)
                if timeout_s and time.monotonic() > until_s:
                    raise CallTimeout(f"no answer within {timeout_s:g} s: too many such calls wait; try again later")
            reply = future.result()
        finally:
            self._calls.pop(number, None)
        if reply.failure is not None:
            raise reply.failure.error()
        return reply

    # ------------------------------------------------------------------ the connection

    def listen(self) -> None:
        """Listen on the running event loop. Raises RuntimeError while another loop has unfinished requests."""
        loop = asyncio.get_running_loop()
        if self._loop is loop or self._closed:
            return
        before, self._loop = self._loop, loop
        if before is not None and before.is_running() and (self._streams or self._calls):
            self._loop = before
            raise other_loop_error()
        if before is not None and not before.is_closed():
            before.remove_reader(self._socket)
            before.remove_writer(self._socket)
        loop.add_reader(self._socket, self._read)
        if self._unsent:
            loop.add_writer(self._socket, self._write)
        if before is not None and before.is_closed():
            self._calls.clear()
            for outputs in _queues(self._streams.values()):
                self.abort(outputs)

    def _send(self, message: ToEngine) -> None:
        self._send_frame(self._encoder.encode(message))

    def _send_frame(self, frame: bytes) -> None:
        waiting = bool(self._unsent)
        self._unsent += frame  # rule: frames-of-a-front-end-keep-their-order
        if not waiting:
            self._write()
            if self._unsent and not self._closed and self._loop is not None and not self._loop.is_closed():
                self._loop.add_writer(self._socket, self._write)

    def _write(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:
            self._on_lost(_GONE)
            return
        del self._unsent[:sent]  # rule: request-is-sent-once
        if not self._unsent and self._loop is not None and not self._loop.is_closed():
            self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._on_lost(_GONE)
            return
        self._pulse.heard()
        try:
            for message in self._decoder.feed(data):
                self._on_message(message)
        except EngineStopped as error:
            self._on_lost(str(error))

    def _on_message(self, message: Any) -> None:
        if isinstance(message, Reply) and message.snapshot is not None:
            self._known_metrics = time.monotonic(), message.snapshot
        match message:
            case Outputs():
                self._on_outputs(message)
            case Rejected(stream, stop, failure):
                # rule: front-end-drops-refused-streams
                for sample in (self._streams.pop(one, None) for one in range(stream, stop)):
                    if sample is not None:  # None: the reader has aborted the sample
                        sample.outputs.fail(failure.error())
            case Status(status, detail, paused):
                self._health = Health(status, detail, paused)
            case Ping():
                self._pulse.answered()
            case Reply(number) if (future := self._calls.get(number)) is not None and not future.done():
                future.set_result(message)
            case _:
                pass  # the caller of this reply was cancelled

    def _on_outputs(self, message: Outputs) -> None:
        streams, details = self._streams, message.details
        for entry, (stream, token) in enumerate(zip(message.streams, message.tokens, strict=True)):
            sample = streams.get(stream)
            if sample is None:
                # rule: finish-that-crosses-the-abort-is-ignored
                continue  # the reader has aborted the sample; the engine sent this output before the Abort arrived
            if token >= 0:
                delta = Delta(sample.index, "", (token,), (), None, sample.prompt_tokens, sample.cached)
            else:
                delta = details[entry]
                sample.prompt_tokens, sample.cached = delta.prompt_tokens, delta.cached
                if delta.finish_reason is not None:
                    del streams[stream]  # rule: front-end-drops-finished-streams
            outputs = sample.outputs
            if outputs.is_full:  # rule: reader-that-falls-behind-is-aborted
                self.abort(outputs)
                outputs.fail(unread_error())
            else:
                outputs.put(delta)

    def _on_lost(self, why: str) -> None:
        """Fail all unfinished requests and calls, because the connection has ended."""
        if self._closed:
            return
        self._closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
        with contextlib.suppress(OSError):
            self._socket.close()
        if self._health.status != "failed":
            ended = self._why_gone() if self._why_gone is not None and why == _GONE else ""
            self._health = Health("failed", f"{why}{ended and ': '}{ended}")
        self._unsent.clear()
        error, queues = stopped_error(self._health), _queues(self._streams.values())
        self._streams.clear()
        for outputs in queues:
            outputs.fail(error)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        self.on_lost()


def _queues(streams: Iterable[_Stream]) -> list[OutputQueue]:
    """The queues of the streams' requests."""
    return list({stream.outputs.number: stream.outputs for stream in streams}.values())


async def _in_time(client: RemoteClient, method: str, since: int = 0) -> Reply:
    """The reply or, if it does not come within `_METRICS_S`, an empty one. Raises EngineStopped."""
    try:
        async with asyncio.timeout(_METRICS_S):
            return await client._call(method, since=since)
    except (TimeoutError, EngineStopped):
        if client._closed:
            raise
        return Reply(0)


def _submit(first: int, checked: CheckedRequest, name: str) -> Submit:
    params = checked.params
    return Submit(
        first,
        np.asarray(checked.prompt, "<i4").tobytes(),
        b"".join(checked.keys),
        checked.keys_version,
        dataclasses.replace(params, stop=()) if params.stop else params,
        checked.seed,
        checked.max_outputs,
        checked.priority,
        checked.cache_salt.encode("utf-8", "surrogatepass"),
        name,
    )


def _first_messages(connection: socket.socket, decoder: FrameDecoder) -> list[Any]:
    messages: list[Any] = []
    while not messages:
        data = connection.recv(_READ_BYTES)
        if not data:
            raise EngineStopped(f"{_GONE} before it served")
        messages.extend(decoder.feed(data))
    return messages


def _checked_info(message: Any) -> EngineInfo:
    if not isinstance(message, Welcome):
        raise EngineStopped(
            f"the engine's first message is a {type(message).__name__}, not a Welcome: the connection is broken"
        )
    info = message.info
    if info.version != VERSION:
        raise ConfigError(
            f"the engine runs Sidestream {info.version}, this front end {VERSION}: restart both from one installation"
        )
    return info


def _last_known(known: tuple[float, MetricsSnapshot] | None) -> MetricsSnapshot:
    """The metrics that came last, with their age as a gauge."""
    if known is None:
        raise EngineStopped("the engine's process does not answer, and has sent no metrics yet")
    came_s, snapshot = known
    age: dict[tuple[str, ...], float] = {(): time.monotonic() - came_s}
    return MetricsSnapshot({**snapshot.values, "metrics_age_seconds": age}, snapshot.histograms)


def _bounds(info: EngineInfo) -> Bounds:
    lengths = info.max_model_len, info.pool_tokens, info.block_tokens
    return Bounds(*lengths, info.vocab_size, info.max_unfinished, info.padding_token)
