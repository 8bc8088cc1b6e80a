"""Collects the bytes of one HTTP/1.1 reply, and parses its server-sent events with their arrival times. Does no I/O.

The bytes are stored during the run and parsed after it, because the time of parsing would count as the server's time.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter

from sidestream.errors import SidestreamError

_HEAD_END = b"\r\n\r\n"
# The end of a chunked reply: its last chunk is empty. Events cannot contain these bytes, because JSON escapes line
# breaks.
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_EVENT_END = re.compile(rb"\r\n\r\n|\n\n")


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event. `time_ns`: arrival time of its last byte, by `time.perf_counter_ns`."""

    time_ns: int
    data: bytes


class Reply:
    """Collects the bytes of one reply. Written by one event loop."""

    def __init__(self) -> None:
        self._arrivals: list[tuple[int, bytes]] = []
        self._end = b""  # the last bytes so far, up to the length of `_LAST_CHUNK`
        self._head: bytes | None = None
        self._missing: int | None = None  # number of missing bytes of a body with Content-Length; None: chunked

    def take(self, data: bytes, now_ns: int) -> bool:
        """Store bytes; returns whether the reply is complete. Raises SidestreamError for a reply whose end cannot be
        detected.
        """
        self._arrivals.append((now_ns, data))
        if self._head is None:
            return self._take_head()
        if self._missing is not None:
            self._missing -= len(data)
            return self._missing <= 0
        self._end = (self._end + data)[-len(_LAST_CHUNK) :]
        return self._end == _LAST_CHUNK

    def _take_head(self) -> bool:
        raw = self._raw
        head, found, body = raw.partition(_HEAD_END)
        if not found:
            return False
        self._head = head
        if re.search(rb"\r\ntransfer-encoding: *chunked", head, re.IGNORECASE):
            self._end = (b"\r\n" + body)[-len(_LAST_CHUNK) :]
            return self._end == _LAST_CHUNK
        length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
        if length is None:
            raise SidestreamError(f"the server's reply has neither chunks nor a length: {head[:200]!r}")
        self._missing = int(length[1]) - len(body)
        return self._missing <= 0

    @property
    def _raw(self) -> bytes:
        return b"".join(data for _, data in self._arrivals)

    @property
    def status(self) -> int:
        """The status code of a reply whose head is complete."""
        assert self._head is not None
        return int(self._head.split(b" ", 2)[1])

    def body(self) -> bytes:
        """The body of a complete reply."""
        return self._body()[0]

    def events(self) -> Iterator[Event]:
        """Yield the events of a complete reply. Comments of the event stream are skipped."""
        body, starts = self._body()
        ends = list(accumulate(len(data) for _, data in self._arrivals))
        at = 0
        for found in _EVENT_END.finditer(body):
            lines = body[at : found.start()].splitlines()
            at = found.end()
            data = b"\n".join(line[5:].lstrip() for line in lines if line.startswith(b"data:"))
            if data:
                in_body, in_raw = starts[bisect_right(starts, at - 1, key=itemgetter(0)) - 1]
                last_byte = in_raw + at - 1 - in_body
                yield Event(self._arrivals[bisect_left(ends, last_byte + 1)][0], data)

    def _body(self) -> tuple[bytes, list[tuple[int, int]]]:
        """The body, and a pair for each chunk: the chunk's offset in the body, and its offset in the received bytes."""
        raw = self._raw
        at = raw.index(_HEAD_END) + len(_HEAD_END)
        if self._missing is not None:
            return raw[at:], [(0, at)]
        parts: list[bytes] = []
        starts: list[tuple[int, int]] = []
        length = 0
        while True:
            line = raw.index(b"\r\n", at)
            size = int(raw[at:line].partition(b";")[0], 16)
            at = line + 2
            if not size:
                return b"".join(parts), starts
            starts.append((length, at))
            parts.append(raw[at : at + size])
            length += size
            at += size + 2
