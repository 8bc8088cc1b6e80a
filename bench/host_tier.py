"""Time until the memory of the host tier is pinned, and the cached tokens that the first conversations find there.

ready       seconds per GiB from the allocation of the host tier's memory until all of it is pinned
start       cached tokens of conversations that begin as soon as the engine serves, while memory is still being pinned.
            Their KV is four times the size of the device's pool
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np

from bench.gpu import open_device
from bench.requests import ask_at_once, random_prompts
from proof.random_models import random_model
from proof.report import Figure, at_least, at_most
from sidestream.config import EngineConfig
from sidestream.engine import build_engine
from sidestream.errors import SidestreamError
from sidestream_kv.config import OffloadConfig, parse_bytes
from sidestream_kv.device.base import Device
from sidestream_kv.device.choice import torch_device
from sidestream_kv.device.kinds import CUDA
from sidestream_kv.device.machine import process_age_s

_ITEM_BYTES = 36 * 64 << 10  # a block of Qwen3-8B
_POLL_S = 0.005
_PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the measurement.

    conversations   number of conversations; each round runs all of them
    tokens          tokens of each prompt
    outputs         tokens of each answer
    rounds          number of rounds
    """

    conversations: int
    tokens: int
    outputs: int
    rounds: int


_FULL = Sizes(16, 8200, 32, 3)
_TINY = Sizes(4, 200, 4, 2)


def measure(*, device: str, shape: str, host: str, rounds: int, on_progress: Callable[[str], None]) -> list[Figure]:
    """Pin `host` bytes `rounds` times, then start an engine with a host tier of that size. Raises SidestreamError if
    pinning does not end.
    """
    num_bytes = parse_bytes(host, option="host")
    kind = torch_device(device).type
    seconds = []
    for number in range(rounds):
        on_progress(f"pinning {host}, {number + 1} of {rounds}")
        opened = open_device(kind)
        try:
            seconds.append(_ready_s(opened, num_bytes))
        finally:
            opened.close()
    gib = num_bytes / 2**30
    return [
        Figure("host_tier_ready_s_per_gib", median(seconds) / gib, "s/GiB", at_most(0.1)),
        Figure("host_tier_ready_s_per_gib_first", seconds[0] / gib, "s/GiB"),
        Figure("host_tier_gib", gib, "GiB"),
        *_start(device, shape, host, _FULL if kind == CUDA else _TINY, on_progress),
    ]


def _ready_s(device: Device, num_bytes: int) -> float:
    """Seconds until all of a new allocation of host memory is pinned."""
    start = time.perf_counter()
    memory = device.allocate_host("host", num_bytes, item_bytes=_ITEM_BYTES)
    while device.grows(memory):
        if time.perf_counter() - start > _PATIENCE_S:
            raise SidestreamError(f"host memory is not pinned after {_PATIENCE_S:g} s")
        time.sleep(_POLL_S)
    seconds = time.perf_counter() - start
    if (ready := device.ready_bytes(memory)) < num_bytes:
        raise SidestreamError(
            f"only {ready / 2**30:.2f} GiB could be pinned: "
            "raise the limit of locked memory (ulimit -l), or give --host less"
        )
    return seconds


def _start(device: str, shape: str, host: str, sizes: Sizes, on_progress: Callable[[str], None]) -> list[Figure]:
    """Run all conversations at once, round after round, as soon as the engine serves. Figures of each round: its
    seconds, and the share of prompt tokens that were found in host memory.
    """
    on_progress("making the model")
    model = random_model(shape, device=torch_device(device))
    layout, random = model.layout, np.random.default_rng(0)
    prompts = random_prompts(random, model.vocab_size, count=sizes.conversations, tokens=sizes.tokens)
    blocks = layout.num_blocks_for(sizes.tokens + sizes.outputs) * sizes.conversations
    on_progress("starting the engine")
    config = EngineConfig(
        device=device,
        kv_memory=(blocks // 4 + 1) * layout.block_bytes,
        max_running=sizes.conversations,
        max_model_len=2 * sizes.tokens,
        eager=True,  # no compilation: the engine starts in seconds, while memory is still being pinned
        offload=OffloadConfig(host=host),
    )
    engine = build_engine(model, config)
    try:
        tier = engine.parts.tiers.host if engine.parts.tiers is not None else None
        assert tier is not None
        figures = [
            Figure("engine_ready_s", process_age_s(), "s"),
            Figure("host_tier_ready_share_at_start", tier.ready_bytes / tier.memory.num_bytes, "share"),
        ]
        for number in range(1, sizes.rounds + 1):
            on_progress(f"round {number} of {sizes.rounds}")
            begin = time.perf_counter()
            answers = [answer.wait() for answer in ask_at_once(engine, prompts, sizes.outputs)]
            seconds = time.perf_counter() - begin
            found = sum(answer.cached.host for answer in answers) / (sizes.tokens * sizes.conversations)
            figures += [
                Figure(f"round_{number}_s", seconds, "s"),
                Figure(f"round_{number}_found_in_host", found, "share", at_least(0.9) if number > 1 else None),
            ]
        return figures
    finally:
        engine.close()
