"""Structured output on several ranks: rank 0 masks, and every rank continues with its tokens and drafts."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from adapter_rig import make_adapter

from proof.tiny_models import tiny_model_dir
from sidestream import LLM, OffloadConfig, SamplingParams, SpeculativeConfig, StructuredOutputs
from sidestream.llm import RequestOutput

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="ranks need Linux")]

PROMPTS = [[(7 * at + 3 * token) % 90 + 1 for token in range(40)] for at in range(6)]
NAMES = ("day_or_night", "ship_has_left")
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


@pytest.mark.parametrize("family", ["llama", "kimi_linear"])
def test_four_ranks_equal_one_with_all_that_ranks_can_do(family: str, tmp_path: Path) -> None:
    """Schemas with jump-ahead, chunks, host and disk; adapters of a plain model, latents and states of a hybrid one."""
    model = tiny_model_dir(family, tmp_path / family, 0, num_key_value_heads=4, vocab_size=260)
    options = OPTIONS | {"chunk_tokens": 16, "kv_memory": "2MiB"}
    prompts, params = PROMPTS[:4], asked(seed=None)[:4]  # all in one batch
    if family == "llama":
        adapters = [f"{name}={make_adapter(model, tmp_path / name, seed)}" for seed, name in enumerate("ab")]
        options |= {"lora_modules": adapters}
        params = [replace(one, adapter=("", "a", "b")[at % 3]) for at, one in enumerate(params)]
    with LLM(model, **options) as llm:
        expected = [output.token_ids for output in llm.generate(prompts, params)]
    options |= {"offload": OffloadConfig(host="16MiB", disk=tmp_path / "kv")}
    options |= {"speculative": SpeculativeConfig("grammar", max_drafts=4, adaptive=False)}
    with LLM(model, tensor_parallel=4, **options) as llm:
        for tier in ("device", "host", "disk"):
            found = llm.generate(prompts, params)
            assert [output.token_ids for output in found] == expected
            assert tier != "host" or all(output.cached.host > 0 for output in found)
            llm.flush()
            llm.reset_prefix_cache("device")
            if tier == "host":
                llm.reset_prefix_cache("host")
        assert llm.metrics.value("accepted_tokens_total", "grammar") > 0
        assert llm.metrics.value("transfer_bytes_total", "disk-read") > 0
