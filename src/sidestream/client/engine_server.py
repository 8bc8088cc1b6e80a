"""The engine's end of its connections to front ends: receives requests and sends outputs. Runs in the engine's process;
handles neither text nor HTTP.

A front end converts between text and token ids. A stream is the number of one sample within a front end's connection.
The owner is the process that started this process. The thread that calls `EngineServer.run` is the reading thread. The
engine thread itself sends outputs, one message per step and front end. If it handed the outputs to another thread, it
would lose the interpreter lock to that thread.
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
    Abort,
    Attach,
    Call,
    Close,
    Count,
    EngineInfo,
    Failure,
    Outputs,
    Ping,
    Rejected,
    Reply,
    Status,
    Submit,
    ToClient,
    Welcome,
    decoder_of_requests,
)
from sidestream.engine import Engine, Handle, TokenColumns
from sidestream.errors import EngineStopped, SidestreamError
from sidestream.processes.frames import FrameDecoder, FrameEncoder
from sidestream.schedule.limits import CheckedRequest
from sidestream.types import Delta, Health
from sidestream.version import VERSION
from sidestream_kv.kv.keys import KEY_BYTES
from sidestream_kv.types import RequestId

log = logging.getLogger(__name__)

_READ_BYTES = 1 << 20
MAX_UNSENT_BYTES = 64 << 20
"""Maximum number of unsent bytes for one front end; with more, its connection is closed."""
_POLL_S = 0.1
"""Interval between checks of the engine's health."""


class Connection:
    """The engine's end of the connection to one front end.

    `on_output` and `send_outputs` run on the engine thread, `send` on any thread, and all other methods on the reading
    thread.
    """

    def __init__(
        self, connection: socket.socket, engine: Engine, wake: Callable[[], None], encoder: FrameEncoder | None = None
    ) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.messages = decoder_of_requests()
        self.lost = False
        self._engine = engine
        self._wake = wake
        self._encoder = encoder or FrameEncoder()
        self._lock = threading.Lock()  # orders frames; guards _unsent, lost and _ids
        self._unsent = bytearray()
        self._ids: dict[int, RequestId | None] = {}  # by unfinished stream; None: being submitted
        self._columns = TokenColumns([], [])
        self._details: dict[int, Delta] = {}

    # ------------------------------------------------------------------ engine thread

    def on_output(self, first: int, delta: Delta) -> None:
        """Called by the engine with the deltas of a sample that are no single tokens. `first` is the first stream of
        the request.
        """
        columns, stream = self._columns, first + delta.index
        self._details[len(self._columns.tokens)] = delta  # rule: outputs-belong-to-their-stream
        columns.tokens.append(-1)
        columns.streams.append(stream)
        if delta.finish_reason is not None:
            with self._lock:
                self._ids.pop(stream, None)  # rule: engine-side-drops-finished-streams

    def send_outputs(self) -> None:
        """Send the outputs since the last call, as one message."""
        streams, tokens, _ = self._columns
        if not streams:
            return
        self.send(Outputs(streams, tokens, self._details))
        for column in (streams, tokens, self._details):
            column.clear()

    # ------------------------------------------------------------------ any thread

    def send(self, message: ToClient) -> None:
        """Send as much of a message as the socket accepts; the reading thread sends the rest. Never blocks."""
        with self._lock:
            if self.lost:
                return
            frame = self._encoder.encode(message)
            sent = 0
            if not self._unsent:  # rule: frames-of-the-engine-keep-their-order
                try:
                    sent = self.socket.send(frame)
                except BlockingIOError:
                    pass
                except OSError:
                    self.lost = True
            if sent == len(frame):
                return
            self._unsent += memoryview(frame)[sent:]  # rule: rest-of-a-frame-is-sent
            if len(self._unsent) > MAX_UNSENT_BYTES:  # rule: front-end-that-falls-behind-is-cut-off
                log.error(
                    "a front end does not read, and %d bytes of outputs wait for it: its requests are aborted",
                    len(self._unsent),
                )
                self.lost = True
        self._wake()

    # ------------------------------------------------------------------ reading thread

    def send_rest(self) -> None:
        """Send as many unsent bytes of earlier messages as the socket accepts."""
        with self._lock:
            try:
                sent = self.socket.send(self._unsent)
            except BlockingIOError:
                return
            except OSError:
                self.lost = True
                return
            del self._unsent[:sent]  # rule: frame-is-sent-once

    @property
    def has_rest(self) -> bool:
        """Whether bytes are unsent."""
        return bool(self._unsent)

    def submit(self, message: Submit) -> None:
        """Submit a request to the engine, or send its rejection. Raises EngineStopped if a stream is in use."""
        streams = range(message.stream, message.stream + message.params.n)
        with self._lock:
            if not self._ids.keys().isdisjoint(streams):  # rule: stream-in-use-is-refused
                raise EngineStopped(
                    f"stream {message.stream} is submitted before it has ended: the connection is broken"
                )
            self._ids.update(dict.fromkeys(streams))  # now, because the request may end before `enqueue` returns
        try:
            # rule: request-is-submitted-to-the-engine
            handle = self._engine.enqueue(
                _request(message),
                functools.partial(self.on_output, message.stream),
                name=message.name,
                columns=self._columns._replace(first=message.stream),
            )
        except SidestreamError as error:
            with self._lock:
                for stream in streams:
                    self._ids.pop(stream, None)  # rule: engine-side-drops-refused-streams
            self.send(Rejected(message.stream, streams.stop, Failure.of(error)))  # rule: refusal-is-sent
            return
        with self._lock:
            for stream, request_id in zip(streams, handle.request_ids, strict=True):
                if stream in self._ids:  # rule: finish-before-the-handle-counts
                    self._ids[stream] = request_id  # rule: handle-is-kept-until-the-end

    def abort(self, message: Abort) -> None:
        """Abort the streams that the front end names."""
        with self._lock:
            ids = [self._ids.get(stream) for stream in range(message.stream, message.stop)]
        found = tuple(request_id for request_id in ids if request_id is not None)
        if found:
            self._engine.abort(Handle(found), message.reason)

    def close(self) -> None:
        """Close the connection and abort its unfinished requests. Called when the front end has ended or is cut off."""
        with self._lock:
            self.lost = True
            self._unsent.clear()
            ids = tuple(request_id for request_id in self._ids.values() if request_id is not None)
        self.socket.close()
        if ids:
            log.warning("a front end has died: its %d unfinished requests are aborted", len(ids))
            self._engine.abort(Handle(ids))  # rule: disconnect-aborts-the-requests-of-a-front-end


def _request(message: Submit) -> CheckedRequest:
    """The request in the message; the front end has checked it."""
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


def _status(health: Health) -> Status:
    return Status(health.status, health.detail, health.paused)


def engine_info(engine: Engine, *, model: str, model_name: str) -> EngineInfo:
    """The constants of an engine in this process, for its front ends."""
    bounds, scheduler = engine.parts.bounds, engine.parts.scheduler
    return EngineInfo(
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
        watchdog_timeout_s=engine.parts.watchdog_timeout_s,
        pid=os.getpid(),
        padding_token=bounds.padding_token,
        max_loras=engine.adapters.room,
    )


class EngineServer:
    """Serves an engine to front ends until the owner sends `Close`."""

    def __init__(
        self,
        engine: Engine,
        info: EngineInfo,
        owner: socket.socket,
        *,
        encoder: FrameEncoder,
        decoder: FrameDecoder,
        selector: selectors.BaseSelector | None = None,
    ) -> None:
        """
        owner              connection to the owner, which attaches front ends and sends `Close`
        encoder, decoder   of the owner's connection; both were already used during the start
        selector           None: the system's default
        """
        self._engine = engine
        self._info = info
        self._selector = selector or selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._owner = Connection(owner, engine, self._wake, encoder)
        self._owner.messages = decoder
        self._selector.register(owner, selectors.EVENT_READ, self._owner)
        self._front_ends: tuple[Connection, ...] = ()
        self._descriptors: list[int] = []  # from the owner, for its `Attach` messages
        # Separate threads: a resume must not wait for calls that take minutes, and closing must not wait for any call.
        self._long_calls = ThreadPoolExecutor(4, thread_name_prefix="sidestream-long-call")
        self._calls = ThreadPoolExecutor(1, thread_name_prefix="sidestream-call")
        self._closer = ThreadPoolExecutor(1, thread_name_prefix="sidestream-close")
        self._reported_health = engine.health()
        self._drain_s: float | None = None
        engine.on_outputs(self._send_outputs)

    def run(self, close: Callable[[float], None]) -> Failure | None:
        """Serve until the owner sends `Close` or ends, or until the engine fails. Then run `close(drain_s)` on another
        thread, and continue to serve until `close` has returned.

        Returns the error of `close`; None: no error.
        """
        closing: Future[None] | None = None
        while closing is None or not closing.done():
            self.run_once(_POLL_S)
            health = self._engine.health()
            if health != self._reported_health:
                self._reported_health = health
                self.broadcast(_status(health))
            drain_s = 0.0 if health.status == "failed" or self._owner.lost else self._drain_s
            if closing is None and drain_s is not None:
                closing = self._closer.submit(close, drain_s)
                closing.add_done_callback(lambda _: self._wake())
        error = closing.exception()
        if error is not None and not isinstance(error, SidestreamError):
            raise error
        return None if error is None else Failure.of(error)

    def run_once(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for messages, handle them, and send unsent bytes. Called by `run`."""
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
            else:
                self._read(key.data)
        self._write()

    def attach(self, connection: socket.socket) -> None:
        """Serve one more front end. Called on the reading thread."""
        front_end = Connection(connection, self._engine, self._wake)  # rule: front-end-is-attached
        self._selector.register(connection, selectors.EVENT_READ, front_end)
        front_end.send(Welcome(self._info))
        if self._reported_health != Health("ok", ""):
            front_end.send(_status(self._reported_health))
        self._front_ends = (*self._front_ends, front_end)

    def send_to_owner(self, message: ToClient) -> None:
        """Send a message to the owner."""
        self._owner.send(message)

    def broadcast(self, message: ToClient) -> None:
        """Send a message to every front end."""
        for front_end in self._front_ends:
            front_end.send(message)

    def finish(self, reply: Reply, *, timeout_s: float = 1.0) -> None:
        """Send `reply` to the owner, then all unsent bytes, and close the connections. Called after `run`."""
        for threads in (self._long_calls, self._calls, self._closer):
            threads.shutdown(wait=False, cancel_futures=True)
        self._owner.send(reply)
        for front_end in (*self._front_ends, self._owner):
            if not front_end.lost:
                front_end.socket.settimeout(timeout_s)
            while front_end.has_rest and not front_end.lost:
                front_end.send_rest()
            front_end.socket.close()
        self._selector.close()
        self._woken.close()
        self._waker.close()

    def _send_outputs(self) -> None:
        """Send the outputs to all front ends. Called on the engine thread after it has applied the results of a
        step.
        """
        for front_end in self._front_ends:
            front_end.send_outputs()

    def _wake(self) -> None:
        # An error has no effect: if the socket is full, `run` wakes anyway; if it is closed, `run` has ended.
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def _write(self) -> None:
        """Send unsent bytes, wait for writability of sockets that did not take all bytes, and drop lost connections."""
        for front_end in (
            front_end for front_end in (*self._front_ends, self._owner) if front_end.socket.fileno() >= 0
        ):
            if front_end.has_rest and not front_end.lost:
                front_end.send_rest()  # rule: reading-thread-sends-the-rest-of-a-frame
            if front_end.lost:
                self._drop(front_end)  # rule: lost-front-end-is-detached
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
            front_end.lost = True  # rule: end-of-a-connection-is-detected
            return
        try:
            for message in front_end.messages.feed(data):
                self._on_message(front_end, message)
        except EngineStopped as error:
            log.error("a front end is cut off: %s", error)
            front_end.lost = True
        except Exception as error:  # a bug of one front end must not affect the others
            log.error("a front end is cut off: a message cannot be executed", exc_info=error)
            front_end.lost = True

    def _on_message(self, front_end: Connection, message: Any) -> None:
        match message:
            case Submit():
                front_end.submit(message)
            case Abort():
                front_end.abort(message)
            case Call(number, "metrics"):
                front_end.send(Reply(number, snapshot=self._engine.parts.metrics.snapshot()))
            case Call(number, "timeline"):
                front_end.send(Reply(number, timeline=self._engine.recent_spans(message.since)))
            case Call(method="flush" | "reset_prefix_cache" | "drop_prefix"):
                self._long_calls.submit(self._answer, front_end, message)
            case Call():
                self._calls.submit(self._answer, front_end, message)
            case Count(name, value, labels):
                self._engine.parts.metrics.inc(name, value, *labels)
            case Ping():
                front_end.send(message)
            case Attach() if front_end is self._owner:
                self.attach(socket.socket(fileno=self._descriptors.pop(0)))
            case Close() if front_end is self._owner:
                self._drain_s = message.drain_s
            case _:
                raise EngineStopped(f"a front end may not send {type(message).__name__}")

    def _answer(self, front_end: Connection, call: Call) -> None:
        """Run a call on a separate thread, because it waits for the engine thread, and may take minutes."""
        try:
            if call.method == "explain_cache":
                reply = Reply(call.number, explanation=self._engine.explain_cache(call.name or ""))
            elif call.prefix is not None:
                found = self._engine.prefixes.run(call.method, call.prefix, timeout_s=call.timeout_s)
                reply = Reply(call.number, prefixes=tuple(found))
            else:
                counts = self._engine.operations.run(call.method, timeout_s=call.timeout_s, name=call.name)
                reply = Reply(call.number, counts=counts)
        except Exception as error:
            reply = Reply(call.number, Failure.of(error))
        self._wake()  # front ends learn of a pause at once
        front_end.send(reply)
