"""The pool of host slots in the memory of a cache process, which the pools of other engines share.

Each engine keeps references and keys as any pool does. The table of records tells them what the others hold, and leases
known to all keep a slot from two writers, and from a writer while it is read:

    take      lease the slots, if they still hold what was seen in them; void their records
    publish   write the records, checks last; go on with a lease for reading
    lease     lease the slots of keys for reading, and compare their records with what was seen
    release   with the last reference of this process, end its lease
    refresh   take in what other processes have written, deleted and used

`get` and `match` may be out of date for a moment; `lease` then finds less. The order of eviction follows the times of
the last use, which are in the table.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from sidestream_kv.errors import InvariantError
from sidestream_kv.kv.pool import FencedPool, FreeIds, Lease, PoolExhausted
from sidestream_kv.offload.tiers.shared_memory import SharedMemory
from sidestream_kv.offload.tiers.slots import Records, Slots
from sidestream_kv.types import HOST, Access, Fence, Key, Tracer

HOST_SLOTS = "host slots"
"""Name of the pool of host slots."""

_SERIAL_BITS = 32

_log = logging.getLogger(__name__)


class SharedPool(FencedPool):
    """The slots of `memory`. The offload worker's thread owns it; other threads may call `get` and `match`."""

    def __init__(self, memory: SharedMemory, *, ready: int, tracer: Tracer | None = None) -> None:
        """`ready`: number of slots that can be used already."""
        super().__init__(HOST_SLOTS, 0, tracer=tracer)
        self._free: FreeIds = FreeIds()
        self._memory = memory
        self._records = memory.records
        self._leases = memory.leases
        self._seen = Records.void(memory.num_slots)  # what this process knows of the records
        self._next_serial = memory.client << _SERIAL_BITS
        self._twins: set[int] = set()  # slots of blocks that another slot holds, too
        self._served = True
        self.on_rewrite: Callable[[Iterable[int]], None] = lambda slots: None
        """Called with slots whose records other processes have changed."""
        self.grow(ready)

    def grow(self, size: int) -> None:
        """Use the first `size` slots, and find what they hold."""
        super().grow(size)
        self.refresh()

    def close(self) -> None:
        """Leave the memory to the other engines. Call it after the last transfer. Idempotent."""
        self._memory.close()

    # ------------------------------------------------------------------ other processes

    def refresh(self) -> None:
        """Take in what other processes have done. They may have voided slots that are in use here, but not more."""
        if self._served and not self._memory.is_served():
            self._served = False
            _log.warning(
                "the cache process at %s has ended: this engine keeps its memory, the next one begins without it",
                self._memory.path,
            )
        size, seen = self.size, self._seen
        checks, stamps = self._records.checks[:size].copy(), self._records.stamps[:size].copy()
        used = np.flatnonzero((stamps != seen.stamps[:size]) & (checks == seen.checks[:size]) & (checks != 0))
        self._follow_uses(used[np.argsort(stamps[used])], stamps)
        seen.stamps[:size] = stamps
        changed = np.flatnonzero(checks != seen.checks[:size])
        if len(changed):
            self._follow(changed, checks)

    def _follow(self, changed: Slots, checks: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> None:
        """Take in the records of these slots."""
        slots, seen = changed.tolist(), self._seen
        if gone := [slot for slot in slots if self._index.holds_key(slot)]:
            super().forget(gone)  # rule: block-that-others-evicted-is-forgotten
            changed = np.union1d(changed, np.array([*self._twins], np.intp))  # rule: twin-of-a-lost-block-is-found
            self._twins.clear()
        self.on_rewrite(slots)
        seen.checks[changed], seen.bodies[changed] = checks[changed], self._records.bodies[changed]
        valid = seen.valid(changed)
        seen.checks[changed[~valid]] = 0
        changed = changed[valid]
        changed = changed[np.argsort(seen.stamps[changed])]
        for slot, key in zip(changed.tolist(), seen.keys(changed), strict=True):
            if not self._index.add(key, slot):  # rule: records-of-others-enter-the-index
                self._twins.add(slot)  # and stays free
                continue
            del self._free[slot]
            self._cached.touch(slot)
            self._found(slot, key)

    def _follow_uses(self, used: Slots, stamps: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> None:
        """Order the slots `used`, last used last, as other processes have used them."""
        later = stamps[used] > self._seen.stamps[used]
        for slot in used[later].tolist():
            if slot in self._cached:
                self._cached.touch(slot)
        for slot in used[~later].tolist():
            if slot in self._cached:
                self._cached.demote(slot)

    def _found(self, slot: int, key: Key) -> None:
        if self.key_log is not None:
            self.key_log.stored((key,))
        if (tracer := self._tracer) is not None:
            tracer.took(self.name, [slot], ())
            tracer.host_touched(lambda: [self._written(slot)], f"found in {self.name}")
            tracer.published(self.name, slot, key)
            tracer.released(self.name, [slot], ())

    def _written(self, slot: int) -> Access:
        size = len(self._memory.pages) // self._memory.num_slots
        return Access(HOST, slot * size, (slot + 1) * size, True)

    def _look_again(self, slots: Sequence[int]) -> None:
        """Let the next `refresh` find these slots, which are not in use here."""
        self._seen.checks[list(slots)] = 0

    # ------------------------------------------------------------------ leases

    def take(self, count: int) -> Lease:
        """See `FencedPool.take`. Slots that other processes lease, or have rewritten, are not available."""
        lease = self.take_some(count)
        if len(lease.ids) < count:
            found = len(lease.ids)
            lease.release()  # rule: refused-take-takes-nothing
            raise PoolExhausted(f"{self.name}: {count} asked for, {found} of {self.size} available")
        return lease

    def take_some(self, count: int) -> Lease:
        """See `FencedPool.take_some`."""
        lease = super().take(min(count, self.num_available))
        ids, refused = lease.ids, list[int]()
        missing = self._own(ids)
        while missing:
            refused += missing
            more = super().take(min(len(missing), self.num_available))
            missing = self._own(more.ids)
            lease.extend(more)
        if refused:
            left = {*refused}
            ids[:] = [slot for slot in ids if slot not in left]
            super()._release(refused, ())  # rule: refused-slot-is-not-kept
            self._look_again(refused)  # rule: refused-slot-is-found-again
        self._twins.difference_update(ids)
        self._seen.checks[ids] = self._records.checks[ids] = 0  # rule: shared-record-is-void-while-its-slot-is-written
        return lease

    def _own(self, slots: list[int]) -> list[int]:
        """Lease slots for writing. Returns those that another process leases or has rewritten."""
        refused = self._leases.write(slots)  # rule: shared-slot-has-one-writer-and-no-reader
        held = [slot for slot in slots if slot not in {*refused}] if refused else slots
        changed = self._changed(held)  # rule: shared-slot-is-taken-as-it-was-seen
        self._leases.end(changed)
        return refused + changed

    def _changed(self, slots: list[int]) -> list[int]:
        """Those of the leased slots that do not hold what was seen in them."""
        ids = np.array(slots, np.intp)
        changed: list[int] = ids[self._records.checks[ids] != self._seen.checks[ids]].tolist()
        return changed

    def lease(self, keys: Sequence[Key]) -> Lease:
        """See `FencedPool.lease`. The run ends at a slot that another process writes or has rewritten."""
        found = self.match(keys)
        idle = [slot for slot in found if not self._references[slot]]
        refused = self._leases.read(idle)  # rule: shared-slot-is-leased-while-it-is-read
        held = [slot for slot in idle if slot not in {*refused}] if refused else idle
        if lost := {*refused, *self._changed(held)}:  # rule: shared-record-is-compared-under-its-lease
            stop = next(index for index, slot in enumerate(found) if slot in lost)
            kept, found = found[:stop], found[:stop]
            self._leases.end([slot for slot in held if slot not in {*kept}])
            super().forget([*lost])  # rule: block-that-cannot-be-leased-is-forgotten
            self._look_again([*lost])
        return super().share(found)

    def share(self, block_ids: Sequence[int]) -> Lease:
        """Lease slots that are in use here, for reading; for others see `lease`."""
        if not all(self._references[slot] for slot in block_ids):
            raise InvariantError(f"of {self.name} {list(block_ids)}, not all are in use here: lease them by their keys")
        return super().share(block_ids)

    def _release(self, block_ids: Sequence[int], after: tuple[Fence, ...]) -> None:
        super()._release(block_ids, after)
        idle = [slot for slot in block_ids if not self._references[slot]]
        self._stamp([slot for slot in reversed(idle) if self._index.holds_key(slot)])
        self._leases.end(idle)  # rule: lease-of-a-shared-slot-ends

    # ------------------------------------------------------------------ records

    def publish(self, block_id: int, key: Key, *, partial: bool = False) -> bool:
        """See `FencedPool.publish`."""
        added = super().publish(block_id, key, partial=partial)
        if added:
            self._record([block_id])
        return added

    def publish_all(self, block_ids: Sequence[int], keys: Sequence[Key], *, partial: bool = False) -> None:
        """See `FencedPool.publish_all`."""
        super().publish_all(block_ids, keys, partial=partial)
        self._record([slot for slot in block_ids if not self._seen.checks[slot] and self._index.holds_key(slot)])

    def _record(self, slots: list[int]) -> None:
        """Write the records of written slots, which makes them findable by other processes."""
        if not slots:
            return
        ids, records = np.array(slots, np.intp), self._records
        keys = b"".join(map(self._index.key_of, slots))
        records.bodies["key"][ids] = np.frombuffer(keys, "<u8").reshape(-1, 2)
        records.bodies["serial"][ids] = np.arange(len(slots), dtype="<u8") + np.uint64(self._next_serial)
        self._next_serial += len(slots)
        self._stamp(slots)
        records.seal(ids)  # rule: shared-record-is-published-last
        self._seen.bodies[ids], self._seen.checks[ids] = records.bodies[ids], records.checks[ids]
        self._leases.read(slots)  # rule: published-slot-may-be-read-by-others

    def _stamp(self, slots: Sequence[int]) -> None:
        """Record that these slots were just used, the last one last."""
        ids = np.array(slots, np.intp)
        stamps = np.arange(len(slots), dtype=np.uint64) + np.uint64(time.time_ns())
        self._records.stamps[ids] = self._seen.stamps[ids] = stamps

    def touch(self, keys: Sequence[Key]) -> None:
        """See `FencedPool.touch`."""
        super().touch(keys)
        self._stamp([slot for key in reversed(keys) if (slot := self._index.get(key)) is not None])

    def demote(self, keys: Sequence[Key]) -> None:
        """See `FencedPool.demote`."""
        super().demote(keys)
        slots = [slot for key in keys if (slot := self._index.get(key)) is not None]
        self._records.stamps[slots] = self._seen.stamps[slots] = 0

    def forget_all(self) -> None:
        """Remove every key, for all engines."""
        self._records.checks[:] = self._seen.checks[:] = 0  # rule: reset-voids-shared-records
        super().forget_all()

    def forget(self, block_ids: Sequence[int]) -> None:
        """Remove the keys of these blocks, for all engines."""
        findable = [slot for slot in block_ids if self._index.holds_key(slot)]
        changed = {*self._changed(findable)}
        slots = [slot for slot in findable if slot not in changed]
        self._records.checks[slots] = self._seen.checks[slots] = 0  # rule: drop-voids-shared-records
        super().forget(block_ids)
