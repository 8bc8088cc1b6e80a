"""Jobs that copy blocks between an engine's host memory and a persistent tier, for engines that schedule transfers
themselves. Knows no engine.

One thread, the engine's, calls everything but the copies: it owns the tier's index. Two pools of threads do the I/O, so
that a load does not queue behind stores.

    engine thread   store(job, blocks): reserve a grant for each new key       load(job, blocks): pin the keys
    pool            tier.write(grant, block)                                    tier.read(entry, block)
    engine thread   take_finished(): publish or abandon the grants              forget unreadable entries; unpin

A block's memory belongs to the store from `store` or `load` until its job is among `take_finished`: the engine must
neither change, read nor release it before. A key is findable only after its whole block was written, and a block that
could not be read or verified is never among the `good` keys of its job.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from time import monotonic

from sidestream_kv.errors import TierError, TierFull, TierLost, TierTimeout
from sidestream_kv.offload.tiers.base import Block, PersistentTier, ReadLease, WriteGrant
from sidestream_kv.offload.tiers.index import Refresh
from sidestream_kv.types import Key

_log = logging.getLogger(__name__)

_REST_S = 5.0  # no new write after a failed one, and no new read after an overdue one
_LOG_S = 60.0  # between two lines of the log on reuse, and between two on failures
_WAIT_S = 10.0  # between two lines of the log while the engine waits for copies


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """A job that has ended: its blocks belong to the engine again.

    success    whether every key is good
    good       keys whose blocks the tier has or writes (a store), or whose blocks were filled and verified (a load)
    num_bytes  bytes that were copied
    seconds    from the call of `store` or `load` to the end of the last copy
    """

    job: int
    success: bool
    good: frozenset[Key]
    num_bytes: int
    seconds: float


@dataclass(slots=True, eq=False)
class _Job:
    job: int
    num_keys: int
    began_s: float
    good: set[Key] = field(default_factory=set)
    num_bytes: int = 0
    num_copies: int = 0  # not settled yet


@dataclass(slots=True, eq=False)
class _Copy:
    """`right` says which direction: a grant is for a write, a lease for a read."""

    job: _Job
    key: Key
    block: Block
    right: WriteGrant | ReadLease
    error: TierError | None = None


_Copies = dict[_Copy, "Future[None]"]
"""Copies that are not settled, oldest first. Only the engine thread uses it."""


class BlockStore:
    """Runs the jobs of one persistent tier. All methods are for one thread; none waits but `drain` and `close`.

    num_threads        reads, and writes, at the same time
    max_pending_bytes  bytes of stores that may wait for the medium: a slow medium holds no more of the engine's memory.
                       Blocks beyond are not stored, and `num_skipped` counts them
    load_deadline_s    a load that has not begun by then ends without its blocks. One that has begun must be waited for,
                       because it may still write into the engine's memory; until it ends, no key is found
    on_copied          called after each copy, on its thread: `take_finished` may have a job now
    """

    def __init__(
        self,
        tier: PersistentTier,
        *,
        num_threads: int = 4,
        max_pending_bytes: int = 1 << 30,
        load_deadline_s: float = 10.0,
        on_copied: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._tier = tier
        self._index = tier.index
        self._on_copied = on_copied
        self._clock = clock
        self._max_pending_bytes = max_pending_bytes
        self._load_deadline_s = load_deadline_s
        self._name = name = tier.index.name
        self._writers = ThreadPoolExecutor(num_threads, thread_name_prefix=f"sidestream-{name}-write")
        self._readers = ThreadPoolExecutor(num_threads, thread_name_prefix=f"sidestream-{name}-read")
        self._writes: _Copies = {}
        self._reads: _Copies = {}
        self.refresh = Refresh(tier, clock)
        """Looks for entries of other processes; `take_finished` calls it, too."""
        self._copied: SimpleQueue[_Copy] = SimpleQueue()
        self._ended: list[_Job] = []
        self._writing: set[Key] = set()
        self._pending_bytes = 0
        self._stopped = False
        self._closed = False
        self._writes_rest_until = self._reads_rest_until = float("-inf")
        self._next_report_s = self._next_complaint_s = float("-inf")
        self._num_reported = self._loaded_bytes = 0
        self.num_loaded = 0
        self.num_stored = 0
        self.num_skipped = 0
        self.num_failed = 0

    def __contains__(self, key: Key) -> bool:
        """Whether a load of `key` would begin now. No I/O."""
        # rule: resting-tier-is-not-read
        return key in self._index and not self._stopped and self._clock() >= self._reads_rest_until

    def touch(self, keys: Sequence[Key]) -> None:
        """Mark the blocks of a sequence, in its order, as just used."""
        self._index.touch(keys)

    def store(self, job: int, blocks: Sequence[tuple[Key, Block]]) -> None:
        """Begin to write blocks. Keys that the tier has, or writes already, are good without a copy."""
        started = _Job(job, len(blocks), self._clock())
        for key, block in blocks:
            if key in self._index or key in self._writing:  # rule: block-is-written-by-one-job
                started.good.add(key)
            elif (grant := self._grant(key, block.nbytes)) is not None:
                self._writing.add(key)
                self._pending_bytes += block.nbytes
                self._submit(self._writers, self._writes, _Copy(started, key, block, grant))  # rule: write-is-submitted
            else:
                self.num_skipped += 1
        self._end_without_copies(started)

    def _grant(self, key: Key, num_bytes: int) -> WriteGrant | None:
        if self._stopped or self._clock() < self._writes_rest_until:  # rule: resting-tier-is-not-written
            return None
        if self._pending_bytes + num_bytes > self._max_pending_bytes:  # rule: pending-stores-are-bounded
            self._complain(f"a block was not stored, because {self._pending_bytes} bytes already wait for the medium")
            return None
        try:
            return self._index.reserve(key)
        except TierFull as error:  # every entry is being read or written
            self._complain(str(error))
            return None

    def load(self, job: int, blocks: Sequence[tuple[Key, Block]]) -> None:
        """Begin to fill blocks. Keys that are not in the store are not good."""
        started = _Job(job, len(blocks), self._clock())
        for key, block in blocks:
            if key in self:
                self._submit(self._readers, self._reads, _Copy(started, key, block, self._index.pin([key])))
        self._end_without_copies(started)

    def _submit(self, pool: ThreadPoolExecutor, copies: _Copies, copy: _Copy) -> None:
        copy.job.num_copies += 1
        copies[copy] = pool.submit(self._run, copy)

    def _end_without_copies(self, job: _Job) -> None:
        if not job.num_copies:
            self._ended.append(job)

    def _run(self, copy: _Copy) -> None:
        """Copy one block, on a thread of a pool."""
        try:
            if isinstance(copy.right, WriteGrant):
                self._tier.write(copy.right, copy.block)
            else:
                self._tier.read(copy.right.entries[0], copy.block)
        except TierError as error:
            copy.error = error
        except Exception as error:  # a bug of the tier must not leave the job without an end
            _log.exception("%s tier: a copy failed", self._name)
            copy.error = TierError(str(error))
        self._copied.put(copy)
        self._on_copied()

    def take_finished(self) -> list[FinishedJob]:
        """The jobs that ended since the last call."""
        self.refresh.poll()
        self._end_overdue_loads()
        while not self._copied.empty():
            self._settle(self._copied.get_nowait())
        self._report()
        ended, self._ended = self._ended, []
        now_s = self._clock()
        return [
            FinishedJob(job.job, len(job.good) == job.num_keys, frozenset(job.good), job.num_bytes, now_s - job.began_s)
            for job in ended
        ]

    def _settle(self, copy: _Copy) -> None:
        if isinstance(copy.right, WriteGrant):
            del self._writes[copy]
            self._writing.discard(copy.key)
            self._pending_bytes -= copy.block.nbytes  # rule: settled-store-waits-no-more
            if copy.error is None:
                self._index.publish(copy.right)  # rule: block-is-findable-after-its-write
            else:
                self._index.abandon(copy.right)  # rule: failed-store-ends-its-grant
                self._writes_rest_until = self._clock() + _REST_S
        else:
            del self._reads[copy]
            if copy.error is not None and not isinstance(copy.error, TierTimeout):
                self._index.forget(copy.right.entries[0])  # rule: unreadable-block-is-forgotten
            copy.right.release()  # rule: loaded-entry-is-unpinned
        if isinstance(copy.error, TierLost):
            self._index.clear()  # rule: lost-medium-is-forgotten-by-its-store
        self._count(copy)
        copy.job.num_copies -= 1
        if not copy.job.num_copies:  # rule: job-ends-after-its-last-copy
            self._ended.append(copy.job)

    def _count(self, copy: _Copy) -> None:
        if copy.error is not None:  # rule: failed-copy-is-not-good
            self.num_failed += 1
            self._complain(str(copy.error))
            return
        copy.job.good.add(copy.key)
        copy.job.num_bytes += copy.block.nbytes
        if isinstance(copy.right, WriteGrant):
            self.num_stored += 1
        else:
            self.num_loaded += 1
            self._loaded_bytes += copy.block.nbytes

    def _end_overdue_loads(self) -> None:
        overdue = []
        for copy in self._reads:
            if self._clock() - copy.job.began_s < self._load_deadline_s:  # rule: queued-load-ends-at-its-deadline
                break
            overdue.append(copy)
        if overdue:
            self._reads_rest_until = self._clock() + _REST_S
            self._complain(f"{len(overdue)} reads have not ended after {self._load_deadline_s:g} s: nothing is loaded")
        self._cancel(overdue, self._reads)

    def _cancel(self, wanted: Sequence[_Copy], copies: _Copies) -> None:
        """End those of the copies that have not begun."""
        for copy in wanted:
            if copies[copy].cancel():
                copy.error = TierTimeout(f"a copy of the {self._name} tier was given up before it began")
                self._copied.put(copy)

    def stop(self, reason: str) -> None:
        """From now on nothing is found and nothing is written. The tier keeps its entries."""
        if not self._stopped:
            _log.warning("%s tier: off until the next start, because %s", self._name, reason)
        self._stopped = True

    def drain(self) -> None:
        """Wait until no copy uses the engine's memory. The jobs are among the next `take_finished`.

        Without an end, because a copy that has begun cannot be given up; the log says every ten seconds what is waited
        for.
        """
        while not self._wait(_WAIT_S):  # rule: drained-store-copies-nothing
            _log.warning(
                "%s tier: waiting for %d copies that have not ended", self._name, len(self._writes) + len(self._reads)
            )

    def _wait(self, timeout_s: float) -> bool:
        return not wait([*self._writes.values(), *self._reads.values()], timeout=timeout_s).not_done

    def close(self, *, flush_s: float = 30.0) -> None:
        """Finish the copies and close the tier. After `flush_s`, copies that have not begun are given up. Idempotent.

        Raises TierTimeout if a copy does not end: it may still use the engine's memory, which must stay.
        """
        if self._closed:
            return
        if not self._wait(flush_s):
            for copies in (self._writes, self._reads):
                self._cancel([*copies], copies)
            self.take_finished()
            if not self._wait(_WAIT_S):  # rule: closed-store-copies-nothing
                raise TierTimeout(
                    f"{len(self._writes) + len(self._reads)} copies of the {self._name} tier have not ended "
                    f"{flush_s + _WAIT_S:g} s after the close began: the engine's memory must stay mapped"
                )
        self._closed = True
        self._writers.shutdown()
        self._readers.shutdown()
        self.take_finished()
        _log.info("%s tier: %s", self._name, self.summary())
        self._tier.close()

    def summary(self) -> str:
        """What was stored and reused since the start, in words."""
        stats = self._index.stats
        return (
            f"{self.num_loaded} blocks reused ({self._loaded_bytes / 1e9:.3g} GB), {self.num_stored} stored, "
            f"{self.num_skipped} skipped, {self.num_failed} failed; holds {stats.entries} blocks "
            f"({stats.bytes / 1e9:.3g} GB), {stats.evictions} evicted, {stats.corrupt} damaged"
        )

    def _report(self) -> None:
        if self.num_loaded > self._num_reported and self._clock() >= self._next_report_s:
            self._num_reported, self._next_report_s = self.num_loaded, self._clock() + _LOG_S
            _log.info("%s tier: %s", self._name, self.summary())

    def _complain(self, message: str) -> None:
        if self._clock() >= self._next_complaint_s:
            self._next_complaint_s = self._clock() + _LOG_S
            _log.warning("%s tier: %s", self._name, message)
