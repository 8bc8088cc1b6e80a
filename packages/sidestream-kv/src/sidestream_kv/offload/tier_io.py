"""Reads and writes of persistent tiers, such as the disk, on separate streams. Also promotions: reads of blocks into
host memory for requests that wait for these blocks; and finds: questions to tiers that other processes write, too.
Called on the offload worker's thread only.

A failed write leaves no entry in the tier, and a failed read counts as a cache miss. Before a write, the tier's index
gives a grant: the right to write one entry, possibly in place of an evicted entry. docs/tiers.md describes tiers.

    slot      host memory for one block
    lease     the right to use slots: the blocks in leased slots are not evicted
    pin       protection of an entry from eviction while it is read
    prefix    keys of all blocks of a sequence up to a stored block; they are marked as just used together
    tracer    recorder of events and memory accesses, in tests
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Literal

from sidestream_kv.device.base import Stream
from sidestream_kv.errors import TierFull, TierLost, TierTimeout
from sidestream_kv.kv.pool import Lease
from sidestream_kv.offload.loads import TransferContext
from sidestream_kv.offload.tickets import Outcome, Promoted, ReadTicket, Waiter, WriteTicket
from sidestream_kv.offload.tiers.base import BatchTier, PersistentTier, SharedTier, batch_blocks, streams_of
from sidestream_kv.offload.tiers.index import Entry, Refresh, WriteGrant, is_leaving
from sidestream_kv.offload.tiers.stack import kind_of
from sidestream_kv.types import Access, Fence, FindPlan, Key, PromotePlan, RequestId

# A request waits for reads so many times as long as they are expected to take, and at least so long.
_PATIENCE = 8
_LEAST_PATIENCE_S = 0.1
# After a failed write, the tier gets no other write for this time.
PAUSE_S = 5.0
# Questions to one tier in flight. A request beyond does not ask, so a tier that stalls collects no queue.
_MOST_QUESTIONS = 4


@dataclass(frozen=True, slots=True, eq=False)
class TierBlock:
    """A block that is read or written.

    slot    index of the host slot
    grant   grant of the write; None if this is a read
    victim  evicted entry that the write deletes first; None if there is none
    """

    slot: int
    entry: Entry
    grant: WriteGrant | None = None
    victim: Entry | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TierWork:
    """A read or a write of some blocks, as work for a stream.

    run     function that reads or writes the blocks
    """

    run: Callable[[], None]
    tier: str
    blocks: Sequence[TierBlock]

    def __call__(self) -> None:
        """Run the work, on the stream's thread."""
        self.run()


@dataclass(frozen=True, slots=True, eq=False)
class LocalWork:
    """Work for a tier's stream that the other ranks of an engine do not repeat."""

    run: Callable[[], None]

    def __call__(self) -> None:
        """Run the work, on the stream's thread."""
        self.run()


class TierIO:
    """Reads and writes of the persistent tier `name`, on the streams `NAME-write-0`, `NAME-read-0` and so on."""

    def __init__(self, name: str, context: TransferContext) -> None:
        self.name = name
        self._context = context
        self._tier: PersistentTier = context.tiers.persistent[name]
        self._tiers = context.tiers
        self._host = context.tiers.host
        self._host_memory = context.host_memory
        device = context.device
        self._clock = device.now
        streams = streams_of(self._tier)
        self._read_streams = [device.worker(f"{name}-read-{index}") for index in range(streams.readers)]
        self._next_read_stream = cycle(self._read_streams)
        # One queue of writes for each stream, so that a write that never returns holds up those of its stream only.
        self._writes: list[tuple[Stream, deque[WriteTicket]]] = [
            (device.worker(f"{name}-write-{index}"), deque()) for index in range(streams.writers)
        ]
        self._in_flight: set[Key] = set()  # keys of the blocks that are being written
        self._num_peers = sum(kind_of(other) == kind_of(name) for other in context.tiers.persistent)
        self._batch = batch_blocks(self._tier, self._host.layout.block_bytes)
        self._resumes_s = 0.0
        self.refresh = Refresh(self._tier, self._clock)
        """Looks for entries of other processes."""
        self.reads: dict[Key, ReadTicket] = {}
        """Reads in flight, by key. Any thread may read the length."""
        self.fault = ""
        """Why the last write failed; empty after a write that succeeded. Any thread may read it."""
        self._report(None)

    @property
    def has_work(self) -> bool:
        """Whether any read or write is in flight."""
        return bool(self.reads) or any(writes for _, writes in self._writes)

    def sizes(self) -> dict[str, int]:
        """Number of objects that are kept, by kind."""
        return {f"{self.name} writes": self._num_writes, f"{self.name} reads": len(self.reads)}

    def awaited(self) -> Iterator[Fence]:
        """Fences whose end should wake the worker."""
        first_reads = islice(self.reads.values(), len(self._read_streams) * self._batch)  # of each stream, the oldest
        yield from dict.fromkeys(read.fence for read in first_reads)
        yield from (writes[0].fence for _, writes in self._writes if writes)

    # ------------------------------------------------------------------ writes

    @property
    def _num_writes(self) -> int:
        return sum(len(writes) for _, writes in self._writes)

    @property
    def max_entries(self) -> int:
        """Number of blocks that the tier can hold."""
        return self._tier.index.max_entries

    @property
    def num_free(self) -> int:
        """How many writes evict nothing."""
        return self.max_entries - len(self._tier.index) - self._num_writes

    @property
    def crowded(self) -> bool:
        """Whether so many writes are in flight that no other may begin: each of them holds a host slot. If the tier is
        slow, its writes must not take the slots of other transfers.
        """
        return self.most_writes <= 0

    @property
    def most_writes(self) -> int:
        """How many writes may begin until it is crowded. Tiers of one kind share the host slots."""
        return -(-(self._host.pool.size // 2) // self._num_peers) - self._num_writes

    @property
    def is_paused(self) -> bool:
        """Whether a write has failed just now."""
        return self._clock() < self._resumes_s

    def holds(self, key: Key) -> bool:
        """Whether the tier holds the block."""
        return key in self._tier.index

    def takes(self, key: Key) -> bool:
        """Whether the tier neither holds the block nor is writing it."""
        return key not in self._in_flight and key not in self._tier.index

    def leave_out(self, outcome: str) -> None:
        """Count a block that is not written, with the reason."""
        self._context.log.left_out(f"{self.name}-write", outcome)

    def write(self, blocks: Iterable[tuple[Key, int]], prefix: tuple[Key, ...], generation: int) -> None:
        """Begin to write blocks, given as keys and host slots, to the tier. A block is skipped if the tier holds it
        already, if too many writes are in flight, or shortly after a failed write. `prefix`: see `WriteTicket`.
        """
        granted: list[TierBlock] = []
        for key, index in blocks:
            if self.takes(key) and (grant := self._grant(key, self.most_writes - len(granted))) is not None:
                granted.append(TierBlock(index, grant.entry, grant, grant.victim))
        for first in range(0, len(granted), self._batch):
            self._begin_write(granted[first : first + self._batch], prefix, generation)

    def _grant(self, key: Key, most: int) -> WriteGrant | None:
        """The right to write a block that the tier does not hold; None if it is skipped. `most`: how many may be."""
        if most <= 0 or self._context.switches.abandoned or self.is_paused:
            self.leave_out("skipped")
            return None
        try:
            return self._tier.index.reserve(key)
        except TierFull:
            self.leave_out("full")
            return None

    def _begin_write(self, blocks: Sequence[TierBlock], prefix: tuple[Key, ...], generation: int) -> None:
        outcomes = [Outcome() for _ in blocks]
        slots = [self._host.pool.share([block.slot]) for block in blocks]  # rule: disk-write-holds-its-slot
        stream, writes = min(self._writes, key=lambda each: len(each[1]))
        fence = stream.submit(
            TierWork(self._timed(outcomes, lambda: self._write(blocks)), self.name, blocks),
            lambda: self._written(blocks),
            label="write blocks",
        )
        now_s = self._clock()
        for block, slot, outcome in zip(blocks, slots, outcomes, strict=True):
            assert block.grant is not None
            self._in_flight.add(block.entry.key)
            writes.append(WriteTicket(block.entry.key, prefix, slot, block.grant, fence, now_s, outcome, generation))

    def _write(self, blocks: Sequence[TierBlock]) -> Sequence[BaseException | None]:
        """Write blocks, on a stream's thread. Returns the failure of each; raises the failure of a single one."""
        tier, slots = self._tier, [self._host.slot(block.slot) for block in blocks]
        grants = [block.grant for block in blocks if block.grant is not None]
        if len(blocks) > 1 and isinstance(tier, BatchTier):
            return tier.write_all(grants, slots)
        tier.write(grants[0], slots[0])
        return [None]

    def _written(self, blocks: Sequence[TierBlock]) -> list[Access]:
        """The memory that a write accesses, for a tracer."""
        # rule: disk-write-declares-its-entry
        entries = [access for block in blocks if block.grant for access in self._tier.index.accesses(block.grant)]
        # rule: disk-write-declares-its-slot
        return [*entries, *self._host_memory.accesses([block.slot for block in blocks], write=False)]

    def finish_writes(self) -> None:
        """Handle writes that have ended: make their entries findable or abandon them, and release the slots."""
        for _, writes in self._writes:
            self._finish_writes(writes)

    def _finish_writes(self, writes: deque[WriteTicket]) -> None:
        while writes and writes[0].fence.poll():  # rule: disk-write-counts-after-its-fence
            ticket = writes.popleft()
            self._in_flight.discard(ticket.key)
            failure = ticket.failure()
            good = self._context.log.ended(
                f"{self.name}-write", failure, self._host.layout.block_bytes, ticket.submitted_s
            )
            self._report(failure)
            good = good and ticket.grant.written  # rule: failed-disk-write-leaves-no-entry
            if good and self._is_current(ticket):  # rule: disk-write-from-before-a-reset-publishes-nothing
                self._tier.index.publish(ticket.grant)  # rule: finished-disk-write-ends-its-grant
            else:
                self._tier.index.abandon(ticket.grant)  # rule: refused-disk-write-ends-its-grant
            if not good:
                self._resumes_s = self._clock() + PAUSE_S
            ticket.slot.release()  # rule: disk-write-releases-its-slot
            # Mark the prefix as just used again after the last write of a store piece: entries that were still being
            # written could not be marked before.
            if not writes or writes[0].prefix is not ticket.prefix:
                self._tiers.touch(ticket.prefix)

    # ------------------------------------------------------------------ reads

    def read(self, keys: Sequence[Key], generation: int) -> dict[Key, ReadTicket]:
        """Begin to read the entries of `keys`, which the tier must hold, into host slots; only of the first ones, if
        slots run out.
        """
        begun: dict[Key, ReadTicket] = {}
        for first in range(0, len(keys), self._batch):
            wanted = keys[first : first + self._batch]
            tickets = self._begin_read(wanted, generation)
            begun |= tickets
            if len(tickets) < len(wanted):
                break
        self.reads |= begun
        return begun

    def _begin_read(self, keys: Sequence[Key], generation: int) -> dict[Key, ReadTicket]:
        slots = [slot for _ in keys if (slot := self._host.pool.take_some(1)).ids]
        keys = keys[: len(slots)]
        if not keys:
            return {}
        pins = [self._tier.index.pin([key]) for key in keys]
        stream = next(self._next_read_stream)
        for slot in slots:
            for fence in slot.after:  # rule: disk-read-waits-on-its-stream
                stream.wait(fence)
        outcomes = [Outcome() for _ in keys]
        blocks = [TierBlock(slot.ids[0], pin.entries[0]) for slot, pin in zip(slots, pins, strict=True)]
        fence = stream.submit(
            TierWork(self._timed(outcomes, lambda: self._read(blocks)), self.name, blocks),
            lambda: self._filled(blocks),
            label="read blocks",
        )
        now_s = self._clock()
        return {
            key: ReadTicket(key, self.name, slot, pin, fence, now_s, outcome, generation)
            for key, slot, pin, outcome in zip(keys, slots, pins, outcomes, strict=True)
        }

    def _read(self, blocks: Sequence[TierBlock]) -> Sequence[BaseException | None]:
        """Read blocks, on a stream's thread. Returns the failure of each; raises the failure of a single one."""
        tier, slots = self._tier, [self._host.slot(block.slot) for block in blocks]
        if len(blocks) > 1 and isinstance(tier, BatchTier):
            return tier.read_all([block.entry for block in blocks], slots)
        tier.read(blocks[0].entry, slots[0])
        return [None]

    def _filled(self, blocks: Sequence[TierBlock]) -> list[Access]:
        """The memory that a read accesses, for a tracer."""
        # rule: disk-read-declares-its-entry
        entries = [self._tier.index.access(block.entry, write=False) for block in blocks]
        # rule: disk-read-declares-its-slot
        return [*entries, *self._host_memory.accesses([block.slot for block in blocks], write=True)]

    def finish_reads(self, published: Callable[[ReadTicket], None]) -> None:
        """Handle reads that have ended: make their blocks findable in host memory, and release slots and pins.

        `published` is called for each block that has become findable, before its slot is released.
        """
        # rule: disk-read-counts-after-its-fence
        for ticket in [t for t in self.reads.values() if t.fence.poll()]:
            del self.reads[ticket.key]
            ticket.taken_in = True
            num_bytes, failure = self._host.layout.block_bytes, ticket.failure()
            # rule: failed-disk-read-is-a-miss
            if self._context.log.ended(f"{self.name}-read", failure, num_bytes, ticket.submitted_s):
                self._context.costs.saw_transfer(self.name, num_bytes, ticket.work.seconds)
                # rule: disk-read-from-before-a-reset-publishes-nothing
                if self._is_current(ticket) and not ticket.invalidated:
                    self._context.checksums.compute(ticket.slot.ids)
                    self._host.pool.publish(ticket.slot.ids[0], ticket.key)
                    published(ticket)
            elif not isinstance(failure, TierTimeout):
                # rule: damaged-entry-is-dropped
                self._tier.index.forget(ticket.pin.entries[0])  # damaged or unreadable, so the block is computed again
                if isinstance(failure, TierLost):
                    self._report(failure)
            ticket.pin.release()  # rule: disk-read-ends-its-pin
            ticket.slot.release()  # rule: disk-read-releases-its-slot

    def invalidate(self, keys: frozenset[Key]) -> None:
        """Do not make these blocks findable when their reads end."""
        for key in keys & self.reads.keys():
            self.reads[key].invalidated = True

    # ------------------------------------------------------------------ reads and writes

    def _report(self, failure: BaseException | None) -> None:
        """Record whether the tier works, according to its last write or a loss of its medium. After a loss, no entry
        from before can be found any more.
        """
        if isinstance(failure, TierTimeout):
            return
        self.fault = "" if failure is None else str(failure)
        self._context.log.tier_works(self.name, failure is None)
        if isinstance(failure, TierLost):
            self._tier.index.clear()  # rule: entries-of-a-lost-medium-are-forgotten

    def _is_current(self, ticket: ReadTicket | WriteTicket) -> bool:
        """Whether the cache was not reset after the ticket's transfer was submitted (hazard H8 in docs/glossary.md)."""
        return ticket.generation == self._context.switches.generation  # rule: transfers-check-the-generation

    def _timed(
        self, outcomes: Sequence[Outcome], work: Callable[[], Sequence[BaseException | None]]
    ) -> Callable[[], None]:
        """Wrap `work` for the stream: it notes the failures and the time of `work`, or raises an error if the engine is
        closing.
        """

        def run() -> None:
            if self._context.switches.abandoned:
                raise TierTimeout("the engine closed before this transfer began")
            start = self._clock()
            failures = work()
            seconds = (self._clock() - start) / len(outcomes)
            for outcome, failure in zip(outcomes, failures, strict=True):
                outcome.failure = failure  # rule: failure-of-a-block-is-noted
                outcome.seconds = seconds if failure is None else 0.0

        return run


class Promotions:
    """All requests that wait for blocks of persistent tiers. `io`: reads and writes of each tier, by its name."""

    def __init__(self, context: TransferContext, io: Mapping[str, TierIO]) -> None:
        self._context = context
        self._tiers = context.tiers
        self._host = context.tiers.host
        self._io = io
        self._clock = context.device.now
        self._waiters: list[Waiter] = []

    @property
    def has_work(self) -> bool:
        """Whether any request waits."""
        return bool(self._waiters)

    def sizes(self) -> dict[str, int]:
        """Number of objects that are kept, by kind."""
        return {"waiters": len(self._waiters)}

    def deadlines(self) -> list[float]:
        """The time at which each waiting request stops waiting."""
        return [waiter.deadline_s for waiter in self._waiters]

    def submit(self, plans: Sequence[PromotePlan], generation: int) -> None:
        """Begin the promotions of one step. First, lease the host slots that hold blocks of these plans already, so
        that the reads of one plan do not evict blocks of another plan.
        """
        promotions = [(plan, self._keep(plan)) for plan in plans]  # rule: loads-come-before-promotions
        for plan, kept in promotions:
            self._promote(plan, kept, generation)

    def _keep(self, plan: PromotePlan) -> Lease:
        """Lease the host slots that hold blocks of the plan already."""
        kept = self._host.pool.lease(())
        for key in plan.keys:
            kept.extend(self._host.pool.lease((key,)))  # rule: kept-slots-are-held
        return kept

    def _promote(self, plan: PromotePlan, kept: Lease, generation: int) -> None:
        """Begin to read the plan's blocks that are not in host memory. If a block is being read for another request,
        wait for that read. If host slots run out, read only the first blocks.
        """
        reads: dict[Key, ReadTicket] = {}
        wanted: dict[Key, str] = {}
        complete = True
        for key in plan.keys:
            if self._host.pool.get(key) is not None or key in wanted:
                continue
            read = next((io.reads[key] for io in self._io.values() if key in io.reads), None)
            if read is not None:
                reads[key] = read
                continue
            source = None if self._context.switches.abandoned else self._tiers.find(key)
            if source is None or len(wanted) >= self._host.pool.num_available:
                complete = False
                break
            wanted[key] = source
        for name, io in self._io.items():
            of_tier = [key for key, source in wanted.items() if source == name]
            begun = io.read(of_tier, generation)
            reads |= begun
            complete = complete and len(begun) == len(of_tier)
        deadline_s = self._clock() + self._patience_s(len(plan.keys))
        self._waiters.append(Waiter(plan.request_id, plan.epoch, reads, kept, complete, deadline_s))

    def _patience_s(self, num_blocks: int) -> float:
        """How long a request waits for its reads, which have begun: not much longer than they and all others in flight
        are expected to take, and never longer than computing its blocks takes. So a tier that stalls costs little.
        """
        costs, deadline_s = self._context.costs, self._context.load_deadline_s
        if costs.prefill_rate is None:
            return deadline_s
        expected_s = costs.load_seconds({name: len(io.reads) for name, io in self._io.items()}, num_loaded=0)
        return min(deadline_s, costs.compute_seconds(num_blocks), max(_LEAST_PATIENCE_S, _PATIENCE * expected_s))

    def finish_reads(self) -> None:
        """Handle reads that have ended."""
        for io in self._io.values():
            io.finish_reads(self._keep_for_waiters)

    def _keep_for_waiters(self, ticket: ReadTicket) -> None:
        """Lease the slot of a promoted block for each request that waits for it, so that the block is not evicted while
        the request still waits for other blocks.
        """
        for waiter in self._waiters:
            if waiter.reads.get(ticket.key) is ticket:
                waiter.kept.extend(self._host.pool.lease((ticket.key,)))  # rule: promoted-block-is-held-for-its-request

    def finish_waits(self) -> None:
        """End each wait whose reads have ended or whose deadline has passed: report it, and release its slots."""
        now = self._clock()
        for waiter in list(self._waiters):
            done = all(read.taken_in for read in waiter.reads.values())
            if not done and now < waiter.deadline_s:  # rule: promotion-has-a-deadline
                continue
            self._waiters.remove(waiter)
            waiter.kept.release()  # rule: promotion-releases-its-slots
            good = done and all(read.failure() is None for read in waiter.reads.values())
            reason: Literal["done", "deadline", "failed", "no_room"]
            reason = "deadline" if not done else "failed" if not good else "done" if waiter.complete else "no_room"
            # rule: ended-promotion-is-reported
            self._context.report(Promoted(waiter.request_id, waiter.epoch, reason == "done", reason))


@dataclass(slots=True, eq=False)
class _Question:
    """A question in flight. Its stream writes `answer`, which is read after the fence.

    void   whether blocks were dropped since it was asked; its answer then counts as empty
    """

    tier: str
    keys: Sequence[Key]
    submitted_s: float
    answer: list[Entry] = field(default_factory=list)
    void: bool = False
    fence: Fence = field(init=False)


@dataclass(frozen=True, slots=True, eq=False)
class _Asker:
    """A request that waits for answers until `deadline_s`."""

    request_id: RequestId
    epoch: int
    questions: Sequence[_Question]
    deadline_s: float


class Finds:
    """Questions to shared tiers, on a stream `NAME-find` each: which of a request's blocks has another process stored
    there? And the requests that wait for the answers.

    A request waits until its deadline, and then goes on without an answer. The entries of a late answer become findable
    nevertheless: they serve the next request.
    """

    def __init__(self, context: TransferContext) -> None:
        self._context = context
        self._clock = context.device.now
        self._tiers = {name: tier for name, tier in context.tiers.persistent.items() if isinstance(tier, SharedTier)}
        self._streams = {name: context.device.worker(f"{name}-find") for name in self._tiers}
        self._questions: list[_Question] = []
        self._deletions: list[Fence] = []
        self._waiters: list[_Asker] = []

    @property
    def has_work(self) -> bool:
        """Whether any question is in flight."""
        return bool(self._questions or self._waiters or self._deletions)

    def sizes(self) -> dict[str, int]:
        """Number of objects that are kept, by kind."""
        return {
            "questions": len(self._questions),
            "requests that ask": len(self._waiters),
            "deletions": len(self._deletions),
        }

    def deadlines(self) -> list[float]:
        """The time at which each waiting request stops waiting."""
        return [waiter.deadline_s for waiter in self._waiters]

    def awaited(self) -> Iterator[Fence]:
        """Fences whose end should wake the worker."""
        yield from (question.fence for question in self._questions)
        yield from self._deletions[:1]

    def submit(self, plan: FindPlan) -> None:
        """Ask every shared tier for the plan's keys, or join a question for them. Returns at once."""
        asked = [question for name in self._tiers if (question := self._ask(name, plan.keys)) is not None]
        self._waiters.append(_Asker(plan.request_id, plan.epoch, asked, self._clock() + plan.patience_s))
        self._end_waits()  # rule: wait-without-a-question-ends-at-once

    def _ask(self, name: str, keys: Sequence[Key]) -> _Question | None:
        in_flight = [question for question in self._questions if question.tier == name]
        for question in in_flight:
            if question.keys[0] == keys[0] and not question.void:
                return question
        if len(in_flight) >= _MOST_QUESTIONS or self._context.switches.abandoned:  # rule: questions-are-bounded
            self._context.log.left_out(f"{name}-find", "skipped")
            return None
        tier, question = self._tiers[name], _Question(name, keys, self._clock())

        def find() -> None:
            if self._context.switches.abandoned:
                raise TierTimeout("the engine closed before this question began")
            question.answer.extend(tier.find(keys))

        question.fence = self._streams[name].submit(LocalWork(find), label="find blocks")
        self._questions.append(question)
        return question

    def finish(self) -> None:
        """Take in the answers that have come, and end the waits for them, or for answers that are late."""
        for question in [question for question in self._questions if question.fence.poll()]:  # rule: answer-is-complete
            self._questions.remove(question)
            good = self._context.log.ended(f"{question.tier}-find", question.fence.failure, 0, question.submitted_s)
            if good and not question.void:
                index = self._tiers[question.tier].index
                entries = [entry for entry in question.answer if not is_leaving(index, entry)]
                index.learn(entries)  # rule: answer-enters-the-index
        self._deletions = [fence for fence in self._deletions if not fence.poll()]
        self._end_waits()

    def _end_waits(self) -> None:
        now, ends = self._clock(), self._context.switches.abandoned
        for waiter in list(self._waiters):
            late = any(question in self._questions for question in waiter.questions)
            if late and now < waiter.deadline_s and not ends:  # rule: question-has-a-deadline
                continue
            self._waiters.remove(waiter)
            if late:
                self._context.log.left_out("find", "late")
            # rule: ended-find-is-reported
            self._context.report(Promoted(waiter.request_id, waiter.epoch, True, "done"))

    def forget(self) -> None:
        """Call it when blocks were dropped from the indices. Questions in flight find nothing, and the dropped entries
        leave the medium before a later question could find them again.
        """
        for question in self._questions:
            question.void = True  # rule: reset-reaches-questions-in-flight
        for name, tier in self._tiers.items():
            if doomed := tier.index.take_doomed():
                self._deletions.append(self._delete(name, tier, doomed))

    def _delete(self, name: str, tier: SharedTier, entries: Sequence[Entry]) -> Fence:
        # Declares no access: the entries have left the index, so no work uses them, and they have no lease.
        return self._streams[name].submit(LocalWork(lambda: tier.delete(entries)), label="delete blocks")
