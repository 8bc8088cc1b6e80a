"""Loads: copies of KV blocks from host memory to the device, on the offload worker's thread; estimates whether loading
KV from a tier (host memory or disk) is faster than computing it again; and the context that all transfers share.

A load waits for the last use of the device blocks that it overwrites (hazard H3 in docs/glossary.md). Each load is
copied in pieces. All pieces except the last copy whole blocks. The last piece is split into groups of layers, so that a
step can start before the last layers have arrived. Blocks with recurrent states come first and are always copied whole,
because the first layers of a step read these states. If no layer with a sliding window attends to a block any more,
only the block's other layers are copied. When all pieces were submitted to the device, their fences are reported to the
engine thread, which can then launch a step that waits for them.

    slot    host memory for one block
    lease   the right to use slots until `release`: leased slots are not evicted
    fence   a position on a stream, like a CUDA event
    settle  a job has settled when it no longer uses device blocks
"""

from __future__ import annotations

import logging
import math
import sys
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, islice
from statistics import median_high, median_low

from sidestream_kv.device.base import CopyBatch, Device
from sidestream_kv.errors import TierCorrupt
from sidestream_kv.kv.layout import LayeredLayout
from sidestream_kv.kv.state_layout import StateLayout
from sidestream_kv.metrics import Metrics
from sidestream_kv.offload import pacing
from sidestream_kv.offload.pacing import Copy, Lane, Urgency, layers_batch
from sidestream_kv.offload.tickets import (
    LoadJob,
    LoadMissed,
    LoadSubmitted,
    Part,
    Promoted,
    Switches,
    TransferLog,
    UnsettledJobs,
    WorkerEvent,
)
from sidestream_kv.offload.tiers.base import SharedTier
from sidestream_kv.offload.tiers.shared_pool import SharedPool
from sidestream_kv.offload.tiers.stack import BlockMemory, Checksums, TierStack
from sidestream_kv.types import HOST, FindPlan, Key, LoadPlan, PromotePlan, RequestId

logger = logging.getLogger(__name__)

# A request waits for a shared tier's answer at most this long, and at most this share of the time that it would take to
# compute the missing blocks. It does not ask if that is less than an answer takes.
_FIND_PATIENCE_S = 0.05
_FIND_SHARE = 0.1
_FIND_LEAST_S = 0.001

PREFETCH = -1
"""Stands for a request's id, in a promotion that no request waits for."""
# Most groups of layers in the last piece of a load. With more groups, a step could start only a little earlier, and the
# copies would be more and smaller.
_MOST_GROUPS = 4
# Weight of a new measurement in the moving average of the prefill rate.
_WEIGHT = 0.2
# Number of measurements in a median.
_WINDOW = 5
# Transfers of at least this many bytes tell the bandwidth: at 20 GB/s they take 0.8 ms, much more than their start.
_LARGE_BYTES = 16 << 20
# Most runs of blocks in one tier whose ends are compared: 10 us each.
_MOST_RUNS = 16
# Number of a tier's last loads that decide whether it is turned down, and the number from which on they do.
_RECENT = 8
_FEWEST = 4
# Pauses between two attempts to load from a tier that was turned down; each failed attempt doubles the pause.
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
# Minimum time between two log lines of one tier about this. The metrics have all of it.
_LOG_PERIOD_S = 60.0
# Rates in bytes/s that are assumed for host memory and for other tiers until a transfer was measured. They are high on
# purpose: with low rates, a fast GPU would always compute, so no transfer would ever be measured.
_HEALTHY_HOST = 5e10
_HEALTHY_TIER = 2e9
# If the last measurement of a tier is older than this, the tier is assumed to be healthy again.
_STALE_S = 30.0


@dataclass(frozen=True, slots=True, eq=False)
class TransferContext:
    """Memories between which blocks are copied, and records that every transfer updates. Made by the connector.

    memory           blocks on the device
    states           layout of the recurrent states in blocks that are copied whole; None if the model has none
    load_deadline_s  seconds that a request waits for reads from persistent tiers
    to_device        limits of copies to the device
    report           function that sends an event to the engine thread
    write_policies   write policy of each persistent tier, by its name; without one: `"all"`
    """

    device: Device
    memory: BlockMemory
    tiers: TierStack
    states: StateLayout | None
    costs: CostModel
    checksums: Checksums
    log: TransferLog
    load_deadline_s: float
    to_device: pacing.Pace
    report: Callable[[WorkerEvent], None]
    write_policies: Mapping[str, str] = field(default_factory=dict)
    switches: Switches = field(default_factory=Switches)
    unsettled: UnsettledJobs = field(default_factory=UnsettledJobs)

    @property
    def host_memory(self) -> BlockMemory:
        """Blocks in host memory."""
        return BlockMemory(self.tiers.host.memory, self.tiers.host.layout)


class Loads:
    """All load jobs that have not ended. A job executes one LoadPlan. `lane`: queue of the copies to the device."""

    def __init__(self, context: TransferContext, lane: Lane) -> None:
        self._context = context
        self._device = context.device
        self._memory = context.memory
        self._tiers = context.tiers
        self._host = context.tiers.host
        self._host_memory = context.host_memory
        self._lane = lane
        self._waiting: deque[LoadJob] = deque()  # jobs with blocks whose copy was not queued yet
        self._jobs: dict[Copy, LoadJob] = {}

    @property
    def waiting(self) -> bool:
        """Whether any job has blocks whose copy was not queued yet."""
        return bool(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether any block is waiting or being copied."""
        return bool(self._waiting or self._jobs)

    def sizes(self) -> dict[str, int]:
        """Number of objects that are kept, by kind."""
        return {"waiting loads": len(self._waiting), "load copies": len(self._jobs)}

    def submit(self, job_id: int, plan: LoadPlan) -> None:
        """Lease the slots that hold the source blocks, and queue the job. The load is reported as missed if a source
        block was evicted, or if the recurrent state covers another number of tokens than planned.
        """
        slots = self._host.pool.lease(plan.keys)  # rule: load-holds-its-slots
        if len(slots.ids) < len(plan.keys) or self._context.switches.abandoned:  # rule: missing-source-fails-the-load
            slots.release()  # rule: missed-load-releases-its-slots
            self._miss(job_id, "load_failed" if self._context.switches.abandoned else "gone")
            return
        stateful = plan.num_whole and self._context.states is not None
        if stateful and self._covered(slots.ids) != plan.covers:  # rule: state-covers-the-planned-tokens
            slots.release()
            self._tiers.forget(plan.keys[: plan.num_whole])  # otherwise the next request would plan the same load
            self._miss(job_id, "coverage")
            return
        # Mark the blocks as just used in the persistent tiers, too, so that they are not evicted there.
        self._tiers.touch_persistent(plan.keys)
        ends = piece_ends(plan, self._memory.layout)
        self._waiting.append(LoadJob(job_id, plan, slots, self._device.now(), ends))

    def _miss(self, job_id: int, reason: str) -> None:
        self._context.report(LoadMissed(job_id, reason))  # rule: missing-load-is-reported
        self._context.unsettled.settle(job_id)  # rule: missing-load-is-settled

    def _covered(self, slots: Sequence[int]) -> int:
        """The number of tokens that the recurrent state in these slots covers. The kernel that made the state wrote
        this number into the block.
        """
        states = self._context.states
        assert states is not None
        part, first = divmod(states.covered_offset, self._host.layout.block_bytes)
        tracer = self._device.tracer
        if tracer is not None:
            tracer.host_touched(lambda: self._host_memory.accesses([slots[part]], write=False), "read coverage")
        return int.from_bytes(self._host.slot(slots[part])[first : first + 8], sys.byteorder, signed=True)

    def begin_piece(self) -> None:
        """Queue the copy of the next piece of the oldest job, unless the job has failed."""
        job = self._waiting[0]
        if job.failure is None:  # rule: failed-load-begins-no-more-pieces
            self._begin_piece(job)
        if job.all_begun or job.failure is not None:
            del self._waiting[0]

    def _begin_piece(self, job: LoadJob) -> None:
        """Queue the copy of the job's next blocks. Only the last piece is split by layers, because such copies are
        slower, and because the other pieces have arrived when a step can start. If a block does not match its checksum,
        the job fails instead.
        """
        plan, layout, first = job.plan, self._memory.layout, job.begun
        stop = job.begun = job.ends[len(job.copies)]
        changed = self._context.checksums.changed(job.slots.ids[first:stop])
        if changed:  # rule: changed-block-is-not-loaded
            self._refuse(job, [plan.keys[first + index] for index in changed])
            return
        step = layout.num_layers
        if job.all_begun and first >= plan.num_whole:  # rule: states-are-loaded-before-layers
            step = layers_per_group(layout, self._device.segment_bytes)
        groups = []
        for layer in range(0, layout.num_layers, step):
            layers = range(layer, min(layer + step, layout.num_layers))  # rule: load-copies-every-layer
            groups.append([self._device.prepare(batch) for batch in self._batches(job, range(first, stop), layers)])
        job.batches = [len(group) for group in groups]
        batches = [batch for group in groups for batch in group]
        urgency = Urgency.PREFETCH if plan.prefetch else Urgency.DEMAND
        # rule: load-waits-for-the-last-use
        copy = Copy(batches, after=plan.after, urgency=urgency, label=f"load {stop - first} blocks")
        job.copies.append(copy)
        self._jobs[copy] = job
        self._lane.add(copy)

    def _batches(self, job: LoadJob, blocks: range, layers: range) -> Iterator[CopyBatch]:
        """The copies of some layers of some of the job's blocks. None of them is empty."""
        first, num_partial = blocks.start, 0
        if first >= job.plan.num_whole:
            # rule: load-is-whole-in-the-window
            num_partial = min(max(0, job.plan.num_whole + job.plan.num_partial - first), len(blocks))
        without_window = [layer for layer in self._memory.layout.layers_without_window if layer in layers]
        parts: tuple[tuple[range, Sequence[int]], ...]
        parts = (blocks[:num_partial], without_window), (blocks[num_partial:], layers)
        for part, copied in parts:
            if part and copied:
                slots, block_ids = (ids[part.start : part.stop] for ids in (job.slots.ids, job.plan.block_ids))
                yield layers_batch(self._host_memory, slots, self._memory, block_ids, copied)

    def _refuse(self, job: LoadJob, changed: Sequence[Key]) -> None:
        """Fail the job, because the blocks of the keys `changed` do not match their checksums."""
        job.failure = TierCorrupt(f"{len(changed)} blocks in host memory do not match their checksums")
        self._tiers.forget(changed)  # otherwise the next request would plan the same load
        self._settle(job)  # rule: refused-load-is-settled

    def submitted(self, copy: Copy) -> None:
        """Record that all slices of a piece were submitted to the device. After the last piece, report the job's
        fences.

        Pieces may be submitted out of order. All pieces of a job wait for the same fences, and these fences may become
        done after the lane has polled an earlier piece and before it polls a later piece.
        """
        job = self._jobs[copy]
        job.submitted += 1
        # A copy of the job may have failed already, although `end` was not called for it yet.
        failed = job.failure is not None or any(copy.failure is not None for copy in job.copies)
        if job.all_begun and job.submitted == len(job.copies) and not failed:  # rule: load-is-submitted
            *others, last = job.copies
            before = tuple(part for copy in others for part in _parts(copy, [1] * len(copy.groups)))
            # rule: submitted-load-is-reported
            self._context.report(LoadSubmitted(job.job_id, before, tuple(_parts(last, job.batches))))

    def end(self, copy: Copy) -> None:
        """Handle the end of a piece's copy."""
        job = self._jobs.pop(copy)
        job.ended += 1
        if copy.failure is None:
            self._context.costs.saw_transfer(HOST, sum(group.num_bytes for group in copy.groups), copy.seconds)
        elif job.failure is None:
            job.failure = copy.failure  # rule: load-fails-with-any-of-its-pieces
        self._settle(job)

    def _settle(self, job: LoadJob) -> None:
        """If all pieces have ended, release the job's slots, and record that it no longer uses device blocks."""
        if not job.settled:  # rule: load-settles-once
            return
        num_bytes = sum(batch.num_bytes for copy in job.copies for batch in copy.groups)
        if not self._context.log.ended("load", job.failure, num_bytes, job.submitted_s):
            self._context.report(LoadMissed(job.job_id, "load_failed"))  # rule: failed-load-is-reported
        job.slots.release()  # rule: load-releases-its-slots
        self._context.unsettled.settle(job.job_id)  # rule: ended-load-is-settled

    def drop(self, reason: BaseException) -> None:
        """Fail all jobs with blocks whose copy was not queued yet, because the engine is closing."""
        while self._waiting:
            job = self._waiting.popleft()
            # rule: dropped-load-settles-once
            if job.failure is None:  # a failed job has settled already, or settles when its last piece in flight ends
                job.failure = reason
                self._settle(job)  # rule: dropped-load-is-settled


def piece_ends(plan: LoadPlan, layout: LayeredLayout) -> list[int]:
    """Where the pieces of a load end: for each, the number of its blocks and of all blocks before. The last piece holds
    no states if the plan has other blocks.
    """
    partial_bytes = layout.partial_bytes
    whole = len(plan.keys) - plan.num_whole - plan.num_partial
    room = pacing.LAST_PIECE_BYTES - whole * layout.block_bytes
    if room < 0:
        num_last = pacing.LAST_PIECE_BYTES // layout.block_bytes
    else:
        num_last = whole + (min(plan.num_partial, room // partial_bytes) if partial_bytes else plan.num_partial)
    num_last = min(max(pacing.BLOCKS_PER_TURN, num_last), whole + plan.num_partial)
    ends, first, left = list[int](), 0, len(plan.keys) - num_last
    sizes = (plan.num_whole, layout.block_bytes), (plan.num_partial, partial_bytes), (whole, layout.block_bytes)
    for count, num_bytes in sizes:
        stop = min(first + count, left)
        if num_bytes:
            piece = max(pacing.BLOCKS_PER_TURN, pacing.LOAD_PIECE_BYTES // num_bytes)
            ends += [*range(first + piece, stop, piece), stop] if stop > first else []
        first = stop
    return [*ends, len(plan.keys)] if num_last else ends


def _parts(copy: Copy, batches: Sequence[int]) -> Iterator[Part]:
    """The parts of a submitted copy: each has as many batches as `batches` says."""
    first = 0
    for count in batches:
        fences = tuple(fence for of_batch in copy.fences[first : first + count] for fence in of_batch)
        yield Part(fences, sum(batch.num_bytes for batch in copy.groups[first : first + count]))
        first += count


def layers_per_group(layout: LayeredLayout, segment_bytes: int) -> int:
    """Number of layers of a block that a load copies as one segment, in the last piece.

    Small groups let a step start early, but small segments are copied slowly. So there are at most `_MOST_GROUPS`
    groups, and the segments of whole blocks have at least `segment_bytes`, except those of the last group, which may
    have fewer layers. A block smaller than `segment_bytes` is one segment.
    """
    num_groups = min(layout.num_layers, _MOST_GROUPS, max(1, layout.block_bytes // segment_bytes))
    return -(-layout.num_layers // num_groups)


@dataclass(frozen=True, slots=True)
class _Estimate:
    """`measured_s`: time of the last measurement; infinite before the first one."""

    latency_s: float
    bytes_per_s: float
    measured_s: float = math.inf

    def seconds(self, num_bytes: int, *, num_transfers: int = 1) -> float:
        return num_transfers * self.latency_s + num_bytes / self.bytes_per_s


class _TierCosts:
    """The measurements of one tier. `estimate` is replaced as a whole, because another thread reads it."""

    def __init__(self, healthy: _Estimate) -> None:
        self._healthy = self.estimate = healthy
        self._begin(healthy)

    def _begin(self, *assumed: _Estimate) -> None:
        self._rates = deque((one.bytes_per_s for one in assumed), maxlen=_WINDOW)
        self._small = deque(((0, one.latency_s) for one in assumed), maxlen=_WINDOW)  # bytes and seconds

    def measured(self, num_bytes: int, seconds: float, now_s: float) -> None:
        if _is_stale(self.estimate, now_s):
            self._begin(self._healthy, self.estimate)
        rate = num_bytes / seconds
        if num_bytes >= _LARGE_BYTES or rate > self.estimate.bytes_per_s:
            self._rates.append(rate)
        if num_bytes < _LARGE_BYTES:
            self._small.append((num_bytes, seconds))
        bytes_per_s = median_high(self._rates)
        latency_s = median_low(max(0.0, taken_s - size / bytes_per_s) for size, taken_s in self._small)
        self.estimate = _Estimate(latency_s, bytes_per_s, now_s)


class CostModel:
    """Estimates of the transfer times of each tier, and of the prefill rate. The offload worker records transfers, and
    the engine thread reads the estimates.

    A transfer from a tier takes latency + bytes / bandwidth. Both are medians of the tier's last measurements:

        bandwidth  rate of transfers of at least 16 MiB, and of smaller ones that were faster than the estimate
        latency    time of smaller transfers beyond bytes / bandwidth

    Most of a small transfer's time is fixed, so it tells little about the bandwidth. The assumption that a tier is
    healthy counts as its first measurement, so that one slow transfer alone changes nothing. After 30 s without a
    measurement, the tier counts as healthy again: otherwise a tier that was slow once would never be used, nor
    measured, again. The next measurement then decides between the assumption and the last estimate. The time to compute
    is tokens / prefill rate, a moving average.

    prefill_rate   measured prompt tokens per second. None: not measured yet, and loading counts as faster
    """

    def __init__(self, layout: LayeredLayout, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._layout = layout
        self._clock = clock
        self._tiers: dict[str, _TierCosts] = {}
        self.prefill_rate: float | None = None

    def saw_transfer(self, tier: str, num_bytes: int, seconds: float) -> None:
        """Record that a transfer from `tier` moved `num_bytes` and occupied its stream for `seconds`."""
        if seconds > 0:
            if tier not in self._tiers:
                self._tiers[tier] = _TierCosts(_healthy(tier))
            self._tiers[tier].measured(num_bytes, seconds, self._clock())

    def saw_prefill(self, num_tokens: int, seconds: float) -> None:
        """Record that a step computed `num_tokens` prompt tokens in `seconds`."""
        if seconds > 0:
            rate = num_tokens / seconds
            self.prefill_rate = (
                rate if self.prefill_rate is None else self.prefill_rate + _WEIGHT * (rate - self.prefill_rate)
            )

    def block_seconds(self, tier: str) -> tuple[float, float]:
        """Expected latency of a transfer from a tier, and expected seconds for each block. Any thread may call it."""
        estimate = self._estimate(tier)
        return estimate.latency_s, self._layout.block_bytes / estimate.bytes_per_s

    def load_seconds(self, blocks: Mapping[str, int], *, num_loaded: int, num_partial: int = 0) -> float:
        """Expected time until `num_loaded` blocks are on the device, `num_partial` of them without the layers with a
        sliding window.

        `blocks` is the number of blocks to read from each tier, including reads that are queued already. Blocks of
        slower tiers are first read into host memory, one transfer for each and from all tiers at the same time, so both
        times add up.
        """
        size = self._layout.block_bytes
        reads = ((self._estimate(tier), count) for tier, count in blocks.items() if tier != HOST)
        promoted_s = max((each.seconds(count * size, num_transfers=count) for each, count in reads), default=0.0)
        return promoted_s + self.seconds_from_host(num_loaded, num_partial=num_partial)

    def seconds_from_host(self, num_blocks: int, *, num_partial: int = 0) -> float:
        """Expected time to load that many blocks from the host tier, `num_partial` of them without the layers with a
        sliding window.
        """
        layout = self._layout
        num_bytes = (num_blocks - num_partial) * layout.block_bytes + num_partial * layout.partial_bytes
        return self._estimate(HOST).seconds(num_bytes) if num_blocks else 0.0

    def _estimate(self, tier: str) -> _Estimate:
        """The estimate of a tier. If it is stale, it is not worse than that of a healthy tier."""
        costs = self._tiers.get(tier)
        if costs is None:
            return _healthy(tier)
        estimate = costs.estimate
        if _is_stale(estimate, self._clock()):
            return _Estimate(0.0, max(estimate.bytes_per_s, _healthy(tier).bytes_per_s))
        return estimate

    def compute_seconds(self, num_blocks: int) -> float:
        """Expected duration of the prefill of that many blocks; infinite until a prefill was measured."""
        return num_blocks * self._layout.block_tokens / self.prefill_rate if self.prefill_rate else float("inf")


class TierBalance:
    """What the loads from one tier saved and lost. If the last loads of a persistent tier lost more time than they
    saved, it is turned down: requests compute, except for one attempt at a time, after pauses of 1 s to 60 s. The first
    attempt that saves time turns the tier up again. Called on the engine thread only.

    A cost model estimates the times of loads from those that ended. So it does not know of a tier that stalls, or
    whose times vary, before requests have waited.
    """

    def __init__(self, tier: str, metrics: Metrics) -> None:
        self._tier = tier
        self._metrics = metrics
        self._recent = deque[float](maxlen=_RECENT)  # seconds saved by each load, negative if it lost time
        self._pause_s = 0.0  # 0: not turned down
        self._since_s = self._resumes_s = self._next_log_s = 0.0
        self._in_flight = 0

    @property
    def turned_down(self) -> bool:
        """Whether the tier is turned down. Any thread may read it."""
        return bool(self._pause_s)

    def allows(self, now_s: float) -> bool:
        """Whether a request may wait for the tier."""
        return not self._pause_s or (now_s >= self._resumes_s and not self._in_flight)

    def began(self) -> None:
        """Record that a load begins."""
        self._in_flight += 1

    def ended(self, begun_s: float, now_s: float, *, expected_s: float, compute_s: float, good: bool) -> None:
        """Record the end of a load. `expected_s`: the time it was expected to take; `compute_s`: that of computing its
        blocks, infinite if unknown; `good`: whether its blocks were found.
        """
        self._in_flight -= 1
        taken_s = now_s - begun_s
        self._metrics.inc("tier_wait_seconds_total", taken_s, self._tier)
        self._metrics.inc("tier_expected_seconds_total", expected_s, self._tier)
        if math.isinf(compute_s):
            return
        saved_s = compute_s - taken_s if good else -taken_s
        self._metrics.inc("tier_loads_total", 1, self._tier, "useful" if saved_s >= 0 else "wasted")
        self._metrics.inc("tier_saved_seconds_total", max(0.0, saved_s), self._tier)
        self._metrics.inc("tier_lost_seconds_total", max(0.0, -saved_s), self._tier)
        self._recent.append(saved_s)
        if not self._pause_s:
            if len(self._recent) >= _FEWEST and sum(self._recent) < 0:
                self._turn_down(now_s)
        elif begun_s >= self._since_s:  # an attempt; other loads began before
            if saved_s > 0:
                self._turn_up()
            else:
                self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
                self._resumes_s = now_s + self._pause_s

    def _turn_down(self, now_s: float) -> None:
        self._pause_s, self._since_s, self._resumes_s = _FIRST_PAUSE_S, now_s, now_s + _FIRST_PAUSE_S
        self._metrics.set("tier_turned_down", 1, self._tier)
        if now_s < self._next_log_s:
            return
        self._next_log_s = now_s + _LOG_PERIOD_S
        logger.warning(
            "the %s tier loses time: its last %d loads took %.2f s longer than computing their tokens; requests compute"
            " until an attempt, once in %.0f to %.0f s, is faster again",
            self._tier,
            len(self._recent),
            -sum(self._recent),
            _FIRST_PAUSE_S,
            _LONGEST_PAUSE_S,
        )

    def _turn_up(self) -> None:
        self._pause_s = 0.0
        self._recent.clear()
        self._metrics.set("tier_turned_down", 0, self._tier)


@dataclass(frozen=True, slots=True)
class _Wait:
    """A request's wait for blocks of `tiers`. For the times see `TierBalance.ended`."""

    tiers: frozenset[str]
    begun_s: float
    expected_s: float
    compute_s: float


class TierWaits:
    """The waits of requests for persistent tiers, and the balance of each tier. True if a request waits. Called on the
    engine thread only.
    """

    def __init__(self, tiers: TierStack, costs: CostModel, metrics: Metrics) -> None:
        self._tiers = tiers
        self._costs = costs
        shared = any(isinstance(tier, SharedTier) for tier in tiers.persistent.values())
        self._has_shared = shared or isinstance(tiers.host.pool, SharedPool)
        self._balances = {name: TierBalance(name, metrics) for name in tiers.persistent}
        self._waits: dict[tuple[RequestId, int], list[_Wait]] = {}

    def __bool__(self) -> bool:
        return bool(self._waits)

    @property
    def turned_down(self) -> list[str]:
        """The names of the tiers that are turned down. Any thread may read it."""
        return [name for name, balance in self._balances.items() if balance.turned_down]

    def find_patience(self, num_blocks: int) -> float:
        """See `OffloadConnector.find_patience`."""
        if not self._has_shared:
            return 0.0
        # rule: question-is-a-small-share-of-computing
        patience_s = min(_FIND_PATIENCE_S, _FIND_SHARE * self._costs.compute_seconds(num_blocks))
        return patience_s if patience_s >= _FIND_LEAST_S else 0.0

    def allows(self, tiers: Iterable[str], now_s: float) -> bool:
        """Whether a request may wait for these tiers."""
        return all(self._balances[tier].allows(now_s) for tier in tiers if tier != HOST)

    def begin(self, plan: PromotePlan | FindPlan, now_s: float) -> None:
        """Record the beginning of a wait. A wait for an answer counts for no tier."""
        if plan.request_id == PREFETCH:
            return
        if isinstance(plan, FindPlan):
            self._waits.setdefault((plan.request_id, plan.epoch), []).append(_Wait(frozenset(), now_s, 0.0, 0.0))
            return
        sources = self._tiers.locate(plan.keys)
        in_host = next((index for index, source in enumerate(sources) if source != HOST), len(sources))
        blocks = Counter(source for source in sources if source != HOST)
        expected_s = self._costs.load_seconds(blocks, num_loaded=0)
        wait = _Wait(frozenset(blocks), now_s, expected_s, self._costs.compute_seconds(len(sources) - in_host))
        self._waits.setdefault((plan.request_id, plan.epoch), []).append(wait)
        for tier in wait.tiers:
            self._balances[tier].began()

    def end(self, event: Promoted, now_s: float) -> None:
        """Record the end of a wait."""
        if event.request_id == PREFETCH:
            return
        waits = self._waits[event.request_id, event.epoch]
        wait = waits.pop(0)
        if not waits:
            del self._waits[event.request_id, event.epoch]
        for tier in wait.tiers:
            self._balances[tier].ended(
                wait.begun_s, now_s, expected_s=wait.expected_s, compute_s=wait.compute_s, good=event.complete
            )


class LoadChoice:
    """Decides how much of a prefix to load, and how much to compute. Called on the engine thread only.

    num_reads   function that returns the number of reads in flight, by tier
    """

    def __init__(self, context: TransferContext, waits: TierWaits, num_reads: Callable[[], Mapping[str, int]]) -> None:
        self._costs = context.costs
        self._deadline_s = context.load_deadline_s
        self._clock = context.device.now
        self._waits = waits
        self._num_reads = num_reads

    def worth_loading(self, sources: Sequence[str], *, num_blocks: int | None = None, num_partial: int = 0) -> bool:
        """Whether loading is expected to take less time than the prefill of `num_blocks` blocks and than the deadline.
        `sources` names the tier of each block to load. `num_blocks` is by default the number of these blocks.
        `num_partial` of them are loaded without the layers with a sliding window. False if a tier is turned down.
        """
        if not self._waits.allows(set(sources), self._clock()):
            return False
        compute_s = self._costs.compute_seconds(len(sources) if num_blocks is None else num_blocks)
        return self._load_seconds(Counter(sources), num_partial) < min(compute_s, self._deadline_s)

    def head(self, sources: Sequence[str], *, num_partial: int = 0) -> int:
        """How many of the first blocks to load, so that loading them and then computing the others is expected to end
        soonest: a tier may be slower than computing, or turned down, or all of the blocks may take longer than the
        deadline. 0: none. For the arguments see `worth_loading`.

        Inside a run of blocks in one tier, both times grow evenly. So only the ends of runs are compared, and the last
        block that arrives within the deadline.
        """
        blocks, heads, now = Counter[str](), [(self._costs.compute_seconds(len(sources)), 0)], self._clock()

        def seconds(tier: str, count: int) -> float:
            return self._load_seconds(blocks + Counter({tier: count}), num_partial)

        for tier, run in islice(groupby(sources), _MOST_RUNS):
            count = whole = sum(1 for _ in run)
            if seconds(tier, whole) >= self._deadline_s:  # rule: head-arrives-within-the-deadline
                count = bisect_left(range(1, whole + 1), self._deadline_s, key=partial(seconds, tier))
            if not count or not self._waits.allows((tier,), now):
                break
            total_s = seconds(tier, count)
            blocks[tier] += count
            left = len(sources) - blocks.total()
            if left:
                total_s += self._costs.compute_seconds(left)
            heads.append((total_s, -blocks.total()))
            if count < whole:
                break
        return -min(heads)[1]  # of equally fast ones, the longest

    def _load_seconds(self, blocks: Counter[str], num_partial: int) -> float:
        """Expected time to load blocks from the tiers, behind the reads in flight."""
        count = blocks.total()
        waiting = blocks + Counter(self._num_reads())
        return self._costs.load_seconds(waiting, num_loaded=count, num_partial=min(num_partial, count))


def _healthy(tier: str) -> _Estimate:
    return _Estimate(0.0, _HEALTHY_HOST if tier == HOST else _HEALTHY_TIER)


def _is_stale(estimate: _Estimate, now_s: float) -> bool:
    """Whether the tier may have changed since its last measurement."""
    return now_s - estimate.measured_s > _STALE_S
