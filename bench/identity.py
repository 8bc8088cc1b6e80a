"""Compares the tokens of engines that run in different ways: with and without offload, with asynchronous and
synchronous execution, with CUDA graphs and without. Also measures how much their log-probabilities differ.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.requests import Answer, ask_at_once, random_prompts
from proof.random_models import random_model
from proof.report import Bound, Figure, at_least
from sidestream.config import EngineConfig
from sidestream.engine import build_engine
from sidestream_kv.config import OffloadConfig
from sidestream_kv.device.choice import torch_device
from sidestream_kv.device.kinds import CUDA

# Changes of the default options. An engine with each change is compared with an engine of default options.
_VARIANTS: dict[str, dict[str, Any]] = {
    "offload_off": {"offload": None},
    "synchronous": {"asynchronous": False},
}
# Two more variants, on a GPU only. By default, an engine compiles the layers and captures CUDA graphs of them.
# "uncompiled" captures CUDA graphs of the layers without compiling them, so it launches the same kernels as "eager".
_UNCOMPILED, _EAGER = "uncompiled", "eager"

_Answers = tuple[list[Answer], list[Answer]]


def measure(
    *,
    device: str,
    shape: str,
    requests: int,
    prompt_tokens: int,
    output_tokens: int,
    on_progress: Callable[[str], None],
) -> list[Figure]:
    """Run the same prompts greedily, all at once, on engines that differ in one option. Only one engine exists at a
    time. Figures: the share of requests whose tokens are all equal, and the differences between the log-probabilities
    of two engines. A second run returns the log-probabilities.

    No two prompts share a prefix, and the cache is emptied between the runs, so no KV is reused. `bench prefix`
    compares tokens with KV from other tiers.
    """
    base = EngineConfig(
        device=device,
        kv_memory="4GiB" if device == CUDA else "16MiB",
        max_running=requests,
        max_model_len=prompt_tokens + output_tokens,
        offload=OffloadConfig(host="4GiB" if device == CUDA else "16MiB"),
    )
    on_gpu = {_UNCOMPILED: {}, _EAGER: {"eager": True}} if device == CUDA else {}
    answered: dict[str, _Answers] = {}
    for name, changes in {"base": {}, "again": {}, **_VARIANTS, **on_gpu}.items():
        on_progress(name.replace("_", " "))
        with torch.compiler.set_stance("force_eager" if name == _UNCOMPILED else "default"):
            answered[name] = _answers(replace(base, **changes), shape, requests, prompt_tokens, output_tokens)
    pairs = {name: ("base", name) for name in ("again", *_VARIANTS)}
    if on_gpu:
        pairs |= {"captured": (_EAGER, _UNCOMPILED), "compiled": (_EAGER, "base")}
    figures = []
    for name, (one, other) in pairs.items():
        figures += _compared(name, answered[one], answered[other], at_least(1) if name != "compiled" else None)
    return figures


def _compared(name: str, one: _Answers, other: _Answers, bound: Bound | None) -> list[Figure]:
    equal = [ours.tokens == theirs.tokens for ours, theirs in zip(one[0], other[0], strict=True)]
    distances = [
        distance for ours, theirs in zip(one[1], other[1], strict=True) for distance in _distances(ours, theirs)
    ]
    return [
        Figure(f"requests_identical_{name}", sum(equal) / len(equal), "share", bound),
        Figure(f"logprob_distance_max_{name}", max(distances), "nats"),
        Figure(f"logprob_distance_median_{name}", median(distances), "nats"),
    ]


def _answers(config: EngineConfig, shape: str, requests: int, prompt_tokens: int, output_tokens: int) -> _Answers:
    """Answers without log-probabilities, and answers with log-probabilities, which use another sampling path."""
    gc.collect()  # an engine is part of reference cycles, so only this frees the memory of the previous engine
    model = random_model(shape, device=torch_device(config.device))
    engine = build_engine(model, config)
    try:
        random = np.random.default_rng(0)
        prompts = random_prompts(random, model.vocab_size, count=requests, tokens=prompt_tokens)
        plain = [answer.wait() for answer in ask_at_once(engine, prompts, output_tokens)]
        engine.reset_prefix_cache()
        return plain, [answer.wait() for answer in ask_at_once(engine, prompts, output_tokens, logprobs=0)]
    finally:
        engine.close()


def _distances(ours: Answer, theirs: Answer) -> list[float]:
    """Differences between the log-probabilities of two answers, for the equal tokens and the first different token."""
    pairs = zip(ours.tokens, theirs.tokens, strict=True)
    equal = next((at for at, (one, other) in enumerate(pairs) if one != other), len(ours.tokens))
    return [
        abs(one - other) for one, other in zip(ours.logprobs[: equal + 1], theirs.logprobs[: equal + 1], strict=True)
    ]
