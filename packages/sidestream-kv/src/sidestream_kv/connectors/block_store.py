"""Jobs that copy blocks between an engine's host memory and a persistent tier, for engines that schedule transfers
themselves.

One thread, the engine's, calls everything but the copies: it owns the tier's index. A pool of threads does the I/O.

    engine thread   store(job, blocks): reserve a grant for each new key       load(job, blocks): pin the keys
    pool            tier.write(grant, block)                                    tier.read(entry, block)
    engine thread   take_finished(): publish or abandon the grants              release the pins; forget damaged entries

A block's memory belongs to the store from `store` or `load` until its job is among `take_finished`: the engine must
neither change, read nor release it before. A key is findable only after its whole block was written, and a block that
could not be read or verified is never among the `good` keys of its job.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from time import monotonic

from sidestream_kv.errors import TierCorrupt, TierError, TierFull, TierLost
from sidestream_kv.offload.tiers.base import Block, Entry, PersistentTier, ReadLease, WriteGrant
from sidestream_kv.types import Key

_log = logging.getLogger(__name__)

_REPORT_S = 60.0  # between two lines of the log on what was reused
_WAIT_S = 10.0  # between two lines of the log while `drain` waits


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """A job that has ended.

    good       keys whose blocks are in the tier (a store), or whose blocks were filled and verified (a load)
    bytes      bytes that were copied
    seconds    from the call of `store` or `load` to the end of the last copy
    """

    job: int
    good: frozenset[Key]
    num_keys: int
    bytes: int
    seconds: float

    @property
    def success(self) -> bool:
        """Whether all keys are good."""
        return len(self.good) == self.num_keys


@dataclass(slots=True, eq=False)
class _Job:
    job: int
    keys: tuple[Key, ...]
    began_s: float
    good: set[Key] = field(default_factory=set)
    copied: int = 0
    left: int = 0


@dataclass(slots=True, eq=False)
class _Write:
    job: _Job
    grant: WriteGrant
    block: Block
    error: TierError | None = None


@dataclass(slots=True, eq=False)
class _Read:
    job: _Job
    lease: ReadLease
    block: Block
    error: TierError | None = None

    @property
    def entry(self) -> Entry:
        return self.lease.entries[0]


_Copy = _Write | _Read


class BlockStore:
    """Runs the jobs of one persistent tier. All methods are for one thread, and none but `drain` and `close` waits.

    max_pending_bytes  bytes of stores that may wait for the medium; blocks beyond are not stored, which is counted in
                       `num_skipped`: a slow medium delays nothing and holds no more of the engine's memory
    """

    def __init__(
        self,
        tier: PersistentTier,
        *,
        name: str,
        num_threads: int = 8,
        max_pending_bytes: int = 1 << 30,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._tier = tier
        self._name = name
        self._clock = clock
        self._max_pending_bytes = max_pending_bytes
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=f"sidestream-{name}")
        self._done: SimpleQueue[_Copy] = SimpleQueue()
        self._running: set[Future[None]] = set()
        self._lock = threading.Lock()  # of `_running`: futures end on the pool's threads
        self._ended: list[_Job] = []  # jobs without a copy
        self._writing: set[Key] = set()
        self._pending_bytes = 0
        self._reported_s = clock()
        self._reported = 0
        self.num_loaded = 0
        self.num_stored = 0
        self.num_skipped = 0
        self.num_failed = 0

    def __contains__(self, key: Key) -> bool:
        """Whether the tier has the block of `key`, whole."""
        return key in self._tier.index

    def is_being_written(self, key: Key) -> bool:
        """Whether a store of `key` has begun and not ended."""
        return key in self._writing

    @property
    def has_jobs(self) -> bool:
        """Whether a job has begun that `take_finished` has not returned."""
        with self._lock:
            return bool(self._running or self._ended) or not self._done.empty()

    def touch(self, keys: Sequence[Key]) -> None:
        """Mark the blocks of a sequence, in its order, as just used."""
        self._tier.index.touch(keys)

    def store(self, job: int, blocks: Sequence[tuple[Key, Block]]) -> None:
        """Begin to write blocks. Keys that the tier has, or writes already, are good without a copy."""
        made = _Job(job, tuple(key for key, _ in blocks), self._clock())
        copies: list[_Copy] = []
        for key, block in blocks:
            grant = self._grant(key, _num_bytes(block))
            if grant is not None:
                copies.append(_Write(made, grant, block))
            elif key in self._tier.index or key in self._writing:
                made.good.add(key)
            else:
                self.num_skipped += 1
        self._begin(made, copies)

    def _grant(self, key: Key, num_bytes: int) -> WriteGrant | None:
        if key in self._tier.index or self._pending_bytes + num_bytes > self._max_pending_bytes:
            return None
        try:
            grant = self._tier.index.reserve(key)
        except TierFull:  # every entry is being read or written
            return None
        if grant is not None:
            self._writing.add(key)
            self._pending_bytes += num_bytes
        return grant

    def load(self, job: int, blocks: Sequence[tuple[Key, Block]]) -> None:
        """Begin to fill blocks. Keys that the tier does not have are not good."""
        made = _Job(job, tuple(key for key, _ in blocks), self._clock())
        copies: list[_Copy] = []
        for key, block in blocks:
            if key in self._tier.index:
                copies.append(_Read(made, self._tier.index.pin([key]), block))
        self._begin(made, copies)

    def _begin(self, job: _Job, copies: Sequence[_Copy]) -> None:
        job.left = len(copies)
        if not copies:
            self._ended.append(job)
        for copy in copies:
            future = self._pool.submit(self._copy, copy)
            with self._lock:
                self._running.add(future)
            future.add_done_callback(self._forget)

    def _forget(self, future: Future[None]) -> None:
        with self._lock:
            self._running.discard(future)

    def _copy(self, copy: _Copy) -> None:
        """Runs on a thread of the pool."""
        try:
            if isinstance(copy, _Write):
                self._tier.write(copy.grant, copy.block)
            else:
                self._tier.read(copy.entry, copy.block)
        except TierError as error:
            copy.error = error
        except Exception as error:  # a bug of the tier must not leave the job without an end
            _log.exception("%s tier: a copy failed", self._name)
            copy.error = TierError(str(error))
        self._done.put(copy)

    def take_finished(self) -> list[FinishedJob]:
        """Jobs that ended since the last call. Their blocks belong to the engine again."""
        ended, self._ended = self._ended, []
        while True:
            try:
                copy = self._done.get_nowait()
            except Empty:
                break
            self._settle(copy)
            copy.job.left -= 1
            if not copy.job.left:
                ended.append(copy.job)
        self._report()
        now_s = self._clock()
        return [
            FinishedJob(job.job, frozenset(job.good), len(job.keys), job.copied, now_s - job.began_s) for job in ended
        ]

    def _settle(self, copy: _Copy) -> None:
        num_bytes, index = _num_bytes(copy.block), self._tier.index
        if isinstance(copy, _Write):
            key = copy.grant.entry.key
            self._writing.discard(key)
            self._pending_bytes -= num_bytes
            if copy.error is None:
                index.publish(copy.grant)
                self.num_stored += 1
            else:
                index.abandon(copy.grant)
        else:
            key = copy.entry.key
            if copy.error is not None:
                index.forget(copy.entry)
            else:
                self.num_loaded += 1
            copy.lease.release()
        if copy.error is None:
            copy.job.good.add(key)
            copy.job.copied += num_bytes
            return
        self.num_failed += 1
        if isinstance(copy.error, TierLost):
            index.clear()
        level = logging.INFO if isinstance(copy.error, TierFull | TierCorrupt) else logging.WARNING
        _log.log(level, "%s tier: %s", self._name, copy.error)

    def _report(self) -> None:
        if self._clock() - self._reported_s >= _REPORT_S and self.num_loaded > self._reported:
            self._reported_s, self._reported = self._clock(), self.num_loaded
            _log.info("%s tier: %s", self._name, self.summary())

    def summary(self) -> str:
        """What was stored and reused since the start, in words."""
        stats = self._tier.index.stats
        return (
            f"{self.num_loaded} blocks came back, {self.num_stored} stored, {self.num_skipped} skipped, "
            f"{self.num_failed} failed; holds {stats.entries} blocks ({stats.bytes / 1e9:.1f} GB), "
            f"{stats.evictions} evicted, {stats.corrupt} damaged"
        )

    def drain(self) -> None:
        """Wait until no copy runs. Their jobs are among the next `take_finished`. A copy cannot be given up, because
        the medium may still write into the engine's memory; the log says every ten seconds what is waited for.
        """
        while True:
            with self._lock:
                running = set(self._running)
            if not running:
                return
            if wait(running, timeout=_WAIT_S).not_done:
                _log.warning("%s tier: waiting for %d copies that have not ended", self._name, len(running))

    def close(self) -> Iterable[FinishedJob]:
        """Wait for the running copies, settle them and close the tier. Idempotent."""
        self.drain()
        self._pool.shutdown(wait=True)
        finished = self.take_finished()
        _log.info("%s tier: %s", self._name, self.summary())
        self._tier.close()
        return finished


def _num_bytes(block: Block) -> int:
    return block.nbytes
