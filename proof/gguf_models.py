"""Writes GGUF files with random weights, for tests and benchmarks: blocks of random bits, so that nothing is quantised.

A file has the metadata that llama.cpp needs, without a vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray

from proof.tiny_models import byte_tokenizer
from sidestream.models.gguf_file import MODEL_TYPES, QUANTISED, TENSOR_NAMES

_KINDS = {kind.name: kind for kind in QUANTISED}
# Places of the scales in a block, float16, and the standard deviation of its values over the first scale; a second
# scale belongs to the smallest value, and is that many times the first one.
_SCALES: dict[str, tuple[tuple[int, ...], float, float]] = {
    "Q4_0": ((0,), 4.6, 0),
    "Q4_1": ((0, 2), 4.6, -7.5),
    "Q5_0": ((0,), 9.2, 0),
    "Q5_1": ((0, 2), 9.2, -15.5),
    "Q8_0": ((0,), 74.0, 0),
    "Q2_K": ((80, 82), 15.0, 1.5),
    "Q3_K": ((108,), 42.0, 0),
    "Q4_K": ((0, 2), 270.0, 7.5),
    "Q5_K": ((0, 2), 540.0, 15.5),
    "Q6_K": ((208,), 1370.0, 0),
    "IQ4_NL": ((0,), 70.0, 0),
    "IQ4_XS": ((0,), 1300.0, 0),
}
_MXFP4_SPREAD = 2.9
_QKV = ("attn_q", "attn_k", "attn_v")
_BIASES = {
    **{"qwen2": _QKV, "qwen2_moe": _QKV},
    "gpt_oss": (*_QKV, "attn_output", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
}


def random_blocks(kind: str, rows: int, columns: int, random: np.random.Generator, *, deviation: float) -> NDArray[Any]:
    """Bytes of `rows` rows of values with about this standard deviation, uint8 `[rows, bytes]`."""
    how = _KINDS[kind]
    blocks = random.integers(0, 256, (rows * columns // how.values, how.num_bytes), dtype=np.uint8)
    if kind == "MXFP4":  # its scale is a power of two
        blocks[:, 0] = 127 + np.rint(np.log2(deviation / _MXFP4_SPREAD)) + random.integers(-1, 1, len(blocks))
        return blocks.reshape(rows, -1)
    places, spread, low = _SCALES[kind]
    scale = random.uniform(0.5, 1.5, len(blocks)) * deviation / spread
    for place, factor in zip(places, (1.0, low), strict=False):
        blocks[:, place : place + 2] = (scale * factor).astype(np.float16).view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def gguf_model_dir(config: Any, directory: Path, kinds: dict[str, str], seed: int) -> Path:
    """A directory that Sidestream serves: config, a byte-level tokenizer and `model.gguf`. Returns `directory`."""
    config.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    write_gguf(config, directory / "model.gguf", kinds, seed)
    return directory


def write_gguf(config: Any, path: Path, kinds: dict[str, str], seed: int, *, tensors: int = 0) -> Path:
    """A file for a config of one of the kinds in `MODEL_TYPES`. Returns `path`.

    kinds     how matrices are stored, by GGUF's names of them (`attn_q`); "": how all others are
    tensors   most tensors of a file, of which there are then several, as llama-gguf-split names them
    """
    architecture = next(name for name, kinds in MODEL_TYPES.items() if config.model_type in kinds)
    writer = GGUFWriter(path, architecture, split_max_tensors=tensors)
    random = np.random.default_rng(seed)
    _add_metadata(writer, config)
    shapes = dict(_shapes(config))
    for name, shape in shapes.items():
        kind = _kind(name, shape, kinds)
        dtype = np.dtype(np.uint8 if kind in _KINDS else np.float32)
        width = shape[-1] // _KINDS[kind].values * _KINDS[kind].num_bytes if kind in _KINDS else shape[-1]
        stored = (*shape[:-1], width)
        num_bytes = int(np.prod(stored)) * dtype.itemsize
        writer.add_tensor_info(name, stored, dtype, num_bytes, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape in shapes.items():
        writer.write_tensor_data(_values(name, shape, _kind(name, shape, kinds), random))
    writer.close()
    return path


def _add_metadata(writer: GGUFWriter, config: Any) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_rope_dimension_count(_head_dim(config))
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("no_vocab")
    if experts := _num_experts(config):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
        if shared := getattr(config, "shared_expert_intermediate_size", 0):
            writer.add_expert_shared_feed_forward_length(shared)
    if config.model_type in ("gemma2", "gemma3_text", "gpt_oss"):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _num_experts(config: Any) -> int:
    return int(getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0))


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _shapes(config: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner, head = config.hidden_size, config.intermediate_size, _head_dim(config)
    query, key = config.num_attention_heads * head, config.num_key_value_heads * head
    gpt_oss = config.model_type == "gpt_oss"
    of_layer: dict[str, tuple[int, ...]] = {
        **{"attn_norm": (width,), "attn_q": (query, width), "attn_k": (key, width), "attn_v": (key, width)},
        **{"attn_output": (width, query), "post_attention_norm" if gpt_oss else "ffn_norm": (width,)},
    }
    if gpt_oss:
        of_layer |= {"attn_sinks": (config.num_attention_heads,)}
    if config.model_type in ("qwen3", "qwen3_moe", "gemma3_text"):
        of_layer |= {"attn_q_norm": (head,), "attn_k_norm": (head,)}
    if config.model_type in ("gemma2", "gemma3_text"):
        of_layer |= {"post_attention_norm": (width,), "post_ffw_norm": (width,)}
    if experts := _num_experts(config):
        inner = getattr(config, "moe_intermediate_size", inner)
        of_layer |= {"ffn_gate_inp": (experts, width)} | _mlp("_exps", width, inner, experts)
        if shared := getattr(config, "shared_expert_intermediate_size", 0):
            of_layer |= {"ffn_gate_inp_shexp": (width,)} | _mlp("_shexp", width, shared)
    else:
        of_layer |= _mlp("", width, inner)
    yield "token_embd.weight", (config.vocab_size, width)
    for layer in range(config.num_hidden_layers):
        for name, shape in of_layer.items():
            yield f"blk.{layer}.{name}.weight", shape
            if name in _BIASES.get(config.model_type, ()):
                yield f"blk.{layer}.{name}.bias", shape[:-1]
    yield "output_norm.weight", (width,)
    if not config.tie_word_embeddings:
        yield "output.weight", (config.vocab_size, width)


def _mlp(end: str, width: int, inner: int, *experts: int) -> dict[str, tuple[int, ...]]:
    up, down = (*experts, inner, width), (*experts, width, inner)
    return {f"ffn_gate{end}": up, f"ffn_up{end}": up, f"ffn_down{end}": down}


def _kind(name: str, shape: tuple[int, ...], kinds: dict[str, str]) -> str:
    base = name.rsplit(".", 2)[-2]
    assert base in TENSOR_NAMES
    plain = len(shape) == 1 or base == "ffn_gate_inp" or name.endswith("bias")
    return "F32" if plain else kinds.get(base, kinds[""])


def _values(name: str, shape: tuple[int, ...], kind: str, random: np.random.Generator) -> NDArray[Any]:
    if kind in _KINDS:
        *stack, rows, columns = shape
        blocks = random_blocks(kind, math.prod(stack) * rows, columns, random, deviation=columns**-0.5)
        return blocks.reshape(*stack, rows, -1)
    drawn = random.normal(0, 0.1, shape).astype(np.float32)
    return 1 + drawn if name.endswith("norm.weight") else drawn
