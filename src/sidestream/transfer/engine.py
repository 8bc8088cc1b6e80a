"""The transfer engine: hands plans to streams, watches their fences, publishes what is complete.

Submission returns at once and never waits for a transfer; `poll` looks at fences and does the bookkeeping. Both run on the
engine thread, the bytes move on the streams:

    store        device blocks → host slots    behind the flight that filled the blocks (H1)
    load         host slots → device blocks    behind the last use of the blocks (H3); one fence a layer group
    disk-write   host slots → disk             after the store's fence was seen
    disk-read-*  disk → host slots             for requests that wait

Whatever fails is a miss: nothing is published (H9), the leases end, the request recomputes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from sidestream.device.base import Device, Stream
from sidestream.errors import TierFull, TierTimeout
from sidestream.kv.pool import FencedPool, Lease
from sidestream.metrics import Metrics
from sidestream.tiers.base import PersistentTier
from sidestream.tiers.host import HostTier
from sidestream.transfer.copy import BlockMemory, layers_batch
from sidestream.transfer.pacing import CostModel
from sidestream.transfer.tickets import LoadTicket, ReadTicket, Stopwatch, StoreTicket, Waiter, WriteTicket
from sidestream.types import BatchPlan, Fence, Key, LayerGates, LoadPlan, PromotePlan, RequestId, StorePlan, TransferPlan

logger = logging.getLogger(__name__)

# Layers of a block that are copied as one segment have at least so many bytes: fewer waste the copy, more make the first layer wait.
_MIN_SEGMENT_BYTES = 64 * 1024
_DISK_READERS = 2
# After the disk refused a write, how long it is left alone.
_DISK_PAUSE_S = 5.0
# How often a flush looks whether the transfers have ended.
_FLUSH_POLL_S = 0.001
# A tier that is broken fails often; transfers_total counts what is not logged.
_WARNING_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class Promoted:
    """A request's wait for the disk ended; `complete`: everything it waited for is in the host tier."""

    request_id: RequestId
    epoch: int
    complete: bool
    reason: Literal["done", "deadline", "failed", "no_room"]


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """A load into the device failed: what it wrote must not be used."""

    request_id: RequestId
    epoch: int


TransferEvent = Promoted | LoadFailed


class TransferEngine:
    """Owner of the copy streams and of every transfer on its way."""

    def __init__(
        self,
        *,
        device: Device,
        blocks: FencedPool,
        memory: BlockMemory,
        host: HostTier,
        disk: PersistentTier | None,
        costs: CostModel,
        metrics: Metrics,
        load_deadline_s: float,
    ) -> None:
        self._blocks = blocks
        self._memory = memory
        self._host = host
        self._host_memory = BlockMemory(host.memory, host.layout)
        self._disk = disk
        self._costs = costs
        self._metrics = metrics
        self._deadline_s = load_deadline_s
        self._clock = device.now
        self._sleep = device.sleep
        self._layout = memory.layout
        self._store_stream: Stream = device.stream("store")
        self._load_stream: Stream = device.stream("load")
        self._write_stream: Stream | None = device.stream("disk-write") if disk else None
        self._read_streams: list[Stream] = [device.stream(f"disk-read-{index}") for index in range(_DISK_READERS)] if disk else []
        self._stores: dict[Key, StoreTicket] = {}
        self._loads: list[LoadTicket] = []
        self._writes: list[WriteTicket] = []
        self._reads: dict[Key, ReadTicket] = {}
        self._waiters: list[Waiter] = []
        self._events: list[TransferEvent] = []
        self._disk_resumes_s = 0.0
        self._generation = 0
        self._next_warning_s = 0.0
        self._abandoned = False  # read by the streams

    # ------------------------------------------------------------------ what the scheduler asks

    def locate(self, keys: Sequence[Key]) -> list[Literal["host", "disk"]]:
        """Where the longest run of leading `keys` rests. Read-only."""
        sources: list[Literal["host", "disk"]] = []
        for key in keys:
            if self._host.pool.get(key) is not None:
                sources.append("host")
            elif self._disk is not None and key in self._disk.index:
                sources.append("disk")
            else:
                break
        return sources

    def worth_loading(self, sources: Sequence[Literal["host", "disk"]]) -> bool:
        """Whether loading is expected to take less time than computing, and less than the deadline."""
        queued = len(self._reads) * self._layout.block_bytes
        on_disk = sources.count("disk")
        seconds = self._costs.load_seconds(host_blocks=len(sources) - on_disk, disk_blocks=on_disk, queued_disk_bytes=queued)
        return seconds < min(self._costs.compute_seconds(len(sources)), self._deadline_s)

    # ------------------------------------------------------------------ submission: never blocks

    def submit(self, plans: Sequence[TransferPlan]) -> None:
        """Start loads, promotions and stores. Loads first: they lease slots that the others might evict."""
        for plan in plans:
            if isinstance(plan, LoadPlan):
                self._load(plan)
        promotions = [(plan, self._keep(plan)) for plan in plans if isinstance(plan, PromotePlan)]
        for promotion, kept in promotions:
            self._promote(promotion, kept)
        for plan in plans:
            if isinstance(plan, StorePlan):
                self._store(plan)

    def gates(self, batch: BatchPlan) -> LayerGates:
        """What a flight of `batch` must wait for, layer by layer: only loads of its own requests (H5)."""
        members = {(row.request_id, row.epoch) for row in batch.rows}
        loads = [t for t in self._loads if (t.plan.request_id, t.plan.epoch) in members and not t.done()]
        if not loads:
            return LayerGates()
        group = self._layers_per_group()
        return LayerGates(tuple(tuple(t.fences[layer // group] for t in loads) for layer in range(self._layout.num_layers)))

    def _store(self, plan: StorePlan) -> None:
        """Copy blocks that the host tier lacks, as many as find a slot that is free or evictable; the rest is counted."""
        pairs = [(k, b) for k, b in zip(plan.keys, plan.block_ids, strict=True) if k not in self._stores and self._host.pool.get(k) is None]
        room = self._host.pool.num_available
        if len(pairs) > room:
            self._metrics.inc("transfers_total", 1, "store", "skipped")
            del pairs[room:]
        if not pairs:
            return
        slots = self._host.pool.take(len(pairs))
        keys, block_ids = tuple(key for key, _ in pairs), [block for _, block in pairs]
        source = self._blocks.share(block_ids)
        for fence in (*plan.after, *slots.after):
            self._store_stream.wait(fence)
        every_layer = range(self._layout.num_layers)
        watch, stream = Stopwatch(), self._store_stream
        batch = layers_batch(self._memory, block_ids, self._host_memory, slots.ids, every_layer)
        fence = stream.submit(self._timed(watch, lambda: stream.copy(batch)), batch.accesses, label=f"store {len(keys)} blocks")
        source.release(after=(fence,))  # H2: whoever takes these blocks next waits for the fence on its own stream
        ticket = StoreTicket(keys, plan.prefix, slots, fence, self._clock(), watch, self._generation)
        self._stores.update(dict.fromkeys(keys, ticket))

    def _load(self, plan: LoadPlan) -> None:
        source_ids = self._host.pool.match(plan.keys)
        if len(source_ids) < len(plan.keys):
            self._events.append(LoadFailed(plan.request_id, plan.epoch))
            return
        if self._disk is not None:
            self._disk.index.touch(plan.keys)  # used here, so not to be evicted there
        slots, blocks = self._host.pool.share(source_ids), self._blocks.share(plan.block_ids)
        for fence in plan.after:
            self._load_stream.wait(fence)
        group, last = self._layers_per_group(), self._layout.num_layers
        watch, fences = Stopwatch(), []
        for first in range(0, last, group):
            layers = range(first, min(first + group, last))
            batch = layers_batch(self._host_memory, source_ids, self._memory, plan.block_ids, layers)
            label = f"load {len(plan.keys)} blocks, layers {layers.start}-{layers.stop - 1}"
            fences.append(self._load_stream.submit(self._timed(watch, partial(self._load_stream.copy, batch)), batch.accesses, label=label))
        self._loads.append(LoadTicket(plan, slots, blocks, tuple(fences), self._clock(), watch, self._generation))

    def _keep(self, plan: PromotePlan) -> Lease:
        """Hold the slots that a promoted run has in the host tier already, so that no promotion of this step evicts them."""
        return self._host.pool.share([slot for key in plan.keys if (slot := self._host.pool.get(key)) is not None])

    def _promote(self, plan: PromotePlan, kept: Lease) -> None:
        """Read what is on disk and nobody reads yet; join the reads that are on their way. Without room, the run is cut."""
        reads: dict[Key, ReadTicket] = {}
        complete = True
        for key in plan.keys:
            if self._host.pool.get(key) is not None:
                continue
            if key not in self._reads:
                complete = self._disk is not None and key in self._disk.index and self._host.pool.num_available > 0
                if not complete:
                    break
                self._read(key)
            reads[key] = self._reads[key]
        self._waiters.append(Waiter(plan.request_id, plan.epoch, reads, kept, complete, self._clock() + self._deadline_s))

    def _read(self, key: Key) -> None:
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
        self._reads[key] = ReadTicket(key, slot, pin, fence, self._clock(), watch, self._generation)

    def _write(self, key: Key, index: int, prefix: tuple[Key, ...]) -> None:
        """Write a published slot through to disk, unless it is there or the disk has just refused."""
        if self._disk is None or self._write_stream is None or key in self._disk.index:
            return
        crowded = len(self._writes) >= self._host.pool.size // 2  # each pins a slot: a slow disk must leave some to the others
        if crowded or self._abandoned or self._clock() < self._disk_resumes_s:
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
        self._writes.append(WriteTicket(key, prefix, slot, grant, fence, self._clock(), watch))

    # ------------------------------------------------------------------ completion: never blocks

    @property
    def busy(self) -> bool:
        """Whether any transfer is on its way."""
        return bool(self._stores or self._loads or self._writes or self._reads or self._waiters or self._events)

    @property
    def awaited(self) -> bool:
        """Whether a request waits for a transfer."""
        return bool(self._waiters or self._loads or self._events)

    def poll(self) -> list[TransferEvent]:
        """Publish what is complete, end what failed, and say which requests' waits are over."""
        self._finish_stores()
        self._finish_loads()
        self._finish_writes()
        self._finish_reads()
        self._finish_waiters()
        events, self._events = self._events, []
        return events

    def _finish_stores(self) -> None:
        for ticket in [*dict.fromkeys(self._stores.values())]:
            if not ticket.fence.poll():
                break  # one stream: the later ones are not done either
            for key in ticket.keys:
                del self._stores[key]
            good = self._ended("store", ticket.fence, len(ticket.keys), ticket.submitted_s)
            if good and self._is_wanted(ticket):
                for key, slot in zip(ticket.keys, ticket.slots.ids, strict=True):
                    self._host.pool.publish(slot, key)  # H7: only now
                    self._write(key, slot, ticket.prefix)
            ticket.slots.release(after=(ticket.fence,))
            self._touch(ticket.prefix)

    def _finish_loads(self) -> None:
        for ticket in [t for t in self._loads if t.done()]:
            self._loads.remove(ticket)
            failed = next((fence for fence in ticket.fences if fence.failure is not None), ticket.fences[-1])
            if self._ended("load", failed, len(ticket.plan.keys), ticket.submitted_s):
                self._costs.saw_transfer("host", len(ticket.plan.keys) * self._layout.block_bytes, ticket.work.seconds)
                if self._is_wanted(ticket):
                    for key, block in zip(ticket.plan.keys, ticket.plan.block_ids, strict=True):
                        self._blocks.publish(block, key)
            else:
                self._events.append(LoadFailed(ticket.plan.request_id, ticket.plan.epoch))
            ticket.slots.release()
            ticket.blocks.release()

    def _finish_writes(self) -> None:
        assert self._disk is not None or not self._writes
        while self._writes and self._writes[0].fence.poll():
            ticket = self._writes.pop(0)
            if self._disk is not None:
                if self._ended("disk-write", ticket.fence, 1, ticket.submitted_s) and ticket.grant.written:
                    self._disk.index.publish(ticket.grant)
                else:
                    self._disk.index.abandon(ticket.grant)
                    self._disk_resumes_s = self._clock() + _DISK_PAUSE_S
            ticket.slot.release()
            if not self._writes or self._writes[0].prefix is not ticket.prefix:
                self._touch(ticket.prefix)  # again after the last write of a store: what was being written could not be counted before

    def _touch(self, prefix: Sequence[Key]) -> None:
        """Count a run from the start of a sequence as just used, in both tiers: they shall evict it from its end."""
        self._host.pool.touch(prefix)
        if self._disk is not None:
            self._disk.index.touch(prefix)

    def _finish_reads(self) -> None:
        for ticket in [t for t in self._reads.values() if t.fence.poll()]:
            assert self._disk is not None
            del self._reads[ticket.key]
            if self._ended("disk-read", ticket.fence, 1, ticket.submitted_s):
                self._costs.saw_transfer("disk", self._layout.block_bytes, ticket.work.seconds)
                if self._is_wanted(ticket):
                    self._host.pool.publish(ticket.slot.ids[0], ticket.key)
                    self._keep_for_waiters(ticket)
            elif not isinstance(ticket.failure(), TierTimeout):
                self._disk.index.forget(ticket.pin.entries[0])  # damaged or unreadable: it is computed and written anew
            ticket.pin.release()
            ticket.slot.release(after=(ticket.fence,))

    def _keep_for_waiters(self, ticket: ReadTicket) -> None:
        """Hold the promoted block for those who wait for more, so that nothing evicts it before they come for it."""
        for waiter in self._waiters:
            if waiter.reads.get(ticket.key) is ticket and (slot := self._host.pool.get(ticket.key)) is not None:
                waiter.kept.extend(self._host.pool.share([slot]))

    def _finish_waiters(self) -> None:
        now = self._clock()
        for waiter in list(self._waiters):
            done = not any(self._reads.get(key) is read for key, read in waiter.reads.items())  # taken in, not only ended: now findable
            if not done and now < waiter.deadline_s:
                continue
            self._waiters.remove(waiter)
            waiter.kept.release()
            good = done and all(read.failure() is None for read in waiter.reads.values())
            reason: Literal["done", "deadline", "failed", "no_room"]
            reason = "deadline" if not done else "failed" if not good else "done" if waiter.complete else "no_room"
            self._events.append(Promoted(waiter.request_id, waiter.epoch, reason == "done", reason))

    def _is_wanted(self, ticket: StoreTicket | LoadTicket | ReadTicket) -> bool:
        return ticket.generation == self._generation

    def _ended(self, kind: str, fence: Fence, num_blocks: int, submitted_s: float) -> bool:
        """Count the end of a transfer; True when it went well."""
        error = fence.failure
        self._metrics.inc("transfers_total", 1, kind, "done" if error is None else "failed")
        if error is None:
            self._metrics.inc("transfer_bytes_total", num_blocks * self._layout.block_bytes, kind)
            self._metrics.observe("transfer_seconds", self._clock() - submitted_s, kind)
        elif self._clock() >= self._next_warning_s:
            self._next_warning_s = self._clock() + _WARNING_PERIOD_S
            logger.warning("%s failed and is a miss: %s: %s", kind, type(error).__name__, error)
        return error is None

    # ------------------------------------------------------------------ the rest

    def forget_all(self) -> None:
        """Make everything in the host and disk tiers unreachable at once (H8).

        Transfers on their way end by their fences, and nothing that they moved becomes findable.
        """
        self._generation += 1
        self._host.pool.forget_all()
        if self._disk is not None:
            self._disk.index.clear()

    def flush(self, *, timeout_s: float) -> bool:
        """Let what is on its way end, writes to disk included. Blocks; any thread, once the engine thread has ended.

        False when `timeout_s` passed first: then what has not begun never will, which loses only cache.
        """
        deadline = self._clock() + timeout_s
        while self.busy:
            if self._clock() >= deadline:
                self._abandoned = True
                return False
            self.poll()
            self._sleep(_FLUSH_POLL_S)
        return True

    def close(self) -> None:
        """Take in what ended since the last poll and let go of the disk. Only once the streams have ended. Idempotent."""
        try:
            self.poll()
        finally:
            if self._disk is not None:
                self._disk.close()

    def _layers_per_group(self) -> int:
        return min(self._layout.num_layers, -(-_MIN_SEGMENT_BYTES // self._layout.layer_bytes))

    def _timed(self, watch: Stopwatch, work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            if self._abandoned:
                raise TierTimeout("the engine closed before this could begin")
            start = self._clock()
            work()
            watch.seconds += self._clock() - start

        return run
