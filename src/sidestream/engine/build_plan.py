"""Decides the sizes of an engine before any of its memory is allocated: blocks of the KV pool, recurrent states, and
upper bounds of requests. Raises ConfigError for a config that does not fit the model or the memory.

Called while an engine is built, on every rank with the same config. Reads how much memory of the GPU is free, but
allocates none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from sidestream.attention.interface import AttentionSpec
from sidestream.attention.registry import select_backend
from sidestream.config import GRAMMAR, EngineConfig, EngineSizes
from sidestream.errors import ConfigError
from sidestream.runner.forward import ForwardModel
from sidestream.runner.step_inputs import SHORT_TOKENS
from sidestream.schedule.limits import Bounds
from sidestream.speculate import GrammarProposer, NgramProposer, Proposer
from sidestream_kv.config import parse_bytes
from sidestream_kv.device.base import Device
from sidestream_kv.device.group import Group
from sidestream_kv.device.kinds import CPU, CUDA
from sidestream_kv.kv.eight_bit import EightBitLayout, layout_in_tiers
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.kv.state_layout import RESERVED_STATES, StateLayout, StateRegion, blocks_per_state
from sidestream_kv.kv.window_layout import WindowedLayers

logger = logging.getLogger(__name__)

# Smallest number of states with which a request can run: the state that it updates, and a checkpoint (a state that is
# kept for reuse).
_FEWEST_STATES = 2
# Largest default number of blocks. The pool keeps Python objects for each block, and a large GPU holds ten million
# blocks of a tiny model.
MAX_BLOCKS = 1 << 20

_SHARE = 0.9
# Memory kept for activations, logits, captured graphs and kernels: Qwen3-8B with 256 requests took 6 GiB on an H200. On
# a small GPU, two fifths of the free memory are kept if that is less than 6 GiB.
_ROOM_BYTES = 6 << 30
_MOST_ROOM = 0.4
_WITHOUT_WEIGHTS: dict[str, Callable[[], Proposer]] = {"ngram": NgramProposer, GRAMMAR: GrammarProposer}


class ServableModel(ForwardModel, Protocol):
    """A model that an engine can serve: `sidestream.models.PagedModel`, or a toy model of the tests."""

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
        """Whether the host must know the lengths of prefill chunks, so that steps with prefill cannot be captured."""
        ...

    @property
    def padding_token(self) -> int | None:
        """See `Bounds.padding_token`."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Token ids that end an answer."""
        ...


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """The sizes and choices that the parts of an engine are built from.

    device       the rank's own device
    proposer     makes drafts; None: no speculative decoding
    max_drafts   largest number of drafts of a row
    num_blocks   number of blocks of the KV pool
    region       location of the recurrent states, after the blocks; None: the model has no recurrent state
    windows      the layers with a sliding window, if they have blocks of their own; None: they have not
    origin       text for the log: where the size of the pool comes from
    group        the ranks that share the model; None: there is one rank
    """

    model: ServableModel
    config: EngineConfig
    sizes: EngineSizes
    device: Device
    proposer: Proposer | None
    max_drafts: int
    num_blocks: int
    region: StateRegion | None
    windows: WindowedLayers | None
    bounds: Bounds
    origin: str
    group: Group | None = None

    @property
    def layout(self) -> KVLayout:
        """The layout of the pool's blocks."""
        return block_layout(self.model)

    @property
    def tier_layout(self) -> KVLayout | EightBitLayout:
        """The layout of blocks in the tiers. Keys of blocks depend on it, too."""
        return tier_layout(self.model, self.config)

    @property
    def on_gpu(self) -> bool:
        """Whether the engine runs on a GPU."""
        return self.device.torch_device.type == CUDA

    @property
    def max_len(self) -> int:
        """Largest number of tokens of a request."""
        return min(self.bounds.max_model_len, self.bounds.pool_tokens)

    @property
    def scratch_blocks(self) -> int:
        """Number of blocks of memory beyond the pool: 1 if the proposer reads hidden states, else 0. In this block,
        steps write hidden states that are not kept.
        """
        return _scratch_blocks(self.proposer)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the one allocation for blocks and recurrent states."""
        if self.region is not None:
            return self.region.stop_byte
        return (self.num_blocks + self.scratch_blocks) * self.layout.block_bytes

    def bytes_by_part(self) -> dict[str, int]:
        """Bytes of device memory of each part of the cache. `draft_inputs` has its own allocation; the other
        parts share one.
        """
        block_bytes, region = self.layout.block_bytes, self.region
        reserved = self.scratch_blocks * block_bytes
        parts = {"blocks": self.num_blocks * block_bytes}
        if region is not None:
            reserved += region.reserved_bytes
            parts["states"] = region.num_states * region.state_bytes
            if self.proposer is not None:
                parts["draft_inputs"] = region.layout.draft_bytes(self.sizes.max_running + 1, self.max_drafts)
        return {**parts, "reserved": reserved}

    def log_sizes(self) -> None:
        """Log the sizes. Call it when the memory is allocated: until then, they may still be refused."""
        layout, running = self.layout, self.sizes.max_running
        logger.info(
            "KV memory: %.2f GiB on %s, %d tokens in %s (%s); up to %d requests run at once",
            self.num_blocks * layout.block_bytes / 2**30,
            self.device.kind,
            self.bounds.pool_tokens,
            layout.dtype,
            self.origin,
            running,
        )
        region = self.region
        if region is None:
            return
        logger.info(
            "recurrent states: %.2f GiB of the KV memory, %d states of %d bytes",
            (region.num_states + RESERVED_STATES) * region.state_bytes / 2**30,
            region.num_states,
            region.state_bytes,
        )
        if region.num_states < running:
            logger.warning(
                "state memory holds %d recurrent states: at most that many requests run at once, not %d",
                region.num_states,
                running,
            )

    def attention_spec(self) -> AttentionSpec:
        """The sizes that attention must support, including the sizes of a draft model."""
        device = self.device.torch_device
        return _attention_spec(self.model, self.config, self.sizes, self.max_drafts, device, self.proposer)


def sizes_for(model: ServableModel, config: EngineConfig, *, on_gpu: bool) -> EngineSizes:
    """The config's sizes for this kind of device. Raises ConfigError if the sizes do not fit the model. Needs no open
    device, so that wrong sizes are refused before a device is opened.
    """
    config.check_multiples(model.layout.block_tokens)
    tier_layout(model, config)
    sizes = config.sizes(CUDA if on_gpu else CPU)
    if sizes.kv_bytes is not None:
        _check_pool(sizes.kv_bytes, model)
    if config.max_model_len is not None and config.max_model_len > model.max_model_len:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, the model was made for {model.max_model_len}: lower it"
        )
    return sizes


def tier_layout(model: ServableModel, config: EngineConfig) -> KVLayout | EightBitLayout:
    """See `BuildPlan.tier_layout`. Raises ConfigError for blocks that cannot be packed."""
    kv_dtype = "auto" if config.offload is None else config.offload.kv_dtype
    if kv_dtype != "auto" and model.state_layout is not None:
        raise ConfigError(
            f"kv_dtype is {kv_dtype}, but the model has recurrent states, in which an error would grow with every "
            "token: leave kv_dtype out"
        )
    if kv_dtype != "auto" and config.tensor_parallel > 1:
        raise ConfigError(
            f"kv_dtype is {kv_dtype}, but the engine has {config.tensor_parallel} ranks, and copies of several ranks "
            "do not convert KV: leave kv_dtype out"
        )
    if kv_dtype != "auto" and config.kv_cache_dtype != "auto":
        raise ConfigError(
            f"kv_dtype is {kv_dtype}, but kv_cache_dtype is {config.kv_cache_dtype}, with which KV has 8 bits already: "
            "leave kv_dtype out"
        )
    return layout_in_tiers(block_layout(model), kv_dtype)


def plan_build(
    model: ServableModel,
    config: EngineConfig,
    device: Device,
    *,
    proposer: Proposer | None,
    group: Group | None,
) -> BuildPlan:
    """Choose the size of the block pool, and derive the bounds of requests from it.

    proposer   makes drafts; used instead of the proposer that the config names
    """
    sizes = sizes_for(model, config, on_gpu=device.torch_device.type == CUDA)
    if config.self_check and model.state_layout is not None:
        raise ConfigError(
            f"self_check is {config.self_check}, but the model has recurrent states: a step overwrites the state "
            "that it reads, so it cannot run twice; leave self_check out"
        )
    windows, layout, proposer = windowed_layers(model), block_layout(model), _proposer(config, proposer)
    max_drafts = 0 if config.speculative is None else config.speculative.max_drafts
    if sizes.kv_bytes is not None:
        kv_bytes, origin = sizes.kv_bytes, "the default" if config.kv_memory is None else "as asked"
    else:
        kv_bytes, origin = _free_bytes_of_all(model, config, sizes, max_drafts, device.torch_device, group)
    scratch = _scratch_blocks(proposer)
    region, num_blocks = None, kv_bytes // layout.block_bytes
    if model.state_layout is not None:
        region = _size_states(model, model.state_layout, config, sizes, kv_bytes, scratch=scratch)
        num_blocks = region.num_blocks - scratch
    pool_tokens = num_blocks * layout.block_tokens
    if windows is not None:
        pool_tokens = windows.longest(num_blocks, sizes.chunk_tokens + 1 + max_drafts)
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
        padding_token=model.padding_token,
    )
    return BuildPlan(
        model, config, sizes, device, proposer, max_drafts, num_blocks, region, windows, bounds, origin, group
    )


def windowed_layers(model: ServableModel) -> WindowedLayers | None:
    """The model's layers with a sliding window, if they get blocks of their own; None: they do not. Layers of a model
    with recurrent states stay together.
    """
    return None if model.state_layout is not None else WindowedLayers.of(model.layout)


def block_layout(model: ServableModel) -> KVLayout:
    """The layout of the blocks in which the model's KV lies."""
    windows = windowed_layers(model)
    return model.layout if windows is None else windows.blocks


def all_layers_bytes(model: ServableModel) -> int:
    """Bytes that all layers of a block's tokens take: of the block, and of its page if it has one."""
    windows = windowed_layers(model)
    return model.layout.block_bytes if windows is None else (1 + windows.parts) * windows.blocks.block_bytes


def _proposer(config: EngineConfig, given: Proposer | None) -> Proposer | None:
    """The given proposer, or the proposer that the config names; None: no drafts."""
    if config.speculative is None:
        return None
    if given is not None:
        return given
    if (name := config.speculative.proposer) not in _WITHOUT_WEIGHTS:
        raise ConfigError(f"the proposer {name} needs weights: give build_engine a proposer")
    return _WITHOUT_WEIGHTS[name]()


def _scratch_blocks(proposer: Proposer | None) -> int:
    return int(proposer is not None and proposer.hidden_size > 0)


def _free_bytes_of_all(
    model: ServableModel,
    config: EngineConfig,
    sizes: EngineSizes,
    max_drafts: int,
    device: torch.device,
    group: Group | None,
) -> tuple[int, str]:
    """Bytes for the block pool that fit on every rank, and a text for the log that says where the number comes from."""
    kv_bytes = _free_bytes(model, config, sizes, max_drafts, device)
    if group is not None:
        kv_bytes = int(group.all_gather(torch.tensor([kv_bytes], device=device)).min())
    _check_pool(kv_bytes, model)
    return kv_bytes, "what the weights leave free; --kv-memory changes it"


def _free_bytes(
    model: ServableModel, config: EngineConfig, sizes: EngineSizes, max_drafts: int, device: torch.device
) -> int:
    """Bytes for the block pool that are left on this rank's GPU after the weights and the attention buffers."""
    layout = block_layout(model)
    torch.cuda.empty_cache()  # frees memory that torch has cached since the check of the loaded model
    spec = _attention_spec(model, config, sizes, max_drafts, device)
    kept = 0 if model.state_layout is None else model.state_layout.draft_bytes(sizes.max_running + 1, max_drafts)
    fits = pool_bytes(
        torch.cuda.mem_get_info(device)[0] - kept,
        token_bytes=layout.token_bytes,
        scratch_token_bytes=select_backend(device).token_bytes(spec),
        max_model_len=config.max_model_len or model.max_model_len,
    )
    return min(fits, MAX_BLOCKS * layout.block_bytes)


def _attention_spec(
    model: ServableModel,
    config: EngineConfig,
    sizes: EngineSizes,
    max_drafts: int,
    device: torch.device,
    proposer: Proposer | None = None,
) -> AttentionSpec:
    """Counts the query tokens of one decode row for each running request, and of the short prefill rows of a step."""
    from sidestream.speculate.proposer import DraftModelProposer

    layout = model.layout
    return AttentionSpec(
        heads=model.num_heads,
        kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        dtype=getattr(torch, layout.compute_dtype),
        device=device,
        query_tokens=sizes.max_running * (1 + max_drafts) + SHORT_TOKENS,
        draft=proposer.shape if isinstance(proposer, DraftModelProposer) else None,
        latent_dim=layout.latent_dim,
        batch_invariant=config.batch_invariant,
    )


def _size_states(
    model: ServableModel,
    states: StateLayout,
    config: EngineConfig,
    sizes: EngineSizes,
    budget: int,
    *,
    scratch: int,
) -> StateRegion:
    """Divide `budget` bytes between blocks and recurrent states. `scratch`: number of scratch blocks, which are not
    part of the budget.
    """
    blocks = block_layout(model)
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
    _check_pool(left, model)
    region = StateRegion(states, blocks.block_bytes, left // blocks.block_bytes + scratch, count)
    if region.stop_byte > budget + scratch * blocks.block_bytes:  # alignment moved the region: use fewer blocks
        region = StateRegion(states, blocks.block_bytes, 2 * region.num_blocks - region.first_block, count)
    return region


def _check_pool(kv_bytes: int, model: ServableModel) -> None:
    least = all_layers_bytes(model)
    if kv_bytes < 2 * least:
        raise ConfigError(
            f"kv_memory is {kv_bytes} bytes, a block of {model.layout.block_tokens} tokens takes {least}: "
            f"give at least {2 * least} bytes"
        )


def pool_bytes(free_bytes: int, *, token_bytes: int, scratch_token_bytes: int, max_model_len: int) -> int:
    """Bytes for the block pool. The remaining memory is enough for everything else that the engine allocates.

    free_bytes           bytes of device memory that are free after the weights were loaded
    token_bytes          bytes of one token's KV, all layers
    scratch_token_bytes  bytes of attention's buffers for each token of the longest possible request, which has
                         `max_model_len` tokens, or as many as the pool holds if that is less
    """
    budget = free_bytes - max((1 - _SHARE) * free_bytes, min(_ROOM_BYTES, _MOST_ROOM * free_bytes))
    beside_longest = budget - scratch_token_bytes * max_model_len  # if the longest request fits into the pool
    beside_itself = budget * token_bytes / (token_bytes + scratch_token_bytes)  # if the pool is smaller
    return max(0, int(max(beside_longest, beside_itself)))


def num_states(budget: int, *, state_bytes: int, block_bytes: int, max_running: int, state_memory: int | None) -> int:
    """Number of recurrent states that requests can lease, without the `RESERVED_STATES`. States and blocks share
    `budget` bytes.

    By default, there is a state for each running request and for each block, because a kept state is found under the
    key of a block. States take at most half of the budget.

    state_memory   bytes for states, if the user set them; None: the default
    """
    if state_memory is not None:
        return state_memory // state_bytes - RESERVED_STATES
    useful = budget // (state_bytes + block_bytes) + max_running
    return min(useful, budget // 2 // state_bytes - RESERVED_STATES)
