"""Finds the layers with latent attention (MLA) in a transformers model, and makes them pass latents to attention.

All of transformers' definitions compute keys and values from latents in one method, `expand_kv`, between the update of
their cache and the call of the attention function. `keep_latents` replaces this method: the attention function then
gets each token's latent as its key, and the rotated part of the key as its value. Called while a model is loaded.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import PreTrainedConfig

from sidestream.attention.latent import LatentHeads
from sidestream.models.text_part import causal_classes

_EXPAND = "expand_kv"
READ_BY_ATTENTION = "kv_b_proj"
"""Name of the projection from latents to keys and values. Attention reads its weight, so it stays a plain Linear."""

# Only kinds that were compared with transformers' `generate`. The others of transformers choose tokens by an index
# (sparse attention).
SERVED_LATENT = frozenset(
    {
        *("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear", "longcat_flash", "minicpm3"),
        *("mistral4", "youtu"),
    }
)


def has_latents(config: PreTrainedConfig) -> bool:
    """Whether transformers' definition of the model has latent attention."""
    return any(
        isinstance(part, type) and hasattr(part, _EXPAND)
        for model_class in causal_classes(config)
        for part in vars(sys.modules[model_class.__module__]).values()
    )


def keep_latents(module: torch.nn.Module) -> None:
    """Make the layers with latent attention in `module` pass latents to their attention function."""
    for part in module.modules():
        if hasattr(part, _EXPAND):
            setattr(part, _EXPAND, _as_given)


def _as_given(latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return latent, rotated


def latent_heads(part: Any) -> LatentHeads | None:
    """The matrices of an attention module that passes latents; None: the module passes keys and values."""
    if vars(part).get(_EXPAND) is not _as_given:
        return None
    weight = part.kv_b_proj.weight
    key_dim = part.qk_nope_head_dim
    return LatentHeads(weight.view(-1, key_dim + part.v_head_dim, part.kv_lora_rank), key_dim)


def keys_and_values(part: Any, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What transformers would pass to the attention function of `part` in place of these: keys and values."""
    if vars(part).get(_EXPAND) is not _as_given:
        return key, value
    expanded: tuple[torch.Tensor, torch.Tensor] = getattr(type(part), _EXPAND)(part, key, value)
    return expanded
