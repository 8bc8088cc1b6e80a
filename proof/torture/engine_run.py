"""One engine of a schedule, with its simulated devices, its disk tiers and its other ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from proof.ranks import RankProposer, RankToy, SimRanks
from proof.torture.contents import Contents
from proof.torture.events import EventReplay
from proof.torture.judge import wrong_when_published
from proof.torture.losses import EvictionOrder, lost_hits
from proof.torture.neighbour import Surroundings
from proof.torture.oracle import SALT, state_bytes, toy_of
from proof.torture.script import Scratch, Script, ScriptedDevice, ScriptedModel, ScriptedTier
from proof.torture.workload import LOAD_DEADLINE_S, Workload
from proof.toy import ToyDraftHead, ToyProposer
from proof.toy_grammar import ToyGrammars
from sidestream.config import EngineConfig, KVEventsConfig, SpeculativeConfig
from sidestream.engine import Engine, build_engine
from sidestream.engine.build_plan import all_layers_bytes, block_layout
from sidestream.ranks.fences import local_fence
from sidestream.runner.step_inputs import GraphKey
from sidestream.schedule.allocation import Reuse
from sidestream.schedule.request import Request
from sidestream_kv.config import WRITE_POLICIES, OffloadConfig
from sidestream_kv.offload.loads import layers_per_group
from sidestream_kv.offload.tiers.base import PersistentTier
from sidestream_kv.offload.tiers.shared_pool import SharedPool
from sidestream_kv.types import HOST as HOST_MEMORY
from sidestream_kv.types import BlockId, Fence
from sidestream_order.checker import Checker
from sidestream_order.guard import Guard
from sidestream_order.sim import Policy
from sidestream_order.sim.policies import HOST
from sidestream_order.trace import Recorder, TraceLine

# Steps whose KV events are published together. Within one step, few blocks are evicted, stored and evicted again.
_EVENTS_EVERY = 8


class Life:
    """One engine with its devices, from start to close or crash. A restart in a schedule creates another engine.

    checker   finds races and lease errors in the device's work
    recorder  receives the device's events, and forwards them to the checker
    head      proposes drafts
    disk      the disk tier of rank 0; None: there is none
    disks     the disk tiers of all ranks
    others    the ranks other than 0; None: there are none
    events    what a router knows from the engine's KV events
    order     the order of evictions
    lost      sentences about blocks that requests could have reused
    """

    def __init__(
        self,
        workload: Workload,
        policy: Policy,
        script: Script,
        contents: Contents,
        *,
        weights: int,
        lines: list[TraceLine] | None,
        surroundings: Surroundings,
    ) -> None:
        self.checker = Checker(poison=self._poison)
        self.recorder = Recorder(
            self.checker,
            self._actor,
            lines,
            lambda what, memory, where, key, partial: wrong_when_published(
                self.device, contents, what, memory, where, key, partial
            ),
        )
        self.order = EvictionOrder(self.recorder)
        self.surroundings = surroundings
        self._workload = workload
        self.lost: list[str] = []
        self.device = ScriptedDevice(policy, script, tracer=self.recorder, guard=Guard(self.checker))
        self.model = ScriptedModel(toy_of(workload), self.device)
        if workload.layer_groups:
            self.device.segment_bytes = self.model.layout.block_bytes // 2 if workload.large_groups else 1
        self.model.weights = weights
        self.head = ToyDraftHead(toy_of(workload), width=max(1, workload.drafts))
        self.disk: ScriptedTier | None = None
        self.disks: list[ScriptedTier] = []
        self.others: SimRanks | None = None
        try:
            if workload.disk_blocks:
                self.disk = self._open_disk()
                self.disks.append(self.disk)
            if workload.ranks > 1:
                self.device.pin_s = workload.pin_s * workload.pin_lag
                self.others = self._start_ranks(workload)
            self.device.pin_s = workload.pin_s
            tiers: dict[str, PersistentTier] = {} if self.disk is None else {"disk": self.disk}
            if (store := surroundings.store_of(self.model, self.device)) is not None:
                tiers["redis"] = store
            with surroundings.host_of(self.model):
                self.engine: Engine = build_engine(
                    self.model if self.others is None else RankToy(self.model, self.others.groups[0]),
                    _config(workload, self.model),
                    device=self.device,
                    threaded=False,
                    ranks=None if self.others is None else self.others.ranks,
                    group=None if self.others is None else self.others.groups[0],
                    tiers=tiers or None,
                    proposer=self._proposer(workload),
                    grammars=ToyGrammars(workload.vocab),
                )
            surroundings.join(self.model, self.device, self.disk, lambda: self._open_disk(neighbour=True))
            self.events = EventReplay(self.engine, parts=contents.parts)
            self._publish_events = self._hold_events_back()
            self._watch_losses()
            if workload.layer_groups:  # rows may join a step long before their load ends
                self.engine.loop.times.lead_s = lambda: math.inf  # type: ignore[method-assign]
            if workload.captured:
                self._capture(workload)
        except BaseException:
            self.crash()
            raise

    def _open_disk(self, *, neighbour: bool = False) -> ScriptedTier:
        blocks, ranks = self._workload.disk_blocks, self._workload.ranks
        return scratch().open(self.model, self.device, num_blocks=blocks, ranks=ranks, neighbour=neighbour)

    def _start_ranks(self, workload: Workload) -> SimRanks:
        """Start the ranks other than 0, each with its own toy model and disk tier."""
        ranks, fails = SimRanks(self.device, workload.ranks), "failing_step" in workload.features
        for rank in range(1, workload.ranks):
            if workload.disk_blocks:
                self.disks.append(
                    scratch().open(
                        self.model, self.device, num_blocks=workload.disk_blocks, rank=rank, ranks=workload.ranks
                    )
                )
            ranks.start(
                rank,
                RankToy(ScriptedModel(toy_of(workload), self.device if fails else None), ranks.groups[rank]),
                _config(workload, self.model),
                tiers={"disk": self.disks[-1]} if workload.disk_blocks else None,
                proposer=RankProposer(self._proposer(workload), self.model.vocab_size),
            )
        return ranks

    def _proposer(self, workload: Workload) -> ToyProposer:
        return ToyProposer(self.head, model=self.model if workload.leaves_hidden else None)

    def _capture(self, workload: Workload) -> None:
        """Capture one batch shape and, if the workload has drafts, a shape with one draft and a shape without drafts.
        Batches of other shapes run eagerly.
        """
        parts, layout = self.engine.parts, self.engine.parts.layout
        has_states = workload.states > 0
        few = (
            [
                GraphKey(workload.max_running, 0, workload.drafts, total_drafts=1, has_states=has_states),
                GraphKey(workload.max_running, has_states=has_states),
            ]
            if workload.drafts
            else []
        )
        for executor in (parts.executor, *(() if self.others is None else self.others.executors)):
            executor.capture(
                [GraphKey(workload.max_running, workload.chunk_tokens, workload.drafts, has_states=has_states), *few],
                gate_layers=0 if parts.transfers is None else layers_per_group(layout, self.device.segment_bytes),
            )

    def check_events(self) -> None:
        """Publish all KV events, and compare them with the findable keys. Call it between two steps."""
        self._publish_events()
        self.events.compare()

    def _hold_events_back(self) -> Callable[[], None]:
        """Publish the events of several steps together, and compare them each time. Returns the function that publishes
        them at once.
        """
        self.engine.on_kv_events(lambda sequence, batch: self.events.compare())
        kv_events, steps = self.engine.parts.kv_events, itertools.count(1)
        assert kv_events is not None
        publish = kv_events.flush

        def flush() -> None:
            if next(steps) % _EVENTS_EVERY == 0:
                publish()

        kv_events.flush = flush  # type: ignore[method-assign]
        return publish

    def _watch_losses(self) -> None:
        """Follow the uses of all blocks, and check each admission."""
        parts = self.engine.parts
        shared = self._workload
        host = None if parts.tiers is None or shared.shared_memory else parts.tiers.host.pool
        disk = None if self.disk is None or shared.shared_disk else self.disk.index
        for pool in (parts.blocks, parts.states, host, disk):
            if pool is not None:
                self.order.watch(pool)
        allocator = parts.scheduler._allocator
        start = allocator.start

        def judged(request: Request, reuse: Reuse) -> tuple[Sequence[BlockId], tuple[Fence, ...]]:
            self.lost += lost_hits(parts, request, reuse)
            return start(request, reuse)

        allocator.start = judged  # type: ignore[method-assign]

    def crash(self) -> None:
        """Stop like a killed process, and the neighbour with it. Idempotent; does nothing after a close."""
        self.device.kill()
        self.surroundings.leave()
        for disk in self.disks:
            disk.crash()
        if hasattr(self, "engine") and self._workload.shared_memory:  # as the cache process does for it
            tiers = self.engine.parts.tiers
            assert tiers is not None and isinstance(tiers.host.pool, SharedPool)
            tiers.host.pool.close()

    def look_again(self) -> None:
        """Take in what the neighbour has done to the disk. Call it while both rest."""
        if self.disk is not None and self._workload.shared_disk:
            self.disk.inner.refresh()

    @property
    def is_lost(self) -> bool:
        """Whether the engine lost its device or a rank, or a step has failed on a rank, so that the engine fails."""
        return self.device.is_lost or (self.others is not None and (self.others.is_lost or self.device.step_failed))

    def _poison(self, memory: str, start: int, stop: int, after: Sequence[Fence]) -> None:
        if memory == HOST_MEMORY and self._workload.shared_memory:  # the neighbour may use it
            return
        self.device.poison(memory, start, stop, [local_fence(fence) for fence in after])  # the memory belongs to rank 0

    def _actor(self) -> str:
        return self.device.turns.current.name if hasattr(self, "device") else HOST


def _config(workload: Workload, model: ScriptedModel) -> EngineConfig:
    size = block_layout(model).block_bytes
    offload = (
        OffloadConfig(
            host=workload.slots * size * workload.ranks,
            load_deadline_s=LOAD_DEADLINE_S,
            write_policy=WRITE_POLICIES[workload.slots % 4 == 3],
            shared_memory=Path("cache") if workload.shared_memory else None,
        )
        if workload.slots
        else None
    )
    return EngineConfig(
        kv_memory=workload.blocks * all_layers_bytes(model) + state_bytes(model, workload.states),
        state_memory=state_bytes(model, workload.states) or None,
        block_tokens=model.layout.block_tokens,
        chunk_tokens=workload.chunk_tokens,
        token_budget=workload.chunk_tokens + workload.max_running,
        max_running=workload.max_running,
        asynchronous=workload.asynchronous,
        offload=offload,
        speculative=SpeculativeConfig(max_drafts=workload.drafts, adaptive=False) if workload.drafts else None,
        max_waiting=workload.waiting,
        salt=SALT,
        self_check=workload.self_check,
        kv_events=KVEventsConfig(),
    )


_scratches: list[Scratch] = []


def scratch() -> Scratch:
    """The directories for disk tiers of this process. A forked child gets its own."""
    if not _scratches or not _scratches[-1].is_ours:
        _scratches.append(Scratch())
    return _scratches[-1]
