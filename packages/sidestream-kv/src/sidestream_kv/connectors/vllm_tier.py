"""A secondary tier of vLLM's tiered KV offload: blocks that leave vLLM's host memory go to a directory that is bounded,
verified on every read, and survives restarts and kill -9. Runs in the scheduler's process.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config":
      {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592, "secondary_tiers": [
        {"type": "SidestreamTier", "module_path": "sidestream_kv.connectors.vllm_tier", "directory": "/data/kv"}]}}'

Only vLLM's interface of tiers is used. Tried with vLLM 0.32.0.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from sidestream_kv.config import parse_bytes, unknown_name
from sidestream_kv.connectors.block_store import BlockStore
from sidestream_kv.connectors.checkpoint import fingerprint_of
from sidestream_kv.errors import ConfigError
from sidestream_kv.offload.tiers.disk import DiskTier
from sidestream_kv.types import Key

_log = logging.getLogger(__name__)

_KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Opaque chunks of vLLM's host memory.

    block_bytes   bytes of a chunk, of all workers
    block_tokens  tokens of a chunk
    fields        what the bytes depend on besides the weights: dtype, groups of layers, ranks, canonical layout
    """

    block_bytes: int
    block_tokens: int
    fields: str

    def describe(self) -> dict[str, int | str]:
        """The layout as plain values, for directories and messages."""
        return {"block_bytes": self.block_bytes, "block_tokens": self.block_tokens, "vllm": self.fields}


class SidestreamTier(SecondaryTierManager):  # type: ignore[misc]
    """Sidestream's disk tier behind vLLM's host memory.

    directory    where the blocks are; one engine at a time uses it. Each data-parallel engine has a subdirectory
    capacity     most bytes of the directory, such as "200GiB"
    threads      reads and writes at once
    fingerprint  of the weights; by default computed from the checkpoint's files
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        *,
        directory: str | None = None,
        capacity: str | int = "10GiB",
        threads: int = 8,
        fingerprint: str | None = None,
        backpressure_detector: Any = None,
        **unknown: Any,
    ) -> None:
        """Raises ConfigError for an unknown option, a directory that another engine uses or another model made, and a
        capacity below one chunk.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if unknown:
            known = ("directory", "capacity", "threads", "fingerprint", "backpressure")
            raise ConfigError(f"secondary tier {tier_type}: {unknown_name('option', next(iter(unknown)), known)}")
        if directory is None:
            raise ConfigError(f"secondary tier {tier_type} has no directory: give one")
        if not isinstance(threads, int) or threads < 1:
            raise ConfigError(f"secondary tier {tier_type}: threads is {threads!r}: give a whole number from 1")
        config = offloading_spec.config
        parallel = config.parallel
        path = Path(directory)
        if parallel.data_parallel_size > 1:
            path /= f"engine-{parallel.data_parallel_index}"
        tier = DiskTier.open(
            path,
            layout=layout_of(config, primary_kv_view.strides[0]),
            fingerprint=fingerprint or fingerprint_of(config.model.name),
            capacity_bytes=parse_bytes(capacity, option="capacity"),
        )
        self._memory = primary_kv_view.cast("B")  # rows are chunks
        self._chunk_bytes = primary_kv_view.strides[0]
        self._store = BlockStore(tier, name=tier_type, num_threads=threads)
        self._loads: dict[int, dict[Key, Any]] = {}

    def lookup(self, key: Any, req_context: Any) -> Any:
        """Whether the tier has a chunk; RETRY while it is being written."""
        own = key_of(key)
        if own in self._store:
            return LookupResult.HIT
        return LookupResult.RETRY if self._store.is_being_written(own) else LookupResult.MISS

    def touch(self, keys: Collection[Any], req_context: Any) -> None:
        """Mark chunks as just used."""
        self._store.touch([key_of(key) for key in keys])

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begin to write chunks of host memory."""
        self._store.store(job_metadata.job_id, [(key_of(key), block) for key, block in self._blocks(job_metadata)])

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begin to fill chunks of host memory."""
        blocks = list(self._blocks(job_metadata))
        self._loads[job_metadata.job_id] = {key_of(key): key for key, _ in blocks}
        self._store.load(job_metadata.job_id, [(key_of(key), block) for key, block in blocks])

    def _blocks(self, job: TransferJob) -> Iterator[tuple[Any, memoryview]]:
        for key, chunk in zip(job.keys, job.chunk_ids, strict=True):
            start = int(chunk) * self._chunk_bytes
            yield key, self._memory[start : start + self._chunk_bytes]

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that ended since the last call. Of a load, only verified chunks count as loaded."""
        for done in self._store.take_finished():
            names = self._loads.pop(done.job, None)
            yield JobResult(
                job_id=done.job,
                success=done.success,
                successful_keys=None if names is None or done.success else [names[key] for key in done.good],
                transfer_time=done.seconds,
                transfer_bytes=done.bytes,
            )

    def has_pending_work(self) -> bool:
        """Whether a job has not been reported."""
        return self._store.has_jobs

    def on_new_request(self, req_context: Any) -> Any:
        """No preference."""
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Wait until no copy touches host memory."""
        self._store.drain()

    def shutdown(self) -> None:
        """Wait for running copies and close the directory."""
        list(self._store.close())


def key_of(key: bytes) -> Key:
    """Our key of vLLM's: its block hash and group."""
    return hashlib.blake2b(key, digest_size=_KEY_BYTES).digest()


def layout_of(config: Any, block_bytes: int) -> ChunkLayout:
    """The layout of vLLM's chunks. `config`: its OffloadingConfig."""
    parallel = config.parallel
    fields = {
        "model": config.model.name,
        "dtype": config.model.dtype,
        "groups": [[group.tokens_per_block, *group.layer_names] for group in config.groups],
        "tokens_per_hash": config.cache.tokens_per_hash,
        "ranks": [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
        "canonical": [config.canonical_layout, config.kv_cache_layout, config.replicated_layout],
    }
    tokens = config.cache.tokens_per_hash * config.cache.blocks_per_chunk
    return ChunkLayout(block_bytes, tokens, json.dumps(fields, sort_keys=True))
