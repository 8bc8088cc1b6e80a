"""Two conversations at once on one event loop: each answer is printed when it is complete.

    python examples/async_chat.py [MODEL]

MODEL is a directory in transformers' format, a hub id, or a name that `sidestream models` lists.
"""

from __future__ import annotations

import asyncio
import sys

from sidestream import AsyncLLM, SamplingParams, SidestreamError

QUESTIONS = ("Why do whales sing?", "How deep do whales dive?")
# Only what differs from the model's own sampling defaults (its generation_config.json).
PARAMS = SamplingParams(max_tokens=48, seed=1)


async def ask(llm: AsyncLLM, question: str) -> None:
    """Answer one question and print both."""
    messages = [{"role": "user", "content": question}]
    answer = "".join([delta.text async for delta in llm.chat(messages, PARAMS)])
    print(f"{question} {answer!r}")


async def main(model: str) -> None:
    """Ask all questions at once."""
    async with AsyncLLM(model, kv_memory="64MiB") as llm:
        print(f"sampling defaults: {llm.sampling_defaults}")
        await asyncio.gather(*(ask(llm, question) for question in QUESTIONS))
        await llm.flush()  # with offload: what is complete now rests in the tiers


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"))
    except SidestreamError as error:
        sys.exit(f"error: {error}")
