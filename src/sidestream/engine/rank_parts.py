"""Builds the parts that every rank of an engine has: the pools of blocks and recurrent states, the tiers, and the
executor. An engine on one device has one rank.

Called by `build_engine` for rank 0 and by `build_follower` for the other ranks, with the same config, so that the pools
of all ranks have the same numbers of blocks and all ranks warm up in the same steps.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from sidestream.attention.interface import AttentionBackend
from sidestream.attention.registry import select_backend
from sidestream.engine.build_plan import BuildPlan, ServableModel
from sidestream.engine.warm_up import make_ready
from sidestream.errors import ConfigError
from sidestream.ops import select_ops
from sidestream.ranks.shared_entries import keep_shared
from sidestream.runner.executor import Executor
from sidestream_kv.device.base import Device, Memory
from sidestream_kv.device.group import Group
from sidestream_kv.kv.pool import FencedPool
from sidestream_kv.offload.tiers.base import PersistentTier, TierContext
from sidestream_kv.offload.tiers.stack import TierStack, share_of_rank


@dataclass(frozen=True, slots=True)
class RankParts:
    """The parts of one rank. Ranks other than 0 use their pools only in the warm-up, because rank 0 decides which
    blocks a step uses.

    memory   device memory of blocks and recurrent states
    states   pool of recurrent states; None: the model has no recurrent state
    tiers    None: offload is off
    """

    memory: Memory
    blocks: FencedPool
    states: FencedPool | None
    tiers: TierStack | None
    executor: Executor


def build_rank_parts(
    plan: BuildPlan,
    *,
    host: Device,
    tiers: Mapping[str, PersistentTier] | None,
    undo: contextlib.ExitStack,
    tell: Callable[[str, int, int], None],
) -> RankParts:
    """Open the tiers, allocate the pools, make the executor and, on a GPU, warm it up.

    host    the device that allocates the host tier's memory: on rank 0 of several, the joint device of all ranks
    tiers   open persistent tiers to use instead of the tiers that the config names
    undo    gets a callback that closes the tiers if this function opened them
    tell    see `build_engine`
    """
    stack = _open_tiers(plan, host, tiers)
    if stack is not None and tiers is None:
        undo.callback(stack.close)
    memory, blocks, states = _allocate_pools(plan)
    executor = _build_executor(plan, memory)
    if plan.on_gpu:
        make_ready(plan, executor, blocks, gated=stack is not None, tell=tell)
    return RankParts(memory, blocks, states, stack, executor)


def _open_tiers(plan: BuildPlan, device: Device, given: Mapping[str, PersistentTier] | None) -> TierStack | None:
    """The host tier, and after it the tiers in `given`, or else the persistent tiers that the config names; None:
    offload is off.
    """
    config, layout, group = plan.config, plan.tier_layout, plan.group
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
    context = TierContext(layout, _tier_fingerprint(plan.model), device.tracer, rank, size)
    stack = TierStack.open(offload, device, context, persistent=given)
    if given is None and group is not None:
        _keep_shared(stack.persistent, group, device.torch_device)
    return stack


def _keep_shared(tiers: Mapping[str, PersistentTier], group: Group, device: torch.device) -> None:
    try:
        for tier in tiers.values():
            keep_shared(tier.index, group, device)
    except BaseException:
        for tier in tiers.values():
            tier.close()
        raise


def _tier_fingerprint(model: ServableModel) -> str:
    """Identifies the model and the layout of its recurrent states: tiers hold both KV and states."""
    if model.state_layout is None:
        return model.fingerprint
    return f"{model.fingerprint} {json.dumps(model.state_layout.describe(), sort_keys=True)}"


def _allocate_pools(plan: BuildPlan) -> tuple[Memory, FencedPool, FencedPool | None]:
    """Allocate the device memory of blocks and recurrent states, and make their pools."""
    device, block_bytes, region = plan.device, plan.layout.block_bytes, plan.region
    memory = device.allocate("kv", plan.memory_bytes)
    plan.log_sizes()
    blocks, states = FencedPool("device blocks", plan.num_blocks, tracer=device.tracer), None
    if device.tracer is not None:
        device.tracer.backed(blocks.name, memory.name, block_bytes)
        if plan.scratch_blocks:
            device.tracer.backed("scratch block", memory.name, 0, plan.num_blocks * block_bytes)
    if region is not None:
        states = FencedPool("states", region.num_states, tracer=device.tracer)
        if device.tracer is not None:
            device.tracer.backed(states.name, memory.name, region.state_bytes, region.first_byte)
            device.tracer.backed("reserved states", memory.name, 0, region.span(region.zero)[0])
    return memory, blocks, states


def _build_executor(plan: BuildPlan, memory: Memory) -> Executor:
    return Executor(
        device=plan.device,
        model=plan.model,
        memory=memory,
        num_slots=plan.sizes.max_running,
        attention=_attention(plan),
        ops=select_ops(has_kernels=plan.on_gpu),
        states=plan.region,
        windows=plan.windows,
        group=plan.group,
        proposer=plan.proposer,
        max_drafts=plan.max_drafts,
        max_len=plan.max_len,
    )


def _attention(plan: BuildPlan) -> AttentionBackend:
    """Make the attention backend, with buffers for the longest rows that the engine accepts."""
    tokens, layout, sizes = plan.max_len, plan.layout, plan.sizes
    try:
        return select_backend(plan.device.torch_device).create(
            plan.attention_spec(),
            kv_tokens=(layout.num_blocks_for(tokens) + 1) * layout.block_tokens,
            chunk_tokens=min(sizes.chunk_tokens, tokens),
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the GPU has no room for attention's buffers of {sizes.max_running} rows of up to {tokens} tokens: "
            "lower max_running, max_model_len or kv_memory"
        ) from error
