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

import dataclasses
import errno
import fcntl
import os
import secrets
import struct
import threading
import weakref
from dataclasses import dataclass
from mmap import mmap

import numpy as np
import numpy.typing as npt
import xxhash

from sidestream_kv.errors import TierCorrupt
from sidestream_kv.offload.tiers.directory import SEGMENT_PREFIX, TABLE_FILE, TEMPORARY, TierDirectory, open_regular
from sidestream_kv.offload.tiers.index import Entry
from sidestream_kv.types import Key

PAGE = 4096
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

    def keys(self, slots: Slots) -> list[Key]:
        """The keys of these slots, whose records are valid."""
        keys = self.bodies["key"][slots].tobytes()
        return [keys[at : at + 16] for at in range(0, len(keys), 16)]

    def entries(self, slots: Slots) -> list[Entry]:
        """The entries in these slots, whose records are valid."""
        return list(map(Entry, self.keys(slots), self.bodies["serial"][slots].tolist()))


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
    def open(cls, directory: TierDirectory, *, write: bool = True) -> SlotTable | None:
        """The table of a directory; None if it has none. Raises TierCorrupt if the file is no table. Raises OSError."""
        try:
            fd = open_regular(TABLE_FILE, os.O_RDWR if write else os.O_RDONLY, dir_fd=directory.fd)
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

    def publish(self, slot: int, entry: Entry, stamp: int) -> int:
        """Make the record of a written slot valid. Returns its check. Raises OSError."""
        write_at(self.fd, entry.key + entry.serial.to_bytes(8, "little"), self._bodies_at + _BODY.itemsize * slot)
        self.stamp(slot, stamp)
        check = check_of(slot, entry)
        write_at(self.fd, check.to_bytes(8, "little"), self._checks_at + 8 * slot)
        return check

    def void(self, slot: int) -> None:
        """Make the record of a slot void. Raises OSError."""
        write_at(self.fd, bytes(8), self._checks_at + 8 * slot)

    def stamp(self, slot: int, stamp: int) -> None:
        """Set the time of the last use of a slot. Raises OSError."""
        write_at(self.fd, stamp.to_bytes(8, "little"), self._stamps_at + 8 * slot)

    def check(self, slot: int) -> int:
        """The check of a slot; 0: void. Raises OSError."""
        return int.from_bytes(os.pread(self.fd, 8, self._checks_at + 8 * slot), "little")

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
    for part in _WORDS.unpack(entry.key + entry.serial.to_bytes(8, "little")):
        mixed = ((mixed ^ part) * _FACTOR) & _MASK
        mixed ^= mixed >> 32
    return mixed | 1


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

    def share(self, slot: int) -> bool:
        """Lease a slot for reading. False if it is being written, here or in another process."""
        with self._mutex:
            readers = self._readers.get(slot, 0)
            # rule: slot-is-leased-while-it-is-read
            if readers == _WRITING or (not readers and not self._set(fcntl.F_RDLCK, _FIRST_SLOT + slot)):
                return False
            self._readers[slot] = readers + 1
            return True

    def own(self, slot: int) -> bool:
        """Lease a slot for writing. False if it is leased, here or in another process."""
        with self._mutex:
            # rule: slot-has-one-writer-and-no-reader
            if slot in self._readers or not self._set(fcntl.F_WRLCK, _FIRST_SLOT + slot):
                return False
            self._readers[slot] = _WRITING
            return True

    def release(self, slot: int) -> None:
        """End one lease of a slot."""
        with self._mutex:
            readers = self._readers[slot]
            if readers > 1:
                self._readers[slot] = readers - 1
                return
            del self._readers[slot]
            self._set(fcntl.F_UNLCK, _FIRST_SLOT + slot)

    def _set(self, kind: int, byte: int) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _LOCK.pack(kind, 0, byte, 1, 0))
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

    def write(self, slot: int, entry: Entry, payload: memoryview) -> None:
        """Write a slot. Raises OSError; the slot's bytes are undefined then."""
        header = self._header_page()
        header[:_DIGEST_AT] = self._header(entry)
        header[_DIGEST_AT:] = _digest(header, payload)
        fd, offset = self._place(slot, self._is_direct(payload), make=True)
        buffers = [header, payload]
        while buffers:
            count = os.pwritev(fd, buffers, offset)
            buffers, offset = _rest(buffers, count), offset + count

    def read(self, slot: int, entry: Entry, out: memoryview) -> str | None:
        """Read a slot's block into `out`. Returns the fault of the slot, or None. Raises OSError: FileNotFoundError if
        the segment is lost.
        """
        header = self._header_page()
        fd, offset = self._place(slot, self._is_direct(out), make=False)
        buffers = [header, out]
        while buffers and (count := os.preadv(fd, buffers, offset)):
            buffers, offset = _rest(buffers, count), offset + count
        if buffers:  # rule: length-is-verified
            return "is cut short"
        if header[:_DIGEST_AT] != self._header(entry):  # rule: header-is-verified
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

    def _header_page(self) -> memoryview:
        """This thread's aligned page for a header."""
        if not hasattr(self._own, "page"):
            self._own.page = memoryview(mmap(-1, HEADER_BYTES))
        page: memoryview = self._own.page
        return page

    def _is_direct(self, block: memoryview) -> bool:
        return self.direct and np.frombuffer(block, np.uint8).ctypes.data % PAGE == 0

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
        return open_regular(name, os.O_RDWR | (os.O_DIRECT if direct else 0), dir_fd=self._directory.fd)


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


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE
