"""Tensor parallelism on the CPUs of one machine: the time to send a step's plan to the other ranks, the CPU time of an
idle and of a busy rank, and tokens per second of two ranks, divided by those of one rank.
"""

from __future__ import annotations

import random
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch

from bench.broadcast import Broadcast, measure_broadcast
from bench.requests import ask_at_once
from proof.report import Figure, at_least, at_most
from proof.tiny_models import tiny_model_dir
from sidestream.cli.prompt_runs import ChildEngine
from sidestream.config import EngineConfig
from sidestream.engine import build_engine
from sidestream.engine.build import build_follower
from sidestream.errors import SidestreamError
from sidestream.models import load_model
from sidestream.processes.frames import FrameEncoder
from sidestream.ranks.link import RankConnection, SocketTransport, decoder_of_reports
from sidestream.ranks.messages import Begin, Serving
from sidestream.version import VERSION
from sidestream_kv.config import OffloadConfig
from sidestream_kv.device.cpu import CpuDevice
from sidestream_kv.device.group import open_group
from sidestream_kv.device.kinds import CPU

_P50_BOUNDS_US = {2: 60.0, 4: 80.0, 8: 120.0}
SIZES = tuple(_P50_BOUNDS_US)
"""Numbers of ranks (including rank 0) at which the sending of plans is measured."""
_RATE = 200.0  # steps per second
_IDLE_S = 2.0
_TIMEOUT_S = 120.0
_REQUESTS = 8
_PROMPT_TOKENS = 16
# The shape of SmolLM2-135M, changed so that two ranks can divide the KV heads; about 100 million parameters.
_SHAPE = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}


def measure(
    *,
    sizes: Sequence[int],
    seconds: float,
    rounds: int,
    output_tokens: int,
    on_progress: Callable[[str], None],
    shape: dict[str, int] | None = None,
) -> list[Figure]:
    """All figures.

    sizes     numbers of ranks at which the sending of plans is measured
    seconds   seconds of sending plans, for each transport and each of `sizes`
    rounds    repetitions of the comparison of one rank with two ranks
    shape     fields of the model's config; only tests set it
    """
    broadcasts: dict[int, Broadcast] = {}
    for size in sizes:
        on_progress(f"plans to {size - 1} other ranks")
        broadcasts[size] = measure_broadcast(size, steps=max(2, round(seconds * _RATE)), rate=_RATE, idle_s=_IDLE_S)
    figures = _broadcast_figures(broadcasts)
    with tempfile.TemporaryDirectory(prefix="sidestream-bench-") as scratch:
        on_progress("waits of a rank")
        waits, steps = waits_of_rank(tiny_model_dir("llama", Path(scratch, "tiny"), seed=0), Path(scratch, "ranks"))
        figures.append(Figure("host_waits_per_step", waits / steps, "waits/step", at_most(0)))
        on_progress("a model for two ranks")
        model = tiny_model_dir("llama", Path(scratch, "model"), seed=0, **(shape or _SHAPE))
        return figures + _throughput(str(model), rounds, output_tokens, on_progress)


def _broadcast_figures(broadcasts: dict[int, Broadcast]) -> list[Figure]:
    """Latencies until the slowest rank has the plan, for each number of ranks; and the CPU time of one rank, at the
    smallest number of ranks.
    """
    figures = []
    for size, result in broadcasts.items():
        plan, bound = result.ways["socket"], _P50_BOUNDS_US.get(size)
        p50, p99 = plan.percentile_us(50), plan.percentile_us(99)
        figures += [
            Figure(f"plan_broadcast_us_p50_{size}", p50, "us", None if bound is None else at_most(bound)),
            Figure(f"plan_broadcast_us_p99_{size}", p99, "us"),
            Figure(f"plan_broadcast_p99_over_p50_{size}", p99 / p50, "ratio", at_most(5)),
        ]
        for way in ("ring", "gloo", "byte"):
            figures += [
                Figure(f"{way}_us_p50_{size}", result.ways[way].percentile_us(50), "us"),
                Figure(f"{way}_us_p99_{size}", result.ways[way].percentile_us(99), "us"),
            ]
    result = broadcasts[min(broadcasts)]
    plan, ring, gloo = (result.ways[way] for way in ("socket", "ring", "gloo"))
    return [
        *figures,
        Figure("broadcast_cpu_share_idle", plan.idle_cpu, "of a core", at_most(0.02)),
        Figure("broadcast_cpu_share", plan.cpu, "of a core", at_most(0.10)),
        Figure("ring_cpu_share_idle", ring.idle_cpu, "of a core"),
        Figure("ring_cpu_share", ring.cpu, "of a core"),
        Figure("gloo_cpu_share_idle", gloo.idle_cpu, "of a core"),
        Figure("gloo_cpu_share", gloo.cpu, "of a core"),
        Figure("tp_step_overhead_us", result.step_overhead_us, "us", at_most(150)),
    ]


def waits_of_rank(model: Path, directory: Path) -> tuple[int, int]:
    """The number of times that the host thread of rank 1 (of two ranks) blocked for a fence of its device, for any
    reason; and the engine's number of steps. The requests fill blocks, which are stored and loaded again. Both ranks
    are threads of this process.

    directory   new directory for the rendezvous of the ranks
    """
    config = EngineConfig(
        device=CPU, kv_memory="2MiB", compute_threads=1, max_running=4, offload=OffloadConfig(host="4MiB")
    )
    other = _OtherRank(str(model), config, directory)
    device = torch.device(CPU)
    group = open_group(directory, rank=0, size=2, device=device, timeout_s=_TIMEOUT_S)
    transport = SocketTransport(
        [other.ours], [decoder_of_reports()], how_ended=lambda rank: str(other.failure), end=other.ours.close
    )
    engine = build_engine(
        load_model(str(model), dtype="float32", block_tokens=config.block_tokens, device=device, group=group),
        config,
        ranks=transport.ranks,
        group=group,
    )
    try:
        other.wait_until_serving()
        transport.start([()])
        prompts = [[1 + (31 * at + number) % 200 for at in range(100)] for number in range(4)]
        for _ in range(2):
            for answer in ask_at_once(engine, prompts, 24):
                answer.wait()
            engine.reset_prefix_cache()
        steps = engine.num_steps
    finally:
        engine.close()
        other.thread.join()
        group.close()
        other.ours.close()
    return sum(other.device.host_waits().values()), steps


class _OtherRank:
    """Rank 1 of two ranks, on a separate thread."""

    def __init__(self, model: str, config: EngineConfig, directory: Path) -> None:
        self.ours, self._theirs = socket.socketpair()
        self.device = CpuDevice(compute_threads=1)
        self.failure: BaseException | None = None
        self._serving = threading.Event()
        self._model, self._config, self._directory = model, config, directory
        self.ours.sendall(FrameEncoder().encode(Begin(VERSION, model, {}, 1, 2, str(directory), 0, log_json=False)))
        self.thread = threading.Thread(target=self._run, name="rank 1", daemon=True)
        self.thread.start()

    def wait_until_serving(self) -> None:
        """Wait until the rank is ready to execute steps. Raises SidestreamError if it could not start."""
        if not self._serving.wait(_TIMEOUT_S) or self.failure is not None:
            raise SidestreamError(f"rank 1 of the benchmark did not start: {self.failure}")

    def _run(self) -> None:
        try:
            self._follow()
        except BaseException as error:
            self.failure = error
        finally:
            self._serving.set()
            self._theirs.close()

    def _follow(self) -> None:
        link, where = RankConnection(self._theirs), torch.device(CPU)
        link.wait_for_begin()
        group = open_group(self._directory, rank=1, size=2, device=where, timeout_s=_TIMEOUT_S)
        block_tokens = self._config.block_tokens
        model = load_model(self._model, dtype="float32", block_tokens=block_tokens, device=where, group=group)
        follower = build_follower(
            model, self._config, device=self.device, group=group, take=link.take, report=link.report
        )
        link.report(Serving())
        self._serving.set()
        link.run(follower)
        self.device.close()
        follower.close()
        group.close()


def _throughput(model: str, rounds: int, output_tokens: int, on_progress: Callable[[str], None]) -> list[Figure]:
    """Tokens per second of the same requests on one rank with two threads, and on two ranks with one thread each."""
    rng = random.Random(0)
    options = {"device": CPU, "dtype": "float32", "kv_memory": "64MiB"}
    rates: dict[str, list[float]] = {"tp1": [], "tp2": []}
    with (
        ChildEngine(model, {**options, "compute_threads": 2}) as one,
        ChildEngine(model, {**options, "compute_threads": 1, "tensor_parallel": 2}) as two,
    ):
        for number in range(rounds):
            prompts = [[rng.randrange(1, 250) for _ in range(_PROMPT_TOKENS)] for _ in range(_REQUESTS)]
            order = [("tp1", one), ("tp2", two)]
            for name, engine in order if number % 2 else reversed(order):
                on_progress(f"round {number + 1} of {rounds}, {name}")
                done = engine.generate(prompts, max_tokens=output_tokens, at_once=True)
                rates[name].append(_REQUESTS * output_tokens / done.seconds)
    tp1, tp2 = median(rates["tp1"]), median(rates["tp2"])
    return [
        Figure("tp2_over_tp1_cpu", tp2 / tp1, "ratio", at_least(0.85)),
        Figure("tp2_tokens_per_s", tp2, "tokens/s"),
        Figure("tp1_tokens_per_s", tp1, "tokens/s"),
    ]
