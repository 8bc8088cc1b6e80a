"""The demo model's tokens are those of the recorded file: a change of the code's structure must not change one of them.

Recorded in float32 by an earlier version of the code, with `python tests/main_job/test_recorded_tokens.py FILE`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sidestream import LLM, OffloadConfig, SamplingParams, SpeculativeConfig
from sidestream.models import kv_token_bytes
from sidestream.models.catalog import prepared
from sidestream.text import sample_text
from sidestream.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.demo_model]

RECORDED = Path(__file__).with_name("recorded_tokens.json")
MODEL = "smollm2-135m-instruct"

# start and stop of each prompt in the sample text's tokens
PROMPTS = ((0, 1), (0, 33), (100, 180), (100, 200), (500, 516))
# One for each way in which a token is chosen.
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0, "seed": 7},
    "filtered": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "seed": 11},
    "penalised": {
        "temperature": 0.9,
        "seed": 13,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": {30: 2.0, 28: -1.0},
    },
    "two samples": {"temperature": 1.0, "seed": 17, "n": 2, "min_tokens": 4},
}


def tokens_of(model: str, disk: Path, *, max_drafts: int | None) -> dict[str, list[list[int]]]:
    """Tokens of every prompt by every choice, all at once, with a pool that holds about half of them."""
    ids: Sequence[int] = Tokenizer.load(model).encode(sample_text())
    speculation = None
    if max_drafts is not None:
        speculation = SpeculativeConfig(proposer="ngram", max_drafts=max_drafts, adaptive=False)
    found: dict[str, list[list[int]]] = {}
    with LLM(
        model,
        dtype="float32",
        kv_memory=768 * kv_token_bytes(model, dtype="float32"),
        chunk_tokens=64,
        offload=OffloadConfig(host="64MiB", disk=disk, disk_capacity="256MiB"),
        speculative=speculation,
    ) as llm:
        asked = [(name, ids[start:stop]) for name in CHOICES for start, stop in PROMPTS]
        params = [SamplingParams(max_tokens=10, ignore_eos=True, **CHOICES[name]) for name, _ in asked]
        outputs = llm.generate([prompt for _, prompt in asked], params)
    for (name, _), output in zip(asked, outputs, strict=True):
        found.setdefault(name, []).extend(list(sample.token_ids) for sample in output.completions)
    return found


@pytest.mark.parametrize("max_drafts", [None, 3])
def test_tokens_equal_the_recorded_ones(tmp_path: Path, max_drafts: int | None) -> None:
    model = prepared(MODEL)
    if model is None:
        pytest.skip(f"the demo model is not in the cache: `sidestream models prepare {MODEL}` fetches it")
    assert tokens_of(str(model), tmp_path / "kv", max_drafts=max_drafts) == json.loads(RECORDED.read_text())


if __name__ == "__main__":
    path = prepared(MODEL)
    if path is None:
        sys.exit(f"the demo model is not in the cache: sidestream models prepare {MODEL}")
    record = tokens_of(str(path), Path(sys.argv[1]).with_suffix(".kv"), max_drafts=None)
    lines = (f"  {json.dumps(name)}: {json.dumps(tokens)}" for name, tokens in record.items())
    Path(sys.argv[1]).write_text("{\n" + ",\n".join(lines) + "\n}\n")
