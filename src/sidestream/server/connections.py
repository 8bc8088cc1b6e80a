"""Limits of connections: their number, and the time for a TLS handshake, for a request head and for reading a reply.

A connection over a limit is closed, counted, and logged at a bounded rate. This layer is between the sockets and the
ASGI application. It extends uvicorn's HTTP/1.1 protocol, and knows no routes. Used on the event loop only.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import re
import resource
import socket
import ssl
import struct
import termios
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Literal, cast

import h11
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from sidestream.errors import ConfigError
from sidestream.server.body import to_json
from sidestream.server.errors import ApiError
from sidestream.server.middleware import HEALTH_PATHS, CallbackEvent, set_disconnect_event
from sidestream.server.options import ServerOptions

log = logging.getLogger("sidestream.server")

# uvicorn's warnings about bad requests do not name the peer, so they are off, and `ConnectionLimits.report` logs in
# their place. Errors of the application are still logged.
_uvicorn_log = logging.getLogger("sidestream.server.uvicorn")
_uvicorn_log.setLevel(logging.ERROR)

ApiReply = tuple[int, dict[str, Any]]

Reason = Literal["head_timeout", "malformed", "limit", "address_limit", "tls_handshake", "stall_timeout"]

_DEFAULT_CONNECTIONS = 2048
# Number of open files that are not connections: weights, KV on disk, the log, imported modules.
_OTHER_FILES = 256
_FEWEST_CONNECTIONS = 16
# Time that a rejected connection stays open, so that its client can send the request and read the rejection. If it were
# closed with unread bytes, the kernel would reset it and drop the rejection.
_LINGER_S = 1.0
_MOST_LINGERING = 64
_MOST_LINE_BYTES = 256  # of the request line of a health check
# Each reason is logged at most once in this period.
_LOG_PERIOD_S = 10.0
# Number of checks of a client's progress within one stall timeout.
_STALL_CHECKS = 8


def connection_limit(options: ServerOptions) -> int:
    """Maximum number of connections at the same time. Raises ConfigError if the process may not open so many files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    bound = None if soft == resource.RLIM_INFINITY else max(_FEWEST_CONNECTIONS, soft - _OTHER_FILES)
    if options.max_connections is None:
        return _DEFAULT_CONNECTIONS if bound is None else min(_DEFAULT_CONNECTIONS, bound)
    if bound is not None and options.max_connections > bound:
        raise ConfigError(
            f"max_connections is {options.max_connections}, but this process may open {soft} files "
            f"and needs {_OTHER_FILES} of them for other things: "
            f"give {bound} or less, or raise the limit (ulimit -n {options.max_connections + _OTHER_FILES})"
        )
    return options.max_connections


class ConnectionLimits:
    """Admits the connections of one server, and reports each connection that it closes because of a limit."""

    def __init__(
        self,
        options: ServerOptions,
        count: Callable[..., None],
        health: Callable[[str], ApiReply],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Raises ConfigError when the options need too many open files.

        count   function that adds to a counter: `count(name, value, *labels)`
        health  status and body of the reply to a health check with this path
        tls     the TLS context; None: plain HTTP
        """
        self.health = health
        prefix = re.escape(options.root_path.encode())
        paths = "|".join(HEALTH_PATHS).encode()
        self.health_check = re.compile(rb"(?:GET|POST(?= \S*/ping)) (?:%s)?(%s)[? ]" % (prefix, paths))
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
        ] = {}  # closed connections since the reason's last log line; absent: the next one is logged at once

    def protocol(self) -> type[asyncio.Protocol]:
        """The protocol factory that uvicorn calls for each connection."""

        def make(**arguments: Any) -> asyncio.Protocol:
            http = _LimitedProtocol(self, **arguments)
            return http if self.tls is None else _TlsHandshakeProtocol(self, self.tls, http)

        return cast("type[asyncio.Protocol]", make)

    def admit(self, address: str) -> tuple[Reason, ApiError] | None:
        """Count a new connection and return None; or, if it exceeds a limit, return the rejection."""
        if self._num_open >= self._limit:
            return "limit", _rejection(
                f"this server holds {self._limit} connections already: close idle ones, or try again later"
            )
        limit = self._limit_per_address
        if limit is not None and self._open[address] >= limit:
            return "address_limit", _rejection(
                f"{address} holds {limit} connections already, as many as one address may: "
                "reuse them, or close idle ones"
            )
        self._open[address] += 1
        self._num_open += 1
        return None

    def release(self, address: str) -> None:
        """Stop counting an admitted connection, which has ended."""
        self._num_open -= 1
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]

    def report(self, reason: Reason, peer: str) -> None:
        """Count and log a closed connection. The first one of a reason is logged at once, and later ones in one line
        per period.
        """
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


def _rejection(message: str) -> ApiError:
    return ApiError(503, message, kind="server_error", code="too_many_connections", headers={"Retry-After": "1"})


class _TlsHandshakeProtocol(asyncio.Protocol):
    """A connection during its TLS handshake. Afterwards the protocol `http` serves the connection.

    Without this class, asyncio would do the handshakes before any protocol sees the connections: any number of
    unfinished handshakes, for up to a minute each. When the server stops, uvicorn treats this object as a connection:
    it calls `shutdown` and uses `transport`.
    """

    def __init__(self, connections: ConnectionLimits, context: ssl.SSLContext, http: _LimitedProtocol) -> None:
        self._limits = connections
        self._context = context
        self._http = http
        self._early: list[bytes] = []  # bytes of requests that arrived with the end of the handshake

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._peer = _peer(transport)
        rejection = self._limits.admit(self._peer[0])
        if rejection is not None:
            self._limits.report(rejection[0], self._peer[1])
            transport.abort()  # sending the rejection would need a handshake
            return
        self._http.server_state.connections.add(cast("Any", self))
        self._task = asyncio.get_running_loop().create_task(self._shake_hands())

    def data_received(self, data: bytes) -> None:
        self._early.append(data)

    def shutdown(self) -> None:
        """Called by uvicorn when the server stops. There is no request yet, so the connection is aborted."""
        self.transport.abort()

    async def _shake_hands(self) -> None:
        loop, http = asyncio.get_running_loop(), self._http
        failed = False
        secure: asyncio.Transport | None = None
        try:
            secure = await loop.start_tls(
                self.transport,
                self,
                self._context,
                server_side=True,
                ssl_handshake_timeout=self._limits.head_timeout_s,
                ssl_shutdown_timeout=self._limits.stall_timeout_s,  # also bounds the time to send the rest of a reply
            )
        except (ConnectionResetError, BrokenPipeError):
            pass  # the client disconnected
        except OSError:  # an SSLError or a timeout
            failed = True
        finally:
            http.server_state.connections.discard(cast("Any", self))
        if secure is None or self.transport.is_closing():
            if failed:
                self._limits.report("tls_handshake", self._peer[1])
            self.transport.abort()
            self._limits.release(self._peer[0])
            return
        secure.set_protocol(http)
        http.begin(secure, self.transport, self._peer)
        for data in self._early:
            http.data_received(data)


class _LimitedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with the limits of `ConnectionLimits`."""

    def __init__(self, connections: ConnectionLimits, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.logger = _uvicorn_log
        self._limits = connections
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._disconnected = CallbackEvent()

    def handle_events(self) -> None:
        """Called by uvicorn for received bytes. A request's task starts after this call, so the task finds the event in
        its scope.
        """
        super().handle_events()
        if self.scope is not None:
            set_disconnect_event(cast("Scope", self.scope), self._disconnected)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        address, peer = _peer(transport)
        rejection = self._limits.admit(address)
        if rejection is not None:
            transport.set_protocol(_RejectedProtocol(self._limits, transport, peer, *rejection))
            return
        self.begin(transport, transport, (address, peer))

    def begin(self, transport: asyncio.Transport, raw: asyncio.Transport, peer: tuple[str, str]) -> None:
        """Serve an admitted connection. `raw` is the transport below TLS; without TLS, it is the same as
        `transport`.
        """
        self._raw = raw
        self._address, self._peer_name = peer
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_stall_timer()
        self._limits.release(self._address)
        super().connection_lost(exc)
        self._disconnected.set()

    def pause_writing(self) -> None:
        """Called when the client reads a reply more slowly than the server writes it."""
        super().pause_writing()
        self._start_stall_timer()

    def on_response_complete(self) -> None:
        """Called when the last byte of a reply was written. The byte may still wait to be sent."""
        super().on_response_complete()
        if self._unsent_bytes():
            self._start_stall_timer()
        if self.transport.is_closing():
            self._limit_tls_close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # In these states no reply is pending, so the bytes belong to the next request's head, or to a body that was
        # answered early. The bytes have stopped uvicorn's keep-alive timer, so the head timer must run.
        if self.conn.our_state in (h11.IDLE, h11.DONE):
            self._start_head_timer()
        else:
            self._stop_head_timer()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for bytes that are no HTTP request."""
        self._limits.report("malformed", self._peer_name)
        self._close_with(
            ApiError(
                400, "this is no valid HTTP/1.1 request, or its head is too long: send plain HTTP, and shorter headers"
            )
        )

    def _start_head_timer(self) -> None:
        """Start the timer once for each head, so that a head that arrives in small pieces gets no more time."""
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._limits.head_timeout_s, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if self.transport.is_closing():
            return
        incomplete = self.conn.our_state is h11.IDLE and bool(self.conn.trailing_data[0])
        # Unused connections are not reported: browsers and connection pools open some in advance.
        if incomplete or self.conn.our_state is h11.DONE:
            self._limits.report("head_timeout", self._peer_name)
        message = f"the request head did not arrive within {self._limits.head_timeout_s:g} s: send it faster"
        self._close_with(ApiError(408, message) if incomplete else None)

    def _close_with(self, error: ApiError | None) -> None:
        self._stop_head_timer()
        if error is not None:
            self.transport.write(_http_reply(error.status, error.body(), error.headers))
        self.transport.close()
        self._limit_tls_close()

    def shutdown(self) -> None:
        """Called when the server stops: close the connection, now or after its reply."""
        super().shutdown()
        if self.transport.is_closing():
            self._limit_tls_close()

    def timeout_keep_alive_handler(self) -> None:
        """Called when a connection was idle for too long."""
        super().timeout_keep_alive_handler()
        self._limit_tls_close()

    def _limit_tls_close(self) -> None:
        """Wait only `_LINGER_S` for the peer's TLS close once all bytes are sent. asyncio alone would wait for the
        whole stall timeout.
        """
        if self._raw is not self.transport:
            self.loop.call_later(_LINGER_S, self._abort_if_sent)

    def _abort_if_sent(self) -> None:
        if self._unsent_bytes():
            self._start_stall_timer()
        else:
            self._raw.abort()

    def _start_stall_timer(self) -> None:
        if self._stall_timer is None:
            self._check_later(self._unread_bytes(), self.loop.time())

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _check_later(self, unread: int, since: float) -> None:
        period = self._limits.stall_timeout_s / _STALL_CHECKS
        self._stall_timer = self.loop.call_later(period, self._check_progress, unread, since)

    def _check_progress(self, unread: int, since: float) -> None:
        """Abort the connection if the client has read no byte during the stall timeout. `unread` bytes were unread at
        the time `since`. No byte was written after that time, because the reply is complete or its writer waits.
        """
        self._stall_timer = None
        idle = self.flow.write_paused or self.cycle is None or self.cycle.response_complete
        if not idle or not self._unsent_bytes():
            return
        now, left = self.loop.time(), self._unread_bytes()
        if left != unread:
            self._check_later(left, now)
        elif now - since < self._limits.stall_timeout_s:
            self._check_later(unread, since)
        else:
            self._limits.report("stall_timeout", self._peer_name)
            self._raw.abort()

    def _unsent_bytes(self) -> int:
        """Bytes that wait in this process, not in the kernel."""
        size = self._raw.get_write_buffer_size()
        return size if self._raw is self.transport else size + self.transport.get_write_buffer_size()

    def _unread_bytes(self) -> int:
        """Bytes that the client has not acknowledged: bytes in this process and in the kernel's send queue."""
        return self._unsent_bytes() + _queued_in_kernel(self._raw)


class _RejectedProtocol(asyncio.Protocol):
    """A connection over a limit. Health checks are answered all the same: a load balancer must not take a server for
    dead because other clients hold all connections. Other requests get the rejection. Closes after `_LINGER_S`.
    """

    def __init__(
        self, limits: ConnectionLimits, transport: asyncio.Transport, peer: str, reason: Reason, error: ApiError
    ) -> None:
        self._limits = limits
        self._transport = transport
        self._rejection = (peer, reason, error)
        self._line = b""
        self._answered = False
        self._timer = asyncio.get_running_loop().call_later(_LINGER_S, self._end)
        limits.num_lingering += 1
        if limits.num_lingering > _MOST_LINGERING:
            limits.report(reason, peer)
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._answered:
            return  # the rest of the request
        self._line += data[:_MOST_LINE_BYTES]
        if b"\n" in self._line or len(self._line) >= _MOST_LINE_BYTES:
            self._answer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._limits.num_lingering -= 1

    def _answer(self) -> None:
        self._answered = True
        peer, reason, error = self._rejection
        if check := self._limits.health_check.match(self._line):
            self._transport.write(_http_reply(*self._limits.health(check[1].decode()), {}))
        else:
            self._limits.report(reason, peer)
            self._transport.write(_http_reply(error.status, error.body(), error.headers))
        self._transport.write_eof()

    def _end(self) -> None:
        if self._answered:
            self._transport.abort()
        else:
            self._answer()
            self._transport.close()


def _queued_in_kernel(transport: asyncio.Transport) -> int:
    """Bytes in the socket's send queue; 0 if the system does not report them."""
    queued = array("i", [0])
    try:
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
    except OSError:
        return 0
    return queued[0]


def _peer(transport: asyncio.Transport) -> tuple[str, str]:
    """The peer's address, and its name in the log, which includes the port. For a Unix socket, user and process take
    the place of address and port.
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


def _http_reply(status: int, content: dict[str, Any], headers: Mapping[str, str]) -> bytes:
    """A complete HTTP/1.1 reply that closes the connection, for a request that does not reach the application."""
    body = to_json(content)
    head = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
    fields = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        **headers,
    }
    head += [f"{name}: {value}" for name, value in fields.items()]
    return "\r\n".join([*head, "", ""]).encode("latin-1") + body
