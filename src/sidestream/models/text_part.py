"""The text part of models that also take images or audio: transformers loads the whole model, and the decoder with its
output matrix is served. Error messages say "its" for the model, because `loader.naming_model` puts the model's name in
front.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import (
    Emu3ForCausalLM,
    Mistral4ForCausalLM,
    PreTrainedConfig,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

# Only kinds that were compared: a tiny model of each gives the logits of the whole model, bit by bit. Others may attend
# to a prompt in both directions (paligemma) or scale their logits differently (aya_vision).
_SERVED = frozenset(
    {
        *("aria", "deepseek_vl", "emu3", "exaone4_5", "fuyu", "gemma3", "gemma4", "gemma4_unified"),
        *("got_ocr2", "idefics2", "idefics3", "internvl", "janus", "kimi_k25", "lfm2_vl", "lighton_ocr", "llama4"),
        *("llava", "llava_next", "llava_onevision", "mistral3", "ovis2", "qwen2_5_vl", "qwen2_vl", "qwen3_5"),
        *("qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "video_llava", "vipllava"),
    }
)
TEXT_ALONE: Mapping[str, str] = {"phi4_multimodal": "embed_tokens_extend"}
"""Kinds whose decoder puts images and audio into the embeddings of its text itself, and its module that does so."""
# Text parts that transformers maps to no causal model, and the causal model whose frame they fit into: embeddings,
# layers and norm are those of the part.
_FRAMES: Mapping[str, type[Any]] = {
    "emu3_text_model": Emu3ForCausalLM,
    "mistral4": Mistral4ForCausalLM,
    "qwen2_vl_text": Qwen2ForCausalLM,
    "qwen2_5_vl_text": Qwen2ForCausalLM,
    "qwen3_vl_text": Qwen3ForCausalLM,
    "qwen3_vl_moe_text": Qwen3MoeForCausalLM,
}


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the text part, if it is served; otherwise the same config."""
    if config.model_type not in _SERVED:
        return config
    text: PreTrainedConfig = config.get_text_config(decoder=True)
    if text is not config and getattr(text, "dtype", None) is None:
        text.dtype = config.dtype
    return text


def causal_classes(config: PreTrainedConfig) -> tuple[type[Any], ...]:
    """Transformers' causal models for a config of text; empty: there is none."""
    if config.model_type in _FRAMES:
        return (_FRAMES[config.model_type],)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return ()
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def whole_class(config: PreTrainedConfig) -> type[Any]:
    """Transformers' model for the config of a checkpoint."""
    if text_config(config) is not config:
        whole: type[Any] = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
        return whole
    named = getattr(config, "architectures", None) or ()
    classes = causal_classes(config)
    return next((one for one in classes if one.__name__ in named), classes[0])


def text_module(whole: Any) -> Any:
    """The causal model with the decoder and the output matrix of a whole model."""
    decoder = whole.get_decoder()
    config = decoder.config
    (frame, *_) = causal_classes(config)
    if isinstance(decoder, frame):  # Llama 4's whole model has a whole causal model
        decoder.generation_config = whole.generation_config
        return find_base_model(decoder)
    with torch.device("meta"):
        module = find_base_model(frame(frame.config_class() if config.model_type in _FRAMES else config))
    setattr(module, module.base_model_prefix, decoder)
    module.set_output_embeddings(whole.get_output_embeddings())
    if not hasattr(config, "output_router_logits"):
        config.output_router_logits = False  # read by frames with experts
    module.config = config
    module.generation_config = whole.generation_config
    return module


def find_base_model(module: Any) -> Any:
    """`module`, whose `base_model` is its decoder, for text alone. Llama 4's class looks for it under a wrong name."""
    if module.base_model is module and hasattr(module, "model"):
        module.base_model_prefix = "model"
    if module.config.model_type in TEXT_ALONE:
        setattr(module.base_model, TEXT_ALONE[module.config.model_type], _Embedded())
    return module


class _Embedded(nn.Module):
    """In place of a module that adds images to the embeddings of text."""

    def forward(self, tokens: torch.Tensor, embedded: torch.Tensor, **_: Any) -> torch.Tensor:
        return embedded
