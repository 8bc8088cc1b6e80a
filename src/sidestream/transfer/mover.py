"""The mover: everything of a transfer but the decision, on a thread of its own. Owner of the host tier's and the disk's
ledgers.

It takes orders from a channel, and tells what became of them in another one; neither side ever waits for the other:

    store        device blocks → host slots    behind the step that filled the blocks (H1)
    load         host slots → device blocks    behind the last use of the blocks (H3); fences for each layer group
    disk-write   host slots → disk             after the store was seen done
    disk-read    disk → host slots             for requests that wait

Whatever fails is a miss: nothing is published (H9), the leases end, the request recomputes.
It shares the interpreter lock with the engine thread, so a turn is short: it takes few orders and submits few slices at
a time (P8).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Literal

from sidestream.device.base import Device, Rest, Stream
from sidestream.device.channel import Channel, Mark
from sidestream.errors import TierFull, TierTimeout
from sidestream.kv.layout import KVLayout
from sidestream.kv.pool import Lease
from sidestream.metrics import Metrics
from sidestream.tiers.base import PersistentTier
from sidestream.tiers.host import HostTier
from sidestream.transfer import pacing
from sidestream.transfer.copy import BlockMemory, layers_batch
from sidestream.transfer.costs import CostModel
from sidestream.transfer.messages import (
    Forget,
    LoadMissed,
    LoadSubmitted,
    MoverFailed,
    News,
    Orders,
    Part,
    Promoted,
    StoreAgain,
)
from sidestream.transfer.pacing import Copy, Lane, Urgency
from sidestream.transfer.tickets import LoadOrder, ReadTicket, Stopwatch, StoreOrder, StoreTicket, Waiter, WriteTicket
from sidestream.types import Fence, Key, LoadPlan, PromotePlan, StorePlan

logger = logging.getLogger(__name__)

# Blocks of orders that one turn carries out, and of a store that one ticket has: some 3 us each, of the interpreter
# lock (P8).
_BLOCKS_A_TURN = 16
# Of a load, a piece has so many bytes, and the last one, which goes layer by layer, at most so many: about as many as
# the link moves during a forward pass, which follows it layer by layer.
_LOAD_BYTES = 64 << 20
_LAST_BYTES = 384 << 20
# How long it lets others go first when there is more to do: a thread that gets the interpreter lock needs some 50 us to
# wake up, and must not find it taken again. While the link runs low, no longer than the system's shortest sleep.
_BREATH_S = 100e-6
_SHORT_BREATH_S = 20e-6
# While so many copies wait in the lane, no store is carried out that could wait as an order: a plan takes far less
# memory than a ticket, and hundreds of thousands of objects make the garbage collector stop the engine thread for
# hundreds of milliseconds.
_CROWDED_LANE = 64
# How soon it looks again whether more of the host's memory is ready.
_GROWTH_POLL_S = 0.05
_DISK_READERS = 2
# After the disk refused a write, how long it is left alone.
_DISK_PAUSE_S = 5.0
# A tier that is broken fails often; transfers_total counts what is not logged.
_WARNING_PERIOD_S = 1.0


class Mover:
    """Carries out orders. `turn` is called by its thread only; the other public names may be read by any."""

    def __init__(
        self,
        *,
        device: Device,
        memory: BlockMemory,
        host: HostTier,
        disk: PersistentTier | None,
        costs: CostModel,
        metrics: Metrics,
        load_deadline_s: float,
        orders: Channel[Orders | Forget],
        news: Channel[News],
        settled: Mark,
    ) -> None:
        """`settled` is raised to the number up to which every order has let go of the device's blocks."""
        self._device = device
        self._memory = memory
        self._host = host
        self._host_memory = BlockMemory(host.memory, host.layout)
        self._disk = disk
        self._costs = costs
        self._metrics = metrics
        self._deadline_s = load_deadline_s
        self._orders = orders
        self._news = news
        self._settled = settled
        self._unsettled: dict[int, None] = {}  # numbers of the stores and loads that were taken, in order
        self._last = 0  # number of the last order that was taken
        self._clock = device.now
        self._layout = memory.layout
        self._to_host = Lane(pacing.TO_HOST, lambda number: device.stream(f"store-{number}"), clock=device.now)
        self._to_device = Lane(pacing.TO_DEVICE, lambda number: device.stream(f"load-{number}"), clock=device.now)
        self._write_stream: Stream | None = device.worker("disk-write") if disk else None
        self._read_streams: list[Stream] = (
            [device.worker(f"disk-read-{index}") for index in range(_DISK_READERS)] if disk else []
        )
        self._later: deque[StoreOrder] = deque()  # of which there is more to begin
        self._storing: dict[Key, StoreTicket] = {}
        self._stores: dict[Copy, StoreTicket] = {}
        self._ended_copies: deque[Copy] = deque()  # seen done, their books not yet kept: some 5 us a block
        self._arriving: deque[LoadOrder] = deque()  # of which there is more to begin
        self._loads: dict[Copy, LoadOrder] = {}
        self._writes: list[WriteTicket] = []
        self._reads: dict[Key, ReadTicket] = {}
        self._waiters: list[Waiter] = []
        self._growing = True  # more host memory is being pinned
        self._deferred: dict[
            Key, None
        ] = {}  # blocks that found no slot meanwhile, oldest first; at most as many as there will be slots
        self._disk_resumes_s = 0.0
        self._next_warning_s = 0.0
        self._taken = 0
        self.num_forgotten = 0
        """How often everything was forgotten by now."""
        self.quiet_at = 0
        """How many messages had been taken when nothing was on its way; -1 while something is."""
        self.generation = 0
        """How often everything was forgotten; written by the engine thread."""
        self.abandoned = False
        """What has not begun never will: the engine closes. Written by whoever closes it."""

    @property
    def num_reads(self) -> int:
        """Blocks that are being read from disk."""
        return len(self._reads)

    # ------------------------------------------------------------------ the turn: never blocks

    def turn(self) -> Rest:
        """Take in what has ended, take orders, give the device what it may have; what the next turn waits for.

        Whatever it raises it tells first: there will be no other turn.
        """
        try:
            return self._turn()
        except BaseException as error:
            self._news.put(MoverFailed(error))
            raise

    def _turn(self) -> Rest:
        if self._growing:
            self._grow()
        self._ended_copies.extend((*self._to_host.retire(), *self._to_device.retire()))
        if not self.abandoned:
            self._fill()  # before all else: the link must not run dry while the books are kept
        self._finish_writes()
        self._finish_reads()
        self._take_orders()
        if self.abandoned:
            self._drop()
            self._keep_books()
        # One thing a turn that takes time: what the link will lack soon, then books, then what it will lack later. Of
        # blocks so small that the link always lacks some, the books are kept all the same.
        elif not ((len(self._ended_copies) <= _CROWDED_LANE and self._begin_pieces(ahead=False)) or self._keep_books()):
            self._begin_pieces(ahead=True)
        self._fill()
        self._finish_waiters()
        self._settled.raise_to(next(iter(self._unsettled), self._last + 1) - 1)
        return self._rest()

    def _grow(self) -> None:
        """Use the host memory that was pinned since the last turn, and have deferred stores ordered again."""
        self._growing = self._device.grows(self._host.memory)  # first: once it is False, all that will ever be ready is
        self._host.grow(self._device.ready_bytes(self._host.memory))
        room = self._host.pool.num_free if self._growing else len(self._deferred)
        if again := tuple(islice(self._deferred, room)):
            for key in again:
                del self._deferred[key]
            self._news.put(StoreAgain(again))

    def _fill(self) -> None:
        self._to_host.fill()
        for copy in self._to_device.fill():
            self._say_submitted(self._loads[copy])

    def _take_orders(self) -> None:
        """Take some messages in; what they ask for is noted, and begun piece by piece."""
        blocks = 0
        while blocks < _BLOCKS_A_TURN and (message := self._orders.take()) is not None:
            self._taken += 1
            if isinstance(message, Forget):
                self._forget_all() if message.keys is None else self._invalidate(message.keys)
            else:
                blocks += 1 + self._carry_out(message)

    def _begin_pieces(self, *, ahead: bool) -> bool:
        """Begin a piece for each lane that has nothing more to give, or, `ahead`, for each that is not crowded; whether
        there was any.
        """
        begun = False
        if self._arriving and (not self._to_device.has_more or (ahead and len(self._to_device) < _CROWDED_LANE)):
            order, begun = self._arriving[0], True
            if order.failure is None:
                self._load_piece(order)
            if order.all_begun or order.failure is not None:
                del self._arriving[0]
        if self._later and (not self._to_host.has_more or (ahead and len(self._to_host) < _CROWDED_LANE)):
            begun, blocks = True, 0
            while self._later and blocks < _BLOCKS_A_TURN:  # many small ones as well as a piece of a large one
                store = self._later[0]
                blocks -= store.begun
                self._store(store)
                blocks += store.begun
                if store.begun == len(store.plan.keys):
                    del self._later[0]
        return begun

    def _keep_books(self) -> bool:
        """Take in copies that have ended, some in each turn; whether there was any."""
        blocks = 0
        while self._ended_copies and (blocks < _BLOCKS_A_TURN or self.abandoned):
            copy = self._ended_copies.popleft()
            blocks += len(copy.groups[0].source_starts)
            self._end_store(self._stores[copy]) if copy in self._stores else self._end_load(self._loads[copy], copy)
        return blocks > 0

    def _carry_out(self, orders: Orders) -> int:
        """Begin loads and promotions, and note stores; the number of blocks begun. Loads first: they lease slots that
        the others might evict.
        """
        self._last = orders.plans[-1][0]
        self._unsettled.update((number, None) for number, plan in orders.plans if not isinstance(plan, PromotePlan))
        for number, plan in orders.plans:
            if isinstance(plan, LoadPlan):
                self._load(number, plan)
        promotions = [(plan, self._keep(plan)) for _, plan in orders.plans if isinstance(plan, PromotePlan)]
        for promotion, kept in promotions:
            self._promote(promotion, kept, orders.generation)
        self._later.extend(
            StoreOrder(number, plan, orders.generation) for number, plan in orders.plans if isinstance(plan, StorePlan)
        )
        return sum(len(plan.keys) for _, plan in orders.plans if not isinstance(plan, StorePlan))

    def _rest(self) -> Rest:
        waiting = ((self._arriving, self._to_device), (self._later, self._to_host))
        more = bool(self._orders or self._ended_copies) or any(
            orders and len(lane) < _CROWDED_LANE for orders, lane in waiting
        )
        waits: list[float] = [waiter.deadline_s for waiter in self._waiters]
        if more:
            hurried = any(orders and lane.runs_low and len(lane) < _CROWDED_LANE for orders, lane in waiting)
            waits.append(self._clock() + (_SHORT_BREATH_S if hurried else _BREATH_S))
        if self._growing:
            waits.append(self._clock() + _GROWTH_POLL_S)
        begun = self._stores or self._loads or self._writes or self._reads
        busy = more or self._later or self._arriving or begun or self._waiters or self._deferred
        self.quiet_at = -1 if busy else self._taken
        return Rest(tuple(dict.fromkeys(self._awaited())), min(waits, default=None))

    def _awaited(self) -> Iterator[Fence]:
        yield from self._to_host.awaited()
        yield from self._to_device.awaited()
        yield from (read.fence for read in islice(self._reads.values(), _DISK_READERS))
        yield from (ticket.fence for ticket in self._writes[:1])

    # ------------------------------------------------------------------ orders

    def _store(self, order: StoreOrder) -> None:
        """Begin the next piece of an order: copy blocks that the host tier lacks, as many as find a slot that is free
        or evictable.

        The rest is counted. While host memory is being pinned, nothing is evicted: the rest is deferred.
        """
        plan, first = order.plan, order.begun
        stop = order.begun = min(first + _BLOCKS_A_TURN, len(plan.keys))
        wanted = zip(plan.keys[first:stop], plan.block_ids[first:stop], strict=True)
        pairs = [(k, b) for k, b in wanted if k not in self._storing and self._host.pool.get(k) is None]
        room = 0 if self.abandoned else self._host.pool.num_free if self._growing else self._host.pool.num_available
        if len(pairs) > room:
            if not order.cut:
                self._metrics.inc("transfers_total", 1, "store", "deferred" if self._growing else "skipped")
            order.cut = True
            if self._growing:
                self._defer(key for key, _ in pairs[room:])
            del pairs[room:]
        last = stop == len(plan.keys)
        if not pairs:
            if last:
                self._touch(plan.prefix)
            self._settle(order)
            return
        slots = self._host.pool.take(len(pairs))
        keys, block_ids = tuple(key for key, _ in pairs), [block for _, block in pairs]
        batch = layers_batch(self._memory, block_ids, self._host_memory, slots.ids, range(self._layout.num_layers))
        copy = Copy(
            [self._device.prepare(batch)],
            after=(*plan.after, *slots.after),
            urgency=Urgency.STORE,
            label=f"store {len(keys)} blocks",
        )
        ticket = self._stores[copy] = StoreTicket(order, keys, plan.prefix if last else (), slots, copy, self._clock())
        order.pieces += 1
        self._storing.update(dict.fromkeys(keys, ticket))
        self._to_host.add(copy)

    def _defer(self, keys: Iterable[Key]) -> None:
        """Remember keys whose blocks found no slot. The blocks are not held: they are stored later if the device still
        has them.
        """
        self._deferred.update(dict.fromkeys(keys))
        for key in tuple(islice(self._deferred, max(0, len(self._deferred) - self._host.num_slots))):
            del self._deferred[key]

    def _settle(self, order: StoreOrder) -> None:
        """Note that an order has let go of its blocks, if it has."""
        if order.settled:
            del self._unsettled[order.number]

    def _load(self, number: int, plan: LoadPlan) -> None:
        source_ids = self._host.pool.match(plan.keys)
        if len(source_ids) < len(plan.keys) or self.abandoned:
            self._news.put(LoadMissed(number, gone=not self.abandoned))
            del self._unsettled[number]
            return
        if self._disk is not None:
            self._disk.index.touch(plan.keys)  # used here, so not to be evicted there
        slots = self._host.pool.share(source_ids)
        self._arriving.append(LoadOrder(number, plan, slots, self._clock()))

    def _load_piece(self, order: LoadOrder) -> None:
        """Begin the next piece of an order. Only what is still on its way when all of it was submitted can gate a
        step layer by layer: so only the last piece is cut by layers, which costs speed.
        """
        plan, layout, first = order.plan, self._layout, order.begun
        piece, last = (max(_BLOCKS_A_TURN, num_bytes // layout.block_bytes) for num_bytes in (_LOAD_BYTES, _LAST_BYTES))
        left = len(plan.keys) - first
        stop = order.begun = first + (left if left <= last else min(piece, left - last))
        step = layers_per_group(layout, self._device.segment_bytes) if order.all_begun else layout.num_layers
        groups = []
        for layer in range(0, layout.num_layers, step):
            layers = range(layer, min(layer + step, layout.num_layers))
            batch = layers_batch(
                self._host_memory, order.slots.ids[first:stop], self._memory, plan.block_ids[first:stop], layers
            )
            groups.append(self._device.prepare(batch))
        urgency = Urgency.PREFETCH if plan.prefetch else Urgency.DEMAND
        copy = Copy(groups, after=plan.after, urgency=urgency, label=f"load {stop - first} blocks")
        order.copies.append(copy)
        self._loads[copy] = order
        self._to_device.add(copy)

    def _say_submitted(self, order: LoadOrder) -> None:
        """Count a piece of which the last slice was given now; tell of the fences, if there are fences for all of the
        order by that.

        A piece may be given before an earlier one: they wait for the same, but the lane may see the end of that wait in
        between.
        """
        order.given += 1
        # The books of a failed copy may not be kept yet.
        failed = order.failure is not None or any(copy.failure is not None for copy in order.copies)
        if order.all_begun and order.given == len(order.copies) and not failed:
            *others, last = [
                [Part(tuple(fences), group.num_bytes) for fences, group in zip(copy.fences, copy.groups, strict=True)]
                for copy in order.copies
            ]
            self._news.put(LoadSubmitted(order.number, tuple(part for parts in others for part in parts), tuple(last)))

    def _keep(self, plan: PromotePlan) -> Lease:
        """Hold the slots that a promoted run has in the host tier already, so that no promotion of this step evicts
        them.
        """
        return self._host.pool.share([slot for key in plan.keys if (slot := self._host.pool.get(key)) is not None])

    def _promote(self, plan: PromotePlan, kept: Lease, generation: int) -> None:
        """Read what is on disk and nobody reads yet; join the reads that are on their way. Without room, the run is
        cut.
        """
        reads: dict[Key, ReadTicket] = {}
        complete = True
        for key in plan.keys:
            if self._host.pool.get(key) is not None:
                continue
            if key not in self._reads:
                complete = (
                    self._disk is not None
                    and key in self._disk.index
                    and self._host.pool.num_available > 0
                    and not self.abandoned
                )
                if not complete:
                    break
                self._read(key, generation)
            reads[key] = self._reads[key]
        self._waiters.append(
            Waiter(plan.request_id, plan.epoch, reads, kept, complete, self._clock() + self._deadline_s)
        )

    def _read(self, key: Key, generation: int) -> None:
        assert self._disk is not None
        disk, slot, pin = self._disk, self._host.pool.take(1), self._disk.index.pin([key])
        stream = self._read_streams[len(self._reads) % len(self._read_streams)]
        for fence in slot.after:
            stream.wait(fence)
        watch, index = Stopwatch(), slot.ids[0]
        fence = stream.submit(
            self._timed(watch, lambda: disk.read(pin.entries[0], self._host.slot(index))),
            lambda: [pin.entries[0].access(write=False), *self._host_memory.accesses([index], write=True)],
            label="read block",
        )
        self._reads[key] = ReadTicket(key, slot, pin, fence, self._clock(), watch, generation)

    def _write(self, key: Key, index: int, stored: StoreTicket) -> None:
        """Write a slot that was just published through to disk, unless it is there or the disk has just refused."""
        if self._disk is None or self._write_stream is None or key in self._disk.index:
            return
        crowded = (
            len(self._writes) >= self._host.pool.size // 2
        )  # each pins a slot: a slow disk must leave some to the others
        if crowded or self.abandoned or self._clock() < self._disk_resumes_s:
            self._metrics.inc("transfers_total", 1, "disk-write", "skipped")
            return
        try:
            grant = self._disk.index.reserve(key)
        except TierFull:
            self._metrics.inc("transfers_total", 1, "disk-write", "full")
            return
        if grant is None:
            return
        disk, slot, watch = self._disk, self._host.pool.share([index]), Stopwatch()
        fence = self._write_stream.submit(
            self._timed(watch, lambda: disk.write(grant, self._host.slot(index))),
            lambda: [*grant.accesses(), *self._host_memory.accesses([index], write=False)],
            label="write block",
        )
        self._writes.append(
            WriteTicket(key, stored.prefix, slot, grant, fence, self._clock(), watch, stored.order.generation)
        )

    def _forget_all(self) -> None:
        """Make everything in the host and disk tiers unreachable (H8). What is on its way ends by its fences, and
        publishes nothing.
        """
        self._host.pool.forget_all()
        self._deferred.clear()
        if self._disk is not None:
            self._disk.index.clear()
        self.num_forgotten += 1

    def _invalidate(self, keys: frozenset[Key]) -> None:
        """Make these unreachable in the host and disk tiers. What is on its way ends by its fences, and publishes none
        of them.
        """
        pool = self._host.pool
        pool.forget([slot for key in keys if (slot := pool.get(key)) is not None])
        if self._disk is not None:
            self._disk.index.drop(keys)
        for order in (*self._later, *(ticket.order for ticket in self._stores.values())):
            order.invalidated |= keys.intersection(order.plan.keys)
        for key in keys & self._reads.keys():
            self._reads[key].invalidated = True

    def _drop(self) -> None:
        """End what has not begun: the engine closes."""
        reason = TierTimeout("the engine closed before this could begin")
        while self._arriving:
            arriving = self._arriving.popleft()
            if arriving.failure is None:  # else it has been settled, or will be with the last piece that is on its way
                arriving.failure = reason
                self._settle_load(arriving)
        self._deferred.clear()
        while self._later:
            order = self._later.popleft()
            order.begun = len(order.plan.keys)
            self._settle(order)
        for copy in (*self._to_host.cut(reason), *self._to_device.cut(reason)):
            self._end_store(self._stores[copy]) if copy in self._stores else self._end_load(self._loads[copy], copy)

    # ------------------------------------------------------------------ completion

    def _end_store(self, ticket: StoreTicket) -> None:
        del self._stores[ticket.copy]
        for key in ticket.keys:
            del self._storing[key]
        order, pool = ticket.order, self._host.pool
        good = self._ended("store", ticket.copy.failure, len(ticket.keys), ticket.ordered_s)
        if good and order.generation == self.generation:
            stored = [
                (key, slot)
                for key, slot in zip(ticket.keys, ticket.slots.ids, strict=True)
                if key not in order.invalidated
            ]
            pool.publish_all([slot for _, slot in stored], [key for key, _ in stored])  # H7: only now
            if self._disk is not None:
                for key, slot in stored:
                    self._write(key, slot, ticket)
        ticket.slots.release()
        self._touch(ticket.prefix)
        order.pieces -= 1
        self._settle(order)

    def _end_load(self, order: LoadOrder, copy: Copy) -> None:
        """A piece has ended."""
        del self._loads[copy]
        order.ended += 1
        if copy.failure is None:
            self._costs.saw_transfer("host", sum(group.num_bytes for group in copy.groups), copy.seconds)
        elif order.failure is None:
            order.failure = copy.failure
        self._settle_load(order)

    def _settle_load(self, order: LoadOrder) -> None:
        """Let go of what an order holds, if nothing of it is to come."""
        if not order.settled:
            return
        if not self._ended("load", order.failure, len(order.plan.keys), order.ordered_s):
            self._news.put(LoadMissed(order.number))
        order.slots.release()
        del self._unsettled[order.number]

    def _finish_writes(self) -> None:
        assert self._disk is not None or not self._writes
        while self._writes and self._writes[0].fence.poll():
            ticket = self._writes.pop(0)
            if self._disk is not None:
                good = self._ended("disk-write", ticket.fence.failure, 1, ticket.ordered_s) and ticket.grant.written
                if good and self._is_wanted(ticket):
                    self._disk.index.publish(ticket.grant)
                else:
                    self._disk.index.abandon(ticket.grant)
                if not good:
                    self._disk_resumes_s = self._clock() + _DISK_PAUSE_S
            ticket.slot.release()
            if not self._writes or self._writes[0].prefix is not ticket.prefix:
                self._touch(
                    ticket.prefix
                )  # again after the last write of a store: what was being written could not be counted before

    def _touch(self, prefix: tuple[Key, ...]) -> None:
        """Count a run from the start of a sequence as just used, in both tiers: they shall evict it from its end."""
        self._host.pool.touch(prefix)
        if self._disk is not None:
            self._disk.index.touch(prefix)

    def _finish_reads(self) -> None:
        for ticket in [t for t in self._reads.values() if t.fence.poll()]:
            assert self._disk is not None
            del self._reads[ticket.key]
            if self._ended("disk-read", ticket.failure(), 1, ticket.ordered_s):
                self._costs.saw_transfer("disk", self._layout.block_bytes, ticket.work.seconds)
                if self._is_wanted(ticket) and not ticket.invalidated:
                    self._host.pool.publish(ticket.slot.ids[0], ticket.key)
                    self._keep_for_waiters(ticket)
            elif not isinstance(ticket.failure(), TierTimeout):
                self._disk.index.forget(ticket.pin.entries[0])  # damaged or unreadable: it is computed and written anew
            ticket.pin.release()
            ticket.slot.release()

    def _keep_for_waiters(self, ticket: ReadTicket) -> None:
        """Hold the promoted block for those who wait for more, so that nothing evicts it before they come for it."""
        for waiter in self._waiters:
            if waiter.reads.get(ticket.key) is ticket and (slot := self._host.pool.get(ticket.key)) is not None:
                waiter.kept.extend(self._host.pool.share([slot]))

    def _finish_waiters(self) -> None:
        now = self._clock()
        for waiter in list(self._waiters):
            done = not any(
                self._reads.get(key) is read for key, read in waiter.reads.items()
            )  # taken in, not only ended: now findable
            if not done and now < waiter.deadline_s:
                continue
            self._waiters.remove(waiter)
            waiter.kept.release()
            good = done and all(read.failure() is None for read in waiter.reads.values())
            reason: Literal["done", "deadline", "failed", "no_room"]
            reason = "deadline" if not done else "failed" if not good else "done" if waiter.complete else "no_room"
            self._news.put(Promoted(waiter.request_id, waiter.epoch, reason == "done", reason))

    def _is_wanted(self, ticket: ReadTicket | WriteTicket) -> bool:
        return ticket.generation == self.generation

    def _ended(self, kind: str, error: BaseException | None, num_blocks: int, ordered_s: float) -> bool:
        """Count the end of a transfer; True when it went well."""
        self._metrics.inc("transfers_total", 1, kind, "done" if error is None else "failed")
        if error is None:
            self._metrics.inc("transfer_bytes_total", num_blocks * self._layout.block_bytes, kind)
            self._metrics.observe("transfer_seconds", self._clock() - ordered_s, kind)
        elif self._clock() >= self._next_warning_s:
            self._next_warning_s = self._clock() + _WARNING_PERIOD_S
            logger.warning("%s failed and is a miss: %s: %s", kind, type(error).__name__, error)
        return error is None

    def _timed(self, watch: Stopwatch, work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            if self.abandoned:
                raise TierTimeout("the engine closed before this could begin")
            start = self._clock()
            work()
            watch.seconds += self._clock() - start

        return run


def layers_per_group(layout: KVLayout, segment_bytes: int) -> int:
    """How many layers of a block a load copies as one segment: few, so that the first step starts early, and not below
    `segment_bytes`.
    """
    num_groups = min(layout.num_layers, max(1, layout.block_bytes // segment_bytes))
    return -(-layout.num_layers // num_groups)
