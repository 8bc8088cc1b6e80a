"""The cost of LoRA adapters: time of a decode step of an engine whose rows use several adapters, divided by that of an
engine without room for adapters. Both engines serve the same random weights; rounds alternate.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
from safetensors.torch import save_file

from bench.requests import Answer, ask, random_prompts
from proof.random_models import random_model
from proof.report import Figure, at_most
from sidestream.config import EngineConfig
from sidestream.engine import Engine, build_engine
from sidestream.models.lora import Adapters
from sidestream_kv.device.choice import torch_device

_PROMPT_TOKENS, _RANK = 64, 16


def measure(
    *,
    device: str,
    shape: str,
    requests: int,
    adapters: int,
    output_tokens: int,
    rounds: int,
    on_progress: Callable[[str], None],
) -> list[Figure]:
    """As many rows as there are adapters use one each; the others use none."""
    random = np.random.default_rng(0)
    names = [f"adapter-{number}" for number in range(adapters)]
    used = [*names, *[""] * (requests - adapters)]
    plain, adapted, ratios = list[float](), list[float](), list[float]()
    on_progress("starting the engines")
    with (
        _engine(device, shape, requests, output_tokens, ()) as (without, vocab_size),
        _engine(device, shape, requests, output_tokens, names) as (beside, _),
    ):
        for number in range(rounds + 1):
            on_progress(f"round {number} of {rounds}")
            prompts = random_prompts(random, vocab_size, count=requests, tokens=_PROMPT_TOKENS)
            base = _step_s(without, prompts, output_tokens, [""] * requests)
            step = _step_s(beside, prompts, output_tokens, used)
            if number:  # round 0 warms up
                plain.append(base)
                adapted.append(step)
                ratios.append(step / base)
    return [
        Figure("lora_step_over_none", median(ratios), "ratio", at_most(1.1)),
        Figure("lora_step_ms", 1e3 * median(adapted), "ms"),
        Figure("plain_step_ms", 1e3 * median(plain), "ms"),
        Figure("lora_step_over_none_min", min(ratios), "ratio"),
        Figure("lora_step_over_none_max", max(ratios), "ratio"),
    ]


def _step_s(engine: Engine, prompts: Sequence[list[int]], outputs: int, used: Sequence[str]) -> float:
    """Median seconds between two tokens of the answers, once all prompts are computed."""
    answers = list[Answer]()

    def ask_all() -> None:
        answers.extend(ask(engine, prompt, outputs, adapter=name) for prompt, name in zip(prompts, used, strict=True))

    engine.call(ask_all)
    return median(float(np.median(np.diff(answer.wait().times[outputs // 8 :]))) for answer in answers)


@contextlib.contextmanager
def _engine(device: str, shape: str, requests: int, outputs: int, names: Sequence[str]) -> Iterator[tuple[Engine, int]]:
    """An engine with loaded adapters of these names, and its vocabulary size."""
    made = random_model(shape, device=torch_device(device))
    if names:
        made.add_adapters(slots=len(names), rank=_RANK)
    blocks = (made.layout.num_blocks_for(_PROMPT_TOKENS + outputs) + 1) * requests
    config = EngineConfig(
        device=device,
        kv_memory=blocks * made.layout.block_bytes,
        max_running=requests,
        max_model_len=2 * (_PROMPT_TOKENS + outputs),
        prefix_cache=False,
    )
    engine = build_engine(made, config)
    try:
        with tempfile.TemporaryDirectory(prefix="sidestream-bench-") as directory:
            for seed, name in enumerate(names):
                assert made.adapters is not None
                engine.adapters.load(name, str(_random_adapter(made.adapters, Path(directory) / name, seed)))
        yield engine, made.vocab_size
    finally:
        engine.close()


def _random_adapter(adapters: Adapters, directory: Path, seed: int) -> Path:
    """An adapter of all parts that may have one, in PEFT's format."""
    generator, matrices = torch.Generator().manual_seed(seed), {}
    for name, (inputs, outputs) in adapters.sizes.items():
        for letter, shape in (("A", (_RANK, inputs)), ("B", (outputs, _RANK))):
            values = torch.randn(*shape, generator=generator) * 0.02
            matrices[f"base_model.model.{name}.lora_{letter}.weight"] = values.bfloat16()
    directory.mkdir()
    save_file(matrices, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK}))
    return directory
