"""Two engines, each in a process of its own, that share a disk directory or a store on this machine: TTFT of prompts
that the other engine has computed, divided by TTFT without any KV; and bytes per second of a store's reads and writes.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

from bench.prefix import check_source, run_each, sample_prompts
from proof.report import Figure, at_least, at_most
from proof.store_servers import MooncakeServer, ValkeyServer
from sidestream.cli.prompt_runs import ChildEngine
from sidestream.errors import ConfigError
from sidestream_kv.config import OffloadConfig
from sidestream_kv.device.kinds import CPU
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.offload.tiers.base import TierContext
from sidestream_kv.offload.tiers.stack import open_tiers

# Blocks of 2 MiB, as of Qwen3-8B with 16 tokens.
_LAYOUT = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16")
_BLOCKS = 64
_STREAMS = 2  # as many as read a tier at the same time
# After so long, the last blocks of the first engine are written, and the second one may find them.
_WRITTEN_S = 1.0


def measure(model: str, *, prompt_tokens: int, rounds: int, on_progress: Callable[[str], None]) -> list[Figure]:
    """Measure each store. Raises ConfigError if a server cannot be started here."""
    if why := ValkeyServer.why_none() or MooncakeServer.why_none():
        raise ConfigError(f"the benchmark starts the servers of both stores: it {why}")
    with tempfile.TemporaryDirectory(prefix="sidestream-shared-") as directory:
        figures = _ttft("disk", {"disk": directory}, 1 / 20, model, prompt_tokens, rounds, on_progress)
    for name in ("redis", "mooncake"):
        server = ValkeyServer(tcp=True) if name == "redis" else MooncakeServer(segment_bytes=2 << 30)
        try:
            options = {"url": server.url} if isinstance(server, ValkeyServer) else {"master": server.address}
            figures += _ttft(name, {"tiers": {name: options}}, 1 / 10, model, prompt_tokens, rounds, on_progress)
            on_progress(f"throughput of {name}")
            figures += _throughput(name, options)
        finally:
            server.close()
    return [*figures, Figure("prompt_tokens", prompt_tokens, "tokens")]


def _ttft(
    name: str,
    tier: dict[str, Any],
    most: float,
    model: str,
    prompt_tokens: int,
    rounds: int,
    on_progress: Callable[[str], None],
) -> list[Figure]:
    from sidestream.models.catalog import resolve

    path = resolve(model)
    prompts = sample_prompts(path, prompt_tokens, rounds)
    config = {"device": CPU, "offload": {"host": "1GiB", **tier}}
    with ChildEngine(path, config) as first, ChildEngine(path, config) as second:
        cold = run_each(first, prompts, lambda number: on_progress(f"{name}: cold {number} of {rounds}"))
        time.sleep(_WRITTEN_S)
        shared = run_each(second, prompts, lambda number: on_progress(f"{name}: shared {number} of {rounds}"))
    check_source("cold", cold, lambda run: run.reused == 0)
    check_source(name, shared, lambda run: max(run.shared, run.disk) > 0.95 * prompt_tokens)
    identical = sum(a.tokens == b.tokens for a, b in zip(cold, shared, strict=True))
    cold_s, shared_s = (median(run.ttft_s for run in runs) for runs in (cold, shared))
    return [
        Figure(f"ttft_{name}_over_cold", shared_s / cold_s, "ratio", at_most(most)),
        Figure(f"ttft_{name}_first_over_cold", shared[0].ttft_s / cold_s, "ratio"),
        Figure(f"identical_answers_{name}", identical / rounds, "share", at_least(1.0)),
        Figure(f"ttft_cold_beside_{name}_ms", cold_s * 1e3, "ms"),
        Figure(f"ttft_{name}_ms", shared_s * 1e3, "ms"),
    ]


def _throughput(name: str, options: dict[str, Any]) -> list[Figure]:
    """Write blocks, and read them in as many threads as an engine has streams. The reads verify every bit."""
    (tier,) = open_tiers(OffloadConfig(tiers={name: options}), TierContext(_LAYOUT, "bench")).values()
    block = np.random.default_rng(0).integers(0, 256, _LAYOUT.block_bytes, np.uint8)
    grants = [tier.index.reserve(number.to_bytes(16, "little")) for number in range(_BLOCKS)]
    entries = [grant.entry for grant in grants if grant is not None]

    def write(number: int) -> None:
        grant = grants[number]
        assert grant is not None
        tier.write(grant, block)

    try:
        write_s = _seconds(write, streams=1)
        read_s = _seconds(lambda number: tier.read(entries[number], np.empty_like(block)), streams=_STREAMS)
    finally:
        tier.close()
    gib = _BLOCKS * _LAYOUT.block_bytes / 2**30
    return [
        Figure(f"{name}_write_gib_s", gib / write_s, "GiB/s"),
        Figure(f"{name}_read_gib_s", gib / read_s, "GiB/s"),
    ]


def _seconds(work: Callable[[int], None], *, streams: int) -> float:
    def run(numbers: Sequence[int]) -> None:
        for number in numbers:
            work(number)

    threads = [threading.Thread(target=run, args=(range(first, _BLOCKS, streams),)) for first in range(streams)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start
