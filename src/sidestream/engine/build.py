"""Builds a running engine from a model and a config. Every check that can fail is done before the engine thread starts.

On a GPU, this also launches every kernel once: a kernel's first launch waits for the device, which must not happen
while requests run.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from sidestream.attention.interface import AttentionBackend, AttentionSpec
from sidestream.attention.registry import select_backend
from sidestream.config import NEUTRAL, EngineConfig, EngineSizes, SamplingDefaults, parse_bytes
from sidestream.device.base import Device, Memory
from sidestream.device.choice import torch_device
from sidestream.device.cpu import CpuDevice
from sidestream.device.group import Group
from sidestream.device.kinds import CPU, CUDA
from sidestream.engine.capacity import MAX_BLOCKS, num_states, pool_bytes
from sidestream.engine.engine import Engine
from sidestream.engine.inbox import Inbox
from sidestream.engine.kv_events import KVEvents
from sidestream.engine.kv_sockets import KVEventSockets
from sidestream.engine.parts import Parts
from sidestream.errors import ConfigError, DeviceLost
from sidestream.kv.key_log import DeviceKeyLog, KeyLog
from sidestream.kv.keys import BlockKeys
from sidestream.kv.layout import KVLayout
from sidestream.kv.pool import FencedPool
from sidestream.kv.state_layout import RESERVED_STATES, StateLayout, StateRegion, blocks_per_state
from sidestream.metrics import Metrics, Timeline
from sidestream.models.compile_cache import use_compile_cache
from sidestream.offload.connector import OffloadConnector
from sidestream.offload.copy import BlockMemory
from sidestream.offload.costs import CostModel
from sidestream.offload.loads import layers_per_group
from sidestream.offload.tiers.base import PersistentTier, TierContext
from sidestream.offload.tiers.host import HostTier
from sidestream.offload.tiers.registry import open_tiers, share_of_rank
from sidestream.offload.tiers.stack import TierStack
from sidestream.ops.registry import select_ops
from sidestream.ranks.follower import Follower
from sidestream.ranks.leader import Ranks, joint_device, joint_executor
from sidestream.ranks.messages import ToLeader, ToRank
from sidestream.runner.executor import Executor
from sidestream.runner.forward import ForwardModel
from sidestream.runner.step_inputs import SHORT_TOKENS, GraphKey
from sidestream.schedule.limits import Limits
from sidestream.schedule.scheduler import Scheduler
from sidestream.schedule.spec_policy import SpecPolicy
from sidestream.schedule.validation import Bounds
from sidestream.speculate import NgramProposer, Proposer
from sidestream.types import HOST, Tracer

if TYPE_CHECKING:  # importing transformers takes seconds
    from sidestream.models.adapter import PagedModel
    from sidestream.models.mtp import MtpHead

logger = logging.getLogger(__name__)

# Smallest number of states with which a request can run: its own state, and a checkpoint that it makes or starts from.
_FEWEST_STATES = 2
_WARMING_UP = "warming up the GPU's kernels"


class ServableModel(ForwardModel, Protocol):
    """A model that an engine can serve: `sidestream.models.PagedModel`, or a toy."""

    @property
    def fingerprint(self) -> str:
        """Hash of everything that KV depends on, except tokens and layout."""
        ...

    @property
    def num_heads(self) -> int:
        """Number of query heads."""
        ...

    @property
    def max_model_len(self) -> int:
        """Length in tokens of the longest sequence that the model supports."""
        ...

    @property
    def needs_chunk_lengths(self) -> bool:
        """Whether the host must know the lengths of chunks, so that steps with chunks cannot be captured."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Token ids that end an answer."""
        ...


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
    tell: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Engine:
    """Allocate the pools, open the tiers, warm the device up, start the engine. Raises ConfigError, after closing
    everything that it opened.

    The model's weights are on `torch_device(config.device)`, or on `device`.

    eos_ids   token ids that end an answer, in addition to the model's own: usually the tokenizer's
    tiers     open persistent tiers by name, fastest first, instead of the tiers that `config.offload` asks for. The
              engine closes them; if this function raises, the caller must close them
    device    a device instead of the one that `config.device` names; the engine closes it
    tracer    records the events that ordering depends on. Not used with a given `device`, which has its own tracer
    proposer  a proposer instead of the one that `config.speculative` names
    defaults  default values of sampling options
    threaded  False: the engine has no thread, see `Engine`
    ranks     the other ranks, each with a follower of `build_follower`; `model` is rank 0's share
    group     the ranks' collectives
    tell      progress callback: gets the current activity, its steps done, and its steps in total (0 and 0: unknown)
    """
    on_gpu = (torch_device(config.device) if device is None else device.torch_device).type == CUDA
    sizes = config.sizes(CUDA if on_gpu else CPU)
    _check_sizes(model, config, sizes)
    if on_gpu:
        use_compile_cache()
    with contextlib.ExitStack() as undo:
        metrics = Metrics()
        events = _kv_events(config, model, metrics)
        if events is not None:
            undo.callback(events.close)
        if device is None:
            device = _open_device(config, timeline, metrics, tracer)
            undo.callback(device.close)
        plan = _plan_build(model, config, sizes, _proposer(config, proposer), device, on_gpu=on_gpu, group=group)
        joint = device if ranks is None else joint_device(device, ranks)
        stack = _open_tiers(plan, joint, tiers)
        if stack is not None and tiers is None:
            undo.callback(stack.close)
        memory, blocks, states = _allocate_pools(plan)
        for part, num_bytes in _bytes_by_part(plan).items():
            metrics.set("kv_memory_bytes", num_bytes, part)
        inbox = Inbox()
        costs = CostModel(model.layout, clock=device.now)
        transfers = None
        if stack is not None:
            kv = BlockMemory(memory, model.layout)
            transfers = _build_transfers(
                plan, joint, kv, [blocks, *([] if states is None else [states])], stack, costs, metrics, inbox
            )
        # rule: keys-of-the-served-model
        keys = BlockKeys(
            fingerprint=model.fingerprint, layout=model.layout, salt=config.salt, states=model.state_layout
        )
        key_log = None if events is None else _log_keys(events, stack, has_states=states is not None)
        scheduler = _build_scheduler(plan, blocks, keys, transfers, states, key_log)
        executor = _build_executor(plan, memory)
        if on_gpu:
            _make_ready(plan, executor, blocks, transfers is not None, tell)
        parts = Parts(
            device=joint,
            scheduler=scheduler,
            executor=executor if ranks is None else joint_executor(executor, ranks),
            blocks=blocks,
            layout=model.layout,
            eos_ids=tuple(sorted({*model.eos_token_ids, *eos_ids})),
            defaults=defaults,
            metrics=metrics,
            bounds=plan.bounds,
            inbox=inbox,
            asynchronous=config.asynchronous,
            salt=config.salt,
            transfers=transfers,
            tiers=stack,
            costs=costs,
            proposer="" if plan.proposer is None else plan.proposer.name,
            max_drafts=plan.max_drafts,
            timeline=timeline,
            states=states,
            state_region=plan.region,
            ranks=ranks,
            kv_events=events,
        )
        undo.pop_all()
    if ranks is not None:
        ranks.on_loss(lambda error: inbox.put(lambda: _raise(error), anytime=True))
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
    """A rank other than 0 of `build_engine`, with the same config: its pools have the same numbers of blocks, and it
    warms up in the same steps. Raises ConfigError; then nothing is left open.

    model    the rank's share of the model
    device   closed by the caller
    take     returns the next message of rank 0; None: there is none now
    report   sends a message to rank 0
    """
    on_gpu = device.torch_device.type == CUDA
    sizes = config.sizes(CUDA if on_gpu else CPU)
    _check_sizes(model, config, sizes)
    plan = _plan_build(model, config, sizes, _proposer(config, proposer), device, on_gpu=on_gpu, group=group)
    with contextlib.ExitStack() as undo:
        stack = _open_tiers(plan, device, tiers)
        if stack is not None and tiers is None:
            undo.callback(stack.close)
        memory, blocks, _ = _allocate_pools(plan)
        executor = _build_executor(plan, memory)
        if on_gpu:
            _make_ready(plan, executor, blocks, stack is not None, tell)
        undo.pop_all()
    return Follower(device=device, executor=executor, memory=memory, tiers=stack, take=take, report=report)


@dataclass(frozen=True, slots=True)
class _BuildPlan:
    """The sizes and choices that the engine's parts are built from.

    num_blocks   number of blocks of the device pool
    region       recurrent states, after the blocks; None: the model has no recurrent state
    group        the ranks that share the model; None: there is one
    """

    model: ServableModel
    config: EngineConfig
    sizes: EngineSizes
    device: Device
    on_gpu: bool
    proposer: Proposer | None
    max_drafts: int
    num_blocks: int
    region: StateRegion | None
    bounds: Bounds
    group: Group | None = None

    @property
    def max_len(self) -> int:
        """Largest number of tokens of a request."""
        return min(self.bounds.max_model_len, self.bounds.pool_tokens)


def _check_sizes(model: ServableModel, config: EngineConfig, sizes: EngineSizes) -> None:
    if sizes.kv_bytes is not None:
        _check_pool(sizes.kv_bytes, model.layout)
    if config.max_model_len is not None and config.max_model_len > model.max_model_len:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, the model was made for {model.max_model_len}: lower it"
        )


def _proposer(config: EngineConfig, given: Proposer | None) -> Proposer | None:
    """The given proposer, or the one that the config names; None: no drafts."""
    if config.speculative is None:
        return None
    if given is None and config.speculative.proposer != "ngram":
        raise ConfigError(f"the proposer {config.speculative.proposer} needs weights: give build_engine a proposer")
    return NgramProposer() if given is None else given


def _plan_build(
    model: ServableModel,
    config: EngineConfig,
    sizes: EngineSizes,
    proposer: Proposer | None,
    device: Device,
    *,
    on_gpu: bool,
    group: Group | None,
) -> _BuildPlan:
    """Choose the size of the block pool, and derive the bounds of requests from it."""
    layout, kv_bytes = model.layout, sizes.kv_bytes
    max_drafts = 0 if config.speculative is None else config.speculative.max_drafts
    if kv_bytes is None:
        kv_bytes = _free_pool_bytes(model, config, sizes, max_drafts, device.torch_device)
        if group is not None:  # as many blocks as every rank has room for
            kv_bytes = int(group.all_gather(torch.tensor([kv_bytes], device=device.torch_device)).min())
        _check_pool(kv_bytes, layout)
        origin = "what the weights leave free; --kv-memory changes it"
    else:
        origin = "the default" if config.kv_memory is None else "as asked"
    region, num_blocks = None, kv_bytes // layout.block_bytes
    if model.state_layout is not None:
        region = _size_states(model.state_layout, layout, config, sizes, kv_bytes, scratch=_has_scratch_block(proposer))
        num_blocks = region.num_blocks - _has_scratch_block(proposer)
    pool_tokens = num_blocks * layout.block_tokens
    logger.info(
        "KV memory: %.2f GiB on %s, %d tokens (%s); up to %d requests run at once",
        num_blocks * layout.block_bytes / 2**30,
        device.kind,
        pool_tokens,
        origin,
        sizes.max_running,
    )
    if config.speculative is not None and max_drafts + 2 > pool_tokens:
        raise ConfigError(
            f"max_drafts is {max_drafts}, the pool holds {pool_tokens} tokens: at most {pool_tokens - 2} drafts fit "
            "after a prompt; lower it or raise kv_memory"
        )
    bounds = Bounds(
        max_model_len=config.max_model_len or model.max_model_len,
        pool_tokens=pool_tokens,
        block_tokens=layout.block_tokens,
        vocab_size=model.vocab_size,
        max_unfinished=config.max_waiting + sizes.max_running,
    )
    return _BuildPlan(model, config, sizes, device, on_gpu, proposer, max_drafts, num_blocks, region, bounds, group)


def _size_states(
    states: StateLayout, blocks: KVLayout, config: EngineConfig, sizes: EngineSizes, budget: int, *, scratch: bool
) -> StateRegion:
    """Divide `budget` bytes between blocks and recurrent states. `scratch`: add a scratch block, outside the budget."""
    asked = None if config.state_memory is None else parse_bytes(config.state_memory, option="state_memory")
    state_bytes = blocks_per_state(states, blocks.block_bytes) * blocks.block_bytes
    count = num_states(
        budget,
        state_bytes=state_bytes,
        block_bytes=blocks.block_bytes,
        max_running=sizes.max_running,
        state_memory=asked,
    )
    if count < _FEWEST_STATES:
        least = (_FEWEST_STATES + RESERVED_STATES) * state_bytes
        given = f"half of kv_memory ({budget} bytes)" if asked is None else f"state_memory ({asked} bytes)"
        raise ConfigError(
            f"{given} holds {max(0, count + RESERVED_STATES)} recurrent states of {state_bytes} bytes: "
            f"give state_memory at least {least} bytes, and kv_memory more than that"
        )
    left = budget - (count + RESERVED_STATES) * state_bytes
    _check_pool(left, blocks)
    region = StateRegion(states, blocks.block_bytes, left // blocks.block_bytes + scratch, count)
    if region.stop_byte > budget + scratch * blocks.block_bytes:  # alignment moved the end: leave some blocks out
        region = StateRegion(states, blocks.block_bytes, 2 * region.num_blocks - region.first_block, count)
    logger.info(
        "recurrent states: %.2f GiB of the KV memory, %d of %d bytes", (budget - left) / 2**30, count, state_bytes
    )
    if count < sizes.max_running:
        logger.warning(
            "state memory holds %d states, so that many requests run at most, not %d", count, sizes.max_running
        )
    return region


def _has_scratch_block(proposer: Proposer | None) -> bool:
    """Whether the memory has one block more than the pool: a scratch block for the proposer."""
    return proposer is not None and proposer.hidden_size > 0


def _allocate_pools(plan: _BuildPlan) -> tuple[Memory, FencedPool, FencedPool | None]:
    """Allocate the device memory of blocks and recurrent states, and make their pools. If the proposer reads hidden
    states, the memory has one block more than the pool: a scratch block for hidden states that belong to no block.
    """
    device, block_bytes, region = plan.device, plan.model.layout.block_bytes, plan.region
    num_bytes = (
        (plan.num_blocks + _has_scratch_block(plan.proposer)) * block_bytes if region is None else region.stop_byte
    )
    memory = device.allocate("kv", num_bytes)
    blocks, states = FencedPool("device blocks", plan.num_blocks, tracer=device.tracer), None
    if device.tracer is not None:
        device.tracer.backed(blocks.name, memory.name, block_bytes)
        if _has_scratch_block(plan.proposer):
            device.tracer.backed("scratch block", memory.name, 0, plan.num_blocks * block_bytes)
    if region is not None:
        states = FencedPool("states", region.num_states, tracer=device.tracer)
        if device.tracer is not None:
            device.tracer.backed(states.name, memory.name, region.state_bytes, region.first_byte)
            device.tracer.backed("reserved states", memory.name, 0, region.span(region.zero)[0])
    return memory, blocks, states


def _bytes_by_part(plan: _BuildPlan) -> dict[str, int]:
    """Bytes of device memory of each part of the cache. All parts except `draft_inputs` share one allocation."""
    block_bytes, region = plan.model.layout.block_bytes, plan.region
    reserved = _has_scratch_block(plan.proposer) * block_bytes
    parts = {"blocks": plan.num_blocks * block_bytes}
    if region is not None:
        reserved += region.reserved_bytes
        parts["states"] = region.num_states * region.state_bytes
        if plan.proposer is not None:
            parts["draft_inputs"] = region.layout.draft_bytes(plan.sizes.max_running + 1, plan.max_drafts)
    return {**parts, "reserved": reserved}


def _build_transfers(
    plan: _BuildPlan,
    device: Device,
    kv: BlockMemory,
    pools: Sequence[FencedPool],
    tiers: TierStack,
    costs: CostModel,
    metrics: Metrics,
    inbox: Inbox,
) -> OffloadConnector:
    assert plan.config.offload is not None
    return OffloadConnector(
        device=device,
        pools=pools,
        memory=kv,
        tiers=tiers,
        costs=costs,
        metrics=metrics,
        load_deadline_s=plan.config.offload.load_deadline_s,
        states=None if plan.region is None else plan.region.layout,
        notify=inbox.bell.ring,
    )


def _build_scheduler(
    plan: _BuildPlan,
    blocks: FencedPool,
    keys: BlockKeys,
    transfers: OffloadConnector | None,
    states: FencedPool | None,
    key_log: DeviceKeyLog | None,
) -> Scheduler:
    config, sizes, device, speculative = plan.config, plan.sizes, plan.device, plan.config.speculative
    return Scheduler(
        limits=Limits(
            plan.model.layout.block_tokens,
            sizes.chunk_tokens,
            sizes.token_budget,
            prefix_cache=config.prefix_cache,
            tail_apart=not plan.on_gpu if config.tail_apart is None else config.tail_apart,
            state_interval=config.state_interval // plan.model.layout.block_tokens,
        ),
        blocks=blocks,
        slots=FencedPool("rows", sizes.max_running, tracer=device.tracer),
        keys=keys,
        tiers=transfers,
        policy=None
        if speculative is None
        else SpecPolicy(plan.max_drafts, adaptive=speculative.adaptive, max_slowdown=speculative.max_slowdown),
        states=None if states is None or plan.region is None else (states, plan.region),
        key_log=key_log,
    )


def _kv_events(config: EngineConfig, model: ServableModel, metrics: Metrics) -> KVEvents | None:
    """The publisher of KV events, with bound sockets; None: there are none."""
    if config.kv_events is None:
        return None
    block_tokens, sockets = model.layout.block_tokens, None
    if config.kv_events.endpoint is not None:
        sockets = KVEventSockets(config.kv_events)
        replay = "" if sockets.replay_endpoint is None else f", replays on {sockets.replay_endpoint}"
        logger.info("KV events on %s%s", sockets.endpoint, replay)
    log = KeyLog(block_tokens=block_tokens)
    return KVEvents(config.kv_events, log=log, block_tokens=block_tokens, metrics=metrics, sockets=sockets)


def _log_keys(events: KVEvents, tiers: TierStack | None, *, has_states: bool) -> DeviceKeyLog:
    """Log the keys of the tiers from now on, and those that persistent tiers hold already. Returns the device's log.

    With recurrent states, tiers are not logged: they hold parts of states under keys that name no block.
    """
    if tiers is not None and not has_states:
        tiers.host.pool.key_log = events.log.tier(HOST)
        for name, tier in tiers.persistent.items():
            tier.index.key_log = log = events.log.tier(name)
            log.stored(tuple(tier.index))
    return events.log.device


def _build_executor(plan: _BuildPlan, memory: Memory) -> Executor:
    return Executor(
        device=plan.device,
        model=plan.model,
        memory=memory,
        num_slots=plan.sizes.max_running,
        attention=_attention(plan.model, plan.sizes, plan.bounds, plan.proposer, plan.max_drafts, plan.device),
        ops=select_ops(has_kernels=plan.on_gpu),
        states=plan.region,
        group=plan.group,
        proposer=plan.proposer,
        max_drafts=plan.max_drafts,
        max_len=plan.max_len,
    )


def _make_ready(
    plan: _BuildPlan,
    executor: Executor,
    blocks: FencedPool,
    gated: bool,
    tell: Callable[[str, int, int], None],
) -> None:
    """Warm up the kernels of a GPU, and capture forward passes unless `config.eager`. `gated`: steps may wait for
    loads.
    """
    sizes, layout = plan.sizes, plan.model.layout
    num_blocks = max(sizes.max_running, layout.num_blocks_for(sizes.chunk_tokens))
    chunk_tokens = min(sizes.chunk_tokens, plan.bounds.max_model_len)
    warm_up = functools.partial(_warm_up, executor, blocks, num_blocks, chunk_tokens, tell)
    if plan.config.eager:
        warm_up(_WARMING_UP)
        return
    shapes = GraphKey.all_of(
        max_rows=sizes.max_running,
        chunk_tokens=sizes.chunk_tokens,
        max_tokens=min(sizes.token_budget, plan.bounds.pool_tokens),
        drafts=plan.max_drafts,
        has_states=plan.model.state_layout is not None,
        chunks=not plan.model.needs_chunk_lengths,
    )
    gates = gated and not plan.model.needs_chunk_lengths  # only steps with chunks wait for loads
    gate_layers = layers_per_group(layout, plan.device.segment_bytes) if gates else 0
    _capture(executor, plan.model, plan.proposer, shapes, gate_layers=gate_layers, warm_up=warm_up, tell=tell)


def _open_device(config: EngineConfig, timeline: Timeline | None, metrics: Metrics, tracer: Tracer | None) -> Device:
    if torch_device(config.device).type == CPU:
        return CpuDevice(compute_threads=config.compute_threads, timeline=timeline, metrics=metrics, tracer=tracer)
    from sidestream.device.cuda import CudaDevice

    with contextlib.ExitStack() as undo:
        device = CudaDevice(timeline=timeline, metrics=metrics, tracer=tracer)
        undo.callback(device.close)
        device.warm_up()
        undo.pop_all()
    return device


def _check_pool(kv_bytes: int, layout: KVLayout) -> None:
    if kv_bytes < 2 * layout.block_bytes:
        raise ConfigError(
            f"kv_memory is {kv_bytes} bytes, a block of {layout.block_tokens} tokens takes {layout.block_bytes}: "
            f"give at least {2 * layout.block_bytes} bytes"
        )


def _free_pool_bytes(
    model: ServableModel, config: EngineConfig, sizes: EngineSizes, max_drafts: int, device: torch.device
) -> int:
    """Bytes for the block pool that are left on the GPU after the weights and the attention buffers."""
    layout = model.layout
    torch.cuda.empty_cache()  # memory that the check of the loaded model used and torch has cached
    spec = _attention_spec(model, sizes, max_drafts, device)
    kept = 0 if model.state_layout is None else model.state_layout.draft_bytes(sizes.max_running + 1, max_drafts)
    fits = pool_bytes(
        torch.cuda.mem_get_info(device)[0] - kept,
        token_bytes=layout.token_bytes,
        scratch_token_bytes=select_backend(device).token_bytes(spec),
        max_model_len=config.max_model_len or model.max_model_len,
    )
    return min(fits, MAX_BLOCKS * layout.block_bytes)


def _attention_spec(
    model: ServableModel, sizes: EngineSizes, max_drafts: int, device: torch.device, proposer: Proposer | None = None
) -> AttentionSpec:
    """The sizes that attention must support: those of the model and of a draft model, the query tokens of all decode
    rows (one for each running request), and those of short prefill rows.
    """
    from sidestream.speculate.draft_model import DraftModelProposer

    layout = model.layout
    return AttentionSpec(
        heads=model.num_heads,
        kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        dtype=getattr(torch, layout.dtype),
        device=device,
        query_tokens=sizes.max_running * (1 + max_drafts) + SHORT_TOKENS,
        draft=proposer.shape if isinstance(proposer, DraftModelProposer) else None,
    )


def _attention(
    model: ServableModel, sizes: EngineSizes, bounds: Bounds, proposer: Proposer | None, max_drafts: int, device: Device
) -> AttentionBackend:
    """Make the engine's attention backend, with buffers for the longest rows that the engine accepts."""
    tokens, layout = min(bounds.max_model_len, bounds.pool_tokens), model.layout
    try:
        return select_backend(device.torch_device).create(
            _attention_spec(model, sizes, max_drafts, device.torch_device, proposer),
            kv_tokens=(layout.num_blocks_for(tokens) + 1) * layout.block_tokens,
            chunk_tokens=min(sizes.chunk_tokens, tokens),
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the GPU has no room for attention's buffers of {sizes.max_running} rows of up to {tokens} tokens: "
            "lower max_running, max_model_len or kv_memory"
        ) from error


def _drafting(proposer: Proposer | None) -> Sequence[PagedModel | MtpHead]:
    """The modules that the proposer runs."""
    from sidestream.speculate.draft_model import DraftModelProposer
    from sidestream.speculate.mtp import MtpProposer

    if isinstance(proposer, MtpProposer):
        return (proposer.head,)
    return (proposer.model,) if isinstance(proposer, DraftModelProposer) else ()


def _capture(
    executor: Executor,
    model: ServableModel,
    proposer: Proposer | None,
    shapes: Sequence[GraphKey],
    *,
    gate_layers: int,
    warm_up: Callable[[str], None],
    tell: Callable[[str, int, int], None],
) -> None:
    """Compile the layers, warm up, and capture graphs.

    If layers cannot be compiled, they are captured uncompiled; if they cannot be captured, steps launch each kernel
    separately. Warm-up comes after that choice, because it must launch the same kernels as steps. Raises errors of
    layers that are not compiled.
    """
    from sidestream.models.adapter import PagedModel
    from sidestream.models.compiled import compile_layers, compiling, decompile, reason_of

    start_s = time.monotonic()
    served: list[PagedModel | MtpHead] = [model, *_drafting(proposer)] if isinstance(model, PagedModel) else []
    for way in ("compiled and ", "") if served else ("",):
        if not way:
            for part in served:
                decompile(part)
            warm_up(_WARMING_UP)
        try:
            with compiling():
                if way:
                    for part in served:
                        compile_layers(part)
                    warm_up("compiling forward passes")
                executor.capture(
                    shapes, gate_layers=gate_layers, tell=functools.partial(tell, "capturing forward passes")
                )
        except DeviceLost:
            raise
        except Exception as error:  # transformers and model code raise errors of any type
            logger.warning("forward passes cannot be %scaptured (%s): they run slower", way, reason_of(error))
        else:
            logger.info("forward passes are %scaptured after %.1f s", way, time.monotonic() - start_s)
            return


def _warm_up(
    executor: Executor,
    blocks: FencedPool,
    num_blocks: int,
    chunk_tokens: int,
    tell: Callable[[str, int, int], None],
    what: str,
) -> None:
    """Run `Executor.warm_up` on blocks of the pool, and report it as `what`."""
    tell(what, 0, 0)
    start_s = time.monotonic()
    lease = blocks.take(min(blocks.num_available, num_blocks))
    try:
        executor.warm_up(lease.ids, chunk_tokens=chunk_tokens)
    finally:
        lease.release()  # without fences, because every step of the warm-up has ended
    logger.info("the GPU's kernels are warm after %.1f s", time.monotonic() - start_s)


def _open_tiers(plan: _BuildPlan, device: Device, given: Mapping[str, PersistentTier] | None) -> TierStack | None:
    """The host tier, and `given` or the persistent tiers that the config asks for; None: offload is off."""
    config, layout, group = plan.config, plan.model.layout, plan.group
    offload = config.offload
    if offload is None or offload.host_bytes == 0:
        if given:
            raise ConfigError(
                f"tiers were given ({', '.join(given)}), but offload is off: blocks reach them through host memory; "
                f"give offload a host size"
            )
        return None
    rank, size = (0, 1) if group is None else (group.rank, group.size)
    offload = share_of_rank(offload, rank, size)
    if offload.host_bytes < layout.block_bytes:
        of_rank = "" if size == 1 else f" on each of {size} ranks"
        raise ConfigError(
            f"offload host is {offload.host_bytes} bytes{of_rank}, a block takes {layout.block_bytes}: "
            "give more, or 0 for none"
        )
    if not config.prefix_cache:
        raise ConfigError("offload needs the prefix cache: leave prefix_cache on, or switch offload off")
    slots = offload.host_bytes // layout.block_bytes
    memory = device.allocate_host(HOST, slots * layout.block_bytes, item_bytes=layout.block_bytes)
    host = HostTier(memory, layout, ready_bytes=device.ready_bytes(memory), tracer=device.tracer)
    if given is None:
        given = open_tiers(offload, TierContext(layout, _tier_fingerprint(plan.model), device.tracer))
    return TierStack(host, given)


def _tier_fingerprint(model: ServableModel) -> str:
    """Identifies the model and the layout of its recurrent states, because tiers hold both KV and states."""
    if model.state_layout is None:
        return model.fingerprint
    return f"{model.fingerprint} {json.dumps(model.state_layout.describe(), sort_keys=True)}"
