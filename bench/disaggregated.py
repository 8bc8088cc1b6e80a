"""Prefill on one GPU and decoding on another one, over host memory that both map (a cache process), beside one engine
that does both. While requests decode, long prompts arrive at random moments; the model has random weights.

alone           gaps between tokens of the decoding requests before any long prompt arrives
one engine      the engine that decodes also computes the long prompts
disaggregated   an engine in another process, on the second GPU, computes the long prompts one after another; the engine
                that decodes loads the KV of each. TTFT counts from the arrival
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from statistics import median

import numpy as np

from bench.engine import _FULL, _TINY, ModelRig
from bench.restart import cache_process
from proof.report import Figure
from sidestream.errors import SidestreamError
from sidestream_kv.config import OffloadConfig
from sidestream_kv.device.kinds import CUDA

_OUTPUTS = 4  # of a long prompt
_PATIENCE_S = 300.0


@dataclass(slots=True)
class _Phase:
    """Seconds between tokens of the decoding requests while long prompts arrive, and TTFT of these."""

    gaps: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)


def measure(
    *, device: str, shape: str, prompts: int, interval_s: float, on_progress: Callable[[str], None]
) -> list[Figure]:
    """Measure with `prompts` long prompts in each phase, at random moments `interval_s` apart in the mean. Raises
    SidestreamError if KV was not handed over.
    """
    sizes = _FULL if device == CUDA else _TINY
    with (
        tempfile.TemporaryDirectory(prefix="sidestream-two-") as directory,
        cache_process(directory, sizes.host) as socket,
    ):
        offload = OffloadConfig(host=sizes.host, shared_memory=socket)
        with (
            _prefill_process(device, shape, socket) as prefill,
            contextlib.closing(ModelRig(device, shape, sizes, on_progress, offload=offload)) as rig,
        ):
            if not prefill.poll(_PATIENCE_S):
                raise SidestreamError(f"the engine that computes prompts was not ready within {_PATIENCE_S:g} s")
            prefill.recv()
            phases = {}
            for name in ("alone", "one engine", "disaggregated"):
                on_progress(name)
                phases[name] = _run(rig, name, prompts, interval_s, prefill)
    alone, one, two = phases.values()
    return [
        Figure("disaggregated_gap_p99_over_alone", _p99(two.gaps) / _p99(alone.gaps), "ratio"),
        Figure("one_engine_gap_p99_over_alone", _p99(one.gaps) / _p99(alone.gaps), "ratio"),
        Figure("disaggregated_ttft_over_one_engine", median(two.ttft) / median(one.ttft), "ratio"),
        *(
            Figure(f"{name.replace(' ', '_')}_gap_{share}_ms", 1e3 * of(phase.gaps), "ms")
            for name, phase in phases.items()
            for share, of in (("p50", median), ("p99", _p99), ("max", max))
        ),
        *(
            Figure(f"{name.replace(' ', '_')}_ttft_{share}_ms", 1e3 * of(phase.ttft), "ms")
            for name, phase in phases.items()
            for share, of in (("p50", median), ("max", max))
            if phase.ttft
        ),
    ]


def _run(rig: ModelRig, name: str, count: int, interval_s: float, prefill: Connection) -> _Phase:
    """Let requests decode from before the first long prompt until all of them are answered."""
    sizes = _FULL if rig.device.kind == CUDA else _TINY
    rows, outputs = (15, 2048) if rig.device.kind == CUDA else (3, 400)
    decoding = [rig.ask(rig.prompt(sizes.others_context), outputs) for _ in range(rows)]
    for answer in decoding:
        answer.wait_for(2)
    phase, begin = _Phase(), time.perf_counter()
    arrivals = begin + np.cumsum(np.random.default_rng(1).exponential(interval_s, count))
    if name == "alone":
        time.sleep(float(arrivals[-1]) - begin)
    else:
        turn = threading.Lock() if name == "disaggregated" else None
        prompts = [rig.prompt(sizes.from_host[0][0] + 1) for _ in arrivals]
        with ThreadPoolExecutor(count) as pool:
            asked = [pool.submit(_ask, rig, *each, turn, prefill) for each in zip(prompts, arrivals, strict=True)]
            phase.ttft = [each.result() for each in asked]
    end = time.perf_counter()
    for answer in decoding:
        times = answer.wait().times
        if times[-1] < end:
            raise SidestreamError("requests stopped decoding before all long prompts were answered: ask for fewer")
        phase.gaps += [late - early for early, late in pairwise(times) if begin <= early and late <= end]
    return phase


def _ask(rig: ModelRig, prompt: list[int], at_s: float, turn: threading.Lock | None, prefill: Connection) -> float:
    """Seconds from the arrival of a long prompt to its first token. `turn`: for the other engine, which takes one
    prompt at a time; None: the engine that decodes computes the prompt.
    """
    time.sleep(max(0.0, at_s - time.perf_counter()))
    if turn is not None:
        with turn:
            prefill.send(prompt)
            prefill.recv()
    answer = rig.ask(prompt, _OUTPUTS).wait()
    expected = 0 if turn is None else len(prompt) - 1
    if answer.cached.total != expected:
        raise SidestreamError(
            f"{answer.cached}, where {expected} tokens were expected: the figures would be meaningless"
        )
    return answer.times[0] - at_s


@contextlib.contextmanager
def _prefill_process(device: str, shape: str, socket: str) -> Iterator[Connection]:
    """A process that computes the prompts it gets, on the second GPU. It says when it is ready, and when the KV of a
    prompt is in the shared memory.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_compute_prompts, args=(there, device, shape, socket), daemon=True)
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = "1" if before is None else before.split(",")[1]
    process.start()
    os.environ.pop("CUDA_VISIBLE_DEVICES")
    if before is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = before
    try:
        yield here
    finally:
        process.terminate()
        process.join()


def _compute_prompts(connection: Connection, device: str, shape: str, socket: str) -> None:
    sizes = _FULL if device == CUDA else _TINY
    rig = ModelRig(device, shape, sizes, lambda _: None, offload=OffloadConfig(host=sizes.host, shared_memory=socket))
    rig.ask(rig.prompt(40), 4).wait()
    connection.send(None)
    while True:
        rig.ask(connection.recv(), 1).wait()
        if not rig.engine.flush(timeout_s=60.0):
            raise SidestreamError("stores did not end within 60 s")
        connection.send(None)


def _p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99))
