"""Temporary directories that do not stay behind when their process is killed: the next process removes them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path


class OwnedDirectory:
    """A new temporary directory of this process, which keeps a lock on it. The kernel releases the lock when the
    process ends, however it ends.

    path   the directory
    """

    def __init__(self, prefix: str) -> None:
        """Remove this user's unlocked directories with the same prefix, and make a new one."""
        for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            if (lock := _lock(left)) is not None:
                _remove(left, lock)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix))
            self._lock = _lock(self.path)
            if self._lock is not None and self.path.exists():
                break
            self.remove()  # another process has found it before it was locked

    def remove(self) -> None:
        """Remove the directory. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            _remove(self.path, lock)


def _lock(path: Path) -> int | None:
    """Lock a directory; returns the descriptor that holds the lock. None if it has an owner, or is another user's."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        with contextlib.suppress(OSError):
            if os.fstat(descriptor).st_uid == os.geteuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
        os.close(descriptor)
    return None


def _remove(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
