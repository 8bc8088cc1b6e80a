"""A prompt's KV survives a restart: compute it once, close the engine, start again, and load it from disk.

    python examples/offload_to_disk.py [MODEL] [DIRECTORY]

MODEL is a directory in transformers' format, a hub id, or a name that `sidestream models` lists.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from sidestream import LLM, OffloadConfig, SamplingParams, SidestreamError

PROMPT = "It was the best of times, it was the worst of times. " * 8
PARAMS = SamplingParams(temperature=0, max_tokens=16)


def ask(model: str, directory: Path) -> tuple[int, ...]:
    """Start an engine with a disk tier, answer once, and close it; `close` stores the complete blocks."""
    offload = OffloadConfig(host="64MiB", disk=directory, disk_capacity="1GiB")
    with LLM(model, kv_memory="64MiB", offload=offload) as llm:
        answer = llm.generate(PROMPT, PARAMS)[0]
        print(f"{answer.prompt_tokens} prompt tokens, {answer.cached.disk} of them from disk, {answer.ttft_s:.3f} s")
        return answer.token_ids


def main(model: str, directory: Path) -> None:
    """Ask in two engines, one after the other, on one directory."""
    first, second = ask(model, directory), ask(model, directory)
    print("the answers are equal" if first == second else "the answers differ")


if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"
    try:
        with tempfile.TemporaryDirectory() as temporary:
            main(name, Path(sys.argv[2]) if len(sys.argv) > 2 else Path(temporary) / "kv")
    except SidestreamError as error:
        sys.exit(f"error: {error}")
