"""The cost of the self-check: time of a step with a share of steps that run twice and of blocks with a checksum,
divided by the time of a step without. Also the number of differences that it finds, which should be 0.

The engines use the same model object, exist at the same time and run alternately. All requests run at once, in two
kinds of rounds: prompts that are new, and prompts whose KV comes back from host memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

import numpy as np

from bench.requests import ask, ask_at_once, random_prompts
from proof.random_models import random_model
from proof.report import Figure, at_most
from sidestream.config import EngineConfig
from sidestream.engine import Engine, build_engine
from sidestream.models.adapter import PagedModel
from sidestream.processes.garbage import freeze_gc_heap
from sidestream_kv.config import OffloadConfig
from sidestream_kv.device.choice import torch_device
from sidestream_kv.device.kinds import CUDA

SHARE = 0.01
"""The share of the bounded figure."""
# A measurement at a share of 1 % alone would see the noise of its few checked steps. So all steps are checked, too.
_SHARES = (0.0, SHARE, 1.0)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a measurement.

    requests          number of requests, which all run at once
    tokens, outputs   prompt tokens and output tokens of a request
    """

    requests: int
    tokens: int
    outputs: int


_ON_GPU, _ON_CPU = Sizes(32, 1024, 128), Sizes(2, 48, 24)


def measure(*, device: str, shape: str, rounds: int, on_progress: Callable[[str], None]) -> list[Figure]:
    """Run the engines in turn, `rounds` rounds of each kind."""
    sizes = _ON_GPU if device == CUDA else _ON_CPU
    on_progress("making the model")
    model = random_model(shape, device=torch_device(device))
    random = np.random.default_rng(0)

    seconds: dict[str, dict[float, list[float]]] = {
        kind: {share: [] for share in _SHARES} for kind in ("new", "loaded")
    }
    with ExitStack() as ends:
        engines: dict[float, Engine] = {}
        for share in _SHARES:
            on_progress(f"starting the engine with a share of {share:g}")
            engines[share] = _engine(model, device, sizes, share)
            ends.callback(engines[share].close)
            ask(engines[share], list(range(1, 17)), 4).wait()
        ends.callback(freeze_gc_heap())
        for number in range(rounds + 1):
            asked = random_prompts(random, model.vocab_size, count=sizes.requests, tokens=sizes.tokens)
            for share in _SHARES if number % 2 else reversed(_SHARES):
                on_progress(f"round {number} of {rounds}, share {share:g}")
                engine = engines[share]
                for times in seconds.values():
                    step_s = _step_s(engine, asked, sizes.outputs)
                    engine.flush(timeout_s=60.0)
                    if number:  # round 0 warms up
                        times[share].append(step_s)
                    engine.call(engine.parts.blocks.forget_all)  # so that the KV must come from host memory
        return _figures(seconds, engines)


def _figures(seconds: dict[str, dict[float, list[float]]], engines: dict[float, Engine]) -> list[Figure]:
    def ratios(kind: str, share: float) -> list[float]:
        pairs = zip(seconds[kind][share], seconds[kind][0.0], strict=True)
        return [checked / plain for checked, plain in pairs]

    def counted(name: str, *labels: str) -> float:
        return sum(engine.parts.metrics.value(name, *labels) for engine in engines.values())

    twice = max(median(ratios(kind, 1.0)) for kind in seconds)
    return [
        Figure("self_check_overhead", 1 + SHARE * (twice - 1), "ratio", at_most(1.02)),
        Figure("self_check_step_ratio", twice, "ratio"),
        Figure("self_check_overhead_as_run", max(median(ratios(kind, SHARE)) for kind in seconds), "ratio"),
        Figure("self_check_disagreements", counted("self_check_disagreements_total"), "rows", at_most(0)),
        Figure("self_check_mismatches", counted("self_check_blocks_total", "mismatch"), "blocks", at_most(0)),
        Figure("self_check_tokens", counted("self_check_tokens_total"), "tokens"),
        Figure("self_check_blocks", counted("self_check_blocks_total", "match"), "blocks"),
        Figure("self_check_step_ms", 1e3 * median(seconds["new"][0.0]), "ms"),
    ]


def _engine(model: PagedModel, device: str, sizes: Sizes, share: float) -> Engine:
    layout = model.layout
    blocks = (layout.num_blocks_for(sizes.tokens + sizes.outputs) + 1) * sizes.requests
    return build_engine(
        model,
        EngineConfig(
            device=device,
            kv_memory=blocks * layout.block_bytes,
            max_running=sizes.requests,
            max_model_len=2 * sizes.tokens,
            compute_threads=1,  # on a CPU: the threads of three engines would disturb one another
            offload=OffloadConfig(host=2 * blocks * layout.block_bytes),
            self_check=share,
        ),
    )


def _step_s(engine: Engine, prompts: Sequence[Sequence[int]], outputs: int) -> float:
    """Seconds of a step, from the first submission to the last token."""
    steps, start = engine.num_steps, time.perf_counter()
    for answer in ask_at_once(engine, prompts, outputs):
        answer.wait()
    return (time.perf_counter() - start) / (engine.num_steps - steps)
