"""The real demo model, in float32: the tokens of transformers' generate, and of a cold run again from host memory and
from disk.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sidestream import LLM, OffloadConfig, RequestOutput, SamplingParams, SpeculativeConfig, StructuredOutputs
from sidestream.models import kv_token_bytes
from sidestream.models.catalog import prepared
from sidestream.text import sample_text
from sidestream.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.demo_model]

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> str:
    path = prepared("smollm2-135m-instruct")
    if path is None:
        pytest.skip("the demo model is not in the cache: `sidestream models prepare smollm2-135m-instruct` fetches it")
    return str(path)


@pytest.fixture(scope="module")
def ids(model: str) -> list[int]:
    return Tokenizer.load(model).encode(sample_text())


@pytest.fixture
def pool_of_400_tokens(model: str, tmp_path: Path) -> Iterator[LLM]:
    offload = OffloadConfig(host="256MiB", disk=tmp_path / "kv", disk_capacity="256MiB")
    with LLM(
        model, dtype="float32", kv_memory=400 * kv_token_bytes(model, dtype="float32"), chunk_tokens=64, offload=offload
    ) as llm:
        yield llm


def test_tokens_equal_transformers_generate_and_logprobs_are_near(
    model: str, ids: list[int], pool_of_400_tokens: LLM
) -> None:
    prompts = [ids[:100], ids[200:233], ids[300:301]]
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    for prompt, ours in zip(prompts, pool_of_400_tokens.generate(prompts, params), strict=True):
        with torch.inference_mode():
            whole = reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=12,
                min_new_tokens=12,
                do_sample=False,
                pad_token_id=0,
            )[0]
            logprobs = reference(whole[None]).logits[0].log_softmax(-1)
        assert ours.token_ids == tuple(whole[len(prompt) :].tolist())
        for at, found in enumerate(ours.completions[0].logprobs):
            expected = float(logprobs[len(prompt) + at - 1, found.token_id])
            # float32 sums of up to 1536 products in another order, through 30 layers: 1e-3 is a hundred times what was
            # seen
            assert found.logprob == pytest.approx(expected, abs=1e-3)


def test_a_conversation_evicted_from_the_pool_continues_with_equal_tokens(
    ids: list[int], pool_of_400_tokens: LLM
) -> None:
    llm = pool_of_400_tokens
    cold = llm.generate([ids[:200]], GREEDY)[0]
    assert llm.flush()
    llm.generate([ids[500:800], ids[900:1200]], SamplingParams(temperature=0, max_tokens=2))
    back = llm.generate([ids[:200]], GREEDY)[0]
    assert (cold.cached.total, back.cached.host, back.cached.device) == (0, 192, 0)
    assert back.token_ids == cold.token_ids


def test_kv_in_8_bits_changes_log_probabilities_little(model: str, ids: list[int], tmp_path: Path) -> None:
    asked = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    offload = OffloadConfig(host="32MiB", disk=tmp_path, disk_capacity="64MiB", write_policy="all", kv_dtype="int8")
    with LLM(model, dtype="float32", kv_memory="32MiB", chunk_tokens=64, offload=offload) as llm:
        cold = llm.generate([ids[:300]], asked)[0]
        assert llm.flush()
        for tiers in (["device"], ["device", "host"]):
            for tier in tiers:
                llm.reset_prefix_cache(tier)
            warm = llm.generate([ids[:300]], asked)[0]
            assert (warm.cached.host, warm.cached.disk) == ((288, 0) if len(tiers) == 1 else (0, 288))
            assert warm.token_ids == cold.token_ids
            both = zip(cold.completions[0].logprobs, warm.completions[0].logprobs, strict=True)
            change = max(abs(one.logprob - other.logprob) for one, other in both)
            assert 0 < change < 0.1  # seen: 0.02. Exact KV from a tier changes nothing
        assert 0.005 < llm.metrics.value("kv_error", "values") < llm.metrics.value("kv_error", "keys") < 0.015


def test_conversation_survives_the_engine_with_equal_tokens(model: str, ids: list[int], tmp_path: Path) -> None:
    def answer() -> RequestOutput:
        offload = OffloadConfig(host="128MiB", disk=tmp_path / "kv", disk_capacity="256MiB")
        with LLM(model, dtype="float32", kv_memory="64MiB", chunk_tokens=64, offload=offload) as llm:
            return llm.generate([ids[:200]], GREEDY)[0]

    cold, back = answer(), answer()
    assert (cold.cached.total, back.cached.disk) == (0, 192)
    assert back.token_ids == cold.token_ids


def test_answers_to_a_schema_are_equal_with_jump_ahead_in_fewer_steps(model: str) -> None:
    texts = "customer_first_name", "preferred_shipping_address"
    keys = {"customer_account_balance": {"type": "integer", "minimum": 0, "maximum": 99}}
    keys |= {name: {"type": "string", "maxLength": 12} for name in texts}
    schema = {"type": "object", "properties": keys, "required": [*keys], "additionalProperties": False}
    form = StructuredOutputs(json=json.dumps(schema), disable_any_whitespace=True)
    params = [
        SamplingParams(max_tokens=80, logprobs=0, temperature=temperature, seed=1, structured_outputs=form)
        for temperature in (0.0, 0.7)
    ]
    found = list[tuple[list[RequestOutput], float, float]]()
    for speculative in (None, SpeculativeConfig("grammar", adaptive=False)):
        with LLM(model, dtype="float32", kv_memory="64MiB", speculative=speculative) as llm:
            outputs = llm.generate(["A customer as JSON: "] * 2, params)
            accepted = llm.metrics.value("accepted_tokens_total", "grammar")
            found.append((outputs, llm.metrics.value("steps_total"), accepted))
    (plain, plain_steps, _), (jumped, steps, accepted) = found
    for ours, theirs in zip(jumped, plain, strict=True):
        assert json.loads(ours.text).keys() == keys.keys()
        assert ours.token_ids == theirs.token_ids
        logprobs = [[entry.logprob for entry in one.completions[0].logprobs] for one in (ours, theirs)]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-3)
    assert steps < 0.85 * plain_steps and accepted >= 12
