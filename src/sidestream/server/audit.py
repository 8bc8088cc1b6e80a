"""The audit log: a JSON object for each request, in one line of a file. It has no prompts and no answers.

The event loop hands lines to a thread, so a slow disk delays no request; a line that cannot be kept or written is
counted. All API processes append to the same file; a line is one write.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from queue import Full, Queue
from typing import Any

from starlette.types import Scope

from sidestream.server.body import to_json
from sidestream.server.middleware import QUIET_PATHS, RequestRecord, route_of

log = logging.getLogger("sidestream.server")

_MAX_LINES = 10_000
_LOG_PERIOD_S = 60.0  # at most one error in this time
_CLOSE_S = 2.0
_END = b""


class AuditLog:
    """Appends to a file, which is opened for each write, so that it may be moved away.

    model   the served model's name
    count   adds to a counter of the metrics
    """

    def __init__(self, path: str, model: str, count: Callable[[str, float], None]) -> None:
        self._path, self._model, self._count = path, model, count
        self._lines: Queue[bytes] = Queue(_MAX_LINES)
        self._lost = self._counted = 0  # by the writing thread; counted by the event loop
        self._is_cut = False
        self._logged_s = -_LOG_PERIOD_S
        self._thread = threading.Thread(target=self._write_all, name="sidestream-audit", daemon=True)
        self._thread.start()

    def add(self, record: RequestRecord, scope: Scope) -> None:
        """Queue the line of a request that has ended, unless its path is polled. Never blocks, never fails."""
        lost = self._lost - self._counted
        self._counted += lost
        if route_of(scope) not in QUIET_PATHS:
            try:
                self._lines.put_nowait(to_json(self._line(record, scope)) + b"\n")
            except Full:
                lost += 1
        if lost:
            self._count("audit_lines_lost_total", lost)

    def close(self) -> None:
        """Wait until the lines are written, at most a few seconds."""
        with contextlib.suppress(Full):
            self._lines.put(_END, timeout=_CLOSE_S)
            self._thread.join(_CLOSE_S)

    def _line(self, record: RequestRecord, scope: Scope) -> dict[str, Any]:
        now, usage = time.monotonic(), record.usage
        return {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": record.request_id,
            "key": None if record.grant is None else record.grant.key.name,
            "method": scope["method"],
            "endpoint": scope.get("raw_path", b"")[:200].decode("latin-1"),  # percent-encoded
            "model": self._model,
            "status": record.status,
            "outcome": record.outcome,
            "prompt_tokens": usage.prompt_tokens,
            "output_tokens": usage.output_tokens,
            "cached_tokens": usage.cached_by_tier,
            "queue_s": record.queue_s and round(record.queue_s, 6),
            "ttft_s": None if record.first_token is None else round(record.first_token - record.started, 6),
            "duration_s": round(now - record.started, 6),
        }

    def _write_all(self) -> None:
        while (line := self._lines.get()) != _END:
            try:
                self._append(line)
            except OSError as fault:
                self._lost += 1
                if (now := time.monotonic()) - self._logged_s >= _LOG_PERIOD_S:
                    self._logged_s = now
                    log.error(
                        "--audit-log (in Python audit_log): %s cannot be written: %s; lines are lost", self._path, fault
                    )

    def _append(self, line: bytes) -> None:
        file = open_audit_log(self._path)
        try:
            data = b"\n" + line if self._is_cut else line  # behind an incomplete line, which a full disk has left
            written = os.write(file, data)
            self._is_cut = written < len(data) if written else self._is_cut
            if written < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(file)


def open_audit_log(path: str) -> int:
    """Descriptor of the file, for appending. It never waits for the reader of a pipe. Raises OSError."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
