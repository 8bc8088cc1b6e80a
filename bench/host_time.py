"""Engine-thread time per step with many running requests: scheduling, launching, processing the results, and sending
tokens to clients. Waits for steps are not counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from proof.random_models import random_model
from proof.report import Figure, at_most
from sidestream.config import EngineConfig, SamplingParams
from sidestream.engine import Engine, TokenColumns, build_engine
from sidestream.errors import SidestreamError
from sidestream.processes.garbage import freeze_gc_heap
from sidestream.runner.executor import LaunchedStep
from sidestream.types import BatchPlan, Delta
from sidestream_kv.config import OffloadConfig
from sidestream_kv.device.choice import torch_device

_PROMPT_TOKENS = 48
_PATIENCE_S = 300.0
_ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.95},
    "penalised": {"temperature": 0.8, "presence_penalty": 0.5},
    "biased": {"temperature": 0.8, "logit_bias": {7: 1.0}},
}


def measure(
    *, device: str, shape: str, requests: int, output_tokens: int, rounds: int, on_progress: Callable[[str], None]
) -> list[Figure]:
    """Run `requests` requests at once, with offload. Figures, for the steps in which all requests decode: the engine
    thread's wall time without its waits for steps, and its CPU time.
    """
    on_progress("starting the engine")
    model = random_model(shape, device=torch_device(device))
    memory = requests * model.layout.num_blocks_for(_PROMPT_TOKENS + output_tokens) * model.layout.block_bytes
    config = EngineConfig(
        device=device,
        kv_memory=memory,
        max_running=requests,
        max_model_len=_PROMPT_TOKENS + output_tokens,
        offload=OffloadConfig(host=memory),
    )
    engine = build_engine(model, config)
    unfreeze = freeze_gc_heap()  # as LLM does
    try:
        prompts = [[1 + (number * 31 + at * 7) % 500 for at in range(_PROMPT_TOKENS)] for number in range(requests)]
        clock, figures = _StepClock(engine), list[Figure]()
        steps: dict[str, list[tuple[int, float, float]]] = {name: [] for name in _ASKED}
        for number in range(rounds + 1):  # each round measures every variant, because the machine's load changes
            for name, asked in _ASKED.items():
                on_progress(f"round {number} of {rounds}, {name}")
                clock.steps.clear()
                engine.reset_prefix_cache()
                _serve(engine, prompts, SamplingParams(max_tokens=output_tokens, ignore_eos=True, **asked))
                if number:  # the first round warms up
                    steps[name] += [step for step in clock.steps if step[0] == requests]
        for name, full in steps.items():
            if not full:
                raise SidestreamError(
                    f"no step decoded all {requests} requests, so there is nothing to measure: raise --output-tokens"
                )
            end, bound = f"{requests}_{name}", None if name == "biased" else at_most(1.0)
            figures.append(
                Figure(f"host_ms_per_step_{end}", 1e3 * median(seconds for _, seconds, _ in full), "ms", bound)
            )
            figures.append(Figure(f"host_cpu_ms_per_step_{end}", 1e3 * median(seconds for *_, seconds in full), "ms"))
        return figures
    finally:
        engine.close()
        unfreeze()


def _serve(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
    """Submit all requests at once and wait for them. As with `LLM`, the engine thread only collects tokens."""
    clients = [_Client() for _ in prompts]

    def ask() -> None:
        for prompt, client in zip(prompts, clients, strict=True):
            engine.submit(prompt, params, client.take, columns=TokenColumns([], client.tokens))

    engine.call(ask)
    for client in clients:
        if not client.ended.wait(_PATIENCE_S) or client.error is not None:
            raise SidestreamError(
                f"a request of the benchmark failed: {client.error or f'it did not end within {_PATIENCE_S:g} s'}"
            )


class _Client:
    """Collects the tokens of one request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.error: str | None = None
        self.ended = threading.Event()

    def take(self, delta: Delta) -> None:
        """Called by the engine for each delta."""
        self.tokens += delta.token_ids
        if delta.finish_reason is not None:
            self.error = delta.error
            self.ended.set()


class _StepClock:
    """Times the steps of an engine.

    steps   for each step: the number of decode rows (0 if the step also had prefill tokens), wall seconds of the engine
            thread, and CPU seconds of the engine thread; both times without waits for steps
    """

    def __init__(self, engine: Engine) -> None:
        self.steps: list[tuple[int, float, float]] = []
        step, launch, wait = engine.loop.step, engine.parts.executor.launch, engine.parts.device.wait_host
        rows = [0]
        waited = [0.0, 0.0]

        def timed() -> bool:
            rows[0], waited[:] = 0, (0.0, 0.0)
            begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
            worked = step()
            self.steps.append(
                (rows[0], time.perf_counter() - begin_s - waited[0], time.thread_time() - begin_cpu_s - waited[1])
            )
            return worked

        def counted(batch: BatchPlan, **more: Any) -> LaunchedStep:
            rows[0] = 0 if batch.num_prefill_tokens else batch.num_rows
            return launch(batch, **more)

        def awaited(*given: Any, **more: Any) -> bool:
            begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
            done = wait(*given, **more)
            waited[0] += time.perf_counter() - begin_s
            waited[1] += time.thread_time() - begin_cpu_s
            return done

        def begin() -> None:
            engine.loop.step = timed  # type: ignore[method-assign]
            engine.parts.executor.launch = counted  # type: ignore[method-assign]
            engine.parts.device.wait_host = awaited  # type: ignore[method-assign]

        engine.call(begin)
