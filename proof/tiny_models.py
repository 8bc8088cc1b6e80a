"""Tiny models with random weights, one of each supported family, saved as complete transformers directories.

They load in no time. Their configs make errors of attention visible: sliding windows are shorter than a test's context,
and logit soft caps have an effect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

from sidestream.models.loader import quiet_transformers
from sidestream.models.mtp import MtpHead, write_head

WINDOW = 12
"""Size of the sliding window, for families that have one."""

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_EOS = len(pre_tokenizers.ByteLevel.alphabet())
_VOCAB = _EOS + len(_SPECIAL)
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_COMMON: Mapping[str, Any] = {
    "vocab_size": _VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    # Ten times the usual value, so that the next token depends on the whole context.
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": _EOS,
}


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """Config of a tiny model of `family`, one of `FAMILIES`, `LATENT` or `HYBRIDS`, with `changes` to its fields."""
    fields = {**_COMMON, **{**FAMILIES, **LATENT, **HYBRIDS}[family], **changes}
    return CONFIG_MAPPING[fields.pop("model_type")](**fields)


def tiny_model_dir(family: str, directory: Path, seed: int, **changes: Any) -> Path:
    """Save a model of `family` with weights drawn from `seed`, float32, and a byte-level tokenizer with a chat
    template.

    Returns `directory`. Does not change torch's random state. Raises KeyError for an unknown family.
    """
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(tiny_config(family, **changes)).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def save_head(model: Path, path: Path, *, seed: int) -> Path:
    """Save a draft head with random weights for the model in a directory, as a file in Sidestream's format. Returns
    `path`.
    """
    module = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        write_head(MtpHead(module, feeds_normed=False), path)
    return path


def carry_head(model: Path, head: Path, *, names: Literal["qwen", "deepseek"]) -> None:
    """Add the tensors of a head file in Sidestream's format to a checkpoint's directory, with the names that public
    checkpoints use.
    """
    layers = json.loads((model / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
    prefix, renamed = {
        "qwen": (
            "mtp.",
            {
                "join.": "fc.",
                "norm_embedding.": "pre_fc_norm_embedding.",
                "norm_hidden.": "pre_fc_norm_hidden.",
                "layer.": "layers.0.",
            },
        ),
        "deepseek": (
            f"model.layers.{layers}.",
            {
                "join.": "eh_proj.",
                "norm_embedding.": "enorm.",
                "norm_hidden.": "hnorm.",
                "norm.": "shared_head.norm.",
                "layer.": "",
            },
        ),
    }[names]
    carried = {}
    for name, tensor in load_file(head).items():
        ours = next((ours for ours in renamed if name.startswith(ours)), "")
        theirs = prefix + renamed.get(ours, "") + name.removeprefix(ours)
        if (found := re.match(r"(.*\.experts)\.(gate_up_proj|down_proj)$", theirs)) is None:
            carried[theirs] = tensor
            continue
        for number, expert in enumerate(tensor):
            parts = (
                dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
                if found[2] == "gate_up_proj"
                else {"down_proj": expert}
            )
            carried |= {f"{found[1]}.{number}.{part}.weight": weights.contiguous() for part, weights in parts.items()}
    if names == "deepseek":  # such checkpoints repeat shared tensors; this copy is a dummy
        carried[f"{prefix}embed_tokens.weight"] = torch.zeros(2, 2)
    save_file(carried, model / "model-mtp.safetensors")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, then the special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    bytes_only.add_special_tokens(list(_SPECIAL))
    return PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token=_SPECIAL[0], chat_template=_CHAT)


def _config(kind: str, *parts: Mapping[str, Any], **own: Any) -> Mapping[str, Any]:
    """Fields of a config in which it differs from `_COMMON`: its kind, and those of `parts`, then its `own`."""
    return {"model_type": kind, **{name: value for part in parts for name, value in part.items()}, **own}


_ALTERNATING = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2} | {
    "sliding_window": WINDOW
}
_FOUR_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": _config("llama", tie_word_embeddings=True),
    "qwen2": _config("qwen2"),
    "qwen3": _config("qwen3"),
    "mistral": _config("mistral", sliding_window=WINDOW),
    "gemma2": _config(
        "gemma2",
        num_hidden_layers=4,
        sliding_window=WINDOW,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    ),
    "gemma3": _config("gemma3_text", num_hidden_layers=6, sliding_window=WINDOW, query_pre_attn_scalar=16),
    "gemma4": _config(
        "gemma4_text",
        _ALTERNATING,
        global_head_dim=16,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=_VOCAB,
        num_kv_shared_layers=0,
    ),
    # Heads of two sizes, and two layers without KV of their own.
    "gemma4_shared": _config(
        "gemma4_text",
        num_hidden_layers=6,
        layer_types=["sliding_attention", "full_attention"] * 3,
        sliding_window=WINDOW,
        num_key_value_heads=4,
        global_head_dim=32,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=_VOCAB,
        num_kv_shared_layers=2,
    ),
    "gpt_neo": _config(
        "gpt_neo", num_key_value_heads=4, attention_types=[[["global", "local"], 1], [["local"], 1]], window_size=WINDOW
    ),
    "gpt_oss": _config(
        "gpt_oss", _ALTERNATING, _FOUR_EXPERTS, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}
    ),
    "granite_swa": _config("granite_swa", _ALTERNATING),
    "granitemoehybrid": _config(
        "granitemoehybrid",
        layer_types=["attention"] * 3,
        position_embedding_type="rope",
        attention_multiplier=0.25,
        num_local_experts=4,
        shared_intermediate_size=32,
        mamba_n_heads=8,
        mamba_d_head=16,
    ),
    "granitemoeshared": _config(
        "granitemoeshared", _FOUR_EXPERTS, shared_intermediate_size=32, attention_multiplier=0.25
    ),
    "jetmoe": _config("jetmoe", _FOUR_EXPERTS, num_key_value_heads=2, kv_channels=16),
    "llama4_text": _config(
        "llama4_text",
        num_hidden_layers=4,
        no_rope_layers=[1, 0, 1, 0],
        attention_chunk_size=WINDOW,
        floor_scale=4,
        num_local_experts=4,
        intermediate_size_mlp=96,
    ),
    "mimo_v2_flash": _config(
        "mimo_v2_flash",
        _ROUTED,
        num_hidden_layers=4,
        layer_types=["full_attention", "sliding_attention"] * 2,
        sliding_window=WINDOW,
        v_head_dim=8,
    ),
    "mixtral": _config("mixtral", _FOUR_EXPERTS),
    "nemotron": _config("nemotron"),
    "olmoe": _config("olmoe", num_key_value_heads=4, num_experts=8, num_experts_per_tok=2),
    "phi3": _config("phi3", sliding_window=None),
    "phimoe": _config("phimoe", _FOUR_EXPERTS, sliding_window=None),
    "olmo2": _config("olmo2", num_key_value_heads=4),
    "stablelm": _config("stablelm", use_qkv_bias=True, qk_layernorm=True),
    "qwen3_moe": _config("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "glm4_moe": _config(
        "glm4_moe",
        n_routed_experts=12,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        attention_bias=True,
        use_qk_norm=True,
    ),
}
"""Families by name: kind and fields of the config."""

# The value is wider than the key without its rotated part, and both differ from the latent.
_LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
# Two groups of experts, of which a token uses one.
_GROUPED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "mscale": 0.7,
    "mscale_all_dim": 0.8,
}
LATENT: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": _config(
        "deepseek_v2",
        _LATENT,
        _GROUPED,
        q_lora_rank=None,
        topk_method="group_limited_greedy",
        first_k_dense_replace=1,
        rope_parameters=_YARN,
    ),
    "deepseek_v3": _config("deepseek_v3", _LATENT, _GROUPED, first_k_dense_replace=1, rope_parameters=_YARN),
    "axk1": _config("axk1", _LATENT, _GROUPED),
    "glm4_moe_lite": _config("glm4_moe_lite", _LATENT, _GROUPED, v_head_dim=24),
    "longcat_flash": _config(
        "longcat_flash",
        _LATENT,
        num_hidden_layers=4,
        num_layers=2,
        n_routed_experts=4,
        zero_expert_num=2,
        moe_topk=2,
        expert_ffn_hidden_size=32,
    ),
    "minicpm3": _config("minicpm3", _LATENT, dim_model_base=32),
    "youtu": _config("youtu", _LATENT, rope_interleave=False, tie_word_embeddings=True),
}
"""Families with latent attention."""

_DELTA = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_LINEAR = {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"]}
_CONV = {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16}
HYBRIDS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_next": _config("qwen3_next", _DELTA, _EXPERTS),
    "qwen3_5": _config("qwen3_5_text", _DELTA),
    "qwen3_5_moe": _config("qwen3_5_moe_text", _DELTA, _EXPERTS),
    "nemotron_h": _config(
        "nemotron_h",
        _ROUTED,
        num_hidden_layers=4,
        layers_block_type=["linear_attention", "mlp", "full_attention", "moe"],
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=2,
        moe_shared_expert_intermediate_size=32,
    ),
    "granite4": _config(
        "granitemoehybrid",
        _MAMBA,
        num_hidden_layers=4,
        layer_types=["mamba", "mamba", "attention", "mamba"],
        num_local_experts=0,
        shared_intermediate_size=64,
    ),
    "falcon_h1": _config("falcon_h1", _MAMBA, mamba_d_ssm=128),
    "bamba": _config("bamba", _MAMBA, num_hidden_layers=4, attn_layer_indices=[2]),
    "jamba": _config(
        "jamba", attn_layer_period=2, attn_layer_offset=1, num_experts=4, mamba_d_state=16, mamba_dt_rank=8
    ),
    "lfm2": _config("lfm2", _CONV),
    "lfm2_moe": _config("lfm2_moe", _CONV),
    "minimax": _config("minimax", _LINEAR, _FOUR_EXPERTS, block_size=16),
    "mamba2": _config("mamba2", num_heads=8, head_dim=16, n_groups=1, state_size=16, chunk_size=16),
    "olmo_hybrid": _config("olmo_hybrid", num_hidden_layers=4),
    "kimi_linear": _config(
        "kimi_linear",
        _LATENT,
        {name: value for name, value in _GROUPED.items() if name != "n_routed_experts"},
        _LINEAR,
        num_local_experts=8,
        q_lora_rank=None,
        linear_head_dim=16,
        linear_num_heads=4,
    ),
}
"""Families in which some layers keep recurrent state."""
