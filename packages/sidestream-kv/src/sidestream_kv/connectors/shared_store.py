"""A BlockStore for an engine whose own threads wait for their blocks, each for its own. Knows no engine.

Every wait ends at the deadline, with one exception: a load straight into memory that the engine will use for something
else. A read of it that has begun may still write there, so only its end ends the wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from time import monotonic

import numpy as np

from sidestream_kv.connectors.block_store import BlockStore
from sidestream_kv.offload.tiers.base import Block, PersistentTier
from sidestream_kv.types import Key

_LOOK_S = 1.0  # at most, between two looks whether a deadline has passed, while no copy ends

Blocks = Sequence[tuple[Key, Block]]


class SharedStore:
    """Jobs of one tier, for any thread. Call `close` after the last other call.

    num_threads        reads, and writes, at the same time
    max_pending_bytes  bytes of copies that may wait for the medium when their `store` has ended at its deadline
    deadline_s         after it, `store` and `load` end without the blocks that are not done
    """

    def __init__(
        self,
        tier: PersistentTier,
        *,
        num_threads: int,
        max_pending_bytes: int,
        deadline_s: float,
    ) -> None:
        self._index = tier.index
        self._turn = threading.Condition()
        self._store = BlockStore(
            tier,
            num_threads=num_threads,
            max_pending_bytes=max_pending_bytes,
            load_deadline_s=deadline_s,
            on_copied=self._wake,
        )
        self._deadline_s = deadline_s
        self._look_s = min(deadline_s, _LOOK_S)
        self._num_together = 4 * num_threads  # blocks that `store` copies before it waits
        self._next_job = 0
        self._ended: dict[int, frozenset[Key]] = {}
        self._given_up: set[int] = set()

    def lookup(self, keys: Sequence[Key]) -> int:
        """Number of leading keys whose load would begin now. Reads no block."""
        with self._turn:
            self._store.refresh.poll()
            return next((count for count, key in enumerate(keys) if key not in self._store), len(keys))

    def load(self, blocks: Blocks, *, reused: bool) -> frozenset[Key]:
        """Fill blocks and verify them. Returns the keys whose blocks are good; the content of others is undefined.

        reused  whether the engine uses the memory of blocks that are not good for something else: then waits for reads
                that have begun, however long they take. Otherwise a read may end, and write its block, after the return
        """
        good = self._wait(self._begin(self._store.load, blocks), None if reused else self._deadline_s)
        self._touch(blocks)
        return good

    def store(self, blocks: Blocks) -> frozenset[Key]:
        """Copy blocks, and write the copies. Returns the keys that the tier has. The blocks are free at the return."""
        end_s = monotonic() + self._deadline_s
        good: set[Key] = set()
        for part in self._parts(blocks):
            with self._turn:
                new = [(key, block) for key, block in part if key not in self._index]
            good.update({key for key, _ in part}.difference(key for key, _ in new))
            # A write may outlast the deadline, and the engine changes its memory then.
            copies = [(key, np.array(block)) for key, block in new]  # rule: stored-block-is-copied
            good |= self._wait(self._begin(self._store.store, copies), end_s - monotonic())
        self._touch(blocks)
        return frozenset(good)

    def _parts(self, blocks: Blocks) -> Iterator[Blocks]:
        for first in range(0, len(blocks), self._num_together):
            yield blocks[first : first + self._num_together]

    def _touch(self, blocks: Blocks) -> None:
        with self._turn:
            self._store.touch([key for key, _ in blocks])

    def _begin(self, begin: Callable[[int, Blocks], None], blocks: Blocks) -> int:
        with self._turn:
            self._next_job += 1
            begin(self._next_job, blocks)
            return self._next_job

    def _wait(self, job: int, timeout_s: float | None) -> frozenset[Key]:
        """The good keys of a job; none if it has not ended in time."""
        # rule: shared-load-waits-for-what-has-begun
        end_s = float("inf") if timeout_s is None else monotonic() + timeout_s
        with self._turn:
            self._collect()
            while job not in self._ended and monotonic() < end_s:  # rule: shared-wait-ends-at-its-deadline
                self._turn.wait(max(0.0, min(self._look_s, end_s - monotonic())))
                self._collect()
            if job not in self._ended:
                self._given_up.add(job)
            return self._ended.pop(job, frozenset())

    def _collect(self) -> None:
        for done in self._store.take_finished():
            if done.job in self._given_up:
                self._given_up.remove(done.job)
            else:
                self._ended[done.job] = done.good

    def _wake(self) -> None:
        with self._turn:
            self._turn.notify_all()

    def clear(self) -> None:
        """Forget every block, also those that are being written."""
        with self._turn:
            self._index.clear()  # rule: cleared-store-finds-nothing

    def stop(self, reason: str) -> None:
        """From now on nothing is found and nothing is written. The tier keeps its entries."""
        with self._turn:
            self._store.stop(reason)

    def close(self) -> None:
        """Finish the copies and close the tier. Raises TierTimeout if a copy does not end. Idempotent."""
        self._store.close()  # without the lock, which copies that end need
