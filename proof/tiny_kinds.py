"""Tiny configs of every kind of causal language model in the installed transformers, made from the default config: each
size becomes small, and of the layers the first ones that have every type stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from proof.tiny_models import FAMILIES, HYBRIDS, LATENT, tiny_config

KINDS = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
"""The kinds (`model_type`)."""

VOCAB = 128
_WINDOW = 12
_SPREAD = 0.1  # of weights: five times the usual, so that the next token depends on the whole context
_MOST_LAYERS = 8
_LARGEST = {
    VOCAB: "vocab_size vocab_size_per_layer_input",
    256: "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length",
    96: "intermediate_size ffn_dim n_inner dense_intermediate_size intermediate_size_mlp dff ffn_hidden_size "
    "block_ff_dim",
    64: "hidden_size n_embd d_model embedding_size dim_model word_embed_proj_dim embedding_dim block_dim lru_width",
    32: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size shared_intermediate_size "
    "kv_lora_rank mamba_d_head",
    24: "q_lora_rank",
    16: "head_dim v_head_dim qk_nope_head_dim attention_head_dim kv_channels linear_key_head_dim linear_value_head_dim "
    "mamba_head_dim mamba_d_state ssm_state_size state_size mamba_chunk_size chunk_size hidden_size_per_layer_input "
    "swa_head_dim swa_v_head_dim index_head_dim",
    _WINDOW: "sliding_window attention_window_size attention_chunk_size",
    8: "qk_rope_head_dim rotary_dim mamba_num_heads laurel_rank index_topk",
    4: "num_attention_heads n_head num_heads n_heads num_experts num_local_experts n_routed_experts moe_num_experts "
    "linear_num_value_heads mamba_n_heads swa_num_attention_heads",
    2: "num_key_value_heads num_kv_heads n_kv_heads num_experts_per_tok num_experts_per_token moe_k moe_topk "
    "top_k_experts linear_num_key_heads altup_num_inputs swa_num_key_value_heads",
    1: "n_group topk_group mamba_n_groups n_groups first_k_dense_replace num_dense_layers num_shared_experts",
}
_SIZES: Mapping[str, int] = {name: most for most, names in _LARGEST.items() for name in names.split()}
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_NEEDED = {"head_dim": 16, "num_key_value_heads": 2}  # of some kinds, which cannot be built without them
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [3, 3, 2]}
# Kinds whose default config is no model, or whose sizes depend on each other in a way of their own.
_OWN: Mapping[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gemma4_text": {"head_dim": 16, "global_head_dim": 32},
    "gemma4_unified_text": {"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1},
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "roc_bert": {"enable_pronunciation": False, "enable_shape": False},
    "phi4_multimodal": {
        "audio_config": {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 2, "num_attention_heads": 2}
        | dict.fromkeys(("ext_pw_out_channel", "depthwise_separable_out_channel", "nemo_conv_channels"), 32),
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "crop_size": 28}
        | {"num_attention_heads": 2, "image_size": 28},
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
}
_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "depth": 1}
_VISION |= {"num_heads": 2, "out_hidden_size": 64, "image_size": 28, "patch_size": 14}
WHOLE: Mapping[str, tuple[str, dict[str, Any]]] = {
    "emu3": (
        "emu3_text_model",
        {"vq_config": {"base_channels": 32, "channel_multiplier": [1, 1]}, "vocabulary_map": {"<image>": 120}},
    ),
    "fuyu": ("persimmon", {"image_size": 28, "patch_size": 14}),
    "gemma3": ("gemma3_text", {"vision_config": _VISION}),
    "gemma4": ("gemma4_text", {}),
    "gemma4_unified": ("gemma4_unified_text", {}),
    "got_ocr2": ("qwen2", {"vision_config": _VISION | {"output_channels": 32, "mlp_dim": 32}}),
    "llama4": ("llama4_text", {"vision_config": _VISION | {"vision_output_dim": 32}}),
    "qwen3_5": ("qwen3_5_text", {"vision_config": _VISION}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {"vision_config": _VISION}),
}
"""Kinds with images whose text part is served: the kind of their text, and other fields of a tiny config."""


def tiny_kind(kind: str) -> PreTrainedConfig:
    """The tiny config of a kind, which may have no model. Raises whatever transformers raises."""
    if kind in (*FAMILIES, *HYBRIDS, *LATENT):
        known = tiny_config(kind, initializer_range=_SPREAD)
        if known.model_type == kind:
            return known
    if kind in WHOLE:
        text, others = WHOLE[kind]
        return CONFIG_MAPPING[kind](text_config=tiny_kind(text).to_dict(), **others)
    default = CONFIG_MAPPING[kind]()
    values = default.to_dict()
    for name in _LAYERS:
        values.setdefault(name, getattr(default, name, None))
    changes: dict[str, Any] = {
        name: most for name, most in _SIZES.items() if type(values.get(name)) is int and values[name] > most
    }
    changes |= {name: size for name, size in _NEEDED.items() if name in values and values[name] is None}
    num_layers = next((values[name] for name in _LAYERS if type(values[name]) is int), 0)
    of_layers = {
        name: list(value)
        for name, value in values.items()
        if isinstance(value, list | tuple) and num_layers and len(value) == num_layers
    }
    firsts = [types.index(one) + 1 for types in of_layers.values() for one in types]
    kept = min(num_layers, _MOST_LAYERS, max([3, *firsts]))
    changes |= {name: types[:kept] for name, types in of_layers.items()}
    changes |= {name: kept for name in _LAYERS if name in default.to_dict()}
    if "is_decoder" in values and not values.get("is_encoder_decoder"):
        changes["is_decoder"] = True
    changes |= {"initializer_range": _SPREAD, "eos_token_id": VOCAB - 1, "tie_word_embeddings": False}
    changes |= {name: 0 for name in ("bos_token_id", "pad_token_id") if values.get(name) is not None}
    return CONFIG_MAPPING[kind](**{**changes, **_OWN.get(kind, {})})


def fill_zeros(module: nn.Module) -> None:
    """Give parameters random values that transformers leaves at zero, such as routers: a loader takes them for a file
    that was not written completely.
    """
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1 and not parameter.any():
                parameter.normal_(std=0.2)
