"""Models of well-known shapes with random weights, made where they run: for measuring speed where there is no network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from sidestream.config import unknown_name
from sidestream.errors import ConfigError
from sidestream.models.adapter import PagedModel
from sidestream.models.facts import layout_of

_QWEN3 = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 40960}
SHAPES: Mapping[str, tuple[type[Any], Mapping[str, Any]]] = {
    "qwen3-8b": (
        Qwen3Config,
        {**_QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    ),
    "qwen3-0.6b": (
        Qwen3Config,
        {
            **_QWEN3,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "tie_word_embeddings": True,
        },
    ),
    "tiny": (
        Qwen3Config,
        {
            "vocab_size": 512,
            "head_dim": 16,
            "num_key_value_heads": 1,
            "max_position_embeddings": 1024,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        },
    ),
    "llama-3.2-1b": (
        LlamaConfig,
        {
            "vocab_size": 128256,
            "head_dim": 64,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "tie_word_embeddings": True,
        },
    ),
}
"""By name: the config's class and what it says. All else is the class's own."""


def random_model(shape: str, *, device: torch.device, block_tokens: int = 16, seed: int = 0) -> PagedModel:
    """A model of one of `SHAPES` in bfloat16 on `device`, weights drawn from `seed`. Its answers mean nothing, and never end by themselves.

    Raises ConfigError for an unknown shape.
    """
    module = random_module(shape, device=device, attention="eager", seed=seed)
    return PagedModel(
        module,
        name=shape,
        layout=layout_of(module.config, dtype="bfloat16", block_tokens=block_tokens),
        max_model_len=module.config.max_position_embeddings,
        eos_token_ids=(),
        fingerprint=f"random-{shape}-{seed}",
    )


def random_module(shape: str, *, device: torch.device, attention: str = "sdpa", seed: int = 0) -> Any:
    """The same as transformers has it, with `attention` of its own. Raises ConfigError for an unknown shape."""
    if shape not in SHAPES:
        raise ConfigError(unknown_name("shape", shape, tuple(SHAPES)))
    kind, fields = SHAPES[shape]
    config = kind(**{"tie_word_embeddings": False, **fields})
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention).eval()
