"""Log-probabilities of prompts, against those of transformers' own forward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from proof.tiny_models import save_head, tiny_model_dir
from proof.toy import ToyModel
from sidestream import LLM, OffloadConfig, RequestRejected, SamplingParams, SpeculativeConfig
from sidestream.config import EngineConfig
from sidestream.engine import build_engine
from sidestream.types import Delta, TokenLogprob
from sidestream_kv.device.cpu import CpuDevice

PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=3)
PLAIN = dataclasses.replace(PARAMS, prompt_logprobs=None)
PROMPT = [10 + position * position % 200 for position in range(70)]
OTHER = [10 + position * 7 % 200 for position in range(41)]
SIZES: dict[str, Any] = {"kv_memory": "8MiB", "compute_threads": 1, "block_tokens": 8, "dtype": "float32"}


def reference(directory: Path, prompt: Sequence[int]) -> list[TokenLogprob]:
    """Log-probabilities of the tokens from the second on, with three alternatives."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        raw = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    found = []
    for position, token in enumerate(prompt[1:]):
        values, ids = raw[position].topk(3)
        drawn = raw[position, token]
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        found.append(TokenLogprob(token, float(drawn), top, 1 + int((raw[position] > drawn).sum())))
    return found


def expect_near(found: Sequence[TokenLogprob | None], expected: Sequence[TokenLogprob]) -> None:
    first, *rest = found
    assert first is None
    assert len(rest) == len(expected)
    for ours, theirs in zip(rest, expected, strict=True):
        assert ours is not None
        assert (ours.token_id, ours.rank) == (theirs.token_id, theirs.rank)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
        values = [ours.logprob, *(value for _, value in ours.top)]
        # float32 forward passes of other shapes
        assert values == pytest.approx([theirs.logprob, *(value for _, value in theirs.top)], abs=2e-4)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir("llama", tmp_path_factory.mktemp("tiny"), seed=1)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_5"])
@pytest.mark.parametrize("chunk_tokens", [16, 256])
def test_log_probabilities_of_a_prompt_are_those_of_transformers(
    tmp_path: Path, family: str, chunk_tokens: int
) -> None:
    path = tiny_model_dir(family, tmp_path, seed=2)
    with LLM(path, **SIZES, chunk_tokens=chunk_tokens) as llm:
        both = llm.generate([PROMPT, OTHER], PARAMS)
        plain = llm.generate([PROMPT, OTHER], PLAIN)
    for output, other, prompt in zip(both, plain, (PROMPT, OTHER), strict=True):
        expect_near(output.prompt_logprobs, reference(path, prompt))
        assert output.token_ids == other.token_ids
        assert other.prompt_logprobs == ()


def test_a_step_computes_few_logits_of_prompts(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long chunk is cut, and two prompts take turns."""
    monkeypatch.setattr("sidestream.config._PROMPT_LOGITS", 16)
    widths = []
    with LLM(directory, **SIZES, chunk_tokens=64) as llm:
        forward = llm.engine.parts.executor._model.forward

        def counted(tokens: Any, positions: Any, batch: Any, indices: Any, **options: Any) -> Any:
            widths.append(len(indices))
            return forward(tokens, positions, batch, indices, **options)

        monkeypatch.setattr(llm.engine.parts.executor._model, "forward", counted)
        outputs = llm.generate([PROMPT, OTHER], PARAMS)
    for output, prompt in zip(outputs, (PROMPT, OTHER), strict=True):
        expect_near(output.prompt_logprobs, reference(directory, prompt))
    assert max(widths) <= 16 + 2


def test_a_prompt_with_log_probabilities_is_computed_and_its_blocks_are_kept(directory: Path) -> None:
    with LLM(directory, **SIZES, offload=OffloadConfig(host="4MiB")) as llm:
        first = llm.generate([PROMPT], PLAIN)[0]
        assert llm.flush()
        second = llm.generate([PROMPT], PARAMS)[0]
        assert second.cached.total == 0
        assert second.token_ids == first.token_ids
        llm.reset_prefix_cache()
        cold = llm.generate([PROMPT], PARAMS)[0]
        assert cold.prompt_logprobs == second.prompt_logprobs
        assert llm.generate([PROMPT], PLAIN)[0].cached.device == len(PROMPT) // 8 * 8


@pytest.mark.parametrize("proposer", ["ngram", "mtp"])
def test_log_probabilities_of_a_prompt_are_the_same_with_drafts(directory: Path, tmp_path: Path, proposer: str) -> None:
    head = save_head(directory, tmp_path / "head.safetensors", seed=3) if proposer == "mtp" else None
    speculative = SpeculativeConfig(proposer=proposer, head=head, adaptive=False)
    longer = dataclasses.replace(PARAMS, max_tokens=12)
    with LLM(directory, **SIZES, speculative=speculative, chunk_tokens=16) as llm:
        for output, prompt in zip(llm.generate([OTHER, PROMPT, OTHER], longer), (OTHER, PROMPT, OTHER), strict=True):
            expect_near(output.prompt_logprobs, reference(directory, prompt))


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_preempted_prompt_gives_each_log_probability_once(steps: int) -> None:
    """Preempted between chunks, and while the last chunk runs."""
    model, prompt = ToyModel(), list(range(1, 20))
    config = EngineConfig(kv_memory=24 * model.layout.block_bytes, block_tokens=4, chunk_tokens=8, max_running=2)
    received: list[list[Delta]] = []
    for preempted in (False, True):
        deltas, device = list[Delta](), CpuDevice(compute_threads=1)
        engine = build_engine(model, config, device=device, threaded=False)
        engine.submit(prompt, PARAMS, deltas.append)
        for _ in range(steps):
            engine.step()
        for request in engine.parts.scheduler.requests() if preempted else ():
            if request.slot is not None:
                engine.parts.scheduler.preempt(request)
        while engine.unfinished:
            engine.step()
        engine.close()
        device.close()
        received.append(deltas)
    for deltas in received:
        assert [delta for delta in deltas if delta.prompt_logprobs] == deltas[:1]
        assert [one.token_id for one in deltas[0].prompt_logprobs] == prompt[1:]
    assert received[0][0].prompt_logprobs == received[1][0].prompt_logprobs


def test_samples_and_streams_have_log_probabilities_of_the_prompt(directory: Path) -> None:
    with LLM(directory, **SIZES) as llm:
        expected = llm.generate([PROMPT], PARAMS)[0].prompt_logprobs
        deltas = list(llm.stream(PROMPT, dataclasses.replace(PARAMS, n=2, stop=("none such",))))
        plain = list(llm.stream(PROMPT, dataclasses.replace(PLAIN, n=16)))
        assert llm.generate([PROMPT[:1]], PARAMS)[0].prompt_logprobs == (None,)
    for index in (0, 1):
        first, *others = (delta for delta in deltas if delta.index == index)
        assert (None, *first.prompt_logprobs) == expected
        assert not any(delta.prompt_logprobs for delta in others)
    assert not any(delta.prompt_logprobs for delta in plain)


def test_too_many_log_probabilities_of_a_prompt_are_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidestream.schedule.limits.MOST_PROMPT_LOGPROBS", 200)
    with (
        LLM(directory, **SIZES) as llm,
        pytest.raises(
            RequestRejected, match="prompt_logprobs is 3 for a prompt of 70 tokens: 280 log-probabilities, at most 200"
        ),
    ):
        llm.generate([PROMPT], PARAMS)
