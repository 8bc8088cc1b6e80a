"""Builds a running engine from a model and a config. Every check that can fail runs before the engine thread starts.

`build_plan.py` decides the sizes, `rank_parts.py` builds the parts that every rank has, `warm_up.py` makes a GPU ready.
This module adds the parts that only rank 0 has (scheduler, transfers, KV events), or makes the follower: the object
that carries out rank 0's messages on another rank.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence

from sidestream.config import NEUTRAL, EngineConfig, SamplingDefaults
from sidestream.engine.build_plan import BuildPlan, ServableModel, plan_build, sizes_for, tier_layout
from sidestream.engine.engine import Engine
from sidestream.engine.inbox import Inbox
from sidestream.engine.kv_events import KVEvents
from sidestream.engine.kv_sockets import KVEventSockets, warn_if_open
from sidestream.engine.parts import Parts
from sidestream.engine.rank_parts import RankParts, build_rank_parts
from sidestream.grammar import Grammars
from sidestream.models.compile_cache import use_compile_cache
from sidestream.ranks.follower import Follower
from sidestream.ranks.leader import Ranks, joint_device, joint_executor
from sidestream.ranks.messages import ToLeader, ToRank
from sidestream.schedule.limits import Limits
from sidestream.schedule.scheduler import Scheduler
from sidestream.schedule.spec_policy import SpecPolicy
from sidestream.speculate import GrammarProposer, Proposer
from sidestream_kv.device.base import Device
from sidestream_kv.device.choice import torch_device
from sidestream_kv.device.cpu import CpuDevice
from sidestream_kv.device.group import Group
from sidestream_kv.device.kinds import CPU, CUDA
from sidestream_kv.kv.eight_bit import EightBitLayout
from sidestream_kv.kv.key_log import DeviceKeyLog, KeyLog
from sidestream_kv.kv.keys import BlockKeys
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.kv.pool import FencedPool
from sidestream_kv.metrics import Metrics, Timeline
from sidestream_kv.offload import pacing
from sidestream_kv.offload.connector import OffloadConnector
from sidestream_kv.offload.loads import CostModel
from sidestream_kv.offload.tiers.base import PersistentTier
from sidestream_kv.offload.tiers.stack import BlockMemory, write_policies
from sidestream_kv.types import HOST, Tracer

logger = logging.getLogger(__name__)


def build_engine(
    model: ServableModel,
    config: EngineConfig,
    *,
    eos_ids: Sequence[int] = (),
    timeline: Timeline | None = None,
    tiers: Mapping[str, PersistentTier] | None = None,
    device: Device | None = None,
    tracer: Tracer | None = None,
    proposer: Proposer | None = None,
    defaults: SamplingDefaults = NEUTRAL,
    threaded: bool = True,
    ranks: Ranks | None = None,
    group: Group | None = None,
    grammars: Grammars | None = None,
    read_weights: Callable[[str], tuple[Callable[[], None], str]] | None = None,
    tell: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Engine:
    """Allocate the pools, open the tiers, warm the device up, start the engine. Raises ConfigError, after closing
    everything that it opened.

    The model's weights are on `torch_device(config.device)`, or on `device`.

    eos_ids   token ids that end an answer, in addition to the model's own: usually the tokenizer's
    tiers     open persistent tiers by name, fastest first, to use instead of the tiers that `config.offload` names. The
              engine closes them; if this function raises, the caller must close them
    device    a device to use instead of opening the device that `config.device` names; the engine closes it
    tracer    records which device work waits for which, for the order checker. Not used with a given `device`, which
              has its own tracer
    proposer  a proposer (of drafts) to use instead of the proposer that `config.speculative` names
    defaults  values of sampling options that requests leave out
    threaded  False: the engine has no thread, see `Engine`
    ranks     the other ranks, each with a follower of `build_follower`; `model` is rank 0's share
    group     collectives among the ranks; None: there is one rank
    grammars  compiles the forms of answers; None: structured outputs are refused
    read_weights  see `Parts`
    tell      progress callback: gets the current activity, its steps done, and its steps in total (0 and 0: unknown)
    """
    on_gpu = (torch_device(config.device) if device is None else device.torch_device).type == CUDA
    sizes_for(model, config, on_gpu=on_gpu)  # raises ConfigError for wrong sizes before anything is opened
    if on_gpu:
        use_compile_cache()
    with contextlib.ExitStack() as undo:
        metrics = Metrics()
        events = _kv_events(config, model, metrics)
        if events is not None:
            undo.callback(events.close)
        if device is None:
            device = _open_device(config, tier_layout(model, config), timeline, metrics, tracer)
            undo.callback(device.close)
        plan = plan_build(model, config, device, proposer=proposer, group=group)
        joint = device if ranks is None else joint_device(device, ranks)
        rank = build_rank_parts(plan, host=joint, tiers=tiers, undo=undo, tell=tell)
        parts = _build_parts(
            plan,
            rank,
            joint,
            ranks,
            metrics,
            events,
            eos_ids=eos_ids,
            defaults=defaults,
            timeline=timeline,
            grammars=grammars,
            read_weights=read_weights,
        )
        undo.pop_all()
    if ranks is not None:
        ranks.on_loss(lambda error: parts.inbox.put(lambda: _raise(error), anytime=True))
    return Engine(parts, threaded=threaded)


def _raise(error: BaseException) -> None:
    raise error


def build_follower(
    model: ServableModel,
    config: EngineConfig,
    *,
    device: Device,
    group: Group,
    take: Callable[[], ToRank | None],
    report: Callable[[ToLeader], None],
    tiers: Mapping[str, PersistentTier] | None = None,
    proposer: Proposer | None = None,
    tell: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Follower:
    """Build the follower of a rank other than 0, with the config that `build_engine` has on rank 0. Raises ConfigError,
    after closing everything that it opened.

    model    the rank's share of the model
    device   the rank's device; the caller closes it
    take     returns the next message of rank 0; None: there is none now
    report   sends a message to rank 0
    """
    plan = plan_build(model, config, device, proposer=proposer, group=group)
    with contextlib.ExitStack() as undo:
        rank = build_rank_parts(plan, host=device, tiers=tiers, undo=undo, tell=tell)
        undo.pop_all()
    return Follower(
        device=device,
        executor=rank.executor,
        memory=rank.memory,
        tiers=rank.tiers,
        take=take,
        report=report,
        adapters=model.adapters,
    )


def _build_parts(
    plan: BuildPlan,
    rank: RankParts,
    device: Device,
    ranks: Ranks | None,
    metrics: Metrics,
    events: KVEvents | None,
    *,
    eos_ids: Sequence[int],
    defaults: SamplingDefaults,
    timeline: Timeline | None,
    grammars: Grammars | None,
    read_weights: Callable[[str], tuple[Callable[[], None], str]] | None,
) -> Parts:
    """All parts of the engine: the parts of rank 0, and the parts that plan the work of every rank. `device`: the joint
    device of all ranks, or the device of the only rank.
    """
    for part, num_bytes in plan.bytes_by_part().items():
        metrics.set("kv_memory_bytes", num_bytes, part)
    metrics.set("kv_token_bytes", plan.layout.block_bytes / plan.layout.block_tokens)
    inbox, costs = Inbox(), CostModel(plan.tier_layout, clock=device.now)
    transfers = _build_transfers(plan, rank, device, costs, metrics, inbox)
    key_log = None if events is None else _log_keys(events, rank, plan)
    return Parts(
        device=device,
        scheduler=_build_scheduler(plan, rank, transfers, key_log),
        executor=rank.executor if ranks is None else joint_executor(rank.executor, ranks),
        blocks=rank.blocks,
        layout=plan.layout,
        eos_ids=tuple(sorted({*plan.model.eos_token_ids, *eos_ids})),
        defaults=defaults,
        metrics=metrics,
        bounds=plan.bounds,
        inbox=inbox,
        asynchronous=plan.config.asynchronous,
        watchdog_timeout_s=plan.config.watchdog_timeout_s,
        salt=plan.config.salt,
        transfers=transfers,
        tiers=rank.tiers,
        costs=costs,
        proposer="" if plan.proposer is None else plan.proposer.name,
        max_drafts=plan.max_drafts,
        timeline=timeline,
        states=rank.states,
        state_region=plan.region,
        ranks=ranks,
        kv_events=events,
        self_check=plan.config.self_check,
        grammars=grammars,
        adapters=plan.model.adapters,
        read_weights=read_weights,
    )


def _build_transfers(
    plan: BuildPlan, rank: RankParts, device: Device, costs: CostModel, metrics: Metrics, inbox: Inbox
) -> OffloadConnector | None:
    """The connector, which moves blocks between the device and the tiers; None: offload is off."""
    if rank.tiers is None or plan.config.offload is None:
        return None
    return OffloadConnector(
        device=device,
        pools=[rank.blocks] if rank.states is None else [rank.blocks, rank.states],
        memory=BlockMemory(rank.memory, plan.layout),
        tiers=rank.tiers,
        costs=costs,
        metrics=metrics,
        load_deadline_s=plan.config.offload.load_deadline_s,
        states=None if plan.region is None else plan.region.layout,
        notify=inbox.bell.ring,
        self_check=plan.config.self_check,
        write_policies=write_policies(plan.config.offload),
    )


def _build_scheduler(
    plan: BuildPlan, rank: RankParts, transfers: OffloadConnector | None, key_log: DeviceKeyLog | None
) -> Scheduler:
    model, config, sizes, speculative = plan.model, plan.config, plan.sizes, plan.config.speculative
    # rule: keys-of-the-served-model
    keys = BlockKeys(
        fingerprint=model.fingerprint, layout=plan.tier_layout, salt=config.salt, states=model.state_layout
    )
    return Scheduler(
        limits=Limits(
            model.layout.block_tokens,
            sizes.chunk_tokens,
            sizes.token_budget,
            prefix_cache=config.prefix_cache,
            tail_apart=sizes.separate_tail_chunk,
            target_gap_s=sizes.target_gap_s,
            state_interval=config.state_interval // model.layout.block_tokens,
            window=model.layout.window if plan.windows is None else 0,
            read_ahead_blocks=rank.tiers.host.num_slots // 4 if rank.tiers is not None and rank.tiers.persistent else 0,
        ),
        blocks=rank.blocks,
        slots=FencedPool("rows", sizes.max_running, tracer=plan.device.tracer),
        keys=keys,
        tiers=transfers,
        policy=None
        if speculative is None
        else SpecPolicy(
            plan.max_drafts,
            adaptive=speculative.adaptive,
            max_slowdown=speculative.max_draft_slowdown,
            forced_only=isinstance(plan.proposer, GrammarProposer),
        ),
        states=None if rank.states is None or plan.region is None else (rank.states, plan.region),
        windows=plan.windows,
        key_log=key_log,
    )


def _kv_events(config: EngineConfig, model: ServableModel, metrics: Metrics) -> KVEvents | None:
    """The publisher of KV events, with bound sockets; None: KV events are off."""
    if config.kv_events is None:
        return None
    block_tokens, sockets = model.layout.block_tokens, None
    if config.kv_events.endpoint is not None:
        sockets = KVEventSockets(config.kv_events)
        replay = "" if sockets.replay_endpoint is None else f", replays on {sockets.replay_endpoint}"
        logger.info("KV events on %s%s", sockets.endpoint, replay)
        warn_if_open(sockets)
    log = KeyLog(block_tokens=block_tokens)
    return KVEvents(config.kv_events, log=log, block_tokens=block_tokens, metrics=metrics, sockets=sockets)


def _log_keys(events: KVEvents, rank: RankParts, plan: BuildPlan) -> DeviceKeyLog:
    """Start to log the keys of the tiers, beginning with the keys that they already hold. Returns the log of the
    device's keys.

    Tiers of a model with recurrent states, or with pages, are not logged, because some of their keys identify parts of
    these, not blocks.
    """
    tiers = rank.tiers
    if tiers is not None and rank.states is None and plan.windows is None:
        tiers.host.pool.key_log = log = events.log.tier(HOST)
        log.stored(tuple(tiers.host.pool.keys_by_use()))  # of a memory that engines share
        for name, tier in tiers.persistent.items():
            tier.index.key_log = log = events.log.tier(name)
            log.stored(tuple(tier.index))
    return events.log.device


def _open_device(
    config: EngineConfig,
    layout: KVLayout | EightBitLayout,
    timeline: Timeline | None,
    metrics: Metrics,
    tracer: Tracer | None,
) -> Device:
    if torch_device(config.device).type == CPU:
        return CpuDevice(compute_threads=config.compute_threads, timeline=timeline, metrics=metrics, tracer=tracer)
    from sidestream_kv.device.cuda import CudaDevice

    with contextlib.ExitStack() as undo:
        device = CudaDevice(timeline=timeline, metrics=metrics, tracer=tracer)
        undo.callback(device.close)
        if isinstance(layout, EightBitLayout):
            device.warm_up(converts=layout.packed)
            streams = pacing.TO_HOST.streams + pacing.TO_DEVICE.streams
            least = max(pacing.TO_HOST.slice_bytes, pacing.TO_DEVICE.slice_bytes)
            device.make_stages(count=streams, num_bytes=max(least, layout.block_bytes))
        else:
            device.warm_up()
        undo.pop_all()
    return device
