"""Decides which blocks in host memory are written to which persistent tier, and when. Called on the offload worker's
thread only.

A tier with the write policy `"all"` gets every block when its store ends (write-through). A tier with `"reused"` gets a
block when there is a sign that it will be used again:

    its store ends, and its request found a third of its prompt in a cache (`StorePlan.returning`)
    its store ends, and the same block was stored before: it was evicted meanwhile, and computed again
    it is in host memory, and a request reuses it there or on the device

docs/decisions/0050-a-disk-writes-what-was-reused.md has the reasons. The other blocks in host memory are written by
`write_rest`, when the engine is flushed or closes.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from sidestream_kv.offload import pacing
from sidestream_kv.offload.loads import TransferContext
from sidestream_kv.offload.tickets import StoreJob
from sidestream_kv.offload.tier_io import TierIO
from sidestream_kv.types import Key, LoadPlan

# Keys of stored blocks that are remembered, for each block that the largest tier with the policy `"reused"` can hold;
# and most of them: 16 MiB.
_REMEMBERED = 4
_MOST_REMEMBERED = 1 << 22


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


class TierWrites:
    """The writes to all persistent tiers. `io`: reads and writes of each tier, by its name; `policies`: write policy of
    a tier, by its name, `"all"` if it has none.
    """

    def __init__(self, context: TransferContext, io: Mapping[str, TierIO], policies: Mapping[str, str]) -> None:
        self._pool = context.tiers.host.pool
        self._log = context.log
        self._switches = context.switches
        self._all = [each for name, each in io.items() if policies.get(name) != "reused"]
        self._selective = [each for name, each in io.items() if policies.get(name) == "reused"]
        largest = max((each.max_entries for each in self._selective), default=0)
        self._seen = SeenKeys(min(_REMEMBERED * largest, _MOST_REMEMBERED))
        self._rest: deque[Key] = deque()
        self._rest_generation = 0

    @property
    def has_work(self) -> bool:
        """Whether `write_rest` has not come to its end."""
        return bool(self._rest)

    @property
    def has_more(self) -> bool:
        """Whether `continue_rest` could begin a write now."""
        return bool(self._rest) and not any(each.crowded for each in self._selective)

    def sizes(self) -> dict[str, int]:
        """Number of objects that are kept, by kind."""
        return {"blocks to write": len(self._rest)}

    def stored(self, blocks: Iterable[tuple[Key, int]], job: StoreJob, prefix: tuple[Key, ...]) -> None:
        """Write blocks whose store has ended, given as keys and host slots, to the tiers that want them. `prefix` is
        marked as just used after the last write.
        """
        for key, slot in blocks:
            for io in self._all:
                io.write(key, slot, prefix, job.generation)
            if not self._selective:
                continue

            returns = key in job.plan.returning
            if self._seen.add(key) or returns:
                for io in self._selective:
                    io.write(key, slot, prefix, job.generation)
            else:
                for io in self._selective:
                    io.leave_out("not_reused")

    def reused(self, keys: Sequence[Key], prefix: tuple[Key, ...], generation: int) -> None:
        """A request reuses these blocks: write those in host memory to each tier that lacks them."""
        for io in self._selective:
            for key in keys:
                if not io.holds(key) and (slot := self._pool.get(key)) is not None:
                    io.write(key, slot, prefix, generation)

    def loads(self, plan: LoadPlan, generation: int) -> None:
        """A load reuses its blocks, unless a preempted request loads its own."""
        if not plan.epoch:
            self.reused(plan.keys, plan.keys, generation)

    # ------------------------------------------------------------------ flush and close

    def write_rest(self, generation: int) -> None:
        """Begin to write all blocks in host memory to the tiers that were waiting for a reuse, the last used first, as
        many as such a tier can hold. `generation` is that of the command.
        """
        most = max((each.max_entries for each in self._selective), default=0)
        if most and self._pool.size > 1:  # a write holds a slot, and writes hold half of the slots at most
            self._rest = deque(islice(self._pool.keys_by_use(), most))
            self._rest_generation = generation
            self.continue_rest()

    def continue_rest(self) -> None:
        """Begin some of the writes of `write_rest`, unless enough are in flight."""
        if self._switches.abandoned:
            self._rest.clear()
        for _ in range(pacing.BLOCKS_PER_TURN):
            if not self.has_more:
                return
            self.reused((self._rest.popleft(),), (), self._rest_generation)
