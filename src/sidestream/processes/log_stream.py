"""Writes the log to standard error on a thread of its own, so that no other thread waits for the reader of the log."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from datetime import UTC, datetime
from queue import SimpleQueue

from sidestream.errors import ConfigError

_MAX_LINES = 10_000
_FLUSH_S = 1.0
_POLL_S = 0.01


JSON_LAYOUT = "json"
"""In place of a format of log lines: each line is a JSON object."""


class JsonFormatter(logging.Formatter):
    """Makes a JSON object in one line: `time` (UTC), `level`, `logger`, `pid`, `message`, and `exception` if there is
    one. The attribute `fields` of a record (a dict, from `extra`) adds its own.
    """

    def __init__(self) -> None:
        super().__init__(JSON_LAYOUT, validate=False)  # the name, which child processes get in place of a format

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


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
            if lost > told and self._write(self._lost_line(lost - told)):
                told = lost
            self._written += 1

    def _lost_line(self, lost: int) -> str:
        text = f"{lost} lines of the log were lost here: standard error was not read"
        if isinstance(self.formatter, JsonFormatter):
            text = self.format(logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (), None))
        return text + "\n"

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

    layout, dates   formats of lines and of their dates, as in `logging.basicConfig`; or the layout JSON_LAYOUT
    """
    if logging.getLogger().handlers:
        return
    if sys.stderr is None:
        raise ConfigError("standard error is closed, so the log cannot be written: send it to a file, or to /dev/null")
    handler = LogStream(sys.stderr.fileno())
    is_json = layout == JSON_LAYOUT
    handler.setFormatter(
        JsonFormatter() if is_json else logging.Formatter(layout or logging.BASIC_FORMAT, dates or None)
    )
    logging.basicConfig(level=level, handlers=[handler])


def lost_lines() -> int:
    """Number of lines that this process's log has lost since the last call."""
    return sum(handler.take_lost() for handler in logging.getLogger().handlers if isinstance(handler, LogStream))


def logs_json() -> bool:
    """Whether this process's log is in JSON."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)
