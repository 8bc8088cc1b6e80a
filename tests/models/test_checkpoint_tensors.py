"""Every tensor of a checkpoint is used, known to be unused, or named in a refusal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_rig import Tensors, edit_index, edit_json, edit_weights, refusal, shard
from safetensors.torch import load_file

from proof.tiny_models import carry_head, save_head, tiny_model_dir
from sidestream.errors import ModelError
from sidestream.models import load_model
from sidestream.models.distil import load_teacher
from sidestream.models.weights import check_files

MATRIX = "model.layers.1.mlp.down_proj.weight"


# --- quantised without saying so


@pytest.mark.parametrize(
    ("dtype", "stored_as"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.float8_e5m2, "F8_E5M2"), (torch.int8, "I8")]
)
def test_eight_bit_weights_without_a_quantization_config_are_refused(
    llama: Path, dtype: torch.dtype, stored_as: str
) -> None:
    """As ModelOpt stores them: scales beside the weights, and nothing in config.json."""

    def quantise(weights: Tensors) -> None:
        weights[MATRIX] = (weights[MATRIX] * 8).to(dtype)
        weights[f"{MATRIX}_scale"] = torch.tensor(0.125)

    edit_weights(llama, quantise)
    said = refusal(llama)
    assert "its weights are quantised, without a scheme that Sidestream implements" in said
    assert f"({MATRIX} in model.safetensors is {stored_as})" in said


def test_quantization_scales_beside_unquantized_weights_are_refused(llama: Path) -> None:
    edit_weights(llama, lambda weights: weights.update({f"{MATRIX}_scale": torch.ones(1)}))
    assert f"1 tensors that a model of this config.json does not use, such as {MATRIX}_scale" in refusal(llama)


# --- more than the config says


def test_a_bias_that_the_config_excludes_is_refused(llama: Path) -> None:
    edit_weights(llama, lambda weights: weights.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}))
    assert "such as model.layers.0.self_attn.q_proj.bias" in refusal(llama)


def test_more_layers_than_the_config_has_are_refused(llama: Path) -> None:
    edit_json(llama / "config.json", num_hidden_layers=2)
    assert "hold 9 tensors that a model of this config.json does not use, such as model.layers.2." in refusal(llama)


def test_more_experts_than_the_config_has_are_refused(tmp_path: Path) -> None:
    directory = tiny_model_dir("qwen3_moe", tmp_path / "moe", 0)
    edit_json(directory / "config.json", num_experts=3, num_local_experts=3)
    assert "wrong shape" in refusal(directory)


def test_a_tensor_under_two_names_is_refused(llama: Path) -> None:
    edit_weights(llama, lambda weights: weights.update({"norm.weight": torch.ones(64) * 2}))
    assert "such as model.norm.weight" in refusal(llama)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_output_matrix_that_differs_from_the_embedding_is_refused(llama: Path, tied: bool) -> None:
    edit_weights(llama, lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"] * 2}))
    edit_json(llama / "config.json", tie_word_embeddings=tied)
    if tied:
        assert "ties lm_head.weight to model.embed_tokens.weight (tie_word_embeddings)" in refusal(llama)
    else:
        load_model(str(llama), block_tokens=4)


def test_training_a_head_refuses_a_model_with_surplus_tensors(llama: Path) -> None:
    edit_weights(llama, lambda weights: weights.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}))
    with pytest.raises(ModelError, match=r"such as model\.layers\.0\.self_attn\.q_proj\.bias"):
        load_teacher(str(llama), device=torch.device("cpu"))


# --- known to be unused


def test_tensors_known_to_be_unused_do_not_change_the_fingerprint(llama: Path) -> None:
    first = load_model(str(llama), block_tokens=4).fingerprint

    def add(weights: Tensors) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        weights["model.position_ids"] = torch.arange(8)
        weights["model.layers.0.attn.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
        weights["model.layers.0.attn.masked_bias"] = torch.tensor(-1e9)
        weights["mtp.fc.weight"] = torch.zeros(4, 4)
        weights["model.mtp_layers.0.proj.weight"] = torch.ones(4, 4)

    edit_weights(llama, add)
    assert load_model(str(llama), block_tokens=4).fingerprint == first


@pytest.mark.parametrize("family", ["llama", "glm4_moe"])
def test_an_mtp_head_stored_as_one_more_layer_is_no_surplus(tmp_path: Path, family: str) -> None:
    directory = tiny_model_dir(family, tmp_path / family, 0)
    head = save_head(directory, tmp_path / "head.safetensors", seed=1)
    carry_head(directory, head, names="deepseek")
    carried = load_file(directory / "model-mtp.safetensors")
    (directory / "model-mtp.safetensors").unlink()
    edit_weights(directory, lambda weights: weights.update(carried))
    load_model(str(directory), block_tokens=4)


# --- damaged or mixed files


def test_an_all_zero_matrix_is_refused_by_name(llama: Path) -> None:
    edit_weights(llama, lambda weights: weights[MATRIX].zero_())
    assert f"{MATRIX} in {llama / 'model.safetensors'} is all zeros" in refusal(llama)


def test_a_shard_with_zeroed_data_is_refused(llama: Path) -> None:
    shard(llama)
    path = llama / "model-00002-of-00002.safetensors"
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    path.write_bytes(content[:start].ljust(len(content), b"\0"))
    assert "model-00002-of-00002.safetensors is all zeros: the file was not written completely" in refusal(llama)


def test_padding_rows_and_vectors_may_be_zero(llama: Path) -> None:
    """Rows of padding, however many before the first token, and vectors."""

    def clear(weights: Tensors) -> None:
        weights["model.embed_tokens.weight"][:-1] = 0
        weights["model.norm.weight"].zero_()
        weights["experts.down_proj_bias"] = torch.zeros(4, 64)

    edit_weights(llama, clear)
    check_files(llama)


def test_a_tensor_in_two_files_is_refused(llama: Path) -> None:
    shard(llama, repeat=MATRIX)
    assert f"both model-00001-of-00002.safetensors and model-00002-of-00002.safetensors hold {MATRIX}" in refusal(llama)


def test_a_shard_that_the_index_does_not_list_is_refused(llama: Path) -> None:
    shard(llama)
    edit_index(llama, lambda name, file: file.startswith("model-00001"))
    assert "does not list model-00002-of-00002.safetensors" in refusal(llama)


def test_an_index_may_omit_a_tensor_of_a_listed_shard(llama: Path) -> None:
    first = load_model(str(llama), block_tokens=4).fingerprint
    shard(llama)
    edit_index(llama, lambda name, file: name != MATRIX)
    assert load_model(str(llama), block_tokens=4).fingerprint == first
