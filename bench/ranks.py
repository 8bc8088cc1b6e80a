"""Tensor parallelism on GPUs: compares the same model, with random weights, on several ranks and on one, or on as few
as it fits.

Measures the step time of decoding, TTFT without cached KV and with KV in host memory, ITL while the KV of a long
request is loaded (a resume), and the bandwidth at which all ranks load KV from host memory, each over its own link.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from bench.engine import Rig, Sizes, resume
from proof.random_models import SHAPES, random_checkpoint
from proof.report import Bound, Figure, at_least, at_most
from proof.tiny_models import tiny_model_dir
from sidestream.errors import ConfigError
from sidestream.llm import LLM
from sidestream_kv.config import OffloadConfig, unknown_name
from sidestream_kv.device.choice import torch_device
from sidestream_kv.device.kinds import CUDA

# Only steps with these numbers of rows, and TTFT of prompts of this length, have bounds.
_BOUNDED_ROWS = (1, 32)
_BOUNDED_LENGTH = 8192
# By the number of ranks, over one rank: a step and a TTFT without cached KV at most, the bandwidth of loads at least.
_BOUNDS = {2: (0.62, 0.6, 1.9), 4: (0.36, 0.33, 3.6)}
_ROUNDS = 5

PARTS = ("decode", "ttft", "resume")

_FULL = Sizes(
    kv_memory="8GiB",
    host="24GiB",
    max_model_len=40960,
    max_running=128,
    decode=((1, 1024, 0.0), (32, 1024, 0.0), (128, 512, 0.0)),
    cold=((128, 0.0), (2048, 0.0), (_BOUNDED_LENGTH, 0.0)),
    from_host=((8192, 0.0, 0.0), (16384, 0.0, 0.0)),
    others_context=1024,
    resumed=16000,
    outputs=64,
)
_TINY = Sizes("8MiB", "16MiB", 512, 4, ((1, 32, 0.0), (4, 16, 0.0)), ((32, 0.0),), ((128, 0.0, 0.0),), 32, 200, 12)


@dataclass(frozen=True, slots=True)
class _Times:
    """The results at one number of ranks.

    step_s         seconds of a decode step, by the number of rows
    contexts       prompt tokens of each row of these steps, by the number of rows
    cold_s         TTFT in seconds without cached KV, by the number of prompt tokens
    host_s         TTFT in seconds with KV in host memory, by the number of prompt tokens
    idle_share     share of time in which rank 0's device is idle between decode steps; the maximum over the row counts
    load_bytes_s   bytes per second of all ranks together, from the submission of a load to its end; 0: not measured
    host_waits     number of times that the host waited for the device, except for waits for a step's results
    resume         figures of `engine.resume`, by name; empty: not measured
    """

    step_s: dict[int, float]
    contexts: dict[int, int]
    cold_s: dict[int, float]
    host_s: dict[int, float]
    idle_share: float
    load_bytes_s: float
    host_waits: int
    resume: dict[str, Figure]


def measure(
    *,
    device: str,
    shape: str,
    tensor_parallel: int,
    kv_memory: str | None,
    parts: Sequence[str] | None,
    on_progress: Callable[[str], None],
    over: int = 1,
    layers: int | None = None,
) -> list[Figure]:
    """The figures of these parts (None: of all) with `tensor_parallel` ranks, compared with `over` ranks; 0: with none.
    `kv_memory`: KV memory of each rank; None: the benchmark's default. `layers`: the first layers; None: all. Raises
    ConfigError for an unknown part.
    """
    parts = parts or PARTS
    for part in parts:
        if part not in PARTS:
            raise ConfigError(unknown_name("part", part, PARTS))
    sizes = _FULL if device == CUDA else _TINY
    if kv_memory is not None:
        sizes = replace(sizes, kv_memory=kv_memory)
    if "decode" not in parts:
        sizes = replace(sizes, decode=sizes.decode[:1])  # a resume is compared with steps of one row
    if "ttft" not in parts:
        sizes = replace(sizes, cold=(), from_host=())
    with tempfile.TemporaryDirectory(prefix="sidestream-bench-") as scratch:
        on_progress("writing random weights")
        words = tiny_model_dir("llama", Path(scratch, "words"), seed=0)
        model = Path(scratch, "model")
        random_checkpoint(shape, model, tokenizer=words, device=torch_device(device), layers=layers)
        resumes, few = "resume" in parts, None
        if over:
            few = _times(str(model), device, shape, over, sizes, resumes, on_progress)
            same = tuple((rows, few.contexts[rows], bound) for rows, _, bound in sizes.decode)
            sizes = replace(sizes, decode=same)
        many = _times(str(model), device, shape, tensor_parallel, sizes, resumes, on_progress)
    return _figures(over, few, tensor_parallel, many, sizes)


def _times(
    model: str,
    device: str,
    shape: str,
    size: int,
    sizes: Sizes,
    resumes: bool,
    on_progress: Callable[[str], None],
) -> _Times:
    def tell(text: str) -> None:
        on_progress(f"{size} rank{'s' * (size > 1)}: {text}")

    tell("starting")
    llm = LLM(
        model,
        device=device,
        tensor_parallel=size,
        dtype="bfloat16",
        kv_memory=sizes.kv_memory,
        max_running=sizes.max_running,
        max_model_len=sizes.max_model_len,
        offload=OffloadConfig(host=sizes.host),
        generation_config="none",
    )
    try:
        rig = Rig(llm.engine, vocab_size=SHAPES[shape]["vocab_size"], end=llm.close, on_progress=tell)
    except BaseException:
        llm.close()
        raise
    try:
        return _measured(rig, size, sizes, resumes, tell)
    finally:
        rig.close()


def _measured(rig: Rig, size: int, sizes: Sizes, resumes: bool, tell: Callable[[str], None]) -> _Times:
    rig.ask(rig.prompt(40), 4).wait()
    step_s, cold_s, host_s, shares = dict[int, float](), dict[int, float](), dict[int, float](), list[float]()
    contexts = dict[int, int]()
    block_tokens = rig.parts.layout.block_tokens
    for rows, longest, _ in sizes.decode:
        room = rig.parts.blocks.size // rows * block_tokens
        context = contexts[rows] = min(longest, room - sizes.outputs - block_tokens)
        if context < 1:
            raise ConfigError(
                f"the KV memory of a rank holds {room} tokens for each of {rows} rows, and outputs take "
                f"{sizes.outputs + block_tokens}: give more --kv-memory"
            )
        tell(f"decode, {rows} rows of {context} tokens")
        lengths, idle = rig.steps(rows, context, sizes.outputs)
        step_s[rows] = median(lengths)
        shares.append(sum(idle) / sum(lengths))
    for length, _ in sizes.cold:
        tell(f"first token, {length} tokens cold")
        cold_s[length] = median(rig.ask(rig.prompt(length), 1).wait().ttft_s for _ in range(_ROUNDS))
    rates = []
    for length, *_ in sizes.from_host:
        tell(f"first token, {length} tokens from host memory")
        taken = []
        for _ in range(_ROUNDS):
            prompt = rig.prompt(length + 1)
            rig.ask(prompt, 1).wait()
            before = _loaded(rig)
            taken.append(rig.ask_from_host(prompt).ttft_s)
            rig.forget_device()  # waits for the end of the load
            num_bytes, seconds = (now - then for now, then in zip(_loaded(rig), before, strict=True))
            rates.append(size * num_bytes / seconds)  # each rank loads as many bytes as rank 0: the KV of its heads
        host_s[length] = median(taken)
    figures = {figure.name: figure for figure in resume(rig, sizes, step_s[1], tell)} if resumes else {}
    return _Times(step_s, contexts, cold_s, host_s, max(shares), max(rates, default=0.0), rig.host_waits(), figures)


def _loaded(rig: Rig) -> tuple[float, float]:
    """Bytes that rank 0 has loaded so far, and the total seconds of these loads."""
    metrics = rig.parts.metrics
    seconds = metrics.snapshot().histograms["transfer_seconds"].get(("load",))
    return metrics.value("transfer_bytes_total", "load"), 0.0 if seconds is None else seconds.total


def _figures(over: int, few: _Times | None, ranks: int, many: _Times, sizes: Sizes) -> list[Figure]:
    """The figures of `ranks` ranks, and of `over` ranks if these were measured."""
    step, cold, loads = _BOUNDS.get(ranks, (None, None, None)) if over == 1 else (None, None, None)

    def pair(name: str, at: int, of: Callable[[_Times], dict[int, float]], bound: Bound | None = None) -> list[Figure]:
        what, own_s = f"{name}{at}", of(many)[at]
        own = [Figure(f"tp{ranks}_{what}_ms", 1e3 * own_s, "ms")]
        if few is None:
            return own
        ratio = Figure(f"tp{ranks}_over_tp{over}_{what}", own_s / of(few)[at], "ratio", bound)
        return [ratio, *own, Figure(f"tp{over}_{what}_ms", 1e3 * of(few)[at], "ms")]

    figures = []
    for rows, context in many.contexts.items():
        bound = None if step is None or rows not in _BOUNDED_ROWS else at_most(step)
        figures += pair("decode_b", rows, lambda times: times.step_s, bound)
        figures.append(Figure(f"decode_b{rows}_prompt_tokens", context, "tokens"))
    for length in many.cold_s:
        bound = None if cold is None or length != _BOUNDED_LENGTH else at_most(cold)
        figures += pair("ttft_cold_", length, lambda times: times.cold_s, bound)
    for length in many.host_s:
        figures += pair("ttft_host_", length, lambda times: times.host_s)
    if sizes.from_host and few is not None:
        gain = None if loads is None else at_least(loads)
        ratio = many.load_bytes_s / few.load_bytes_s
        figures.append(Figure(f"tp{ranks}_over_tp{over}_load_gb_s", ratio, "ratio", gain))
    measured = [(ranks, many)] + ([] if few is None else [(over, few)])
    for size, times in measured:
        if sizes.from_host:
            figures.append(Figure(f"tp{size}_load_gb_s", times.load_bytes_s / 1e9, "GB/s"))
    idle = {ranks: at_most(0.02)}
    figures += [
        Figure(f"tp{size}_idle_share_max", times.idle_share, "share", idle.get(size)) for size, times in measured
    ]
    figures.append(Figure(f"tp{ranks}_host_waits_besides_commits", many.host_waits, "waits", at_most(0)))
    for size, times in measured:
        figures += [
            replace(times.resume[name], name=f"tp{size}_{name}", bound=None)
            for name in ("resume_ttft_ms", "itl_p99_during_resume", "itl_p99_during_resume_ms", "itl_median_alone_ms")
            if name in times.resume
        ]
    return figures
