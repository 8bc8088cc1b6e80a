"""Tokens per second divided by those of transformers' `generate` in the same dtype, for one and for eight requests."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from bench.baseline import Generate
from proof.report import Figure, at_least
from sidestream.cli.prompt_runs import ChildEngine
from sidestream_kv.device.kinds import CPU

_BATCH = 8
_PROMPT_TOKENS = 32


def measure(
    model: str, *, output_tokens: int, rounds: int, dtype: str, on_progress: Callable[[str], None]
) -> list[Figure]:
    """Each round has four measurements: one request in Sidestream, one request in generate, eight requests at once in
    Sidestream, and eight requests one after another in generate.
    """
    from sidestream.models import precision_of
    from sidestream.models.catalog import resolve
    from sidestream.text import sample_text
    from sidestream.tokenizer import Tokenizer

    path = resolve(model)
    dtype = precision_of(path, dtype=dtype).dtype  # for generate, "auto" is always the data type of the checkpoint
    ids = Tokenizer.load(path).encode(sample_text())
    prompts = [ids[at * _PROMPT_TOKENS : (at + 1) * _PROMPT_TOKENS] for at in range(_BATCH)]
    ours1, theirs1, ours8, theirs8 = [], [], [], []
    with (
        ChildEngine(path, {"device": CPU, "dtype": dtype, "kv_memory": "256MiB", "prefix_cache": False}) as engine,
        Generate(path, dtype) as generate,
    ):
        for number in range(1, rounds + 1):
            on_progress(f"round {number} of {rounds}, alone")
            ours1.append(output_tokens / engine.generate(prompts[:1], max_tokens=output_tokens).seconds)
            theirs1.append(output_tokens / generate.seconds(prompts[:1], output_tokens))
            on_progress(f"round {number} of {rounds}, eight")
            ours8.append(
                _BATCH * output_tokens / engine.generate(prompts, max_tokens=output_tokens, at_once=True).seconds
            )
            theirs8.append(_BATCH * output_tokens / generate.seconds(prompts, output_tokens))
    return [
        Figure(
            "decode_over_generate", median(a / b for a, b in zip(ours1, theirs1, strict=True)), "ratio", at_least(1.0)
        ),
        Figure(
            "batch8_over_generate", median(a / b for a, b in zip(ours8, theirs8, strict=True)), "ratio", at_least(4.0)
        ),
        Figure("decode_tokens_per_s", median(ours1), "tokens/s"),
        Figure("generate_tokens_per_s", median(theirs1), "tokens/s"),
        Figure("batch8_tokens_per_s", median(ours8), "tokens/s"),
        Figure("generate_sequential_tokens_per_s", median(theirs8), "tokens/s"),
    ]
