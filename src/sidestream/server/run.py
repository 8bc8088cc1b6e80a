"""Runs uvicorn until a signal or `RunningServer.stop`. Then drains: running requests may finish, new ones are
refused.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import uvicorn
from starlette.datastructures import State

from sidestream.client.front_end import FrontEnd
from sidestream.processes.signals import on_stop_signal
from sidestream.server.app import create_app, health_reply, served_constants
from sidestream.server.completions import text_handle
from sidestream.server.connections import ConnectionLimits
from sidestream.server.listen import bind
from sidestream.server.middleware import CallbackEvent
from sidestream.server.options import ServerOptions
from sidestream.server.response_store import ResponseStore
from sidestream.server.text_work import TextWork
from sidestream.server.tls import tls_context

log = logging.getLogger("sidestream.server")

_ABORT_S = 5  # time for aborted requests to send their last event; then their connections are closed
_BACKLOG = 2048


class RunningServer:
    """A server that accepts requests. Any thread may use it.

    url  the base URL
    uds  the Unix socket to connect to in place of the URL's host; None: TCP
    """

    def __init__(self, url: str, uds: str | None, interrupt: Callable[[], None]) -> None:
        self.url = url
        self.uds = uds
        self._interrupt = interrupt

    def stop(self) -> None:
        """Stop the server, like a signal: the first call drains, the second quits. Returns at once."""
        self._interrupt()


def serve(
    backend: FrontEnd,
    options: ServerOptions,
    *,
    listener: socket.socket | None = None,
    on_ready: Callable[[RunningServer], None] | None = None,
    text: TextWork | None = None,
    store: ResponseStore | None = None,
    limits: int | None = None,
) -> bool:
    """Serve until SIGINT, SIGTERM, SIGHUP or `RunningServer.stop`; blocks. True if every request has finished.

    After the first signal, the server accepts no more requests, and aborts running requests after `options.drain_s`.
    The second signal aborts them at once. Signals are handled on the main thread only. The caller closes the backend
    afterwards.

    listener   socket made by `bind(options)`, which is closed at the end; None: bind now
    text       works on request bodies, and is closed at the end; None: threads of this process
    store      keeps responses; None: one for this server
    limits     descriptor of the file of `RateLimits`; None: one for this server

    Raises ConfigError when the address cannot be bound.
    """
    served = served_constants(backend, options)
    text = text or TextWork(text_handle(backend.tokenizer, served), room=lambda: backend.room)
    with listener or bind(options) as bound, text:
        # Accepted connections inherit SO_REUSEADDR. Without it, connections in TIME_WAIT would keep the next server
        # from binding the address.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        app = create_app(backend, options=options, text=text, store=store, limits=limits)
        _warn_if_open(bound, options)
        config = uvicorn.Config(
            app,
            http=ConnectionLimits(
                options, backend.count, partial(health_reply, backend), tls_context(options)
            ).protocol(),
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=logging.WARNING,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=math.ceil(options.drain_s) + _ABORT_S,
        )
        server = _Server(config, app.state, options, on_ready)
        try:
            server.run(sockets=[bound])
        finally:
            for end in app.state.at_end:
                end()
        return not app.state.stopping.is_set()


def _warn_if_open(listener: socket.socket, options: ServerOptions) -> None:
    address = "" if listener.family == socket.AF_UNIX else listener.getsockname()[0]
    if not options.is_keyed and address and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        log.warning(
            "listening on %s without an API key: anyone who reaches this machine can use the model; "
            "set --api-key (in Python api_key)",
            address,
        )
    if not options.is_keyed and "*" in options.allowed_origins:
        log.warning(
            "any web page in a browser that reaches this server can use the model: "
            "set --api-key (in Python api_key), or name origins instead of *"
        )


def running_server(listener: socket.socket, options: ServerOptions, interrupt: Callable[[], None]) -> RunningServer:
    """The RunningServer for a server that listens on `listener`."""
    url = _url(listener, tls=options.ssl_certfile is not None)
    return RunningServer(url, listener.getsockname() if listener.family == socket.AF_UNIX else None, interrupt)


def _url(listener: socket.socket, *, tls: bool) -> str:
    scheme = "https" if tls else "http"
    if listener.family == socket.AF_UNIX:
        return f"{scheme}://localhost"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class _Server(uvicorn.Server):
    """uvicorn's server, but after a signal it returns to its caller, so that the caller can close the engine."""

    def __init__(
        self,
        config: uvicorn.Config,
        state: State,
        options: ServerOptions,
        on_ready: Callable[[RunningServer], None] | None,
    ) -> None:
        super().__init__(config)
        self._state = state
        self._stopping: CallbackEvent = state.stopping
        self._draining: CallbackEvent = state.draining
        self._options = options
        self._drain_s = options.drain_s
        self._on_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        assert sockets is not None
        running = running_server(sockets[0], self._options, self.interrupt)
        for begin in self._state.at_start:
            begin()
        log.info("serving on %s", running.url if running.uds is None else f"{running.url}, Unix socket {running.uds}")
        if self._on_ready is not None:
            self._on_ready(running)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for stop in self._state.at_stop:
            stop()
        self._draining.set()
        log.info(
            "draining %d requests for up to %g s; interrupt again to quit at once",
            len(self.server_state.tasks),
            self._drain_s,
        )
        deadline = asyncio.get_running_loop().call_later(self._drain_s, self._stopping.set)
        aborter = asyncio.create_task(self._abort_connections())
        try:
            await super().shutdown(sockets)
        finally:
            aborter.cancel()
            deadline.cancel()

    def interrupt(self) -> None:
        """Drain; the second call quits. Any thread or signal handler may call it."""
        if not self.should_exit:
            self.should_exit = True
        elif self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._quit)

    def _quit(self) -> None:
        self.force_exit = True
        self._stopping.set()

    async def _abort_connections(self) -> None:
        """After `_quit`, abort all connections, also connections that were accepted just before. Otherwise these would
        delay the exit: since Python 3.12, closing a listener waits for its connections.
        """
        while True:
            if self.force_exit:
                for connection in list(self.server_state.connections):
                    connection.transport.abort()
            await asyncio.sleep(0.02)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The same as in uvicorn, except that it does not raise the signals again at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with on_stop_signal(lambda number: self.interrupt()):
            yield
