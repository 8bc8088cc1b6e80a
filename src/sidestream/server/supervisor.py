"""The supervisor, which runs in the process that the user starts. It owns the port, and starts, restarts and drains the
API processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self

import msgspec

from sidestream.client.process import EngineProcess
from sidestream.client.pulse import silence
from sidestream.errors import EngineStopped, ProcessFailed
from sidestream.processes.child import how_it_ended, start_child
from sidestream.processes.signals import on_stop_signal
from sidestream.server.control import ABORTED, GRACE_S, READY, STOP, ApiProcessConfig
from sidestream.server.listen import bind_same_address
from sidestream.server.options import ServerOptions
from sidestream.server.rate_limits import limits_file
from sidestream.server.response_store import new_directory
from sidestream.server.run import RunningServer, running_server

log = logging.getLogger("sidestream.server")

_WATCH_S = 0.05
"""Interval at which the supervisor checks whether the engine's process has ended."""
_EXIT_S = 10.0
"""Time for an API process to exit after its requests have ended; then it is killed."""
_READY_S = 1.0
"""Maximum time between the moment when an API process listens and its message READY."""
_MAX_FAILURES = 3
"""Number of consecutive failures after which the server gives up."""
_MIN_LIFE_S = 10.0
"""An API process that ends sooner counts as a failure."""


class _ApiProcess:
    """One API process, and the control socket to it. The process imports its modules at once, and serves when it gets
    its configuration.
    """

    def __init__(self) -> None:
        self.ready = False
        self._configured = False
        self._process, self.control = start_child("sidestream.server.api_process", torch=False)
        self.pid = self._process.pid

    def configure(self, config: bytes, engine: EngineProcess, listener: socket.socket, limits: int) -> None:
        """Make the process serve. `limits`: descriptor of the file of `RateLimits`. Does nothing if the
        process or the engine has ended; the supervisor's other tasks notice such an end.
        """
        self.configured_s = time.monotonic()
        with contextlib.suppress(EngineStopped, OSError), engine.attach() as connection:
            socket.send_fds(self.control, [config], [connection.fileno(), listener.fileno(), limits])
            self._configured = True
        self.control.setblocking(False)

    async def wait(self, on_ready: Callable[[], None]) -> tuple[bytes, int]:
        """Wait for the end of the process. Returns all its messages and its exit status."""
        messages, loop = b"", asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while message := await loop.sock_recv(self.control, 1):
                messages += message
                if message == READY:
                    self.ready = True
                    on_ready()
        status = await asyncio.to_thread(self._process.wait)
        self.control.close()
        return messages, status

    def stop(self) -> None:
        """Make the process drain; the second call makes it quit. A process that does not serve yet, and does not serve
        within a second, is killed.
        """
        if not self._configured:
            self._process.kill()
            return
        with contextlib.suppress(OSError):  # the process has ended
            self.control.send(STOP)
        if not self.ready:  # it may listen already, and have requests
            asyncio.get_running_loop().call_later(_READY_S, self._kill_if_not_ready)

    def _kill_if_not_ready(self) -> None:
        if not self.ready:
            self._process.kill()

    def kill_if_running(self) -> None:
        """If the process has not ended, log an error and kill it."""
        if self._process.poll() is None:
            log.error("API process %d does not end: it is killed", self.pid)
            self._process.kill()

    def kill(self) -> None:
        """Kill the process and wait for its exit."""
        self._process.kill()
        self._process.wait()
        self.control.close()


class Supervisor:
    """Runs one API process for each listener, until a signal arrives or the engine ends. A context manager.

    The caller closes the engine.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        options: ServerOptions,
        *,
        log_level: int,
        log_format: tuple[str, str],
    ) -> None:
        """Start the API processes. They import their modules while the engine starts.

        listeners    one socket for each API process, closed at the end
        log_format   format of log lines, and format of the dates in them
        """
        share = options.max_connections and -(-options.max_connections // len(listeners))
        self._responses = new_directory()
        limited = dataclasses.replace(options, max_connections=share)
        config = ApiProcessConfig(limited, log_level, *log_format, self._responses)
        self._config = msgspec.msgpack.encode(config)
        self._listeners = list(listeners)
        self._limits = os.fdopen(limits_file(), "rb")
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

    def run(self, engine: EngineProcess, *, on_ready: Callable[[RunningServer], None]) -> bool:
        """Serve until a stop signal. True if every request has finished.

        The first signal drains, the second aborts; signals are handled before the first API process listens. Raises
        ProcessFailed if the engine's process ends by itself, or if API processes end as soon as they start.
        """
        asyncio.run(self._run(engine, on_ready))
        if self._failure is not None:
            raise self._failure
        return self._drained

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._kill()

    def _kill(self) -> None:
        self._close_listeners()
        for api in self._processes:
            api.kill()
        shutil.rmtree(self._responses, ignore_errors=True)
        self._limits.close()

    async def _run(self, engine: EngineProcess, on_ready: Callable[[RunningServer], None]) -> None:
        loop = asyncio.get_running_loop()
        not_ready = set(range(len(self._listeners)))

        def stop() -> None:
            loop.call_soon_threadsafe(self._stop)

        def on_one_ready(index: int) -> None:
            if index in not_ready:
                not_ready.remove(index)
                if not not_ready and not self._stopping:
                    on_ready(running_server(self._listeners[0], self._options, stop))

        watch = asyncio.create_task(self._watch_engine(engine))
        try:
            with on_stop_signal(lambda number: stop()):
                await asyncio.gather(
                    *(
                        self._keep_running(index, engine, partial(on_one_ready, index))
                        for index in range(len(self._listeners))
                    )
                )
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    def _stop(self) -> None:
        """Make all API processes drain; the second call makes them quit. Processes that do not exit in time are
        killed.
        """
        timeout_s = _EXIT_S if self._stopping else self._options.drain_s + _EXIT_S
        self._stopping = True
        self._close_listeners()
        for api in self._processes:
            api.stop()
            asyncio.get_running_loop().call_later(timeout_s, api.kill_if_running)

    def _close_listeners(self) -> None:
        """Close the listeners, so that connections are refused. While this process holds a listening socket, the kernel
        accepts connections, and their clients wait.
        """
        for listener in self._listeners:
            listener.close()

    def _replace_listener(self, index: int) -> None:
        """Close the socket of a process that has ended, so that new connections go to other API processes during the
        restart.

        If there is only one API process, its listener stays open, and new connections wait for the restart.
        """
        ended = self._listeners[index]
        if len(self._listeners) > 1 and ended.family != socket.AF_UNIX:
            self._listeners[index] = bind_same_address(ended)
            ended.close()

    async def _watch_engine(self, engine: EngineProcess) -> None:
        stalled = False
        while (ended := engine.ended()) is None:
            if stalled != engine.stalled():
                stalled = not stalled
                said = f"{silence(engine.info.watchdog_timeout_s)}: is it stopped?" if stalled else "it answers again"
                log.log(logging.CRITICAL if stalled else logging.WARNING, "engine process %d: %s", engine.pid, said)
            await asyncio.sleep(_WATCH_S)
        self._failure = ProcessFailed(f"the engine's process has ended: {ended}")
        if self._stopping:
            return  # all running requests have failed
        log.critical("the engine's process has ended: the server reports it to clients for %g s, then exits", GRACE_S)
        await asyncio.sleep(GRACE_S)
        self._stop()

    async def _wait_for_end(self, engine: EngineProcess) -> None:
        """Wait until the process of an engine that has failed and closed has ended, at most _EXIT_S."""
        until_s = time.monotonic() + _EXIT_S
        while self._failure is None and not self._stopping:
            if time.monotonic() > until_s:
                reason = engine.failure() or "no reason is known"
                self._failure = ProcessFailed(f"the engine failed, and its process does not end: {reason}")
                self._stop()
            await asyncio.sleep(_WATCH_S)

    async def _keep_running(self, index: int, engine: EngineProcess, on_ready: Callable[[], None]) -> None:
        """Run an API process on a listener; start another one when it ends by itself."""
        failures = 0
        while True:
            api = self._processes[index]
            api.configure(self._config, engine, self._listeners[index], self._limits.fileno())
            messages, status = await api.wait(on_ready)
            if engine.closed_itself():
                await self._wait_for_end(engine)
            if self._stopping:
                if api.ready:  # otherwise it had no requests, and `stop` has killed it
                    self._drained &= status == 0 and ABORTED not in messages
                return
            if self._failure is not None:
                return
            failed = READY not in messages or time.monotonic() - api.configured_s < _MIN_LIFE_S
            failures, ended = failures + 1 if failed else 1, how_it_ended(status)
            if failures >= _MAX_FAILURES:
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
