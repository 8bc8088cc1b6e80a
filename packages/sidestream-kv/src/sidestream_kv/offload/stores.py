"""Stores: copies of KV blocks from the device to host memory; and which blocks are then written to which persistent
tier. Called on the offload worker's thread only.

A store waits for the step that filled the blocks (hazard H1 in docs/glossary.md). It is copied in pieces. At start,
host memory is pinned little by little, so the host tier grows for a while. During this time, no block is evicted from
the host tier. If there is no free host slot for a block, the block is deferred: when a slot is free, the engine thread
is asked to submit the block again.

A persistent tier with the write policy `"all"` gets every block when its store ends (write-through). So does a tier
with `"reused"` as long as it has free space. When it is full, each write evicts another block, so it gets a block when
there is a sign that the block will be used again:

    its store ends, and its request found a third of its prompt in a cache (`StorePlan.returning`)
    its store ends, and the same block was stored before: it was evicted meanwhile, and computed again
    it is in host memory, and a request reuses it there or on the device

docs/decisions/0054-a-disk-writes-what-was-reused.md has the reasons. The other blocks in host memory are written by
`write_rest`, when the engine is flushed or closes.

    slot    host memory for one block
    settle  a job has settled when it no longer uses device blocks
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from sidestream_kv.kv.eight_bit import EightBitLayout
from sidestream_kv.kv.pool import Lease
from sidestream_kv.offload import pacing
from sidestream_kv.offload.error_probe import ErrorProbe
from sidestream_kv.offload.loads import TransferContext
from sidestream_kv.offload.pacing import Copy, Lane, Urgency, layers_batch
from sidestream_kv.offload.tickets import StoreJob, StoreTicket
from sidestream_kv.offload.tier_io import TierIO
from sidestream_kv.offload.tiers.stack import kind_of
from sidestream_kv.types import Key, LoadPlan, StorePlan

# Keys of stored blocks that are remembered, for each block that the largest tier with the policy `"reused"` can hold;
# and most of them: 16 MiB.
_REMEMBERED = 4
_MOST_REMEMBERED = 1 << 22


class Stores:
    """All store jobs that have not ended. A job executes one StorePlan.

    lane    queue of the copies to the host
    writes  writes to the persistent tiers
    """

    def __init__(self, context: TransferContext, lane: Lane, writes: TierWrites) -> None:
        self._context = context
        self._device = context.device
        self._memory = context.memory
        self._tiers = context.tiers
        self._host = context.tiers.host
        self._host_memory = context.host_memory
        self._lane = lane
        self._writes = writes
        self._waiting: deque[StoreJob] = deque()  # jobs with blocks whose copy was not queued yet
        self._storing: dict[Key, StoreTicket] = {}
        self._tickets: dict[Copy, StoreTicket] = {}
        self._deferred: dict[Key, None] = {}  # oldest first; at most as many keys as the tier will have slots
        self._probe = ErrorProbe(context, self._host.layout) if isinstance(self._host.layout, EightBitLayout) else None
        self.growing = True
        """Whether host memory is still being pinned."""

    @property
    def waiting(self) -> bool:
        """Whether any job has blocks whose copy was not queued yet."""
        return bool(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether any block is waiting, being copied, or deferred."""
        return bool(self._waiting or self._tickets or self._deferred)

    def sizes(self) -> dict[str, int]:
        """Number of objects that are kept, by kind."""
        return {
            "waiting stores": len(self._waiting),
            "storing keys": len(self._storing),
            "store tickets": len(self._tickets),
        }

    def grow(self) -> Sequence[Key]:
        """Use the host memory that was pinned since the last call. Returns the deferred blocks that now find a slot;
        they are no longer deferred.
        """
        self.growing = self._device.grows(self._host.memory)  # read first: if it is False, `ready_bytes` below is final
        self._host.grow(self._device.ready_bytes(self._host.memory))  # rule: host-tier-uses-only-pinned-memory
        room = self._host.pool.num_free if self.growing else len(self._deferred)
        again = tuple(islice(self._deferred, room))
        for key in again:
            del self._deferred[key]
        return again

    def submit(self, job_id: int, plan: StorePlan, generation: int) -> None:
        """Queue a job. Its copies are queued later, piece by piece."""
        self._waiting.append(StoreJob(job_id, plan, generation))
        if plan.returning:
            self._writes.reused([key for key in plan.prefix if key in plan.returning], plan.prefix, generation)

    def begin_pieces(self) -> None:
        """Queue copies of at most `BLOCKS_PER_TURN` blocks: several small jobs, or a part of a large job."""
        blocks = 0
        while self._waiting and blocks < pacing.BLOCKS_PER_TURN:
            job = self._waiting[0]
            blocks -= job.begun
            self._begin_piece(job)
            blocks += job.begun
            if job.begun == len(job.plan.keys):
                del self._waiting[0]

    def _begin_piece(self, job: StoreJob) -> None:
        """Queue the copy of the job's next blocks, without blocks that host memory holds already or that another store
        is copying.

        If there are too few free or evictable slots, the last of these blocks are skipped. While the tier grows, they
        are deferred instead.
        """
        plan, first = job.plan, job.begun
        stop = job.begun = min(first + pacing.BLOCKS_PER_TURN, len(plan.keys))
        wanted = zip(plan.keys[first:stop], plan.block_ids[first:stop], strict=True)
        # rule: block-is-stored-once
        pairs = [(k, b) for k, b in wanted if k not in self._storing and self._host.pool.get(k) is None]
        pool = self._host.pool
        room = 0 if self._context.switches.abandoned else pool.num_free if self.growing else pool.num_available
        slots = pool.take_some(min(len(pairs), room))
        if len(pairs) > len(slots.ids):
            self._leave_out(job, [key for key, _ in pairs[len(slots.ids) :]])
            del pairs[len(slots.ids) :]
        last = stop == len(plan.keys)
        if not pairs:
            if last:
                self._reorder(job)
            self._settle(job)  # rule: skipped-store-is-settled
            return
        keys, block_ids = tuple(key for key, _ in pairs), [block for _, block in pairs]
        copy = self._copy_of(plan, block_ids, slots)
        ticket = StoreTicket(job, keys, last, slots, copy, self._device.now())
        self._tickets[copy] = ticket
        job.pieces += 1
        self._storing.update(dict.fromkeys(keys, ticket))
        self._lane.add(copy)

    def _copy_of(self, plan: StorePlan, block_ids: Sequence[int], slots: Lease) -> Copy:
        layout = self._memory.layout
        # rule: store-copies-every-layer
        batch = layers_batch(self._memory, block_ids, self._host_memory, slots.ids, range(layout.num_layers))
        probes = () if self._probe is None else self._probe.copies(block_ids[0])
        # rule: store-waits
        return Copy(
            [self._device.prepare(each) for each in (batch, *probes)],
            after=(*plan.after, *slots.after),
            urgency=Urgency.STORE,
            label=f"store {len(block_ids)} blocks",
        )

    def _leave_out(self, job: StoreJob, keys: Sequence[Key]) -> None:
        """Count the job, once, as a job with blocks that found no slot. While the tier grows, defer the blocks.

        A deferred block does not stay in use on the device: it is stored later only if it is still there.
        """
        if not job.cut:
            self._context.log.left_out("store", "deferred" if self.growing else "skipped")
        job.cut = True
        if self.growing:
            self._deferred.update(dict.fromkeys(keys))
            for key in tuple(islice(self._deferred, max(0, len(self._deferred) - self._host.num_slots))):
                del self._deferred[key]

    def owns(self, copy: Copy) -> bool:
        """Whether the copy is a piece of a store."""
        return copy in self._tickets

    def end(self, copy: Copy) -> None:
        """Handle the end of a piece's copy: make its blocks findable (not earlier: hazard H7), begin to write them to
        the persistent tiers (such as the disk), and release the slots.
        """
        ticket = self._tickets.pop(copy)
        for key in ticket.keys:
            del self._storing[key]
        job, pool = ticket.job, self._host.pool
        stored_batch, *probes = ticket.copy.groups
        good = self._context.log.ended("store", ticket.copy.failure, stored_batch.num_bytes, ticket.submitted_s)
        if probes and self._probe is not None:
            self._probe.compare(ticket.slots.ids[0], good=good)
        if good and job.generation == self._context.switches.generation:  # rule: store-is-published
            pairs = zip(ticket.keys, ticket.slots.ids, strict=True)
            stored = [(key, slot) for key, slot in pairs if key not in job.invalidated]
            self._context.checksums.compute([slot for _, slot in stored])
            pool.publish_all([slot for _, slot in stored], [key for key, _ in stored])
            self._writes.stored(stored, job, ticket.prefix)
        ticket.slots.release()  # rule: store-releases-its-slots
        job.failed |= not good
        if ticket.last:
            self._reorder(job)
        job.pieces -= 1
        self._settle(job)  # rule: ended-store-is-settled

    def _reorder(self, job: StoreJob) -> None:
        """Mark the prefix of the stored blocks as just used. If all of them were stored, the blocks that they supersede
        become the next to be evicted.
        """
        self._tiers.touch(job.plan.prefix)
        if not job.cut and not job.failed:
            self._tiers.demote(job.plan.superseded)

    def _settle(self, job: StoreJob) -> None:
        """If the job no longer uses device blocks, record this."""
        if job.settled:
            self._context.unsettled.settle(job.job_id)

    def invalidate(self, keys: frozenset[Key]) -> None:
        """Do not make these blocks findable when their copies end."""
        for job in (*self._waiting, *(ticket.job for ticket in self._tickets.values())):
            job.invalidated |= keys.intersection(job.plan.keys)

    def forget_deferred(self) -> None:
        """Remove all deferred blocks."""
        self._deferred.clear()

    def drop(self) -> None:
        """End all jobs with blocks whose copy was not queued yet, because the engine is closing."""
        self._deferred.clear()
        while self._waiting:
            job = self._waiting.popleft()
            job.begun = len(job.plan.keys)
            self._settle(job)  # rule: dropped-store-is-settled


class SeenKeys:
    """Keys that were added, in a table of fixed size: 4 bytes each. A new key replaces an older one with the same
    place, and two keys with the same place count as the same with a probability of 2^-31.
    """

    def __init__(self, size: int) -> None:
        self._marks = array("I", bytes(4 * size))

    def add(self, key: Key) -> bool:
        """Add the key. Returns whether it was there already."""
        number = int.from_bytes(key, "little")
        place, mark = number % len(self._marks), (number >> 64) & 0xFFFF_FFFF | 1
        known = self._marks[place] == mark
        self._marks[place] = mark
        return known


class TierGroup:
    """Writes to the tiers of one kind, such as the directories of the disk tier: a block is in one of them. So each of
    them may be missing at the next start, and one that fails costs only its own blocks.
    """

    def __init__(self, members: Sequence[TierIO]) -> None:
        self._members = deque(members)

    @property
    def max_entries(self) -> int:
        """Number of blocks that the tiers can hold."""
        return sum(each.max_entries for each in self._members)

    @property
    def num_free(self) -> int:
        """How many writes evict nothing."""
        return sum(each.num_free for each in self._members)

    @property
    def most_writes(self) -> int:
        """How many writes may begin at once."""
        return max(each.most_writes for each in self._members)

    def holds(self, key: Key) -> bool:
        """Whether one of the tiers holds the block."""
        return any(each.holds(key) for each in self._members)

    def leave_out(self, outcome: str) -> None:
        """Count a block that is not written, with the reason."""
        self._members[0].leave_out(outcome)

    def write(self, blocks: Iterable[tuple[Key, int]], prefix: tuple[Key, ...], generation: int) -> None:
        """Write those blocks that none of the tiers has. All of them go to one tier, because neighbours are read at
        once: to that with the largest share of free space, or to each in turn.
        """
        # rule: block-is-in-one-tier-of-a-kind
        wanted = [block for block in blocks if all(each.takes(block[0]) for each in self._members)]
        if not wanted:
            return
        self._members.rotate(-1)
        # rule: tier-that-fails-is-passed-over
        able = [each for each in self._members if not each.is_paused and not each.crowded] or self._members
        max(able, key=lambda each: max(0.0, each.num_free / each.max_entries)).write(wanted, prefix, generation)


class TierWrites:
    """The writes to all persistent tiers. `io`: reads and writes of each tier, by its name."""

    def __init__(self, context: TransferContext, io: Mapping[str, TierIO]) -> None:
        policies = context.write_policies
        self._tiers = context.tiers
        self._pool = context.tiers.host.pool
        self._switches = context.switches
        kinds = dict.fromkeys(map(kind_of, io))
        groups = {kind: TierGroup([each for name, each in io.items() if kind_of(name) == kind]) for kind in kinds}
        self._all = [group for kind, group in groups.items() if policies.get(kind) != "reused"]
        self._selective = [group for kind, group in groups.items() if policies.get(kind) == "reused"]
        largest = max((each.max_entries for each in self._selective), default=0)
        self._seen = SeenKeys(min(_REMEMBERED * largest, _MOST_REMEMBERED))
        self._rest: deque[Key] = deque()
        self._rest_begins, self._rest_generation = False, 0

    @property
    def has_work(self) -> bool:
        """Whether `write_rest` has not come to its end."""
        return self._rest_begins or bool(self._rest)

    def has_more(self, *, storing: bool) -> bool:
        """Whether `continue_rest` could do something now."""
        crowded = any(each.most_writes <= 0 for each in self._selective)
        return not storing if self._rest_begins else bool(self._rest) and not crowded

    def sizes(self) -> dict[str, int]:
        """Number of objects that are kept, by kind."""
        return {"blocks to write": self._rest_begins + len(self._rest)}

    def stored(self, blocks: Sequence[tuple[Key, int]], job: StoreJob, prefix: tuple[Key, ...]) -> None:
        """Write blocks whose store has ended, given as keys and host slots, to the tiers that want them. `prefix` is
        marked as just used after the last write.
        """
        for io in self._all:
            io.write(blocks, prefix, job.generation)
        if not self._selective:
            return
        worth = [self._seen.add(key) or key in job.plan.returning for key, _ in blocks]
        for io in self._selective:
            chosen, num_free = list[tuple[Key, int]](), io.num_free
            for block, is_worth in zip(blocks, worth, strict=True):
                if is_worth or len(chosen) < num_free:
                    chosen.append(block)
                else:
                    io.leave_out("not_reused")
            io.write(chosen, prefix, job.generation)

    def reused(self, keys: Sequence[Key], prefix: tuple[Key, ...], generation: int) -> None:
        """A request reuses these blocks: write those in host memory to each tier that lacks them."""
        for io in self._selective:
            missing = [key for key in keys if not io.holds(key)]
            leases = [(key, self._pool.lease((key,))) for key in missing]
            io.write([(key, slot) for key, lease in leases for slot in lease.ids], prefix, generation)
            for _, lease in leases:
                lease.release()  # rule: slot-of-a-reused-block-is-released

    def loads(self, plan: LoadPlan, generation: int) -> None:
        """A load reuses its blocks, unless a preempted request loads its own."""
        if not plan.epoch:
            self.reused(plan.keys, plan.keys, generation)

    # ------------------------------------------------------------------ flush and close

    def write_rest(self, generation: int) -> None:
        """Write all blocks in host memory to the tiers that were waiting for a reuse, the last used first, as many as
        such a tier can hold; those of stores in flight, too. `generation` is that of the command.
        """
        if self._selective and self._pool.size > 1:  # a write holds a slot, and writes hold half of the slots at most
            self._rest_begins, self._rest_generation = True, generation

    def continue_rest(self, *, storing: bool) -> None:
        """Begin some of the writes of `write_rest`, unless enough are in flight. `storing`: whether stores are."""
        if self._switches.abandoned:
            self._rest_begins = False
            self._rest.clear()
        if self._rest_begins and not storing:
            self._rest_begins = False
            most = max(each.max_entries for each in self._selective)
            self._rest = deque(islice(self._pool.keys_by_use(), most))
            self._tiers.touch_persistent(self._rest)  # no write of one of them evicts another
        count = min(len(self._rest), pacing.BLOCKS_PER_TURN, *(each.most_writes for each in self._selective))
        self.reused([self._rest.popleft() for _ in range(count)], (), self._rest_generation)
