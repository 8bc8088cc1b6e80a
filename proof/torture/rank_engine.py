"""Starts the engine of the torture test of ranks: rank 0 in this process, each other rank in its own, all of them with
delayed work and failing copies.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from proof.tiny_models import tiny_model_dir
from proof.torture.conversations import LENGTH
from proof.torture.hardware import DEVICES, open_device
from proof.torture.rank_program import Meddling, meddle
from sidestream.config import EngineConfig, SpeculativeConfig
from sidestream.engine import Engine, build_engine
from sidestream.errors import ConfigError, DeviceLost
from sidestream.models.loader import cache_parts, load_for
from sidestream.ranks.worker_pool import RankProcesses, check_ranks
from sidestream_kv.config import OffloadConfig, unknown_name
from sidestream_kv.device.choice import torch_device
from sidestream_kv.device.kinds import CPU, CUDA

OUTPUTS = 16
"""Largest number of tokens of an answer."""
DRAFTS = 3
"""Largest number of draft tokens per step."""
_HEADS = 8
_LAYERS = 3
_GROUPS = 3  # of layers: a load has a first, a middle and a last gate
_BLOCK_TOKENS = 16
_CLOSE_S = 60.0
_DELAY = (0.2, 20e-6, 3e-3)
_FAULTS = 0.02
# Longer than a step, so that a layer that does not wait for its load is read too early.
_LOAD_DELAYS = {CPU: (0.5, 5e-3, 20e-3), CUDA: (0.5, 1e-3, 8e-3)}
# Longer than a step on a busy machine.
_LATE_LOADS = {CPU: (0.5, 50e-3, 200e-3), CUDA: (0.5, 5e-3, 30e-3)}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Number of conversations, blocks of each tier, and requests that run at once. All conversations together have
    several times as many blocks as the device, and more than host memory.
    """

    conversations: int
    device: int
    host: int
    disk: int
    running: int


SIZES = {CPU: Sizes(16, 44, 96, 160, 6), CUDA: Sizes(48, 128, 320, 560, 12)}
"""By kind of device."""


def checked_config(kind: str, ranks: int) -> EngineConfig:
    """The engine's options, without the sizes of its tiers. Raises ConfigError for a device that cannot be used and for
    a wrong number of ranks.
    """
    if kind not in DEVICES:
        raise ConfigError(unknown_name("device", kind, DEVICES))
    if ranks < 2 or _HEADS % ranks:
        allowed = " or ".join(str(count) for count in range(2, _HEADS + 1) if _HEADS % count == 0)
        raise ConfigError(
            f"tensor_parallel is {ranks}: the model of this test has {_HEADS} KV heads, which two or more ranks divide "
            f"among them: give {allowed}"
        )
    torch_device(kind)
    config = EngineConfig(
        device=kind,
        tensor_parallel=ranks,
        dtype="float32",
        block_tokens=_BLOCK_TOKENS,
        max_running=SIZES[kind].running,
        max_model_len=LENGTH + OUTPUTS,
        chunk_tokens=64,
        token_budget=128,
        compute_threads=1,
        speculative=SpeculativeConfig(max_drafts=DRAFTS, adaptive=False),
        generation_config="none",
    )
    check_ranks(config)
    return config


def write_model(directory: Path) -> Path:
    """Write the model with its random weights. Returns `directory`."""
    changes = {"num_hidden_layers": _LAYERS, "num_attention_heads": _HEADS, "num_key_value_heads": _HEADS}
    return tiny_model_dir("qwen3", directory, 0, **changes)


@contextlib.contextmanager
def rank_engine(
    model: Path, config: EngineConfig, disk: Path, *, seed: int, late: bool = False, without: tuple[str, ...] = ()
) -> Iterator[Engine]:
    """Context manager: the engine. It prefers loads to computing whenever a tier holds KV, and its steps join loads
    long before their end.

    disk      directory of the disk tier
    late      loads take many times as long
    without   names of rules that the ranks other than 0 run without
    """
    kind, ranks = config.device, config.tensor_parallel
    where, sizes = torch_device(kind), SIZES[kind]
    parts = cache_parts(str(model), dtype=config.dtype, block_tokens=config.block_tokens, device=where, ranks=ranks)
    num_bytes = parts.kv.block_bytes  # of a rank's share
    config = replace(
        config,
        kv_memory=sizes.device * num_bytes,
        offload=OffloadConfig(
            host=sizes.host * num_bytes * ranks, disk=disk, disk_capacity=sizes.disk * num_bytes * ranks
        ),
    )
    load_delay = (_LATE_LOADS if late else _LOAD_DELAYS)[kind]
    meddling = Meddling(seed, num_bytes // _GROUPS, _DELAY, load_delay, _FAULTS, without)
    processes = RankProcesses(str(model), config, program=meddling.program())
    try:
        engine = _build(str(model), config, processes, meddling)
    except BaseException as error:
        reason = processes.explain(error)
        processes.kill()
        raise reason from (error if reason is not error else None)
    try:
        yield engine
    finally:
        engine.close(flush_s=_CLOSE_S)
        processes.close()


def _build(model: str, config: EngineConfig, processes: RankProcesses, meddling: Meddling) -> Engine:
    group, ranks = processes.group, processes.transport.ranks
    loaded = load_for(model, config, device=torch_device(config.device), group=group)
    with contextlib.ExitStack() as undo:
        device = open_device(config.device)
        undo.callback(device.close)
        meddle(0, device, meddling)
        engine = build_engine(loaded, config, device=device, ranks=ranks, group=group)
        undo.pop_all()
    try:
        processes.start_serving()
    except BaseException as error:
        ranks.lose(DeviceLost(f"a rank did not start: {error}"))
        engine.close()
        raise
    engine.loop.times.lead_s = lambda: math.inf  # type: ignore[method-assign]
    costs = engine.parts.costs
    assert costs is not None
    costs.saw_prefill = lambda *_: None  # type: ignore[method-assign]  # without its time, KV is loaded, never computed
    return engine
