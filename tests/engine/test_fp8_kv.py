"""An engine whose device keeps keys and values in float8: how near its answers are, that hits from tiers are equal to
what was computed, what its blocks are never mixed up with, and what it refuses.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from proof.tiny_models import tiny_model_dir
from sidestream import LLM, ConfigError, EngineConfig, ModelError, OffloadConfig, SamplingParams
from sidestream.config import SpeculativeConfig
from sidestream.engine.build_plan import tier_layout
from sidestream.models import cache_parts, load_model
from sidestream_kv.kv.layout import FP8, KVLayout

GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True)
PROMPTS = [[(7 * number + 3 * at) % 200 for at in range(130)] for number in range(3)]
BLOCKS = 8 * len(PROMPTS)
# The weights of the tiny models are ten times as large as usual, so answers depend on every token. Keys and values have
# 3 bits of mantissa, so errors up to 1/16, ten times those of 8-bit tiers (`test_eight_bit_tiers.py`). Seen: 0.28.
NEAR = 0.8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir("llama", tmp_path_factory.mktemp("tiny"), seed=1)


def served(model: Path, kv_cache_dtype: str = "fp8", disk: Path | None = None, **options: Any) -> LLM:
    if disk is not None:
        options["offload"] = OffloadConfig(host="4MiB", disk=disk, disk_capacity="8MiB", write_policy="all")
    llm = LLM(model, kv_memory="8MiB", compute_threads=1, kv_cache_dtype=kv_cache_dtype, **options)
    if llm.engine.parts.costs is not None:
        llm.engine.parts.costs.saw_prefill = lambda *_: None  # type: ignore[method-assign]  # always load
    return llm


def answers(llm: LLM) -> list[tuple[list[int], list[float]]]:
    done = [answer.completions[0] for answer in llm.generate(PROMPTS, GREEDY)]
    return [(list(one.token_ids), [token.logprob for token in one.logprobs or ()]) for one in done]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma4", "qwen3_next"])
def test_log_probabilities_are_near_those_of_exact_kv(family: str, tmp_path: Path) -> None:
    """Layers with a window, layers that differ in their heads, and recurrent layers, whose states stay as they are."""
    model = tiny_model_dir(family, tmp_path, seed=1)
    with served(model, "auto") as exact, served(model) as llm:
        pairs = zip(answers(exact), answers(llm), strict=True)
        changes = [abs(one[1][0] - other[1][0]) for one, other in pairs]
    assert 0 < max(changes) < NEAR


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_hits_from_host_memory_and_from_disk_give_the_tokens_of_cold_prompts(family: str, tmp_path: Path) -> None:
    """A block in a tier has the bytes that it had on the device. Steps of other numbers of rows round differently, so
    log-probabilities differ in their last bits.
    """
    with served(tiny_model_dir(family, tmp_path / "model", seed=1), disk=tmp_path / "kv", check_order=True) as llm:
        cold = answers(llm)
        assert llm.flush()
        for tiers, tier in ((("device",), "host"), (("device", "host"), "disk")):
            for each in tiers:
                llm.reset_prefix_cache(each)
            warm = answers(llm)
            assert [tokens for tokens, _ in warm] == [tokens for tokens, _ in cold]
            torch.testing.assert_close([at for _, at in warm], [at for _, at in cold], atol=1e-4, rtol=0)
            assert llm.metrics.value("cached_tokens_total", tier) == BLOCKS * 16


def test_the_pool_has_the_tokens_and_tiers_move_the_bytes_of_one_byte_a_number(model: Path, tmp_path: Path) -> None:
    tokens, moved = {}, {}
    for form, options in (("auto", {"dtype": "bfloat16"}), ("fp8", {"dtype": "bfloat16"})):
        with served(model, form, tmp_path / form, **options) as llm:
            answers(llm)
            assert llm.flush()
            tokens[form] = llm.engine.parts.bounds.pool_tokens
            moved[form] = llm.metrics.value("transfer_bytes_total", "store")
    assert tokens["fp8"] == 2 * tokens["auto"] and moved["auto"] == 2 * moved["fp8"] > 0


def test_the_log_gives_the_form_and_the_error_with_and_without(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """3 bits of mantissa: a rounding error of 2.6 % of keys and values, and errors of scores on top of it."""
    with caplog.at_level(logging.INFO), served(model):
        line, sizes = (line for line in caplog.messages if FP8 in line)
    found = re.search(r"differs by ([\d.e-]+) % from exact attention, and by ([\d.e-]+) % with KV in float32", line)
    assert found is not None
    assert 1 < float(found[1]) < 10 and float(found[2]) < 0.01
    assert re.search(rf"^KV memory: .* tokens in {FP8} \(as asked\)", sizes)


def test_engines_with_and_without_float8_have_different_keys(model: Path) -> None:
    roots = set()
    for form in ("auto", "fp8"):
        with served(model, form) as llm:
            root = llm.engine.parts.scheduler.key_root
            llm.update_weights(str(model))  # the same ones, so the keys stay the same
            assert llm.engine.parts.scheduler.key_root == root
            roots.add(root)
    assert len(roots) == 2


def test_a_directory_of_exact_blocks_is_refused_and_the_difference_is_named(model: Path, tmp_path: Path) -> None:
    served(model, "auto", tmp_path).close()
    with pytest.raises(ConfigError, match="was written by another model or layout: dtype"):
        served(model, disk=tmp_path)


def test_a_draft_model_keeps_its_kv_in_the_same_form(model: Path) -> None:
    drafting = SpeculativeConfig(proposer="draft", model=model, max_drafts=3, adaptive=False)
    with served(model) as plain, served(model, speculative=drafting) as llm:
        assert [tokens for tokens, _ in answers(llm)] == [tokens for tokens, _ in answers(plain)]
        accepted = llm.metrics.value("accepted_tokens_total", "draft") / llm.metrics.value(
            "draft_tokens_total", "draft"
        )
    assert accepted > 0.9  # the model drafts for itself


def test_the_form_of_the_device_and_of_tiers_are_two_options() -> None:
    with pytest.raises(ConfigError, match="no kv_cache_dtype int8; known: auto, fp8"):
        EngineConfig(kv_cache_dtype="int8")
    config = EngineConfig(kv_cache_dtype="fp8", offload=OffloadConfig(kv_dtype="int8"))
    model: Any = SimpleNamespace(layout=KVLayout(1, 1, 16, 16, FP8, read_as="bfloat16"), state_layout=None)
    with pytest.raises(ConfigError, match=r"kv_dtype is int8, but kv_cache_dtype is fp8, .* leave kv_dtype out"):
        tier_layout(model, config)


def test_a_head_that_keeps_hidden_states_in_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype is fp8, but the proposer is mtp.*leave kv_cache_dtype out"):
        EngineConfig(kv_cache_dtype="fp8", speculative=SpeculativeConfig(proposer="mtp"))


def test_latents_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    model = tiny_model_dir("deepseek_v3", tmp_path, seed=1)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"kv_cache_dtype is fp8, but its attention keeps latents.*leave"):
        load_model(str(model), kv_cache_dtype="fp8", block_tokens=16)


def test_a_gpu_that_cannot_convert_float8_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ModelError, match=r"this GPU has the compute capability 8.0, and only from 8.9 on"):
        cache_parts(str(model), kv_cache_dtype="fp8", block_tokens=16, device=torch.device("cuda"))
