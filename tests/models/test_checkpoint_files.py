"""Damaged and hostile files of a checkpoint are refused with the file, the field, the value and what is expected."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_rig import edit_json, edit_weights, refusal, refused
from safetensors.torch import load_file

from sidestream import LLM
from sidestream.models import load_model
from sidestream.models.catalog import resolve
from sidestream.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("file", "field", "value", "expected"),
    [
        ("generation_config.json", "eos_token_id", "257", "a token id, a whole number in [0, 2147483647]"),
        ("generation_config.json", "eos_token_id", [1, "2"], "or a list of such numbers"),
        ("generation_config.json", "eos_token_id", float("nan"), "a token id"),
        ("generation_config.json", "pad_token_id", {}, "a whole number"),
        ("config.json", "eos_token_id", -1, "a token id"),
        ("config.json", "num_hidden_layers", 10**9, "a whole number in [1, 4096]"),
        ("config.json", "num_attention_heads", 0, "a whole number in [1, 1048576]"),
        ("config.json", "vocab_size", "259", "a whole number"),
        ("config.json", "sliding_window", "12", "a whole number"),
        ("config.json", "rms_norm_eps", float("nan"), "not NaN"),
        ("config.json", "dtype", "bfloat", "a dtype such as bfloat16"),
        ("config.json", "layer_types", "full_attention", "a list of texts"),
        ("config.json", "quantization_config", "gptq", "a JSON object"),
        ("config.json", "rope_scaling", {"rope_type": "yarn", "factor": "4"}, "a number above 0"),
        ("tokenizer_config.json", "tokenizer_class", 3, "a text"),
    ],
)
def test_a_wrong_field_is_refused_with_file_and_bound(
    llama: Path, file: str, field: str, value: Any, expected: str
) -> None:
    edit_json(llama / file, **{field: value})
    for call in (lambda: resolve(str(llama)), lambda: load_model(str(llama), block_tokens=4), lambda: LLM(llama)):
        said = refused(call)
        assert f"{llama / file}: {field}" in said
        assert expected in said
        assert "correct the file" in said


def test_the_tokenizer_checks_eos_token_ids_too(llama: Path) -> None:
    edit_json(llama / "generation_config.json", eos_token_id="257")
    assert "generation_config.json: eos_token_id is '257'" in refused(lambda: Tokenizer.load(str(llama)))


def test_an_error_of_transformers_about_a_config_names_its_file(llama: Path) -> None:
    edit_json(llama / "config.json", attention_dropout="x")
    said = refused(lambda: LLM(llama, block_tokens=16))
    assert "config.json: transformers cannot read it" in said
    assert "attention_dropout" in said


def test_more_layers_than_tensors_are_refused_before_layers_are_created(llama: Path) -> None:
    edit_json(llama / "config.json", num_hidden_layers=4000)
    assert "gives num_hidden_layers as 4000, but the weight files hold only" in refusal(llama)


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"]
)
def test_a_pipe_in_place_of_a_file_is_refused(llama: Path, name: str) -> None:
    (llama / name).unlink(missing_ok=True)
    os.mkfifo(llama / name)
    assert f"{name} is a pipe (FIFO), not a regular file" in refused(lambda: resolve(str(llama)))


def test_an_index_that_names_a_file_in_another_directory_is_refused(llama: Path) -> None:
    weights = load_file(llama / "model.safetensors")
    (llama / "model.safetensors").rename(llama.parent / "outside.safetensors")
    index = llama / "model.safetensors.index.json"
    for name in ("../outside.safetensors", str(llama.parent / "outside.safetensors"), "a\\b.safetensors", "x.bin", 3):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(weights, name)}))
        said = refusal(llama)
        assert "model.safetensors.index.json: weight_map." in said
        assert "a .safetensors file in the same directory, without a path" in said


def test_deeply_nested_json_and_an_endless_header_are_refused(llama: Path) -> None:
    (llama / "generation_config.json").write_text('{"a": ' + "[" * 200_000)
    assert "generation_config.json cannot be read as JSON" in refused(lambda: resolve(str(llama)))
    (llama / "generation_config.json").unlink()
    (llama / "model.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"[" * 200_000)
    assert "model.safetensors is no readable safetensors file" in refusal(llama)


def change_weight(directory: Path, name: str, value: float) -> None:
    edit_weights(directory, lambda weights: weights[name].view(-1)[7].fill_(value))


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_error_about_a_non_finite_weight_names_it(llama: Path, name: str, value: float) -> None:
    change_weight(llama, name, value)
    said = refusal(llama)
    assert f"its weight {name} holds 1 values of NaN or infinity" in said
    assert "fetch the weights again" in said
    assert "kind of model" not in said


def test_a_weight_beyond_the_range_of_float16_is_refused_with_a_remedy(llama: Path) -> None:
    change_weight(llama, "model.norm.weight", 1e5)
    said = refusal(llama, dtype="float16")
    assert "its weight model.norm.weight holds 1 values" in said
    assert "choose the dtype bfloat16 or float32" in said


def test_large_finite_weights_pass_the_check(llama: Path) -> None:
    change_weight(llama, "model.layers.0.mlp.up_proj.weight", torch.finfo(torch.float32).max)
    assert "NaN or infinity" not in refusal(llama)  # the model is useless, but its weights are numbers
