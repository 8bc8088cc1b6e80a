"""The directory of `/v1/files` and `/v1/batches`: uploaded files, batches, and answers. It outlives the server.

    files/ID, files/ID.json         content and OpenAI's object of a file; the object is written last
    batches/ID.json                 OpenAI's object of a batch. The request for a batch writes it once, then the runner
    batches/ID.cancel               asks the runner to cancel the batch
    batches/ID.answers              answers so far, see `batch_files.Answers`
    runner.lock                     locked by the API process that runs the batches

All API processes use it; each file is replaced whole. Used on any thread; calls may wait for the disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from sidestream.errors import ConfigError
from sidestream.server.errors import ApiError

Json = dict[str, Any]
Kind = Literal["files", "batches"]

MOST_FILE_BYTES = 512 << 20
MOST_REQUESTS = 50_000
_MOST_BYTES = 10 << 30
_MOST = {"files": 10_000, "batches": 1_000}
_ID = {"files": re.compile(r"file-[0-9a-f]{32}"), "batches": re.compile(r"batch_[0-9a-f]{32}")}
_UPLOAD_S = 3600.0
"""Age at which a file without its object is the rest of an upload that has failed."""
ACTIVE = ("validating", "in_progress", "finalizing")


def new_id(kind: Kind) -> str:
    """An id of a file or a batch."""
    return f"{'file-' if kind == 'files' else 'batch_'}{uuid.uuid4().hex}"


class BatchStore:
    """The directory.

    most_bytes   bound of all its bytes, beyond which nothing is uploaded, and a running batch fails; None: 10 GiB
    """

    def __init__(self, directory: Path, most_bytes: int | None) -> None:
        """Make the directory. Raises ConfigError."""
        self.directory, self.most_bytes = directory, _MOST_BYTES if most_bytes is None else most_bytes
        try:
            for kind in _MOST:
                (directory / kind).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as fault:
            raise ConfigError(f"batch_directory is {directory}: {fault.strerror}; give another path") from fault

    def path(self, kind: Kind, name: str, suffix: str = "") -> Path:
        """Path of a file with a valid id."""
        return self.directory / kind / f"{name}{suffix}"

    def all(self, kind: Kind, owner: str | None = None) -> list[Json]:
        """The objects of this owner, or of all, the newest first."""
        found = [one for path in (self.directory / kind).glob("*.json") if (one := _read(path))]
        found = [one for one in found if owner in (None, one["owner"])]
        return sorted(found, key=lambda one: (one["created_at"], one["id"]), reverse=True)

    def get(self, kind: Kind, name: str, owner: str | None) -> Json:
        """One object. Raises ApiError (404) unless it exists and is the owner's."""
        one = _read(self.path(kind, name, ".json")) if _ID[kind].fullmatch(name) else None
        if one is None or owner not in (None, one["owner"]):
            raise ApiError(404, f"no {'file' if kind == 'files' else 'batch'} {name[:64]!r}", code="not_found")
        if kind == "batches" and one["status"] in ACTIVE and self.is_cancelled(name):
            one["status"] = "cancelling"
        return one

    def put(self, kind: Kind, one: Json) -> None:
        """Write an object."""
        path = self.path(kind, one["id"], ".json")
        hidden = path.with_suffix(f".{uuid.uuid4().hex}.tmp")
        try:
            with hidden.open("wb") as file:
                file.write(json.dumps(one).encode())
                file.flush()
                os.fsync(file.fileno())
            hidden.replace(path)
        except BaseException:
            hidden.unlink(missing_ok=True)
            raise

    def add_file(self, name: str, filename: str, purpose: str, owner: str) -> Json:
        """Publish the content at `path("files", name)`, and return its object."""
        size = self.path("files", name).stat().st_size
        one = {"id": name, "object": "file", "bytes": size, "created_at": int(time.time()), "filename": filename}
        one |= {"purpose": purpose, "status": "processed", "owner": owner}
        self.put("files", one)
        return one

    def delete_file(self, name: str, owner: str | None) -> None:
        """Delete a file. Raises ApiError: 404, or 400 if a batch that has not ended reads it."""
        self.get("files", name, owner)
        for batch in self.all("batches"):
            if batch["status"] in ACTIVE and batch["input_file_id"] == name:
                raise ApiError(400, f"the file {name} is in use by {batch['id']}: cancel that first", code="in_use")
        for suffix in (".json", ""):
            self.path("files", name, suffix).unlink(missing_ok=True)

    def check_room(self, kind: Kind, size: int = 0) -> None:
        """Raise ApiError if there is no room for one more, of `size` bytes. Removes batches that have ended, the oldest
        first, and rests of uploads.
        """
        ended = [one for one in self.all(kind) if kind == "batches" and one["status"] not in ACTIVE]
        count = sum(1 for _ in (self.directory / kind).glob("*.json"))
        for one in ended[::-1][: max(0, count + 1 - _MOST[kind])]:
            for suffix in (".cancel", ".answers", ".json"):
                self.path(kind, one["id"], suffix).unlink(missing_ok=True)
            count -= 1
        if count >= _MOST[kind]:
            raise ApiError(400, f"this server keeps {_MOST[kind]} {kind}: delete some, or wait", code="too_many")
        if (held := self.size()) + size > self.most_bytes:
            message = f"{held} bytes of files are kept, the bound is {self.most_bytes}: delete files"
            raise ApiError(413, f"{message}, or raise max_batch_directory_bytes", code="batch_directory_full")

    def size(self) -> int:
        """Bytes of all files."""
        total = 0
        for kind in _MOST:
            for entry in os.scandir(self.directory / kind):
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat()
                    is_rest = kind == "files" and "." not in entry.name and not Path(f"{entry.path}.json").exists()
                    if is_rest and time.time() - found.st_mtime > _UPLOAD_S:
                        Path(entry.path).unlink(missing_ok=True)
                    else:
                        total += found.st_size
        return total

    def cancel(self, name: str, owner: str | None) -> Json:
        """Ask the runner to cancel a batch. Raises ApiError: 404, or 400 for a batch that has ended."""
        one = self.get("batches", name, owner)
        if one["status"] not in (*ACTIVE, "cancelling"):
            raise ApiError(400, f"the batch {name} has ended: it is {one['status']}", code="batch_ended")
        self.path("batches", name, ".cancel").touch()
        return self.get("batches", name, owner)

    def is_cancelled(self, name: str) -> bool:
        """Whether somebody has asked to cancel the batch."""
        return self.path("batches", name, ".cancel").exists()


def public(one: Json) -> Json:
    """The object as clients see it."""
    return {name: value for name, value in one.items() if name != "owner"}


def page_of(found: list[Json], *, after: str | None, limit: int) -> Json:
    """One page of a list, in OpenAI's form."""
    ids = [one["id"] for one in found]
    start = ids.index(after) + 1 if after in ids else 0
    page = [public(one) for one in found[start : start + limit]]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return {"object": "list", "data": page, **ends, "has_more": len(found) > start + limit}


def lines_of(path: Path) -> Iterator[bytes]:
    """The complete lines of a file; none if it does not exist."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        yield from (line for line in file if line.endswith(b"\n"))


def _read(path: Path) -> Json | None:
    try:
        found: Json = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found
