"""A directory without a supported model is refused with cause and remedy before tokenizer and weights are read."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoint_rig import edit_json, refusal, refused

from proof.tiny_models import tiny_model_dir
from sidestream.errors import ModelError
from sidestream.models import load_model
from sidestream.models.catalog import resolve
from sidestream.text import sample_text
from sidestream.tokenizer import Tokenizer


def refusals(directory: Path) -> list[str]:
    """The errors of `resolve`, which every command calls first, and of `load_model`."""
    return [refused(lambda: resolve(str(directory))), refusal(directory)]


@pytest.mark.parametrize(
    ("files", "cause", "remedy"),
    [
        ({}, "is empty", "give a directory with config.json, model.safetensors and tokenizer.json"),
        ({"tiny.Q4_K_M.gguf": "GGUF"}, "tiny.Q4_K_M.gguf is a GGUF file", "put config.json"),
        ({"pytorch_model.bin": "PK"}, "pytorch_model.bin is a pickle", "safetensors format"),
        (
            {"params.json": "{}", "consolidated.safetensors": ""},
            "consolidated.safetensors is in its publisher's own layout",
            "fetch the model in transformers' layout",
        ),
        (
            {
                "adapter_config.json": '{"base_model_name_or_path": "someone/base-7b", "peft_type": "LORA"}',
                "adapter_model.safetensors": "",
            },
            "a LoRA adapter (adapter_config.json) for someone/base-7b, not a model",
            "merge it into someone/base-7b",
        ),
    ],
)
def test_a_directory_without_a_model_is_refused(tmp_path: Path, files: dict[str, str], cause: str, remedy: str) -> None:
    directory = tmp_path / "given"
    directory.mkdir()
    for name, content in files.items():
        (directory / name).write_text(content)
    for said in refusals(directory):
        assert said.startswith("model given: ")
        assert cause in said
        assert remedy in said


def test_an_error_names_weights_in_another_format(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    for said in refusals(llama):
        assert "has no model.safetensors" in said
        assert "pytorch_model.bin is a pickle" in said


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_lora_adapter_beside_the_weights_is_refused(llama: Path, file: str) -> None:
    (llama / file).write_text('{"base_model_name_or_path": "someone/base"}')
    for said in refusals(llama):
        assert f"a LoRA adapter ({file}) beside the model" in said
        assert "move the adapter's files away" in said


def test_a_config_that_names_another_weight_file_is_refused(llama: Path) -> None:
    """transformers would read that file, and even a pickle if its name is adapter_model.bin."""
    edit_json(llama / "config.json", transformers_weights="other.safetensors")
    for said in refusals(llama):
        assert "names other weights, 'other.safetensors'" in said


def test_the_old_name_of_longrope_is_refused_with_a_working_remedy(tmp_path: Path) -> None:
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


# --- chat templates


def move_template(directory: Path, content: object) -> None:
    """To the file of the older layout."""
    (directory / "chat_template.jinja").unlink()
    (directory / "chat_template.json").write_text(json.dumps(content))


MESSAGES = [{"role": "user", "content": "Hi"}]


def test_a_chat_template_in_a_json_file_is_read(llama: Path) -> None:
    expected = Tokenizer.load(str(llama)).chat(MESSAGES)
    move_template(llama, {"chat_template": (llama / "chat_template.jinja").read_text()})
    assert Tokenizer.load(str(llama)).chat(MESSAGES) == expected


def test_a_template_of_the_tokenizer_overrides_that_of_the_json_file(llama: Path) -> None:
    expected = Tokenizer.load(str(llama)).chat(MESSAGES)
    (llama / "chat_template.json").write_text(json.dumps({"chat_template": "nothing"}))
    assert Tokenizer.load(str(llama)).chat(MESSAGES) == expected


@pytest.mark.parametrize("content", [{}, {"chat_template": 3}, []])
def test_a_json_file_without_a_template_is_refused_and_named(llama: Path, content: object) -> None:
    move_template(llama, content)
    with pytest.raises(ModelError, match=r"chat_template\.json"):
        Tokenizer.load(str(llama))


# --- SentencePiece


SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def use_sentencepiece(directory: Path, model: bytes, **config: Any) -> Path:
    """A tokenizer that is a SentencePiece model alone."""
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer.model").write_bytes(model)
    (directory / "tokenizer_config.json").write_text(json.dumps({**SPECIAL, **config}))
    return directory


def test_an_error_names_packages_that_a_sentencepiece_tokenizer_needs(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_sentencepiece(llama, b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    monkeypatch.setitem(sys.modules, "sentencepiece.sentencepiece_model_pb2", None)
    said = refused(lambda: Tokenizer.load(str(llama)))
    assert "a SentencePiece model (tokenizer.model) without a tokenizer.json" in said
    assert "cannot be loaded" in said and "pip install 'sidestream[sentencepiece]'" in said


@pytest.fixture(scope="module")
def piece_model() -> bytes:
    """A model of the kind that Llama 2 has, taught by our own sample text."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="needs the extra sentencepiece")
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sample_text().splitlines()[:200]),
        model_writer=written,
        model_type="bpe",
        vocab_size=400,
        character_coverage=1.0,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
    )
    return written.getvalue()


def test_a_sentencepiece_tokenizer_gives_the_ids_of_sentencepiece(llama: Path, piece_model: bytes) -> None:
    from sentencepiece import SentencePieceProcessor

    original = SentencePieceProcessor(model_proto=piece_model)
    tokenizer = Tokenizer.load(str(use_sentencepiece(llama, piece_model, tokenizer_class="LlamaTokenizer")))
    for text in ("Call me Ishmael.", "12 whales\nand a café: 漢字", "x"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == original.encode(text)
        assert tokenizer.decode(ids).lstrip() == text


def test_a_sentencepiece_tokenizer_converted_to_wrong_ids_is_refused(llama: Path, piece_model: bytes) -> None:
    """Without the class's name transformers drops the space that SentencePiece puts before a text."""
    use_sentencepiece(llama, piece_model)
    edit_json(llama / "config.json", model_type="qwen3")
    with pytest.raises(ModelError, match="gives other token ids than SentencePiece"):
        Tokenizer.load(str(llama))
