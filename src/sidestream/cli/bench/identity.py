"""Whether tokens depend on how they are computed: offload on and off, asynchronous and not, captured graphs and kernel
by kernel; and how far logits differ.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import torch

from sidestream.cli.bench.report import Bound, Figure, at_least
from sidestream.cli.bench.requests import Answer, ask_at_once
from sidestream.config import EngineConfig, OffloadConfig
from sidestream.device.choice import torch_device
from sidestream.device.kinds import CUDA
from sidestream.engine import build_engine
from sidestream.testing.random_models import random_model

# Against an engine as it is served.
_WAYS: dict[str, dict[str, Any]] = {
    "offload_off": {"offload": None},
    "synchronous": {"asynchronous": False},
}
# And on a GPU: graphs of layers as they are written, which are the kernels that an eager engine launches. What is
# served has compiled ones.
_AS_WRITTEN, _EAGER = "as_written", "eager"

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
    """The same prompts, all at once and greedily, of engines that differ in one thing: the share of requests whose
    tokens are all equal, and, asked a second time for them, how far the log-probability of a token behind equal ones is
    from the other's. The engines are there one after another.

    No prompt shares anything with another, and none finds what was stored: what comes back from other tiers is compared
    by `bench prefix`.
    """
    base = EngineConfig(
        device=device,
        kv_memory="4GiB" if device == CUDA else "16MiB",
        max_running=requests,
        max_model_len=prompt_tokens + output_tokens,
        offload=OffloadConfig(host="4GiB" if device == CUDA else "16MiB"),
    )
    on_gpu = {_AS_WRITTEN: {}, _EAGER: {"eager": True}} if device == CUDA else {}  # a CPU knows nothing else
    answered: dict[str, _Answers] = {}
    for name, changes in {"base": {}, "again": {}, **_WAYS, **on_gpu}.items():
        on_progress(name.replace("_", " "))
        with torch.compiler.set_stance("force_eager" if name == _AS_WRITTEN else "default"):
            answered[name] = _answers(replace(base, **changes), shape, requests, prompt_tokens, output_tokens)
    pairs = {name: ("base", name) for name in ("again", *_WAYS)}
    if on_gpu:
        pairs |= {"captured": (_EAGER, _AS_WRITTEN), "compiled": (_EAGER, "base")}
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
    """As they are mostly asked for, and with log-probabilities, which are drawn another way."""
    gc.collect()  # an engine knows itself: what the one before held is given back now, and not some time
    model = random_model(shape, device=torch_device(config.device))
    engine = build_engine(model, config)
    try:
        random = np.random.default_rng(0)
        prompts = [
            [int(token) for token in random.integers(1, model.vocab_size, prompt_tokens)] for _ in range(requests)
        ]
        plain = [answer.wait() for answer in ask_at_once(engine, prompts, output_tokens)]
        engine.reset_cache()
        return plain, [answer.wait() for answer in ask_at_once(engine, prompts, output_tokens, logprobs=0)]
    finally:
        engine.close()


def _distances(ours: Answer, theirs: Answer) -> list[float]:
    """Of the log-probabilities of equal tokens behind equal ones, and of the first that differ."""
    pairs = zip(ours.tokens, theirs.tokens, strict=True)
    equal = next((at for at, (one, other) in enumerate(pairs) if one != other), len(ours.tokens))
    return [
        abs(one - other) for one, other in zip(ours.logprobs[: equal + 1], theirs.logprobs[: equal + 1], strict=True)
    ]
