"""Tokens per second and memory of a GGUF model whose weights stay packed, beside llama.cpp on the same file. The two
engines are in one process and decode in turn, after a prompt of 32 tokens, both with repacked weights. llama.cpp does
not sample, and gets a fixed token.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from transformers import LlamaConfig

from bench.requests import ask
from proof.gguf_models import gguf_model_dir
from proof.report import Figure, at_least, at_most
from sidestream.llm import LLM

_PROMPT_TOKENS = 32
# The share of bits of a Q4_K_M: half of the matrices of values and of the last product are in Q6_K.
_KINDS = {"": "Q4_K", "ffn_down": "Q6_K", "output": "Q6_K"}


def measure(
    *, directory: Path, layers: int, tokens: int, rounds: int, threads: int, on_progress: Callable[[str], None]
) -> list[Figure]:
    """Rounds of both engines alternate."""
    if not (directory / "model.gguf").exists():
        on_progress(f"writing {directory}")
        gguf_model_dir(_config(layers), directory, _KINDS, 0)
    size = (directory / "model.gguf").stat().st_size
    on_progress("loading the model")
    options: dict[str, Any] = {"device": "cpu", "kv_memory": "256MiB", "prefix_cache": False}
    begin = _anonymous_bytes()
    with LLM(directory, compute_threads=threads, repack=False, **options):
        ours_bytes = _anonymous_bytes() - begin
    with LLM(directory, compute_threads=threads, repack=True, **options) as llm:
        repacked_bytes = _anonymous_bytes() - begin
        before = _anonymous_bytes()
        theirs = _LlamaCpp(directory / "model.gguf", threads)
        theirs_bytes = _anonymous_bytes() - before
        pairs = []
        for number in range(rounds + 1):
            on_progress(f"round {number} of {rounds}")
            runs: list[Callable[[], float]] = [lambda: _decode(llm, tokens), lambda: theirs.decode(tokens)]
            times = [run() for run in (runs if number % 2 else runs[::-1])]
            pairs.append(tuple(times if number % 2 else times[::-1]))
    ours, others = zip(*pairs[1:], strict=True)  # round 0 warms up
    ratios = [other / our for our, other in zip(ours, others, strict=True)]
    return [
        Figure("decode_over_llama_cpp", median(ratios), "ratio", at_least(0.8)),
        Figure("decode_over_llama_cpp_min", min(ratios), "ratio"),
        Figure("decode_over_llama_cpp_max", max(ratios), "ratio"),
        Figure("decode_tokens_per_s", 1 / median(ours), "tokens/s"),
        Figure("llama_cpp_decode_tokens_per_s", 1 / median(others), "tokens/s"),
        Figure("own_memory_over_file", ours_bytes / size, "ratio", at_most(0.25) if layers == 32 else None),
        Figure("own_memory_repacked_over_file", repacked_bytes / size, "ratio"),
        Figure("llama_cpp_own_memory_over_file", theirs_bytes / size, "ratio"),
        Figure("file_gib", size / 2**30, "GiB"),
    ]


def _config(layers: int) -> Any:
    kind: Any = LlamaConfig
    return kind(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        eos_token_id=256,
    )


def _anonymous_bytes() -> int:
    """Memory of this process that is no page of a file."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def _decode(llm: LLM, tokens: int) -> float:
    """Seconds of a decoded token."""
    answer = ask(llm.engine, [*range(_PROMPT_TOKENS)], tokens).wait()
    return float(np.diff(answer.times).mean())


class _LlamaCpp:
    """llama.cpp with a model, as its command-line tools use it by default."""

    def __init__(self, file: Path, threads: int) -> None:
        import llama_cpp  # not installed with any extra of Sidestream: see docs/models.md

        self._lib: Any = llama_cpp
        self._lib.llama_backend_init()
        options = self._lib.llama_model_default_params()
        self._model = self._lib.llama_model_load_from_file(str(file).encode(), options)
        options = self._lib.llama_context_default_params()
        options.n_ctx, options.n_threads, options.n_threads_batch = 2048, threads, threads
        self._context = self._lib.llama_init_from_model(self._model, options)
        assert self._context, "llama.cpp cannot load the file"

    def decode(self, tokens: int) -> float:
        """Seconds of a decoded token."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        self._run([*range(_PROMPT_TOKENS)])
        begin_s = time.perf_counter()
        for number in range(tokens - 1):
            self._run([number])
        return (time.perf_counter() - begin_s) / (tokens - 1)

    def _run(self, tokens: list[int]) -> None:
        given = (self._lib.llama_token * len(tokens))(*tokens)
        assert self._lib.llama_decode(self._context, self._lib.llama_batch_get_one(given, len(tokens))) == 0
        self._lib.llama_synchronize(self._context)
