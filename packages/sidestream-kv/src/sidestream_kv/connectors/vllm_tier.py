"""A secondary tier of vLLM's tiered KV offload: chunks that vLLM keeps in host memory are also kept in a persistent
tier, which is bounded, verified on every read, and survives restarts and kill -9 (docs/vllm.md).

vLLM makes it in the scheduler's process and calls it on the scheduler's thread. Only its interface of tiers is used;
what differs between its versions is in `vllm_versions`. Knows the protocol PersistentTier, and no tier.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from sidestream_kv.connectors import vllm_versions
from sidestream_kv.connectors.block_store import BlockStore
from sidestream_kv.connectors.chunks import key_of
from sidestream_kv.connectors.tier_options import TierOptions
from sidestream_kv.connectors.vllm_identity import weights_of
from sidestream_kv.errors import ConfigError
from sidestream_kv.offload.tiers.base import Block
from sidestream_kv.types import Key

_log = logging.getLogger(__name__)


def _weights(vllm_config: Any) -> str:
    if vllm_config is None:
        raise ConfigError(
            "this version of vLLM tells a tier of OffloadingConnector neither revision nor overrides of the model, so "
            'blocks of other weights could not be told apart: use "kv_connector": "SidestreamOffloadingConnector" '
            "with the same options, or give `fingerprint`, a name of these weights and overrides"
        )
    return weights_of(vllm_config)


class SidestreamTier(SecondaryTierManager):  # type: ignore[misc]
    """A persistent tier behind vLLM's host memory. See TierOptions."""

    medium = vllm_versions.MEDIUM

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        *,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        """Raises ConfigError if an option is wrong or the medium cannot be used."""
        detector = {} if backpressure_detector is None else {"backpressure_detector": backpressure_detector}
        super().__init__(offloading_spec, primary_kv_view, tier_type, **detector)
        assert primary_kv_view.strides is not None
        self._chunk_bytes = primary_kv_view.strides[0]
        vllm_versions.warn_if_untried()
        try:
            chosen = TierOptions(**options)
            engine = vllm_versions.deployment_of(offloading_spec, block_bytes=self._chunk_bytes)
            weights = chosen.fingerprint or _weights(engine.vllm_config)
            tier = chosen.open(f"engine-{engine.engine_index}", engine.layout, weights)
        except ConfigError as error:
            raise ConfigError(f"secondary tier {tier_type}: {error}") from error
        self._memory = primary_kv_view.cast("B")
        self._store = BlockStore(
            tier,
            num_threads=chosen.threads,
            max_pending_bytes=chosen.max_pending_bytes,
            load_deadline_s=chosen.load_deadline_s,
        )
        self._names: dict[int, dict[Key, Any]] = {}  # vLLM's keys of each load

    def lookup(self, key: Any, req_context: Any) -> Any:
        """HIT if the tier has the chunk. A chunk that is being written is still in host memory, so it is a MISS here
        and nothing has to wait for the write.
        """
        return LookupResult.HIT if key_of(key) in self._store else LookupResult.MISS

    def touch(self, keys: Collection[Any], req_context: Any) -> None:
        """Mark the chunks of a request, in its order, as just used."""
        self._store.touch([key_of(key) for key in keys])

    def submit_store(self, job_metadata: Any) -> None:
        """Begin to write chunks of host memory."""
        self._store.store(job_metadata.job_id, [(key_of(key), chunk) for key, chunk in self._chunks(job_metadata)])

    def submit_load(self, job_metadata: Any) -> None:
        """Begin to fill chunks of host memory."""
        self._names[job_metadata.job_id] = {key_of(key): key for key in job_metadata.keys}
        self._store.load(job_metadata.job_id, [(key_of(key), chunk) for key, chunk in self._chunks(job_metadata)])

    def _chunks(self, job: Any) -> Iterator[tuple[Any, Block]]:
        for key, chunk in zip(job.keys, vllm_versions.chunk_ids_of(job), strict=True):
            yield key, self._memory[chunk * self._chunk_bytes : (chunk + 1) * self._chunk_bytes]

    def get_finished_jobs(self) -> Iterable[Any]:
        """Jobs that ended since the last call. Of a load, only verified chunks count as loaded."""
        for done in self._store.take_finished():
            names = self._names.pop(done.job, None)
            yield vllm_versions.result_of(
                done.job,
                success=done.success,
                successful_keys=None if names is None or done.success else [names[key] for key in done.good],
                seconds=done.seconds,
                num_bytes=done.num_bytes,
            )

    def on_new_request(self, req_context: Any) -> Any:
        """No preference."""
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Wait until no copy touches host memory. vLLM calls it to reset its caches, perhaps because it got other
        weights, which the next start would not know of: so the tier is off until then.
        """
        self._store.stop("vLLM reset its caches, and its weights may have changed")
        self._store.drain()

    def shutdown(self) -> None:
        """Finish the copies and close the medium. Raises TierTimeout if one does not end; vLLM then keeps the memory
        mapped.
        """
        self._store.close()
        self._memory.release()
