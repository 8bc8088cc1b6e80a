"""A directory without a servable model is refused with cause and remedy before tokenizer and weights are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sidestream.errors import ModelError
from sidestream.models import load_model
from sidestream.models.catalog import resolve
from sidestream.testing.tiny_models import tiny_model_dir


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return tiny_model_dir("llama", tmp_path / "llama", 0)


def refusals(directory: Path) -> list[str]:
    """The errors of `resolve`, which every command calls first, and of `load_model`."""
    said = []
    for call in (lambda: resolve(str(directory)), lambda: load_model(str(directory), block_tokens=4)):
        with pytest.raises(ModelError) as caught:
            call()
        said.append(str(caught.value))
    return said


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **changes}))


def empty(directory: Path) -> None:
    pass


def gguf_only(directory: Path) -> None:
    (directory / "tiny.Q4_K_M.gguf").write_bytes(b"GGUF")


def pickle_only(directory: Path) -> None:
    (directory / "pytorch_model.bin").write_bytes(b"PK")


def original_only(directory: Path) -> None:
    (directory / "params.json").write_text("{}")
    (directory / "consolidated.safetensors").touch()


def adapter_only(directory: Path) -> None:
    edit_json(directory / "adapter_config.json", base_model_name_or_path="someone/base-7b", peft_type="LORA")
    (directory / "adapter_model.safetensors").touch()


@pytest.mark.parametrize(
    ("fill", "cause", "remedy"),
    [
        (empty, "is empty", "give a directory with config.json, model.safetensors and tokenizer.json"),
        (gguf_only, "tiny.Q4_K_M.gguf is a GGUF file", "gguf_file='tiny.Q4_K_M.gguf'"),
        (pickle_only, "pytorch_model.bin is a pickle", "safetensors format"),
        (original_only, "consolidated.safetensors is in its maker's own layout", "fetch the model in transformers' layout"),
        (adapter_only, "a LoRA adapter (adapter_config.json) for someone/base-7b, not a model", "merge it into someone/base-7b"),
    ],
)
def test_a_directory_that_holds_something_else_is_refused_with_cause_and_remedy(
    tmp_path: Path, fill: Callable[[Path], None], cause: str, remedy: str
) -> None:
    directory = tmp_path / "given"
    directory.mkdir()
    fill(directory)

    for said in refusals(directory):
        assert said.startswith("model given: ")
        assert cause in said
        assert remedy in said


def test_weights_in_another_format_beside_a_config_are_named(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "tiny.gguf")
    for said in refusals(llama):
        assert "has no model.safetensors" in said
        assert "tiny.gguf is a GGUF file" in said


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_beside_the_weights_is_refused_for_it_would_not_be_applied(llama: Path, file: str) -> None:
    (llama / file).write_text('{"base_model_name_or_path": "someone/base"}')
    for said in refusals(llama):
        assert f"a LoRA adapter ({file}) beside the model" in said
        assert "move the adapter's files away" in said


def test_a_config_that_names_other_weights_is_refused(llama: Path) -> None:
    """transformers would read that file, and even a pickle if its name is adapter_model.bin."""
    edit_json(llama / "config.json", transformers_weights="other.safetensors")
    for said in refusals(llama):
        assert "names other weights, 'other.safetensors'" in said


def test_the_old_name_of_longrope_is_refused_and_the_remedy_helps(tmp_path: Path) -> None:
    directory = tiny_model_dir("phi3", tmp_path / "phi3", 0)
    config = json.loads((directory / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"original_max_position_embeddings": 256, "rope_theta": 1e4}
    factors = {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8}
    (directory / "config.json").write_text(json.dumps({**config, "rope_scaling": {"type": "su", **factors}}))
    for said in refusals(directory):
        assert "rope_scaling of type 'su', an old name of 'longrope'" in said

    (directory / "config.json").write_text(json.dumps({**config, "rope_scaling": {"type": "longrope", **factors}}))
    assert load_model(resolve(str(directory)), block_tokens=4).config.rope_parameters["rope_type"] == "longrope"
