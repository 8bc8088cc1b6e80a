"""Measures vLLM's decode steps and times to first token, with dummy weights, at the sizes of `python -m bench ranks`.

    python -m bench.vllm_ranks DIR RANKS > result.json      # DIR: a model's config.json; needs vLLM

A decode step is the time of 64 more tokens of all rows, divided by 64, with the prompts cached. Medians of five.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from typing import Any

_DECODE = ((1, 1024), (32, 1024), (128, 368))  # rows, prompt tokens of each
_COLD = (128, 2048, 8192)
_ROUNDS = 5


def figures(directory: str, ranks: int) -> list[dict[str, Any]]:
    """Start vLLM and measure it, in milliseconds. It keeps its GPUs until the process ends."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=directory,
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=16384,
        gpu_memory_utilization=0.6,
        max_num_seqs=128,
        max_num_batched_tokens=16384,
        tensor_parallel_size=ranks,
        seed=0,
    )
    drawn = random.Random(0)

    def prompts(rows: int, length: int) -> list[dict[str, list[int]]]:
        return [{"prompt_token_ids": [drawn.randrange(100, 100_000) for _ in range(length)]} for _ in range(rows)]

    def seconds(asked: list[dict[str, list[int]]], outputs: int) -> float:
        how = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        llm.generate(asked, how, use_tqdm=False)
        return time.perf_counter() - began

    def step_s(rows: int, length: int) -> float:
        asked = prompts(rows, length)
        seconds(asked, 17)  # caches the prompts
        return (seconds(asked, 81) - seconds(asked, 17)) / 64

    seconds(prompts(4, 256), 8)
    found = [
        _figure(f"vllm_tp{ranks}_decode_b{rows}_ms", [step_s(rows, length) for _ in range(_ROUNDS)])
        for rows, length in _DECODE
    ]
    for length in _COLD:
        for _ in range(2):
            seconds(prompts(1, length), 1)
        taken = [seconds(prompts(1, length), 1) for _ in range(_ROUNDS)]
        found.append(_figure(f"vllm_tp{ranks}_ttft_cold_{length}_ms", taken))
    return found


def _figure(name: str, taken_s: list[float]) -> dict[str, Any]:
    value = round(1e3 * statistics.median(taken_s), 6)
    return {"name": name, "value": value, "unit": "ms", "bound": None, "holds": None}


if __name__ == "__main__":
    print(json.dumps({"bench": "vllm_ranks", "figures": figures(sys.argv[1], int(sys.argv[2]))}, indent=2))
