"""Sockets between rank 0's process and the processes of the other ranks.

A message is encoded once and written to each rank's Unix socket; a rank sleeps in the kernel until the message comes.
No thread spins, and no message passes through a collective or the device.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from sidestream.errors import DeviceLost, EngineStopped
from sidestream.processes.frames import FrameDecoder, FrameEncoder
from sidestream.ranks.fences import Progress
from sidestream.ranks.follower import Follower
from sidestream.ranks.leader import Ranks
from sidestream.ranks.messages import Beat, Begin, ToLeader, ToRank

SILENCE_S = 10.0
"""Seconds without a message after which a rank counts as hanging. A rank sends a `Beat` at least every `_BEAT_S`."""
_BEAT_S = 0.5
# Polling interval of a rank while its device has work. It may delay a report, and so a transfer, but no step.
_POLL_S = 0.5e-3
# `recv` allocates as many bytes before each read. The C library maps and unmaps memory for 128 KiB and more.
_READ_BYTES = 1 << 16
# Unsent bytes at which a rank counts as hanging. The messages of all steps and copies in flight are far smaller.
_MAX_BACKLOG = 256 << 20
_END_S = 60.0
"""Longest wait for the ranks to finish their work and end."""


class SocketTransport:
    """Rank 0's sockets to the other ranks, by rank from 1, and the thread that reads their reports. See `Transport`.

    how_ended   called with a rank whose socket was closed or is silent; returns what is known of its end
    end         ends all other ranks at once
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        decoders: Sequence[FrameDecoder],
        *,
        how_ended: Callable[[int], str],
        end: Callable[[], None],
    ) -> None:
        self._sockets = tuple(sockets)
        self._how_ended = how_ended
        self._end = end
        self._encoder = FrameEncoder(sent=1)  # frame 1 of each socket was `Begin`
        self._lock = threading.Lock()  # guards `_backlogs`
        self._backlogs: tuple[deque[memoryview], ...] = tuple(deque() for _ in sockets)
        self._decoders = tuple(decoders)
        self._bell, self._rung = socket.socketpair()
        self._open = set(range(len(self._sockets)))
        self._closing = False
        self._thread: threading.Thread | None = None
        self.ranks = Ranks(len(self._sockets) + 1, self, progress=Progress(len(self._sockets) + 1))
        """Rank 0's handle of the other ranks. It counts as lost as soon as one rank is lost."""

    def start(self, received: Sequence[Iterable[ToLeader]], *, silence_s: float = SILENCE_S) -> None:
        """Begin to read reports. Call it when every rank follows. `received`: messages of each rank read before."""
        for rank, messages in enumerate(received, start=1):
            for message in messages:
                self.ranks.take_in(rank, message)
        for each in (*self._sockets, self._bell, self._rung):
            each.setblocking(False)
        self._thread = threading.Thread(target=self._read, args=(silence_s,), name="sidestream-ranks", daemon=True)
        self._thread.start()

    def send(self, message: ToRank) -> None:
        """See `Transport.send`. Bytes that a socket does not take at once are written by the reading thread."""
        frame = self._encoder.encode(message)
        with self._lock:
            for each, backlog in zip(self._sockets, self._backlogs, strict=True):
                if left := _write(each, frame) if not backlog else frame:
                    backlog.append(memoryview(left))
                    # A full bell wakes the thread anyway. A closed bell means that the ranks have ended.
                    with contextlib.suppress(OSError):
                        self._bell.send(b"\0")

    def close(self) -> None:
        """See `Transport.close`. Ranks that have not ended after a minute are left to their starter."""
        self._closing = True
        if self._thread is not None:
            self._thread.join(_END_S)
        if self._thread is None or not self._thread.is_alive():
            self._bell.close()
            self._rung.close()

    def kill(self) -> None:
        self._end()

    def _read(self, silence_s: float) -> None:
        silent = [0.0] * len(self._sockets)  # seconds without a message
        now_s = time.monotonic()
        while self._open:
            wanting = [self._sockets[rank] for rank in self._open if self._backlogs[rank]]
            readable, writable, _ = select.select(
                [*(self._sockets[rank] for rank in self._open), self._rung], wanting, [], _BEAT_S
            )
            # At most the time-out of `select`, so that time in which the machine was suspended does not count.
            waited_s, now_s = min(time.monotonic() - now_s, _BEAT_S), time.monotonic()
            if self._rung in readable:
                with contextlib.suppress(BlockingIOError):
                    self._rung.recv(_READ_BYTES)
            for each in writable:
                self._flush(self._sockets.index(each))
            for index in sorted(self._open):
                if self._sockets[index] in readable:
                    silent[index] = 0.0
                    self._take_in(index)
                    continue
                silent[index] += waited_s
                if silent[index] >= silence_s:
                    self._lose(index, f"it has not answered for {silence_s:g} s")
                elif sum(map(len, self._backlogs[index])) > _MAX_BACKLOG:
                    self._lose(index, "it reads no messages")

    def _take_in(self, index: int) -> None:
        data = b""
        try:
            data = self._sockets[index].recv(_READ_BYTES)
            for message in self._decoders[index].feed(data):
                self.ranks.take_in(index + 1, message)
        except BlockingIOError:
            return
        except EngineStopped as error:
            self._lose(index, str(error))
            return
        except OSError:  # the process has ended
            data = b""
        if not data:
            self._lose(index, "")

    def _lose(self, index: int, reason: str) -> None:
        """A rank is gone. Unless the ranks were asked to end, this ends the engine."""
        self._open.discard(index)
        if not self._closing:
            how = self._how_ended(index + 1)
            reason = f"{reason} ({how})" if reason else how
            self.ranks.lose(DeviceLost(f"rank {index + 1} of {self.ranks.size} is lost: {reason}"))

    def _flush(self, index: int) -> None:
        with self._lock:
            backlog = self._backlogs[index]
            while backlog:
                left = _write(self._sockets[index], backlog[0])
                if left:
                    backlog[0] = memoryview(left)
                    return
                backlog.popleft()


def _write(each: socket.socket, frame: bytes | memoryview) -> bytes | memoryview:
    """Write as many bytes as the socket takes now. Returns the remaining bytes. If the socket is closed, the
    bytes are dropped, and the reading thread notices it.
    """
    try:
        while (sent := each.send(frame)) < len(frame):
            frame = memoryview(frame)[sent:]
    except BlockingIOError:
        return frame
    except OSError:
        pass
    return b""


def decoder_of_reports() -> FrameDecoder:
    """A decoder of the messages that rank 0 receives."""
    return FrameDecoder(msgspec.msgpack.Decoder(ToLeader))


class RankConnection:
    """Another rank's end of the connection to rank 0. One thread uses it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._encoder = FrameEncoder()
        self._decoder = FrameDecoder(msgspec.msgpack.Decoder(ToRank))
        self._messages: deque[ToRank] = deque()
        self._sent_s = time.monotonic()

    def wait_for_begin(self) -> Begin | None:
        """Rank 0's first message; None if its process has ended. Blocks."""
        while data := self._connection.recv(_READ_BYTES):
            self._messages.extend(self._decoder.feed(data))
            if self._messages:
                message = self._messages.popleft()
                if not isinstance(message, Begin):
                    raise EngineStopped(f"the first message is a {type(message).__name__}, not a Begin")
                return message
        return None

    def take(self) -> ToRank | None:
        """The next message; None if none has arrived. Raises EngineStopped if rank 0 has closed the connection."""
        if not self._messages:
            try:
                data = self._connection.recv(_READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            if not data:
                raise EngineStopped("rank 0 has ended")
            self._messages.extend(self._decoder.feed(data))
        return self._messages.popleft() if self._messages else None

    def report(self, message: ToLeader) -> None:
        """Send a report to rank 0."""
        self._sent_s = time.monotonic()
        self._connection.sendall(self._encoder.encode(message))

    def run(self, follower: Follower) -> None:
        """Follow rank 0 until its last message, and until all work is done. A message ends the sleep between turns."""
        waiting = (self._connection,)
        while not follower.ended or follower.has_work:
            wake_up = follower.turn()
            if time.monotonic() - self._sent_s >= _BEAT_S:
                self.report(Beat())
            busy = bool(wake_up.fences) or wake_up.until_s is not None
            if not self._messages:
                select.select(waiting, (), (), _POLL_S if busy else _BEAT_S)  # A message is taken at once.
