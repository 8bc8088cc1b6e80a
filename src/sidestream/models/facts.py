"""What a model's config says about serving it: its KV layout, its limits, and the reasons why it cannot be served.

Reads configs only, never weights, so that a hopeless model is refused before anything large is touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from sidestream.errors import ModelError
from sidestream.kv.layout import DTYPE_BYTES, KVLayout

_SERVED_LAYERS = {"full_attention", "sliding_attention"}
# Rotary frequencies that switch once a batch holds a longer context: KV would depend on a row's neighbours.
_SWITCHING_ROPE = {"dynamic", "longrope"}


def refuse_unservable(config: PreTrainedConfig) -> None:
    """Raise ModelError with the reason when the config alone shows that the model cannot be served right."""
    kind = config.model_type
    if config.is_encoder_decoder:
        raise ModelError(f"{kind} is an encoder-decoder: only decoder-only models are served")
    if config.get_text_config() is not config:
        raise ModelError(f"{kind} takes more than text: only text models are served")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"{kind} is no causal language model: only those are served")
    if getattr(config, "kv_lora_rank", None):
        raise ModelError(f"{kind} has latent attention (kv_lora_rank {config.kv_lora_rank}): its keys and values differ in shape")
    if getattr(config, "quantization_config", None):
        raise ModelError("its weights are quantised: load the model in bfloat16, float16 or float32")
    if getattr(config, "attention_chunk_size", None):
        raise ModelError(f"{kind} attends in chunks of {config.attention_chunk_size} tokens: only full and sliding attention are served")
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _SERVED_LAYERS)
    if others:
        raise ModelError(f"{kind} has layers of type {', '.join(others)}: only full and sliding attention are served")
    if any(getattr(model_class, "_is_stateful", False) for model_class in _classes(config)):
        raise ModelError(f"{kind} keeps recurrent state besides its KV: only attention layers are served")


def layout_of(config: PreTrainedConfig, *, dtype: str, block_tokens: int) -> KVLayout:
    """Shape of the model's KV blocks. Raises ModelError when layers differ or a size is missing."""
    if dtype not in DTYPE_BYTES:
        raise ModelError(f"its weights are {dtype}: choose one of {', '.join(DTYPE_BYTES)}")
    heads = _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads", heads)
    head_dim = _size(config, "head_dim", _size(config, "hidden_size") // heads)
    return KVLayout(_size(config, "num_hidden_layers"), kv_heads, head_dim, block_tokens, dtype)


def max_positions(config: PreTrainedConfig) -> int:
    """Positions that the model can be served at. Raises ModelError when the config gives no bound."""
    bound = _size(config, "max_position_embeddings")
    for rope in _ropes(getattr(config, "rope_parameters", None)):
        if rope.get("rope_type") in _SWITCHING_ROPE:
            bound = min(bound, rope.get("original_max_position_embeddings") or bound)
    return bound


def _size(config: PreTrainedConfig, name: str, default: int | None = None) -> int:
    size = getattr(config, name, None)
    size = default if size is None else size
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ModelError(f"config.json gives {name} as {size!r}: one whole number of 1 or more, the same for all layers, is needed")
    return size


def _ropes(parameters: Any) -> Iterator[dict[str, Any]]:
    """The config's rotary parameters; some models have one set for each type of layer."""
    if isinstance(parameters, dict):
        if "rope_type" in parameters:
            yield parameters
        else:
            for nested in parameters.values():
                yield from _ropes(nested)


def _classes(config: PreTrainedConfig) -> tuple[type, ...]:
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)
