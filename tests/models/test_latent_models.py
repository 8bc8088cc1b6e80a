"""Latent attention in whole engines: transformers' own answers come out, whatever chunks, batches and tiers are
between. Each kind alone: test_families.py.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from checkpoint_rig import edit_json
from transformers import AutoModelForCausalLM, DeepseekV32Config

from proof.tiny_models import LATENT, tiny_config, tiny_model_dir
from sidestream import LLM, OffloadConfig, SamplingParams, SpeculativeConfig
from sidestream.errors import ModelError
from sidestream.llm import RequestOutput
from sidestream.models import load_model
from sidestream.models.config_checks import check_servable, layout_of
from sidestream.models.latent import SERVED_LATENT
from sidestream.models.loader import kv_token_bytes
from sidestream_kv.kv.pool import Lease

NEW_TOKENS = 24
PARAMS = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
OPTIONS = {"device": "cpu", "dtype": "float32", "max_running": 3, "compute_threads": 1, "chunk_tokens": 32}

Answers = list[tuple[list[int], torch.Tensor]]


def some_prompts() -> list[list[int]]:
    """Prompts that share a beginning, and in which n-grams come back."""
    rng = random.Random(4)
    trunk, phrase = ([rng.randrange(250) for _ in range(count)] for count in (40, 6))
    return [[*trunk, *(phrase * 8)[:length]] for length in (5, 30, 44, 17)]


def expected_answers(directory: Path, prompts: Sequence[list[int]]) -> Answers:
    """Transformers' own greedy tokens and their log-probabilities."""
    module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    module.generation_config.eos_token_id = None
    answers = []
    for prompt in prompts:
        out = module.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        tokens = out.sequences[0, len(prompt) :]
        answers.append((tokens.tolist(), torch.cat(out.logits).log_softmax(-1).gather(1, tokens[:, None])[:, 0]))
    return answers


def assert_equal(outputs: Sequence[RequestOutput], expected: Answers) -> None:
    for output, (tokens, log_probs) in zip(outputs, expected, strict=True):
        assert list(output.token_ids) == tokens
        drawn = torch.tensor([drawn.logprob for drawn in output.completions[0].logprobs])
        torch.testing.assert_close(drawn, log_probs, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3", "longcat_flash"])
def test_answers_equal_transformers_from_every_tier_and_with_drafts(kind: str, tmp_path: Path) -> None:
    directory = tiny_model_dir(kind, tmp_path / kind, 3)
    prompts = some_prompts()
    expected = expected_answers(directory, prompts)
    offload = OffloadConfig(host="32MiB", disk=tmp_path / "tier", disk_capacity="64MiB")
    drafting = SpeculativeConfig(max_drafts=3, adaptive=False)
    with LLM(directory, kv_memory="16MiB", offload=offload, speculative=drafting, **OPTIONS) as llm:
        parts = llm.engine.parts
        assert parts.costs is not None
        parts.costs.saw_prefill = lambda *_: None  # type: ignore[method-assign]  # loading always counts as faster
        assert_equal(llm.generate(prompts, PARAMS), expected)
        again = llm.generate(prompts, PARAMS)
        assert_equal(again, expected)
        assert all(output.cached.device >= 32 for output in again)
        assert llm.metrics.value("accepted_tokens_total", "ngram") > 0
        assert llm.flush()
        llm.engine.call(parts.scheduler.forget_all)
        found = llm.generate(prompts, PARAMS)
        assert_equal(found, expected)
        assert sum(output.cached.host for output in found) > 0
    with LLM(directory, kv_memory="16MiB", offload=offload, **OPTIONS) as llm:
        assert llm.engine.parts.costs is not None
        llm.engine.parts.costs.saw_prefill = lambda *_: None  # type: ignore[method-assign]
        found = llm.generate(prompts, PARAMS)
        assert_equal(found, expected)
        assert sum(output.cached.disk for output in found) > 0


def test_answers_equal_transformers_after_preemption(tmp_path: Path) -> None:
    directory = tiny_model_dir("minicpm3", tmp_path, 3)
    prompts = some_prompts()
    with LLM(directory, kv_memory="16MiB", prefix_cache=False, **OPTIONS) as llm:
        blocks = llm.engine.parts.blocks
        held: list[Lease] = []
        llm.engine.call(lambda: held.append(blocks.take(blocks.size - 10)))  # three requests take up to seven each
        assert_equal(llm.generate(prompts, PARAMS), expected_answers(directory, prompts))
        assert llm.engine.parts.scheduler.num_preemptions > 0
        llm.engine.call(held[0].release)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "draft"), [("deepseek_v3", "qwen3"), ("qwen3", "minicpm3"), ("youtu", "minicpm3")])
def test_a_draft_model_may_have_another_attention(target: str, draft: str, tmp_path: Path) -> None:
    """Latents of one model and keys and values of the other lie in the same blocks."""
    directory, other = (tiny_model_dir(kind, tmp_path / kind, 3) for kind in (target, draft))
    prompts, drafting = some_prompts(), SpeculativeConfig("draft", 3, model=str(other), adaptive=False)
    offload = OffloadConfig(host="32MiB")
    with LLM(directory, kv_memory="16MiB", offload=offload, speculative=drafting, **OPTIONS) as llm:
        expected = expected_answers(directory, prompts)
        assert_equal(llm.generate(prompts, PARAMS), expected)
        assert llm.metrics.value("draft_tokens_total", "draft") > 0
        assert llm.flush()
        llm.engine.call(llm.engine.parts.scheduler.forget_all)
        assert_equal(llm.generate(prompts, PARAMS), expected)


@pytest.mark.parametrize("kind", sorted(LATENT))
def test_a_token_takes_one_latent_and_one_rotated_key_in_each_layer(kind: str) -> None:
    config = tiny_config(kind)
    layout = layout_of(check_servable(config), dtype="float32", block_tokens=16)
    assert layout.token_bytes == config.num_hidden_layers * (32 + 8) * 4
    assert layout.latent_dim == 32


def test_every_served_kind_has_a_tiny_model() -> None:
    # mistral4 is the text of mistral3: see test_text_part.py; kimi_linear has recurrent states: see test_hybrid.py
    assert {*LATENT, "mistral4", "kimi_linear"} == SERVED_LATENT


def test_kimi_k2_is_read_as_deepseek_v3(tmp_path: Path) -> None:
    """Transformers does not know the kind that Kimi K2's files name."""
    directory = tiny_model_dir("deepseek_v3", tmp_path, 3)
    expected = load_model(str(directory), block_tokens=16).fingerprint
    edit_json(directory / "config.json", model_type="kimi_k2")
    assert load_model(str(directory), block_tokens=16).fingerprint == expected


def test_kv_bytes_of_a_token_need_no_weights(tmp_path: Path) -> None:
    tiny_config("longcat_flash").save_pretrained(tmp_path)
    assert kv_token_bytes(str(tmp_path), dtype="float32") == 4 * 40 * 4


def test_latent_attention_that_chooses_tokens_by_an_index_is_refused() -> None:
    with pytest.raises(ModelError, match=r"latent attention \(kv_lora_rank 512\) of a kind that was not compared"):
        check_servable(DeepseekV32Config())


def test_the_self_check_refuses_latents_of_another_meaning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A definition whose keys are not products of the latent alone."""
    from transformers.models.youtu.modeling_youtu import YoutuAttention

    expand = YoutuAttention.expand_kv
    monkeypatch.setattr(YoutuAttention, "expand_kv", lambda *given: tuple(1.01 * part for part in expand(*given)))
    with pytest.raises(ModelError, match="in layer 0, paged attention and transformers' own give different values"):
        load_model(str(tiny_model_dir("youtu", tmp_path, 3)), block_tokens=16)
