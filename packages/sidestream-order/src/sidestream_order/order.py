"""The happens-before relation of a run: vector clocks of streams and host threads, and the work submitted to streams.

A vector clock holds, for each stream and each host thread, the number of the last operation that is known to be done. A
host is a group of threads that share one clock: the main thread's group, and one for each thread that calls `split`.
Has no lock: the caller (`Checker`) holds one.
"""

from __future__ import annotations

import threading
from collections import deque
from itertools import takewhile

from sidestream_kv.types import Fence
from sidestream_order.shadow import HOST, Clock, Op, Site, learn


class StreamClock:
    """The clock of one stream.

    clock   vector clock: all work that happens before the stream's next work
    known   the last host clock that was merged into `clock`
    works   work of the stream, by tick (number on the stream); deleted when every host knows that it is done
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

    seq          number of the last event: submission, host access or lease event
    unfinished   submitted work in order, beginning with the first unfinished work; later entries may be finished
    """

    def __init__(self) -> None:
        self.seq = 0
        self.unfinished: deque[Op] = deque()
        # Clocks by host. Submitted work keeps a reference to a clock, so clocks are replaced, never changed in place.
        self._hosts: dict[str, Clock] = {HOST: {}}
        self._apart: dict[int, str] = {}  # thread ident → host, for threads with a clock of their own
        self._letters: dict[
            str, deque[tuple[int, Clock]]
        ] = {}  # by channel: number and sender's clock of each message that has not arrived
        self._streams: dict[str, StreamClock] = {}

    def next(self) -> int:
        """Count one event; returns its number."""
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
        """End the host `name`, and merge its clock into the calling thread's clock."""
        self._apart = {thread: other for thread, other in self._apart.items() if other != name}
        self.learn(self._hosts.pop(name, {}))

    def send(self, channel: str, number: int) -> None:
        """Attach the calling thread's clock to a message."""
        self._letters.setdefault(channel, deque()).append((number, self.host))

    def receive(self, channel: str, number: int) -> None:
        """Merge the clocks of all messages up to this one into the calling thread's clock."""
        letters = self._letters.get(channel, deque())
        while letters and letters[0][0] <= number:
            self.learn(letters.popleft()[1])

    def learn(self, clock: Clock) -> None:
        """Merge a clock into the calling thread's clock."""
        known = dict(self.host)
        learn(known, clock)
        self._hosts[self.name] = known

    def advance(self) -> None:
        """Increment the calling thread's own entry, so that work submitted earlier is not ordered after the next host
        operation.
        """
        name = self.name
        self._hosts[name] = {**self._hosts[name], name: self._hosts[name].get(name, 0) + 1}

    def host_op(self, label: str, site: Site) -> Op:
        """A new operation of the calling thread."""
        return Op(self.name, self.host.get(self.name, 0), self.next(), label, site, None)

    # ------------------------------------------------------------------ streams

    def stream(self, name: str) -> StreamClock:
        """The clock of a stream."""
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = StreamClock(name)
        return stream

    def op(self, fence: Fence) -> Op | None:
        """The work that ends with a fence; None if its record was deleted, or if the fence belongs to no stream."""
        stream = self._streams.get(fence.stream)
        return None if stream is None else stream.works.get(fence.tick)

    def submit(self, fence: Fence, label: str, site: Site) -> Op:
        """Record submitted work."""
        op = Op(fence.stream, fence.tick, self.next(), label, site, self.host)
        self.stream(op.stream).works[op.tick] = op
        self.unfinished.append(op)
        return op

    def drop_finished(self) -> None:
        """Remove finished work from the front of `unfinished`."""
        while self.unfinished and self.unfinished[0].over:
            self.unfinished.popleft()

    def prune(self) -> tuple[Clock, int]:
        """Delete records of work that happens before all unfinished and all future work. Returns the common part of all
        clocks of hosts and unfinished work (work up to this clock was deleted), and the `seq` of the oldest unfinished
        work.
        """
        oldest = self.unfinished[0].seq if self.unfinished else self.seq + 1
        # A thread that has not run yet gets its clock with its first message.
        starting = [sent[0][1] for name, sent in self._letters.items() if sent and name.startswith("start of ")]
        clocks = (*self._hosts.values(), *starting, *(op.before or {} for op in self.unfinished))
        floor, *others = {id(clock): clock for clock in clocks}.values()
        for clock in others:
            floor = {name: min(tick, clock[name]) for name, tick in floor.items() if name in clock}
        for stream in self._streams.values():
            for tick in list(takewhile(floor.get(stream.name, 0).__ge__, stream.works)):
                stream.works.pop(tick).final = None  # frees the clock: cells may keep the work itself for long
        return floor, oldest
