"""Records which ids of pools are leased and which are published, and checks each use of an id against these records.

A lease is a reference that keeps an id (block or slot number) from reuse; a published id can be found in a cache index.
The records do not read the pools' own state, so an error in a pool is found.

Has no lock: the caller (`Checker`) holds one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sidestream_kv.types import Fence
from sidestream_order.findings import Finding, Report
from sidestream_order.order import Order
from sidestream_order.shadow import Clock, Item, Lease, Op, Pool, Shadow, Site, Verdict

Dying = list[tuple[Pool, Item]]
"""Ids whose contents are dead: no work may read them once the fences in `Item.after` are done."""


class Leases:
    """The ids of all pools: leases, work that uses the ids, and publications."""

    def __init__(self, order: Order, report: Report) -> None:
        self._order = order
        self._report = report
        self.pools: dict[str, Pool] = {}

    def pool(self, name: str) -> Pool:
        """The records of a pool."""
        pool = self.pools.get(name)
        if pool is None:
            pool = self.pools[name] = Pool(name)
        return pool

    def took(self, pool: str, ids: Sequence[int], site: Site) -> Dying:
        book, taken, dying, host = self.pool(pool), self._order.next(), [], self._order.host
        for number in ids:
            item = book.items.get(number)
            if item is None:
                item = book.items[number] = Item(number)
            if item.lease is not None:
                self._report.taken_twice(book, item, item.lease, site)
                self._end(item, site)
            item.leases += 1
            item.taken, item.published = taken, 0
            item.lease = Lease(taken, taken, site)
            item.users.clear()
            item.writers.clear()
            item.after = {name: fence for name, fence in item.after.items() if fence.tick > host.get(name, 0)}
            dying.append((book, item))
        return dying

    def shared(self, pool: str, ids: Sequence[int], site: Site) -> None:
        book, since = self.pool(pool), self._order.next()
        for number in ids:
            item = book.items.get(number)
            if item is None:
                item = book.items[number] = Item(number)
            item.leases += 1
            if item.lease is None:
                item.lease = Lease(since, item.taken, site)

    def released(self, pool: str, ids: Sequence[int], after: Sequence[Fence], site: Site) -> Dying:
        book, dying = self.pool(pool), []
        self._order.next()
        for number in ids:
            item = book.items.get(number)
            if item is None or item.lease is None:
                self._report.over_released(book, number, site)
                continue
            item.add_after(after)
            item.leases -= 1
            if item.leases:
                continue
            lease = self._end(item, site)
            for user in item.users.values():
                self._judge(book, item, user, lease)
            if not item.published:
                dying.append((book, item))
        return dying

    def published(self, pool: str, number: int, site: Site, *, partial: bool = False) -> None:
        book = self.pool(pool)
        item = book.items.get(number)
        if item is None:
            item = book.items[number] = Item(number)
        self._check_complete(book, item, self._order.host_op("publish", site), partial=partial)
        item.published = self._order.seq

    def forgot(self, pool: str, ids: Sequence[int]) -> Dying:
        book, dying = self.pool(pool), []
        for number in ids:
            item = book.items.get(number)
            if item is not None and item.published:
                item.published = 0
                if item.lease is None:
                    dying.append((book, item))
        return dying

    def use(self, op: Op, shadow: Shadow, number: int, where: tuple[str, int, int], *, write: bool) -> int:
        """Record that `op` uses an id, and check that the id was leased when `op` was submitted. Returns a position in
        the order of events: a read is valid only if the bytes were written after it.
        """
        item = shadow.items.get(number)
        lease = None if item is None else item.lease_at(op.seq)
        if item is None or lease is None:
            self._report.unleased(op, shadow.pool, number, where)
            return 0 if item is None else item.taken
        if write and item.published and item.taken == lease.taken:
            self._report.published_write(op, shadow.pool, item, where)
        if lease is item.lease:
            item.note(op, write)
        else:
            self._judge(self.pools[shadow.pool], item, op, lease)
        return lease.taken

    def leaks(self) -> Iterable[Finding]:
        """Report the ids that are leased now; one finding per pool."""
        for pool in self.pools.values():
            held = [item for item in pool.items.values() if item.lease is not None]
            if held and (leak := self._report.leak(pool, held)) is not None:
                yield leak

    def sweep(self, floor: Clock, oldest: int) -> None:
        """Delete the records of ids that no future work uses: see `Pool.sweep`."""
        for pool in self.pools.values():
            pool.sweep(floor, oldest)

    def _end(self, item: Item, site: Site) -> Lease:
        lease = item.lease
        assert lease is not None
        lease.until, lease.after, lease.site, item.lease = self._order.seq, tuple(item.after.values()), site, None
        oldest = self._order.unfinished[0].seq if self._order.unfinished else lease.until
        item.past = [past for past in item.past if past.until > oldest]
        if oldest < lease.until:  # unfinished work that was submitted during the lease may still declare an access
            item.past.append(lease)
        return lease

    def _judge(self, book: Pool, item: Item, use: Op, lease: Lease) -> None:
        """Report an early release unless the host saw `use` done, or a fence given with the release comes after `use`.
        If a fence is not done yet, its order is unknown, so a `Verdict` waits for it.
        """
        if use.tick <= self._order.host.get(use.stream, 0):
            return
        awaited: list[Op] = []
        for fence in lease.after:
            if fence.stream == use.stream:
                if fence.tick >= use.tick:
                    return
            elif (op := self._order.op(fence)) is not None:
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

    def _check_complete(self, book: Pool, item: Item, publish: Op, *, partial: bool) -> None:
        """Report bytes that were not written, or are still being written, when they become findable. `partial`: bytes
        may be missing, but not come from failed work.
        """
        for op in item.writers.values():
            if op.tick > self._order.host.get(op.stream, 0):
                self._report.early_publish(book, item, op, publish)
        if book.shadow is None:
            return
        _, here, stop = book.span(item.number)
        for cell in book.shadow.span(here, stop):
            last = cell.write
            if cell.start > here or last is None or last.seq < item.taken:
                if partial:
                    here = cell.stop
                    continue
                break
            if last.failure is not None:
                self._report.failed_publish(book, item, last, publish)
            here = cell.stop
        if here < stop and not partial:
            self._report.incomplete(book, item, here, publish)


def settle(verdict: Verdict, clock: Clock) -> None:
    """Update `verdict`: one of its awaited fences is done, with this clock."""
    if clock.get(verdict.use.stream, 0) >= verdict.use.tick:
        verdict.awaited = 0
    elif verdict.awaited:
        verdict.awaited -= 1
        if not verdict.awaited:
            verdict.report()
