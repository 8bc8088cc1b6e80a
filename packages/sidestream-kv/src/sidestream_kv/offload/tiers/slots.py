"""The slots of a tier's directory: for each slot a record, a lease and a block. Any thread may call a method.

**Records** are in the table, which all processes that use the directory read and write:

    DIRECTORY/sidestream-tier.table
    [0, 4096)   magic, format version, slots, slots a segment, bytes a block, number of opens
    checks      8 bytes a slot: 0, or a hash of slot, key and serial
    stamps      8 bytes a slot: time of the last use, in ns; only the order of eviction depends on it
    bodies      24 bytes a slot: key and serial

Each of the three arrays begins at a page. **A record is valid if its check fits.** So writing the check, 8 bytes,
publishes a record, and writing 0 voids it; a process that is killed between two of these writes, or a page that a power
loss has not written, leaves a record that is void. A valid record may be newer than the bytes in its slot after a power
loss: the block's checksum shows that. The table is read and written with `pread` and `pwrite` and not mapped: they are
as coherent, and a file that was cut short, or a bad block of the disk, is an error and not the end of the process
(SIGBUS). The file never changes its size: a table of another size is written under a temporary name and renamed.

**A lease** is a lock of the system (`F_OFD_SETLK`) on one byte of the table file: shared by readers of a slot,
exclusive for its writer. The system ends the locks of a process when the process ends, so a crashed reader or writer
blocks no other process, and no lease ends by time. The threads of a process share one open file. Its locks exclude no
thread of the same process, so each process counts its own leases.

**Blocks** are in segment files, in slots of a fixed size: a header of one page and the block, in whole pages.

    DIRECTORY/segment-000000   slots 0 to s - 1
    DIRECTORY/segment-000001   slots s to 2 s - 1 …

    [0, 8)        magic                    [8, 12)       format version
    [12, 28)      digest of the layout     [28, 44)      key
    [44, 52)      serial                   [52, 60)      payload bytes
    [60, 4080)    zeros                    [4080, 4096)  xxh3-128 of header and payload
    [4096, …)     payload

Files are allocated whole when their first slot is written, so a full disk is noticed then, and slots are overwritten in
place. Where the file system allows it, I/O is direct: it does not pass through the page cache, which would copy every
block once more and take memory from everything else. Blocks that are no whole pages, and callers' buffers that do not
begin at a page, are read and written through the page cache. The system calls and xxh3 release the interpreter lock.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import fcntl
import os
import secrets
import struct
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import starmap
from mmap import mmap

import numpy as np
import numpy.typing as npt
import xxhash

from sidestream_kv.errors import TierCorrupt
from sidestream_kv.offload.tiers.directory import SEGMENT_PREFIX, TABLE_FILE, TEMPORARY, TierDirectory, open_regular
from sidestream_kv.offload.tiers.index import Entry
from sidestream_kv.types import Key

PAGE = 4096
_PUNCH_HOLE = 0x03  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE of Linux
FORMAT_VERSION = 2
HEADER_BYTES = PAGE

_TABLE_MAGIC = b"SIDETAB\n"
_TABLE_VERSION = 1
_TABLE_HEADER = struct.Struct("<8sIIQQQ")  # magic, version, 0, slots, slots a segment, bytes a block
_OPENS_AT = _TABLE_HEADER.size
_BODY = np.dtype([("key", "<u8", 2), ("serial", "<u8")])
_U64 = np.dtype("<u8")
_WORDS = struct.Struct("<QQQ")  # key and serial
_START, _FACTOR, _MASK = 0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD, (1 << 64) - 1

_MANY = 8  # checks that numpy computes as fast as Python

_LOCK = struct.Struct("@hhqqi4x")  # struct flock
_PRESENCE = 0  # byte that every user of the directory locks
_FIRST_SLOT = 1
_WRITING = -1  # in place of a number of readers

_MAGIC = b"SIDEKV\r\n"
_FIELDS = struct.Struct("<8sI16s16sQQ")
_DIGEST_AT = HEADER_BYTES - 16

Words = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of a directory. The last segment may have fewer slots."""

    num_slots: int
    slots_per_segment: int
    block_bytes: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of a header and a block, in whole pages."""
        return _whole_pages(HEADER_BYTES + self.block_bytes)

    def segment_bytes(self, segment: int) -> int:
        """Bytes of a segment's file; 0 if it has no slots."""
        slots = min(self.slots_per_segment, self.num_slots - segment * self.slots_per_segment)
        return max(0, slots) * self.slot_bytes


@dataclass(frozen=True, slots=True)
class Records:
    """Copies of all records, by slot."""

    checks: Words
    stamps: Words
    bodies: npt.NDArray[np.void]

    @classmethod
    def void(cls, num_slots: int) -> Records:
        """Records without entries."""
        return cls(np.zeros(num_slots, _U64), np.zeros(num_slots, _U64), np.zeros(num_slots, _BODY))

    @classmethod
    def over(cls, table: mmap, num_slots: int) -> Records:
        """The records themselves, in a memory of `table_bytes` that several processes map."""
        checks_bytes = _whole_pages(8 * num_slots)
        return cls(
            np.frombuffer(table, _U64, num_slots),
            np.frombuffer(table, _U64, num_slots, checks_bytes),
            np.frombuffer(table, _BODY, num_slots, 2 * checks_bytes),
        )

    def seal(self, slots: Slots) -> None:
        """Make the records of these slots valid: write the checks of their bodies."""
        self.checks[slots] = _checks(slots.astype(_U64), self.bodies[slots])

    def valid(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Whether the records of these slots are those of entries."""
        found: npt.NDArray[np.bool_] = self.checks[slots] == _checks(slots.astype(_U64), self.bodies[slots])
        return found

    def by_use(self, slots: Slots) -> Slots:
        """These slots, which ascend, the least recently used first. Of those that were used at once, the last one is
        first: it holds the last block of a sequence, which is useless without the others.
        """
        slots = slots[::-1]
        ordered: Slots = slots[np.argsort(self.stamps[slots], kind="stable")]
        return ordered

    def keys(self, slots: Slots) -> list[Key]:
        """The keys of these slots, whose records are valid."""
        keys = self.bodies["key"][slots].tobytes()
        return [keys[at : at + 16] for at in range(0, len(keys), 16)]

    def pairs(self, slots: Slots) -> Iterable[tuple[Key, int]]:
        """The keys and serials of the entries in these slots, whose records are valid."""
        return zip(self.keys(slots), self.bodies["serial"][slots].tolist(), strict=True)

    def entries(self, slots: Slots) -> list[Entry]:
        """The entries in these slots, whose records are valid."""
        return list(starmap(Entry, self.pairs(slots)))


class SlotTable:
    """The open table of a directory. Any thread may call a method.

    fd   the table's file, for locks; open as long as the object lives
    """

    def __init__(self, fd: int, geometry: Geometry) -> None:
        """Callers use `open` or `create`. The table closes `fd`."""
        self.fd = fd
        self.geometry = geometry
        self._ending = weakref.finalize(self, os.close, fd)
        checks_bytes = _whole_pages(8 * geometry.num_slots)
        self._checks_at = PAGE
        self._stamps_at = PAGE + checks_bytes
        self._bodies_at = PAGE + 2 * checks_bytes

    def close(self) -> None:
        """Close the file, which ends all locks on it. Idempotent."""
        self._ending()

    @classmethod
    def open(cls, directory: TierDirectory) -> SlotTable | None:
        """The table of a directory; None if it has none. Raises TierCorrupt if the file is no table. Raises OSError."""
        try:
            fd = open_regular(TABLE_FILE, directory.access, dir_fd=directory.fd)
        except FileNotFoundError:
            return None
        header = os.pread(fd, _TABLE_HEADER.size, 0).ljust(_TABLE_HEADER.size, b"\0")
        magic, version, _, *sizes = _TABLE_HEADER.unpack(header)
        table = cls(fd, Geometry(*sizes))
        known = magic == _TABLE_MAGIC and version == _TABLE_VERSION and all(sizes)
        if not known or os.fstat(fd).st_size != table._num_bytes:
            table.close()
            raise TierCorrupt(f"{directory.path / TABLE_FILE} is damaged")
        return table

    @classmethod
    def create(
        cls, directory: TierDirectory, geometry: Geometry, *, records: Records | None = None, opens: int | None = None
    ) -> SlotTable:
        """Make a table with these records, in place of another one. Raises OSError; no other table is lost then.

        `opens`: number of opens so far. None: a random number, so that serial numbers do not occur again if the
        directory is removed and made anew while an engine uses it.
        """
        name = TABLE_FILE + TEMPORARY
        directory.remove(name)
        fd = open_regular(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, dir_fd=directory.fd)
        table = cls(fd, geometry)
        os.posix_fallocate(fd, 0, table._num_bytes)  # a full disk must not fail later writes
        header = _TABLE_HEADER.pack(
            _TABLE_MAGIC, _TABLE_VERSION, 0, geometry.num_slots, geometry.slots_per_segment, geometry.block_bytes
        ) + (secrets.randbits(28) if opens is None else opens).to_bytes(8, "little")
        write_at(fd, header, 0)
        if records is not None:
            for array, at in (
                (records.stamps, table._stamps_at),
                (records.bodies, table._bodies_at),
                (records.checks, table._checks_at),
            ):
                write_at(fd, array.tobytes(), at)
        os.rename(name, TABLE_FILE, src_dir_fd=directory.fd, dst_dir_fd=directory.fd)
        return table

    def resized(
        self, directory: TierDirectory, num_slots: int, records: Records, sources: Slots, targets: Slots
    ) -> SlotTable:
        """A table with another number of slots in place of this one. It has the records of the slots `sources`, in
        the slots `targets`. Raises OSError.
        """
        moved = Records.void(num_slots)
        moved.stamps[targets] = records.stamps[sources]
        moved.bodies[targets] = records.bodies[sources]
        moved.checks[targets] = _checks(targets.astype(_U64), moved.bodies[targets])
        return SlotTable.create(
            directory, dataclasses.replace(self.geometry, num_slots=num_slots), records=moved, opens=self.opens
        )

    @property
    def opens(self) -> int:
        """How often the directory was opened. Only the holder of its lock sets it."""
        return int.from_bytes(os.pread(self.fd, 8, _OPENS_AT), "little")

    @opens.setter
    def opens(self, opens: int) -> None:
        write_at(self.fd, opens.to_bytes(8, "little"), _OPENS_AT)

    def publish(self, first: int, entries: Sequence[Entry], stamp: int) -> list[int]:
        """Make the records of written slots, from `first` on, valid. Returns their checks. Raises OSError."""
        write_at(self.fd, b"".join(map(_body, entries)), self._bodies_at + _BODY.itemsize * first)
        self.stamp(first, stamp, len(entries))
        checks = checks_of(range(first, first + len(entries)), entries)
        write_at(self.fd, struct.pack(f"<{len(checks)}Q", *checks), self._checks_at + 8 * first)
        return checks

    def void(self, first: int, count: int = 1) -> None:
        """Make the records of `count` slots void. Raises OSError."""
        write_at(self.fd, bytes(8 * count), self._checks_at + 8 * first)

    def stamp(self, first: int, stamp: int, count: int = 1) -> None:
        """Set the time of the last use of `count` slots. Raises OSError."""
        write_at(self.fd, stamp.to_bytes(8, "little") * count, self._stamps_at + 8 * first)

    def check(self, slot: int) -> int:
        """The check of a slot; 0: void. Raises OSError."""
        return self.checks(slot, 1)[0]

    def checks(self, first: int, count: int) -> list[int]:
        """The checks of `count` slots; 0: void. Raises OSError."""
        found = os.pread(self.fd, 8 * count, self._checks_at + 8 * first)
        return list(struct.unpack(f"<{count}Q", found.ljust(8 * count, b"\0")))

    def scan(self) -> tuple[Words, Words]:
        """Checks and stamps of all slots. Raises OSError."""
        checks_bytes = self._stamps_at - self._checks_at
        words = np.zeros(checks_bytes // 4, _U64)
        read_at(self.fd, words.view(np.uint8).data, self._checks_at)
        num_slots = self.geometry.num_slots
        return words[:num_slots], words[checks_bytes // 8 :][:num_slots]

    def bodies(self, first: int, stop: int) -> npt.NDArray[np.void]:
        """Keys and serials of the slots from `first` to `stop`. Raises OSError."""
        bodies = np.zeros(stop - first, _BODY)
        read_at(self.fd, bodies.view(np.uint8).data, self._bodies_at + _BODY.itemsize * first)
        return bodies

    def records(self) -> Records:
        """All records. Raises OSError."""
        return Records(*self.scan(), self.bodies(0, self.geometry.num_slots))

    @property
    def _num_bytes(self) -> int:
        return self._bodies_at + _whole_pages(_BODY.itemsize * self.geometry.num_slots)


def table_bytes(num_slots: int) -> int:
    """Bytes of the three arrays of records, in whole pages."""
    return 2 * _whole_pages(8 * num_slots) + _whole_pages(_BODY.itemsize * num_slots)


def check_of(slot: int, entry: Entry) -> int:
    """The check of a record. In Python, because one call of numpy takes as long: see `_checks`."""
    mixed = (slot + _START) & _MASK
    for part in _WORDS.unpack(_body(entry)):
        mixed = ((mixed ^ part) * _FACTOR) & _MASK
        mixed ^= mixed >> 32
    return mixed | 1


def bodies_of(entries: Sequence[Entry]) -> npt.NDArray[np.void]:
    """The keys and serials of entries."""
    return np.frombuffer(b"".join(map(_body, entries)), _BODY)


def checks_of(slots: Sequence[int], entries: Sequence[Entry]) -> list[int]:
    """The checks of records."""
    if len(entries) < _MANY:
        return list(map(check_of, slots, entries))
    checks: list[int] = _checks(np.array(slots, _U64), bodies_of(entries)).tolist()
    return checks


class SlotLocks:
    """Leases of one process, on the open table file `fd`. They end at the latest when `fd` is closed."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._mutex = threading.Lock()
        self._readers: dict[int, int] = {}  # by leased slot

    def be_alone(self) -> bool:
        """Keep other processes out of the directory until `join`. False if another one uses it."""
        return self._set(fcntl.F_WRLCK, _PRESENCE)

    def join(self) -> None:
        """Use the directory, and let others use it."""
        if not self._set(fcntl.F_RDLCK, _PRESENCE):
            raise BlockingIOError(errno.EAGAIN, "another process keeps the directory for itself")

    @property
    def in_use(self) -> bool:
        """Whether another process uses the directory."""
        lock = _LOCK.pack(fcntl.F_WRLCK, 0, _PRESENCE, 1, 0)
        return bool(_LOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, lock))[0] != fcntl.F_UNLCK)

    def share(self, first: int, count: int = 1) -> bool:
        """Lease `count` slots for reading. False, and no lease, if one is being written, here or in another process."""
        slots = range(first, first + count)
        with self._mutex:
            held = [self._readers.get(slot, 0) for slot in slots]
            # rule: slot-is-leased-while-it-is-read
            if _WRITING in held or (0 in held and not self._set(fcntl.F_RDLCK, _FIRST_SLOT + first, count)):
                return False
            self._readers.update(zip(slots, [readers + 1 for readers in held], strict=True))
            return True

    def own(self, first: int, count: int = 1) -> bool:
        """Lease `count` slots for writing. False, and no lease, if one is leased, here or in another process."""
        slots = range(first, first + count)
        with self._mutex:
            # rule: slot-has-one-writer-and-no-reader
            if not self._readers.keys().isdisjoint(slots) or not self._set(fcntl.F_WRLCK, _FIRST_SLOT + first, count):
                return False
            self._readers.update(dict.fromkeys(slots, _WRITING))
            return True

    def release(self, first: int, count: int = 1) -> None:
        """End one lease of each of `count` slots."""
        with self._mutex:
            free = []
            for slot in range(first, first + count):
                readers = self._readers.pop(slot)
                if readers > 1:
                    self._readers[slot] = readers - 1
                else:
                    free.append(slot)
            for run in runs(free):
                self._set(fcntl.F_UNLCK, _FIRST_SLOT + run.start, len(run))

    def _set(self, kind: int, byte: int, count: int = 1) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _LOCK.pack(kind, 0, byte, count, 0))
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            return False
        return True


class Segments:
    """The segment files of a directory. Descriptors are kept open as long as the object lives.

    direct   whether aligned blocks bypass the page cache
    """

    def __init__(self, directory: TierDirectory, geometry: Geometry, *, identity: bytes, direct: bool) -> None:
        """`identity`: 16 bytes that differ between layouts and models. `direct`: use direct I/O where possible."""
        self.direct = direct and geometry.block_bytes % PAGE == 0 and allows_direct_io(directory)
        self._directory = directory
        self._geometry = geometry
        self._identity = identity
        self._mutex = threading.Lock()
        self._fds: dict[tuple[int, bool], int] = {}  # by segment, and whether I/O is direct
        self._opened: list[int] = []
        self._own = threading.local()
        self._ending = weakref.finalize(self, _close_all, self._opened)

    def close(self) -> None:
        """Close the descriptors. Idempotent."""
        self._ending()

    def write(self, first: int, entries: Sequence[Entry], payloads: Sequence[memoryview]) -> None:
        """Write slots of one segment, from `first` on, with one system call. Raises OSError; the bytes of all these
        slots are undefined then.
        """
        headers = self._header_pages(len(entries))
        for header, entry, payload in zip(headers, entries, payloads, strict=True):
            header[:_DIGEST_AT] = self._header(entry)
            header[_DIGEST_AT:] = _digest(header, payload)
        fd, offset = self._place(first, self._is_direct(payloads), make=True)
        buffers = self._in_order(headers, payloads)
        while buffers:
            count = os.pwritev(fd, buffers, offset)
            buffers, offset = _rest(buffers, count), offset + count

    def read(self, first: int, entries: Sequence[Entry], outs: Sequence[memoryview]) -> list[str | None]:
        """Read the blocks of slots of one segment, from `first` on, with one system call. Returns the fault of each
        slot, or None. Raises OSError: FileNotFoundError if the segment is lost.
        """
        headers = self._header_pages(len(entries))
        fd, start = self._place(first, self._is_direct(outs), make=False)
        buffers, offset = self._in_order(headers, outs), start
        while buffers and (count := os.preadv(fd, buffers, offset)):
            buffers, offset = _rest(buffers, count), offset + count
        faults = []
        for header, entry, out in zip(headers, entries, outs, strict=True):
            is_short = offset < start + HEADER_BYTES + out.nbytes
            # rule: length-is-verified
            faults.append("is cut short" if is_short else self._fault(header, entry, out))
            start += self._geometry.slot_bytes
        return faults

    def _fault(self, header: memoryview, entry: Entry, out: memoryview) -> str | None:
        """What is wrong with a slot that was read; None if it holds the complete entry."""
        # Of bytes, because a memoryview compares one byte after another, which takes 9 us.
        if bytes(header[:_DIGEST_AT]) != self._header(entry):  # rule: header-is-verified
            return "has the header of another block or tier"
        if header[_DIGEST_AT:] != _digest(header, out):  # rule: every-bit-is-verified
            return "does not match its checksum"
        return None

    def copy(self, source: int, target: int) -> None:
        """Copy a slot as it is. Raises OSError."""
        num_bytes = self._geometry.slot_bytes
        fd, offset = self._place(source, False, make=False)
        content = os.pread(fd, num_bytes, offset)
        fd, offset = self._place(target, False, make=True)
        if os.pwrite(fd, content, offset) != num_bytes:
            raise OSError(f"slot {source} is cut short")

    def give_back(self, slot: int) -> bool:
        """Return a slot's space to the file system: its bytes become zeros. The caller owns the slot, whose record is
        void. False: the file system cannot do this, or the file is gone. Raises OSError.
        """
        try:
            fd, offset = self._place(slot, False, make=False)
        except FileNotFoundError:
            return False
        libc = ctypes.CDLL(None, use_errno=True)
        libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        if not libc.fallocate(fd, _PUNCH_HOLE, offset, self._geometry.slot_bytes):
            return True
        if (error := ctypes.get_errno()) == errno.EOPNOTSUPP:
            return False
        raise OSError(error, os.strerror(error), self.path(slot))

    def path(self, slot: int) -> str:
        """The slot's file and position, for messages."""
        segment, number = divmod(slot, self._geometry.slots_per_segment)
        return f"{self._directory.path / segment_name(segment)} slot {number}"

    def _header(self, entry: Entry) -> bytes:
        """The header without its digest. It depends only on tier and entry, so a reader compares all its bytes."""
        fields = _FIELDS.pack(
            _MAGIC, FORMAT_VERSION, self._identity, entry.key, entry.serial, self._geometry.block_bytes
        )
        return fields.ljust(_DIGEST_AT, b"\0")

    def _header_pages(self, count: int) -> list[memoryview]:
        """This thread's aligned pages for `count` headers."""
        pages: list[memoryview] = getattr(self._own, "pages", [])
        if len(pages) < count:
            memory = memoryview(mmap(-1, count * HEADER_BYTES))
            pages = self._own.pages = [memory[at : at + HEADER_BYTES] for at in range(0, len(memory), HEADER_BYTES)]
        return pages[:count]

    def _in_order(self, headers: Sequence[memoryview], blocks: Sequence[memoryview]) -> list[memoryview]:
        """The buffers of consecutive slots, in the order of the file."""
        gap = self._geometry.slot_bytes - HEADER_BYTES - self._geometry.block_bytes
        between = [memoryview(bytearray(gap))] if gap else []
        slots = [[header, block, *between] for header, block in zip(headers, blocks, strict=True)]
        return [buffer for slot in slots for buffer in slot][: -1 if gap else None]

    def _is_direct(self, blocks: Sequence[memoryview]) -> bool:
        return self.direct and not any(block.readonly or address_of(block) % PAGE for block in blocks)

    def _place(self, slot: int, direct: bool, *, make: bool) -> tuple[int, int]:
        """The descriptor of the slot's file and the slot's offset in it. `make`: the file is made if it is missing."""
        segment, number = divmod(slot, self._geometry.slots_per_segment)
        fd = self._fds.get((segment, direct))
        if fd is None or (make and os.fstat(fd).st_nlink == 0):  # rule: lost-segment-is-made-anew
            with self._mutex:
                fd = self._fds[segment, direct] = self._open(segment, direct, make=make)
                self._opened.append(fd)  # also if another one is in its place: a thread may use that one now
        return fd, number * self._geometry.slot_bytes

    def _open(self, segment: int, direct: bool, *, make: bool) -> int:
        """Open a segment's file. `make`: allocate all its slots, if there are fewer."""
        name, num_bytes = segment_name(segment), self._geometry.segment_bytes(segment)
        if make and self._directory.size(name) < num_bytes:
            fd = open_regular(name, os.O_RDWR | os.O_CREAT, dir_fd=self._directory.fd)
            try:
                os.posix_fallocate(fd, 0, num_bytes)
            finally:
                os.close(fd)
        return open_regular(name, self._directory.access | (os.O_DIRECT if direct else 0), dir_fd=self._directory.fd)


def address_of(block: memoryview) -> int:
    """The address of writable memory. By ctypes, because numpy takes 3 us for it."""
    return ctypes.addressof(ctypes.c_char.from_buffer(block))


def segment_name(segment: int) -> str:
    """The name of a segment's file."""
    return f"{SEGMENT_PREFIX}{segment:06d}"


def allows_direct_io(directory: TierDirectory) -> bool:
    """Whether files of the directory can be read past the page cache."""
    name = "direct" + TEMPORARY
    try:
        directory.remove(name)
        fd = open_regular(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, dir_fd=directory.fd)
        try:
            os.pwrite(fd, mmap(-1, PAGE), 0)
        finally:
            os.close(fd)
            directory.remove(name)
    except OSError:
        return False
    return True


def runs(slots: Sequence[int], *, within: int = 1 << 62) -> list[range]:
    """Consecutive slots, as ranges. No range crosses a multiple of `within`. `slots` ascend."""
    if slots and slots[-1] - slots[0] + 1 == len(slots) and slots[0] // within == slots[-1] // within:
        return [range(slots[0], slots[-1] + 1)]
    found: list[range] = []
    for slot in slots:
        if found and found[-1].stop == slot and slot % within:
            found[-1] = range(found[-1].start, slot + 1)
        else:
            found.append(range(slot, slot + 1))
    return found


def _digest(header: memoryview, payload: memoryview) -> bytes:
    state = xxhash.xxh3_128(header[:_DIGEST_AT])
    state.update(payload)  # rule: checksum-covers-the-whole-block
    return state.digest()


def _rest(buffers: list[memoryview], count: int) -> list[memoryview]:
    """The buffers without their first `count` bytes."""
    while buffers and count >= buffers[0].nbytes:
        count -= buffers[0].nbytes
        buffers = buffers[1:]
    return [buffers[0][count:], *buffers[1:]] if count else buffers


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def write_at(fd: int, data: bytes, offset: int) -> None:
    """Write all of `data`. Raises OSError."""
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count


def read_at(fd: int, out: memoryview, offset: int) -> None:
    """Fill `out`, with zeros beyond the end of the file. Raises OSError."""
    while out and (count := os.preadv(fd, [out], offset)):
        out, offset = out[count:], offset + count


def _checks(slots: Words, bodies: npt.NDArray[np.void]) -> Words:
    """The checks of records: never 0."""
    mixed = slots + np.uint64(_START)
    for part in (bodies["key"][:, 0], bodies["key"][:, 1], bodies["serial"]):
        mixed = (mixed ^ part) * np.uint64(_FACTOR)
        mixed ^= mixed >> np.uint64(32)
    return mixed | np.uint64(1)


def _body(entry: Entry) -> bytes:
    return entry.key + entry.serial.to_bytes(8, "little")


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE
