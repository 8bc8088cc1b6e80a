"""The engine thread's interface to the offload worker, which copies KV blocks between device, host memory and disk.

The engine thread submits plans (frozen descriptions of transfers), polls events, and tracks the device blocks that
transfers still use. The worker does everything else on its own thread. `submit` and `poll` never wait; they take a few
microseconds per plan, however many blocks the plan has.

    tier       a storage level for KV: device, host memory, or a persistent tier such as the disk
    load       copies blocks from host memory to the device; a store copies in the other direction
    promotion  reads blocks from a persistent tier into host memory
    fence      a position on a stream; it is done when all work up to this position is done, like a CUDA event
    settled    a store or load has settled when it uses no device block any more
    epoch      number of preemptions of a request so far
    H2, H5, …  numbers of hazards, listed in docs/glossary.md
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from sidestream_kv.device.base import Device
from sidestream_kv.device.channel import Channel, Mark
from sidestream_kv.kv.pool import FencedPool, merge_fences
from sidestream_kv.kv.state_layout import StateLayout
from sidestream_kv.metrics import Metrics
from sidestream_kv.offload import pacing
from sidestream_kv.offload.loads import PREFETCH, CostModel, LoadChoice, TierWaits, TransferContext, layers_per_group
from sidestream_kv.offload.tickets import (
    Command,
    Forget,
    LoadMissed,
    LoadSubmitted,
    Promoted,
    StoreAgain,
    SubmitPlans,
    TransferLog,
    WorkerEvent,
    WriteRest,
)
from sidestream_kv.offload.tiers.stack import BlockMemory, Checksums, TierStack
from sidestream_kv.offload.worker import OffloadWorker
from sidestream_kv.types import Fence, FindPlan, Key, LayerGates, LoadPlan, PromotePlan, RequestId, TransferPlan

# Polling interval of `flush`.
_FLUSH_POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class LoadReady:
    """Event: all copies of a load were submitted to the device, so a step can wait for the load's fences."""

    request_id: RequestId
    epoch: int


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """Event: a load failed, so its device blocks must not be used. `reason` is explained in `LoadMissed`."""

    request_id: RequestId
    epoch: int
    reason: str


TransferEvent = Promoted | LoadReady | LoadFailed | StoreAgain


@dataclass(slots=True, eq=False)
class _Load:
    """A load that has not settled. Only the engine thread writes it.

    A load is copied in pieces. The last piece is split into groups of layers, so that a step can start before the last
    layers have arrived.

    submitted   the worker's message with all fences of the load; None until all copies were submitted to the device
    reported    whether the load's failure was returned as an event
    """

    plan: LoadPlan
    submitted: LoadSubmitted | None = None
    reported: bool = False

    def gates(self, group: int) -> tuple[Fence, ...]:
        """The fences that each layer of layer group `group` waits for."""
        assert self.submitted is not None
        # rule: layer-gates
        return (*(piece.fences[-1] for piece in self.submitted.before), self.submitted.group(group).fences[-1])

    def share_left(self) -> float:
        """Share of the load's bytes that have not arrived on the device yet, from 0 to 1."""
        if self.submitted is None:
            return 1.0
        return sum(self.submitted.bytes_left()) / self.submitted.num_bytes

    def seconds_left(self, load_s: float, step_s: float) -> float:
        """Seconds until a step of duration `step_s` can begin and never wait for the load, because each group of layers
        then arrives before the step reaches that group. Infinite if the load was not submitted to the device
        completely, or has failed.

        `load_s` is the duration of the load on an idle link.
        """
        if self.submitted is None:
            return math.inf
        byte_s, num_groups = load_s / self.submitted.num_bytes, len(self.submitted.groups)
        parts = self.submitted.bytes_left()
        left, soonest = sum(parts[:-num_groups]), 0.0
        for index, group_left in enumerate(parts[-num_groups:]):
            left += group_left
            if left:
                soonest = max(soonest, byte_s * left - step_s * index / num_groups)
        # Read after the polls: a slice may have failed just before them.
        return math.inf if any(fence.failure is not None for fence in self.submitted.fences) else soonest

    def has_failed(self) -> bool:
        """Whether a part of the load has failed and the failure was not returned as an event yet."""
        if self.reported or self.submitted is None:  # rule: load-failure-is-reported-once
            return False
        # rule: load-fails-with-any-of-its-slices
        return any(fence.poll() and fence.failure is not None for fence in self.submitted.fences)


@dataclass(frozen=True, slots=True)
class SettledFence:
    """A fence that is done when every store and load up to job `tick` has settled. Only the host can wait for it,
    because it is not recorded on a device stream.
    """

    tick: int
    settled: Mark
    stream: str = "offload"
    failure: BaseException | None = None

    def poll(self) -> bool:
        """Whether the fence is done. Never blocks."""
        return self.settled.read() >= self.tick  # rule: settled-fence-is-done-with-its-job


class OffloadConnector:
    """The scheduler's view of the tiers, and the engine thread's record of all transfers in flight.

    pools       pools of device blocks; their blocks are released only when the transfers that use them have settled
    states      layout of the model's recurrent states; None if the model has none
    notify      function that the worker's thread calls when there is something to `poll`
    self_check  share of the blocks in host memory that get a checksum
    to_device   limits of copies to the device; None: those of `pacing.TO_DEVICE`
    write_policies   write policy of each persistent tier, by its name (see `OffloadConfig`); without one: `"all"`
    """

    def __init__(
        self,
        *,
        device: Device,
        pools: Sequence[FencedPool],
        memory: BlockMemory,
        tiers: TierStack,
        costs: CostModel,
        metrics: Metrics,
        load_deadline_s: float,
        states: StateLayout | None = None,
        notify: Callable[[], None] = lambda: None,
        self_check: float = 0.0,
        to_device: pacing.Pace | None = None,
        write_policies: Mapping[str, str] | None = None,
    ) -> None:
        self.tiers = tiers
        self._pools = pools
        self._costs = costs
        self._deadline_s = load_deadline_s
        self._clock = device.now
        self._sleep = device.sleep
        self._layout = memory.layout
        self._segment_bytes = device.segment_bytes
        self._loads: dict[int, _Load] = {}  # by job id
        self._settled = Mark("settled", tracer=device.tracer, wake=notify)
        self._waits = TierWaits(tiers, costs, metrics)
        self._last_job = self._num_sent = 0
        self._failed = False
        self._commands: Channel[Command] = Channel("commands", tracer=device.tracer)
        self._events: Channel[WorkerEvent] = Channel("events", tracer=device.tracer, wake=notify)
        context = TransferContext(
            device=device,
            memory=memory,
            tiers=tiers,
            states=states,
            costs=costs,
            checksums=Checksums(tiers.host, share=self_check, device=device, metrics=metrics),
            log=TransferLog(metrics, clock=device.now),
            load_deadline_s=load_deadline_s,
            to_device=to_device or pacing.TO_DEVICE,
            report=self._events.put,
            write_policies=write_policies or {},
        )
        self._switches = context.switches
        self._worker = OffloadWorker(context, commands=self._commands, settled=self._settled)
        self._choice = LoadChoice(context, self._waits, lambda: self._worker.num_reads)
        self._thread = device.thread("offload", self._worker.turn)
        self._thread.wake()

    def sizes(self) -> dict[str, int]:
        """Number of objects that are kept for transfers, by kind; all 0 when no transfer is in flight."""
        kept = {"commands": len(self._commands), "events": len(self._events), "loads": len(self._loads)}
        return kept | self._worker.sizes()

    # ------------------------------------------------------------------ queries of the scheduler

    def locate(self, keys: Sequence[Key]) -> list[str]:
        """The name of a tier that holds each key, up to the first key that no tier holds."""
        return self.tiers.locate(keys)

    def worth_loading(self, sources: Sequence[str], *, num_blocks: int | None = None, num_partial: int = 0) -> bool:
        """See `LoadChoice.worth_loading`."""
        return self._choice.worth_loading(sources, num_blocks=num_blocks, num_partial=num_partial)

    def head(self, sources: Sequence[str], *, num_partial: int = 0) -> int:
        """See `LoadChoice.head`."""
        return self._choice.head(sources, num_partial=num_partial)

    def find_patience(self, num_blocks: int) -> float:
        """Seconds that a request may wait for the answer whether shared tiers hold `num_blocks` blocks that no tier is
        known to hold. 0: it does not ask, because no tier is shared, or because computing the blocks is fast.
        """
        return min(self._waits.find_patience(num_blocks), self._deadline_s)

    # ------------------------------------------------------------------ submission: never blocks

    def submit(self, plans: Sequence[TransferPlan]) -> None:
        """Submit plans to the worker. The plans' device blocks must stay in use until `transfers_fence()` is done;
        otherwise a transfer could read or write a block that has a new owner (hazards H2, H10).
        """
        if not plans:
            return
        jobs = []
        for plan in plans:
            self._last_job += 1
            if isinstance(plan, LoadPlan):
                self._loads[self._last_job] = _Load(plan)
            elif isinstance(plan, PromotePlan | FindPlan):
                self._waits.begin(plan, self._clock())
            jobs.append((self._last_job, plan))
        self._send(SubmitPlans(tuple(jobs), self._switches.generation))

    @property
    def settled(self) -> int:
        """How many plans, in the order of their submission, use no device block any more. Does not count a plan before
        all earlier ones count.
        """
        return self._settled.read()

    def transfers_fence(self) -> Fence | None:
        """A fence that is done when all submitted stores and loads have settled; None if all have settled already."""
        # rule: release-waits-for-the-last-submitted-transfer
        return SettledFence(self._last_job, self._settled) if self._settled.read() < self._last_job else None

    def gates(self, requests: Iterable[tuple[RequestId, int]]) -> LayerGates:
        """The fences that each layer of a step waits for: the fences of the loads for the step's requests (hazard H5).

        requests   id and epoch of each request that takes part in the step. Requests whose earlier step has waited for
                   their loads may be left out
        """
        if not self._loads:
            return LayerGates()
        members = set(requests)
        loads = [  # rule: loads-of-a-step
            load
            for load in self._loads.values()
            if load.submitted and (load.plan.request_id, load.plan.epoch) in members
        ]
        if not loads:  # rule: step-waits-for-its-own-loads
            return LayerGates()
        group = layers_per_group(self._layout, self._segment_bytes)
        by_group = [
            merge_fences(fence for load in loads for fence in load.gates(index))
            for index in range(-(-self._layout.num_layers // group))
        ]
        return LayerGates(tuple(by_group[layer // group] for layer in range(self._layout.num_layers)))

    def seconds_left(self, request_id: RequestId, epoch: int, *, step_s: float) -> float:
        """Seconds until a step of duration `step_s` can begin and never wait for the request's loads. Infinite if a
        load was not submitted to the device completely, or has failed. Never blocks.
        """
        ahead_s = soonest_s = 0.0
        # The worker submits loads to the device in the order of this dictionary, but prefetches last.
        for load in self._loads.values():
            load_s = self._costs.seconds_from_host(len(load.plan.keys), num_partial=load.plan.num_partial)
            if (load.plan.request_id, load.plan.epoch) == (request_id, epoch):
                left_s = load.seconds_left(load_s, step_s)
                soonest_s = max(soonest_s, left_s and ahead_s + left_s)
            elif not load.plan.prefetch:
                ahead_s += load_s * load.share_left()
        return soonest_s

    # ------------------------------------------------------------------ completion: never blocks

    @property
    def has_work(self) -> bool:
        """Whether any transfer is in flight, including writes to persistent tiers, or an event was not polled yet."""
        idle = self._worker.idle_after == self._num_sent
        return not idle or len(self._events) > 0 or any(pool.is_settling for pool in self._pools) or bool(self._loads)

    @property
    def has_waiters(self) -> bool:
        """Whether any request waits for a transfer."""
        return bool(self._waits or self._loads)

    def poll(self) -> list[TransferEvent]:
        """Apply the worker's events, and release the device blocks whose transfers have settled. Returns the events
        that the scheduler must handle. Raises the exception that ended the worker.
        """
        events: list[TransferEvent] = []
        # rule: settled-is-read-before-the-events
        settled = self._settled.read()  # before the events: all events of jobs up to this id are in the channel already
        while (event := self._events.take()) is not None:  # rule: transfer-events-are-taken
            if isinstance(event, LoadSubmitted):  # not `match`, which takes twice as long and would run in every step
                load = self._loads[event.job_id]
                load.submitted = event
                events.append(LoadReady(load.plan.request_id, load.plan.epoch))  # rule: ready-load-becomes-an-event
            elif isinstance(event, LoadMissed):
                load = self._loads[event.job_id]
                if not load.reported:  # rule: load-failure-is-not-reported-again-at-the-end
                    load.reported = True
                    events.append(LoadFailed(load.plan.request_id, load.plan.epoch, event.reason))
            elif isinstance(event, Promoted):
                self._waits.end(event, self._clock())
                events.append(event)
            elif isinstance(event, StoreAgain):
                events.append(event)
            else:
                self._failed = True
                raise event.error
        while self._loads and (job_id := next(iter(self._loads))) <= settled:
            del self._loads[job_id]
        for pool in self._pools:
            pool.settle()  # rule: settled-blocks-are-released
        return events

    def failed_loads(self) -> list[TransferEvent]:
        """The loads that have failed according to their fences, although the worker has not reported them yet. Each
        failure is returned once.

        Call it at the end of each step that waited for loads: if one of these loads has failed, the results of the step
        must not be used.
        """
        events: list[TransferEvent] = []
        for load in self._loads.values():
            if load.has_failed():  # rule: load-failure-is-known-with-its-step
                load.reported = True
                events.append(LoadFailed(load.plan.request_id, load.plan.epoch, "load_failed"))
        return events

    # ------------------------------------------------------------------ resets and shutdown

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended the worker's thread, and so will end the engine."""
        return self._thread.failure

    @property
    def tier_faults(self) -> list[str]:
        """Why the last write to a tier failed, and which tiers are turned down. The engine serves nevertheless."""
        return self._worker.faults + [f"{name}: turned down, its loads lost time" for name in self._waits.turned_down]

    @property
    def num_forgotten(self) -> int:
        """How many calls of `forget_all` have reached the tiers."""
        return self._worker.forgotten

    @property
    def has_forgotten(self) -> bool:
        """Whether every `forget_all` has reached the tiers. Also True if the worker's thread has failed."""
        # rule: reset-waits-for-the-tiers
        return self._thread.failure is not None or self._worker.forgotten == self._switches.generation

    def forget_all(self, tiers: tuple[str, ...] | None = None) -> dict[str, int]:
        """Make every block in `tiers` unreachable (hazard H8), also those that transfers in flight bring: plans
        submitted after this call find none of the blocks. None: in all tiers. Returns a dictionary that has the number
        of dropped blocks by tier once `has_forgotten` is True.
        """
        self._switches.generation += 1  # rule: reset-begins-a-generation
        command = Forget(tiers=tiers)
        self._send(command)
        return command.dropped

    def forget(self, keys: Iterable[Key], tiers: tuple[str, ...] | None = None) -> dict[str, int]:
        """Make these blocks unreachable in `tiers` (None: in all tiers) for later requests. They may be stored again.
        Returns a dictionary that has the number of dropped blocks by tier once the worker has dropped them.
        """
        command = Forget(tuple(dict.fromkeys(keys)), tiers)
        self._send(command)
        return command.dropped

    def prefetch(self, keys: Sequence[Key]) -> None:
        """Read these blocks from persistent tiers into host memory, at most half of it, for requests to come."""
        self.submit([PromotePlan(PREFETCH, 0, tuple(keys[: self.tiers.host.pool.size // 2]))])

    def write_rest(self) -> None:
        """Write the blocks in host memory that no request has reused, too, to the persistent tiers."""
        self._send(WriteRest(self._switches.generation))

    def flush(self, *, timeout_s: float) -> bool:
        """Write all blocks in host memory to the persistent tiers, and block until every transfer has ended. Any thread
        may call it after the engine thread has ended. Returns False after `timeout_s`, or if the worker has failed.
        Transfers that have not begun by then are dropped, which loses only cached blocks.
        """
        self.write_rest()
        deadline = self._clock() + timeout_s
        while self.has_work:
            if self._clock() >= deadline or self._failed:
                self._switches.abandoned = True
                self._thread.wake()
                return False
            self.poll()
            self._sleep(_FLUSH_POLL_S)
        return True

    def close(self) -> None:
        """Handle transfers that ended since the last poll, and close the tiers. Call it after the device's streams and
        threads have ended. Idempotent.
        """
        try:
            self._switches.abandoned = True  # the streams have ended, so no transfer may begin
            if self._thread.failure is None:
                self._worker.turn()
                while len(self._commands):
                    self._worker.turn()
            self.poll()
        finally:
            self.tiers.close()

    def _send(self, command: Command) -> None:
        self._num_sent += 1
        self._commands.put(command)
        self._thread.wake()
