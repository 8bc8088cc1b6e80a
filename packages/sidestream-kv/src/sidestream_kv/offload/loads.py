"""Loads: copies of KV blocks from host memory to the device. Called on the offload worker's thread only.

A load waits for the last use of the device blocks that it overwrites (hazard H3 in docs/glossary.md). Each load is
copied in pieces. All pieces except the last copy whole blocks. The last piece is split into groups of layers, so that a
step can start before the last layers have arrived. Blocks with recurrent states come first and are always copied whole,
because the first layers of a step read these states. Of blocks to which layers with a sliding window do not attend any
more, only the other layers are copied. When all pieces were submitted to the device, their fences are
reported to the engine thread, which can then launch a step that waits for them.

    slot    host memory for one block
    lease   the right to use slots until `release`: leased slots are not evicted
    fence   a position on a stream, like a CUDA event
    settle  a job has settled when it no longer uses device blocks
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from sidestream_kv.device.base import CopyBatch, Device
from sidestream_kv.errors import TierCorrupt
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.kv.state_layout import StateLayout
from sidestream_kv.offload import pacing
from sidestream_kv.offload.checksums import Checksums
from sidestream_kv.offload.copy import BlockMemory, layers_batch
from sidestream_kv.offload.costs import CostModel
from sidestream_kv.offload.messages import LoadMissed, LoadSubmitted, Part
from sidestream_kv.offload.pacing import Copy, Lane, Urgency
from sidestream_kv.offload.tickets import LoadJob, Switches, TransferLog, UnsettledJobs
from sidestream_kv.offload.tiers.stack import TierStack
from sidestream_kv.types import HOST, Key, LoadPlan

# Most groups of layers in the last piece of a load. With more groups, a step could start only a little earlier, and the
# copies would be more and smaller.
_MOST_GROUPS = 4


class Loads:
    """All load jobs that have not ended. A job executes one LoadPlan.

    report   function that sends an event to the engine thread
    states   layout of the recurrent states in the blocks that are copied whole; None if the model has none
    """

    def __init__(
        self,
        *,
        device: Device,
        memory: BlockMemory,
        tiers: TierStack,
        lane: Lane,
        unsettled: UnsettledJobs,
        switches: Switches,
        log: TransferLog,
        costs: CostModel,
        report: Callable[[LoadSubmitted | LoadMissed], None],
        states: StateLayout | None,
        checksums: Checksums,
    ) -> None:
        self._device = device
        self._memory = memory
        self._tiers = tiers
        self._host = tiers.host
        self._host_memory = BlockMemory(tiers.host.memory, tiers.host.layout)
        self._lane = lane
        self._unsettled = unsettled
        self._switches = switches
        self._log = log
        self._costs = costs
        self._report = report
        self._states = states
        self._checksums = checksums
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
        source_ids = self._host.pool.match(plan.keys)
        if len(source_ids) < len(plan.keys) or self._switches.abandoned:  # rule: missing-source-fails-the-load
            self._miss(job_id, "load_failed" if self._switches.abandoned else "gone")
            return
        slots = self._host.pool.share(source_ids)  # rule: load-holds-its-slots
        if plan.num_whole and self._covered(slots.ids) != plan.covers:  # rule: state-covers-the-planned-tokens
            slots.release()
            self._tiers.forget(plan.keys[: plan.num_whole])  # otherwise the next request would plan the same load
            self._miss(job_id, "coverage")
            return
        # Mark the blocks as just used in the persistent tiers, too, so that they are not evicted there.
        self._tiers.touch_persistent(plan.keys)
        ends = piece_ends(plan, self._memory.layout)
        self._waiting.append(LoadJob(job_id, plan, slots, self._device.now(), ends))

    def _miss(self, job_id: int, reason: str) -> None:
        self._report(LoadMissed(job_id, reason))  # rule: missing-load-is-reported
        self._unsettled.settle(job_id)  # rule: missing-load-is-settled

    def _covered(self, slots: Sequence[int]) -> int:
        """The number of tokens that the recurrent state in these slots covers. The kernel that made the state wrote
        this number into the block.
        """
        assert self._states is not None
        part, first = divmod(self._states.covered_offset, self._host.layout.block_bytes)
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
        changed = self._checksums.changed(job.slots.ids[first:stop])
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
            self._report(LoadSubmitted(job.job_id, before, tuple(_parts(last, job.batches))))

    def end(self, copy: Copy) -> None:
        """Handle the end of a piece's copy."""
        job = self._jobs.pop(copy)
        job.ended += 1
        if copy.failure is None:
            self._costs.saw_transfer(HOST, sum(group.num_bytes for group in copy.groups), copy.seconds)
        elif job.failure is None:
            job.failure = copy.failure  # rule: load-fails-with-any-of-its-pieces
        self._settle(job)

    def _settle(self, job: LoadJob) -> None:
        """If all pieces have ended, release the job's slots, and record that it no longer uses device blocks."""
        if not job.settled:  # rule: load-settles-once
            return
        num_bytes = sum(batch.num_bytes for copy in job.copies for batch in copy.groups)
        if not self._log.ended("load", job.failure, num_bytes, job.submitted_s):
            self._report(LoadMissed(job.job_id, "load_failed"))  # rule: failed-load-is-reported
        job.slots.release()  # rule: load-releases-its-slots
        self._unsettled.settle(job.job_id)  # rule: ended-load-is-settled

    def drop(self, reason: BaseException) -> None:
        """Fail all jobs with blocks whose copy was not queued yet, because the engine is closing."""
        while self._waiting:
            job = self._waiting.popleft()
            # rule: dropped-load-settles-once
            if job.failure is None:  # a failed job has settled already, or settles when its last piece in flight ends
                job.failure = reason
                self._settle(job)  # rule: dropped-load-is-settled


def piece_ends(plan: LoadPlan, layout: KVLayout) -> list[int]:
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


def layers_per_group(layout: KVLayout, segment_bytes: int) -> int:
    """Number of layers of a block that a load copies as one segment, in the last piece.

    Small groups let a step start early, but small segments are copied slowly. So there are at most `_MOST_GROUPS`
    groups, and the segments of whole blocks have at least `segment_bytes`, except those of the last group, which may
    have fewer layers. A block smaller than `segment_bytes` is one segment.
    """
    num_groups = min(layout.num_layers, _MOST_GROUPS, max(1, layout.block_bytes // segment_bytes))
    return -(-layout.num_layers // num_groups)
