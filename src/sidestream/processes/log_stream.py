"""Writes the log to standard error on a thread of its own, so that no other thread waits for the reader of the log."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from queue import SimpleQueue

from sidestream.errors import ConfigError

_MAX_LINES = 10_000
_FLUSH_S = 1.0
_POLL_S = 0.01


class LogStream(logging.Handler):
    """A handler that never blocks. Beyond `max_lines` unwritten lines, it counts further lines as lost, and logs their
    number when lines are read again.
    """

    def __init__(self, descriptor: int, max_lines: int = _MAX_LINES) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._max_lines = max_lines
        self._lines: SimpleQueue[str] = SimpleQueue()  # its `put` may also be called in a signal handler
        self._queued = 0
        self._written = 0  # by the writing thread
        self._lost = 0
        self._unwritable = 0  # by the writing thread
        self._reported_lost = 0
        threading.Thread(target=self._write_all, name="sidestream-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line, or count it as lost."""
        if self._lines.qsize() >= self._max_lines:
            self._lost += 1
            return
        try:
            self._lines.put(self.format(record) + "\n")
            self._queued += 1
        except Exception:  # of a log call's arguments
            self._lost += 1

    def take_lost(self) -> int:
        """Number of lines that were lost since the last call."""
        lost = self._lost + self._unwritable
        new, self._reported_lost = lost - self._reported_lost, lost
        return new

    def flush(self) -> None:
        """Wait until all lines are written, at most one second. `logging` calls it when the process exits."""
        until_s = time.monotonic() + _FLUSH_S
        while self._written < self._queued and time.monotonic() < until_s:
            time.sleep(_POLL_S)

    def _write_all(self) -> None:
        told = 0
        while True:
            if not self._write(self._lines.get()):
                self._unwritable += 1
            lost = self._lost
            if lost > told and self._write(
                f"{lost - told} lines of the log were lost here: standard error was not read\n"
            ):
                told = lost
            self._written += 1

    def _write(self, line: str) -> bool:
        data = line.encode("utf-8", "backslashreplace")
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:  # the reader has closed the pipe, or the disk is full
            return False
        return True


def start_logging(level: int | str, layout: str | None = None, dates: str | None = None) -> None:
    """Send the log to standard error, unless a handler is set. Raises ConfigError if standard error is closed.

    layout, dates   formats of lines and of their dates, as in `logging.basicConfig`
    """
    if logging.getLogger().handlers:
        return
    if sys.stderr is None:
        raise ConfigError("standard error is closed, so the log cannot be written: send it to a file, or to /dev/null")
    handler = LogStream(sys.stderr.fileno())
    logging.basicConfig(level=level, format=layout or logging.BASIC_FORMAT, datefmt=dates or None, handlers=[handler])


def lost_lines() -> int:
    """Number of lines that this process's log has lost since the last call."""
    return sum(handler.take_lost() for handler in logging.getLogger().handlers if isinstance(handler, LogStream))
