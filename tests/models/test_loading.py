"""A model that cannot be read, or cannot be served right, is refused at load with a reason; what loads has an
identity.
"""

from __future__ import annotations

import errno
import inspect
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoint_rig import edit_json, edit_weights, refusal, shard
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.utils import logging as transformers_logging

from proof.tiny_kinds import tiny_kind
from proof.tiny_models import tiny_model_dir
from sidestream.attention import paged
from sidestream.attention.paged import paged_attention
from sidestream.errors import ModelError
from sidestream.models import kv_token_bytes, load_model, loader
from sidestream.models.config_checks import check_servable, layout_of, max_positions
from sidestream.models.loader import weights_digest
from sidestream.models.weights import fingerprint_of, pack_linears

# --- files


def test_an_error_about_a_missing_directory_names_it(tmp_path: Path) -> None:
    assert f"there is no directory {tmp_path / 'gone'}" in refusal(tmp_path / "gone")


def test_a_directory_without_config_is_refused(llama: Path) -> None:
    (llama / "config.json").unlink()
    assert "has no config.json" in refusal(llama)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b'{"model_type": ', b"[1]", b"\xff\xfe"])
def test_unreadable_json_is_refused_and_named(llama: Path, name: str, content: bytes) -> None:
    (llama / name).write_bytes(content)
    assert name in refusal(llama)


def test_a_config_without_a_known_model_type_is_refused(llama: Path) -> None:
    (llama / "config.json").write_text("{}")
    assert "no model_type" in refusal(llama)

    edit_json(llama / "config.json", model_type="nobody_knows")
    assert "nobody_knows" in refusal(llama)


def test_missing_weights_are_refused_and_named(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    assert "has no model.safetensors" in refusal(llama)


def test_half_downloaded_weights_are_refused_and_named(llama: Path) -> None:
    weights = llama / "model.safetensors"
    whole = weights.read_bytes()
    for length in (len(whole) - 1, len(whole) // 2, 100, 4, 0):
        weights.write_bytes(whole[:length])
        assert "model.safetensors" in refusal(llama)
        assert "fetch it again" in refusal(llama)


def test_a_weight_file_in_another_format_is_refused(llama: Path) -> None:
    (llama / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "no readable safetensors file" in refusal(llama)


def test_an_error_about_a_missing_shard_names_it(llama: Path) -> None:
    shard(llama, 3)
    (llama / "model-00002-of-00003.safetensors").unlink()
    assert "has no model-00002-of-00003.safetensors" in refusal(llama)


def test_a_missing_tensor_is_refused(llama: Path) -> None:
    edit_weights(llama, lambda weights: weights.__delitem__("model.layers.1.self_attn.k_proj.weight"))
    assert "lack 1 of the model's tensors, such as model.layers.1.self_attn.k_proj.weight" in refusal(llama)


def test_a_tensor_of_another_shape_is_refused(llama: Path) -> None:
    edit_weights(llama, lambda weights: weights.update({"model.norm.weight": torch.ones(32)}))
    assert "wrong shape for 1 of the model's tensors" in refusal(llama)
    assert "model.norm.weight" in refusal(llama)


def test_an_error_about_an_unknown_dtype_names_the_nearest_one(llama: Path) -> None:
    assert "did you mean float16?" in refusal(llama, dtype="flaot16")


# --- kinds of models


_OWN_CODE = ("CpmAntConfig", "XLMConfig", "XLNetConfig")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.T5Config(), "encoder-decoder"),
        (transformers.RwkvConfig(), "recurrent state"),
        (transformers.DeepseekV32Config(), "latent attention"),
        (transformers.ViTConfig(), "no causal language model"),
        (transformers.BartConfig(is_encoder_decoder=False), "half of one"),
        (transformers.MoshiConfig(), r"several models \(audio_encoder_config, depth_decoder_config\)"),
        (transformers.RecurrentGemmaConfig(), "recurrent state|linear_attention"),
        (transformers.FalconConfig(alibi=True), r"\(ALiBi\) to bfloat16"),
        *((getattr(transformers, kind)(), "attention code of its own in transformers") for kind in _OWN_CODE),
        (
            transformers.RobertaConfig(is_decoder=True, pad_token_id=None),
            "counts positions from its padding token's id on, but config.json gives pad_token_id as None",
        ),
        (
            transformers.RobertaConfig(is_decoder=True, pad_token_id=511, max_position_embeddings=512),
            r"\(pad_token_id 511\), but has only 512 \(max_position_embeddings\)",
        ),
        (transformers.DiffLlamaConfig(), "attends twice in each layer"),
        (transformers.HrmTextConfig(), "the same layers several times"),
        (transformers.DogeConfig(), "masks its attention by values"),
        (transformers.RoFormerConfig(is_decoder=True), "attends in both directions"),
        (transformers.Gemma4TextConfig(num_kv_shared_layers=26), "no full_attention layer with KV of its own"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, transformers.PreTrainedConfig) else "",
)
def test_an_unservable_kind_of_model_is_refused(
    tmp_path: Path, config: transformers.PreTrainedConfig, reason: str
) -> None:
    config.save_pretrained(tmp_path)
    assert re.search(reason, refusal(tmp_path))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"quantization_config": {"quant_method": "quanto"}}, "quantised by quanto"),
        ({"num_key_value_heads": [1, 2, 2]}, "num_key_value_heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ],
)
def test_a_config_out_of_bounds_is_refused(llama: Path, change: dict[str, Any], reason: str) -> None:
    edit_json(llama / "config.json", **change)
    assert reason in refusal(llama)


@pytest.mark.slow  # imports the definitions of a few hundred families
@pytest.mark.filterwarnings("ignore")  # transformers' own, of the definitions that this imports
def test_reasons_of_refusals_name_the_model_family() -> None:
    unclear = {}
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            config = transformers.CONFIG_MAPPING[kind]()
        except Exception:  # it cannot be made without arguments
            continue
        try:
            text = check_servable(config)
            layout_of(text, dtype="float32", block_tokens=16)
            max_positions(text)
        except ModelError as error:
            if not str(error).startswith(f"{config.model_type} "):
                unclear[kind] = str(error)
    assert unclear == {}


def test_attention_that_looks_ahead_is_refused(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    config = transformers.BertConfig(**sizes, vocab_size=99, is_decoder=False, max_position_embeddings=64)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert "not causal" in refusal(tmp_path)


# --- the self-check


def test_the_self_check_refuses_paged_attention_that_differs(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sharper(*args: Any, scale: float, **options: Any) -> torch.Tensor:
        return paged_attention(*args, scale=scale * 1.05, **options)

    monkeypatch.setattr(paged, "paged_attention", sharper)

    assert "in layer 0, paged attention and transformers' own give different values" in refusal(llama)


def test_the_self_check_finds_a_wrong_window_longer_than_its_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny_model_dir("mistral", tmp_path, 0, sliding_window=512)
    model = load_model(str(directory), block_tokens=4)
    assert model.config.sliding_window == 512

    def windowless(*args: Any, sliding_window: int | None, **options: Any) -> torch.Tensor:
        return paged_attention(*args, **options)

    monkeypatch.setattr(paged, "paged_attention", windowless)

    assert "in layer 0, paged attention and transformers' own give different values" in refusal(directory)


def test_the_self_check_refuses_a_model_that_skips_a_layer(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As models do whose layers share the KV of others."""

    own = LlamaAttention.forward

    def skipping(self: LlamaAttention, hidden_states: torch.Tensor, **options: Any) -> Any:
        return (hidden_states, None) if self.layer_idx == 1 else own(self, hidden_states, **options)

    monkeypatch.setattr(LlamaAttention, "forward", skipping)

    assert "layers [0, 2] of 3" in refusal(llama)


# --- what a loaded model tells


def test_positions_may_begin_after_the_padding_token(tmp_path: Path) -> None:
    """The self-check gives transformers' model no positions, so it refuses one whose positions begin elsewhere."""
    config = tiny_kind("roberta")
    config.pad_token_id = 5
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), block_tokens=4)

    assert (model.padding_token, model.max_model_len) == (5, config.max_position_embeddings - 6)


def test_a_loaded_model_reports_its_facts(llama: Path) -> None:
    edit_json(llama / "generation_config.json", eos_token_id=[256, 258])
    model = load_model(str(llama), block_tokens=8)

    assert model.name == "llama"
    assert model.layout.shape(5) == (5, 3, 2, 8, 2, 16)
    assert model.layout.dtype == "float32"
    assert (model.vocab_size, model.max_model_len, model.eos_token_ids) == (259, 1024, (256, 258))
    assert kv_token_bytes(str(llama)) == model.layout.token_bytes
    assert kv_token_bytes(str(llama), dtype="bfloat16") * 2 == model.layout.token_bytes


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (
            PermissionError(errno.EACCES, "Permission denied"),
            "is not readable for this user: make it readable (chmod +r)",
        ),
        (OSError(errno.EIO, "Input/output error"), "cannot be read (Input/output error): check the file and its disk"),
    ],
    ids=["no right", "broken medium"],
)
def test_unreadable_weights_are_not_called_damaged(
    llama: Path, monkeypatch: pytest.MonkeyPatch, failure: OSError, said: str
) -> None:
    real = Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == "model.safetensors":
            raise failure
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    message = refusal(llama)
    assert f"model.safetensors {said}" in message
    assert "fetch it again" not in message


def test_a_directory_in_place_of_weights_is_refused(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    (llama / "model.safetensors").mkdir()
    assert "model.safetensors is a directory, not a regular file" in refusal(llama)


def test_loading_prints_no_line_and_keeps_the_verbosity(llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled())
    transformers_logging.set_verbosity(logging.INFO)
    transformers_logging.enable_progress_bar()
    capfd.readouterr()

    load_model(str(llama), block_tokens=4)

    assert capfd.readouterr() == ("", "")
    assert (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()) == (
        logging.INFO,
        True,
    )
    transformers_logging.set_verbosity(before[0])
    if not before[1]:
        transformers_logging.disable_progress_bar()


# --- identity (H14)


def test_the_fingerprint_depends_on_content_not_on_names_dates_or_files(llama: Path) -> None:
    first = load_model(str(llama), block_tokens=4).fingerprint
    assert len(bytes.fromhex(first)) >= 16

    other = llama.rename(llama.with_name("other"))
    os.utime(other / "model.safetensors", (0, 0))
    shard(other, 3)

    assert load_model(str(other), block_tokens=16).fingerprint == first


def test_the_weights_digest_depends_on_weights_only(llama: Path) -> None:
    first = weights_digest(str(llama))
    assert len(bytes.fromhex(first)) == 16
    edit_json(llama / "config.json", rms_norm_eps=1e-3)
    shard(llama, 3)
    assert weights_digest(str(llama)) == first
    for name in ("model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"):
        weights = load_file(llama / name)
        next(iter(weights.values())).view(-1)[-1] += 1
        save_file(weights, llama / name, metadata={"format": "pt"})
        before, first = first, weights_digest(str(llama))
        assert first != before
    with pytest.raises(ModelError, match=r"model llama: .* has no config\.json"):
        (llama / "config.json").unlink()
        weights_digest(str(llama))


def fingerprints(directory: str) -> tuple[str, str]:
    model = load_model(directory, block_tokens=4)
    model.module.config.letters = set("abcdefghij")
    return model.fingerprint, fingerprint_of(model.module)


@pytest.mark.slow  # the other process imports torch and transformers
def test_the_fingerprint_is_equal_in_another_process(llama: Path) -> None:
    """Even where a config holds a set, whose order differs from process to process."""
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    imports = "from sidestream.models import load_model\nfrom sidestream.models.weights import fingerprint_of\n"
    code = f"{imports}{inspect.getsource(fingerprints)}print(*fingerprints({str(llama)!r}))"
    there = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)

    assert tuple(there.stdout.split()) == fingerprints(str(llama))


def test_the_fingerprint_depends_on_weights_dtype_config_and_transformers(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {
        load_model(str(llama), block_tokens=4).fingerprint,
        load_model(str(llama), dtype="bfloat16", block_tokens=4).fingerprint,
    }

    edit_weights(llama, lambda weights: weights["model.layers.2.mlp.down_proj.weight"][5, 7].add_(1e-6))
    seen.add(load_model(str(llama), block_tokens=4).fingerprint)
    edit_json(llama / "config.json", rms_norm_eps=1e-5)
    seen.add(load_model(str(llama), block_tokens=4).fingerprint)
    monkeypatch.setattr(transformers.configuration_utils, "__version__", "99.0")
    seen.add(load_model(str(llama), block_tokens=4).fingerprint)

    assert len(seen) == 5


# --- reordered weights


@pytest.mark.parametrize("bias", [False, True])
def test_packing_a_linear_layer_changes_no_result(bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 48, bias=bias, dtype=torch.bfloat16))
    packed = nn.Sequential(nn.Linear(64, 48, bias=bias, dtype=torch.bfloat16))
    packed.load_state_dict(plain.state_dict())
    pack_linears(packed)

    with torch.inference_mode():
        for rows in (0, 1, 8, 100):
            states = torch.randn(1, rows, 64, dtype=torch.bfloat16)
            # Both round a float32 sum once: at most one step of 2**-8 apart, for values up to 4.
            torch.testing.assert_close(packed(states), plain(states), atol=2**-6, rtol=0)


def test_the_kernel_cache_is_set_before_the_self_check(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kept() -> None:
        raise NotImplementedError("kept")

    monkeypatch.setattr(loader, "use_compile_cache", kept)
    assert "NotImplementedError: kept" in refusal(llama, device=torch.device("cuda"))
    load_model(str(llama), block_tokens=4)
