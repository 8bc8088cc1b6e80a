"""The engine's end of its connections: requests in, news out. Runs in the engine's process; knows no text and no HTTP.

One thread, the caller of `EngineServer.run`, reads what front ends say. The engine thread itself sends the news, all of
one commit in one message for each front end: a handover to another thread would cost it the interpreter lock.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import selectors
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from sidestream.client.messages import (
    Attach,
    Call,
    Close,
    Count,
    Detail,
    End,
    Facts,
    Failure,
    News,
    Packer,
    Refused,
    Reply,
    Snapshot,
    Status,
    Submit,
    ToClient,
    Unpacker,
    Welcome,
    from_front_end,
)
from sidestream.engine import Engine, Handle
from sidestream.errors import EngineStopped, InvariantError, SidestreamError
from sidestream.kv.keys import KEY_BYTES
from sidestream.metrics import MetricsSnapshot
from sidestream.schedule.admission import CheckedRequest
from sidestream.types import Delta, RequestId
from sidestream.version import VERSION

log = logging.getLogger(__name__)

_READ_BYTES = 1 << 20
MOST_UNSENT_BYTES = 64 << 20
"""News that wait for a front end. More: it does not read, and is cut off like one that has died."""
_WATCH_S = 0.1
"""How soon a change of the engine's health is told."""


class Connection:
    """The engine's end of the connection to one front end. `take` and `deliver` run on the engine thread, all else on
    the reading thread.
    """

    def __init__(
        self, connection: socket.socket, engine: Engine, wake: Callable[[], None], packer: Packer | None = None
    ) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.messages = from_front_end()
        self.lost = False
        self._engine = engine
        self._wake = wake
        self._packer = packer or Packer()
        self._lock = threading.Lock()  # orders frames; guards _unsent, lost and _ids
        self._unsent = bytearray()
        self._ids: dict[int, RequestId | None] = {}  # of streams that have not ended; None: about to be submitted
        self._told: set[int] = set()  # streams whose front end knows what all news of a stream say
        self._streams: list[int] = []
        self._tokens: list[int] = []
        self._details: dict[int, Detail] = {}

    # ------------------------------------------------------------------ engine thread

    def take(self, first: int, news: Delta) -> None:
        """The engine's sink for the request whose streams begin at `first`."""
        stream, tokens = first + news.index, news.token_ids
        if len(tokens) == 1 and news.finish_reason is None and not news.logprobs and stream in self._told:
            self._tokens.append(tokens[0])
        else:
            self._details[len(self._tokens)] = _detail(news)
            self._tokens.append(-1)
            self._told.add(stream)
            if news.finish_reason is not None:
                self._told.discard(stream)
                with self._lock:
                    self._ids.pop(stream, None)
        self._streams.append(stream)

    def deliver(self) -> None:
        """Send what was taken since the last time, as one message."""
        if not self._streams:
            return
        news = News(self._streams, self._tokens, self._details)
        self._streams, self._tokens, self._details = [], [], {}
        self.send(news)

    # ------------------------------------------------------------------ any thread

    def send(self, message: ToClient) -> None:
        """Send a message, or as much as the socket takes; the reading thread sends the rest. Never blocks."""
        with self._lock:
            if self.lost:
                return
            frame = self._packer.pack(message)
            sent = 0
            if not self._unsent:
                try:
                    sent = self.socket.send(frame)
                except BlockingIOError:
                    pass
                except OSError:
                    self.lost = True
            if sent == len(frame):
                return
            self._unsent += memoryview(frame)[sent:]
            if len(self._unsent) > MOST_UNSENT_BYTES:
                log.error(
                    "a front end does not read: %d bytes of news wait for it; its requests are aborted",
                    len(self._unsent),
                )
                self.lost = True
        self._wake()

    # ------------------------------------------------------------------ reading thread

    def send_rest(self) -> None:
        """Send what is left of earlier messages, as much as the socket takes."""
        with self._lock:
            try:
                sent = self.socket.send(self._unsent)
            except BlockingIOError:
                return
            except OSError:
                self.lost = True
                return
            del self._unsent[:sent]

    @property
    def has_rest(self) -> bool:
        """Whether the socket did not take everything."""
        return bool(self._unsent)

    def submit(self, message: Submit) -> None:
        """Hand a request to the engine, or say why it does not take it. Raises EngineStopped for streams that are in
        use.
        """
        streams = range(message.stream, message.stream + message.params.n)
        with self._lock:
            if not self._ids.keys().isdisjoint(streams):
                raise EngineStopped(f"stream {message.stream} came again before it had ended: the connection is broken")
            self._ids.update(dict.fromkeys(streams))  # first: the engine may end it before `enqueue` returns
        try:
            handle = self._engine.enqueue(_request(message), functools.partial(self.take, message.stream))
        except SidestreamError as error:
            with self._lock:
                for stream in streams:
                    self._ids.pop(stream, None)
            self.send(Refused(message.stream, streams.stop, Failure.of(error)))
            return
        with self._lock:
            for stream, request_id in zip(streams, handle.request_ids, strict=True):
                if stream in self._ids:
                    self._ids[stream] = request_id

    def end(self, message: End) -> None:
        """End streams for a front end that wants no more of them."""
        with self._lock:
            ids = [self._ids.get(stream) for stream in range(message.stream, message.stop)]
        found = tuple(request_id for request_id in ids if request_id is not None)
        if found:
            self._engine.abort(Handle(found), message.reason)

    def close(self) -> None:
        """The front end is gone: abort what is left of its requests."""
        with self._lock:
            self.lost = True
            self._unsent.clear()
            ids = tuple(request_id for request_id in self._ids.values() if request_id is not None)
        self.socket.close()
        if ids:
            log.warning("a front end is gone: its %d unfinished requests are aborted", len(ids))
            self._engine.abort(Handle(ids))


def _request(message: Submit) -> CheckedRequest:
    """The request as the front end has checked it."""
    keys = message.keys
    return CheckedRequest(
        prompt=tuple(np.frombuffer(message.prompt, "<i4").tolist()),
        params=message.params,
        keys=[keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)],
        keys_version=message.keys_version,
        seed=message.seed,
        max_outputs=message.max_outputs,
        priority=message.priority,
        cache_salt=message.cache_salt.decode("utf-8", "surrogatepass"),
    )


def _detail(news: Delta) -> Detail:
    cached = news.cached
    logprobs = tuple((one.token_id, one.logprob, one.top) for one in news.logprobs)
    return Detail(
        news.token_ids,
        logprobs,
        news.finish_reason,
        news.prompt_tokens,
        (cached.device, cached.host, cached.disk),
        news.error,
    )


def _snapshot(metrics: MetricsSnapshot) -> Snapshot:
    return Snapshot(
        {name: list(series.items()) for name, series in metrics.values.items()},
        {
            name: [(labels, (one.counts, one.total, one.count)) for labels, one in series.items()]
            for name, series in metrics.histograms.items()
        },
    )


def facts_of(engine: Engine, *, model: str, model_name: str) -> Facts:
    """What front ends must know of an engine of this process."""
    bounds, scheduler = engine.parts.bounds, engine.parts.scheduler
    return Facts(
        version=VERSION,
        model=model,
        model_name=model_name,
        max_model_len=bounds.max_model_len,
        pool_tokens=bounds.pool_tokens,
        block_tokens=bounds.block_tokens,
        vocab_size=bounds.vocab_size,
        max_unfinished=bounds.max_unfinished,
        key_root=scheduler.key_root,
        keys_version=scheduler.keys_version,
        sampling_defaults=engine.parts.defaults,
        pid=os.getpid(),
    )


class EngineServer:
    """Serves an engine to front ends until its owner says `Close`. `run` is the reading thread."""

    def __init__(
        self,
        engine: Engine,
        facts: Facts,
        owner: socket.socket,
        *,
        packer: Packer,
        unpacker: Unpacker,
        selector: selectors.BaseSelector | None = None,
    ) -> None:
        """`owner`: the connection to the process that started this one; it attaches front ends, and ends all.

        packer, unpacker   of that connection, as far as the start has come with it
        selector           waits for the connections; None: the system's own
        """
        self._engine = engine
        self._facts = facts
        self._selector = selector or selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._owner = Connection(owner, engine, self._wake, packer)
        self._owner.messages = unpacker
        self._selector.register(owner, selectors.EVENT_READ, self._owner)
        self._front_ends: tuple[Connection, ...] = ()
        self._descriptors: list[int] = []  # came from the owner, for the `Attach` that they belong to
        self._calls = ThreadPoolExecutor(4, thread_name_prefix="sidestream-call")
        self._closer = ThreadPoolExecutor(1, thread_name_prefix="sidestream-close")  # closing never waits for calls
        self._told = engine.health()
        self._drain_s: float | None = None
        engine.on_news(self._deliver)

    def run(self, close: Callable[[float], None]) -> Failure | None:
        """Serve until the owner says `Close` or is gone, or the engine has failed; then `close(drain_s)`, and serve on
        until that has returned.

        Returns what `close` raised.
        """
        closing: Future[None] | None = None
        while closing is None or not closing.done():
            self.turn(_WATCH_S)
            health = self._engine.health()
            if health != self._told:
                self._told = health
                self.tell(Status(health.status, health.detail))
            drain_s = 0.0 if health.status == "failed" or self._owner.lost else self._drain_s
            if closing is None and drain_s is not None:
                closing = self._closer.submit(close, drain_s)
                closing.add_done_callback(lambda _: self._wake())
        error = closing.exception()
        if error is not None and not isinstance(error, SidestreamError):
            raise error
        return None if error is None else Failure.of(error)

    def turn(self, timeout_s: float) -> None:
        """Read what has come, or comes within `timeout_s`, and send what can be sent. On the reading thread, from
        `run`.
        """
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
            else:
                self._read(key.data)
        self._write()

    def attach(self, connection: socket.socket) -> None:
        """Serve one more front end. On the reading thread."""
        front_end = Connection(connection, self._engine, self._wake)
        self._selector.register(connection, selectors.EVENT_READ, front_end)
        front_end.send(Welcome(self._facts))
        self._front_ends = (*self._front_ends, front_end)

    def tell_owner(self, message: ToClient) -> None:
        """Send a message to the owner."""
        self._owner.send(message)

    def tell(self, message: ToClient) -> None:
        """Send a message to every front end."""
        for front_end in self._front_ends:
            front_end.send(message)

    def finish(self, reply: Reply, *, patience_s: float = 1.0) -> None:
        """Send the last words to front ends and owner, and let go of all connections. After `run`; nothing moves any
        more.
        """
        for threads in (self._calls, self._closer):
            threads.shutdown(wait=False, cancel_futures=True)
        self._owner.send(reply)
        for front_end in (*self._front_ends, self._owner):
            if not front_end.lost:
                front_end.socket.settimeout(patience_s)
            while front_end.has_rest and not front_end.lost:
                front_end.send_rest()
            front_end.socket.close()
        self._selector.close()
        self._woken.close()
        self._waker.close()

    def _deliver(self) -> None:
        """On the engine thread, after each commit."""
        for front_end in self._front_ends:
            front_end.deliver()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake; closed: nothing is served any more
            self._waker.send(b"\0")

    def _write(self) -> None:
        """Send what sockets did not take before, listen for room where there is some left, and let go of the lost."""
        for front_end in (
            front_end for front_end in (*self._front_ends, self._owner) if front_end.socket.fileno() >= 0
        ):
            if front_end.has_rest and not front_end.lost:
                front_end.send_rest()
            if front_end.lost:
                self._drop(front_end)
            else:
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if front_end.has_rest else 0)
                if self._selector.get_key(front_end.socket).events != wanted:
                    self._selector.modify(front_end.socket, wanted, front_end)

    def _drop(self, front_end: Connection) -> None:
        self._front_ends = tuple(other for other in self._front_ends if other is not front_end)
        self._selector.unregister(front_end.socket)
        front_end.close()

    def _read(self, front_end: Connection) -> None:
        try:
            if front_end is self._owner:
                data, descriptors, _, _ = socket.recv_fds(front_end.socket, _READ_BYTES, 16)
                self._descriptors += descriptors
            else:
                data = front_end.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            front_end.lost = True
            return
        try:
            for message in front_end.messages.feed(data):
                self._take(front_end, message)
        except EngineStopped as error:
            log.error("a front end is cut off: %s", error)
            front_end.lost = True
        except Exception as error:  # a bug of that front end is not one of the others
            log.error("a front end is cut off: a message cannot be carried out", exc_info=error)
            front_end.lost = True

    def _take(self, front_end: Connection, message: Any) -> None:
        match message:
            case Submit():
                front_end.submit(message)
            case End():
                front_end.end(message)
            case Call(number, "metrics"):
                front_end.send(Reply(number, snapshot=_snapshot(self._engine.parts.metrics.snapshot())))
            case Call():
                self._calls.submit(self._answer, front_end, message)
            case Count(name, value, labels):
                self._engine.parts.metrics.inc(name, value, *labels)
            case Attach() if front_end is self._owner:
                self.attach(socket.socket(fileno=self._descriptors.pop(0)))
            case Close() if front_end is self._owner:
                self._drain_s = message.drain_s
            case _:
                raise EngineStopped(f"a front end may not send {type(message).__name__}")

    def _answer(self, front_end: Connection, call: Call) -> None:
        """Do what a call asks for, on a thread of its own: it may take a minute."""
        engine = self._engine
        reply = Reply(call.number)
        try:
            match call.what:
                case "flush":
                    reply = Reply(call.number, done=engine.flush(timeout_s=call.timeout_s))
                case "reset_cache":
                    engine.reset_cache()
                case _:
                    raise InvariantError(f"no call {call.what!r}")
        except Exception as error:
            reply = Reply(call.number, Failure.of(error))
        front_end.send(reply)
