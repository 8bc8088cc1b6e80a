"""Tokens a second over transformers' `generate` in the same data type, alone and with eight requests at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING

from sidestream.cli.bench.report import Figure, at_least
from sidestream.cli.visits import warm_up

if TYPE_CHECKING:
    from sidestream.llm import LLM

_BATCH = 8
_PROMPT_TOKENS = 32


def measure(model: str, *, output_tokens: int, rounds: int, dtype: str, tell: Callable[[str], None]) -> list[Figure]:
    """Take turns: ours alone, generate alone, ours with eight at once, generate for the eight one after another."""
    from sidestream.llm import LLM

    with LLM(model, dtype=dtype, kv_memory="256MiB", prefix_cache=False) as llm:
        baseline = _Generate(model, llm.engine.parts.layout.dtype)
        ids = llm.tokenizer.encode(_text())
        prompts = [ids[at * _PROMPT_TOKENS : (at + 1) * _PROMPT_TOKENS] for at in range(_BATCH)]
        warm_up(llm)
        baseline.run(prompts[:1], 8)
        ours1, theirs1, ours8, theirs8 = [], [], [], []
        for number in range(rounds):
            tell(f"round {number + 1} of {rounds}, alone")
            ours1.append(_rate(lambda: _run(llm, prompts[:1], output_tokens), output_tokens))
            theirs1.append(_rate(lambda: baseline.run(prompts[:1], output_tokens), output_tokens))
            tell(f"round {number + 1} of {rounds}, eight at once")
            ours8.append(_rate(lambda: _run(llm, prompts, output_tokens), output_tokens * _BATCH))
            theirs8.append(_rate(lambda: baseline.run(prompts, output_tokens), output_tokens * _BATCH))
    return [
        Figure("decode_over_generate", median(a / b for a, b in zip(ours1, theirs1, strict=True)), "ratio", at_least(1.0)),
        Figure("batch8_over_generate", median(a / b for a, b in zip(ours8, theirs8, strict=True)), "ratio", at_least(4.0)),
        Figure("decode_tokens_per_s", median(ours1), "tokens/s"),
        Figure("generate_tokens_per_s", median(theirs1), "tokens/s"),
        Figure("batch8_tokens_per_s", median(ours8), "tokens/s"),
        Figure("generate_sequential_tokens_per_s", median(theirs8), "tokens/s"),
    ]


class _Generate:
    """transformers' own model and loop, as a user would run it."""

    def __init__(self, model: str, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from sidestream.models.catalog import resolve

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(resolve(model), dtype=getattr(torch, dtype)).eval()

    def run(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> None:
        for prompt in prompts:
            ids = self._torch.tensor([list(prompt)])
            with self._torch.inference_mode():
                out = self._model.generate(
                    ids,
                    attention_mask=self._torch.ones_like(ids),
                    max_new_tokens=output_tokens,
                    min_new_tokens=output_tokens,
                    do_sample=False,
                    pad_token_id=0,
                )
            assert out.shape[1] == len(prompt) + output_tokens


def _run(llm: LLM, prompts: Sequence[Sequence[int]], output_tokens: int) -> None:
    from sidestream.config import SamplingParams

    outputs = llm.generate([list(prompt) for prompt in prompts], SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True))
    assert all(len(output.token_ids) == output_tokens for output in outputs)


def _rate(work: Callable[[], None], tokens: int) -> float:
    start = time.perf_counter()
    work()
    return tokens / (time.perf_counter() - start)


def _text() -> str:
    from sidestream.text import sample_text

    return sample_text()
