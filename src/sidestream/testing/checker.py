"""Judges from what was submitted, waited for and leased whether anything could have gone wrong, in this order or in
another.

A tracer (see `sidestream.types.Tracer`) that recomputes what happens before what, with one clock for each stream and
one for the host, and keeps its own books of bytes and leases: it trusts no pool and no lease. Two accesses that nothing
orders are a race even if they came out right this time, and whichever of them ran first. Called from any thread.

    race             two accesses to the same bytes, one of them a write, that nothing orders
    unwritten        a read of bytes that nobody wrote since their id was taken, or ever
    unleased         work on an id that nobody leases, or a release of such an id
    early_release    an id given up although work that uses it is neither seen to be done nor covered by a fence of the
                     release
    early_publish    an id made findable before the host saw its bytes complete
    published_write  a write to a findable id
    failed_publish   an id made findable although what wrote it failed
    stall            the host was held up where it may not be
    leak             an id still leased when all is done
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

from sidestream.device.sim import SimDevice, make_policy
from sidestream.testing.findings import Finding, Report
from sidestream.testing.shadow import (
    HOST,
    Cell,
    Clock,
    Item,
    Lease,
    Op,
    Pool,
    Read,
    Shadow,
    Site,
    Verdict,
    Written,
    calling_site,
    learn,
)
from sidestream.types import Access, Accesses, Fence, Key

Poison = Callable[[str, int, int, Sequence[Fence]], None]

# How many submissions are looked through at once for what nobody needs any more.
_PRUNE_EVERY = 256
_SWEEP_FROM = 4096


class _Stream:
    """clock: what whatever runs here next knows. known: what the host knew that is in it already. works: not yet known
    to everybody, by tick.
    """

    __slots__ = ("clock", "known", "name", "running", "works")

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Clock = {}
        self.known: Clock | None = None
        self.running: Op | None = None
        self.works: dict[int, Op] = {}


class Checker:
    """The tracer that judges. One for each device and its pools, from their first work on.

    findings   what was found, each pair of call sites once for each kind and memory
    """

    def __init__(
        self,
        *,
        poison: Poison | None = None,
        allowed_waits: frozenset[str] = frozenset({"step"}),
        max_findings: int = 100,
    ) -> None:
        """`poison` is called with memory, start, stop and fences of bytes that nobody may read any more once those
        fences are done.

        `allowed_waits` are the reasons for which the host may be held up; after `max_findings` nothing more is kept.
        """
        self._report = Report(max_findings)
        self.findings: list[Finding] = self._report.findings
        self._poison = poison
        self._allowed_waits = allowed_waits
        self._lock = threading.Lock()
        self._seq = 0
        self._hosts: dict[str, Clock] = {
            HOST: {}
        }  # of each host; a clock is replaced, never changed: submissions keep it
        self._apart: dict[int, str] = {}  # threads that are hosts of their own
        self._letters: dict[
            str, deque[tuple[int, Clock]]
        ] = {}  # what the senders of messages knew that were not received yet, by channel
        self._streams: dict[str, _Stream] = {}
        self._shadows: dict[str, Shadow] = {}
        self._pools: dict[str, Pool] = {}
        self._unfinished: deque[Op] = deque()  # and finished ones behind the first that is not, in order of submission
        self._submissions = 0
        self._sweep_at = _SWEEP_FROM

    # ------------------------------------------------------------------ what threads of the host tell

    def apart(self, name: str) -> None:
        """See `Tracer.apart`."""
        with self._lock:
            self._apart[threading.get_ident()] = name
            self._hosts[name] = {}

    def joined(self, name: str) -> None:
        """See `Tracer.joined`."""
        with self._lock:
            self._apart = {thread: other for thread, other in self._apart.items() if other != name}
            self._hear_of(self._hosts.pop(name, {}))

    def sent(self, channel: str, number: int) -> None:
        """See `Tracer.sent`."""
        with self._lock:
            self._letters.setdefault(channel, deque()).append((number, self._host))

    def received(self, channel: str, number: int) -> None:
        """See `Tracer.received`."""
        with self._lock:
            letters = self._letters.get(channel, deque())
            while letters and letters[0][0] <= number:
                self._hear_of(letters.popleft()[1])

    # ------------------------------------------------------------------ what a device tells

    def submitted(self, fence: Fence, accesses: Accesses, label: str) -> None:
        """See `Tracer.submitted`. Asks for the accesses at once."""
        declared, site = accesses(), calling_site()  # not under the lock: what is called here may do anything
        with self._lock:
            op = Op(fence.stream, fence.tick, self._next(), label or "work", site, self._host)
            self._stream(op.stream).works[op.tick] = op
            self._unfinished.append(op)
            self._declare(op, declared, op.writes, op.reads)
            self._submissions += 1
            if self._submissions % _PRUNE_EVERY == 0:
                self._prune()

    def started(self, fence: Fence) -> None:
        """See `Tracer.started`."""
        with self._lock:
            stream = self._stream(fence.stream)
            op = stream.works.get(fence.tick)
            if op is None or op.before is None:
                return
            if op.before is not stream.known:
                learn(stream.clock, op.before)
                stream.known = op.before
            stream.clock[op.stream] = op.tick
            stream.running = op
            self._apply(op, stream.clock, op.writes, op.reads)
            op.writes, op.reads = [], []

    def waited(self, stream: str, fence: Fence) -> None:
        """See `Tracer.waited`."""
        with self._lock:
            waiting, op = self._stream(stream), self._op(fence)
            # Already forgotten: then it was over, and the host knew, before anything that has not ended yet was
            # submitted.
            if op is not None and op.final is not None:
                learn(waiting.clock, op.final)

    def touched(self, stream: str, accesses: Accesses) -> None:
        """See `Tracer.touched`."""
        declared = accesses()
        with self._lock:
            here = self._stream(stream)
            if here.running is not None:
                writes: list[Written] = []
                reads: list[Read] = []
                self._declare(here.running, declared, writes, reads, late=True)
                self._apply(here.running, here.clock, writes, reads)

    def finished(self, fence: Fence) -> None:
        """See `Tracer.finished`."""
        with self._lock:
            stream = self._stream(fence.stream)
            op = stream.works.get(fence.tick)
            if op is None:
                return
            stream.running = None
            op.final, op.over, op.before = dict(stream.clock), True, None
            if (error := fence.failure) is not None:
                op.failure = f"{type(error).__name__}: {error}"
            for verdict in op.verdicts:
                self._hear(verdict, op.final)
            op.verdicts = []
            while self._unfinished and self._unfinished[0].over:
                self._unfinished.popleft()

    def observed(self, fence: Fence) -> None:
        """See `Tracer.observed`."""
        if fence.tick <= self._host.get(fence.stream, 0):
            return  # known already; without the lock, because the host may ask often
        with self._lock:
            op = self._op(fence)
            if op is not None and op.final is not None:
                self._hear_of(op.final)

    def host_touched(self, accesses: Accesses, label: str) -> None:
        """See `Tracer.host_touched`."""
        declared, site = accesses(), calling_site()
        with self._lock:
            self._host = {
                **self._host,
                self._name: self._host.get(self._name, 0) + 1,
            }  # what was submitted before does not know of this
            op = self._host_op(label or "touch", site)
            self._declare(op, declared, op.writes, op.reads)
            self._apply(op, self._host, op.writes, op.reads)
            op.writes, op.reads, op.over = [], [], True

    def stalled(self, reason: str) -> None:
        """See `Tracer.stalled`."""
        if reason in self._allowed_waits:
            return
        site = calling_site()
        with self._lock:
            self._report.stall(self._host_op(reason, site), self._allowed_waits)

    # ------------------------------------------------------------------ what a pool tells

    def backed(self, pool: str, memory: str, item_bytes: int) -> None:
        """See `Tracer.backed`. One pool for each memory."""
        with self._lock:
            self._pool(pool).back(self._shadow(memory), item_bytes)

    def took(self, pool: str, ids: Sequence[int], after: Sequence[Fence]) -> None:
        """See `Tracer.took`. Each id is poisoned behind the fences of its own last uses."""
        site = calling_site()
        with self._lock:
            book, taken, dying = self._pool(pool), self._next(), []
            for number in ids:
                item = book.items.get(number)
                if item is None:
                    item = book.items[number] = Item(number)
                if item.lease is not None:
                    self._report.taken_twice(book, item, item.lease, site)
                    self._end_lease(item, site)
                item.leases += 1
                item.taken, item.published = taken, 0
                item.lease = Lease(taken, taken, site)
                item.users.clear()
                item.writers.clear()
                item.after = {name: fence for name, fence in item.after.items() if fence.tick > self._host.get(name, 0)}
                dying.append((book, item))
            doomed = self._doomed(dying)
        self._overwrite(doomed)

    def shared(self, pool: str, ids: Sequence[int]) -> None:
        """See `Tracer.shared`."""
        site = calling_site()
        with self._lock:
            book, since = self._pool(pool), self._next()
            for number in ids:
                item = book.items.get(number)
                if item is None:
                    item = book.items[number] = Item(number)
                item.leases += 1
                if item.lease is None:
                    item.lease = Lease(since, item.taken, site)

    def released(self, pool: str, ids: Sequence[int], after: Sequence[Fence]) -> None:
        """See `Tracer.released`."""
        site = calling_site()
        with self._lock:
            book, dying = self._pool(pool), []
            self._next()
            for number in ids:
                item = book.items.get(number)
                if item is None or item.lease is None:
                    self._report.over_released(book, number, site)
                    continue
                item.add_after(after)
                item.leases -= 1
                if item.leases:
                    continue
                lease = self._end_lease(item, site)
                for user in item.users.values():
                    self._judge(book, item, user, lease)
                if not item.published:
                    dying.append((book, item))
            doomed = self._doomed(dying)
        self._overwrite(doomed)

    def published(self, pool: str, item: int, key: Key) -> None:
        """See `Tracer.published`."""
        site = calling_site()
        with self._lock:
            book = self._pool(pool)
            known = book.items.get(item)
            if known is None:
                known = book.items[item] = Item(item)
            self._check_complete(book, known, self._host_op("publish", site))
            known.published = self._seq

    def forgot(self, pool: str, ids: Sequence[int]) -> None:
        """See `Tracer.forgot`."""
        with self._lock:
            book, dying = self._pool(pool), []
            for number in ids:
                item = book.items.get(number)
                if item is not None and item.published:
                    item.published = 0
                    if item.lease is None:
                        dying.append((book, item))
            doomed = self._doomed(dying)
        self._overwrite(doomed)

    # ------------------------------------------------------------------ the end

    def check_idle(self) -> list[Finding]:
        """Ids that are still leased, though all is done: one finding for each pool, kept in `findings` too."""
        with self._lock:
            held = {
                name: [item for item in pool.items.values() if item.lease is not None]
                for name, pool in self._pools.items()
            }
            leaks = [self._report.leak(self._pools[name], items) for name, items in held.items() if items]
        return [leak for leak in leaks if leak is not None]

    # ------------------------------------------------------------------ order

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    @property
    def _name(self) -> str:
        """Which host the calling thread is."""
        return self._apart.get(threading.get_ident(), HOST) if self._apart else HOST

    @property
    def _host(self) -> Clock:
        """What the calling thread knows."""
        return self._hosts[self._name]

    @_host.setter
    def _host(self, clock: Clock) -> None:
        self._hosts[self._name] = clock

    def _hear_of(self, clock: Clock) -> None:
        known = dict(self._host)
        learn(known, clock)
        self._host = known

    def _host_op(self, label: str, site: Site) -> Op:
        return Op(self._name, self._host.get(self._name, 0), self._next(), label, site, None)

    def _stream(self, name: str) -> _Stream:
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = _Stream(name)
        return stream

    def _op(self, fence: Fence) -> Op | None:
        stream = self._streams.get(fence.stream)
        return None if stream is None else stream.works.get(fence.tick)

    # ------------------------------------------------------------------ bytes

    def _shadow(self, memory: str) -> Shadow:
        shadow = self._shadows.get(memory)
        if shadow is None:
            shadow = self._shadows[memory] = Shadow(memory)
        return shadow

    def _declare(
        self, op: Op, accesses: Sequence[Access], writes: list[Written], reads: list[Read], *, late: bool = False
    ) -> None:
        """Sort accesses into `writes` and `reads`, by id, and look at the leases. `late`: said by work that runs
        already.
        """
        shadows, stream = self._shadows, op.stream
        for access in accesses:
            start, stop, write = access.start, access.stop, access.write
            shadow = shadows.get(access.memory) or self._shadow(access.memory)
            size = shadow.item_bytes or stop
            while start < stop:
                number, written_after = start // size, 0
                upto = (number + 1) * size
                if upto > stop:
                    upto = stop
                if shadow.item_bytes:
                    item = shadow.items.get(number)
                    if late or item is None or item.lease is None or (write and item.published):
                        written_after = self._use(op, shadow, number, start, upto, write)
                    else:  # as it should be, and nearly always is
                        item.users[stream] = op
                        if write:
                            item.writers[stream] = op
                        written_after = item.taken
                if write:
                    writes.append((shadow, start, upto))
                else:
                    reads.append((shadow, start, upto, written_after))
                start = upto

    def _use(self, op: Op, shadow: Shadow, number: int, start: int, stop: int, write: bool) -> int:
        """Note that `op` uses an id, and judge it by the leases at its submission; after which `seq` its bytes must
        have been written.
        """
        item = shadow.items.get(number)
        lease = None if item is None else item.lease_at(op.seq)
        where = (shadow.memory, start, stop)
        if item is None or lease is None:
            self._report.unleased(op, shadow.pool, number, where)
            return 0 if item is None else item.taken
        if write and item.published and item.taken == lease.taken:
            self._report.published_write(op, shadow.pool, item, where)
        if lease is item.lease:
            item.note(op, write)
        else:
            self._judge(self._pools[shadow.pool], item, op, lease)
        return lease.taken

    def _apply(self, op: Op, clock: Clock, writes: list[Written], reads: list[Read]) -> None:
        """Compare accesses, which happen now, with those before, and remember them. Writes first: a piece of work may
        read its own.
        """
        known = clock.get
        for shadow, start, stop in writes:
            cell = shadow.cells.get(start)
            if cell is None or cell.stop != stop:
                cells = shadow.carve(start, stop)
                for part in cells:
                    self._check_write(op, clock, shadow, part)
                cell = shadow.join(cells)
                cell.reads = {}
            elif cell.reads:
                self._check_write(op, clock, shadow, cell)
                cell.reads = {}
            elif (last := cell.write) is not None and last.tick > known(last.stream, 0):
                self._check_write(op, clock, shadow, cell)
            cell.write = op
        stream = op.stream
        for shadow, start, stop, written_after in reads:
            cell = shadow.cells.get(start)
            for part in (cell,) if cell is not None and cell.stop == stop else shadow.carve(start, stop):
                last = part.write
                if last is None or last.seq < written_after:
                    self._report.unwritten(op, shadow, part)
                elif last.tick > known(last.stream, 0):
                    self._report.race(op, False, last, True, clock, (shadow.memory, part.start, part.stop))
                part.reads[stream] = op

    def _check_write(self, op: Op, clock: Clock, shadow: Shadow, cell: Cell) -> None:
        where, last = (shadow.memory, cell.start, cell.stop), cell.write
        if last is not None and last.tick > clock.get(last.stream, 0):
            self._report.race(op, True, last, True, clock, where)
        for read in cell.reads.values():
            if read.tick > clock.get(read.stream, 0):
                self._report.race(op, True, read, False, clock, where)

    # ------------------------------------------------------------------ leases

    def _pool(self, name: str) -> Pool:
        pool = self._pools.get(name)
        if pool is None:
            pool = self._pools[name] = Pool(name)
        return pool

    def _end_lease(self, item: Item, site: Site) -> Lease:
        lease = item.lease
        assert lease is not None
        lease.until, lease.after, lease.site, item.lease = self._seq, tuple(item.after.values()), site, None
        oldest = self._unfinished[0].seq if self._unfinished else lease.until
        item.past = [past for past in item.past if past.until > oldest]
        if oldest < lease.until:  # who was submitted earlier may still say that it uses this
            item.past.append(lease)
        return lease

    def _judge(self, book: Pool, item: Item, use: Op, lease: Lease) -> None:
        """Whether `lease` ended behind `use`; if it takes a fence to tell that is still on its way, later."""
        if use.tick <= self._host.get(use.stream, 0):
            return
        awaited: list[Op] = []
        for fence in lease.after:
            if fence.stream == use.stream:
                if fence.tick >= use.tick:
                    return
            elif (op := self._op(fence)) is not None:
                if op.final is None:
                    awaited.append(op)
                elif op.final.get(use.stream, 0) >= use.tick:
                    return

        def report() -> None:
            self._report.early_release(book, item, use, lease)

        if not awaited:
            report()
        verdict = Verdict(use, len(awaited), report)
        for op in awaited:
            op.verdicts.append(verdict)

    def _hear(self, verdict: Verdict, clock: Clock) -> None:
        """One of the fences that a verdict waits for is done, and what was before it is known."""
        if clock.get(verdict.use.stream, 0) >= verdict.use.tick:
            verdict.awaited = 0
        elif verdict.awaited:
            verdict.awaited -= 1
            if not verdict.awaited:
                verdict.report()

    def _doomed(self, dying: Iterable[tuple[Pool, Item]]) -> list[tuple[str, int, int, tuple[Fence, ...]]]:
        if self._poison is None:
            return []
        return [
            (*book.span(item.number), tuple(item.after.values())) for book, item in dying if book.shadow is not None
        ]

    def _overwrite(self, doomed: Iterable[tuple[str, int, int, tuple[Fence, ...]]]) -> None:
        if self._poison is not None:
            for memory, start, stop, after in doomed:
                self._poison(memory, start, stop, after)

    def _check_complete(self, book: Pool, item: Item, publish: Op) -> None:
        for op in item.writers.values():
            if op.tick > self._host.get(op.stream, 0):
                self._report.early_publish(book, item, op, publish)
        if book.shadow is None:
            return
        _, here, stop = book.span(item.number)
        for cell in book.shadow.span(here, stop):
            last = cell.write
            if cell.start > here or last is None or last.seq < item.taken:
                break
            if last.failure is not None:
                self._report.failed_publish(book, item, last, publish)
            here = cell.stop
        if here < stop:
            self._report.incomplete(book, item, here, publish)

    # ------------------------------------------------------------------ bounded memory

    def _prune(self) -> None:
        """Forget what everything still to come is ordered behind: what every host knows, and knew when it submitted
        work that is not over.
        """
        oldest = self._unfinished[0].seq if self._unfinished else self._seq + 1
        floor, *others = {
            id(clock): clock for clock in (*self._hosts.values(), *(op.before or {} for op in self._unfinished))
        }.values()
        for clock in others:
            floor = {name: min(tick, clock[name]) for name, tick in floor.items() if name in clock}
        for stream in self._streams.values():
            for tick in list(takewhile(floor.get(stream.name, 0).__ge__, stream.works)):
                stream.works.pop(tick).final = None  # cells may keep the work for long
        if self._size() >= self._sweep_at:
            for pool in self._pools.values():
                pool.sweep(floor, oldest)
            self._sweep_at = max(_SWEEP_FROM, 2 * self._size())

    def _size(self) -> int:
        return sum(len(shadow.cells) for shadow in self._shadows.values()) + sum(
            len(pool.items) for pool in self._pools.values()
        )


def simulated(policy: str, seed: int) -> tuple[SimDevice, Checker]:
    """A simulated device that `policy` (see `make_policy`) drives with `seed`, and the checker that watches it and
    poisons its memory.

    The caller closes the device. Raises ConfigError for an unknown policy.
    """

    def poison(memory: str, start: int, stop: int, after: Sequence[Fence]) -> None:
        device.poison(memory, start, stop, after)

    checker = Checker(poison=poison)
    device = SimDevice(make_policy(policy, random.Random(seed)), tracer=checker)
    return device, checker
