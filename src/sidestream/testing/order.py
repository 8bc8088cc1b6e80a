"""The happens-before relation of a run: clocks of streams and host threads, and the work submitted to streams.

A clock holds, for each stream and each host thread, the last operation that is known to be done. Has no lock: `Checker`
holds one.
"""

from __future__ import annotations

import threading
from collections import deque
from itertools import takewhile

from sidestream.testing.shadow import HOST, Clock, Op, Site, learn
from sidestream.types import Fence


class StreamClock:
    """The clock of one stream.

    clock   clock of all work that happens before the next work of the stream
    known   the host's clock that `clock` includes already
    works   works of the stream, by tick, as long as some stream or host does not know that they are done
    """

    __slots__ = ("clock", "known", "name", "running", "works")

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Clock = {}
        self.known: Clock | None = None
        self.running: Op | None = None
        self.works: dict[int, Op] = {}


class Order:
    """The vector clocks of one device and its host threads.

    seq          number of the last submission or lease event
    unfinished   works from the first unfinished one on, in the order of submission; later ones may be finished
    """

    def __init__(self) -> None:
        self.seq = 0
        self.unfinished: deque[Op] = deque()
        # Clocks by host. They are replaced, not changed, because submissions keep them.
        self._hosts: dict[str, Clock] = {HOST: {}}
        self._apart: dict[int, str] = {}  # threads that have their own clocks
        self._letters: dict[
            str, deque[tuple[int, Clock]]
        ] = {}  # the senders' clocks of unreceived messages, by channel
        self._streams: dict[str, StreamClock] = {}

    def next(self) -> int:
        """The number of the next event."""
        self.seq += 1
        return self.seq

    # ------------------------------------------------------------------ host threads

    @property
    def name(self) -> str:
        """Name of the host that the calling thread belongs to."""
        return self._apart.get(threading.get_ident(), HOST) if self._apart else HOST

    @property
    def host(self) -> Clock:
        """The calling thread's clock."""
        return self._hosts[self.name]

    def split(self, name: str) -> None:
        """Give the calling thread its own clock, as the host `name`."""
        self._apart[threading.get_ident()] = name
        self._hosts[name] = {}

    def join(self, name: str) -> None:
        """End a host: its clock is added to the calling thread's clock."""
        self._apart = {thread: other for thread, other in self._apart.items() if other != name}
        self.learn(self._hosts.pop(name, {}))

    def send(self, channel: str, number: int) -> None:
        """Attach the calling thread's clock to a message."""
        self._letters.setdefault(channel, deque()).append((number, self.host))

    def receive(self, channel: str, number: int) -> None:
        """Add the clocks of all messages up to this one to the calling thread's clock."""
        letters = self._letters.get(channel, deque())
        while letters and letters[0][0] <= number:
            self.learn(letters.popleft()[1])

    def learn(self, clock: Clock) -> None:
        """Add a clock to the calling thread's clock."""
        known = dict(self.host)
        learn(known, clock)
        self._hosts[self.name] = known

    def advance(self) -> None:
        """Advance the calling thread's own time, so that its next operation is after all work submitted so far."""
        name = self.name
        self._hosts[name] = {**self._hosts[name], name: self._hosts[name].get(name, 0) + 1}

    def host_op(self, label: str, site: Site) -> Op:
        """An operation of the calling thread."""
        return Op(self.name, self.host.get(self.name, 0), self.next(), label, site, None)

    # ------------------------------------------------------------------ streams

    def stream(self, name: str) -> StreamClock:
        """The clock of a stream."""
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = StreamClock(name)
        return stream

    def op(self, fence: Fence) -> Op | None:
        """The work of a fence; None if its record was deleted, or if the fence does not belong to a stream."""
        stream = self._streams.get(fence.stream)
        return None if stream is None else stream.works.get(fence.tick)

    def submit(self, fence: Fence, label: str, site: Site) -> Op:
        """Record submitted work."""
        op = Op(fence.stream, fence.tick, self.next(), label, site, self.host)
        self.stream(op.stream).works[op.tick] = op
        self.unfinished.append(op)
        return op

    def drop_finished(self) -> None:
        """Drop finished works up to the first unfinished one."""
        while self.unfinished and self.unfinished[0].over:
            self.unfinished.popleft()

    def prune(self) -> tuple[Clock, int]:
        """Delete records of work that happens before all unfinished and all future work: every host knew that it was
        done when it submitted its oldest unfinished work. Returns the clock of this work, and the number of the oldest
        unfinished work.
        """
        oldest = self.unfinished[0].seq if self.unfinished else self.seq + 1
        floor, *others = {
            id(clock): clock for clock in (*self._hosts.values(), *(op.before or {} for op in self.unfinished))
        }.values()
        for clock in others:
            floor = {name: min(tick, clock[name]) for name, tick in floor.items() if name in clock}
        for stream in self._streams.values():
            for tick in list(takewhile(floor.get(stream.name, 0).__ge__, stream.works)):
                stream.works.pop(tick).final = None  # cells may refer to the work for long
        return floor, oldest
