"""Starts, monitors and closes an engine's process. The owner is the process that starts it. Never uses CUDA."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sidestream.client.messages import (
    Attach,
    Close,
    EngineInfo,
    Ping,
    Progress,
    Reply,
    Start,
    Started,
    Status,
    decoder_of_outputs,
)
from sidestream.client.pulse import PULSE_S, Pulse
from sidestream.config import EngineConfig
from sidestream.errors import EngineStopped, ProcessFailed
from sidestream.models.catalog import Progress as Downloads
from sidestream.processes.child import CLOSE_S, how_it_ended, plain, start_child
from sidestream.processes.frames import FrameEncoder

OnStage = Callable[[str, int, int], None]


_READ_BYTES = 1 << 16
_SILENCE_S = 15.0
"""Maximum time without an answer of a process that closes; then it is killed."""
_KILL_S = 10.0
"""Maximum time to wait for the exit of a killed process; a GPU driver may delay it."""


class EngineProcess:
    """An engine in a separate process, which ends when its owner ends, for any reason.

    info   the engine's constants, for front ends
    """

    def __init__(
        self,
        model: str,
        config: EngineConfig,
        *,
        timeline: str | Path | None = None,
        check_order: bool = False,
        progress: Downloads | None = None,
        on_stage: OnStage = lambda stage, done, total: None,
    ) -> None:
        """Start the process and wait until the engine serves. If the start fails, raises the child's error
        (ConfigError, ModelError, …) after the process has ended.
        """
        self._lock = threading.Lock()  # orders sent messages
        self._encoder = FrameEncoder()
        self._receiving = threading.Lock()  # guards the attributes below
        self._decoder = decoder_of_outputs()
        self._inbox: list[Any] = []
        self._reply: Reply | None = None
        self._failed: Status | None = None
        self._pulse = Pulse(lambda: self._send(Ping()))
        self._process, self._control = start_child("sidestream.client.engine_main")
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended, as the next line finds out
                self._send(_start(model, config, timeline, check_order))
            self.info = self._wait_for_start(progress, on_stage)
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def ended(self, *, timeout_s: float = 0.0) -> str | None:
        """A text that says how the process ended; None while it runs."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        self._read_received()
        return how_it_ended(status) if self._failed is None else f"the engine failed: {self._failed.detail}"

    def closed_itself(self) -> bool:
        """True once the engine has failed and closed. Its process ends next and serves no new connection."""
        self._read_received()
        return self._reply is not None  # the answer to `Close`, which was not sent yet

    def failure(self) -> str:
        """Why the engine failed, as far as it has said; empty: it has not."""
        self._read_received()
        return "" if self._failed is None else self._failed.detail

    def stalled(self) -> bool:
        """Whether the process has not answered for the engine's `watchdog_timeout_s`. Each call may ask it, so call
        this again and again.
        """
        self._read_received()
        with contextlib.suppress(OSError):  # the process has ended
            self._pulse.ask()
        return self._pulse.is_silent(self.info.watchdog_timeout_s, self._read_received)

    def why_gone(self) -> str:
        """Call this after the connection was lost: a text that says how the process ended. Waits up to half a second
        for the exit status.
        """
        return self.ended(timeout_s=0.5) or "it closed the connection"

    def attach(self) -> socket.socket:
        """A new connection for one front end. Raises EngineStopped if the process has ended."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            try:
                socket.send_fds(self._control, [self._encoder.encode(Attach())], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise EngineStopped(f"the engine's process has ended: {self.why_gone()}") from error
        return ours

    def close(self, *, drain_s: float = 0.0) -> None:
        """Let requests run for `drain_s`, store all complete blocks, and wait for the exit. Idempotent.

        Raises the error with which the engine closed, such as RaceError. Raises ProcessFailed if the process ended or
        hung before the engine was closed.
        """
        if self._process.poll() is not None:
            self._control.close()
            return
        try:
            ended = self._wait_for_close(drain_s)
        finally:
            self.kill()
        if self._reply is None:
            raise ProcessFailed(f"the engine's process ended before it stored all complete blocks: {ended}")
        if self._reply.failure is not None:
            raise self._reply.failure.error()

    def _wait_for_close(self, drain_s: float) -> str:
        """Ask the process to close, and wait. Returns how it ended, or why it must be killed."""
        timeout_s = drain_s + CLOSE_S
        until_s = time.monotonic() + timeout_s
        self._control.settimeout(PULSE_S)
        with contextlib.suppress(OSError):  # the process has closed its end
            self._send(Close(drain_s))
            while time.monotonic() < until_s:
                try:
                    if self._receive() is None:
                        break
                except TimeoutError:
                    pass
                if self._reply is None:  # afterwards it answers no more, and may take seconds to free its memory
                    self._pulse.ask()
                    if self._pulse.is_silent(_SILENCE_S):
                        return f"it did not answer for {_SILENCE_S:g} s and was killed"
            else:
                return f"it did not end within {timeout_s:g} s and was killed"
        return self.ended(timeout_s=5.0) or "it closed its connection, did not end, and was killed"

    def kill(self) -> None:
        """Kill the process. Signal handlers may call it. Only blocks that were not stored yet are lost."""
        self._process.kill()
        # With a timeout, Popen holds no lock while it waits, so a signal handler on the same thread can also wait.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_S)
        self._control.close()

    def _send(self, message: Start | Close | Ping) -> None:
        with self._lock:
            self._control.sendall(self._encoder.encode(message))

    def _read_received(self) -> None:
        """Read all messages that have arrived, without a wait."""
        with contextlib.suppress(OSError):  # nothing more has arrived, or the socket is closed
            while self._receive(socket.MSG_DONTWAIT) is not None:
                pass

    def _receive(self, flags: int = 0) -> Any:
        """The next message; None if the process has ended. A `Reply` and a failed `Status` are also stored."""
        with self._receiving:
            while not self._inbox:
                try:
                    data = self._control.recv(_READ_BYTES, flags)
                except ConnectionResetError:  # it was killed before it had read all messages
                    data = b""
                if not data:
                    return None
                self._pulse.heard()
                self._inbox.extend(self._decoder.feed(data))
            message = self._inbox.pop(0)
            match message:
                case Ping():
                    self._pulse.answered()
                case Reply():
                    self._reply = message
                case Status(status="failed"):
                    self._failed = message
            return message

    def _wait_for_start(self, progress: Downloads | None, on_stage: OnStage) -> EngineInfo:
        begun = None
        while True:
            match self._receive():
                case Progress(stage, done, total, True):
                    if progress is not None:
                        if stage != begun:
                            begun = stage
                            progress.begin(stage, total or None)
                        progress.reached(done)
                case Progress(stage, done, total, False):
                    on_stage(stage, done, total)
                case Started(info):
                    return info
                case Reply(_, failure) if failure is not None:
                    raise failure.error()
                case None:
                    ended = self.ended(timeout_s=5.0) or "it closed the connection"
                    raise ProcessFailed(f"the engine's process ended while it started: {ended}; its messages are above")


def _start(model: str, config: EngineConfig, timeline: str | Path | None, check_order: bool) -> Start:
    level, layout = _logging()
    return Start(
        model, plain(config), None if timeline is None else str(Path(timeline).absolute()), check_order, level, layout
    )


def _logging() -> tuple[int, tuple[str, str] | None]:
    """Sidestream's log level in this process, and the log format if one is set. The engine's process uses both."""
    root = logging.getLogger()
    for handler in root.handlers:
        formatter = handler.formatter
        if formatter is not None and formatter._fmt is not None:
            return logging.getLogger("sidestream").getEffectiveLevel(), (formatter._fmt, formatter.datefmt or "")
    return logging.getLogger("sidestream").getEffectiveLevel(), None
