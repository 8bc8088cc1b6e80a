"""Sidestream's transfer engine, host tier and disk tier in vLLM, in place of vLLM's own offload (docs/vllm.md).

vLLM makes one connector in the scheduler's process, which plans (`planner`), and one in each worker, which executes
(`carrier`). No call waits for a transfer: a load is told to vLLM when it has ended, and the device blocks of transfers
in flight have one more user, so neither an ended nor a preempted request frees them.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from sidestream_kv.config import OffloadConfig, options_checked
from sidestream_kv.connectors import vllm_versions
from sidestream_kv.connectors.carrier import Carrier, Finished
from sidestream_kv.connectors.key_events import KeyEvents
from sidestream_kv.connectors.orders import Orders, Report
from sidestream_kv.connectors.planner import Planner
from sidestream_kv.connectors.vllm_identity import each_layer_waits, weights_of
from sidestream_kv.connectors.vllm_stats import Stats, prometheus_metrics
from sidestream_kv.device.base import Device, Memory, Stream
from sidestream_kv.device.cpu import CpuDevice
from sidestream_kv.device.kinds import CPU, CUDA
from sidestream_kv.errors import ConfigError
from sidestream_kv.offload import pacing
from sidestream_kv.offload.tiers.base import TierContext
from sidestream_kv.offload.tiers.stack import BlockMemory, TierStack, share_of_rank

_log = logging.getLogger(__name__)

# Share of the device's blocks that stores may hold after their requests have ended.
_MOST_HELD = 0.5


@options_checked(ConfigError)
@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """The options in `kv_connector_extra_config`. Sizes are for all workers of an engine together.

    host             bytes of host memory
    disk             directory of the disk tier, for one engine at a time; each data-parallel engine has a subdirectory
    disk_capacity    bytes that each engine's subdirectory may take
    load_deadline_s  seconds that a request waits for the disk; then its KV is computed
    fingerprint      name of the weights; None: hash of the checkpoint's files and the configuration
    self_check       share of the blocks in host memory that get a checksum
    """

    host: int | str = "4GiB"
    disk: str | None = None
    disk_capacity: int | str = "10GiB"
    load_deadline_s: float = 10.0
    fingerprint: str | None = None
    self_check: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.self_check, int | float) or not 0 <= self.self_check <= 1:
            raise ConfigError(f"self_check is {self.self_check!r}: give a share from 0 to 1")
        if self.tiers(0, 1, 0).host_bytes == 0:
            raise ConfigError("host is 0 bytes: give host memory a size, such as 4GiB, or leave the connector out")

    def tiers(self, rank: int, num_ranks: int, engine: int) -> OffloadConfig:
        """The options of one worker's tiers."""
        config = OffloadConfig(
            host=self.host,
            disk=None if self.disk is None else Path(self.disk) / f"engine-{engine}",
            disk_capacity=self.disk_capacity,
            load_deadline_s=self.load_deadline_s,
        )
        return share_of_rank(config, rank, num_ranks)


@dataclass
class SidestreamMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to each worker."""

    orders: Orders = field(default_factory=Orders)


@dataclass
class SidestreamWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From the workers to the scheduler."""

    reports: tuple[Report, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> SidestreamWorkerMetadata:
        """The reports of both."""
        assert isinstance(other, SidestreamWorkerMetadata)
        return SidestreamWorkerMetadata(self.reports + other.reports)


class SidestreamConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See ConnectorOptions. Which methods vLLM calls on which side is in its KVConnectorBase_V1."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Raises ConfigError for a wrong option, and for layers that cannot be offloaded."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        # A load may find that its blocks were evicted: the request then computes its KV.
        transfer.kv_load_failure_policy = "recompute"
        try:
            self._options = ConnectorOptions(**(transfer.kv_connector_extra_config or {}))
            groups, boundary = vllm_versions.groups_of(vllm_config, kv_cache_config)
        except ConfigError as error:
            raise ConfigError(f"SidestreamConnector: {error}") from error
        wanted = vllm_config.kv_events_config
        self._events = KeyEvents() if wanted is not None and wanted.enable_kv_cache_events else None
        self._block_tokens = [group.block_tokens for group in groups]
        self._has_states = any(group.handed for group in groups)
        self._planner: Planner | None = None
        self._carrier: Carrier | None = None
        self._finished = Finished()
        self._layers: dict[str, list[int]] = {}  # parts of a block, by name of a layer
        self._by_layer = False
        self._stats = Stats()
        if role == KVConnectorRole.SCHEDULER:
            vllm_versions.warn_if_untried()
            self._planner = Planner(
                groups=groups,
                boundary=boundary,
                num_ranks=vllm_config.parallel_config.world_size,
                most_held=int(kv_cache_config.num_blocks * _MOST_HELD),
                events=self._events,
            )

    # ------------------------------------------------------------------ worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Open the tiers. Raises ConfigError if they cannot be used."""
        regions, layers = vllm_versions.regions_of(kv_caches, self._kv_cache_config)
        self._open(regions, layers, [region.numel() // self._kv_cache_config.num_blocks for region in regions])

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: Any) -> None:
        """Open the tiers, for one tensor that has all layers of a block together."""
        raw = torch.empty(0, dtype=torch.uint8, device=kv_cache.device).set_(kv_cache.untyped_storage())
        num_layers, layers = vllm_versions.layers_in_blocks(kv_cache, self._kv_cache_config)
        page = raw.numel() // self._kv_cache_config.num_blocks // num_layers
        self._open([raw], layers, [page] * num_layers)

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """True: a block in one piece is copied fastest."""
        return True

    def _open(self, regions: list[torch.Tensor], layers: dict[str, list[int]], parts: Sequence[int]) -> None:
        self._layers, self._by_layer = layers, each_layer_waits(self._vllm_config, layers)
        parallel = self._vllm_config.parallel_config
        layout = vllm_versions.layout_of(self._vllm_config, self._kv_cache_config, tuple(parts))
        fingerprint = self._options.fingerprint or ""
        if self._options.disk is not None:
            layout = dataclasses.replace(
                layout, fields={**layout.fields, **vllm_versions.check_hash(self._vllm_config)}
            )
            fingerprint = fingerprint or weights_of(self._vllm_config)
        config = self._options.tiers(parallel.rank, parallel.world_size, parallel.data_parallel_index)
        device, stream = _device_of(regions[0].device, apart=len(regions) > 1)
        try:
            tiers = TierStack.open(config, device, TierContext(layout, fingerprint))
        except BaseException:
            device.close()
            raise
        self._carrier = Carrier(
            rank=parallel.rank,
            device=device,
            memory=BlockMemory(Memory("kv", tuple(regions), layout.parts), layout),
            tiers=tiers,
            stream=stream,
            load_deadline_s=config.load_deadline_s,
            self_check=self._options.self_check,
            tells_early=not self._has_states,
        )

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Before a step is launched."""
        super().bind_connector_metadata(connector_metadata)
        if self._carrier is not None and isinstance(connector_metadata, SidestreamMetadata):
            orders = connector_metadata.orders
            calls = vllm_versions.calls_by_layer(self._vllm_config, most_tokens=orders.most_tokens)
            self._carrier.begin(orders, by_layer=self._by_layer and calls)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: see `wait_for_save`."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Let the layer wait for the last copies of a load whose request is in this step already."""
        if self._carrier is not None:
            for layer in self._layers.get(layer_name, ()):
                self._carrier.wait_for_layer(layer)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: see `wait_for_save`."""

    def wait_for_save(self) -> None:
        """Submit the step's transfers, behind the step. With drafts, vLLM calls it after `get_finished`, when the draft
        model has written its KV, too.
        """
        if self._carrier is not None:
            self._carrier.execute()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The requests whose loads have ended. Also submits the step's transfers, for versions that leave
        `wait_for_save` out when a step computes nothing.
        """
        if self._carrier is None:
            return None, None
        if self._vllm_config.speculative_config is None:
            self._carrier.execute()
        self._finished = self._carrier.finished()
        return None, self._finished.loaded or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Like `get_finished`, with the requests whose loads have failed."""
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving = self._finished.failed
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of failed loads, for versions in which a load cannot name its request."""
        return set() if vllm_versions.FAILED_LOAD_NAMES_REQUEST else self._finished.failed_blocks

    def build_connector_worker_meta(self) -> SidestreamWorkerMetadata | None:
        """The worker's report of this step."""
        return None if self._carrier is None else SidestreamWorkerMetadata((self._carrier.report(),))

    def get_kv_connector_stats(self) -> Stats | None:
        """What was transferred since the last call."""
        return None if self._carrier is None else self._stats.since(self._carrier.metrics)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        """Statistics that came from another process."""
        return Stats(data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> Any:
        """Counters for vLLM's /metrics."""
        return prometheus_metrics(*arguments)

    def shutdown(self) -> None:
        """Finish the transfers, for at most some seconds, and close the tiers."""
        if self._carrier is not None:
            self._carrier.close()
            self._carrier = None

    # ------------------------------------------------------------------ scheduler

    @property
    def _plans(self) -> Planner:
        assert self._planner is not None, "this connector is a worker's"
        return self._planner

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Keep the pool, whose blocks get one more user while a transfer uses them."""
        self._plans.bind(gpu_block_pool)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens to load, and that they are loaded while other requests compute."""
        if getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        found = self._plans.match(request, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Load into the allocated blocks."""
        self._plans.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> SidestreamMetadata:
        """What the workers have to do with this step."""
        scheduled = _scheduled(scheduler_output)
        handed = vllm_versions.states_of(scheduler_output)
        return SidestreamMetadata(self._plans.plan_step(scheduled, scheduler_output.num_scheduled_tokens, handed))

    def update_connector_output(self, connector_output: Any) -> None:
        """Take over the workers' reports."""
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, SidestreamWorkerMetadata):
            for report in metadata.reports:
                self._plans.take(report)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Store the last blocks. vLLM may free the request's blocks at once."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Store the last blocks. vLLM may free the request's blocks at once."""
        self._plans.request_ended(request.request_id, block_ids)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether vLLM must go on stepping although no request is left, so that blocks become free again."""
        return self._planner is not None and self._planner.busy

    def has_pending_block_frees(self) -> bool:
        """Whether waiting for transfers makes blocks free, so that no request must be preempted."""
        return self._planner is not None and self._planner.holds_blocks

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> Mapping[Any, int]:
        """Where the KV of a request came from."""
        if not num_external_tokens:
            return {}
        return {vllm_versions.hit_source(self._plans.came_from(request.request_id)): num_external_tokens}

    def take_events(self) -> Iterable[Any]:
        """Blocks that host memory and the disk gained or lost since the last call, as vLLM's KV events."""
        for event in () if self._events is None else self._events.take():
            yield vllm_versions.kv_event_of(event, block_tokens=self._block_tokens[event.group])

    def reset_cache(self) -> bool:
        """Forget all blocks, in host memory and on disk."""
        self._plans.reset()
        return True


def _scheduled(output: Any) -> Iterable[tuple[str, Any, bool]]:
    """Id, new blocks by group, and whether the earlier blocks are lost, for each request of a step."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.block_ids, True
    cached = output.scheduled_cached_reqs
    for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
        yield request_id, block_ids, request_id in cached.resumed_req_ids


def _device_of(kind: torch.device, *, apart: bool) -> tuple[Device, Callable[[], Stream] | None]:
    """A device next to vLLM's, and a function that returns the stream on which the calling thread launches work; None:
    work has ended when its launch returns. `apart`: the layers of a block are in allocations of their own.
    """
    if kind.type == CPU:
        return CpuDevice(compute_threads=1), None
    if kind.type != CUDA:
        raise ConfigError(f"SidestreamConnector: no copies from and to {kind}: use a CUDA GPU or a CPU")
    from sidestream_kv.device.cuda import CudaDevice

    device = CudaDevice(index=kind.index or 0)
    device.warm_up()
    if apart:
        pace = pacing.TO_DEVICE_BESIDE_COPIES
        device.make_stages(count=pace.streams, num_bytes=pace.slice_bytes)
    return device, device.current_stream
