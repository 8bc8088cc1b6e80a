"""All that differs between the versions of vLLM: what a tier is told, and what it returns.

0.25.1   a spec has `vllm_config`; jobs have `block_ids`; a result is only true or false; hashes are random
0.32     a spec has `config` only; jobs have `chunk_ids`; a result may name the keys that succeeded
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any

import vllm
import vllm.config
from vllm.platforms import current_platform
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.tiering.base import JobResult

from sidestream_kv.connectors.chunks import ChunkLayout, digest_of
from sidestream_kv.errors import ConfigError

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
        described = {
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
            "hash_tokens": str(spec.hash_block_size),
        }
    described = {"vllm": vllm.__version__, **described, "hash": _hash_of(vllm_config)}
    return Deployment(vllm_config, int(parallel.data_parallel_index), ChunkLayout(block_bytes, tokens, described))


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
