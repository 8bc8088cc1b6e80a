"""Keeps responses of OpenAI's Responses API, with their input, for requests that continue them.

All API processes of a server share one directory, because a client's next request may reach another process. Used on
any thread; the event loop calls it on another one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import tempfile
import uuid
import weakref
from contextlib import suppress
from pathlib import Path

from sidestream.server.errors import ApiError
from sidestream.server.options import ServerOptions

log = logging.getLogger("sidestream.server")

_NAME = re.compile(r"resp_[0-9a-f]{32}")


def new_directory() -> str:
    """Path of a directory for responses. The first response makes it; the caller removes it at the end."""
    return f"{tempfile.gettempdir()}/sidestream-responses-{uuid.uuid4().hex}"


class ResponseStore:
    """A file for each response, which its owner alone finds. Beyond the bounds of `options`, the least recently used
    ones are removed.

    directory   as of `new_directory`; None: a new one, which is removed with the store
    """

    def __init__(self, options: ServerOptions, directory: str | None = None) -> None:
        if directory is None:
            directory = new_directory()
            weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)
        self._directory = Path(directory)
        self._most = options.max_stored_responses
        self._most_bytes = 64 << 20 if options.max_stored_bytes is None else options.max_stored_bytes
        self._has_failed = False

    def put(self, name: str, data: bytes, *, owner: str = "") -> None:
        """Keep a response for an owner. The first failure of the file system is logged, and no failure raised."""
        try:
            if self._most:
                self._directory.mkdir(mode=0o700, exist_ok=True)
                path = self._path(name, owner)
                hidden = path.with_name(f".{path.name}")
                hidden.write_bytes(data)
                hidden.replace(path)
                self._remove_oldest()
        except OSError as failure:
            if not self._has_failed:
                log.error("responses cannot be stored, so requests cannot continue them: %s", failure)
            self._has_failed = True

    def get(self, name: str, *, owner: str = "", param: str | None = None) -> bytes:
        """The data of a response of this owner. Raises ApiError: 404, or 400 if a request names the response in the
        field `param`.
        """
        if _NAME.fullmatch(name):
            with suppress(OSError):
                os.utime(self._path(name, owner))  # the time of its last use
                return self._path(name, owner).read_bytes()
        message = (
            f"no response {name[:64]!r} is stored: this server keeps the last {self._most} responses, at most "
            f"{self._most_bytes} bytes with their conversations, until it stops, and none with store false; "
            "send the whole conversation as input, or raise max_stored_responses and max_stored_bytes"
        )
        status, code = (400, "previous_response_not_found") if param else (404, "response_not_found")
        raise ApiError(status, message, param=param, code=code)

    def delete(self, name: str, *, owner: str = "") -> None:
        """Remove a response. Raises ApiError as `get` does."""
        self.get(name, owner=owner)
        self._path(name, owner).unlink(missing_ok=True)

    def _path(self, name: str, owner: str) -> Path:
        return self._directory / (hashlib.sha256(owner.encode()).hexdigest()[:16] + name if owner else name)

    def _remove_oldest(self) -> None:
        found = []
        for entry in os.scandir(self._directory):
            with suppress(FileNotFoundError):  # another process has removed it
                found.append((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path))
        size = sum(file[1] for file in found)
        for number, (_, file_bytes, path) in enumerate(sorted(found)):
            if len(found) - number <= self._most and size <= self._most_bytes:
                return
            Path(path).unlink(missing_ok=True)
            size -= file_bytes
