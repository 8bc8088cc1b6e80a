"""The memory of a cache process (`sidestream cache serve`): how an engine asks for it, and its format. Knows no tensor.

The cache process owns host memory and outlives engines: for each model and layout, one file in memory (memfd), which
the engines of a host map. It takes no part in reads and writes. A file has slots of one block each:

    [0, t)   a record for each slot, as in the table of a disk tier (`slots.Records`); t = `table_bytes(num_slots)`
    [t, …)   the blocks

**A lease** of a slot is a lock of the system (`F_OFD_SETLK`) on the slot's byte of the file: shared by readers,
exclusive for a writer. A record is void while its slot is written, so a block that is found is complete. The file is
sealed: its size cannot change, so a mapped table cannot end a process (SIGBUS).

**The lock belongs to the descriptor**, and each engine gets a descriptor of its own. The cache process keeps a copy of
it until the engine's process has ended completely, which a pidfd shows. So the leases of an engine that was killed end
after the GPU's last copy for it, and not by time.

**The greeting** is one message of JSON each way, on a Unix socket that keeps the borders of messages. An engine that
ends in order says so, and the cache process closes its copy at once. If the cache process ends, engines keep what they
have mapped; the next engine begins with an empty memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from mmap import MAP_SHARED, mmap
from pathlib import Path
from typing import Any

from sidestream_kv.errors import ConfigError
from sidestream_kv.kv.layout import BlockLayout
from sidestream_kv.offload.tiers.slots import Records, table_bytes

VERSION = 1
"""Version of greeting and format."""
MOST_MESSAGE_BYTES = 64 << 10
GOODBYE = b"bye"
"""The last message of an engine that has given back all its leases."""

_ANSWER_S = 10.0
_LOCK = struct.Struct("@hhqqi4x")  # struct flock
_PEER = struct.Struct("iII")  # struct ucred: pid, uid, gid
_START = "start one: sidestream cache serve --socket PATH --host-memory SIZE"


class SharedMemory:
    """An engine's share in the memory of a cache process. Made by `open`.

    records   the records of all slots, which other processes change at any time
    pages     the blocks, mapped
    client    number of this engine, which no other engine of the cache process has
    """

    def __init__(self, path: Path, connection: socket.socket, fd: int, num_slots: int, client: int, size: int) -> None:
        """Callers use `open`. `size`: bytes of a block. Raises OSError."""
        self.path = path
        self.num_slots = num_slots
        self.client = client
        begin = table_bytes(num_slots)
        self.records = Records.over(mmap(fd, begin, MAP_SHARED), num_slots)
        self.pages = mmap(fd, num_slots * size, MAP_SHARED, offset=begin)
        self.leases = Leases(fd)
        self._connection = connection
        self._connection.setblocking(False)
        self._fd = fd
        self._closed = False

    @classmethod
    def open(cls, path: str | Path, *, layout: BlockLayout, fingerprint: str, num_bytes: int) -> SharedMemory:
        """Map the memory that the cache process at the socket `path` has for this model. If it has none, it makes one
        of `num_bytes`.

        Raises ConfigError if no cache process is there, if it belongs to another user or speaks another version, or
        if it has too little memory left.
        """
        path = Path(path).expanduser().absolute()
        wanted = {
            "description": {"format_version": VERSION, **layout.describe(), "fingerprint": fingerprint},
            "block_bytes": layout.block_bytes,
            "num_bytes": num_bytes,
        }
        connection, answer, fds = _ask(path, "memory", wanted)
        try:
            num_slots, client = int(answer["num_slots"]), int(answer["client"])
            (fd,) = fds
            if os.fstat(fd).st_size != table_bytes(num_slots) + num_slots * layout.block_bytes:
                raise ValueError
            return cls(path, connection, fd, num_slots, client, layout.block_bytes)
        except (KeyError, ValueError, TypeError):
            _close(connection, fds)
            raise ConfigError(_stranger(path)) from None
        except OSError as error:
            _close(connection, fds)
            raise ConfigError(f"the memory of the cache process at {path} cannot be mapped: {error.strerror}") from None

    def is_served(self) -> bool:
        """Whether the cache process still runs. Never blocks."""
        try:
            return bool(self._connection.recv(1, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """End all leases, and leave. The pages stay mapped as long as they are referred to. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.leases.end_all()  # rule: leases-end-before-the-goodbye
        with contextlib.suppress(OSError):  # the cache process has ended before
            self._connection.send(GOODBYE, socket.MSG_NOSIGNAL)
        _close(self._connection, [self._fd])


class Leases:
    """The leases of this process on the slots of the file `fd`: locks on runs of bytes. One thread uses them."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, slots: Sequence[int]) -> list[int]:
        """Lease slots for reading, also those that are leased for writing here. Returns those that another process
        writes.
        """
        return self._all(fcntl.F_RDLCK, slots)

    def write(self, slots: Sequence[int]) -> list[int]:
        """Lease slots for writing. Returns those that another process reads or writes."""
        return self._all(fcntl.F_WRLCK, slots)

    def end(self, slots: Sequence[int]) -> None:
        """End the leases of slots."""
        self._all(fcntl.F_UNLCK, slots)

    def end_all(self) -> None:
        """End all leases."""
        self._set(fcntl.F_UNLCK, 0, 0)

    def _all(self, kind: int, slots: Sequence[int]) -> list[int]:
        refused: list[int] = []
        for first, count in _runs(slots):
            if not self._set(kind, first, count):
                refused += [slot for slot in range(first, first + count) if not self._set(kind, slot, 1)]
        return refused

    def _set(self, kind: int, first: int, count: int) -> bool:
        """Set or remove a lock. `count` 0: up to the end."""
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _LOCK.pack(kind, os.SEEK_SET, first, count, 0))
        except BlockingIOError:
            return False
        return True


def _runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """The slots as runs: first slot and number."""
    runs: list[tuple[int, int]] = []
    for slot in sorted(slots):
        if runs and slot == sum(runs[-1]):
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((slot, 1))
    return runs


def content_of(path: str | Path) -> dict[str, Any]:
    """What the cache process at the socket `path` holds. Raises ConfigError as `SharedMemory.open` does."""
    connection, answer, fds = _ask(Path(path).expanduser().absolute(), "stat", {})
    _close(connection, fds)
    return answer


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Ids of the process and of the user at the other end of a Unix socket. Process 0: it cannot be seen from here."""
    pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


def message(values: Mapping[str, Any]) -> bytes:
    """A message of the greeting."""
    return json.dumps(dict(values)).encode()


def parsed(data: bytes) -> dict[str, Any]:
    """The values of a message; empty if it is none."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _ask(path: Path, what: str, wanted: dict[str, Any]) -> tuple[socket.socket, dict[str, Any], list[int]]:
    """Send a greeting. Returns the connection, the answer, and the descriptors in it."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fds: list[int] = []
    try:
        connection.settimeout(_ANSWER_S)
        connection.connect(str(path))
        if (user := peer_of(connection)[1]) != os.geteuid():  # rule: memory-of-another-user-is-not-used
            raise ConfigError(
                f"the cache process at {path} belongs to user {user}, but this process runs as user {os.geteuid()}: "
                f"use a cache process of this user; {_START}"
            )
        connection.send(message({"sidestream": what, "version": VERSION, **wanted}), socket.MSG_NOSIGNAL)
        data, fds, _, _ = socket.recv_fds(connection, MOST_MESSAGE_BYTES, 1)
        answer = parsed(data)
        if "version" not in answer:
            raise ConfigError(_stranger(path))
        if answer["version"] != VERSION:  # rule: other-version-is-refused
            raise ConfigError(
                f"the cache process at {path} speaks version {answer['version']!r}, but this version of Sidestream "
                f"speaks {VERSION}: start it again with the same version of Sidestream"
            )
        if "refused" in answer:
            raise ConfigError(f"the cache process at {path} refuses: {answer['refused']}")
    except TimeoutError:
        _close(connection, fds)
        raise ConfigError(
            f"the cache process at {path} does not answer within {_ANSWER_S:g} s: start it again"
        ) from None
    except OSError as error:
        _close(connection, fds)
        raise ConfigError(f"no cache process listens at {path} ({error.strerror or error}): {_START}") from None
    except BaseException:
        _close(connection, fds)
        raise
    return connection, answer, fds


def _stranger(path: Path) -> str:
    return f"what answers at {path} is no cache process of Sidestream: {_START}"


def _close(connection: socket.socket, fds: Sequence[int]) -> None:
    connection.close()
    for fd in fds:
        os.close(fd)
