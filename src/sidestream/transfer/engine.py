"""The transfer engine as the engine thread sees it: hands plans over, hears what became of them, knows until when
blocks are in use.

All the rest happens on the mover's thread. Submission and `poll` cost the engine thread a few microseconds a plan,
however many blocks it has; neither ever waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from sidestream.device.base import Device
from sidestream.device.channel import Channel, Mark
from sidestream.kv.pool import FencedPool, merge_fences
from sidestream.metrics import Metrics
from sidestream.tiers.base import PersistentTier
from sidestream.tiers.host import HostTier
from sidestream.transfer.copy import BlockMemory
from sidestream.transfer.costs import CostModel
from sidestream.transfer.messages import Forget, LoadMissed, LoadSubmitted, News, Orders, Promoted, StoreAgain
from sidestream.transfer.mover import Mover, layers_per_group
from sidestream.types import BatchPlan, Fence, Key, LayerGates, LoadPlan, PromotePlan, RequestId, TransferPlan

# How often a flush looks whether the transfers have ended.
_FLUSH_POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class LoadReady:
    """A load into the device is on its way, with fences for all of it: a step may be gated by them."""

    request_id: RequestId
    epoch: int


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """A load into the device failed, or what it was to copy was `gone` when its order came: its blocks must not be
    used.
    """

    request_id: RequestId
    epoch: int
    gone: bool = False


TransferEvent = Promoted | LoadReady | LoadFailed | StoreAgain


@dataclass(slots=True, eq=False)
class _Load:
    """A load that has not ended. Single writer: the engine thread.

    submitted   its fences, once there are fences for all of it
    told        that it failed
    """

    plan: LoadPlan
    submitted: LoadSubmitted | None = None
    told: bool = False

    def gates(self, group: int) -> tuple[Fence, ...]:
        """What a layer of the group waits for."""
        assert self.submitted is not None
        return (*(piece.fences[-1] for piece in self.submitted.before), self.submitted.groups[group].fences[-1])

    def share_left(self) -> float:
        """How much of it is still on its way, from 0 to 1."""
        if self.submitted is None:
            return 1.0
        parts = (*self.submitted.before, *self.submitted.groups)
        return sum(part.bytes_left() for part in parts) / self.submitted.num_bytes

    def seconds_left(self, load_s: float, step_s: float) -> float:
        """How soon a step of `step_s` may begin that never waits for it: each group of layers is there when the step
        comes to it.

        `load_s`: what all of it takes, with nothing before it. Infinite as long as there are no fences for all of it,
        and if it failed.
        """
        if self.submitted is None:
            return math.inf
        if any(fence.failure is not None for fence in self.submitted.fences):
            return math.inf
        groups, byte_s = self.submitted.groups, load_s / self.submitted.num_bytes
        left = sum(piece.bytes_left() for piece in self.submitted.before)
        soonest = 0.0
        for index, group in enumerate(groups):
            left += group.bytes_left()
            if left:
                soonest = max(soonest, byte_s * left - step_s * index / len(groups))
        return soonest

    def has_failed(self) -> bool:
        """Whether a part of it is done and failed, which nobody was told."""
        if self.told or self.submitted is None:
            return False
        return any(fence.poll() and fence.failure is not None for fence in self.submitted.fences)


@dataclass(frozen=True, slots=True)
class OrderFence:
    """Done when no store or load up to order `tick` is on its way. Only the host sees it: no stream can wait for it."""

    tick: int
    settled: Mark
    stream: str = "mover"
    failure: BaseException | None = None

    def poll(self) -> bool:
        """Whether it is done. Never blocks."""
        return self.settled.read() >= self.tick


class TransferEngine:
    """The engine thread's end of every transfer on its way.

    notify   called by the mover's thread when there is something to `poll`
    """

    def __init__(
        self,
        *,
        device: Device,
        blocks: FencedPool,
        memory: BlockMemory,
        host: HostTier,
        disk: PersistentTier | None,
        costs: CostModel,
        metrics: Metrics,
        load_deadline_s: float,
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        self._blocks = blocks
        self._host = host
        self._disk = disk
        self._costs = costs
        self._deadline_s = load_deadline_s
        self._clock = device.now
        self._sleep = device.sleep
        self._layout = memory.layout
        self._segment_bytes = device.segment_bytes
        self._loads: dict[int, _Load] = {}
        self._settled = Mark("settled", tracer=device.tracer, wake=notify)
        self._num_promotions = 0
        self._number = self._sent = 0
        self._generation = 0
        self._failed = False
        self._orders: Channel[Orders | Forget] = Channel("orders", tracer=device.tracer)
        self._news: Channel[News] = Channel("news", tracer=device.tracer, wake=notify)
        self._mover = Mover(
            device=device,
            memory=memory,
            host=host,
            disk=disk,
            costs=costs,
            metrics=metrics,
            load_deadline_s=load_deadline_s,
            orders=self._orders,
            news=self._news,
            settled=self._settled,
        )
        self._thread = device.thread("mover", self._mover.turn)
        self._thread.wake()

    # ------------------------------------------------------------------ what the scheduler asks

    def locate(self, keys: Sequence[Key]) -> list[Literal["host", "disk"]]:
        """Where the longest run of leading `keys` rests, as far as this thread can see: an order may come too late, and
        is a miss then.
        """
        sources: list[Literal["host", "disk"]] = ["host"] * len(
            self._host.pool.match(keys)
        )  # mostly all of it, and faster
        for key in keys[len(sources) :]:
            if self._host.pool.get(key) is not None:
                sources.append("host")
            elif self._disk is not None and key in self._disk.index:
                sources.append("disk")
            else:
                break
        return sources

    def worth_loading(self, sources: Sequence[Literal["host", "disk"]]) -> bool:
        """Whether loading is expected to take less time than computing, and less than the deadline."""
        queued = self._mover.num_reads * self._layout.block_bytes
        on_disk = sources.count("disk")
        seconds = self._costs.load_seconds(
            host_blocks=len(sources) - on_disk, disk_blocks=on_disk, queued_disk_bytes=queued
        )
        return seconds < min(self._costs.compute_seconds(len(sources)), self._deadline_s)

    # ------------------------------------------------------------------ submission: never blocks

    def submit(self, plans: Sequence[TransferPlan]) -> None:
        """Hand plans over. Who gives their device blocks up meanwhile must do so until `uses()` is done (H2, H10)."""
        if not plans:
            return
        numbered = []
        for plan in plans:
            self._number += 1
            if isinstance(plan, LoadPlan):
                self._loads[self._number] = _Load(plan)
            elif isinstance(plan, PromotePlan):
                self._num_promotions += 1
            numbered.append((self._number, plan))
        self._tell(Orders(tuple(numbered), self._generation))

    def uses(self) -> Fence | None:
        """Done when everything ordered so far has let go of its device blocks; None: it has."""
        return OrderFence(self._number, self._settled) if self._settled.read() < self._number else None

    def gates(self, batch: BatchPlan) -> LayerGates:
        """What a step of `batch` must wait for, layer by layer: only loads of its own requests (H5)."""
        if not self._loads:
            return LayerGates()
        members: set[tuple[RequestId, int]] = set()
        for row in reversed(batch.rows):
            if row.tokens is None:
                break  # a row that decodes has had a step that waited, and runs behind it
            members.add((row.request_id, row.epoch))
        loads = [
            load
            for load in self._loads.values()
            if load.submitted and (load.plan.request_id, load.plan.epoch) in members
        ]
        if not loads:
            return LayerGates()
        group = layers_per_group(self._layout, self._segment_bytes)
        by_group = [
            merge_fences(fence for load in loads for fence in load.gates(index))
            for index in range(-(-self._layout.num_layers // group))
        ]
        return LayerGates(tuple(by_group[layer // group] for layer in range(self._layout.num_layers)))

    def seconds_left(self, request_id: RequestId, epoch: int, *, step_s: float) -> float:
        """How soon a step of `step_s` may begin that does not wait for the request's loads; infinite when nobody knows.
        Never blocks.
        """
        ahead_s = soonest_s = 0.0
        for load in self._loads.values():  # in the order in which the device gets them, but for prefetches
            load_s = self._costs.load_seconds(host_blocks=len(load.plan.keys), disk_blocks=0)
            if (load.plan.request_id, load.plan.epoch) == (request_id, epoch):
                left_s = load.seconds_left(load_s, step_s)
                soonest_s = max(soonest_s, left_s and ahead_s + left_s)
            elif not load.plan.prefetch:
                ahead_s += load_s * load.share_left()
        return soonest_s

    # ------------------------------------------------------------------ completion: never blocks

    @property
    def busy(self) -> bool:
        """Whether any transfer is on its way, writes to disk included, or there is news that nobody polled."""
        return (
            self._mover.quiet_at != self._sent or len(self._news) > 0 or self._blocks.is_settling or bool(self._loads)
        )

    @property
    def awaited(self) -> bool:
        """Whether a request waits for a transfer."""
        return bool(self._num_promotions or self._loads)

    def poll(self) -> list[TransferEvent]:
        """Take in what the mover says: let blocks go, and say which requests' waits are over. Raises what ended the
        mover.
        """
        events: list[TransferEvent] = []
        settled = self._settled.read()  # before the news: of what has settled by now, all news is there
        while (news := self._news.take()) is not None:
            if isinstance(news, LoadSubmitted):  # a `match` takes twice as long, in every step
                load = self._loads[news.number]
                load.submitted = news
                events.append(LoadReady(load.plan.request_id, load.plan.epoch))
            elif isinstance(news, LoadMissed):
                load = self._loads[news.number]
                if not load.told:
                    load.told = True
                    events.append(LoadFailed(load.plan.request_id, load.plan.epoch, news.gone))
            elif isinstance(news, Promoted):
                self._num_promotions -= 1
                events.append(news)
            elif isinstance(news, StoreAgain):
                events.append(news)
            else:
                self._failed = True
                raise news.error
        while self._loads and (number := next(iter(self._loads))) <= settled:
            del self._loads[number]
        self._blocks.settle()
        return events

    def failed_loads(self) -> list[TransferEvent]:
        """Loads that have failed by their own fences, though the mover has not said so yet; each is told once.

        For whoever has seen the end of a step that was gated by them: what it computed must not be believed.
        """
        events: list[TransferEvent] = []
        for load in self._loads.values():
            if load.has_failed():
                load.told = True
                events.append(LoadFailed(load.plan.request_id, load.plan.epoch))
        return events

    # ------------------------------------------------------------------ the rest

    @property
    def has_forgotten(self) -> bool:
        """Whether what `forget_all` made unreachable is out of the tiers' ledgers by now."""
        return self._thread.failure is not None or self._mover.num_forgotten == self._generation

    def forget_all(self) -> None:
        """Make everything in the host and disk tiers unreachable at once (H8): whatever is ordered from here on finds
        nothing of before.

        Transfers on their way end by their fences, and nothing that they moved becomes findable.
        """
        self._generation += 1
        self._mover.generation = self._generation
        self._tell(Forget())

    def forget(self, keys: Iterable[Key]) -> None:
        """Make these blocks unreachable in the host and disk tiers: for requests that come from here on. They may be
        stored anew.
        """
        self._tell(Forget(frozenset(keys)))

    def flush(self, *, timeout_s: float) -> bool:
        """Let what is on its way end, writes to disk included. Blocks; any thread, once the engine thread has ended.

        False when `timeout_s` passed first: then what has not begun never will, which loses only cache.
        """
        deadline = self._clock() + timeout_s
        while self.busy:
            if self._clock() >= deadline or self._failed:
                self._mover.abandoned = True
                self._thread.wake()
                return False
            self.poll()
            self._sleep(_FLUSH_POLL_S)
        return True

    def close(self) -> None:
        """Take in what ended since the last poll and let go of the disk. Only once streams and threads have ended.
        Idempotent.
        """
        try:
            self._mover.abandoned = True  # nothing new begins: there is no stream for it
            if self._thread.failure is None:
                self._mover.turn()
                while len(self._orders):
                    self._mover.turn()
            self.poll()
        finally:
            if self._disk is not None:
                self._disk.close()

    def _tell(self, message: Orders | Forget) -> None:
        self._sent += 1
        self._orders.put(message)
        self._thread.wake()
