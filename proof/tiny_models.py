"""Tiny models with random weights, one of each supported family, saved as complete transformers directories.

They load in no time. Their configs make errors of attention visible: sliding windows are shorter than a test's context,
and logit soft caps have an effect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AXK1Config,
    BambaConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GPTNeoConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    GraniteMoeSharedConfig,
    GraniteSWAConfig,
    JambaConfig,
    JetMoeConfig,
    KimiLinearConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Llama4TextConfig,
    LlamaConfig,
    LongcatFlashConfig,
    Mamba2Config,
    MiMoV2FlashConfig,
    MiniCPM3Config,
    MiniMaxConfig,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    NemotronHConfig,
    Olmo2Config,
    OlmoeConfig,
    OlmoHybridConfig,
    Phi3Config,
    PhimoeConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    StableLmConfig,
    YoutuConfig,
)
from transformers.utils import logging as transformers_logging

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


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """Config of a tiny model of `family`, one of `FAMILIES`, `LATENT` or `HYBRIDS`, with `changes` to its fields."""
    kind, own = {**FAMILIES, **LATENT, **HYBRIDS}[family]
    common: dict[str, Any] = {
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
    return kind(**{**common, **own, **changes})


def tiny_model_dir(family: str, directory: Path, seed: int, **changes: Any) -> Path:
    """Save a model of `family` with weights drawn from `seed`, float32, and a byte-level tokenizer with a chat
    template.

    Returns `directory`. Does not change torch's random state. Raises KeyError for an unknown family.
    """
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            AutoModelForCausalLM.from_config(tiny_config(family, **changes)).save_pretrained(directory)
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
    byte_tokenizer().save_pretrained(directory)
    return directory


def save_head(model: Path, path: Path, *, seed: int) -> Path:
    """Save a draft head with random weights for the model in a directory, as a file in Sidestream's format. Returns
    `path`.
    """
    module = AutoModelForCausalLM.from_pretrained(
        model,
        dtype=torch.float32,
        use_safetensors=True,
        trust_remote_code=False,
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


FAMILIES: Mapping[str, tuple[Callable[..., PreTrainedConfig], Mapping[str, Any]]] = {
    "llama": (LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
    "mistral": (MistralConfig, {"sliding_window": WINDOW}),
    "gemma2": (
        Gemma2Config,
        {
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (Gemma3TextConfig, {"num_hidden_layers": 6, "sliding_window": WINDOW, "query_pre_attn_scalar": 16}),
    "gemma4": (
        Gemma4TextConfig,
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": WINDOW,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": _VOCAB,
            "num_kv_shared_layers": 0,
        },
    ),
    # Heads of two sizes, and two layers without KV of their own.
    "gemma4_shared": (
        Gemma4TextConfig,
        {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "sliding_window": WINDOW,
            "num_key_value_heads": 4,
            "global_head_dim": 32,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": _VOCAB,
            "num_kv_shared_layers": 2,
        },
    ),
    "gpt_neo": (
        GPTNeoConfig,
        {
            "num_key_value_heads": 4,
            "attention_types": [[["global", "local"], 1], [["local"], 1]],
            "window_size": WINDOW,
        },
    ),
    "gpt_oss": (
        GptOssConfig,
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
    "granite_swa": (
        GraniteSWAConfig,
        {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW},
    ),
    "granitemoehybrid": (
        GraniteMoeHybridConfig,
        {
            "layer_types": ["attention"] * 3,
            "position_embedding_type": "rope",
            "attention_multiplier": 0.25,
            "num_local_experts": 4,
            "shared_intermediate_size": 32,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
        },
    ),
    "granitemoeshared": (
        GraniteMoeSharedConfig,
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            "attention_multiplier": 0.25,
        },
    ),
    "jetmoe": (
        JetMoeConfig,
        {"num_key_value_heads": 2, "kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "llama4_text": (
        Llama4TextConfig,
        {
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 0, 1, 0],
            "attention_chunk_size": WINDOW,
            "floor_scale": 4,
            "num_local_experts": 4,
            "intermediate_size_mlp": 96,
        },
    ),
    "mimo_v2_flash": (
        MiMoV2FlashConfig,
        {
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "sliding_window": WINDOW,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "nemotron": (NemotronConfig, {}),
    "olmoe": (OlmoeConfig, {"num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2}),
    "phi3": (Phi3Config, {"sliding_window": None}),
    "phimoe": (PhimoeConfig, {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmo2": (Olmo2Config, {"num_key_value_heads": 4}),
    "stablelm": (StableLmConfig, {"use_qkv_bias": True, "qk_layernorm": True}),
    "qwen3_moe": (Qwen3MoeConfig, {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    "glm4_moe": (
        Glm4MoeConfig,
        {
            "n_routed_experts": 12,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "attention_bias": True,
            "use_qk_norm": True,
        },
    ),
}
"""Families by name: class and fields of the config."""

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
_GROUPED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "mscale": 0.7,
    "mscale_all_dim": 0.8,
}
LATENT: Mapping[str, tuple[Callable[..., PreTrainedConfig], Mapping[str, Any]]] = {
    "deepseek_v2": (
        DeepseekV2Config,
        {
            **_LATENT,
            **_GROUPED,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "first_k_dense_replace": 1,
            "rope_parameters": _YARN,
        },
    ),
    "deepseek_v3": (
        DeepseekV3Config,
        {**_LATENT, **_GROUPED, "first_k_dense_replace": 1, "rope_parameters": _YARN},
    ),
    "axk1": (AXK1Config, {**_LATENT, **_GROUPED}),
    "glm4_moe_lite": (Glm4MoeLiteConfig, {**_LATENT, **_GROUPED, "v_head_dim": 24}),
    "longcat_flash": (
        LongcatFlashConfig,
        {
            **_LATENT,
            "num_hidden_layers": 4,
            "num_layers": 2,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
            "expert_ffn_hidden_size": 32,
        },
    ),
    "minicpm3": (MiniCPM3Config, {**_LATENT, "dim_model_base": 32}),
    "youtu": (YoutuConfig, {**_LATENT, "rope_interleave": False, "tie_word_embeddings": True}),
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
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16}
HYBRIDS: Mapping[str, tuple[Callable[..., PreTrainedConfig], Mapping[str, Any]]] = {
    "qwen3_next": (Qwen3NextConfig, {**_DELTA, **_EXPERTS}),
    "qwen3_5": (Qwen3_5TextConfig, _DELTA),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, {**_DELTA, **_EXPERTS}),
    "nemotron_h": (
        NemotronHConfig,
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "granite4": (
        GraniteMoeHybridConfig,
        {
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "num_local_experts": 0,
            "shared_intermediate_size": 64,
            **_MAMBA,
        },
    ),
    "falcon_h1": (FalconH1Config, {**_MAMBA, "mamba_d_ssm": 128}),
    "bamba": (BambaConfig, {"num_hidden_layers": 4, "attn_layer_indices": [2], **_MAMBA}),
    "jamba": (
        JambaConfig,
        {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 16, "mamba_dt_rank": 8},
    ),
    "lfm2": (Lfm2Config, {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]}),
    "lfm2_moe": (Lfm2MoeConfig, {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]}),
    "minimax": (
        MiniMaxConfig,
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "block_size": 16,
        },
    ),
    "mamba2": (Mamba2Config, {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16, "chunk_size": 16}),
    "olmo_hybrid": (OlmoHybridConfig, {"num_hidden_layers": 4}),
    "kimi_linear": (
        KimiLinearConfig,
        {
            **_LATENT,
            **{name: value for name, value in _GROUPED.items() if name != "n_routed_experts"},
            "num_local_experts": 8,
            "q_lora_rank": None,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "linear_head_dim": 16,
            "linear_num_heads": 4,
        },
    ),
}
"""Families in which some layers keep recurrent state."""
