"""TTFT of prompts whose KV is computed, is loaded from host memory, or is loaded from disk by a new process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from proof.report import Figure, at_least, at_most
from sidestream.cli.prompt_runs import ChildEngine, PromptRun
from sidestream.errors import SidestreamError
from sidestream_kv.device.kinds import CPU

_OUTPUT_TOKENS = 8


def measure(model: str, *, prompt_tokens: int, rounds: int, on_progress: Callable[[str], None]) -> list[Figure]:
    """Run `rounds` different prompts three times: without cached KV, after the device's pool has evicted their KV, and
    in a new process.
    """
    from sidestream.models import kv_token_bytes
    from sidestream.models.catalog import resolve

    path = resolve(model)
    prompts = sample_prompts(path, prompt_tokens, rounds)
    # The pool holds one and a half prompts, so each prompt evicts the start of the previous prompt.
    kv_memory = prompt_tokens * 3 // 2 * kv_token_bytes(path)
    with tempfile.TemporaryDirectory(prefix="sidestream-bench-") as scratch:
        options = {
            "device": CPU,
            "kv_memory": kv_memory,
            "offload": {"host": "2GiB", "disk": str(Path(scratch) / "kv"), "disk_capacity": "2GiB"},
        }
        with ChildEngine(path, options) as engine:
            cold = run_each(engine, prompts, lambda number: on_progress(f"cold {number} of {rounds}"))
            host = run_each(engine, prompts, lambda number: on_progress(f"from host memory {number} of {rounds}"))
        with ChildEngine(path, options) as engine:
            disk = run_each(
                engine, prompts, lambda number: on_progress(f"from disk, fresh process, {number} of {rounds}")
            )
    check_source("cold", cold, lambda run: run.reused == 0)
    check_source("host memory", host, lambda run: run.host > 0.95 * prompt_tokens)
    check_source("disk", disk, lambda run: run.disk > 0.95 * prompt_tokens)
    identical = sum(a.tokens == b.tokens == c.tokens for a, b, c in zip(cold, host, disk, strict=True))
    cold_s, host_s, disk_s = (median(run.ttft_s for run in runs) for runs in (cold, host, disk))
    return [
        Figure("ttft_disk_over_cold", disk_s / cold_s, "ratio", at_most(1 / 30)),
        Figure("ttft_host_over_cold", host_s / cold_s, "ratio", at_most(1 / 40)),
        Figure("identical_answers", identical / rounds, "share", at_least(1.0)),
        Figure("ttft_cold_ms", cold_s * 1e3, "ms"),
        Figure("ttft_host_ms", host_s * 1e3, "ms"),
        Figure("ttft_disk_ms", disk_s * 1e3, "ms"),
        Figure("prompt_tokens", prompt_tokens, "tokens"),
    ]


def sample_prompts(path: str, num_tokens: int, count: int) -> list[list[int]]:
    """Prompts of a text, each beginning one token later than the one before."""
    from sidestream.text import sample_text
    from sidestream.tokenizer import Tokenizer

    ids = Tokenizer.load(path).encode(sample_text())
    ids = ids * ((num_tokens + count) // len(ids) + 1)
    return [ids[start : start + num_tokens] for start in range(count)]


def run_each(
    engine: ChildEngine, prompts: Sequence[Sequence[int]], on_progress: Callable[[int], None]
) -> list[PromptRun]:
    """Run the prompts one after another, with the number of each as progress."""
    runs: list[PromptRun] = []
    for number, prompt in enumerate(prompts, start=1):
        on_progress(number)
        runs.extend(engine.generate([prompt], max_tokens=_OUTPUT_TOKENS).runs)
    return runs


def check_source(name: str, runs: list[PromptRun], expected: Callable[[PromptRun], bool]) -> None:
    """Raise SidestreamError if the KV of a prompt came from another tier than the run `name` measures."""
    for run in runs:
        if not expected(run):
            raise SidestreamError(
                f"in the run {name}, the KV of an answer came from another tier ({run.source}, {run.reused} tokens): "
                "the figures would be meaningless"
            )
