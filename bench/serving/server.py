"""Starts `sidestream serve` in a separate process, as users do; reads its URL, metrics and memory; and stops it."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from sidestream.errors import SidestreamError

_START_S = 600.0
_STOP_S = 60.0
_TIMEOUT_S = 60.0
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Server:
    """A server that runs until the end of the `with` block, even if the block raises.

    ready_s   seconds from the start of its process to the line that says that it is ready
    """

    def __init__(self, model: str, arguments: Sequence[str]) -> None:
        """Start the server and wait until it is ready. If it does not become ready, raises SidestreamError with the end
        of its log.
        """
        command = [
            sys.executable,
            "-m",
            "sidestream",
            "serve",
            model,
            "--port",
            "0",
            "--log-level",
            "warning",
            *arguments,
        ]
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - lives as long as the process
        started = time.monotonic()
        # A new session, so that Ctrl-C in the terminal does not reach the server's processes, and so that `close` can
        # kill all of them.
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, start_new_session=True)
        try:
            self.url = self._url()
        except BaseException:
            self.close()
            raise
        self.ready_s = time.monotonic() - started

    def _url(self) -> str:
        assert self._process.stdout is not None
        deadline, line = time.monotonic() + _START_S, b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise SidestreamError(
                    f"the server was not ready within {_START_S:g} s; its log ends: {self._last_lines()}"
                )
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                self._process.wait(_STOP_S)
                raise SidestreamError(
                    f"the server ended with code {self._process.returncode} before it was ready: {self._last_lines()}"
                )
            line += piece
        found = re.search(rb"http://\S+", line)
        if found is None:
            raise SidestreamError(f"the server's ready line has no URL: {line[:500]!r}")
        return found[0].decode()

    def _last_lines(self) -> str:
        self._log.seek(0)
        return "\n".join(self._log.read().strip().splitlines()[-20:]) or "it logged nothing"

    def front_end_bytes(self) -> int:
        """Resident memory of all processes of the server except for the engine's process, which is the largest child.
        If the server is a single process: the memory of this process.
        """
        children = sorted(_resident_bytes(pid) for pid in descendants(self._process.pid))
        return _resident_bytes(self._process.pid) + sum(children[:-1])

    def close(self) -> None:
        """Interrupt the server and wait up to a minute for its end. Then kill all of its remaining processes."""
        for sign in (signal.SIGINT, signal.SIGTERM):
            if self._process.poll() is None:
                self._process.send_signal(sign)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_STOP_S / 2)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def fetch(url: str) -> bytes:
    """The body of the reply to a GET request. Raises SidestreamError if the request fails."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as reply:
            body: bytes = reply.read()
            return body
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise SidestreamError(f"{url} cannot be read: {error}") from error


def metric(page: str, name: str) -> float:
    """The value of a metric without labels in a /metrics page. Raises SidestreamError if the page lacks the metric."""
    found = re.search(rf"^{re.escape(name)} (\S+)$", page, re.MULTILINE)
    if found is None:
        raise SidestreamError(f"the server's /metrics has no {name}")
    return float(found[1])


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Inside the block, SIGTERM raises an exception in this process, so that the processes it started are stopped."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def descendants(pid: int) -> list[int]:
    """Process ids of all descendants of a process."""
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (FileNotFoundError, ProcessLookupError):
        return 0  # the process has ended
