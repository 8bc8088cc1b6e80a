"""Looks at the directories of disk tiers, also while engines use them. Called by `sidestream cache`."""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sidestream_kv.errors import ConfigError, TierCorrupt
from sidestream_kv.offload.tiers.directory import SEGMENT_PREFIX, TIER_FILE, TierDirectory, parsed
from sidestream_kv.offload.tiers.index import Entry
from sidestream_kv.offload.tiers.opening import identity_of
from sidestream_kv.offload.tiers.slots import FORMAT_VERSION, Segments, SlotLocks, SlotTable, check_of

# Names in directories of format version 1, which had a file for each block.
_VERSION_1 = re.compile(r"[0-9a-f]{2}|sidestream-tier\.(lock|json)(\.tmp)?")


@dataclass(frozen=True, slots=True)
class DirectoryStat:
    """The content of a directory.

    blocks, capacity_blocks  number of blocks, and of slots for them
    block_bytes              bytes of a slot
    disk_bytes               bytes that all segment files take on disk
    in_use                   whether an engine uses the directory
    last_used_s              time of the last use of the block that was used last; None if there is no block
    """

    path: str
    format_version: int
    blocks: int
    capacity_blocks: int
    block_bytes: int
    disk_bytes: int
    in_use: bool
    last_used_s: float | None


@dataclass(frozen=True, slots=True)
class Verified:
    """Number of blocks that are good; the faults of others; number of blocks that were written meanwhile."""

    good: int
    faults: tuple[str, ...]
    skipped: int


@dataclass(frozen=True, slots=True)
class Collected:
    """The result of a collection.

    deleted, kept  numbers of blocks
    in_use         number of blocks to delete that engines read or write now; they are kept
    freed_bytes    bytes that went back to the file system; 0 where it cannot take back a part of a file
    """

    deleted: int
    kept: int
    in_use: int
    freed_bytes: int


@contextlib.contextmanager
def permissions_named(path: Path) -> Iterator[None]:
    """Raise a PermissionError, or that of a file system that is read-only, as a ConfigError with the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise ConfigError(
            f"disk directory {path} cannot be opened: {error.filename or path}: {error.strerror}: run the command as "
            "the user of the engine that wrote it"
        ) from error


def find_directories(path: Path) -> list[Path]:
    """The directories of tiers at `path` and below it: ranks have a directory each. Raises ConfigError if there is
    none.
    """
    with permissions_named(path):
        found = sorted(file.parent for pattern in ("", "*/", "*/*/") for file in path.glob(pattern + TIER_FILE))
    if not found:
        raise ConfigError(f"there is no directory of a disk tier at {path} or below it: no file {TIER_FILE}")
    return found


def directories_of_tier(path: Path) -> list[Path]:
    """The directory of one tier at `path`, or those of its ranks in it. Raises ConfigError if there is none: what lies
    deeper belongs to other tiers.
    """
    with permissions_named(path):
        found = [path] if (path / TIER_FILE).exists() else sorted(path.glob("rank-*-of-*/"))
        found = [each for each in found if (each / TIER_FILE).exists()]
    if not found:
        raise ConfigError(
            f"{path} is not the directory of a disk tier, as it has no file {TIER_FILE}: give one of those that "
            f"`sidestream cache ls {path}` lists"
        )
    return found


def description_of(path: Path) -> dict[str, Any]:
    """The description of a directory. Raises ConfigError if it is damaged, or cannot be read."""
    with permissions_named(path):
        directory = TierDirectory.existing(path, write=False)
        try:
            return parsed(path / TIER_FILE, directory.read(TIER_FILE) or b"")
        finally:
            directory.close()


def differences(one: Path, other: Path) -> list[tuple[str, Any, Any]]:
    """Names and values of the parts in which the descriptions of two directories differ."""
    ours, theirs = description_of(one), description_of(other)
    return [
        (name, ours.get(name), theirs.get(name)) for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)
    ]


class Inspection:
    """A directory of this format version. Any number of engines may use it meanwhile."""

    def __init__(self, path: Path, *, write: bool = False) -> None:
        """`write`: open it to delete blocks, too; else read permission is enough. Raises ConfigError if there is no
        such directory, if it has another format version or no table, or if permissions are missing.
        """
        self.path = path
        self.description = description_of(path)
        if self.description.get("format_version") != FORMAT_VERSION:
            raise ConfigError(
                f"disk directory {path} has format version {self.description.get('format_version')!r}, but this "
                f"version of Sidestream uses {FORMAT_VERSION}: delete it (sidestream cache clear {path})"
            )
        try:
            with permissions_named(path):
                self._directory = TierDirectory.existing(path, write=write)
                table = SlotTable.open(self._directory)
        except TierCorrupt as error:
            raise ConfigError(f"{error}: the next engine makes it anew, without blocks") from error
        if table is None:
            raise ConfigError(f"disk directory {path} has no table: the next engine makes one")
        self._table = table
        self._locks = SlotLocks(table.fd)

    def stat(self) -> DirectoryStat:
        """What the directory holds."""
        records, geometry = self._table.records(), self._table.geometry
        slots = np.flatnonzero(records.checks)
        slots = slots[records.valid(slots)]
        segments = [name for name in self._directory.own_names() if name.startswith(SEGMENT_PREFIX)]
        return DirectoryStat(
            str(self.path),
            FORMAT_VERSION,
            len(slots),
            geometry.num_slots,
            geometry.slot_bytes,
            sum(self._directory.bytes_on_disk(name) for name in segments),
            self._locks.in_use,
            int(records.stamps[slots].max()) / 1e9 if len(slots) else None,
        )

    def verify(self, *, delete: bool = False) -> Verified:
        """Read every block and compare it with its checksum. `delete`: remove the records of damaged blocks, of a
        directory that was opened to write.

        Each block is leased while it is read, so engines do not overwrite it; they may meanwhile.
        """
        good = skipped = 0
        faults = []
        for slot, entry, fault in self._read_all():
            if fault is None:
                skipped += 1
            elif not fault:
                good += 1
            else:
                faults.append(f"block {entry.key.hex()} in slot {slot} {fault}")
                if delete:
                    self._delete(slot, entry)
        return Verified(good, tuple(faults), skipped)

    def collect(self, *, used_before_s: float | None = None, keep_bytes: int | None = None) -> Collected:
        """Delete blocks of a directory that was opened to write, the least recently used first, and return their space
        to the file system.

        used_before_s  delete blocks that were last used before this time; None: of any time
        keep_bytes     delete the blocks that do not fit into this size; None: there is no bound

        Blocks that engines read or write now are kept. Raises OSError.
        """
        records, size = self._table.records(), self._table.geometry.slot_bytes
        slots = np.flatnonzero(records.checks)
        slots = records.by_use(slots[records.valid(slots)])
        count = max(0, len(slots) - (len(slots) if keep_bytes is None else keep_bytes // size))
        if used_before_s is not None:
            count = max(count, int((records.stamps[slots] < int(used_before_s * 1e9)).sum()))
        segments = Segments(self._directory, self._table.geometry, identity=identity_of(self.description), direct=False)
        deleted = freed = 0
        for slot, entry in zip(slots[:count].tolist(), records.entries(slots[:count]), strict=True):
            done = self._delete(slot, entry, segments)
            deleted += done is not None
            freed += size * bool(done)
        segments.close()
        return Collected(deleted, len(slots) - deleted, count - deleted, freed)

    def _delete(self, slot: int, entry: Entry, segments: Segments | None = None) -> bool | None:
        """Delete an entry. Returns whether its space went back to the file system; None: the slot is leased, or has
        another entry by now.
        """
        if not self._locks.own(slot):  # rule: block-in-use-is-not-collected
            return None
        try:
            if self._table.check(slot) != check_of(slot, entry):
                return None
            self._table.void(slot)
            return segments is not None and segments.give_back(slot)
        finally:
            self._locks.release(slot)

    def _read_all(self) -> Iterator[tuple[int, Entry, str | None]]:
        """Each slot, its entry, and the fault of the entry: empty if it has none, None if it is being overwritten."""
        geometry = self._table.geometry
        segments = Segments(self._directory, geometry, identity=identity_of(self.description), direct=False)
        out = memoryview(bytearray(geometry.block_bytes))
        records = self._table.records()
        slots = np.flatnonzero(records.checks)
        slots = slots[records.valid(slots)]
        for slot, entry in zip(slots.tolist(), records.entries(slots), strict=True):
            fault: str | None = None
            if self._locks.share(slot):
                try:
                    if self._table.check(slot) == check_of(slot, entry):
                        with permissions_named(self.path):
                            fault = segments.read(slot, [entry], [out])[0] or ""
                except FileNotFoundError:
                    fault = "is in a file that is gone"
                except OSError as error:
                    fault = f"cannot be read: {error.strerror or error}"
                finally:
                    self._locks.release(slot)
            yield slot, entry, fault
        segments.close()


def clear(path: Path) -> None:
    """Delete the files of a tier, also one of format version 1, but no others.

    Raises ConfigError, and deletes nothing, if an engine uses the directory.
    """
    directory = TierDirectory.existing(path, write=True)
    with directory.locked():
        if description_of(path).get("format_version") == 1:
            for name in directory.names():
                if _VERSION_1.fullmatch(name):
                    shutil.rmtree(path / name) if (path / name).is_dir() else directory.remove(name)
            return
        try:
            table = SlotTable.open(directory)
        except TierCorrupt:
            table = None
        if table is not None and not SlotLocks(table.fd).be_alone():  # rule: directory-in-use-is-not-cleared
            raise ConfigError(f"disk directory {path} is in use: stop the engines that use it, then clear it")
        for name in directory.own_names():
            if name != TIER_FILE:
                directory.remove(name)
        directory.remove(TIER_FILE)
