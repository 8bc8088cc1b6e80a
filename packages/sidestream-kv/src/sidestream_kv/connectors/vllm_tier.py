"""A secondary tier of vLLM's tiered KV offload: chunks that vLLM keeps in host memory are also kept in a persistent
tier, which is bounded, verified on every read, and survives restarts and kill -9 (docs/vllm.md).

vLLM makes it in the scheduler's process and calls it on the scheduler's thread. Only its interface of tiers is used;
what differs between its versions is in `vllm_versions`. Knows the protocol PersistentTier, and no tier.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from sidestream_kv.config import OffloadConfig, options_checked, parse_bytes
from sidestream_kv.connectors import vllm_versions
from sidestream_kv.connectors.block_store import BlockStore
from sidestream_kv.connectors.vllm_identity import key_of, weights_of
from sidestream_kv.errors import ConfigError
from sidestream_kv.offload.tiers.base import Block, PersistentTier, TierContext
from sidestream_kv.offload.tiers.stack import open_tiers
from sidestream_kv.types import Key

_log = logging.getLogger(__name__)


@options_checked(ConfigError)
@dataclass(frozen=True, slots=True)
class TierOptions:
    """The options of a secondary tier of type "sidestream". The first four are those of OffloadConfig.

    disk             directory of the disk tier, for one engine at a time; each data-parallel engine has a subdirectory
    disk_capacity    bytes that each engine's subdirectory may take
    load_deadline_s  seconds after which a load that has not begun is given up, and its KV computed
    tiers            instead of `disk`: options of another persistent tier, by its name
    threads          reads, and writes, at the same time
    max_pending      bytes of host memory that may wait to be written; chunks beyond are not stored
    fingerprint      name of the weights; None: hash of the checkpoint's files and the configuration
    """

    disk: str | None = None
    disk_capacity: int | str = "10GiB"
    load_deadline_s: float = 10.0
    tiers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    threads: int = 4
    max_pending: int | str = "1GiB"
    fingerprint: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.threads, int) or not 1 <= self.threads <= 64:
            raise ConfigError(f"threads is {self.threads!r}: give a whole number from 1 to 64")
        if bool(self.disk) + len(self.tiers) != 1:
            raise ConfigError(
                f"a secondary tier has one medium, not {[*filter(None, [self.disk]), *self.tiers]}: give `disk`, a "
                "directory, and for a second medium another entry of secondary_tiers"
            )
        parse_bytes(self.max_pending, option="max_pending")

    def open(self, deployment: vllm_versions.Deployment) -> PersistentTier:
        """Open the medium. Raises ConfigError if another engine uses it or another model made it."""
        config = OffloadConfig(
            disk=None if self.disk is None else Path(self.disk) / f"engine-{deployment.engine_index}",
            disk_capacity=self.disk_capacity,
            load_deadline_s=self.load_deadline_s,
            tiers=self.tiers,
        )
        context = TierContext(deployment.layout, self.fingerprint or _weights(deployment.vllm_config))
        (tier,) = open_tiers(config, context).values()
        return tier


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
            tier = chosen.open(vllm_versions.deployment_of(offloading_spec, block_bytes=self._chunk_bytes))
        except ConfigError as error:
            raise ConfigError(f"secondary tier {tier_type}: {error}") from error
        self._memory = primary_kv_view.cast("B")
        self._store = BlockStore(
            tier,
            num_threads=chosen.threads,
            max_pending_bytes=parse_bytes(chosen.max_pending, option="max_pending"),
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
