"""Bounds on connections: how many there are, how long a TLS handshake, a request head and an untaken reply may take.

Each one that is cut is counted, and logged at a bounded rate.

Sits between the sockets and the ASGI application; knows uvicorn's HTTP/1.1 protocol and no route. Event loop only.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import resource
import socket
import ssl
import struct
import termios
from array import array
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Literal, cast

import h11
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from sidestream.errors import ConfigError
from sidestream.server.encode import to_json
from sidestream.server.errors import ApiError
from sidestream.server.interruption import Signal, say_who_leaves
from sidestream.server.options import ServerOptions

log = logging.getLogger("sidestream.server")

# uvicorn warns of each bad request without its peer, and advises to install a WebSocket library when a client asks for
# one. `Connections` reports bad requests itself; errors of the application still get through.
_uvicorn_log = logging.getLogger("sidestream.server.uvicorn")
_uvicorn_log.setLevel(logging.ERROR)

Reason = Literal["head_timeout", "malformed", "limit", "address_limit", "tls_handshake", "stall_timeout"]

_DEFAULT_CONNECTIONS = 2048
# Open files that are not connections: weights, the disk tier, the log, what Python imports.
_OTHER_FILES = 256
_FEWEST_CONNECTIONS = 16
# A refused connection stays open this long for its client to send its request and read the refusal: closed with unread
# bytes, the kernel would reset it and the refusal would be lost.
_LINGER_S = 1.0
_MOST_LINGERING = 64
# At most one line in this time for each reason.
_LOG_PERIOD_S = 10.0
# How often in a stall timeout the bytes are counted that a client has not taken.
_STALL_CHECKS = 8


def connection_limit(options: ServerOptions) -> int:
    """Connections that the server holds at a time. Raises ConfigError when the process may not open so many files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    bound = None if soft == resource.RLIM_INFINITY else max(_FEWEST_CONNECTIONS, soft - _OTHER_FILES)
    if options.max_connections is None:
        return _DEFAULT_CONNECTIONS if bound is None else min(_DEFAULT_CONNECTIONS, bound)
    if bound is not None and options.max_connections > bound:
        raise ConfigError(
            f"max_connections is {options.max_connections}, but this process may open {soft} files and needs {_OTHER_FILES} of them "
            f"for other things: give {bound} or less, or raise the limit (ulimit -n {options.max_connections + _OTHER_FILES})"
        )
    return options.max_connections


class Connections:
    """The connections of one server: counts them, admits them, and reports those that are cut."""

    def __init__(self, options: ServerOptions, count: Callable[..., None], tls: ssl.SSLContext | None = None) -> None:
        """Raises ConfigError when the options ask for too many open files.

        count   `count(name, value, *labels)` adds to a counter
        tls     connections begin with a handshake
        """
        self.tls = tls
        self.head_timeout_s = options.head_timeout_s
        self.stall_timeout_s = options.stall_timeout_s
        self.num_lingering = 0
        self._limit = connection_limit(options)
        self._limit_per_address = options.max_connections_per_address
        self._count = count
        self._open: Counter[str] = Counter()
        self._num_open = 0
        self._unlogged: dict[
            Reason, int
        ] = {}  # since a reason's last line; absent: its next one may be written at once

    def protocol(self) -> type[asyncio.Protocol]:
        """What uvicorn calls for each new connection."""

        def make(**arguments: Any) -> asyncio.Protocol:
            guarded = _Guarded(self, **arguments)
            return guarded if self.tls is None else _Handshake(self, self.tls, guarded)

        return cast("type[asyncio.Protocol]", make)

    def admit(self, address: str, peer: str) -> ApiError | None:
        """Count a new connection, or give the reply that refuses it."""
        if self._num_open >= self._limit:
            self.report("limit", peer)
            return _refusal(f"this server holds {self._limit} connections already: close idle ones, or try again later")
        limit = self._limit_per_address
        if limit is not None and self._open[address] >= limit:
            self.report("address_limit", peer)
            return _refusal(
                f"{address} holds {limit} connections already, as many as one address may: reuse them, or close idle ones"
            )
        self._open[address] += 1
        self._num_open += 1
        return None

    def release(self, address: str) -> None:
        """An admitted connection is gone."""
        self._num_open -= 1
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]

    def report(self, reason: Reason, peer: str) -> None:
        """Count a connection that is cut, and log it: one line at once, then one per period that counts the others."""
        self._count("connections_refused_total", 1, reason)
        if reason in self._unlogged:
            self._unlogged[reason] += 1
            return
        log.warning("cut the connection of %s: %s", peer, self._why(reason))
        self._unlogged[reason] = 0
        asyncio.get_running_loop().call_later(_LOG_PERIOD_S, self._log_rest, reason)

    def _log_rest(self, reason: Reason) -> None:
        count = self._unlogged.pop(reason)
        if count:
            log.warning("cut %d more connections within %g s: %s", count, _LOG_PERIOD_S, self._why(reason))

    def _why(self, reason: Reason) -> str:
        match reason:
            case "head_timeout":
                return f"the rest of its request did not arrive within {self.head_timeout_s:g} s"
            case "malformed":
                return "it sent no valid HTTP/1.1 request"
            case "limit":
                return f"{self._limit} connections are open (max_connections)"
            case "tls_handshake":
                return f"its TLS handshake failed, or did not end within {self.head_timeout_s:g} s"
            case "stall_timeout":
                return f"it took no byte of its reply for {self.stall_timeout_s:g} s (stall_timeout)"
            case "address_limit":
                return f"{self._limit_per_address} connections of its address are open (max_connections_per_address)"


def _refusal(message: str) -> ApiError:
    return ApiError(503, message, kind="server_error", code="too_many_connections", headers={"Retry-After": "1"})


class _Handshake(asyncio.Protocol):
    """A connection until its TLS handshake has ended; then it is `guarded`'s.

    asyncio's own server would accept any number of unfinished handshakes for a minute each, and tell the protocol of
    none. uvicorn ends this one with its connections, by `shutdown` and `transport`.
    """

    def __init__(self, connections: Connections, context: ssl.SSLContext, guarded: _Guarded) -> None:
        self._guard = connections
        self._context = context
        self._guarded = guarded
        self._early: list[bytes] = []  # requests may come with the handshake's end

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._peer = _peer(transport)
        if self._guard.admit(*self._peer) is not None:
            transport.abort()  # its refusal would cost a handshake
            return
        self._guarded.server_state.connections.add(cast("Any", self))
        self._task = asyncio.get_running_loop().create_task(self._shake_hands())

    def data_received(self, data: bytes) -> None:
        self._early.append(data)

    def shutdown(self) -> None:
        """Called when the server stops: there is no request to finish."""
        self.transport.abort()

    async def _shake_hands(self) -> None:
        loop, guarded = asyncio.get_running_loop(), self._guarded
        failed = False
        secure: asyncio.Transport | None = None
        try:
            secure = await loop.start_tls(
                self.transport,
                self,
                self._context,
                server_side=True,
                ssl_handshake_timeout=self._guard.head_timeout_s,
                ssl_shutdown_timeout=self._guard.stall_timeout_s,  # it bounds the sending of a reply's end too
            )
        except (ConnectionResetError, BrokenPipeError):
            pass  # the client left
        except OSError:  # an SSLError or a timeout
            failed = True
        finally:
            guarded.server_state.connections.discard(cast("Any", self))
        if secure is None or self.transport.is_closing():
            if failed:
                self._guard.report("tls_handshake", self._peer[1])
            self.transport.abort()
            self._guard.release(self._peer[0])
            return
        secure.set_protocol(guarded)
        guarded.begin(secure, self.transport, self._peer)
        for data in self._early:
            guarded.data_received(data)


class _Guarded(H11Protocol):
    """uvicorn's protocol with bounds: on how many connections there are, on a request head's time, on an untaken
    reply's time.
    """

    def __init__(self, connections: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.logger = _uvicorn_log
        self._guard = connections
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._gone = Signal()

    def handle_events(self) -> None:
        """What uvicorn calls for bytes that have come; a request's task begins later."""
        super().handle_events()
        if self.scope is not None:
            say_who_leaves(cast("Scope", self.scope), self._gone)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        address, peer = _peer(transport)
        refusal = self._guard.admit(address, peer)
        if refusal is not None:
            transport.set_protocol(_Refused(self._guard, transport, refusal))
            return
        self.begin(transport, transport, (address, peer))

    def begin(self, transport: asyncio.Transport, raw: asyncio.Transport, peer: tuple[str, str]) -> None:
        """Serve an admitted connection. `raw`: what carries `transport`'s bytes, the same one without TLS."""
        self._raw = raw
        self._address, self._peer_name = peer
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_stall_timer()
        self._guard.release(self._address)
        super().connection_lost(exc)
        self._gone.set()

    def pause_writing(self) -> None:
        """Called when the client takes a reply slower than it is made."""
        super().pause_writing()
        self._start_stall_timer()

    def on_response_complete(self) -> None:
        """Called when the last byte of a reply was written, which does not mean that it was sent."""
        super().on_response_complete()
        if self._buffered():
            self._start_stall_timer()
        if self.transport.is_closing():
            self._bound_goodbye()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # No reply is due: the bytes are a part of the next request's head, or of a body that was answered before its
        # end. They have ended uvicorn's keep-alive timer, which bounds how long a connection is idle.
        if self.conn.our_state in (h11.IDLE, h11.DONE):
            self._start_head_timer()
        else:
            self._stop_head_timer()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls for bytes that are no HTTP request."""
        self._guard.report("malformed", self._peer_name)
        self._cut(
            ApiError(
                400, "this is no valid HTTP/1.1 request, or its head is too long: send plain HTTP, and shorter headers"
            )
        )

    def _start_head_timer(self) -> None:
        """Once for each head: bytes that trickle in do not extend its time."""
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._guard.head_timeout_s, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if self.transport.is_closing():
            return
        half = self.conn.our_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if half or self.conn.our_state is h11.DONE:  # browsers and pools open connections that they never use: no news
            self._guard.report("head_timeout", self._peer_name)
        message = f"the request head did not arrive within {self._guard.head_timeout_s:g} s: send it faster"
        self._cut(ApiError(408, message) if half else None)

    def _cut(self, error: ApiError | None) -> None:
        self._stop_head_timer()
        if error is not None:
            self.transport.write(_raw(error))
        self.transport.close()
        self._bound_goodbye()

    def shutdown(self) -> None:
        """Called when the server stops: closes the connection, or lets its reply be the last one."""
        super().shutdown()
        if self.transport.is_closing():
            self._bound_goodbye()

    def timeout_keep_alive_handler(self) -> None:
        """Called when no next request has come on a connection for a while."""
        super().timeout_keep_alive_handler()
        self._bound_goodbye()

    def _bound_goodbye(self) -> None:
        """Closing TLS waits for the peer's own goodbye, and without this as long as for bytes that are not sent yet."""
        if self._raw is not self.transport:
            self.loop.call_later(_LINGER_S, self._hang_up)

    def _hang_up(self) -> None:
        if self._buffered():
            self._start_stall_timer()
        else:
            self._raw.abort()

    def _start_stall_timer(self) -> None:
        if self._stall_timer is None:
            self._await_progress(self._untaken(), self.loop.time())

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _await_progress(self, untaken: int, since: float) -> None:
        period = self._guard.stall_timeout_s / _STALL_CHECKS
        self._stall_timer = self.loop.call_later(period, self._check_progress, untaken, since)

    def _check_progress(self, untaken: int, since: float) -> None:
        """Compare with what was untaken at `since`. Nothing is written meanwhile: the reply is complete, or its writer
        waits.
        """
        self._stall_timer = None
        waits = self.flow.write_paused or self.cycle is None or self.cycle.response_complete
        if not waits or not self._buffered():
            return
        now, left = self.loop.time(), self._untaken()
        if left != untaken:
            self._await_progress(left, now)
        elif now - since < self._guard.stall_timeout_s:
            self._await_progress(untaken, since)
        else:
            self._guard.report("stall_timeout", self._peer_name)
            self._raw.abort()

    def _buffered(self) -> int:
        """Bytes that the kernel has not taken."""
        size = self._raw.get_write_buffer_size()
        return size if self._raw is self.transport else size + self.transport.get_write_buffer_size()

    def _untaken(self) -> int:
        """Bytes that the client has not taken: the kernel asks for more only after it has sent much of what it
        holds.
        """
        return self._buffered() + _queued_in_kernel(self._raw)


class _Refused(asyncio.Protocol):
    """A connection over a limit: gets its refusal, and goes when its client has sent something, left, or taken too
    long.
    """

    def __init__(self, connections: Connections, transport: asyncio.Transport, error: ApiError) -> None:
        self._guard = connections
        self._transport = transport
        self._timer = asyncio.get_running_loop().call_later(_LINGER_S, transport.abort)
        connections.num_lingering += 1
        if connections.num_lingering > _MOST_LINGERING:
            transport.abort()
        else:
            transport.write(_raw(error))

    def data_received(self, data: bytes) -> None:
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._guard.num_lingering -= 1


def _queued_in_kernel(transport: asyncio.Transport) -> int:
    """Bytes in the socket's send queue; 0 where the system does not tell."""
    held = array("i", [0])
    try:
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, held)
    except OSError:
        return 0
    return held[0]


def _peer(transport: asyncio.Transport) -> tuple[str, str]:
    """The other end's address, and its name for the log: the address with the port; on a Unix socket the user, and the
    process.
    """
    sock = transport.get_extra_info("socket")
    if sock.family == socket.AF_UNIX:
        if not hasattr(socket, "SO_PEERCRED"):
            return "the Unix socket", "a client of the Unix socket"
        process, user, _ = struct.unpack(
            "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        )
        return f"user {user}", f"process {process} of user {user}"
    address, port = transport.get_extra_info("peername")[:2]
    return address, f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _raw(error: ApiError) -> bytes:
    """A whole HTTP/1.1 reply that ends its connection; for peers that the application never hears of."""
    body = to_json(error.body())
    head = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        **error.headers,
    }
    head += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*head, "", ""]).encode("latin-1") + body
