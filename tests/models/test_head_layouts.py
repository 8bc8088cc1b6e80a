"""Heads are read as their makers publish them: by the names and in the shapes of each kind of checkpoint, for
transformers' own class of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from proof.tiny_models import tiny_config, tiny_model_dir
from sidestream import LLM, SamplingParams, SpeculativeConfig
from sidestream.errors import ModelError
from sidestream.models.loader import quiet_transformers
from sidestream.models.mtp import load_head

LAYERS = 3
EXPERTS = 12  # more than ten: by name the tenth comes before the second

_COMMON = {
    "vocab_size": 99,
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 1,
}
_HYBRID = {
    **_COMMON,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
_QWEN_EXPERTS = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}

CONFIGS: Mapping[str, PreTrainedConfig] = {
    "glm4_moe": tiny_config("glm4_moe"),
    **{kind: tiny_config(kind, n_routed_experts=EXPERTS) for kind in ("deepseek_v3", "glm4_moe_lite")},
    "qwen3_next": Qwen3NextConfig(**_HYBRID, **_QWEN_EXPERTS),
    "qwen3_5": Qwen3_5TextConfig(**_HYBRID, intermediate_size=96),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(**_HYBRID, **_QWEN_EXPERTS),
}

_NORMS = ["input_layernorm.weight", "post_attention_layernorm.weight"]
_ATTENTION = [
    *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
]
_LATENT_ATTENTION = [
    f"self_attn.{part}.weight"
    for part in ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
]
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_EXPERTS = [
    "mlp.gate.weight",
    *(f"mlp.experts.{number}.{part}.weight" for number in range(EXPERTS) for part in _PROJECTIONS),
]
_SHARED_EXPERTS = ["mlp.gate.e_score_correction_bias", *(f"mlp.shared_experts.{part}.weight" for part in _PROJECTIONS)]
_SHARED_EXPERT = ["mlp.shared_expert_gate.weight", *(f"mlp.shared_expert.{part}.weight" for part in _PROJECTIONS)]

LAYER: Mapping[str, list[str]] = {
    "glm4_moe": [*_NORMS, *_ATTENTION, *(f"self_attn.{part}_proj.bias" for part in "qkv"), *_EXPERTS, *_SHARED_EXPERTS],
    "deepseek_v3": [*_NORMS, *_LATENT_ATTENTION, *_EXPERTS, *_SHARED_EXPERTS],
    "glm4_moe_lite": [*_NORMS, *_LATENT_ATTENTION, *_EXPERTS, *_SHARED_EXPERTS],
    "qwen3_next": [*_NORMS, *_ATTENTION, *_EXPERTS, *_SHARED_EXPERT],
    "qwen3_5": [*_NORMS, *_ATTENTION, *(f"mlp.{part}.weight" for part in _PROJECTIONS)],
    "qwen3_5_moe": [*_NORMS, *_ATTENTION, *_EXPERTS, *_SHARED_EXPERT],
}
"""What the checkpoints name the tensors of a layer, and those of the head's."""

# Where the head's layer is, and the rest by our names.
_DEEPSEEK = (
    f"model.layers.{LAYERS}.",
    {
        "join.weight": f"model.layers.{LAYERS}.eh_proj.weight",
        "norm_embedding.weight": f"model.layers.{LAYERS}.enorm.weight",
        "norm_hidden.weight": f"model.layers.{LAYERS}.hnorm.weight",
        "norm.weight": f"model.layers.{LAYERS}.shared_head.norm.weight",
    },
)
_QWEN = (
    "mtp.layers.0.",
    {
        "join.weight": "mtp.fc.weight",
        "norm_embedding.weight": "mtp.pre_fc_norm_embedding.weight",
        "norm_hidden.weight": "mtp.pre_fc_norm_hidden.weight",
        "norm.weight": "mtp.norm.weight",
    },
)
_AGAIN = (f"model.layers.{LAYERS}.embed_tokens.weight", f"model.layers.{LAYERS}.shared_head.head.weight")


def layout(kind: str) -> tuple[str, Mapping[str, str]]:
    return _QWEN if kind.startswith("qwen") else _DEEPSEEK


def publish(kind: str, directory: Path, *, again: bool = False) -> dict[str, Tensor]:
    """Save a model with a head, whose layer is the model's last one times -1; returns the head's tensors by the names
    in the file.

    again: with embedding and output matrix a second time, as some checkpoints of DeepSeek's and GLM's have them
    """
    if not kind.startswith("qwen"):
        tiny_model_dir(kind, directory, 3, n_routed_experts=EXPERTS)
    else:
        with quiet_transformers(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            AutoModelForCausalLM.from_config(CONFIGS[kind]).save_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    draws = torch.Generator().manual_seed(5)
    hidden = CONFIGS[kind].hidden_size
    place, ours = layout(kind)
    head = {
        theirs: torch.randn(hidden, 2 * hidden, generator=draws) * 0.2
        if name == "join.weight"
        else torch.rand(hidden, generator=draws)
        for name, theirs in ours.items()
    }
    for name in LAYER[kind]:
        last = f"model.layers.{LAYERS - 1}.{name}"
        weights[last] = torch.randn(weights[last].shape, generator=draws) * 0.2
        head[place + name] = -weights[last]
    carried = {**weights, **head}
    if again:
        carried |= {name: torch.zeros(weights["model.embed_tokens.weight"].shape) for name in _AGAIN}
    if kind.startswith("qwen3_5"):  # of more than text, but only the part for text is here
        carried = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in carried.items()}
        text = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        (directory / "config.json").write_text(json.dumps({"model_type": kind, "text_config": text}), encoding="utf-8")
    save_file(carried, directory / "model.safetensors", metadata={"format": "pt"})
    return head


def loaded(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    with quiet_transformers():
        return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()


@pytest.mark.parametrize(
    ("kind", "again"),
    [*((kind, False) for kind in CONFIGS), *((kind, True) for kind in CONFIGS if not kind.startswith("qwen"))],
)
def test_a_published_head_is_read_with_the_names_of_its_family(kind: str, again: bool, tmp_path: Path) -> None:
    published = publish(kind, tmp_path, again=again)
    model = loaded(tmp_path)
    last = model.base_model.layers[-1].state_dict()  # as transformers joins its experts
    _, ours = layout(kind)
    expected = {
        **{name: published[theirs] for name, theirs in ours.items()},
        **{f"layer.{name}": -last[name] for name in last},
    }

    found = load_head(model, tmp_path).state_dict()

    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


@pytest.mark.parametrize("kind", CONFIGS)
@torch.no_grad()
def test_qwen_heads_feed_back_the_normed_state_and_others_the_unnormed_one(kind: str, tmp_path: Path) -> None:
    publish(kind, tmp_path)
    head = load_head(loaded(tmp_path), tmp_path)
    left: list[Tensor] = []
    head.layer.register_forward_hook(lambda layer, given, out: left.append(out))

    before = torch.randn(1, 3, head.hidden_size, generator=torch.Generator().manual_seed(7))
    predicts, feeds = head(torch.tensor([[7, 30, 2]]), before, torch.arange(3)[None], attention_mask=None)

    normed = head.norm(left[0])
    assert not torch.allclose(left[0], normed, atol=1e-2)
    assert torch.equal(predicts, normed)
    assert torch.equal(feeds, normed if kind.startswith("qwen") else left[0])


@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3"])
def test_a_head_keeps_the_same_weights_in_float32_as_its_model(kind: str, tmp_path: Path) -> None:
    """Rounded to bfloat16, experts' corrections would choose others."""
    published = publish(kind, tmp_path)
    model = loaded(tmp_path, torch.bfloat16)
    head = load_head(model, tmp_path)

    assert {name: tensor.dtype for name, tensor in head.layer.state_dict().items()} == {
        name: tensor.dtype for name, tensor in model.base_model.layers[-1].state_dict().items()
    }
    bias = "mlp.gate.e_score_correction_bias"
    assert torch.equal(head.layer.state_dict()[bias], published[f"model.layers.{LAYERS}.{bias}"])


@pytest.mark.parametrize("part", _PROJECTIONS)
def test_an_error_about_an_incomplete_expert_names_the_missing_tensor(part: str, tmp_path: Path) -> None:
    publish("glm4_moe", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights[f"model.layers.{LAYERS}.mlp.experts.10.{part}.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"the head lacks layer\.mlp\.experts\.10\.{part}\.weight: fetch"):
        load_head(loaded(tmp_path), tmp_path)


def test_the_text_config_of_a_multimodal_checkpoint_is_checked(tmp_path: Path) -> None:
    publish("qwen3_5", tmp_path)
    model = loaded(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config["text_config"]["vocab_size"] = 300
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelError, match="was made for vocab_size 300, but the model has 99"):
        load_head(model, tmp_path)


@pytest.mark.parametrize("kind", ["glm4_moe", "qwen3_next", "deepseek_v3", "glm4_moe_lite"])
def test_a_model_is_served_with_the_head_in_its_checkpoint(kind: str, tmp_path: Path) -> None:
    publish(kind, tmp_path, again=kind == "glm4_moe")
    prompts = [
        [10 + position * step % 89 for position in range(length)] for step, length in ((3, 37), (7, 18), (11, 5))
    ]
    greedy = SamplingParams(temperature=0, max_tokens=15, ignore_eos=True)
    options: dict[str, Any] = {"dtype": "float32", "kv_memory": "1MiB", "max_running": 4, "compute_threads": 1}
    with LLM(tmp_path, **options) as plain:
        expected = [output.token_ids for output in plain.generate(prompts, greedy)]
    drafting = SpeculativeConfig("mtp", 3, head=tmp_path, adaptive=False)
    with LLM(tmp_path, **options, speculative=drafting) as llm:
        assert [output.token_ids for output in llm.generate(prompts, greedy)] == expected
        assert llm.metrics.value("draft_tokens_total", "mtp") > 0
