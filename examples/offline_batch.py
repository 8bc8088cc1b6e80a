"""Answer a file of prompts at once: one JSON object for each line of input, in order.

    python examples/offline_batch.py PROMPTS.txt [MODEL] > answers.jsonl

The engine batches the prompts by itself; those that begin alike share the KV of their beginning.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sidestream import LLM, SamplingParams, SidestreamError


def main(prompts: list[str], model: str) -> None:
    """Print the answers."""
    with LLM(model, kv_memory="64MiB") as llm:
        answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=32))
    for prompt, answer in zip(prompts, answers, strict=True):
        print(json.dumps({"prompt": prompt, "answer": answer.text, "reused": answer.cached.device}))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python examples/offline_batch.py PROMPTS.txt [MODEL]")
    try:
        lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
        main([line for line in lines if line], sys.argv[2] if len(sys.argv) > 2 else "smollm2-135m-instruct")
    except (OSError, UnicodeError, SidestreamError) as error:
        sys.exit(f"error: {error}")
