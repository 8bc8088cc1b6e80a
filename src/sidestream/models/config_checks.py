"""Checks of a model's config: its KV layout, its maximum position, and the reasons for which it cannot be served.

Reads configs and transformers' definition of the model but no weights, so refusals come before any large read. Error
messages say "its" for the model, because `loader.naming_model` puts the model's name in front.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from sidestream.errors import ModelError
from sidestream.models.latent import SERVED_LATENT, has_latents
from sidestream.models.layer_heads import HeadSizes, LayerHeads, divided_heads
from sidestream.models.quantised import formats_of
from sidestream.models.recurrent import NO_LIMIT, attention_layers, keeps_state, skeleton, state_layout_of
from sidestream.models.text_part import TEXT_ALONE, causal_classes, text_config
from sidestream.models.traced import TRACED
from sidestream_kv.kv.layout import DTYPE_BYTES, KVLayout
from sidestream_kv.kv.state_layout import StateLayout

_SERVED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
# More types of layers in models with recurrent state. Some have state, some have state and attention, some neither.
_STATEFUL_LAYERS = {"linear_attention", "conv", "mamba", "hybrid", "mlp", "moe"}
# With these types, rotary frequencies depend on the longest sequence of a batch, so a row's KV would depend on other
# rows.
_SWITCHING_ROPE = {"dynamic", "longrope"}
_UNBOUNDED = 131_072  # positions of a model without any, whose config gives no bound
_UNUSED_WIDTH = 16  # the smallest of attention on a GPU
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Nested configs that describe parts of a decoder. Any other nested config describes another model, such as an encoder.
_PARTS = {"attn_config", "ffn_config"}
# The decoder half of an encoder-decoder has these sizes in its config, even where is_encoder_decoder is false.
_DECODER_SIZES = ("decoder_attention_heads", "num_decoder_attention_heads")
# Models that use transformers' attention interface in ways that their config does not show.
_OWN_ATTENTION: Mapping[str, str] = {
    "diffllama": (
        "attends twice in each layer and subtracts (differential attention): only one attention per layer is served"
    ),
    "doge": "masks its attention by values that it computes (dynamic masks): only causal and sliding masks are served",
    "zaya": "convolves queries and keys before it attends, from a state of its own: only recurrent layers keep state",
    **dict.fromkeys(
        ("big_bird", "megatron-bert", "rembert", "roformer"),
        "attends in both directions in transformers, even as a decoder: only causal attention is served",
    ),
    "hrm_text": "runs the same layers several times for each token: only models that run each layer once are served",
}


def check_servable(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the model's text part. Raises ModelError with the reason if the config shows that the model cannot
    be served correctly.
    """
    if quantisation := getattr(config, "quantization_config", None):
        formats_of(quantisation)  # raises ModelError for a format that is not supported
    config = text_config(config)
    if reason := _refusal_by_type(config) or _refusal_by_fields(config) or _refusal_by_definition(config):
        raise ModelError(reason)
    return config


@dataclass(frozen=True, slots=True)
class ModelParts:
    """Layouts of a model's KV and recurrent state.

    kv      layout of one block's KV. A model that does not attend has one small layer, which nothing reads or writes:
            blocks still count its tokens
    state   layout of one sequence's recurrent state; None: the model has none
    """

    kv: KVLayout
    state: StateLayout | None


def parts_of(config: PreTrainedConfig, *, dtype: str, block_tokens: int) -> ModelParts:
    """Layouts of KV and recurrent state of a model that `check_servable` accepts. Raises ModelError."""
    if not has_recurrent_states(config):
        return ModelParts(layout_of(config, dtype=dtype, block_tokens=block_tokens), None)
    module = skeleton(config, dtype)
    layers = attention_layers(module)
    if (not layers and attends(config)) or len({*layers}) < len(layers):
        raise ModelError(
            f"{config.model_type} has attention in layers {layers}: "
            "a model with recurrent state attends at most once per layer, or not at all"
        )
    layout = layout_of(config, dtype=dtype, block_tokens=block_tokens, num_layers=len(layers))
    return ModelParts(layout, state_layout_of(module, config))


def layout_of(config: PreTrainedConfig, *, dtype: str, block_tokens: int, num_layers: int | None = None) -> KVLayout:
    """Shape of the model's KV blocks. Raises ModelError when layers differ or a size is missing.

    num_layers   number of layers with attention; None: all layers of the config
    """
    if dtype not in DTYPE_BYTES:
        raise ModelError(f"its weights are {dtype}: choose one of {', '.join(DTYPE_BYTES)}")
    if not attends(config):
        return KVLayout(1, 1, _UNUSED_WIDTH, block_tokens, dtype)
    num_layers = _size(config, "num_hidden_layers") if num_layers is None else num_layers
    if config.model_type == "longcat_flash":  # each of its layers attends twice
        num_layers = 2 * _size(config, "num_layers")
    if has_latents(config):
        latent_dim = _size(config, "kv_lora_rank")
        width = latent_dim + _size(config, "qk_rope_head_dim")
        return KVLayout(num_layers, 1, width, block_tokens, dtype, latent_dim=latent_dim)
    if places := layer_heads(config):
        pool_layers = max(place.layers.stop for place in places)
        return KVLayout(pool_layers, places[0].kv_heads, places[0].head_dim, block_tokens, dtype)
    heads = _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads", heads)
    if config.model_type == "falcon":  # `num_kv_heads` counts in some of its models only
        shared = config.multi_query and not config.new_decoder_architecture
        kv_heads = 1 if shared else _size(config, "num_kv_heads", heads)
    if config.model_type == "jetmoe":  # its attention copies keys and values for each expert of a token
        kv_heads *= _size(config, "num_experts_per_tok")
    head_dim = _size(config, "head_dim", _size(config, "hidden_size") // heads)
    return KVLayout(num_layers, kv_heads, head_dim, block_tokens, dtype)


def layer_heads(config: PreTrainedConfig) -> tuple[LayerHeads, ...]:
    """Where each layer's heads lie if layers differ in their attention, or keys and values in size, or if layers read
    the KV of others; empty: all layers are alike, and each has KV of its own.
    """
    kv_heads, dims = (_of_layers(config, name) for name in ("num_key_value_heads", "head_dim"))
    values, types = dims, getattr(config, "layer_types", None)
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    if config.model_type == "mimo_v2_flash":
        kv_heads = [kv_heads[0] * (1 + (kind == "sliding_attention")) for kind in config.layer_types]
        values = [config.v_head_dim]
    if not types or (not shared and all(one == of[0] for of in (kv_heads, [*dims, *values]) for one in of)):
        return ()
    own = max(0, len(types) - shared)
    sizes = [HeadSizes(*(of[layer % len(of)] for of in (kv_heads, dims, values))) for layer in range(len(types))]
    # A layer without KV reads that of the last layer of its type that has some.
    last = {kind: layer for layer, kind in enumerate(types[:own])}
    if missing := ", ".join(sorted({*types} - {*last})):
        raise ModelError(
            f"{config.model_type} has no {missing} layer with KV of its own: its {shared} last layers read the KV of "
            "others (num_kv_shared_layers)"
        )
    return divided_heads(sizes, [layer if layer < own else last[kind] for layer, kind in enumerate(types)])


def max_positions(config: PreTrainedConfig, *, max_model_len: int | None = None) -> int:
    """Largest number of positions that the model can serve, if requests have up to `max_model_len` tokens (None: no
    limit). It depends on the type of the rotary embedding:

    YaRN       scales all positions alike: the original bound times the factor, or the config's bound if that is larger
    LongRoPE   has two sets of frequencies, and `takes_long_rope` chooses one set for all requests. The short set is
               valid up to `original_max_position_embeddings`
    dynamic    (NTK scaling) changes the frequencies with the length: the bound is the length at which scaling begins,
               or `scaled_length`, whose frequencies are then used for all requests

    Positions that `counted_token` leaves out do not count. Raises ModelError when the config gives no bound.
    """
    declared = bound = _size(config, "max_position_embeddings", _length_without_positions(config))
    for rope in _ropes(config):
        before = rope.get("original_max_position_embeddings") or declared
        if rope["rope_type"] == "yarn":
            bound = max(bound, int(before * (rope.get("factor") or 1)))
        elif length := scaled_length(config, max_model_len=max_model_len):
            bound = length
        elif rope["rope_type"] in _SWITCHING_ROPE and not takes_long_rope(config, max_model_len=max_model_len):
            bound = min(bound, before)
    padding = counted_token(config)
    return bound if padding is None else bound - padding - 1


def _length_without_positions(config: PreTrainedConfig) -> int | None:
    """The bound of a model whose config needs none, because it has no positions; None: another model."""
    if config.model_type == "mpt":
        return _size(config, "max_seq_len")
    return None if attends(config) and config.model_type != "bloom" else _UNBOUNDED


def scaled_length(config: PreTrainedConfig, *, max_model_len: int | None) -> int | None:
    """The length whose frequencies all requests get, if they need dynamic NTK scaling for up to `max_model_len` tokens;
    None: they do not, or do not say so.
    """
    (rope, *others) = [*_ropes(config)] or [{}]
    if others or rope.get("rope_type") != "dynamic" or max_model_len is None:
        return None
    declared = _size(config, "max_position_embeddings")
    return min(max_model_len, int(declared * rope["factor"])) if max_model_len > declared else None


def takes_long_rope(config: PreTrainedConfig, *, max_model_len: int | None) -> bool:
    """Whether requests of up to `max_model_len` tokens (None: no limit) need LongRoPE's long factors."""
    ropes = [rope for rope in _ropes(config) if rope["rope_type"] == "longrope"]
    # PhiMoE's definition never uses the long factors, only their scale.
    if not ropes or any("short_mscale" in rope for rope in ropes):
        return False
    longest = _size(config, "max_position_embeddings")
    wanted = longest if max_model_len is None else min(max_model_len, longest)
    return wanted > min(rope.get("original_max_position_embeddings") or longest for rope in ropes)


def _refusal_by_type(config: PreTrainedConfig) -> str | None:
    """The reason why the model is not a text decoder, or None."""
    kind = config.model_type
    if config.is_encoder_decoder or any(hasattr(config, size) for size in _DECODER_SIZES):
        return f"{kind} is an encoder-decoder, or half of one: only decoder-only models are served"
    if config.get_text_config() is not config:
        return f"{kind} takes more than text: only text models are served"
    if kind not in TEXT_ALONE and (parts := [part for part in config.sub_configs if part not in _PARTS]):
        return f"{kind} consists of several models ({', '.join(parts)}): only models that take text alone are served"
    if not causal_classes(config):
        return f"{kind} is no causal language model: only causal language models are served"
    return None


def _refusal_by_fields(config: PreTrainedConfig) -> str | None:
    """The reason that follows from a field of the config, or None."""
    kind = config.model_type
    if (rank := _of_any_layer(config, "kv_lora_rank")) and kind not in SERVED_LATENT:
        return (
            f"{kind} has latent attention (kv_lora_rank {rank}) of a kind that was not compared, or that chooses its "
            f"tokens by an index: latent attention is served for {', '.join(sorted(SERVED_LATENT))}"
        )
    types, stateful = set(getattr(config, "layer_types", None) or ()), has_recurrent_states(config)
    served = _SERVED_LAYERS | _STATEFUL_LAYERS if stateful else _SERVED_LAYERS
    if others := sorted(types - served):
        return f"{kind} has layers of type {', '.join(others)}: only {', '.join(sorted(served))} are served"
    # At this point, a config with `layer_types` has only attention layers.
    if (
        not stateful
        and not types
        and any(getattr(model_class, "_is_stateful", False) for model_class in causal_classes(config))
    ):
        return f"{kind} keeps recurrent state besides its KV: only attention layers are served"
    experts = max((number for name in _EXPERTS for number in _of_layers(config, name) if number), default=0)
    for chosen in _of_layers(config, "num_experts_per_tok"):
        if experts and isinstance(chosen, int) and not 1 <= chosen <= experts:  # ggml's kernels divide by it
            return (
                f"config.json gives num_experts_per_tok as {chosen}: a token may choose 1 to {experts}, the number of "
                "experts; correct it"
            )
    limit = getattr(config, "time_step_limit", None) if stateful else None
    if limit is not None and tuple(limit) != NO_LIMIT:
        return (
            f"{kind} bounds the time steps of its recurrent layers (time_step_limit {list(limit)}), but transformers "
            "does so in prompts only: a token would change the state differently when it is generated. Only "
            "[0, Infinity] is served"
        )
    if getattr(config, "alibi", False):
        return f"{kind} rounds what it adds to attention by distance (ALiBi) to bfloat16: only exact slopes are served"
    return f"{kind} {_OWN_ATTENTION[kind]}" if kind in _OWN_ATTENTION else None


def _refusal_by_definition(config: PreTrainedConfig) -> str | None:
    """The reason that follows from transformers' modelling code, or None."""
    kind = config.model_type
    for model_class in causal_classes(config):
        definition = vars(sys.modules[model_class.__module__])
        if "ALL_ATTENTION_FUNCTIONS" not in definition and kind not in TRACED:
            if has_recurrent_states(config):
                return None  # it does not attend
            return (
                f"{kind} has attention code of its own in transformers that was not compared: models that attend "
                f"through transformers' AttentionInterface are served, and {', '.join(sorted(TRACED))}"
            )
    if counted_token(config) is not None and max_positions(config) < 1:
        return (
            f"{kind} counts positions from its padding token's id on (pad_token_id {config.pad_token_id}), but has "
            f"only {config.max_position_embeddings} (max_position_embeddings): correct config.json"
        )
    return None


def counted_token(config: PreTrainedConfig) -> int | None:
    """The padding token's id, if transformers' definition counts a sequence's positions from the next number on (in
    RoBERTa, for example), and leaves this token out of the count; None: the first position is 0. Raises ModelError.
    """
    parts = (part for one in causal_classes(config) for part in vars(sys.modules[one.__module__]).values())
    if not any(isinstance(part, type) and hasattr(part, "create_position_ids_from_input_ids") for part in parts):
        return None
    if not isinstance(config.pad_token_id, int) or config.pad_token_id < 0:
        raise ModelError(
            f"{config.model_type} counts positions from its padding token's id on, but config.json gives pad_token_id "
            f"as {config.pad_token_id!r}: a token's id is needed"
        )
    return config.pad_token_id


def attends(config: PreTrainedConfig) -> bool:
    """Whether transformers' definition of the model has attention."""
    return not has_recurrent_states(config) or any(
        "ALL_ATTENTION_FUNCTIONS" in vars(sys.modules[one.__module__]) for one in causal_classes(config)
    )


def has_recurrent_states(config: PreTrainedConfig) -> bool:
    """Whether layers of the model keep recurrent state in transformers' cache. In some models, the config decides."""
    types = getattr(config, "layer_types", None)
    if types is not None and _SERVED_LAYERS.issuperset(types):
        return False
    return any(
        keeps_state(part)
        for model_class in causal_classes(config)
        for part in vars(sys.modules[model_class.__module__]).values()
        if isinstance(part, type)
    )


def _of_layers(config: PreTrainedConfig, name: str) -> list[Any]:
    """A field's value, or its value for each layer if layers differ."""
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else (config,)
    return [getattr(layer, name, None) for layer in layers]


def _of_any_layer(config: PreTrainedConfig, name: str) -> Any:
    return next(filter(None, _of_layers(config, name)), None)


def _size(config: PreTrainedConfig, name: str, default: int | None = None) -> int:
    sizes = _of_layers(config, name)
    if any(size != sizes[0] for size in sizes):
        found = ", ".join(map(str, sorted(set(sizes), key=str)))
        raise ModelError(
            f"{config.model_type} has layers whose {name} differs ({found}): all layers must be alike in size"
        )
    size = default if sizes[0] is None else sizes[0]
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ModelError(
            f"config.json gives {name} as {size!r}: one whole number of 1 or more, the same for all layers, is needed"
        )
    return size


def _ropes(config: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """The config's sets of rotary parameters; some models have one set for each type of layer."""

    def within(parameters: Any) -> Iterator[dict[str, Any]]:
        if isinstance(parameters, dict):
            if "rope_type" in parameters:
                yield parameters
            else:
                for nested in parameters.values():
                    yield from within(nested)

    yield from within(getattr(config, "rope_parameters", None))
