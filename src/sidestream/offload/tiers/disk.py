"""The disk tier: one file per KV block, with a checksum, in a directory that one engine uses at a time.

This module reads and writes files. The index (`tiers.index`) decides which entries are served, pinned (protected from
eviction) or evicted next. Before a write, it gives a grant: the right to write one entry. The engine opens and closes
the tier; `write` and `read` run on stream threads, several at once.

    DIRECTORY/sidestream-tier.json        description of the tier: format version, model fingerprint, layout
    DIRECTORY/sidestream-tier.lock        locked (flock) by the engine that uses the directory; contains its pid
    DIRECTORY/3f/3f…c2-000000000000002a   an entry: key-serial, both in hexadecimal
    DIRECTORY/3f/3f…c2-….tmp              an entry being written; leftovers of killed processes are removed at open

An entry is a header and the block. The header fills a page, so that the block starts at a page boundary:

    [0, 8)        magic                    [8, 12)       format version
    [12, 28)      digest of the layout     [28, 44)      key
    [44, 52)      payload bytes            [52, 4080)    zeros
    [4080, 4096)  xxh3-128 of everything else in the file
    [4096, …)     payload

**The directory is the index.** At open, the index is rebuilt from file names and sizes, without reading a payload.
Every write and every read sets the modification time of a file, which gives the order of eviction. If the process dies
after it has renamed a file into place, and before the index has the entry, the file is complete and is served after the
next open.

**No deletion can hit a newer write.** A file name contains the serial number of its write, and is never reused while an
engine uses the directory. So a late unlink of an evicted entry, a read in flight and a new write of the same key use
different files. If a crash leaves two files of one key, open keeps the later file. Both files hold the same bytes,
because a key is a hash of everything that the block's content depends on.

**Entries are not synced with fsync.** After kill -9, no page of a finished write is lost, because the kernel has the
page. A power loss may damage files that were renamed into place; their length or checksum is then wrong, and the block
is computed again. An fsync per block would only make stores slower. sidestream-tier.json is synced, because a directory
without it is refused; it is written only once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import shutil
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from sidestream.config import OffloadConfig
from sidestream.errors import ConfigError, InvariantError, TierCorrupt, TierError, TierFull
from sidestream.kv.layout import KVLayout
from sidestream.offload.tiers.base import Block, TierContext, TierKind
from sidestream.offload.tiers.index import Entry, TierIndex, WriteGrant
from sidestream.types import Key, Tracer

NAME = "disk"
FORMAT_VERSION = 1
KEY_BYTES = 16
HEADER_BYTES = 4096

_MAGIC = b"SIDEKV\r\n"
_FIELDS = struct.Struct("<8sI16s16sQ")
_DIGEST_AT = HEADER_BYTES - 16
_PAGE = 4096

_TIER_FILE = "sidestream-tier.json"
_LOCK_FILE = "sidestream-tier.lock"
_TEMPORARY = ".tmp"
_OURS_AT_BIRTH = {_LOCK_FILE, _TIER_FILE + _TEMPORARY, "lost+found"}  # names allowed in a directory before it is a tier
_ENTRY_NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{16})")
_PREFIX = re.compile(r"[0-9a-f]{2}")  # name of a subdirectory: the first byte of the keys in it

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# errors of open() if the file is not regular: a socket, a directory opened for writing, circular symbolic links
_NO_FILE = {errno.ENXIO, errno.EISDIR, errno.ELOOP}

_log = logging.getLogger(__name__)


class DiskTier:
    """The disk tier in `directory`. Made by `open`."""

    def __init__(self, directory: Path, *, block_bytes: int, identity: bytes, index: TierIndex, lock: int) -> None:
        """Callers use `open` instead. `lock` is the open descriptor of the lock file; the tier closes it."""
        self.directory = directory
        self._root = str(directory)
        self._block_bytes = block_bytes
        self._identity = identity
        self._index = index
        self._lock: int | None = lock

    @classmethod
    def open(
        cls,
        directory: str | Path,
        *,
        layout: KVLayout,
        fingerprint: str,
        capacity_bytes: int,
        tracer: Tracer | None = None,
    ) -> DiskTier:
        """Create or reopen the tier in `directory`, for one model (`fingerprint`) and layout.

        Removes leftovers of killed processes and damaged entries, then evicts entries until the tier takes at most
        `capacity_bytes` (counted in whole pages, including headers). Reads only names and sizes: 70,000 entries take
        about a second.
        Raises ConfigError, and changes nothing, if `directory` is a file, is not writable, is in use, holds other
        files, or was written for another model, layout or format version, or if `capacity_bytes` is less than one
        entry.
        """
        path = Path(directory).expanduser()
        max_entries = capacity_bytes // entry_bytes(layout)
        if max_entries < 1:
            raise ConfigError(
                f"disk_capacity is {capacity_bytes} bytes, but one block of this model takes {entry_bytes(layout)} "
                f"({layout.block_tokens} tokens and a header): raise disk_capacity"
            )
        description: dict[str, int | str] = {
            "format_version": FORMAT_VERSION,
            **layout.describe(),
            "fingerprint": fingerprint,
        }
        try:
            _check_directory(path, description)
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.ExitStack() as on_failure:
                lock = _hold(path)
                on_failure.callback(os.close, lock)
                # Check again, because another engine may have taken the directory meanwhile.
                if not _check_directory(path, description):
                    _write_description(path, description)
                found = _scan(path, file_bytes=HEADER_BYTES + layout.block_bytes, max_entries=max_entries)
                on_failure.pop_all()
        except OSError as error:
            raise ConfigError(
                f"disk directory {path} cannot be used: {error.strerror or error}: "
                f"give a directory of a local file system that this user may write"
            ) from error
        index = TierIndex(
            found.entries,
            max_entries=max_entries,
            entry_bytes=entry_bytes(layout),
            name=NAME,
            next_serial=found.next_serial,
            evictions=found.evictions,
            corrupt=found.corrupt,
            tracer=tracer,
        )
        _log_opened(path, found, held_bytes=index.stats.bytes, capacity_bytes=capacity_bytes)
        identity = xxhash.xxh3_128_digest(json.dumps(description, sort_keys=True).encode())
        return cls(path, block_bytes=layout.block_bytes, identity=identity, index=index, lock=lock)

    @property
    def index(self) -> TierIndex:
        """The keys that the tier holds."""
        return self._index

    def write(self, grant: WriteGrant, payload: Block) -> None:
        """Delete the evicted entry `grant.victim`, then write `payload` (`layout.block_bytes`) as `grant.entry`,
        completely or not at all.

        Waits for I/O: call it on a disk stream's thread. Raises TierFull if the disk, the quota or the file size limit
        leaves no room, and TierError for any other failure. In both cases no file of the entry is left, and the caller
        must abandon the grant.
        """
        view = self._view(payload)  # rule: write-begins
        header = self._header(grant.entry.key)
        header += _digest(header, view)
        try:
            if grant.victim is not None:
                _unlink(self._path(grant.victim))
                grant.victim = None
            _write_whole(self._path(grant.entry), [memoryview(header), view])
        except OSError as error:
            kind = TierFull if error.errno in _NO_ROOM else TierError
            raise kind(
                f"disk tier {self._root} could not store {view.nbytes} bytes: {error.strerror or error}"
            ) from error
        grant.written = True  # rule: entry-counts-as-written-after-its-write

    def read(self, entry: Entry, out: Block) -> None:
        """Read a pinned entry's block directly into `out` (`layout.block_bytes`), and verify every bit of its file.

        Waits for I/O: call it on a disk stream's thread. Raises TierCorrupt if the file is missing, or if its length,
        header or checksum is wrong (the file is then deleted). Raises TierError if reading fails. After either error,
        the content of `out` is undefined, and the caller must forget the entry.
        """
        view = self._view(out)
        path = self._path(entry)
        try:
            fault = self._read_verified(path, entry.key, view)
        except FileNotFoundError as error:
            raise TierCorrupt(f"disk entry {path} is gone") from error
        except _NotRegular:
            fault = "is not a regular file"
        except OSError as error:
            raise TierError(f"disk entry {path} could not be read: {error.strerror or error}") from error
        if fault is not None:
            with contextlib.suppress(OSError):
                _unlink(path)
            raise TierCorrupt(f"disk entry {path} {fault}; {'not deleted' if os.path.lexists(path) else 'deleted'}")

    def close(self) -> None:
        """Delete the files of forgotten entries and unlock the directory. Call it after every `read` and `write` has
        returned. Idempotent.
        """
        if self._lock is None:
            return
        lock, self._lock = self._lock, None
        for entry in self._index.take_doomed():
            with contextlib.suppress(OSError):  # if this fails, the file stays, and the next open finds it again
                _unlink(self._path(entry))
        os.close(lock)
        _log.info("disk tier %s: closed with %d blocks", self._root, len(self._index))

    def _path(self, entry: Entry) -> str:
        name = entry.key.hex()
        return f"{self._root}/{name[:2]}/{name}-{entry.serial:016x}"

    def _header(self, key: Key) -> bytes:
        """The header without its digest. It depends only on the tier and the key, so a reader compares all its
        bytes.
        """
        if len(key) != KEY_BYTES:
            raise InvariantError(f"a key of the disk tier has {KEY_BYTES} bytes, not {len(key)}")
        return _FIELDS.pack(_MAGIC, FORMAT_VERSION, self._identity, key, self._block_bytes).ljust(_DIGEST_AT, b"\0")

    def _view(self, block: Block) -> memoryview:
        view = (block if isinstance(block, memoryview) else block.data).cast("B")
        if view.nbytes != self._block_bytes:
            raise InvariantError(f"a block of the disk tier has {self._block_bytes} bytes, not {view.nbytes}")
        if self._lock is None:
            raise InvariantError(f"disk tier {self._root} is closed")
        return view

    def _read_verified(self, path: str, key: Key, view: memoryview) -> str | None:
        """Read the file into `view`. Returns the fault of the file, or None."""
        header = bytearray(HEADER_BYTES)
        beyond = bytearray(1)
        fd = _open_regular(path, os.O_RDONLY)
        try:
            num_bytes = _read_all(fd, [memoryview(header), view, memoryview(beyond)])
            if num_bytes != HEADER_BYTES + view.nbytes:  # rule: length-is-verified
                return f"is {'longer' if num_bytes > HEADER_BYTES + view.nbytes else 'shorter'} than one block"
            expected = self._header(key)
            if not header.startswith(expected):  # rule: header-is-verified
                return "has the header of another block or tier"
            if header[_DIGEST_AT:] != _digest(bytes(header[:_DIGEST_AT]), view):  # rule: every-bit-is-verified
                return "does not match its checksum"
            with contextlib.suppress(OSError):  # the read succeeds even if its time cannot be recorded
                # Set the time explicitly: the kernel's own time stamp changes only once per timer tick, so a read could
                # get the same time as the write.
                now = time.time_ns()
                os.utime(fd, ns=(now, now))
            return None
        finally:
            os.close(fd)


def entry_bytes(layout: KVLayout) -> int:
    """Bytes that one block takes on disk: header and payload, rounded up to whole pages."""
    return -(-(HEADER_BYTES + layout.block_bytes) // _PAGE) * _PAGE


def _open(config: OffloadConfig, context: TierContext) -> DiskTier | None:
    if config.disk is None:
        return None
    return DiskTier.open(
        config.disk,
        layout=context.layout,
        fingerprint=context.fingerprint,
        capacity_bytes=config.disk_bytes,
        tracer=context.tracer,
    )


KIND = TierKind(NAME, _open)


def _digest(header: bytes, payload: memoryview) -> bytes:
    state = xxhash.xxh3_128(header)
    state.update(payload)  # rule: checksum-covers-the-whole-block
    return state.digest()


class _NotRegular(OSError):
    """A FIFO, a socket, a device or a directory where a file was expected."""


def _open_regular(path: str | Path, flags: int) -> int:
    """Open a regular file and return its descriptor. Never waits, whereas a plain open of a FIFO waits for its other
    end. Raises OSError.
    """
    not_regular = _NotRegular(errno.EINVAL, f"{path} is not a regular file")
    try:
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)  # owner only: KV reveals users' text
    except OSError as error:
        raise not_regular if error.errno in _NO_FILE else error from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise not_regular
    return fd


def _write_whole(path: str, buffers: list[memoryview]) -> None:
    """Write the file under a temporary name and rename it. After a failure, no file is left. Raises OSError."""
    temporary = path + _TEMPORARY  # rule: entry-is-renamed-into-place
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        try:
            fd = _open_regular(temporary, flags)
        except FileNotFoundError:  # the subdirectory of this entry does not exist yet
            Path(path).parent.mkdir(mode=0o700, exist_ok=True)
            fd = _open_regular(temporary, flags)
        try:
            while buffers:
                buffers = _rest(buffers, os.writev(fd, buffers))
        finally:
            os.close(fd)
        os.rename(temporary, path)  # noqa: PTH104  as in _unlink
    except BaseException:
        with contextlib.suppress(OSError):
            _unlink(temporary)
        raise


def _read_all(fd: int, buffers: list[memoryview]) -> int:
    """Read until the buffers are full or the file ends. Returns the number of bytes read."""
    total = 0
    while buffers and (count := os.readv(fd, buffers)):
        total += count
        buffers = _rest(buffers, count)
    return total


def _rest(buffers: list[memoryview], count: int) -> list[memoryview]:
    """The buffers without their first `count` bytes."""
    while buffers and count >= buffers[0].nbytes:
        count -= buffers[0].nbytes
        buffers = buffers[1:]
    return [buffers[0][count:], *buffers[1:]] if count else buffers


def _unlink(path: str) -> None:
    """Delete the file, if it exists. A directory with that name stays: it is not from the tier, and it does no harm,
    because file names are never reused.
    """
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        os.unlink(path)  # noqa: PTH108  a Path per deletion would cost more than the call


def _check_directory(directory: Path, description: dict[str, int | str]) -> bool:
    """Whether the directory holds the described tier already. False if it is missing or empty. Changes nothing.

    Raises ConfigError in any other case.
    """
    if not directory.exists():
        return False
    if not directory.is_dir():
        raise ConfigError(f"disk directory {directory} is not a directory: give another path, or move that file away")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"disk directory {directory} is not writable: give a directory that this user may write")
    tier_file = directory / _TIER_FILE
    if os.path.lexists(tier_file):
        _check_description(directory, _read_description(tier_file), description)
        return True
    if others := sorted({entry.name for entry in directory.iterdir()} - _OURS_AT_BIRTH):
        raise ConfigError(
            f"disk directory {directory} holds other files ({others[0]!r} is one of {len(others)}) "
            f"and no {_TIER_FILE}: give an empty or a new directory"
        )
    return False


def _read_description(tier_file: Path) -> dict[str, Any]:
    with open(_open_regular(tier_file, os.O_RDONLY), "rb") as file:
        content = file.read()
    try:
        found = json.loads(content)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{tier_file} is damaged: delete the directory, or give another one")
    return found


def _check_description(directory: Path, found: dict[str, Any], wanted: dict[str, int | str]) -> None:
    version = found.get("format_version")
    if version != FORMAT_VERSION:
        raise ConfigError(
            f"disk directory {directory} has format version {version!r}, but this version of Sidestream uses "
            f"{FORMAT_VERSION}: give another directory, or delete it"
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


def _hold(directory: Path) -> int:
    """Lock the directory until the returned descriptor is closed or the process dies (also by kill -9).

    A forked child shares the lock; a spawned process does not.
    """
    lock = _open_regular(directory / _LOCK_FILE, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # rule: directory-has-one-owner
        with contextlib.suppress(OSError):  # may fail on a full disk, but the pid is only for messages
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
    except BlockingIOError:
        holder = os.pread(lock, 32, 0).decode("ascii", "replace")
        os.close(lock)
        raise ConfigError(
            f"disk directory {directory} is in use by {f'process {holder}' if holder else 'another process'}: "
            f"stop that process, or give each engine its own directory"
        ) from None
    except BaseException:
        os.close(lock)
        raise
    return lock


def _write_description(directory: Path, description: dict[str, int | str]) -> None:
    """Write sidestream-tier.json, which makes an empty directory a tier. Entries are written only after it, so a
    process that is killed before leaves a directory that counts as empty.
    """
    temporary = directory / (_TIER_FILE + _TEMPORARY)
    temporary.unlink(missing_ok=True)
    with open(_open_regular(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="utf-8") as file:
        json.dump(description, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(directory / _TIER_FILE)
    root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(root)
    finally:
        os.close(root)


@dataclass(frozen=True, slots=True)
class _Found:
    """The content of a directory: entries to serve, least recently used first, and numbers of removed files."""

    entries: list[Entry]
    next_serial: int
    leftovers: int
    corrupt: int
    evictions: int


def _scan(directory: Path, *, file_bytes: int, max_entries: int) -> _Found:
    """Rebuild the index from names, sizes and times; delete files that cannot be served."""
    newest: dict[Key, tuple[int, int, str]] = {}  # key -> (serial, modified, path)
    next_serial = leftovers = corrupt = 0
    for key, serial, file in _entry_files(directory):
        next_serial = max(next_serial, serial + 1)  # rule: serials-go-on-after-a-restart
        status = file.stat(follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            continue  # a directory, which is not from the tier
        twin = newest.get(key)
        if file.name.endswith(_TEMPORARY):  # rule: leftovers-are-deleted
            leftovers += 1
            _unlink(file.path)
        # rule: files-of-the-wrong-length-are-deleted
        elif (
            status.st_size != file_bytes
            or not stat.S_ISREG(status.st_mode)
            or not file.path.endswith(f"/{file.name[:2]}/{file.name}")
        ):
            corrupt += 1
            _unlink(file.path)
        elif twin is not None and twin[0] > serial:  # rule: later-write-of-a-key-wins
            leftovers += 1
            _unlink(file.path)
        else:
            if twin is not None:
                leftovers += 1
                _unlink(twin[2])
            newest[key] = (serial, status.st_mtime_ns, file.path)
    by_age = sorted(
        ((modified, serial, key) for key, (serial, modified, _) in newest.items()), key=lambda item: item[:2]
    )
    surplus = max(0, len(by_age) - max_entries)
    for _, _, key in by_age[:surplus]:
        _unlink(newest[key][2])
    return _Found([Entry(key, serial) for _, serial, key in by_age[surplus:]], next_serial, leftovers, corrupt, surplus)


def _entry_files(directory: Path) -> Iterator[tuple[Key, int, os.DirEntry[str]]]:
    """Key, serial and directory entry of each file that is named like an entry, complete or temporary."""
    for prefix in sorted(path.name for path in directory.iterdir() if _PREFIX.fullmatch(path.name)):
        with os.scandir(directory / prefix) as files:
            for file in files:
                name = _ENTRY_NAME.fullmatch(file.name.removesuffix(_TEMPORARY))
                if name is not None:
                    yield bytes.fromhex(name[1]), int(name[2], 16), file


def _log_opened(directory: Path, found: _Found, *, held_bytes: int, capacity_bytes: int) -> None:
    _log.info("disk tier %s: %d blocks, %d of %d bytes", directory, len(found.entries), held_bytes, capacity_bytes)
    if found.leftovers or found.corrupt or found.evictions:
        message = "disk tier %s: removed %d leftovers of a killed process, %d damaged blocks, %d over capacity"
        _log.info(message, directory, found.leftovers, found.corrupt, found.evictions)
    if (free := shutil.disk_usage(directory).free) < capacity_bytes - held_bytes:
        message = (
            "disk tier %s: %d bytes are free on the disk, but the tier may need %d more: "
            "free some, or lower disk_capacity"
        )
        _log.warning(message, directory, free, capacity_bytes - held_bytes)
