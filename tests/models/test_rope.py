"""Scaled rotary positions are served up to the length that the config allows, with transformers' logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_rig import one_row
from transformers import AutoModelForCausalLM

from proof.tiny_models import tiny_config, tiny_model_dir
from sidestream import LLM, SamplingParams
from sidestream.errors import ConfigError
from sidestream.models import PagedModel, load_model
from sidestream.models.config_checks import max_positions

BLOCK_TOKENS = 4
BEFORE = 64
"""Positions before scaling."""


def longrope(directory: Path) -> Path:
    """A model of 64 positions that LongRoPE extends to 256, laid out as Phi-3's are."""
    tiny_model_dir("phi3", directory, 3, max_position_embeddings=4 * BEFORE)
    factors = {
        "short_factor": [1.0 + index / 8 for index in range(8)],
        "long_factor": [2.0 + index for index in range(8)],
    }
    return edited(directory, original_max_position_embeddings=BEFORE, rope_scaling={"type": "longrope", **factors})


def edited(directory: Path, **changes: Any) -> Path:
    """With rotary parameters in the notation that most published configs have."""
    path = directory / "config.json"
    found = json.loads(path.read_text())
    del found["rope_parameters"]
    path.write_text(json.dumps({**found, **changes}))
    return directory


def own_logits(directory: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Transformers' own, of the whole text at once."""
    module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits: torch.Tensor = module(input_ids=tokens[None], use_cache=False).logits[0]
    return logits


def own_next(directory: Path, prompt: list[int]) -> int:
    return int(own_logits(directory, torch.tensor(prompt))[-1].argmax())


def paged_logits(model: PagedModel, tokens: torch.Tensor, chunk: int = 24) -> torch.Tensor:
    blocks = -(-len(tokens) // BLOCK_TOKENS)
    pool = torch.full(model.layout.shape(blocks), float("nan"))
    logits = []
    for positions in torch.arange(len(tokens)).split(chunk):
        length = len(positions)
        batch = one_row(pool, int(positions[-1]) + 1, start=int(positions[0]), num_decode=int(length == 1))
        logits.append(model.forward(tokens[positions], positions, batch, torch.arange(length)))
    return torch.cat(logits)


def text(length: int) -> torch.Tensor:
    return torch.randint(259, (length,), generator=torch.Generator().manual_seed(1))


def assert_served(model: PagedModel, directory: Path, length: int) -> None:
    # As in test_families: float32 rounds sums of 64 terms of about 5, in 3 layers.
    torch.testing.assert_close(
        paged_logits(model, text(length)), own_logits(directory, text(length)), atol=2e-4, rtol=0
    )


def test_yarn_serves_the_original_positions_times_the_factor(tmp_path: Path) -> None:
    """Qwen3 is published with max_position_embeddings of 40,960, which its YaRN of 4 times 32,768 exceeds."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": BEFORE, "rope_theta": 1e4}
    directory = tiny_model_dir("qwen3", tmp_path, 3, max_position_embeddings=80, rope_parameters=rope)

    model = load_model(str(directory), block_tokens=BLOCK_TOKENS)

    assert model.max_model_len == 4 * BEFORE
    assert_served(model, directory, 4 * BEFORE)


def test_yarn_in_its_older_notation_scales_max_position_embeddings(tmp_path: Path) -> None:
    tiny_model_dir("llama", tmp_path, 3, max_position_embeddings=BEFORE)
    directory = edited(tmp_path, rope_scaling={"type": "yarn", "factor": 3.0}, rope_theta=1e4)

    model = load_model(str(directory), block_tokens=BLOCK_TOKENS)

    assert model.max_model_len == 3 * BEFORE
    assert_served(model, directory, 3 * BEFORE)


def test_a_config_with_more_positions_than_its_yarn_gives_is_used() -> None:
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    assert max_positions(tiny_config("qwen3", max_position_embeddings=1024, rope_parameters=rope)) == 1024
    assert max_positions(tiny_config("qwen3")) == 1024


def test_longrope_serves_its_extended_length_with_the_long_factors(tmp_path: Path) -> None:
    directory = longrope(tmp_path)

    model = load_model(str(directory), block_tokens=BLOCK_TOKENS)

    assert model.max_model_len == 4 * BEFORE
    assert_served(model, directory, 4 * BEFORE)
    assert_served(model, directory, BEFORE + 1)


@pytest.mark.parametrize("max_model_len", [BEFORE, 10])
def test_longrope_keeps_short_factors_for_requests_within_the_old_length(max_model_len: int, tmp_path: Path) -> None:
    directory = longrope(tmp_path)

    model = load_model(str(directory), block_tokens=BLOCK_TOKENS, max_model_len=max_model_len)

    assert model.max_model_len == BEFORE
    assert_served(model, directory, BEFORE)


def test_with_long_factors_kv_is_independent_of_the_length_of_the_text(tmp_path: Path) -> None:
    """Transformers would take the short ones for the first chunks, and then others."""
    model = load_model(str(longrope(tmp_path)), block_tokens=BLOCK_TOKENS)
    whole = paged_logits(model, text(100), chunk=100)
    torch.testing.assert_close(paged_logits(model, text(100), chunk=7), whole, atol=1e-4, rtol=0)
    torch.testing.assert_close(paged_logits(model, text(30)), whole[:30], atol=1e-4, rtol=0)


def test_models_with_short_and_long_factors_have_different_fingerprints(tmp_path: Path) -> None:
    directory = str(longrope(tmp_path))
    fingerprints = [
        load_model(directory, block_tokens=4, max_model_len=length).fingerprint for length in (None, 65, 64, 10)
    ]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2] == fingerprints[3]


def test_an_engine_chooses_factors_by_its_max_model_len(tmp_path: Path) -> None:
    directory = longrope(tmp_path)
    options: dict[str, Any] = {"dtype": "float32", "kv_memory": "4MiB", "compute_threads": 1}
    prompt, greedy = text(BEFORE + 6).tolist(), SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    with LLM(directory, **options) as llm:
        assert llm.max_model_len == 4 * BEFORE
        assert llm.generate([prompt], greedy)[0].token_ids == (own_next(directory, prompt),)
    with LLM(directory, max_model_len=BEFORE, **options) as llm:
        assert llm.max_model_len == BEFORE
        prompt = prompt[:40]
        assert llm.generate([prompt], greedy)[0].token_ids == (own_next(directory, prompt),)
    with pytest.raises(ConfigError, match="the model was made for 256"):
        LLM(directory, max_model_len=257, **options)


def test_dynamic_scaling_serves_the_positions_before_scaling_begins() -> None:
    """Its frequencies are others for each length: one long row would change those of every row in its batch."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    assert max_positions(tiny_config("llama", rope_parameters=rope)) == 1024
    assert max_positions(tiny_config("llama", rope_parameters={**rope, "original_max_position_embeddings": 256})) == 256


def test_dynamic_scaling_is_that_of_the_longest_request_if_its_length_is_given(tmp_path: Path) -> None:
    """A text of this length gets the logits of transformers, and a part of it the KV of the whole text."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    directory = tiny_model_dir("llama", tmp_path, 3, max_position_embeddings=BEFORE, rope_parameters=rope)
    plain, scaled = (
        load_model(str(directory), block_tokens=BLOCK_TOKENS, max_model_len=length) for length in (BEFORE, 3 * BEFORE)
    )
    assert (plain.max_model_len, scaled.max_model_len) == (BEFORE, 3 * BEFORE)
    assert plain.fingerprint != scaled.fingerprint
    assert_served(plain, directory, BEFORE)
    assert_served(scaled, directory, 3 * BEFORE)
    whole = paged_logits(scaled, text(100), chunk=100)
    torch.testing.assert_close(paged_logits(scaled, text(30)), whole[:30], atol=1e-4, rtol=0)
    assert load_model(str(directory), block_tokens=4, max_model_len=1_000).max_model_len == 4 * BEFORE


def test_longrope_with_one_set_of_factors_is_served_up_to_the_old_length() -> None:
    """PhiMoE's definition keeps the short factors at any length, and chooses a scale by the longest row of a batch."""
    factors = [1.0] * 8
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": factors,
        "long_factor": factors,
        "short_mscale": 1.1,
        "long_mscale": 1.2,
        "original_max_position_embeddings": 256,
    }
    assert max_positions(tiny_config("phimoe", rope_parameters=rope)) == 256
