"""The process that a user starts: it owns the port, starts API processes, has them drain, and watches all of them.
Serves nothing itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import msgspec

from sidestream.client.process import EngineProcess, child_command, child_environment, how_it_ended
from sidestream.errors import EngineStopped, ProcessFailed
from sidestream.server.listen import bind_beside
from sidestream.server.options import ServerOptions
from sidestream.server.orders import ABORTED, LAST_WORDS_S, READY, STOP, Orders
from sidestream.server.run import Running, running_at

log = logging.getLogger("sidestream.server")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_WATCH_S = 0.05
"""How soon the engine's end is noticed."""
_ENDING_S = 10.0
"""How long an API process may take to end, beyond what its requests may."""
_MOST_FAILURES = 3
_SOON_S = 10.0
"""An API process that ends sooner than this has failed to serve; so many in a row, and the server ends."""


class _ApiProcess:
    """One API process and the line to it. It starts to import at once, and serves when it gets its orders."""

    def __init__(self) -> None:
        self.ready = False
        self.line, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                child_command("sidestream.server.api_process", theirs.fileno()),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=child_environment(),
                process_group=0,  # an interrupt at the terminal comes to the supervisor alone
            )
        self.pid = self._process.pid

    def order(self, orders: bytes, engine: EngineProcess, listener: socket.socket) -> None:
        """Have it serve. Harmless when it, or the engine, has ended: both are noticed elsewhere."""
        self.ordered_s = time.monotonic()
        with contextlib.suppress(EngineStopped, OSError), engine.attach() as connection:
            socket.send_fds(self.line, [orders], [connection.fileno(), listener.fileno()])
        self.line.setblocking(False)

    async def listen(self, on_ready: Callable[[], None]) -> tuple[bytes, int]:
        """All that it says until it ends, and its exit status."""
        words, loop = b"", asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while word := await loop.sock_recv(self.line, 1):
                words += word
                if word == READY:
                    self.ready = True
                    on_ready()
        status = await asyncio.to_thread(self._process.wait)
        self.line.close()
        return words, status

    def stop(self) -> None:
        """Have it drain; the second time, quit. Before it serves, end it."""
        if not self.ready:
            self._process.kill()
            return
        with contextlib.suppress(OSError):  # it has ended
            self.line.send(STOP)

    def cut(self) -> None:
        """End it at once, if it has not ended."""
        if self._process.poll() is None:
            log.error("API process %d does not end: it is killed", self.pid)
            self._process.kill()

    def kill(self) -> None:
        """End it at once, and wait for that."""
        self._process.kill()
        self._process.wait()
        self.line.close()


class Supervisor:
    """Keeps as many API processes as there are listeners, until it is stopped or the engine ends. A context manager;
    the caller closes the engine.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        options: ServerOptions,
        *,
        log_level: int,
        log_format: tuple[str, str],
    ) -> None:
        """Start the API processes, which import while the engine starts. `listeners` are closed at the end.

        log_format   of lines, and of their dates
        """
        share = options.max_connections and -(-options.max_connections // len(listeners))
        orders = Orders(dataclasses.replace(options, max_connections=share), log_level, *log_format)
        self._orders = msgspec.msgpack.encode(orders)
        self._listeners = list(listeners)
        self._options = options
        self._stopping = False
        self._drained = True
        self._failure: ProcessFailed | None = None
        self._processes: list[_ApiProcess] = []
        try:
            for _ in listeners:
                self._processes.append(_ApiProcess())
        except BaseException:
            self._kill()
            raise

    def run(self, engine: EngineProcess, *, on_ready: Callable[[Running], None]) -> bool:
        """Serve until SIGINT or SIGTERM; whether every request could finish.

        The first signal drains, the second aborts what is left. Until all API processes serve for the first time,
        signals do what they did before. Raises ProcessFailed when the engine has ended by itself, or API processes end
        as soon as they start.
        """
        asyncio.run(self._run(engine, on_ready))
        if self._failure is not None:
            raise self._failure
        return self._drained

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill()

    def _kill(self) -> None:
        self._close_listeners()
        for api in self._processes:
            api.kill()

    async def _run(self, engine: EngineProcess, on_ready: Callable[[Running], None]) -> None:
        loop = asyncio.get_running_loop()
        handlers = contextlib.ExitStack()
        not_ready = set(range(len(self._listeners)))

        def stop() -> None:
            loop.call_soon_threadsafe(self._stop)

        def one_ready(index: int) -> None:
            if index in not_ready:
                not_ready.remove(index)
                if not not_ready:
                    handlers.enter_context(_signals_call(stop))
                    on_ready(running_at(self._listeners[0], self._options, stop))

        watch = asyncio.create_task(self._watch(engine))
        try:
            with handlers:
                await asyncio.gather(
                    *(self._keep(index, engine, partial(one_ready, index)) for index in range(len(self._listeners)))
                )
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    def _stop(self) -> None:
        """Have all API processes drain; the second time, quit. Those that do not end in time are killed."""
        patience_s = _ENDING_S if self._stopping else self._options.drain_s + _ENDING_S
        self._stopping = True
        self._close_listeners()
        for api in self._processes:
            api.stop()
            asyncio.get_running_loop().call_later(patience_s, api.cut)

    def _close_listeners(self) -> None:
        """Refuse connections. While this process holds a socket that has listened, clients connect to it, and would
        wait here for ever.
        """
        for listener in self._listeners:
            listener.close()

    def _replace_listener(self, index: int) -> None:
        """Have other API processes get the connections that would wait for a process that only starts. A single one has
        them wait.
        """
        ended = self._listeners[index]
        if len(self._listeners) > 1 and ended.family != socket.AF_UNIX:
            self._listeners[index] = bind_beside(ended)
            ended.close()

    async def _watch(self, engine: EngineProcess) -> None:
        while (ended := engine.ended()) is None:
            await asyncio.sleep(_WATCH_S)
        self._failure = ProcessFailed(f"the engine's process has ended: {ended}")
        if self._stopping:
            return  # requests that ran have failed by now
        log.critical(
            "the engine's process has ended: the server says so to its clients for %g s, and ends", LAST_WORDS_S
        )
        await asyncio.sleep(LAST_WORDS_S)
        self._stop()

    async def _keep(self, index: int, engine: EngineProcess, on_ready: Callable[[], None]) -> None:
        """Have an API process serve on a listener; start another one when it ends by itself."""
        failures = 0
        while True:
            api = self._processes[index]
            api.order(self._orders, engine, self._listeners[index])
            words, status = await api.listen(on_ready)
            if self._stopping:
                self._drained &= status == 0 and ABORTED not in words
                return
            if self._failure is not None:
                return
            soon = READY not in words or time.monotonic() - api.ordered_s < _SOON_S
            failures, ended = failures + 1 if soon else 1, how_it_ended(status)
            if failures >= _MOST_FAILURES:
                self._failure = ProcessFailed(
                    f"API processes ended {failures} times soon after their start: {ended}; its messages are above"
                )
                self._stop()
                return
            log.error(
                "API process %d has ended: %s; its clients have lost their connections; another one starts",
                api.pid,
                ended,
            )
            self._replace_listener(index)
            self._processes[index] = _ApiProcess()


@contextlib.contextmanager
def _signals_call(stop: Callable[[], None]) -> Iterator[None]:
    """SIGINT and SIGTERM call `stop`; afterwards they do what they did before. An event loop would leave them to the
    system instead.
    """
    previous: dict[signal.Signals, Any] = {
        number: signal.signal(number, lambda number, frame: stop()) for number in _SIGNALS
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
