"""The cache process: owns host memory for KV blocks, which engines of this machine map (`tiers.shared_memory`).

One thread waits for sockets and for the ends of processes; no call blocks. The process takes no part in reads and
writes of blocks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sidestream_kv.device.machine import available_bytes
from sidestream_kv.errors import ConfigError
from sidestream_kv.offload.tiers.opening import identity_of
from sidestream_kv.offload.tiers.shared_memory import (
    GOODBYE,
    MOST_MESSAGE_BYTES,
    VERSION,
    message,
    parsed,
    peer_of,
)
from sidestream_kv.offload.tiers.slots import table_bytes

LOCK_SUFFIX = ".lock"

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Memory:
    """The memory of one model and layout."""

    fd: int
    description: dict[str, Any]
    num_slots: int
    block_bytes: int
    engines: set[_Engine] = field(default_factory=set)
    last_used_s: float = field(default_factory=time.time)

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.block_bytes

    def stat(self) -> dict[str, Any]:
        checks = np.frombuffer(os.pread(self.fd, 8 * self.num_slots, 0), np.uint64)
        return {
            **self.description,
            "blocks": int(np.count_nonzero(checks)),
            "capacity_blocks": self.num_slots,
            "block_bytes": self.block_bytes,
            "engines": sorted(engine.pid for engine in self.engines),
        }


@dataclass(slots=True, eq=False)
class _Engine:
    """An engine that uses a memory.

    fd     copy of the descriptor to which the engine's leases belong
    ended  pidfd of its process
    """

    pid: int
    memory: _Memory
    connection: socket.socket
    fd: int
    ended: int


class CacheProcess:
    """The memory, and the socket at `path` where engines ask for it. One thread calls `run`; any thread, or a signal's
    handler, may call `stop`.
    """

    def __init__(self, path: str | Path, *, host_bytes: int) -> None:
        """Listen. `host_bytes`: most bytes of blocks, for all models together.

        Raises ConfigError if the machine has less memory, if another cache process listens there, or if there can be
        no socket.
        """
        available = available_bytes()
        if not host_bytes or (available is not None and host_bytes > available):
            raise ConfigError(
                f"host_memory is {host_bytes} bytes, this machine has {available} bytes available: "
                f"give a size between, such as {(available or 8 << 30) // 2 >> 20}MiB"
            )
        self.path = Path(path).expanduser().absolute()
        self._host_bytes = host_bytes
        self._memories: dict[bytes, _Memory] = {}
        self._num_engines = 0  # so far
        self._stopping = False
        self._lock = _lock(self.path)
        try:
            self._listener = _listen(self.path)
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(
                f"no socket can be made at {self.path} ({error.strerror or error}): give a path of at most 100 "
                f"characters in a directory that this user may write"
            ) from error
        self._bell, self._alarm = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._watch(self._listener, self._accept)
        self._watch(self._bell, lambda: None)

    def run(self) -> None:
        """Serve until `stop`; then free the memory as soon as no engine maps it, and remove the socket."""
        _log.info("cache process: listens at %s, for at most %d bytes of blocks", self.path, self._host_bytes)
        try:
            while not self._stopping:
                for key, _ in self._selector.select():
                    key.data()
        finally:
            self._close()

    def stop(self) -> None:
        """Make `run` return. Never blocks."""
        self._stopping = True
        with contextlib.suppress(OSError):  # it has ended before
            self._alarm.send(b"!")

    def _close(self) -> None:
        self.path.unlink(missing_ok=True)
        for memory in [*self._memories.values()]:
            for engine in [*memory.engines]:
                self._drop(engine)
            os.close(memory.fd)
        for each in [*self._selector.get_map().values()]:
            if isinstance(each.fileobj, socket.socket):
                each.fileobj.close()
        self._selector.close()
        self._alarm.close()
        os.close(self._lock)
        _log.info("cache process: stopped")

    def _watch(self, source: socket.socket | int, act: Callable[[], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, act)

    # ------------------------------------------------------------------ greetings

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the caller has gone
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            if peer_of(connection)[1] == os.geteuid():  # rule: memory-is-for-one-user
                self._watch(connection, partial(self._greet, connection))
            else:
                connection.close()

    def _greet(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        try:
            data = connection.recv(MOST_MESSAGE_BYTES)
            if data:
                self._answer(connection, parsed(data))
            else:
                connection.close()
        except (OSError, _Refused) as error:
            if isinstance(error, _Refused):
                _log.warning("cache process: refused an engine: %s", error)
                with contextlib.suppress(OSError):
                    connection.send(message({"version": VERSION, "refused": str(error)}), socket.MSG_NOSIGNAL)
            connection.close()

    def _answer(self, connection: socket.socket, asked: dict[str, Any]) -> None:
        match asked:
            case {"version": version} if version != VERSION:  # rule: greeting-of-another-version-is-refused
                raise _Refused(
                    f"it speaks version {VERSION}, and the engine {version!r}: use the same version of Sidestream"
                )
            case {"sidestream": "stat"}:
                memories = [memory.stat() for memory in self._memories.values()]
                stat = {"version": VERSION, "host_bytes": self._host_bytes, "memories": memories}
                connection.send(message(stat), socket.MSG_NOSIGNAL)
                connection.close()
            case {
                "sidestream": "memory",
                "description": dict(description),
                "block_bytes": int(block_bytes),
                "num_bytes": int(num_bytes),
            } if 0 < block_bytes <= num_bytes:
                self._admit(connection, description, block_bytes, num_bytes)
            case _:
                raise _Refused("it does not understand the greeting: use the same version of Sidestream")

    def _admit(self, connection: socket.socket, description: dict[str, Any], block_bytes: int, num_bytes: int) -> None:
        pid = peer_of(connection)[0]
        try:
            ended = os.pidfd_open(pid)
        except OSError:
            raise _Refused(
                f"it cannot see process {pid}, whose end it must notice: run both in one PID namespace"
            ) from None
        fd = -1
        try:
            memory = self._memory_of(description, block_bytes, num_bytes)
            fd = _opened_anew(memory.fd)  # rule: each-engine-has-its-own-descriptor
            self._num_engines += 1
            answer = {"version": VERSION, "num_slots": memory.num_slots, "client": self._num_engines}
            socket.send_fds(connection, [message(answer)], [fd], socket.MSG_NOSIGNAL)
        except BaseException:
            os.close(ended)
            if fd >= 0:
                os.close(fd)
            raise
        engine = _Engine(pid, memory, connection, fd, ended)
        memory.engines.add(engine)
        self._watch(ended, partial(self._drop, engine))  # rule: leases-end-with-the-process
        self._watch(connection, partial(self._hear, engine))
        _log.info("cache process: engine %d uses %s", pid, _told(memory))

    def _hear(self, engine: _Engine) -> None:
        """A message of an engine, or the end of its connection."""
        if engine not in engine.memory.engines:
            return  # it has ended just now
        try:
            data = engine.connection.recv(len(GOODBYE))
        except OSError:
            data = b""
        if data == GOODBYE:
            self._drop(engine)  # rule: goodbye-gives-the-descriptor-back
        elif not data:
            self._selector.unregister(engine.connection)  # rule: leases-outlive-the-connection

    def _drop(self, engine: _Engine) -> None:
        """Forget an engine that has given back its leases, or whose process has ended. Idempotent."""
        if engine not in engine.memory.engines:
            return
        for source in (engine.ended, engine.connection):
            with contextlib.suppress(KeyError):  # its connection has ended before
                self._selector.unregister(source)
        engine.connection.close()
        os.close(engine.ended)
        os.close(engine.fd)
        engine.memory.engines.discard(engine)
        engine.memory.last_used_s = time.time()
        _log.info("cache process: engine %d has left", engine.pid)

    # ------------------------------------------------------------------ memories

    def _memory_of(self, description: dict[str, Any], block_bytes: int, num_bytes: int) -> _Memory:
        """The memory of a model, made if there is none. Raises _Refused if too little is left, and OSError."""
        identity = identity_of(description)
        if (memory := self._memories.get(identity)) is not None:
            return memory
        num_slots = num_bytes // block_bytes
        self._make_room(num_slots * block_bytes)
        fd = os.memfd_create("sidestream-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(fd, 0o600)  # KV reveals users' text
            os.ftruncate(fd, table_bytes(num_slots) + num_slots * block_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except OSError:
            os.close(fd)
            raise
        memory = self._memories[identity] = _Memory(fd, description, num_slots, block_bytes)
        return memory

    def _make_room(self, num_bytes: int) -> None:
        """Free memories that no engine uses, least recently used first, until `num_bytes` are left."""
        unused = sorted((each for each in self._memories.values() if not each.engines), key=lambda m: m.last_used_s)
        in_use = sum(each.num_bytes for each in self._memories.values() if each.engines)
        if in_use + num_bytes > self._host_bytes:  # rule: cache-process-keeps-its-bound
            raise _Refused(
                f"the engine asks for {num_bytes} bytes, but other models use {in_use} of {self._host_bytes}: lower "
                f"--offload-host of the engine, or raise --host-memory of the cache process"
            )
        while sum(each.num_bytes for each in self._memories.values()) + num_bytes > self._host_bytes:
            memory = unused.pop(0)
            _log.info("cache process: frees %s, which no engine uses", _told(memory))
            del self._memories[identity_of(memory.description)]
            os.close(memory.fd)


class _Refused(Exception):
    """An engine's greeting is refused. The message gives reason and remedy."""


def _told(memory: _Memory) -> str:
    return f"{memory.num_bytes} bytes for fingerprint {memory.description.get('fingerprint')!s:.40}"


def _opened_anew(fd: int) -> int:
    """Another descriptor of the same file, with locks of its own."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def _lock(path: Path) -> int:
    """Keep other cache processes from the socket `path`. The lock ends with the process."""
    try:
        fd = os.open(f"{path}{LOCK_SUFFIX}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(
            f"no socket can be made at {path} ({error.strerror}): give a path in a directory that this user may write"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # rule: one-cache-process-for-a-socket
    except BlockingIOError:
        os.close(fd)
        raise ConfigError(f"a cache process listens at {path} already: give another path, or end it") from None
    return fd


def _listen(path: Path) -> socket.socket:
    """Listen at `path`, in place of the socket of a process that was killed. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    before = os.umask(0o177)
    try:
        if path.is_socket():
            path.unlink()
        listener.bind(str(path))
        listener.listen()
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise OSError(errno.EEXIST, "there is a file that is no socket") from error
        raise
    finally:
        os.umask(before)
    return listener
