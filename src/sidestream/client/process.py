"""Starts, monitors and closes an engine's process. The owner is the process that starts it. Never uses CUDA."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

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
from sidestream.client.signals import ignore_stop_signals, print_stacks, stop_signals_blocked
from sidestream.config import EngineConfig
from sidestream.errors import EngineStopped, ProcessFailed
from sidestream.frames import FrameEncoder
from sidestream_kv.device.thread_limits import thread_refused

OnStage = Callable[[str, int, int], None]


class Downloads(Protocol):
    """Receives the progress of downloads, like `sidestream.models.catalog.Progress`."""

    def begin(self, stage: str, total_bytes: int | None) -> None:
        """A stage starts."""
        ...

    def reached(self, done_bytes: int) -> None:
        """The current stage's progress."""
        ...


_READ_BYTES = 1 << 16
CLOSE_S = 60.0
"""Maximum time for a process to store all complete blocks and exit, after its drain."""
_SILENCE_S = 15.0
"""Maximum time without an answer of a process that closes; then it is killed."""
_KILL_S = 10.0
"""Maximum time to wait for the exit of a killed process; a GPU driver may delay it."""


def child_environment() -> dict[str, str]:
    """The environment for a child process, so that it imports the same copies of Sidestream's packages."""
    found = map(importlib.util.find_spec, ("sidestream", "sidestream_kv", "sidestream_order"))
    homes = [str(Path(spec.origin).resolve().parents[1]) for spec in found if spec is not None and spec.origin]
    paths = [*homes, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def child_command(module: str, descriptor: int, *, torch: bool = True) -> list[str]:
    """The command that runs `module.main(descriptor)` in a fresh interpreter, without importing the caller's
    `__main__`.

    torch   False: hide torch from the child, as if it was not installed
    """
    return [
        sys.executable,
        "-P",
        "-c",
        f"from sidestream.client.process import run_child; run_child({module!r}, {descriptor}, torch={torch})",
    ]


def start_child(
    module: str, *, torch: bool = True, environment: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process that runs `module.main(descriptor)`, see `child_command`. `descriptor` is its end of a socket
    whose other end is returned. The process ends when that end is closed.

    environment   further environment variables

    Raises ConfigError if the system refuses a new process.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs, stop_signals_blocked():  # until the child handles them
            process = subprocess.Popen(
                child_command(module, theirs.fileno(), torch=torch),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**child_environment(), **(environment or {})},
                process_group=0,  # Ctrl-C at the terminal reaches the owner only
            )
    except BaseException as error:
        ours.close()
        if isinstance(error, BlockingIOError):
            raise thread_refused() from error
        raise
    return process, ours


def run_child(module: str, descriptor: int, *, torch: bool) -> None:
    """In the child: ignore stop signals, import `module` (which may take seconds), and run its `main`.

    torch   False: hide torch, as if it was not installed. Otherwise, transformers would import torch even for a
            tokenizer, which takes 3 s and 0.3 GB

    Signals are ignored, because a service manager sends them to all processes of a server, and the owner must drain
    requests before it ends this process.
    """
    os.set_inheritable(descriptor, False)
    end_with_owner(descriptor)
    print_stacks()
    ignore_stop_signals()
    if not torch:
        sys.modules["torch"] = None  # type: ignore[assignment]
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # silences "PyTorch was not found"
    importlib.import_module(module).main(descriptor)


def how_it_ended(status: int) -> str:
    """A process's exit status, in words."""
    if status >= 0:
        return f"it exited with status {status}"
    with contextlib.suppress(ValueError):
        return f"it was killed by {signal.Signals(-status).name}"
    return f"it was killed by signal {-status}"


def end_with_owner(descriptor: int) -> None:
    """Exit this process as soon as the owner's end of the socket is closed, however the owner ended.

    KV on disk is always consistent, so the exit loses only blocks that were not stored yet.
    """

    def watch() -> None:
        # macOS has no POLLRDHUP, but reports a closed peer as POLLHUP, which need not be requested.
        poll = select.poll()
        poll.register(descriptor, getattr(select, "POLLRDHUP", 0))
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, name="sidestream-owner", daemon=True).start()


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
        self._process, self._control = start_child("sidestream.engine_process")
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


def plain(value: Any) -> Any:
    """A configuration as values that msgpack can encode: mappings, strings and numbers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return str(value) if isinstance(value, Path) else value


def config_of(values: Mapping[str, Any]) -> EngineConfig:
    """The EngineConfig that `values` describe: the inverse of `plain`."""
    from sidestream.config import KVEventsConfig, SpeculativeConfig
    from sidestream_kv.config import OffloadConfig

    kinds = {"kv_events": KVEventsConfig, "offload": OffloadConfig, "speculative": SpeculativeConfig}
    return EngineConfig(
        **{
            name: kinds[name](**value) if name in kinds and value is not None else value
            for name, value in values.items()
        }
    )


def _logging() -> tuple[int, tuple[str, str] | None]:
    """Sidestream's log level in this process, and the log format if one is set. The engine's process uses both."""
    root = logging.getLogger()
    for handler in root.handlers:
        formatter = handler.formatter
        if formatter is not None and formatter._fmt is not None:
            return logging.getLogger("sidestream").getEffectiveLevel(), (formatter._fmt, formatter.datefmt or "")
    return logging.getLogger("sidestream").getEffectiveLevel(), None
