"""Finds races and lease errors, even if they had no effect in this run.

A checker is a tracer (`sidestream_kv.types.Tracer`): devices and pools report each submission, wait and lease to it. It
computes the happens-before relation with vector clocks, one for each stream and one for the host. It keeps its own
records of bytes and leases, so an error in a pool's records cannot hide a finding. Called from any thread.

An id is the number of a block or slot in a pool. A lease is a reference that keeps an id from reuse. A fence marks the
end of one piece of work on a stream. An id is findable (published) while its key is in a cache index.

    race             two unordered accesses to the same bytes, at least one of them a write
    unwritten        a read of bytes that were never written, or that were not written since the pool handed out their
                     id; not by work that failed, because its results are not used
    undeclared       an access that its work did not declare (detected only with a `Guard`)
    beyond           an access outside the bounds of a memory
    unleased         an access to an id without a lease, or a release of such an id
    early_release    an id released while work still uses it: the host has not seen the end of the work, and no fence
                     given with the release comes after the work
    early_publish    an id published before the host saw that all its bytes are written
    published_write  a write to a findable id
    failed_publish   an id published although the work that wrote it failed
    stall            the host blocked for a reason that is not allowed
    leak             an id still leased when all work is done
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

from sidestream_kv.types import Access, Accesses, Fence, Key
from sidestream_order.findings import Finding, Report
from sidestream_order.guard import Guard
from sidestream_order.leases import Dying, Leases, settle
from sidestream_order.memories import Memories
from sidestream_order.order import Order
from sidestream_order.shadow import calling_site, learn
from sidestream_order.sim import SimDevice, make_policy

Poison = Callable[[str, int, int, Sequence[Fence]], None]

# Number of submissions after which old records are deleted.
_PRUNE_EVERY = 256
_SWEEP_FROM = 4096


class Checker:
    """Reports races and lease errors of one device and its pools. Attach it before their first work.

    findings   all findings so far; the same pair of call sites is reported once for each kind and memory
    """

    def __init__(
        self,
        *,
        poison: Poison | None = None,
        allowed_waits: frozenset[str] = frozenset({"step"}),
        max_findings: int = 100,
    ) -> None:
        """`poison` receives bytes that must not be read any more: memory, start, stop, and the fences after which it
        may overwrite the bytes.

        `allowed_waits` are the reasons for which the host may block. At most `max_findings` are kept.
        """
        self._report = Report(max_findings)
        self.findings: list[Finding] = self._report.findings
        self._poison = poison
        self._allowed_waits = allowed_waits
        self._lock = threading.Lock()
        self._order = Order()
        self._leases = Leases(self._order, self._report)
        self._memories = Memories(self._leases, self._report)
        self._submissions = 0
        self._sweep_at = _SWEEP_FROM

    # ------------------------------------------------------------------ events of host threads

    def own_timeline(self, name: str) -> None:
        with self._lock:
            self._order.split(name)

    def joined(self, name: str) -> None:
        with self._lock:
            self._order.join(name)

    def sent(self, channel: str, number: int) -> None:
        with self._lock:
            self._order.send(channel, number)

    def received(self, channel: str, number: int) -> None:
        with self._lock:
            self._order.receive(channel, number)

    # ------------------------------------------------------------------ events of a device

    def submitted(self, fence: Fence, accesses: Accesses, label: str) -> None:
        """See `Tracer.submitted`. Calls `accesses` immediately."""
        declared, site = accesses(), calling_site()  # outside the lock, because `accesses` may run any code
        with self._lock:
            op = self._order.submit(fence, label or "work", site)
            op.declared = declared
            op.writes, op.reads = self._memories.declare(op, declared)
            self._submissions += 1
            if self._submissions % _PRUNE_EVERY == 0:
                self._prune()

    def started(self, fence: Fence) -> None:
        with self._lock:
            stream = self._order.stream(fence.stream)
            op = stream.works.get(fence.tick)
            if op is None or op.before is None:
                return
            if op.before is not stream.known:
                learn(stream.clock, op.before)
                stream.known = op.before
            stream.clock[op.stream] = op.tick
            stream.running = op
            self._memories.apply(op, stream.clock, op.writes, op.reads)
            op.writes, op.reads = [], []

    def waited(self, stream: str, fence: Fence) -> None:
        with self._lock:
            waiting, op = self._order.stream(stream), self._order.op(fence)
            # None: `prune` deleted the record, because all unfinished work already comes after this work. The wait adds
            # no order.
            if op is not None and op.final is not None:
                learn(waiting.clock, op.final)

    def touched(self, stream: str, accesses: Accesses) -> None:
        declared = accesses()
        with self._lock:
            here = self._order.stream(stream)
            if here.running is not None:
                here.running.declared = [*here.running.declared, *declared]
                writes, reads = self._memories.declare(here.running, declared, late=True)
                self._memories.apply(here.running, here.clock, writes, reads)

    def finished(self, fence: Fence) -> None:
        with self._lock:
            stream = self._order.stream(fence.stream)
            op = stream.works.get(fence.tick)
            if op is None:
                return
            stream.running = None
            op.declared = ()
            op.final, op.over, op.before = dict(stream.clock), True, None
            if (error := fence.failure) is not None:
                op.failure = f"{type(error).__name__}: {error}"
                self._report.withdraw_unwritten(op)
            for verdict in op.verdicts:
                settle(verdict, op.final)
            op.verdicts = []
            self._order.drop_finished()

    def observed(self, fence: Fence) -> None:
        if fence.tick <= self._order.host.get(fence.stream, 0):
            return  # already known; returns without the lock, because the host may poll often
        with self._lock:
            op = self._order.op(fence)
            if op is not None and op.final is not None:
                self._order.learn(op.final)

    def host_touched(self, accesses: Accesses, label: str) -> None:
        declared, site = accesses(), calling_site()
        with self._lock:
            self._order.advance()
            op = self._order.host_op(label or "touch", site)
            writes, reads = self._memories.declare(op, declared)
            self._memories.apply(op, self._order.host, writes, reads)
            op.over = True

    def stalled(self, reason: str) -> None:
        if reason in self._allowed_waits:
            return
        site = calling_site()
        with self._lock:
            self._report.stall(self._order.host_op(reason, site), self._allowed_waits)

    def allocated(self, memory: str, num_bytes: int) -> None:
        with self._lock:
            self._memories.allocate(memory, num_bytes)

    def refuse_unknown(self) -> None:
        """From now on, report accesses to a memory that was neither allocated nor assigned to a pool. Do not call it
        for a device whose work uses memory that another device allocated.
        """
        self._memories.refuse_unknown()

    def declared(self, stream: str) -> Sequence[Access]:
        """All accesses that the running work of a stream has declared so far."""
        running = self._order.stream(stream).running
        return () if running is None else running.declared

    def undeclared(self, stream: str, access: Access) -> None:
        """Report that the running work of a stream made an access that it has not declared."""
        running = self._order.stream(stream).running
        if running is not None:
            with self._lock:
                self._report.undeclared(running, access)

    # ------------------------------------------------------------------ events of a pool

    def backed(self, pool: str, memory: str, item_bytes: int, first: int = 0) -> None:
        with self._lock:
            self._leases.pool(pool).back(self._memories.part(memory, first), item_bytes)

    def took(self, pool: str, ids: Sequence[int], after: Sequence[Fence]) -> None:
        """See `Tracer.took`. The id's old bytes are poisoned once its last users are done."""
        site = calling_site()
        with self._lock:
            doomed = self._doomed(self._leases.took(pool, ids, site))
        self._overwrite(doomed)

    def shared(self, pool: str, ids: Sequence[int]) -> None:
        site = calling_site()
        with self._lock:
            self._leases.shared(pool, ids, site)

    def released(self, pool: str, ids: Sequence[int], after: Sequence[Fence]) -> None:
        site = calling_site()
        with self._lock:
            doomed = self._doomed(self._leases.released(pool, ids, after, site))
        self._overwrite(doomed)

    def published(self, pool: str, item: int, key: Key, *, partial: bool = False) -> None:
        site = calling_site()
        with self._lock:
            self._leases.published(pool, item, site, partial=partial)

    def forgot(self, pool: str, ids: Sequence[int]) -> None:
        with self._lock:
            doomed = self._doomed(self._leases.forgot(pool, ids))
        self._overwrite(doomed)

    def check_idle(self) -> list[Finding]:
        """Report ids that are still leased, one finding per pool. Call it when all work is done. Findings are also
        added to `findings`.
        """
        with self._lock:
            return list(self._leases.leaks())

    def forget(self, memory: str) -> None:
        """Delete the records of a memory, and of the pool of the same name. Neither may be used again."""
        with self._lock:
            self._memories.shadows.pop(memory, None)
            self._leases.pools.pop(memory, None)

    # ------------------------------------------------------------------ private

    def _doomed(self, dying: Dying) -> list[tuple[str, int, int, tuple[Fence, ...]]]:
        if self._poison is None:
            return []
        return [
            (*book.span(item.number), tuple(item.after.values())) for book, item in dying if book.shadow is not None
        ]

    def _overwrite(self, doomed: Sequence[tuple[str, int, int, tuple[Fence, ...]]]) -> None:
        if self._poison is not None:
            for memory, start, stop, after in doomed:
                self._poison(memory, start, stop, after)

    def _prune(self) -> None:
        """Delete records that cannot be involved in a future finding."""
        floor, oldest = self._order.prune()
        if self._size() >= self._sweep_at:
            self._leases.sweep(floor, oldest)
            self._sweep_at = max(_SWEEP_FROM, 2 * self._size())

    def _size(self) -> int:
        return self._memories.num_cells() + sum(len(pool.items) for pool in self._leases.pools.values())


def simulated(policy: str, seed: int) -> tuple[SimDevice, Checker]:
    """A simulated device, and a checker that traces the device and poisons its free memory. A guard verifies the
    accesses that work declares. `policy` and `seed` decide the order of execution (see `make_policy`).

    The caller closes the device. Raises ConfigError for an unknown policy.
    """

    def poison(memory: str, start: int, stop: int, after: Sequence[Fence]) -> None:
        device.poison(memory, start, stop, after)

    checker = Checker(poison=poison)
    device = SimDevice(make_policy(policy, random.Random(seed)), tracer=checker, guard=Guard(checker))
    return device, checker
