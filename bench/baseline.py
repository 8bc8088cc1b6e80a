"""The baseline: transformers' own model and `generate` in a separate process, as users run it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from sidestream.cli.child_process import ChildProcess, answer_requests


class Generate:
    """Calls `generate` for one prompt after another, in the separate process. A context manager."""

    def __init__(self, path: str, dtype: str) -> None:
        self._child = ChildProcess(__name__, {"path": path, "dtype": dtype})

    def __enter__(self) -> Generate:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._child.close()

    def seconds(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> float:
        """Wall time to generate exactly `output_tokens` tokens for each prompt, greedily, one prompt after another."""
        return float(
            self._child.request({"prompts": [list(prompt) for prompt in prompts], "output_tokens": output_tokens})
        )


def _set_up(setup: dict[str, Any]) -> tuple[Callable[[dict[str, Any]], float], Callable[[], None]]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        setup["path"], dtype=getattr(torch, setup["dtype"]), use_safetensors=True, trust_remote_code=False
    ).eval()

    def answer(request: dict[str, Any]) -> float:
        count, start = request["output_tokens"], time.perf_counter()
        for prompt in request["prompts"]:
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                out = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=count,
                    min_new_tokens=count,
                    do_sample=False,
                    pad_token_id=0,
                )
            assert out.shape[1] == len(prompt) + count
        return time.perf_counter() - start

    answer({"prompts": [list(range(100, 132))], "output_tokens": 4})
    return answer, lambda: None


if __name__ == "__main__":
    answer_requests(_set_up)
