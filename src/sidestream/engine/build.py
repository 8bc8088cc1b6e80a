"""From a model and a config to a running engine; every check that can fail comes before the thread that serves.

On a GPU the kernels are warmed up here, too: their first launch waits for the device, and must not do so while requests
run (P3).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from sidestream.attention.triton import LONG_TOKENS, Partials, Straight
from sidestream.config import NEUTRAL, EngineConfig, EngineSizes, SamplingDefaults
from sidestream.device.base import Device
from sidestream.device.choice import torch_device
from sidestream.device.cpu import CpuDevice
from sidestream.engine.capacity import MAX_BLOCKS, pool_bytes
from sidestream.engine.inbox import Inbox
from sidestream.engine.loop import Engine, Parts
from sidestream.errors import ConfigError, DeviceLost
from sidestream.execute.executor import Executor
from sidestream.execute.frame import SHORT_TOKENS, Shape
from sidestream.execute.model import ForwardModel
from sidestream.kv.keys import BlockKeys
from sidestream.kv.layout import KVLayout
from sidestream.kv.pool import FencedPool
from sidestream.metrics import Metrics, Timeline
from sidestream.models.kept import keep_compiled
from sidestream.schedule.admission import Bounds
from sidestream.schedule.drafting import DraftPolicy
from sidestream.schedule.scheduler import Limits, Scheduler
from sidestream.speculate import NgramProposer, Proposer
from sidestream.tiers.base import PersistentTier
from sidestream.tiers.disk import DiskTier
from sidestream.tiers.host import HostTier
from sidestream.transfer import CostModel, TransferEngine
from sidestream.transfer.copy import BlockMemory
from sidestream.transfer.mover import layers_per_group
from sidestream.types import Tracer

if TYPE_CHECKING:  # transformers is imported by who loads a model
    from sidestream.models.adapter import PagedModel
    from sidestream.models.mtp import MtpHead

logger = logging.getLogger(__name__)

_WARMING_UP = "warming up the GPU's kernels"


class ServableModel(ForwardModel, Protocol):
    """What an engine needs of a model: `sidestream.models.PagedModel`, or a toy."""

    @property
    def fingerprint(self) -> str:
        """Names everything that its KV depends on besides tokens and layout."""
        ...

    @property
    def num_heads(self) -> int:
        """Query heads of its attention."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together that it was made for."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer."""
        ...


def build_engine(
    model: ServableModel,
    config: EngineConfig,
    *,
    eos_ids: Sequence[int] = (),
    timeline: Timeline | None = None,
    disk: PersistentTier | None = None,
    device: Device | None = None,
    tracer: Tracer | None = None,
    proposer: Proposer | None = None,
    defaults: SamplingDefaults = NEUTRAL,
    threaded: bool = True,
    tell: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Engine:
    """Allocate the pools, open the tiers, warm the device up, start the engine. Raises ConfigError; then nothing is
    left open.

    The model's weights are where `torch_device(config.device)` says, or where `device` is.

    eos_ids   ids that end an answer, besides the model's own: the tokenizer's
    disk      an open tier in place of the one that `config.offload.disk` names; closed with the engine, or by the
              caller if this raises
    device    a device in place of the one that `config.device` names; closed with the engine
    tracer   told of everything that ordering depends on, if `device` is not given
    proposer  drafts in place of the one that `config.speculative` names
    defaults  sampling options of requests that leave them out
    tell      is told what is being done, in words, and how much of it is done, of how much; 0 of 0: nobody knows
    threaded  False: whoever calls `Engine.step` is the engine thread, and must be the only one to use the engine
    """
    layout = model.layout
    on_gpu = (torch_device(config.device) if device is None else device.torch_device).type == "cuda"
    sizes = config.sizes("cuda" if on_gpu else "cpu")
    if sizes.kv_bytes is not None:
        _check_pool(sizes.kv_bytes, layout)
    if config.max_model_len is not None and config.max_model_len > model.max_model_len:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, the model was made for {model.max_model_len}: lower it"
        )
    if on_gpu:
        keep_compiled()
    with contextlib.ExitStack() as undo:
        metrics = Metrics()
        if device is None:
            device = _open_device(config, timeline, metrics, tracer)
            undo.callback(device.close)
        if config.speculative is None:
            proposer = None
        elif proposer is None:
            if config.speculative.proposer != "ngram":
                raise ConfigError(
                    f"the proposer {config.speculative.proposer} needs weights: give build_engine a proposer"
                )
            proposer = NgramProposer()
        kv_bytes = sizes.kv_bytes
        max_drafts = 0 if config.speculative is None else config.speculative.max_drafts
        if kv_bytes is None:
            kv_bytes = _free_pool_bytes(model, config, sizes.max_running * (1 + max_drafts), device.torch_device)
            _check_pool(kv_bytes, layout)
        num_blocks = kv_bytes // layout.block_bytes
        logger.info(
            "KV memory: %.2f GiB on %s, %d tokens (%s); up to %d requests run at once",
            num_blocks * layout.block_bytes / 2**30,
            device.kind,
            num_blocks * layout.block_tokens,
            "as asked"
            if config.kv_memory is not None
            else "what the weights leave free; --kv-memory changes it"
            if on_gpu
            else "the default",
            sizes.max_running,
        )
        spare = proposer is not None and proposer.hidden_size > 0
        memory = device.allocate("kv", (num_blocks + spare) * layout.block_bytes)
        given, (host, disk) = disk, _open_tiers(model, config, device, disk)
        if disk is not None and disk is not given:
            undo.callback(disk.close)
        blocks = FencedPool("device blocks", num_blocks, tracer=device.tracer)
        if device.tracer is not None:
            device.tracer.backed(blocks.name, memory.name, layout.block_bytes)
        inbox = Inbox()
        costs = CostModel(layout, clock=device.now)
        transfers = None
        if host is not None and config.offload is not None:
            transfers = TransferEngine(
                device=device,
                blocks=blocks,
                memory=BlockMemory(memory, layout),
                host=host,
                disk=disk,
                costs=costs,
                metrics=metrics,
                load_deadline_s=config.offload.load_deadline_s,
                notify=inbox.bell.ring,
            )
        chunk_tokens = sizes.chunk_tokens
        limits = Limits(
            layout.block_tokens,
            chunk_tokens,
            sizes.token_budget,
            prefix_cache=config.prefix_cache,
            tail_apart=device.kind != "cuda" if config.tail_apart is None else config.tail_apart,
        )
        keys = BlockKeys(fingerprint=model.fingerprint, layout=layout, salt=config.salt)
        speculative = config.speculative
        if speculative is not None and speculative.max_drafts + 2 > num_blocks * layout.block_tokens:
            raise ConfigError(
                f"max_drafts is {speculative.max_drafts}, the pool holds {num_blocks * layout.block_tokens} tokens: at most "
                f"{num_blocks * layout.block_tokens - 2} drafts fit behind a prompt; lower it or raise kv_memory"
            )
        rows = FencedPool("rows", sizes.max_running, tracer=device.tracer)
        bounds = Bounds(
            max_model_len=config.max_model_len or model.max_model_len,
            pool_tokens=num_blocks * layout.block_tokens,
            block_tokens=layout.block_tokens,
            vocab_size=model.vocab_size,
            max_unfinished=config.max_waiting + sizes.max_running,
        )
        partials, straight = _buffers(model, sizes, bounds, proposer, max_drafts, device) if on_gpu else (None, None)
        executor = Executor(
            device=device,
            model=model,
            memory=memory,
            num_rows=sizes.max_running,
            partials=partials,
            straight=straight,
            proposer=proposer,
            max_drafts=max_drafts,
            max_len=min(bounds.max_model_len, bounds.pool_tokens),
        )
        warm_blocks = max(sizes.max_running, -(-chunk_tokens // layout.block_tokens))
        warm_up = functools.partial(
            _warm_up, executor, blocks, warm_blocks, min(chunk_tokens, bounds.max_model_len), tell
        )
        if on_gpu and config.eager:
            warm_up(_WARMING_UP)
        elif on_gpu:
            gate_layers = 0 if transfers is None else layers_per_group(layout, device.segment_bytes)
            shapes = Shape.all_of(
                max_rows=sizes.max_running,
                chunk_tokens=chunk_tokens,
                max_tokens=min(sizes.token_budget, bounds.pool_tokens),
                drafts=max_drafts,
            )
            _capture(executor, model, proposer, shapes, gate_layers=gate_layers, warm_up=warm_up, tell=tell)
        parts = Parts(
            device=device,
            scheduler=Scheduler(
                limits=limits,
                blocks=blocks,
                rows=rows,
                keys=keys,
                tiers=transfers,
                drafts=None
                if speculative is None
                else DraftPolicy(max_drafts, adaptive=speculative.adaptive, max_slowdown=speculative.max_slowdown),
            ),
            executor=executor,
            blocks=blocks,
            layout=layout,
            eos_ids=tuple(sorted({*model.eos_token_ids, *eos_ids})),
            defaults=defaults,
            metrics=metrics,
            bounds=bounds,
            inbox=inbox,
            asynchronous=config.asynchronous,
            salt=config.salt,
            transfers=transfers,
            host=host,
            disk=disk,
            costs=costs,
            proposer="" if proposer is None else proposer.name,
            max_drafts=max_drafts,
            timeline=timeline,
        )
        undo.pop_all()
    return Engine(parts, threaded=threaded)


def _open_device(config: EngineConfig, timeline: Timeline | None, metrics: Metrics, tracer: Tracer | None) -> Device:
    if torch_device(config.device).type == "cpu":
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
            f"kv_memory is {kv_bytes} bytes, a block of {layout.block_tokens} tokens takes {layout.block_bytes}: give at least "
            f"{2 * layout.block_bytes} bytes"
        )


def _free_pool_bytes(model: ServableModel, config: EngineConfig, query_tokens: int, device: torch.device) -> int:
    """Bytes of the block pool that fit the GPU beside the weights and attention's buffers for `query_tokens` and a long
    chunk.
    """
    layout = model.layout
    torch.cuda.empty_cache()  # what the check of the loaded model left in torch's cache is free, too
    fits = pool_bytes(
        torch.cuda.mem_get_info(device)[0],
        token_bytes=layout.token_bytes,
        scratch_token_bytes=Partials.token_bytes(
            query_tokens + SHORT_TOKENS, heads=model.num_heads, head_dim=layout.head_dim
        )
        + layout.layer_bytes // layout.block_tokens,
        max_model_len=config.max_model_len or model.max_model_len,
    )
    return min(fits, MAX_BLOCKS * layout.block_bytes)


def _buffers(
    model: ServableModel, sizes: EngineSizes, bounds: Bounds, proposer: Proposer | None, max_drafts: int, device: Device
) -> tuple[Partials, Straight | None]:
    """What rows that decode are summed up in: as many as run at once, as long as the longest; by the model and by one
    that drafts. And where a long chunk's KV is laid out.
    """
    from sidestream.speculate.draft_model import DraftModelProposer

    tokens, layout = min(bounds.max_model_len, bounds.pool_tokens), model.layout
    try:
        partials = Partials.allocate(
            query_tokens=sizes.max_running * (1 + max_drafts) + SHORT_TOKENS,
            kv_tokens=(layout.num_blocks_for(tokens) + 1) * layout.block_tokens,
            heads=model.num_heads,
            head_dim=layout.head_dim,
            device=device.torch_device,
            also=proposer.shape if isinstance(proposer, DraftModelProposer) else None,
        )
        if min(sizes.chunk_tokens, tokens) < LONG_TOKENS:  # what is not warmed up by a chunk is not launched by one
            return partials, None
        return partials, Straight.allocate(
            kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            kv_tokens=partials.kv_tokens,  # what block tables are cut to when graphs are captured
            dtype=getattr(torch, layout.dtype),
            device=device.torch_device,
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the GPU has no room for attention's buffers of {sizes.max_running} rows of up to {tokens} tokens: lower max_running, max_model_len or "
            "kv_memory"
        ) from error


def _drafting(proposer: Proposer | None) -> Sequence[PagedModel | MtpHead]:
    """What a proposer computes with."""
    from sidestream.speculate.draft_model import DraftModelProposer
    from sidestream.speculate.mtp import MtpProposer

    if isinstance(proposer, MtpProposer):
        return (proposer.head,)
    return (proposer.model,) if isinstance(proposer, DraftModelProposer) else ()


def _capture(
    executor: Executor,
    model: ServableModel,
    proposer: Proposer | None,
    shapes: Sequence[Shape],
    *,
    gate_layers: int,
    warm_up: Callable[[str], None],
    tell: Callable[[str, int, int], None],
) -> None:
    """Compile the layers, warm up, and capture graphs. Kinds of layers that cannot be compiled run as they are written,
    what cannot be captured is launched kernel by kernel: so steps that are not captured are warmed up once it is known
    how their layers run (P3). Raises what steps raise of layers as they are written.
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
        except Exception as error:  # transformers and the model's own code raise anything here
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
    """See `Executor.warm_up`. `what` it is for, is told."""
    tell(what, 0, 0)
    start_s = time.monotonic()
    lease = blocks.take(min(blocks.num_available, num_blocks))
    try:
        executor.warm_up(lease.ids, chunk_tokens=chunk_tokens)
    finally:
        lease.release()  # each step was waited for
    logger.info("the GPU's kernels are warm after %.1f s", time.monotonic() - start_s)


def _open_tiers(
    model: ServableModel, config: EngineConfig, device: Device, given: PersistentTier | None
) -> tuple[HostTier | None, PersistentTier | None]:
    offload, layout = config.offload, model.layout
    if offload is None or offload.host_bytes == 0:
        if given is not None:
            raise ConfigError(
                "a disk tier was given, but offload is off: blocks go to disk through host memory; give offload a host size"
            )
        return None, None
    if offload.host_bytes < layout.block_bytes:
        raise ConfigError(
            f"offload host is {offload.host_bytes} bytes, a block takes {layout.block_bytes}: give more, or 0 for none"
        )
    if not config.prefix_cache:
        raise ConfigError("offload needs the prefix cache: leave prefix_cache on, or switch offload off")
    slots = offload.host_bytes // layout.block_bytes
    memory = device.allocate_host("host", slots * layout.block_bytes, item_bytes=layout.block_bytes)
    host = HostTier(memory, layout, ready_bytes=device.ready_bytes(memory), tracer=device.tracer)
    if given is not None or offload.disk is None:
        return host, given
    return host, DiskTier.open(
        Path(offload.disk).expanduser(),
        layout=layout,
        fingerprint=model.fingerprint,
        capacity_bytes=offload.disk_bytes,
        tracer=device.tracer,
    )
