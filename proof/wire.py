"""In-memory connections between front ends and an engine server, all in one thread: replacements for
`socket.socketpair`, a selector and an event loop. A seed decides how many bytes are moved at a time, and which end is
polled next. As on a Unix socket, bytes are never lost, duplicated or reordered.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import selectors
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

# A blocking `recv` fails after the other end ran this many times without sending the bytes.
_MOST_WAITS = 1000
_numbers = itertools.count(1_000_000)


class Wire:
    """One end of a connection, used instead of a socket. Made by `wire_pair`."""

    def __init__(self, rng: random.Random, capacity: int) -> None:
        self._rng = rng
        self._capacity = capacity
        self._number = next(_numbers)
        self._timed = False
        self.peer = self
        self.incoming = bytearray()
        self.closed = False
        self.wait: Callable[[], None] | None = None
        """Function that runs the other end while a `recv` blocks; None: `recv` does not block."""

    @property
    def as_socket(self) -> socket.socket:
        """Returns itself, because it implements the socket methods that client and server use."""
        return cast("socket.socket", self)

    @property
    def readable(self) -> bool:
        """Whether `recv` returns immediately: bytes have arrived, or the other end is closed."""
        return bool(self.incoming) or self.peer.closed

    @property
    def writable(self) -> bool:
        """Whether `send` returns or fails immediately: there is room, or the other end is closed."""
        return len(self.peer.incoming) < self._capacity or self.peer.closed

    def send(self, data: bytes | bytearray) -> int:
        """Send some of the bytes, like a non-blocking socket."""
        if self.closed or self.peer.closed:
            raise BrokenPipeError("the other end is closed")
        room = self._capacity - len(self.peer.incoming)
        if room <= 0:
            raise TimeoutError("no room") if self._timed else BlockingIOError("no room")
        count = self._some(min(room, len(data)))
        self.peer.incoming += data[:count]
        return count

    def recv(self, size: int) -> bytes:
        """Some of the bytes that have arrived; empty if the other end is closed."""
        for _ in range(_MOST_WAITS if self.wait is not None else 0):
            if self.readable:
                break
            assert self.wait is not None
            self.wait()
        if not self.incoming:
            if self.peer.closed:
                return b""
            raise BlockingIOError("nothing has come")
        count = self._some(min(size, len(self.incoming)))
        data = bytes(self.incoming[:count])
        del self.incoming[:count]
        return data

    def close(self) -> None:
        """Close this end. The other end can still read the bytes sent before; then it sees that the connection has
        ended.
        """
        self.closed = True

    def fileno(self) -> int:
        """A unique number; -1 after `close`."""
        return -1 if self.closed else self._number

    def setblocking(self, blocking: bool) -> None:
        """Ignored: `recv` blocks only if `wait` is set."""
        if not blocking:
            self.wait = None

    def settimeout(self, seconds: float) -> None:
        """From now on, a `send` without room raises TimeoutError immediately, as if it had waited `seconds`."""
        self._timed = True

    def _some(self, most: int) -> int:
        return most if most <= 1 or self._rng.random() < 0.5 else self._rng.randint(1, most)


def wire_pair(rng: random.Random, *, capacity: int) -> tuple[Wire, Wire]:
    """Two ends of a connection that buffers at most `capacity` bytes in each direction."""
    ends = Wire(rng, capacity), Wire(rng, capacity)
    ends[0].peer, ends[1].peer = ends[1], ends[0]
    return ends


class WireSelector(selectors.BaseSelector):
    """A selector that reports each ready wire with probability `share`. It never sleeps."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._keys: dict[Any, selectors.SelectorKey] = {}
        self.share = 1.0

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        self._keys[fileobj] = selectors.SelectorKey(fileobj, fileobj.fileno(), events, data)
        return self._keys[fileobj]

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """The ready wires that the seed chooses, in an order that the seed chooses. Never waits."""
        ready = [
            (key, selectors.EVENT_READ)
            for key in self._keys.values()
            if isinstance(key.fileobj, Wire) and key.fileobj.readable
        ]
        self._rng.shuffle(ready)
        return [one for one in ready if self._rng.random() < self.share]

    def close(self) -> None:
        self._keys.clear()


class WireLoop:
    """The part of an event loop that `RemoteClient` uses. Only `turn` calls the callbacks of wires."""

    def __init__(self) -> None:
        self._readers: dict[Wire, Callable[[], object]] = {}
        self._writers: dict[Wire, Callable[[], object]] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A context in which this is the running loop."""
        asyncio._set_running_loop(self._as_loop)
        try:
            yield
        finally:
            asyncio._set_running_loop(None)

    def turn(self) -> None:
        """Call the callbacks of all ready wires once."""
        with self.running():
            for callbacks, ready in ((self._readers, "readable"), (self._writers, "writable")):
                for wire, callback in list(callbacks.items()):
                    if callbacks.get(wire) is callback and getattr(wire, ready):
                        callback()

    def is_running(self) -> bool:
        """Always True."""
        return True

    def is_closed(self) -> bool:
        """Always False."""
        return False

    def get_debug(self) -> bool:
        """Always False. Called by futures."""
        return False

    def create_future(self) -> asyncio.Future[Any]:
        """A future whose waiter polls it."""
        return asyncio.Future(loop=self._as_loop)

    def add_reader(self, wire: Wire, callback: Callable[[], object]) -> None:
        self._readers[wire] = callback

    def remove_reader(self, wire: Wire) -> bool:
        return self._readers.pop(wire, None) is not None

    def add_writer(self, wire: Wire, callback: Callable[[], object]) -> None:
        self._writers[wire] = callback

    def remove_writer(self, wire: Wire) -> bool:
        return self._writers.pop(wire, None) is not None

    @property
    def _as_loop(self) -> asyncio.AbstractEventLoop:
        return cast("asyncio.AbstractEventLoop", self)
