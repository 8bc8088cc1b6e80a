"""The directory of a persistent tier: private, shared by engines of one model, never confused with another directory.

All checks that do not depend on the files of blocks are here, so that they apply to every layout of these files:

- **Private.** The directory belongs to this user, and no other user may write to it.
- **Links are not followed**, and only regular files that have one name are opened.
- **A new directory under the same path is another directory.** Files are opened relative to the descriptor of the open
  directory. After `rm -rf`, operations fail, and none of them touches a directory that another process has made
  meanwhile.
- **Described.** sidestream-tier.json gives the format, model and layout. A directory with other values is refused.
- **Set up by one process at a time**: `locked` is a lock (flock) on the directory itself.

`path` may be a link, because the user chooses it. Any thread may call a method; `close` only after the others.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sidestream_kv.errors import ConfigError

TIER_FILE = "sidestream-tier.json"
TABLE_FILE = "sidestream-tier.table"
SEGMENT_PREFIX = "segment-"
TEMPORARY = ".tmp"

# Names in a directory that was made but not described yet.
_FIRST_NAMES = {TIER_FILE + TEMPORARY, "lost+found"}
_OWN_FILES = re.compile(r"(sidestream-tier\.(json|table)|segment-\d{6,})(\.tmp)?|direct\.tmp")
# Errors of open() if the file is not regular: a socket, a directory opened for writing, a link.
_NO_FILE = {errno.ENXIO, errno.EISDIR, errno.ELOOP}
# A description has some hundred bytes. A file of more bytes is not read.
_MOST_DESCRIPTION_BYTES = 64 << 10
# Time that another process has to set up the directory, and the interval of polling.
_PATIENCE_S = 30.0
_POLL_S = 0.01

Description = Mapping[str, int | str]


class NotRegular(OSError):
    """A link, a file with two names, a FIFO, a socket, a device or a directory where a file was expected."""


class TierDirectory:
    """The directory at `path`. Made by `open`.

    fd       open descriptor of the directory, until `close`
    access   how files that exist are opened: os.O_RDWR or os.O_RDONLY
    """

    def __init__(self, path: Path, *, write: bool = True) -> None:
        """Callers use `open` instead. Opens the directory. Raises OSError."""
        self.path = path
        self.access = os.O_RDWR if write else os.O_RDONLY
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # Also closed when the last user has dropped it: a read that still runs may use a directory that was replaced.
        self._ending = weakref.finalize(self, os.close, self.fd)
        self._mutex = threading.RLock()
        self._depth = 0

    @classmethod
    def existing(cls, path: Path, *, write: bool) -> TierDirectory:
        """Open a directory that exists. To look at it (`write` is false), read permission is enough, and it may be
        another user's. Raises ConfigError if there is none, and, to write, as `open` does. Raises OSError.
        """
        if not (path / TIER_FILE).is_file():
            raise ConfigError(f"{path} is no disk directory: it has no file {TIER_FILE}: give the directory of a tier")
        return cls.open(path) if write else cls(path, write=False)

    @classmethod
    def open(cls, path: Path) -> TierDirectory:
        """Open the directory at `path`. If it is missing, it is created.

        Raises ConfigError, and changes nothing, if the path is not a directory, or if the directory is not writable,
        belongs to another user, or may be written by other users. Raises OSError.
        """
        if path.exists() and not path.is_dir():
            raise ConfigError(f"disk directory {path} is not a directory: give another path, or move that file away")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise ConfigError(f"disk directory {path} is not writable: give a directory that this user may write")
        directory = cls(path)
        try:
            check_private(directory.fd, path)
        except BaseException:
            directory.close()
            raise
        return directory

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        self._ending()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes and threads from setting up the directory. Raises ConfigError if one does not end in
        time, or if the directory is not at its path any more.
        """
        with self._mutex:
            if not self._depth:
                self._lock()
            self._depth += 1
            try:
                if not self._is_at_path():
                    raise ConfigError(f"disk directory {self.path} was replaced while it was opened: start again")
                yield
            finally:
                self._depth -= 1
                if not self._depth:
                    fcntl.flock(self.fd, fcntl.LOCK_UN)

    def describe(self, description: Description) -> None:
        """Check the description, or write it if the directory is empty.

        Raises ConfigError, and changes nothing, if the directory has another description, or holds other files. Raises
        OSError.
        """
        content = self.read(TIER_FILE)
        if content is not None:
            _check_description(self.path, parsed(self.path / TIER_FILE, content), description)
            return
        others = sorted(name for name in self.names() if name not in _FIRST_NAMES and not _OWN_FILES.fullmatch(name))
        if others:
            raise ConfigError(
                f"disk directory {self.path} holds other files ({others[0]!r} is one of {len(others)}) "
                f"and no {TIER_FILE}: give an empty or a new directory"
            )
        self._write_description(json.dumps(dict(description), indent=2).encode())

    def names(self) -> list[str]:
        """The names of all files and subdirectories. Raises OSError."""
        with os.scandir(self.fd) as files:
            return [file.name for file in files]

    def own_names(self) -> list[str]:
        """The names of the tier's own files. Raises OSError."""
        return sorted(name for name in self.names() if _OWN_FILES.fullmatch(name))

    def size(self, name: str) -> int:
        """Bytes of a file; -1 if it is missing. Raises OSError."""
        try:
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_size
        except FileNotFoundError:
            return -1

    def bytes_on_disk(self, name: str) -> int:
        """Bytes that a file takes on disk; 0 if it is missing. Raises OSError."""
        try:
            return 512 * os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_blocks
        except FileNotFoundError:
            return 0

    def remove(self, name: str) -> None:
        """Delete a file, if it exists. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def read(self, name: str) -> bytes | None:
        """The first bytes of a file; None if it is missing. Raises OSError."""
        try:
            fd = open_regular(name, os.O_RDONLY, dir_fd=self.fd)
        except FileNotFoundError:
            return None
        with os.fdopen(fd, "rb") as file:
            return file.read(_MOST_DESCRIPTION_BYTES + 1)

    def _is_at_path(self) -> bool:
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self.fd))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _lock(self) -> None:
        deadline_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # rule: directory-is-set-up-by-one-process
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    raise ConfigError(
                        f"disk directory {self.path} has been set up by another process for {_PATIENCE_S:.0f} s: end "
                        f"that process, or give another directory"
                    ) from None
            time.sleep(_POLL_S)

    def _write_description(self, content: bytes) -> None:
        """Other files are written only after it, so a process that is killed before leaves a directory that counts as
        empty. It survives a power loss. Raises OSError.
        """
        temporary = TIER_FILE + TEMPORARY
        self.remove(temporary)
        fd = open_regular(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=self.fd)
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, TIER_FILE, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        os.fsync(self.fd)


def open_regular(name: str, flags: int, *, dir_fd: int) -> int:
    """Open a regular file of an open directory and return its descriptor. Never follows a link, and never waits,
    whereas a plain open of a FIFO waits for its other end. Raises OSError: NotRegular if it is no regular file.
    """
    not_regular = NotRegular(errno.EINVAL, f"{name} is not a regular file")
    try:
        # owner only: KV reveals users' text
        fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
    except OSError as error:
        raise not_regular if error.errno in _NO_FILE else error from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:  # rule: files-with-another-name-are-not-written
        os.close(fd)
        raise not_regular
    return fd


def check_private(fd: int, path: Path) -> None:
    """Raise ConfigError if the directory belongs to another user, or if other users may write to it: they could delete
    or replace its files.
    """
    status, user = os.fstat(fd), os.geteuid()
    if status.st_uid != user:
        raise ConfigError(
            f"disk directory {path} belongs to user {status.st_uid}, but this process runs as user {user}: "
            f"give a directory that does not exist yet, or change the owner (chown -R {user} {path})"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"disk directory {path} has mode {stat.S_IMODE(status.st_mode):04o}, so other users may write to it: "
            f"give a directory that does not exist yet, or remove the permission (chmod -R go-w {path})"
        )


@contextlib.contextmanager
def os_errors_as_refusals(path: Path) -> Iterator[None]:
    """Raise an OSError as a ConfigError that names the directory, the file at fault and the remedy."""
    try:
        yield
    except OSError as error:
        file = "" if error.filename in (None, str(path), path) else f"{error.filename}: "
        raise ConfigError(
            f"disk directory {path} cannot be used: {file}{error.strerror or error}: "
            f"give a directory of a local file system that this user may write"
        ) from error


def parsed(tier_file: Path, content: bytes) -> dict[str, Any]:
    """The description in a file's content. Raises ConfigError if it is damaged."""
    try:
        found = json.loads(content) if len(content) <= _MOST_DESCRIPTION_BYTES else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{tier_file} is damaged: delete the directory, or give another one")
    return found


def _check_description(directory: Path, found: dict[str, Any], wanted: Description) -> None:
    version = found.get("format_version")
    if version != wanted["format_version"]:
        raise ConfigError(
            f"disk directory {directory} has format version {version!r}, but this version of Sidestream uses "
            f"{wanted['format_version']}: give another directory, or delete it (sidestream cache clear {directory})"
        )
    differing = [  # rule: disk-of-other-weights-is-refused
        f"{name} {found.get(name)!r} (here {value!r})" for name, value in wanted.items() if found.get(name) != value
    ]
    if differing:
        as_before = "".join(
            f", or load the model with {name} {found.get(name)}"
            for name in ("dtype", "block_tokens")
            if found.get(name) != wanted[name]
        )
        then, here = str(found.get("fingerprint")), str(wanted.get("fingerprint"))
        if then != here and then.split()[:1] == here.split()[:1]:  # the same weights, in another mode
            as_before += ", or load the model as that fingerprint says"
        raise ConfigError(
            f"disk directory {directory} was written by another model or layout: {', '.join(differing)}: "
            f"give another directory, or delete it{as_before}"
        )
