"""The disk tier: KV blocks in the slots of a directory, which engines of one model share.

`DiskTier` joins the index, which decides which entries are found and evicted, and `Medium`, the entries on the disk.
The engine opens and closes the tier; `write` and `read` run on stream threads, several at once; the offload worker's
thread calls `refresh` and the index.

    DIRECTORY/sidestream-tier.json    description of the tier: format version, model fingerprint, layout   (`directory`)
    DIRECTORY/sidestream-tier.table   a record for each slot: which entry is in it                         (`slots`)
    DIRECTORY/segment-000000 …        the slots: header and block                                          (`slots`)

**An entry is one write.** A record and the header of its slot have the serial number of the write, which no other write
of any process has. So a late deletion, a read in flight and a new write of the same key never hit each other.

**A record is valid only while its slot holds the complete entry**, so a process that is killed at any moment leaves
each entry complete or absent. Nothing is synced but the description. After kill -9, no finished write is lost, because
the kernel has it. A power loss may lose writes, or leave a record without its block: the header of the slot then names
another write, or its checksum is wrong, and the block is computed again. An fsync per block would only make stores
slower.

**A directory that was removed or replaced while the engine uses it is made anew** by the next write, or joined if
another engine has made it anew already. The write raises TierLost, so that the offload worker forgets the entries.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from sidestream_kv.config import OffloadConfig
from sidestream_kv.device.garbage import collections_paused
from sidestream_kv.errors import ConfigError, InvariantError, TierCorrupt, TierError, TierFull, TierLost
from sidestream_kv.kv.layout import BlockLayout
from sidestream_kv.offload.tiers.base import Block, TierContext, TierKind, TierStreams
from sidestream_kv.offload.tiers.directory import TABLE_FILE, TIER_FILE, Description, os_errors_as_refusals
from sidestream_kv.offload.tiers.index import Entry, TierIndex, WriteGrant
from sidestream_kv.offload.tiers.opening import OpenSlots, open_slots
from sidestream_kv.offload.tiers.slots import (
    FORMAT_VERSION,
    HEADER_BYTES,
    PAGE,
    Geometry,
    Records,
    bodies_of,
    check_of,
    checks_of,
    runs,
)
from sidestream_kv.types import Key, Tracer

NAME = "disk"
KEY_BYTES = 16
SEGMENT_BYTES = 256 << 20
MAX_SEGMENTS = 256  # of a new directory, which keeps a file open for each
# Blocks of 128 KiB: writes at 0.78 of the raw rate, beside 0.68 with 512 KiB: docs/decisions/0056.
BATCH_BYTES = 2 << 20

# Number of least recently used slots that are looked up at once, if no slot is void.
_OLDEST = 256
_GONE = "is gone"

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_log = logging.getLogger(__name__)


class DiskTier:
    """The disk tier in `directory`. Made by `open`."""

    def __init__(self, path: Path, description: Description, geometry: Geometry, streams: TierStreams) -> None:
        """Callers use `open` instead."""
        self.directory = path
        self.streams = streams
        self._renewing = threading.Lock()
        self._description = description
        self._geometry = geometry
        self._leases: dict[Entry, tuple[Medium, int]] = {}
        self._closed = False
        self._medium: Medium
        self._index: TierIndex

    @classmethod
    def open(
        cls,
        directory: str | Path,
        *,
        layout: BlockLayout,
        fingerprint: str,
        capacity_bytes: int,
        batches: bool = True,
        name: str = NAME,
        tracer: Tracer | None = None,
    ) -> DiskTier:
        """Create, reopen or join the tier in `directory`, for one model (`fingerprint`) and layout.

        The tier takes at most `capacity_bytes` (counted in whole pages, including headers). If it held more, the least
        recently used entries are removed. If other engines use the directory, it keeps its capacity. Reads no block.
        Raises ConfigError, and changes nothing, if `TierDirectory` refuses the directory, or if `capacity_bytes` is
        less than one entry. `batches`: whether the streams read and write several small blocks at once. `name`: the
        index's name.
        """
        path = Path(directory).expanduser().absolute()
        slot_bytes = entry_bytes(layout)
        num_slots = capacity_bytes // slot_bytes
        if num_slots < 1:
            raise ConfigError(
                f"disk_capacity is {capacity_bytes} bytes, but one block of this model takes {slot_bytes} "
                f"({layout.block_tokens} tokens and a header): raise disk_capacity"
            )
        segment_bytes = max(SEGMENT_BYTES, capacity_bytes // MAX_SEGMENTS)
        geometry = Geometry(num_slots, max(1, segment_bytes // slot_bytes), layout.block_bytes)
        description: dict[str, int | str] = {
            "format_version": FORMAT_VERSION,
            **layout.describe(),
            "fingerprint": fingerprint,
        }
        streams = TierStreams(readers=8, writers=4, batch_bytes=BATCH_BYTES if batches else 0)
        tier = cls(path, description, geometry, streams)
        with os_errors_as_refusals(path), collections_paused():
            slots = tier._open_slots()
            tier._medium = Medium(slots)
            tier._index = index = TierIndex(
                tier._medium.load(),
                max_entries=tier._medium.geometry.num_slots,
                entry_bytes=slot_bytes,
                name=name,
                next_serial=slots.next_serial,
                evictions=slots.evictions,
                corrupt=slots.damaged,
                tracer=tracer,
            )
        index.on_pin, index.on_unpin = tier._lease, tier._release
        tier._log_opened(slots)
        return tier

    @property
    def index(self) -> TierIndex:
        """The keys that the tier holds."""
        return self._index

    @property
    def is_direct(self) -> bool:
        """Whether blocks bypass the page cache."""
        return self._medium.slots.segments.direct

    def write(self, grant: WriteGrant, payload: Block) -> None:
        """Write `payload` (`layout.block_bytes`) as `grant.entry` in place of `grant.victim`, completely or not at all.

        Waits for I/O: call it on a disk stream's thread. Raises TierFull if the disk, the quota or the file size limit
        leaves no space, TierLost if the directory was removed or replaced, and TierError for any other failure. In all
        cases the entry is absent, and the caller must abandon the grant.
        """
        (failure,) = self.write_all([grant], [payload])
        if failure is not None:
            raise failure

    def write_all(self, grants: Sequence[WriteGrant], payloads: Sequence[Block]) -> list[TierError | None]:
        """Do what `write` does for each grant, with as few system calls as neighbouring slots allow. Returns, for each,
        what `write` would raise.
        """
        views = [self._view(payload) for payload in payloads]  # rule: write-begins
        entries = [grant.entry for grant in grants]
        for entry in entries:
            self._check_key(entry.key)
        try:
            faults = self._medium_in_place().put(entries, [grant.victim for grant in grants], views)
        except TierLost as lost:
            return [lost] * len(grants)
        except OSError as error:
            faults = [error] * len(grants)
        for grant, fault in zip(grants, faults, strict=True):
            if fault is None:
                grant.victim = None
                grant.written = True  # rule: entry-counts-as-written-after-its-write
        return [fault if fault is None else self._not_written(fault) for fault in faults]

    def read(self, entry: Entry, out: Block) -> None:
        """Read a pinned entry's block directly into `out` (`layout.block_bytes`), and verify every bit.

        Waits for I/O: call it on a disk stream's thread. Raises TierLost if the directory was removed or replaced,
        TierCorrupt if the entry is gone, or if its length, header or checksum is wrong (it is then deleted), and
        TierError if reading fails. After any error, the content of `out` is undefined, and the caller must forget the
        entry.
        """
        (failure,) = self.read_all([entry], [out])
        if failure is not None:
            raise failure

    def read_all(self, entries: Sequence[Entry], outs: Sequence[Block]) -> list[TierError | None]:
        """Do what `read` does for each entry, with as few system calls as neighbouring slots allow. Returns, for each,
        what `read` would raise.
        """
        views, medium = [self._view(out) for out in outs], self._medium
        try:
            faults = medium.get(entries, views)
        except OSError as error:
            faults = [error] * len(entries)
        lost = any(isinstance(fault, str) for fault in faults) and self._is_lost(medium)
        return [
            fault if fault is None else self._not_read(entry, fault, lost=lost)
            for entry, fault in zip(entries, faults, strict=True)
        ]

    def _not_written(self, fault: OSError | TierFull) -> TierError:
        if isinstance(fault, TierFull):
            return fault
        kind = TierFull if fault.errno in _NO_ROOM else TierError
        num_bytes = self._geometry.block_bytes
        return kind(f"disk tier {self.directory} could not store {num_bytes} bytes: {fault.strerror or fault}")

    def _not_read(self, entry: Entry, fault: OSError | str, *, lost: bool) -> TierError:
        if isinstance(fault, OSError):
            reason = fault.strerror or fault
            return TierError(f"disk entry {_name(entry)} of {self.directory} could not be read: {reason}")
        if lost:
            return TierLost(f"disk directory {self.directory} was removed or replaced while in use")
        return TierCorrupt(f"disk entry {_name(entry)} of {self.directory} {fault}")

    def refresh(self) -> None:
        """Take in what other processes have written, deleted and read. Called on the offload worker's thread."""
        try:
            news = self._medium.news()
        except OSError:  # the next read or write reports it
            return
        index = self._index
        index.unlearn(news.deleted)
        index.learn(news.written)
        index.touch(news.used)

    def close(self) -> None:
        """Delete forgotten entries and leave the directory. Call it after every `read` and `write` has returned.
        Idempotent.
        """
        if self._closed:
            return
        self._closed = True
        for entry in self._index.take_doomed():  # rule: forgotten-entries-are-deleted-at-close
            with contextlib.suppress(OSError):  # if this fails, the entry stays, and the next open finds it again
                self._medium.delete(entry)
        if self._is_lost(self._medium):
            _log.warning(
                "disk tier %s: closed, but its directory was removed or replaced: no block is left", self.directory
            )
        else:
            _log.info("disk tier %s: closed with %d blocks", self.directory, len(self._index))
        self._medium.slots.close()

    # ------------------------------------------------------------------ the directory

    def _open_slots(self) -> OpenSlots:
        return open_slots(self.directory, self._description, self._geometry)

    def _is_lost(self, medium: Medium) -> bool:
        """Whether the tier's directory was removed or replaced since it was opened or made anew."""
        try:
            return medium is self._medium and not medium.is_in_place()
        except OSError:
            return False

    def _medium_in_place(self) -> Medium:
        """The slots. If the directory was removed or replaced, it is made anew, and TierLost is raised. Raises
        OSError.
        """
        medium = self._medium
        if medium.is_in_place():  # rule: lost-directory-is-noticed
            return medium
        lost = f"disk directory {self.directory} was removed or replaced while in use"
        with self._renewing:
            if medium is self._medium:  # else another thread has made it anew
                try:
                    with os_errors_as_refusals(self.directory):
                        anew = Medium(self._open_slots())
                    anew.load(as_news=True)
                    self._medium = anew
                except ConfigError as error:
                    raise TierLost(f"{lost}, and cannot be made anew: {error}") from error
                _log.warning("%s: it was made anew, and its blocks are forgotten", lost)
        raise TierLost(f"{lost}: it was made anew, empty")

    # ------------------------------------------------------------------ called by the index

    def _lease(self, entry: Entry) -> None:
        """Keep other processes from overwriting an entry that is read from now on."""
        medium = self._medium
        with contextlib.suppress(OSError):  # the read then fails, or succeeds without a lease before
            if (slot := medium.lease(entry)) is not None:  # rule: pinned-entry-is-leased
                self._leases[entry] = medium, slot

    def _release(self, entry: Entry) -> None:
        lease = self._leases.pop(entry, None)
        if lease is not None:
            medium, slot = lease
            with contextlib.suppress(OSError):
                medium.release(slot)  # rule: lease-of-a-pinned-entry-ends

    # ------------------------------------------------------------------ checks

    def _check_key(self, key: Key) -> None:
        if len(key) != KEY_BYTES:
            raise InvariantError(f"a key of the disk tier has {KEY_BYTES} bytes, not {len(key)}")

    def _view(self, block: Block) -> memoryview:
        view = (block if isinstance(block, memoryview) else block.data).cast("B")
        if view.nbytes != self._geometry.block_bytes:
            raise InvariantError(f"a block of the disk tier has {self._geometry.block_bytes} bytes, not {view.nbytes}")
        if self._closed:
            raise InvariantError(f"disk tier {self.directory} is closed")
        return view

    def _log_opened(self, slots: OpenSlots) -> None:
        capacity, held = self._index.max_entries * self._geometry.slot_bytes, self._index.stats.bytes
        _log.info(
            "disk tier %s: %d blocks, %d of %d bytes, %s I/O%s",
            self.directory,
            len(self._index),
            held,
            capacity,
            "direct" if self.is_direct else "buffered",
            ", shared with other engines, whose capacity it has" if slots.shared else "",
        )
        if slots.damaged or slots.evictions:
            message = "disk tier %s: removed %d damaged records, %d blocks over capacity"
            _log.info(message, self.directory, slots.damaged, slots.evictions)
        if (free := shutil.disk_usage(slots.directory.fd).free) < capacity - held:
            message = (
                "disk tier %s: %d bytes are free on the disk, but the tier may need %d more: "
                "free some, or lower disk_capacity"
            )
            _log.warning(message, self.directory, free, capacity - held)


@dataclass(slots=True)
class News:
    """Entries that other processes have written, entries that they or this process have deleted, and keys that they
    have read, the last used ones last.
    """

    written: list[Entry] = field(default_factory=list)
    deleted: list[Entry] = field(default_factory=list)
    used: list[Key] = field(default_factory=list)


class Medium:
    """Entries in the slots of a directory that several processes use at once.

    Every process may write every slot: the lease of the slot excludes all others meanwhile. So no process owns a part
    of the directory, the capacity is that of the directory, and a process that crashes leaves nothing behind but a void
    record.

        put    lease the slot of the victim, or else a void one, or else the least recently used one; void its record;
               write header and block; publish the record; end the lease
        get    lease the slot with other readers; compare the record; read; verify header and checksum; end the lease
        news   compare the table with the last look at it: entries that other processes have written, deleted and read

    Any thread may call a method.
    """

    def __init__(self, slots: OpenSlots) -> None:
        """`load` comes next. The medium closes `slots`."""
        self.slots = slots
        self.geometry = slots.table.geometry
        self._table = table = slots.table
        self._locks = slots.locks
        self._segments = slots.segments
        self._mutex = threading.Lock()  # of what follows
        self._seen = Records.void(table.geometry.num_slots)  # at the last look, and as this process has changed them
        self._slot_of_serial: dict[int, int] = {}  # of entries that were written or found since `load`
        self._loaded_serials, self._loaded_slots = np.empty(0, np.uint64), np.empty(0, np.intp)  # in ascending order
        self._news = News()
        self._spare: deque[tuple[int, int]] = deque()  # slots to write, and their checks

    def load(self, *, as_news: bool = False) -> Iterable[tuple[Key, int]]:
        """Read all records. Returns the keys and serials of their entries, least recently used first. `as_news`: they
        are news, too.
        """
        records = self._seen = self._table.records()
        slots = np.flatnonzero(records.checks)
        records.checks[slots[~records.valid(slots)]] = 0
        slots = np.flatnonzero(records.checks)
        serials = records.bodies["serial"][slots]
        order = np.argsort(serials)
        self._loaded_serials, self._loaded_slots = serials[order], slots[order]
        slots = records.by_use(slots)
        if as_news:
            self._news.written += records.entries(slots)
        return records.pairs(slots)

    def is_in_place(self) -> bool:
        """Whether the path still leads to this directory, with this table. Raises OSError if that cannot be found
        out.
        """
        directory = self.slots.directory
        try:
            there = directory.path.stat()
            table = os.stat(TABLE_FILE, dir_fd=directory.fd, follow_symlinks=False)
            os.stat(TIER_FILE, dir_fd=directory.fd, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(there, os.fstat(directory.fd)) and os.path.samestat(table, os.fstat(self._table.fd))

    # ------------------------------------------------------------------ entries

    def put(
        self, entries: Sequence[Entry], victims: Sequence[Entry | None], payloads: Sequence[memoryview]
    ) -> list[OSError | TierFull | None]:
        """Write entries in place of `victims`, which may be gone, or in other slots. Returns the fault of each entry,
        which is absent then, or None. Raises OSError if no slot can be leased; all entries are absent then.
        """
        message = f"all {self.geometry.num_slots} blocks are being read or written: raise disk_capacity"
        faults: list[OSError | TierFull | None] = []
        owned: list[int] = []
        try:
            self._own_slots(victims, owned)
            for run in runs(sorted(owned), within=self.geometry.slots_per_segment):
                part = slice(len(faults), len(faults) + len(run))
                faults += self._write(run.start, entries[part], payloads[part])
        finally:
            for run in runs(sorted(owned)):
                self._locks.release(run.start, len(run))  # rule: written-slot-is-released
        return faults + [TierFull(message) for _ in entries[len(faults) :]]

    def _write(
        self, first: int, entries: Sequence[Entry], payloads: Sequence[memoryview]
    ) -> list[OSError | TierFull | None]:
        """Write entries to slots that are leased, from `first` on; one by one, if that fails as a whole."""
        try:
            self._note_evicted(first, len(entries))  # rule: own-entry-that-gave-way-is-forgotten
            self._void(first, len(entries))  # rule: record-is-void-while-its-slot-is-written
            self._segments.write(first, entries, payloads)  # rule: record-is-published-after-its-payload
            self._publish(first, entries)
        except OSError as error:
            if len(entries) == 1:
                return [error]
            singles = zip(range(first, first + len(entries)), entries, payloads, strict=True)
            return [self._write(slot, [entry], [payload])[0] for slot, entry, payload in singles]
        return [None] * len(entries)

    def get(self, entries: Sequence[Entry], outs: Sequence[memoryview]) -> list[OSError | str | None]:
        """Read entries. Returns the fault of each, or None; a damaged entry is deleted. Raises OSError."""
        faults: list[OSError | str | None] = [_GONE] * len(entries)
        slots = [self._slot_of(entry) for entry in entries]
        places = sorted((slot, at) for at, slot in enumerate(slots) if slot is not None)
        position = 0
        for run in runs([slot for slot, _ in places], within=self.geometry.slots_per_segment):
            ats = [at for _, at in places[position : position + len(run)]]
            found = self._read(run.start, [entries[at] for at in ats], [outs[at] for at in ats])
            for at, fault in zip(ats, found, strict=True):
                faults[at] = fault
            position += len(run)
        return faults

    def _read(self, first: int, entries: Sequence[Entry], outs: Sequence[memoryview]) -> list[OSError | str | None]:
        """Read the entries in the slots from `first` on; one by one, if that fails as a whole."""
        try:
            if (faults := self._read_run(first, entries, outs)) is not None:
                return faults
            fault: OSError | str = _GONE
        except OSError as error:
            fault = error
        if len(entries) == 1:
            return [fault]
        singles = zip(range(first, first + len(entries)), entries, outs, strict=True)
        return [self._read(slot, [entry], [out])[0] for slot, entry, out in singles]

    def _read_run(
        self, first: int, entries: Sequence[Entry], outs: Sequence[memoryview]
    ) -> list[OSError | str | None] | None:
        """The fault of each entry; None if one of them is gone, or being overwritten."""
        if not self._locks.share(first, len(entries)):
            return None
        try:
            checks = checks_of(range(first, first + len(entries)), entries)
            if self._table.checks(first, len(entries)) != checks:  # rule: record-is-compared-under-the-lease
                return None
            try:
                found = self._segments.read(first, entries, outs)
            except FileNotFoundError:
                found = ["is in a file that is gone"] * len(entries)  # rule: entry-of-a-lost-segment-is-a-miss
            self._stamp(first, len(entries))
            return [fault and self._damaged(slot, fault) for slot, fault in enumerate(found, first)]
        finally:
            self._locks.release(first, len(entries))

    def _damaged(self, slot: int, fault: str) -> str:
        self._void(slot)  # rule: damaged-entry-is-deleted
        return f"in {self._segments.path(slot)} {fault}: deleted"

    def delete(self, entry: Entry) -> None:
        """Delete an entry, if it exists and is not leased. Raises OSError."""
        slot = self._slot_of(entry)
        if slot is not None and self._owns(slot, [check_of(slot, entry)]):
            try:
                self._void(slot)
            finally:
                self._locks.release(slot)

    def lease(self, entry: Entry) -> int | None:
        """Keep every process from overwriting an entry until `release` of the slot that is returned; None if the entry
        is gone, or being overwritten. Raises OSError.
        """
        slot = self._known_slot(entry)
        return slot if slot is not None and self._locks.share(slot) else None

    def release(self, slot: int) -> None:
        """End a `lease`."""
        self._locks.release(slot)

    # ------------------------------------------------------------------ other processes

    def news(self) -> News:
        """What other processes have done since the last call. Raises OSError."""
        self._look()
        with self._mutex:
            news, self._news = self._news, News()
        return news

    def _look(self) -> None:
        """Compare the table with what was seen of it, and note the differences."""
        with self._mutex:  # no thread of this process changes the table meanwhile
            seen, news = self._seen, self._news
            checks, stamps = self._table.scan()
            used = np.flatnonzero((stamps != seen.stamps) & (checks == seen.checks) & (checks != 0))
            news.used += [entry.key for entry in seen.entries(used[np.argsort(stamps[used])])]
            seen.stamps[:] = stamps
            changed = np.flatnonzero(checks != seen.checks)
            if not len(changed):
                return
            news.deleted += (deleted := seen.entries(changed[seen.checks[changed] != 0]))
            for entry in deleted:
                self._slot_of_serial.pop(entry.serial, None)
            first, stop = int(changed[0]), int(changed[-1]) + 1
            seen.bodies[changed] = self._table.bodies(first, stop)[changed - first]
            seen.checks[changed] = checks[changed]
            seen.checks[changed[~seen.valid(changed)]] = 0
            written = changed[seen.checks[changed] != 0]
            news.written += (found := seen.entries(written))
            self._slot_of_serial.update(zip([entry.serial for entry in found], written.tolist(), strict=True))

    # ------------------------------------------------------------------ slots

    def _slot_of(self, entry: Entry) -> int | None:
        """The slot of an entry, also if another process has written it just now."""
        slot = self._known_slot(entry)
        if slot is None:
            self._look()
            slot = self._known_slot(entry)
        return slot

    def _known_slot(self, entry: Entry) -> int | None:
        """The slot that an entry is in, or was in, as far as this process has seen."""
        if (slot := self._slot_of_serial.get(entry.serial)) is not None:
            return slot
        serial = np.uint64(entry.serial)  # else numpy compares floats
        at = int(np.searchsorted(self._loaded_serials, serial))
        found = at < len(self._loaded_serials) and self._loaded_serials[at] == serial
        return int(self._loaded_slots[at]) if found else None

    def _own_slots(self, victims: Sequence[Entry | None], owned: list[int]) -> None:
        """Lease slots to write, one for each victim, as far as there are slots; they are added to `owned`."""
        spare = self._spare_slots()
        held = [(slot, victim) for victim in victims if victim and (slot := self._known_slot(victim)) is not None]
        slots = [slot for slot, _ in held]
        expected = checks_of(slots, [victim for _, victim in held])
        chosen = zip(slots, expected, strict=True) if held else islice(spare, len(victims))
        while checks := dict(sorted(chosen)):
            for run in runs(list(checks)):
                self._own_run(run, [checks[slot] for slot in run], owned)
            chosen = islice(spare, len(victims) - len(owned))

    def _own_run(self, run: range, checks: list[int], owned: list[int]) -> None:
        if self._owns(run.start, checks):
            owned += run
            return
        for at, slot in enumerate(run if len(run) > 1 else ()):
            if self._owns(slot, checks[at : at + 1]):
                owned.append(slot)

    def _owns(self, first: int, checks: list[int]) -> bool:
        """Lease slots for writing, if they still hold what they held when they were chosen."""
        if not self._locks.own(first, len(checks)):
            return False
        try:
            if self._table.checks(first, len(checks)) == checks:  # rule: slot-is-taken-as-it-was-seen
                return True
        except OSError:
            self._locks.release(first, len(checks))
            raise
        self._locks.release(first, len(checks))
        return False

    def _spare_slots(self) -> Iterator[tuple[int, int]]:
        """Slots to write, with their checks: void ones, then the least recently used ones, which another process would
        evict next as well.
        """
        for _ in range(2):
            while self._spare:
                try:
                    yield self._spare.popleft()
                except IndexError:  # another thread was faster
                    break
            checks, stamps = self._table.scan()
            slots = np.flatnonzero(checks == 0)
            if not len(slots):
                slots = np.argsort(stamps, kind="stable")[:_OLDEST]  # neighbours that were written at once stay so
            self._spare.extend(zip(slots.tolist(), checks[slots].tolist(), strict=True))

    def _publish(self, first: int, entries: Sequence[Entry]) -> None:
        with self._mutex:
            seen, slots = self._seen, slice(first, first + len(entries))
            seen.stamps[slots] = stamp = time.time_ns()
            seen.bodies[slots] = bodies_of(entries)
            seen.checks[slots] = np.array(self._table.publish(first, entries, stamp), np.uint64)
            self._slot_of_serial.update((entry.serial, slot) for slot, entry in enumerate(entries, first))

    def _note_evicted(self, first: int, count: int) -> None:
        """Let `news` tell of what is in slots that are written now. If blocks of others fill the directory, it may be
        in the own index.
        """
        with self._mutex:
            slots = first + np.flatnonzero(self._seen.checks[first : first + count])
            self._news.deleted += self._seen.entries(slots)

    def _void(self, first: int, count: int = 1) -> None:
        with self._mutex:
            self._table.void(first, count)
            seen, slots = self._seen, slice(first, first + count)
            for check, serial in zip(seen.checks[slots].tolist(), seen.bodies["serial"][slots].tolist(), strict=True):
                if check:
                    self._slot_of_serial.pop(serial, None)
            seen.checks[slots] = 0

    def _stamp(self, first: int, count: int) -> None:
        with self._mutex:
            self._seen.stamps[first : first + count] = stamp = time.time_ns()
            with contextlib.suppress(OSError):  # the read succeeds even if its time cannot be recorded
                self._table.stamp(first, stamp, count)


def entry_bytes(layout: BlockLayout) -> int:
    """Bytes that one block takes on disk: header and payload, rounded up to whole pages."""
    return -(-(HEADER_BYTES + layout.block_bytes) // PAGE) * PAGE


def _name(entry: Entry) -> str:
    return f"{entry.key.hex()}-{entry.serial:x}"


def _open(config: OffloadConfig, context: TierContext) -> DiskTier | None:
    if not config.disks:
        return None
    return DiskTier.open(
        config.disks[0],
        layout=context.layout,
        fingerprint=context.fingerprint,
        capacity_bytes=config.disk_bytes,
        batches=context.num_ranks == 1,  # other ranks repeat work of one block
        name=context.name or NAME,
        tracer=context.tracer,
    )


def _directories(config: OffloadConfig) -> Sequence[OffloadConfig]:
    return [dataclasses.replace(config, disk=path) for path in config.disks]


KIND = TierKind(NAME, _open, write_policy="reused", parts=_directories)
