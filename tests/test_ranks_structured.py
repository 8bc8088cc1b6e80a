"""Structured output on several ranks: rank 0 masks, and every rank continues with its tokens and drafts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from proof.tiny_models import tiny_model_dir
from sidestream import LLM, SamplingParams, SpeculativeConfig, StructuredOutputs
from sidestream.llm import RequestOutput

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="ranks need Linux")]

PROMPTS = [[(7 * at + 3 * token) % 90 + 1 for token in range(40)] for at in range(6)]
NAMES = ("whether_it_is_day_or_night_now", "whether_the_ship_has_left_the_harbour")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {name: {"enum": ["yes", "no", "unknown"]} for name in NAMES},
    "required": [*NAMES],
    "additionalProperties": False,
}
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_running": 4, "compute_threads": 1}


def asked(*, seed: int | None) -> list[SamplingParams]:
    """Every other request has a schema."""
    how: dict[str, Any] = {"temperature": 0.0} if seed is None else {"temperature": 2.0, "seed": seed}
    form = StructuredOutputs(json=SCHEMA, disable_any_whitespace=True)
    plain = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=1, **how)
    formed = SamplingParams(max_tokens=140, structured_outputs=form, logprobs=1, **how)
    return [formed if at % 2 else plain for at in range(len(PROMPTS))]


def answers(llm: LLM) -> list[RequestOutput]:
    return [output for seed in (None, 7) for output in llm.generate(PROMPTS, asked(seed=seed))]


def test_forms_and_jumps_on_two_ranks_equal_those_on_one(tmp_path: Path) -> None:
    model = tiny_model_dir("llama", tmp_path / "llama", 0)
    with LLM(model, kv_memory="144KiB", **OPTIONS) as llm:
        expected = answers(llm)
    jumps = SpeculativeConfig("grammar", max_drafts=4, adaptive=False)
    with LLM(model, tensor_parallel=2, kv_memory="72KiB", chunk_tokens=16, speculative=jumps, **OPTIONS) as llm:
        found = answers(llm)
        assert llm.metrics.value("preemptions_total") > 0
        assert llm.metrics.value("accepted_tokens_total", "grammar") > 0
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    for one, other in zip(found, expected, strict=True):
        ours, theirs = ([entry.logprob for entry in output.completions[0].logprobs] for output in (one, other))
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert all(set(json.loads(output.text)) == {*NAMES} for output in found[1::2])
