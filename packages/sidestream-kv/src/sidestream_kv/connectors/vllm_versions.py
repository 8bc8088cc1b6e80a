"""All that differs between the versions of vLLM: what a tier and a connector are told, and what they return.

0.25.1   a spec has `vllm_config`; jobs have `block_ids`; a result is only true or false; hashes are random;
         a failed load names blocks, which only a model with one group of layers survives; states are not named
0.32     a spec has `config` only; jobs have `chunk_ids`; a result may name the keys that succeeded;
         a failed load names its request; a tensor of KV may hold several layers; each step names the blocks of
         recurrent states that are complete
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import vllm
import vllm.config
from vllm.distributed import kv_events
from vllm.distributed.kv_transfer.kv_connector.v1 import base as kv_connector
from vllm.platforms import current_platform
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.core.sched import output as sched_output
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.tiering.base import JobResult

from sidestream_kv.connectors.chunks import ChunkLayout, RegionLayout, check_apart, digest_of
from sidestream_kv.connectors.key_events import BlockEvent
from sidestream_kv.connectors.planner import STATE_WINDOW, Group
from sidestream_kv.errors import ConfigError
from sidestream_kv.types import HOST

_log = logging.getLogger(__name__)

TRIED = "0.25.1 and 0.32.0"
_OLDEST, _TOO_NEW = (0, 25, 1), (0, 33)

MEDIUM: Any = base.Medium.STORAGE if hasattr(base, "Medium") else None
_RESULT_NAMES_KEYS = "successful_keys" in {field.name for field in fields(JobResult)}


def warn_if_untried() -> None:
    """Say which versions were tried, if this is none between them."""
    numbers = [int(part) for part in vllm.__version__.split("+")[0].split(".")[:3] if part.isdecimal()]
    if not _OLDEST <= tuple(numbers) < _TOO_NEW:
        _log.warning("vLLM %s: Sidestream's tier was tried with %s, so watch its first hits", vllm.__version__, TRIED)


@dataclass(frozen=True, slots=True)
class Deployment:
    """What a spec says of the engine.

    vllm_config   None: this version does not tell it to tiers
    engine_index  index of the data-parallel engine
    """

    vllm_config: Any
    engine_index: int
    layout: ChunkLayout


def deployment_of(spec: Any, *, block_bytes: int) -> Deployment:
    """The deployment of an OffloadingSpec. Raises ConfigError if blocks would not be found, or not be
    read rightly, after a restart.
    """
    if hasattr(spec, "config"):
        config, vllm_config = spec.config, vllm.config.get_current_vllm_config_or_none()
        parallel = config.parallel
        tokens = max(group.tokens_per_block for group in config.groups) * config.cache.blocks_per_chunk
        described = {
            "dtype": config.model.dtype,
            "groups": digest_of([[group.tokens_per_block, *group.layer_names] for group in config.groups]),
            "ranks": _ranks(parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size),
            "kv_layout": f"{config.kv_cache_layout} canonical={config.canonical_layout} "
            f"replicated={config.replicated_layout}",
            "hash_tokens": str(config.cache.tokens_per_hash),
        }
    else:
        vllm_config = spec.vllm_config
        parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
        if cache.calculate_kv_scales:
            raise ConfigError(
                "calculate_kv_scales gives FP8 KV other scales in each process, so stored KV would be read wrongly: "
                "leave it off"
            )
        groups = spec.kv_cache_config.kv_cache_groups
        tokens = max(spec.gpu_block_size) * spec.block_size_factor
        described = _described(vllm_config, groups, hash_tokens=spec.hash_block_size)
    described = {"vllm": vllm.__version__, **described, "hash": _hash_of(vllm_config)}
    return Deployment(vllm_config, int(parallel.data_parallel_index), ChunkLayout(block_bytes, tokens, described))


def _described(vllm_config: Any, groups: Sequence[Any], *, hash_tokens: int) -> dict[str, str]:
    """What the bytes of a block depend on besides the weights, according to the whole configuration."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    return {
        "dtype": str(vllm_config.model_config.dtype if cache.cache_dtype == "auto" else cache.cache_dtype),
        "groups": digest_of([[repr(group.kv_cache_spec), *group.layer_names] for group in groups]),
        "ranks": _ranks(
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.prefill_context_parallel_size,
            parallel.decode_context_parallel_size,
        ),
        # Which backend a worker chooses, and so its layout, follows from these.
        "kv_layout": f"{os.environ.get('VLLM_KV_CACHE_LAYOUT', 'default')} on {current_platform.get_device_name()} "
        f"by {digest_of(repr(vllm_config.attention_config))}",
        "hash_tokens": str(hash_tokens),
    }


def _ranks(*sizes: int) -> str:
    return " ".join(f"{name}={size}" for name, size in zip(("tp", "pp", "pcp", "dcp"), sizes, strict=True))


def _hash_of(vllm_config: Any) -> str:
    """Algorithm and seed of block hashes."""
    seed = os.environ.get("PYTHONHASHSEED")
    algorithm = "unknown" if vllm_config is None else str(vllm_config.cache_config.prefix_caching_hash_algo)
    has_fixed_seed = hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED")
    if seed is None and (not has_fixed_seed or algorithm.startswith("xxhash")):
        raise ConfigError(
            f"vLLM {vllm.__version__} seeds its block hashes ({algorithm}) at random in each process, so no block "
            "would be found after a restart: set the environment variable PYTHONHASHSEED to a fixed number, such as 0"
            + (", or leave --prefix-caching-hash-algo at sha256" if has_fixed_seed else "")
        )
    return f"{algorithm} seed={seed or 'default'}"


def chunk_ids_of(job: Any) -> Sequence[int]:
    """Rows of host memory, in the order of the job's keys."""
    ids = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids
    return [int(chunk) for chunk in ids]


def result_of(
    job_id: int, *, success: bool, successful_keys: Collection[Any] | None, seconds: float, num_bytes: int
) -> Any:
    """A JobResult. A version that cannot name keys takes a partial success as a failure."""
    if not _RESULT_NAMES_KEYS:
        return JobResult(job_id, success)
    return JobResult(job_id, success, successful_keys, transfer_time=seconds, transfer_bytes=num_bytes)


# ---------------------------------------------------------------------- the full connector

FAILED_LOAD_NAMES_REQUEST = hasattr(kv_connector, "KVConnectorTransferResults")
"""Whether a failed load may name its request; if not, it names blocks."""


def kv_event_of(event: BlockEvent, *, block_tokens: int) -> Any:
    """vLLM's KV event. It has no tokens, like those of vLLM's own offload."""
    hashes = [kv_cache_utils.maybe_convert_block_hash(each) for each in event.hashes]
    medium = "CPU" if event.tier == HOST else event.tier.upper()
    if not event.stored:
        return kv_events.BlockRemoved(block_hashes=hashes, medium=medium, group_idx=event.group)
    return kv_events.BlockStored(
        block_hashes=hashes,
        parent_block_hash=None,
        token_ids=[],
        block_size=block_tokens,
        lora_id=None,
        medium=medium,
        lora_name=None,
        group_idx=event.group,
    )


def hit_source(tier: str) -> Any:
    """vLLM's name of a tier, for its statistics of hits."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    return CacheHitSource(tier)


NAMES_STATES = hasattr(sched_output, "KVConnectorBlockState")
"""Whether a step names the blocks of states that are complete."""

_STATES = "MambaSpec"
_KINDS = ("FullAttentionSpec", "MLAAttentionSpec", "SinkFullAttentionSpec", "SlidingWindowSpec", _STATES)


def groups_of(vllm_config: Any, kv_cache_config: Any) -> tuple[list[Group], int]:
    """The groups of layers, and the number of tokens at which a hit may end. Raises ConfigError for kinds of layers
    whose blocks cannot be found again by the hashes of their tokens alone.
    """
    boundary, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size * getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise ConfigError("SidestreamConnector cannot be used with context parallelism: use the secondary tier instead")
    groups = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        members = [*getattr(spec, "kv_cache_specs", {0: spec}).values()]
        kinds = {type(each).__name__ for each in members}
        if strange := sorted(kinds.difference(_KINDS)):
            raise ConfigError(
                f"SidestreamConnector cannot offload {', '.join(strange)} of {group.layer_names[0]}: use the secondary "
                "tier (docs/vllm.md) instead"
            )
        window = members[0].sliding_window if "SlidingWindowSpec" in kinds else 0
        if _STATES in kinds:
            window = STATE_WINDOW
            _check_states(members[0])
        groups.append(Group(spec.block_size, spec.block_size // hash_tokens, window, handed=_STATES in kinds))
    if len(groups) > 1 and not FAILED_LOAD_NAMES_REQUEST:
        raise ConfigError(
            f"vLLM {vllm.__version__} cannot recover from a failed load of a model with {len(groups)} groups of "
            "layers: use vLLM 0.32, or the secondary tier"
        )
    return groups, boundary


def _check_states(spec: Any) -> None:
    """Raises ConfigError if states are not kept, or if a step does not name their blocks."""
    if not NAMES_STATES:
        raise ConfigError(
            f"vLLM {vllm.__version__} does not tell a connector which blocks have complete recurrent states: use vLLM "
            "0.32, or the secondary tier (docs/vllm.md)"
        )
    if spec.mamba_cache_mode != "align":
        raise ConfigError(
            "vLLM keeps recurrent states at the ends of blocks only with prefix caching, and here mamba_cache_mode is "
            f"{spec.mamba_cache_mode}: give --enable-prefix-caching"
        )


def states_of(scheduler_output: Any) -> Mapping[str, Sequence[tuple[int, int, int]]]:
    """See Planner.plan_step: `handed`."""
    state = getattr(scheduler_output, "kv_connector_block_state", None)
    return {} if state is None else state.boundary_state_offloads


def layout_of(vllm_config: Any, kv_cache_config: Any, parts: tuple[int, ...]) -> RegionLayout:
    """The layout of a block with parts of so many bytes: regions (see `regions_of`), or layers inside a block."""
    boundary, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    described = _described(vllm_config, kv_cache_config.kv_cache_groups, hash_tokens=hash_tokens)
    return RegionLayout(sum(parts), boundary, {"vllm": vllm.__version__, **described}, parts)


def check_hash(vllm_config: Any) -> dict[str, str]:
    """Algorithm and seed of block hashes. Raises ConfigError if they differ in every process."""
    return {"hash": _hash_of(vllm_config)}


def regions_of(kv_caches: Mapping[str, Any], kv_cache_config: Any) -> tuple[list[torch.Tensor], dict[str, list[int]]]:
    """The memory of KV as regions: uint8 tensors in which block `i` has the bytes from `i * size` on, where `size` is
    the region's number of bytes divided by the number of blocks. All groups of layers share the regions. Also returns
    which regions each layer has, by its name. Raises ConfigError for regions that overlap.
    """
    regions: dict[tuple[int, int], torch.Tensor] = {}
    of_layers: dict[str, list[int]] = {}
    blocks = kv_cache_config.num_blocks
    for described in kv_cache_config.kv_cache_tensors:
        names: Sequence[str] = described.layers if hasattr(described, "layers") else described.shared_by
        cache = next((kv_caches[name] for name in names if name in kv_caches), None)
        if cache is None:
            continue
        cache = cache if isinstance(cache, torch.Tensor) else cache[0]
        raw = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
        stride = described.block_stride or _page_of(cache, described.size // blocks)
        layer_stride = getattr(described, "layer_stride", None)
        if described.block_stride and (layer_stride is None or layer_stride < blocks * stride):
            start, stop = 0, blocks * stride  # a block has all layers
        elif layer_stride is None:
            start, stop = 0, described.size
        else:
            start = described.offset
            stop = start + len(names) * layer_stride
        firsts = range(start, stop, blocks * stride)
        numbers = []
        for first in firsts:
            region = raw[first : first + blocks * stride]
            ends = region.data_ptr(), region.data_ptr() + region.numel()
            regions.setdefault(ends, region)
            numbers.append(list(regions).index(ends))
        for index, name in enumerate(names):
            together = layer_stride is None or len(firsts) < len(names)  # layers of different groups, or of a block
            share = slice(None) if together else slice(index * len(firsts) // len(names), None)
            of_layers[name] = numbers[share][: None if together else len(firsts) // len(names)]
    check_apart(regions)
    return list(regions.values()), of_layers


def layers_in_blocks(kv_cache: torch.Tensor, kv_cache_config: Any) -> tuple[int, dict[str, list[int]]]:
    """How many layers lie one after another in each block of a tensor for all layers, and which one each layer is."""
    names = [described.shared_by for described in kv_cache_config.kv_cache_tensors]
    page = kv_cache.numel() * kv_cache.itemsize // kv_cache_config.num_blocks // len(names)
    if kv_cache.stride(0) * kv_cache.itemsize != page:  # layers alternate inside a block
        return 1, {name: [0] for shared in names for name in shared}
    return len(names), {name: [index] for index, shared in enumerate(names) for name in shared}


def calls_by_layer(vllm_config: Any, *, most_tokens: int) -> bool:
    """Whether vLLM calls `wait_for_layer_load` in a step that computes `most_tokens` tokens for one of its requests. It
    does not where it replays a graph of the whole step.
    """
    speculative = vllm_config.speculative_config
    drafts = 0 if speculative is None else speculative.num_speculative_tokens
    mode = vllm_config.compilation_config.cudagraph_mode
    return most_tokens > 1 + drafts and (mode is None or mode.mixed_mode().name != "FULL")


def _page_of(cache: torch.Tensor, page: int) -> int:
    """Bytes from a block to the next. Keys and values are apart if a dimension has a larger stride than a page."""
    outer = [size for size, stride in zip(cache.shape, cache.stride(), strict=True) if stride * cache.itemsize > page]
    return page // (outer[0] if outer else 1)
