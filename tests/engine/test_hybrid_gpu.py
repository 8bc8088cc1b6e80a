"""Models with recurrent state on a GPU: the answers of the CPU, eager and captured, from every tier."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from proof.tiny_models import HYBRIDS, tiny_model_dir
from sidestream import LLM, OffloadConfig, SamplingParams, SpeculativeConfig
from sidestream.llm import RequestOutput

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
PROMPTS = [
    [5 + position * step % 240 for position in range(length)]
    for step, length in ((3, 300), (3, 140), (7, 77), (11, 16), (13, 5))
]
# Where their layers cannot be compiled, transformers' experts copy to the GPU in each pass, which no graph can hold.
MIXTURES = {"jamba", "kimi_linear", "lfm2_moe", "nemotron_h", "qwen3_5_moe", "qwen3_next"}
KERNELS = {"qwen3_5", "qwen3_5_moe", "qwen3_next"}
NEAR = 5e-3  # see test_cuda_engine.py; recurrences sum over more terms


def assert_near(outputs: list[RequestOutput], reference: list[RequestOutput]) -> None:
    assert [output.token_ids for output in outputs] == [output.token_ids for output in reference]
    for output, expected in zip(outputs, reference, strict=True):
        for got, wanted in zip(output.completions[0].logprobs, expected.completions[0].logprobs, strict=True):
            assert got.logprob == pytest.approx(wanted.logprob, abs=NEAR)


def settle(llm: LLM) -> None:
    """Wait until no transfer is in flight."""
    transfers, busy = llm.engine.parts.transfers, [True]
    while transfers is not None and busy[-1]:
        llm.engine.call(lambda: busy.append(transfers.has_work))


@pytest.mark.parametrize("family", sorted(HYBRIDS))
def test_answers_equal_the_cpus_eager_and_captured_and_from_every_tier(family: str, tmp_path: Path) -> None:
    model = tiny_model_dir(family, tmp_path / "model", 3)
    options = {"dtype": "float32", "kv_memory": "64MiB", "max_running": 4}
    turns = [[*prompt, 9, 8, 7] for prompt in PROMPTS]
    with LLM(model, device="cpu", **options) as llm:
        reference, expected = llm.generate(PROMPTS, PARAMS), llm.generate(turns, PARAMS)
    with LLM(model, device="cuda", eager=True, **options) as llm:
        assert_near(llm.generate(PROMPTS, PARAMS), reference)
        assert_near(llm.generate(turns, PARAMS), expected)
    offload = OffloadConfig(host="64MiB", disk=tmp_path / "tier", disk_capacity="64MiB")
    with LLM(model, device="cuda", offload=offload, **options) as llm:
        parts = llm.engine.parts
        graphs = parts.executor._graphs
        assert graphs is not None or family in MIXTURES
        if graphs is not None:
            assert all(key.has_states for key in graphs.keys)
            assert any(key.tokens for key in graphs.keys) == (family in KERNELS)
        assert parts.costs is not None
        parts.costs.saw_prefill = lambda *_: None  # type: ignore[method-assign]
        assert_near(llm.generate(PROMPTS, PARAMS), reference)
        found = llm.generate(turns, PARAMS)
        assert_near(found, expected)
        assert sum(output.cached.device for output in found) > 0
        settle(llm)
        llm.engine.call(parts.scheduler.forget_all)
        loaded = llm.generate(turns, PARAMS)
        assert_near(loaded, expected)
        assert sum(output.cached.host for output in loaded) > 0
        waits = parts.device.host_waits()
        assert set(waits) <= {"step"}
    with LLM(model, device="cuda", offload=offload, **{**options, "max_running": 2}) as llm:
        read = llm.generate(turns, replace(PARAMS, max_tokens=4))
        assert [output.token_ids for output in read] == [output.token_ids[:4] for output in expected]
        assert sum(output.cached.disk for output in read) > 0


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1", "qwen3_next", "lfm2"])
def test_answers_with_drafts_equal_the_cpus_eager_and_captured(family: str, tmp_path: Path) -> None:
    model = tiny_model_dir(family, tmp_path / "model", 3)
    options = {"dtype": "float32", "kv_memory": "64MiB", "max_running": 4}
    prompts = [([5, 17, 90, 41, 3 + step] * 40)[:length] for step, length in ((3, 150), (7, 77), (11, 38), (13, 21))]
    params = replace(PARAMS, max_tokens=120)  # so long that random weights repeat themselves
    with LLM(model, device="cpu", **options) as llm:
        reference = llm.generate(prompts, params)
        turns = [[*prompt, *output.token_ids, 9, 8] for prompt, output in zip(prompts, reference, strict=True)]
        expected = llm.generate(turns, params)
    drafting = SpeculativeConfig(max_drafts=3, adaptive=False)
    for eager in (True, False):
        with LLM(model, device="cuda", speculative=drafting, eager=eager, **options) as llm:
            assert_near(llm.generate(prompts, params), reference)
            found = llm.generate(turns, params)
            assert_near(found, expected)
            size = llm.engine.parts.layout.block_tokens
            assert size == 64
            assert all(
                output.cached.device >= (len(prompt) + 119) // size * size
                for prompt, output in zip(prompts, found, strict=True)
            )
            accepted, drafted = (llm.metrics.value(f"{kind}_tokens_total", "ngram") for kind in ("accepted", "draft"))
            assert (family == "qwen3_5" or accepted > 0) and accepted < drafted
            assert set(llm.engine.parts.device.host_waits()) <= {"step"}
