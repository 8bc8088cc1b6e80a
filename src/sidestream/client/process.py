"""An engine's process as its owner sees it: started with a fresh interpreter, watched, attached to, closed. CUDA is
never touched here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from sidestream.client.messages import (
    Attach,
    Close,
    Facts,
    Packer,
    Progress,
    Reply,
    Start,
    Started,
    Status,
    from_engine,
)
from sidestream.config import EngineConfig
from sidestream.errors import EngineStopped, ProcessFailed

Telling = Callable[[str, int, int], None]


class Downloads(Protocol):
    """Hears how far a download is: `sidestream.models.catalog.Progress`."""

    def begin(self, stage: str, total_bytes: int | None) -> None:
        """A stage starts."""
        ...

    def reached(self, done_bytes: int) -> None:
        """The stage has come so far."""
        ...


_READ_BYTES = 1 << 16
_CLOSE_S = 60.0
"""How long a process may take to end beyond what it was given to drain: it stores what is complete."""
_KILL_S = 10.0
"""How long the end of a killed process is waited for: a driver may hold it up."""


def child_environment() -> dict[str, str]:
    """The environment of a process that shall import this same package, wherever it was imported from."""
    home = str(Path(__file__).resolve().parents[2])
    paths = [home, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def child_command(module: str, descriptor: int) -> list[str]:
    """A fresh interpreter that runs `module.main` on an inherited descriptor. The caller's `__main__` is not imported
    again.
    """
    return [
        sys.executable,
        "-P",
        "-c",
        f"from sidestream.client.process import run_child; run_child({module!r}, {descriptor})",
    ]


def run_child(module: str, descriptor: int) -> None:
    """In the child: import `module`, which may take seconds, and run its `main`. From here on, the owner alone ends
    this process.

    A service manager that stops a server signals all its processes. Here that would abort the requests which the owner
    drains.
    """
    os.set_inheritable(descriptor, False)
    end_with_owner(descriptor)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(
            number, lambda number, frame: None
        )  # unlike SIG_IGN, processes that this one starts do not inherit it
        signal.siginterrupt(number, False)
    importlib.import_module(module).main(descriptor)


def how_it_ended(status: int) -> str:
    """A process's exit status in words."""
    if status >= 0:
        return f"it exited with status {status}"
    with contextlib.suppress(ValueError):
        return f"it was killed by {signal.Signals(-status).name}"
    return f"it was killed by signal {-status}"


def end_with_owner(descriptor: int) -> None:
    """From now on, end this process at once when the other end of that socket is closed, however its process ended.

    What rests on disk is complete at any moment, so nothing is lost but what was not stored yet.
    """

    def watch() -> None:
        # macOS has no POLLRDHUP and reports a closed peer as POLLHUP, which is always reported.
        poll = select.poll()
        poll.register(descriptor, getattr(select, "POLLRDHUP", 0))
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, name="sidestream-owner", daemon=True).start()


class EngineProcess:
    """An engine in a process of its own. The process ends when its owner does, however that ends.

    facts   what front ends must know of it
    """

    def __init__(
        self,
        model: str,
        config: EngineConfig,
        *,
        timeline: str | Path | None = None,
        check_order: bool = False,
        progress: Downloads | None = None,
        tell: Telling = lambda what, done, total: None,
    ) -> None:
        """Start it, and wait until it serves. Raises what made it fail (ConfigError, ModelError, …); then no process is
        left.
        """
        self._lock = threading.Lock()  # orders what is sent
        self._packer = Packer()
        self._receiving = threading.Lock()  # guards the rest
        self._unpacker = from_engine()
        self._inbox: list[Any] = []
        self._reply: Reply | None = None
        self._failed: Status | None = None
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                child_command("sidestream.engine_process", theirs.fileno()),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=child_environment(),
                process_group=0,  # an interrupt at the terminal is for its owner, who drains
            )
        try:
            self._send(_start(model, config, timeline, check_order))
            self.facts = self._wait_for_start(progress, tell)
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ended(self, *, timeout_s: float = 0.0) -> str | None:
        """How the process ended, in words; None while it runs."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        with contextlib.suppress(OSError):  # closed
            self._control.setblocking(False)
            while self._receive() is not None:
                pass
        return how_it_ended(status) if self._failed is None else f"the engine failed: {self._failed.detail}"

    def why_gone(self) -> str:
        """How it ended, for whoever has lost the connection to it: a moment later its exit is known."""
        return self.ended(timeout_s=0.5) or "it closed the connection"

    def attach(self) -> socket.socket:
        """A new connection to it, for one front end. Raises EngineStopped when it has ended."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            try:
                socket.send_fds(self._control, [self._packer.pack(Attach())], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise EngineStopped(f"the engine's process has ended: {self.why_gone()}") from error
        return ours

    def close(self, *, drain_s: float = 0.0) -> None:
        """Let requests go on for `drain_s`, have it store what is complete, and wait for its end. Idempotent; harmless
        when it has ended.

        Raises what closing the engine raised, such as RaceError, and ProcessFailed when the process ended, or hung,
        before it was done.
        """
        if self._process.poll() is not None:
            self._control.close()
            return
        patience_s = drain_s + _CLOSE_S
        hung = f"it did not end within {patience_s:g} s and was killed"
        ended: str | None = None
        try:
            self._send(Close(drain_s))
            self._control.settimeout(patience_s)
            while self._receive() is not None:
                pass
            ended = self.ended(timeout_s=5.0)
        except TimeoutError:
            pass
        except OSError:  # it does not read any more
            ended = self.ended(timeout_s=5.0)
        finally:
            self.kill()
        if self._reply is None:
            raise ProcessFailed(f"the engine's process was to store what is complete: {ended or hung}")
        if self._reply.failure is not None:
            raise self._reply.failure.error()

    def kill(self) -> None:
        """End it at once. Nothing is lost but what was not stored yet. Signal handlers may call it."""
        self._process.kill()
        # With a time limit, Popen holds no lock while it waits: a signal handler on this same thread may wait, too.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_S)
        self._control.close()

    def _send(self, message: Start | Close) -> None:
        with self._lock:
            self._control.sendall(self._packer.pack(message))

    def _receive(self) -> Any:
        """The next message; None when the process has ended. Keeps what it says of its end."""
        with self._receiving:
            while not self._inbox:
                data = self._control.recv(_READ_BYTES)
                if not data:
                    return None
                self._inbox.extend(self._unpacker.feed(data))
            message = self._inbox.pop(0)
            match message:
                case Reply():
                    self._reply = message
                case Status(status="failed"):
                    self._failed = message
            return message

    def _wait_for_start(self, progress: Downloads | None, tell: Telling) -> Facts:
        stage = None
        while True:
            match self._receive():
                case Progress(what, done, total, True):
                    if progress is not None:
                        if what != stage:
                            stage = what
                            progress.begin(what, total or None)
                        progress.reached(done)
                case Progress(what, done, total, False):
                    tell(what, done, total)
                case Started(facts):
                    return facts
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
    """A configuration as values that can be packed: mappings, texts and numbers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return str(value) if isinstance(value, Path) else value


def config_of(values: Mapping[str, Any]) -> EngineConfig:
    """The configuration that `plain` made these of."""
    from sidestream.config import OffloadConfig, SpeculativeConfig

    kinds = {"offload": OffloadConfig, "speculative": SpeculativeConfig}
    return EngineConfig(
        **{
            name: kinds[name](**value) if name in kinds and value is not None else value
            for name, value in values.items()
        }
    )


def _logging() -> tuple[int, tuple[str, str] | None]:
    """The level at which Sidestream logs here, and the format, when one was set: the other process logs alike."""
    root = logging.getLogger()
    for handler in root.handlers:
        formatter = handler.formatter
        if formatter is not None and formatter._fmt is not None:
            return logging.getLogger("sidestream").getEffectiveLevel(), (formatter._fmt, formatter.datefmt or "")
    return logging.getLogger("sidestream").getEffectiveLevel(), None
