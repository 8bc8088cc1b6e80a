"""The directory of a persistent tier: private, locked by one engine, and never confused with another directory.

All checks that do not depend on the files of blocks are here, so that they apply to every layout of these files:

- **Private.** The directory belongs to this user, and no other user may write to it.
- **Locked** (flock) until `close` or the end of the process. The lock is on the directory itself, so that deleting a
  file cannot end it.
- **Links are not followed**, and only regular files are opened. No file that exists is opened for writing: files are
  written under a temporary name and renamed.
- **A new directory under the same path is another directory.** Files are opened relative to the descriptor of the
  locked directory. After `rm -rf`, operations fail, and none of them touches a directory that another process has made
  meanwhile.
- **Described.** sidestream-tier.json gives the format, model and layout. A directory with other values is refused.

`path` may be a link, because the user chooses it. Any thread may call a method; `close` only after the others.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sidestream_kv.errors import ConfigError

TIER_FILE = "sidestream-tier.json"
PID_FILE = "sidestream-tier.lock"
TEMPORARY = ".tmp"

# Names in a directory without blocks.
_OWN_NAMES = {PID_FILE, PID_FILE + TEMPORARY, TIER_FILE, TIER_FILE + TEMPORARY, "lost+found"}
# Errors of open() if the file is not regular: a socket, a directory opened for writing, a link.
_NO_FILE = {errno.ENXIO, errno.EISDIR, errno.ELOOP}
# A description has some hundred bytes. A file of more bytes is not read.
_MOST_DESCRIPTION_BYTES = 64 << 10

Description = Mapping[str, int | str]


class NotRegular(OSError):
    """A link, a FIFO, a socket, a device or a directory where a file was expected."""


class TierDirectory:
    """The locked directory at `path`. Made by `open`.

    fd   open descriptor of the directory, until `close`
    """

    def __init__(self, path: Path) -> None:
        """Callers use `open` instead. Opens the directory."""
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # Also closed when the last user has dropped it: a read that still runs may use a directory that was replaced.
        self._ending = weakref.finalize(self, os.close, self.fd)

    @classmethod
    def open(cls, path: Path, description: Description) -> TierDirectory:
        """Lock the directory at `path`. If it is missing or empty, it is created and described.

        Raises ConfigError, and changes nothing, if the path is not a directory, or if the directory is in use, is not
        writable, belongs to another user, may be written by other users, holds other files, or has another description.
        Raises OSError.
        """
        if path.exists() and not path.is_dir():
            raise ConfigError(f"disk directory {path} is not a directory: give another path, or move that file away")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise ConfigError(f"disk directory {path} is not writable: give a directory that this user may write")
        directory = cls(path)
        try:
            check_private(directory.fd, path)
            directory._lock()
            if not directory._is_at_path():
                raise ConfigError(f"disk directory {path} was replaced while it was opened: start again")
            directory._check(description)
            directory._write_own_files(description)
        except BaseException:
            directory.close()
            raise
        return directory

    def close(self) -> None:
        """Unlock the directory and close its descriptor. Idempotent."""
        self._ending()

    def is_in_place(self) -> bool:
        """Whether `path` still leads to this directory, and the directory still has its description. Raises OSError if
        that cannot be found out.
        """
        return self._is_at_path() and _exists(TIER_FILE, dir_fd=self.fd)

    def renewed(self, description: Description) -> TierDirectory:
        """An empty directory for `path`, if this one is not in place; this one with a new description, if only that is
        missing. This one stays locked until its last user has dropped it.

        Raises ConfigError as `open` does, or if the directory that is now at `path` holds files: this engine does not
        know their blocks. Raises OSError.
        """
        if self._is_at_path():
            self._write_own_files(description)
            return self
        directory = TierDirectory.open(self.path, description)
        if others := directory._others():
            directory.close()
            raise ConfigError(
                f"{self.path} now holds files of another engine ({others[0]!r} is one of {len(others)}): "
                f"restart the engine to use them, or delete the directory"
            )
        return directory

    def names(self) -> list[str]:
        """The names of all files and subdirectories. Raises OSError."""
        with os.scandir(self.fd) as files:
            return [file.name for file in files]

    @contextlib.contextmanager
    def subdirectory(self, name: str, *, make: bool = False) -> Iterator[int]:
        """An open descriptor of a subdirectory, which is made if `make` is set. Raises OSError: NotADirectoryError if
        it is a file or a link.
        """
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, dir_fd=self.fd)
        except FileNotFoundError:
            if not make:
                raise
            with contextlib.suppress(FileExistsError):  # another thread has made it
                os.mkdir(name, 0o700, dir_fd=self.fd)
            fd = os.open(name, flags, dir_fd=self.fd)
        try:
            yield fd
        finally:
            os.close(fd)

    def _is_at_path(self) -> bool:
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self.fd))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _lock(self) -> None:
        """A forked child shares the lock; a spawned process does not."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # rule: directory-has-one-owner
        except BlockingIOError:
            holder = (self._read_file(PID_FILE) or b"")[:32].decode("ascii", "replace")
            raise ConfigError(
                f"disk directory {self.path} is in use by {f'process {holder}' if holder else 'another process'}: "
                f"stop that process, or give each engine its own directory"
            ) from None

    def _check(self, description: Description) -> None:
        """Raise ConfigError unless the directory holds the described tier already, or is empty."""
        content = self._read_file(TIER_FILE)
        if content is not None:
            _check_description(self.path, _parsed(self.path / TIER_FILE, content), description)
        elif others := self._others():
            raise ConfigError(
                f"disk directory {self.path} holds other files ({others[0]!r} is one of {len(others)}) "
                f"and no {TIER_FILE}: give an empty or a new directory"
            )

    def _write_own_files(self, description: Description) -> None:
        """Write the files that are missing. Files of blocks are written only after them, so a process that is killed
        before leaves a directory that counts as empty. Raises OSError.
        """
        pid = str(os.getpid()).encode()
        if self._read_file(PID_FILE) != pid:
            with contextlib.suppress(OSError):  # may fail on a full disk, but the pid is only for messages
                self._replace_file(PID_FILE, pid, sync=False)
        if not _exists(TIER_FILE, dir_fd=self.fd):
            self._replace_file(TIER_FILE, json.dumps(dict(description), indent=2).encode(), sync=True)

    def _others(self) -> list[str]:
        """Names in the directory that do not belong to its lock and description."""
        return sorted(set(self.names()) - _OWN_NAMES)

    def _read_file(self, name: str) -> bytes | None:
        """The first bytes of a file; None if it is missing."""
        try:
            fd = open_regular(name, os.O_RDONLY, dir_fd=self.fd)
        except FileNotFoundError:
            return None
        with os.fdopen(fd, "rb") as file:
            return file.read(_MOST_DESCRIPTION_BYTES + 1)

    def _replace_file(self, name: str, content: bytes, *, sync: bool) -> None:
        """Write a file under a temporary name and rename it. `sync`: the file survives a power loss."""
        temporary = name + TEMPORARY
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=self.fd)
        fd = open_regular(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=self.fd)
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.rename(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        if sync:
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
    if not stat.S_ISREG(os.fstat(fd).st_mode):
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


def _exists(name: str, *, dir_fd: int) -> bool:
    try:
        os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _parsed(tier_file: Path, content: bytes) -> dict[str, Any]:
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
            f"{wanted['format_version']}: give another directory, or delete it"
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
        raise ConfigError(
            f"disk directory {directory} was written by another model or layout: {', '.join(differing)}: "
            f"give another directory, or delete it{as_before}"
        )
