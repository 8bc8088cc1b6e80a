"""The disk tier: one file per KV block, with a checksum, in a directory that one engine uses at a time.

This module reads and writes files of blocks, in a directory that `tiers.directory` checks and locks. The index
(`tiers.index`) decides which entries are served, pinned (protected from eviction) or evicted next. Before a write, it
gives a grant: the right to write one entry. The engine opens and closes the tier; `write` and `read` run on stream
threads, several at once.

    DIRECTORY/sidestream-tier.json        description of the tier: format version, model fingerprint, layout
    DIRECTORY/sidestream-tier.lock        process id of the engine that uses the directory, for messages
    DIRECTORY/3f/3f…c2-000000000000002a   an entry: key-serial, both in hexadecimal
    DIRECTORY/3f/3f…c2-….tmp              an entry being written; leftovers of killed processes are removed at open

An entry is a header and the block. The header fills a page, so that the block starts at a page boundary:

    [0, 8)        magic                    [8, 12)       format version
    [12, 28)      digest of the layout     [28, 44)      key
    [44, 52)      payload bytes            [52, 4080)    zeros
    [4080, 4096)  xxh3-128 of everything else in the file
    [4096, …)     payload

**There is no index file.** At open, the index in memory is rebuilt from file names and sizes, without reading a
payload. Every write and every read sets the modification time of a file, which gives the order of eviction. If the
process dies after it has renamed a file into place, and before the index has the entry, the file is complete and is
served after the next open.

**No deletion can hit a newer write.** A file name contains the serial number of its write, and is never reused while an
engine uses the directory. So a late unlink of an evicted entry, a read in flight and a new write of the same key use
different files. If a crash leaves two files of one key, open keeps the later file. Both files hold the same bytes,
because a key is a hash of everything that the block's content depends on.

**Entries are not synced with fsync.** After kill -9, no page of a finished write is lost, because the kernel has the
page. A power loss may damage files that were renamed into place; their length or checksum is then wrong, and the block
is computed again. An fsync per block would only make stores slower. sidestream-tier.json is synced, because a directory
without it is refused.

**A directory that was removed or replaced while the engine uses it is made anew** by the next write, under a new lock.
The write raises TierLost, so that the offload worker forgets the entries. See `tiers.directory`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import stat
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from sidestream_kv.config import OffloadConfig
from sidestream_kv.errors import ConfigError, InvariantError, TierCorrupt, TierError, TierFull, TierLost
from sidestream_kv.kv.layout import BlockLayout
from sidestream_kv.offload.tiers.base import Block, TierContext, TierKind
from sidestream_kv.offload.tiers.directory import (
    TEMPORARY,
    Description,
    NotRegular,
    TierDirectory,
    check_private,
    open_regular,
    os_errors_as_refusals,
)
from sidestream_kv.offload.tiers.index import Entry, TierIndex, WriteGrant
from sidestream_kv.types import Key, Tracer

NAME = "disk"
FORMAT_VERSION = 1
KEY_BYTES = 16
HEADER_BYTES = 4096

_MAGIC = b"SIDEKV\r\n"
_FIELDS = struct.Struct("<8sI16s16sQ")
_DIGEST_AT = HEADER_BYTES - 16
_PAGE = 4096

# Key and serial. Serials stay below 2^62; larger ones would not fit into a name.
_ENTRY_NAME = re.compile(r"([0-9a-f]{32})-([0-3][0-9a-f]{15})")
_PREFIX = re.compile(r"[0-9a-f]{2}")  # name of a subdirectory: the first byte of the keys in it

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_log = logging.getLogger(__name__)


class DiskTier:
    """The disk tier in `directory`. Made by `open`."""

    def __init__(
        self, directory: TierDirectory, *, block_bytes: int, description: Description, index: TierIndex
    ) -> None:
        """Callers use `open` instead. The tier closes `directory`."""
        self.directory = directory.path
        self._held = directory
        self._renewing = threading.Lock()
        self._block_bytes = block_bytes
        self._description = description
        self._identity = xxhash.xxh3_128_digest(json.dumps(description, sort_keys=True).encode())
        self._index = index
        self._closed = False

    @classmethod
    def open(
        cls,
        directory: str | Path,
        *,
        layout: BlockLayout,
        fingerprint: str,
        capacity_bytes: int,
        tracer: Tracer | None = None,
    ) -> DiskTier:
        """Create or reopen the tier in `directory`, for one model (`fingerprint`) and layout.

        Removes leftovers of killed processes and damaged entries, then evicts entries until the tier takes at most
        `capacity_bytes` (counted in whole pages, including headers). Reads only names and sizes: 70,000 entries take
        about a second.
        Raises ConfigError, and changes nothing, if `TierDirectory.open` refuses the directory, if a subdirectory is
        none or not private, or if `capacity_bytes` is less than one entry.
        """
        path = Path(directory).expanduser().absolute()
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
        with os_errors_as_refusals(path), contextlib.ExitStack() as on_failure:
            held = TierDirectory.open(path, description)
            on_failure.callback(held.close)
            found = _scan(held, file_bytes=HEADER_BYTES + layout.block_bytes, max_entries=max_entries)
            on_failure.pop_all()
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
        return cls(held, block_bytes=layout.block_bytes, description=description, index=index)

    @property
    def index(self) -> TierIndex:
        """The keys that the tier holds."""
        return self._index

    def write(self, grant: WriteGrant, payload: Block) -> None:
        """Delete the evicted entry `grant.victim`, then write `payload` (`layout.block_bytes`) as `grant.entry`,
        completely or not at all.

        Waits for I/O: call it on a disk stream's thread. Raises TierFull if the disk, the quota or the file size limit
        leaves no space, TierLost if the directory was removed or replaced, and TierError for any other failure. In all
        cases no file of the entry is left, and the caller must abandon the grant.
        """
        view = self._view(payload)  # rule: write-begins
        header = self._header(grant.entry.key)
        header += _digest(header, view)
        try:
            held = self._held_in_place()
            if grant.victim is not None:
                _delete(held, grant.victim)
                grant.victim = None
            with held.subdirectory(_prefix(grant.entry), make=True) as fd:
                _write_whole(fd, _name(grant.entry), [memoryview(header), view])
        except OSError as error:
            kind = TierFull if error.errno in _NO_ROOM else TierError
            raise kind(
                f"disk tier {self.directory} could not store {view.nbytes} bytes: {error.strerror or error}"
            ) from error
        grant.written = True  # rule: entry-counts-as-written-after-its-write

    def read(self, entry: Entry, out: Block) -> None:
        """Read a pinned entry's block directly into `out` (`layout.block_bytes`), and verify every bit of its file.

        Waits for I/O: call it on a disk stream's thread. Raises TierLost if the directory was removed or replaced,
        TierCorrupt if the file is missing, or if its length, header or checksum is wrong (the file is then deleted),
        and TierError if reading fails. After any error, the content of `out` is undefined, and the caller must forget
        the entry.
        """
        view, held = self._view(out), self._held
        path = f"{self.directory}/{_prefix(entry)}/{_name(entry)}"
        try:
            with held.subdirectory(_prefix(entry)) as fd:
                try:
                    fault = self._read_verified(fd, entry, view)
                except NotRegular:
                    fault = "is not a regular file"
                deleted = False
                if fault is not None:
                    with contextlib.suppress(OSError):
                        deleted = _unlink(fd, _name(entry))
        except (FileNotFoundError, NotADirectoryError) as error:
            if self._is_lost(held):
                raise TierLost(f"disk directory {self.directory} was removed or replaced while in use") from error
            raise TierCorrupt(f"disk entry {path} is gone") from error
        except OSError as error:
            raise TierError(f"disk entry {path} could not be read: {error.strerror or error}") from error
        if fault is not None:
            raise TierCorrupt(f"disk entry {path} {fault}; {'deleted' if deleted else 'not deleted'}")

    def close(self) -> None:
        """Delete the files of forgotten entries and unlock the directory. Call it after every `read` and `write` has
        returned. Idempotent.
        """
        if self._closed:
            return
        self._closed = True
        for entry in self._index.take_doomed():  # rule: forgotten-files-are-deleted-at-close
            with contextlib.suppress(OSError):  # if this fails, the file stays, and the next open finds it again
                _delete(self._held, entry)
        if self._is_lost(self._held):
            _log.warning(
                "disk tier %s: closed, but its directory was removed or replaced: no block is left", self.directory
            )
        else:
            _log.info("disk tier %s: closed with %d blocks", self.directory, len(self._index))
        self._held.close()

    def _is_lost(self, held: TierDirectory) -> bool:
        """Whether the tier's directory was removed or replaced since it was opened or made anew."""
        try:
            return held is self._held and not held.is_in_place()
        except OSError:
            return False

    def _held_in_place(self) -> TierDirectory:
        """The directory. If it was removed or replaced, it is made anew, and TierLost is raised. Raises OSError."""
        held = self._held
        if held.is_in_place():  # rule: lost-directory-is-noticed
            return held
        with self._renewing:
            if held is self._held:  # else another thread has made it anew
                self._renew(held)
        raise TierLost(f"disk directory {self.directory} was removed or replaced while in use: it was made anew, empty")

    def _renew(self, held: TierDirectory) -> None:
        lost = f"disk directory {self.directory} was removed or replaced while in use"
        try:
            with os_errors_as_refusals(self.directory):
                self._held = held.renewed(self._description)
        except ConfigError as error:
            raise TierLost(f"{lost}, and cannot be made anew: {error}") from error
        _log.warning("%s: it was made anew, and its blocks are forgotten", lost)

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
        if self._closed:
            raise InvariantError(f"disk tier {self.directory} is closed")
        return view

    def _read_verified(self, dir_fd: int, entry: Entry, view: memoryview) -> str | None:
        """Read the file into `view`. Returns the fault of the file, or None."""
        header = bytearray(HEADER_BYTES)
        beyond = bytearray(1)
        fd = open_regular(_name(entry), os.O_RDONLY, dir_fd=dir_fd)
        try:
            num_bytes = _read_all(fd, [memoryview(header), view, memoryview(beyond)])
            if num_bytes != HEADER_BYTES + view.nbytes:  # rule: length-is-verified
                return f"is {'longer' if num_bytes > HEADER_BYTES + view.nbytes else 'shorter'} than one block"
            expected = self._header(entry.key)
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


def entry_bytes(layout: BlockLayout) -> int:
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


KIND = TierKind(NAME, _open, write_policy="reused")


def _digest(header: bytes, payload: memoryview) -> bytes:
    state = xxhash.xxh3_128(header)
    state.update(payload)  # rule: checksum-covers-the-whole-block
    return state.digest()


def _prefix(entry: Entry) -> str:
    return f"{entry.key[0]:02x}"


def _name(entry: Entry) -> str:
    return f"{entry.key.hex()}-{entry.serial:016x}"


def _write_whole(dir_fd: int, name: str, buffers: list[memoryview]) -> None:
    """Write the file under a temporary name and rename it. After a failure, no file is left. Raises OSError."""
    temporary = name + TEMPORARY  # rule: entry-is-renamed-into-place
    try:
        fd = open_regular(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=dir_fd)
        try:
            while buffers:
                buffers = _rest(buffers, os.writev(fd, buffers))
        finally:
            os.close(fd)
        os.rename(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        with contextlib.suppress(OSError):
            _unlink(dir_fd, temporary)
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


def _unlink(dir_fd: int, name: str) -> bool:
    """Delete the file, if it exists. Returns False if it is a directory, which stays: it is not from the tier, and it
    does no harm, because file names are never reused. Raises OSError.
    """
    try:
        os.unlink(name, dir_fd=dir_fd)
    except IsADirectoryError:
        return False
    except FileNotFoundError:
        pass
    return True


def _delete(held: TierDirectory, entry: Entry) -> None:
    """Delete the file of an entry, if it exists. Raises OSError."""
    with (
        contextlib.suppress(FileNotFoundError, NotADirectoryError),
        held.subdirectory(_prefix(entry)) as fd,
    ):
        _unlink(fd, _name(entry))


@dataclass(frozen=True, slots=True)
class _Found:
    """The content of a directory: entries to serve, least recently used first, and numbers of removed files."""

    entries: list[Entry]
    next_serial: int
    leftovers: int
    corrupt: int
    evictions: int


def _scan(held: TierDirectory, *, file_bytes: int, max_entries: int) -> _Found:
    """Rebuild the index from names, sizes and times; delete files that cannot be served."""
    newest: dict[Key, tuple[int, int]] = {}  # key -> (serial, modified)
    next_serial = leftovers = corrupt = 0
    for entry, file, folder in _entry_files(held):
        status = file.stat(follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            continue  # a directory, which is not from the tier
        next_serial = max(next_serial, entry.serial + 1)  # rule: serials-go-on-after-a-restart
        twin = newest.get(entry.key)
        if file.name.endswith(TEMPORARY):  # rule: leftovers-are-deleted
            leftovers += 1
            _unlink(folder.fd, file.name)
        # rule: files-of-the-wrong-length-are-deleted
        elif status.st_size != file_bytes or not stat.S_ISREG(status.st_mode) or folder.name != _prefix(entry):
            corrupt += 1
            _unlink(folder.fd, file.name)
        elif twin is not None and twin[0] > entry.serial:  # rule: later-write-of-a-key-wins
            leftovers += 1
            _unlink(folder.fd, file.name)
        else:
            if twin is not None:
                leftovers += 1
                _unlink(folder.fd, _name(Entry(entry.key, twin[0])))
            newest[entry.key] = (entry.serial, status.st_mtime_ns)
    by_age = sorted((modified, serial, key) for key, (serial, modified) in newest.items())
    entries = [Entry(key, serial) for _, serial, key in by_age]
    surplus = max(0, len(entries) - max_entries)
    for entry in entries[:surplus]:
        _delete(held, entry)
    return _Found(entries[surplus:], next_serial, leftovers, corrupt, surplus)


@dataclass(frozen=True, slots=True)
class _Folder:
    """An open subdirectory."""

    name: str
    fd: int


def _entry_files(held: TierDirectory) -> Iterator[tuple[Entry, os.DirEntry[str], _Folder]]:
    """Each file that is named like an entry, complete or temporary, with the entry and its subdirectory. Raises
    ConfigError if a subdirectory is none, or is not private.
    """
    for prefix in sorted(name for name in held.names() if _PREFIX.fullmatch(name)):
        path = held.path / prefix
        try:
            with held.subdirectory(prefix) as fd:
                check_private(fd, path)
                with os.scandir(fd) as files:
                    for file in files:
                        name = _ENTRY_NAME.fullmatch(file.name.removesuffix(TEMPORARY))
                        if name is not None:
                            yield Entry(bytes.fromhex(name[1]), int(name[2], 16)), file, _Folder(prefix, fd)
        except NotADirectoryError as error:
            raise ConfigError(
                f"{path} is a file or a link, but the disk tier has its own directory there: move it away, or give "
                f"another disk directory"
            ) from error


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
