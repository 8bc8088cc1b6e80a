"""Models of well-known shapes with random weights, for speed measurements without network access."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from sidestream.errors import ConfigError
from sidestream.models.adapter import PagedModel
from sidestream.models.config_checks import parts_of
from sidestream.models.fp8 import Fp8Linear
from sidestream.models.loader import quiet_transformers
from sidestream.tokenizer import Tokenizer
from sidestream_kv.config import unknown_name
from sidestream_kv.device.kinds import on_gpu
from sidestream_kv.kv.layout import KVLayout

_FILE_BYTES = 4 * 10**9
# This file is written last. A directory without it is incomplete.
_MARK = "random-weights.json"
_TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.model",
)


def _shape(kind: str, layers: int, hidden: int, inner: int, heads: tuple[int, int], **more: Any) -> Mapping[str, Any]:
    """Fields of a config: kind of model, number of layers, sizes of a token's state and of the MLP, numbers of query
    heads and of KV heads.
    """
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner}
    sizes |= {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    return {"model_type": kind, **sizes, **more}


def _config_of(shape: str) -> PreTrainedConfig:
    fields = {"tie_word_embeddings": False, **SHAPES[shape]}
    return CONFIG_MAPPING[fields.pop("model_type")](**fields)


_QWEN3 = {"vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960}
_LLAMA3 = {"vocab_size": 128256, "max_position_embeddings": 131072}
_TINY = {"vocab_size": 512, "head_dim": 16, "max_position_embeddings": 1024}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
_GROUPED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
_DELTA = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_PLAIN: Mapping[str, Mapping[str, Any]] = {
    "qwen3-8b": _shape("qwen3", 36, 4096, 12288, (32, 8), **_QWEN3),
    "qwen3-0.6b": _shape("qwen3", 28, 1024, 3072, (16, 8), **_QWEN3, tie_word_embeddings=True),
    # Like Qwen3-Next without experts: one layer in four has attention, the others a gated delta rule.
    "qwen3.5-9b": {"model_type": "qwen3_5_text", "max_position_embeddings": 40960},
    "tiny-hybrid": _shape("qwen3_5_text", 4, 64, 96, (2, 1), **_TINY, **_DELTA),
    "qwen3-32b": _shape("qwen3", 64, 5120, 25600, (64, 8), **_QWEN3),
    # Three quarters of its layers, because all of them do not fit one GPU of 80 GB with KV and captured graphs.
    "qwen3-32b-48-layers": _shape("qwen3", 48, 5120, 25600, (64, 8), **_QWEN3),
    # One layer in six attends to all tokens, the others to the last 1,024.
    "gemma3-4b": _shape(
        "gemma3_text",
        34,
        2560,
        10240,
        (8, 4),
        vocab_size=262208,
        head_dim=256,
        max_position_embeddings=40960,
        sliding_window=1024,
        tie_word_embeddings=True,
    ),
    # One layer in two attends to the last 128 tokens; 4 of 32 experts for each token.
    "gpt-oss-20b": _shape(
        "gpt_oss",
        24,
        2880,
        2880,
        (64, 8),
        vocab_size=201088,
        head_dim=64,
        max_position_embeddings=40960,
        num_local_experts=32,
        num_experts_per_tok=4,
        sliding_window=128,
        rope_parameters={"rope_type": "default", "rope_theta": 150_000.0},
    ),
    # 8 of 128 experts for each token.
    "qwen3-30b-a3b": _shape(
        "qwen3_moe",
        48,
        2048,
        6144,
        (32, 4),
        **_QWEN3,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
    ),
    # Latent attention; 4 of 64 experts for each token.
    "glm-4.7-flash": {"model_type": "glm4_moe_lite", "max_position_embeddings": 40960},
    # Latent attention; 6 of 64 experts for each token.
    "deepseek-v2-lite": _shape(
        "deepseek_v2",
        27,
        2048,
        10944,
        (16, 16),
        q_lora_rank=None,
        max_position_embeddings=40960,
        moe_intermediate_size=1408,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
    ),
    "tiny-latent": _shape(
        "deepseek_v3",
        2,
        64,
        96,
        (4, 4),
        **_LATENT,
        **_GROUPED,
        vocab_size=512,
        max_position_embeddings=1024,
        moe_intermediate_size=32,
    ),
    "tiny-windows": _shape("gemma3_text", 6, 64, 96, (2, 1), **_TINY, sliding_window=32),
    "tiny-two-heads": _shape("qwen3", 2, 64, 96, (4, 2), **_TINY),
    "tiny": _shape("qwen3", 2, 64, 96, (2, 1), **_TINY),
    "tiny-eight-heads": _shape("llama", 2, 128, 256, (8, 8), **_TINY),
    "llama-3.1-70b": _shape("llama", 80, 8192, 28672, (64, 8), **_LLAMA3, head_dim=128),
    "llama-3.2-1b": _shape("llama", 16, 2048, 8192, (32, 8), **_LLAMA3, head_dim=64, tie_word_embeddings=True),
}
_ROUNDED = ("qwen3-8b", "llama-3.1-70b", "tiny-eight-heads")
SHAPES: Mapping[str, Mapping[str, Any]] = {
    **_PLAIN,
    **{f"{shape}-fp8{suffix}": _PLAIN[shape] for shape in _ROUNDED for suffix in ("", "-blocks")},
}
"""Shapes by name: kind and fields of the config. All other fields have the defaults of the kind."""
_IN_BLOCKS = {shape: shape.endswith("blocks") for shape in SHAPES if "-fp8" in shape}
"""Shapes with projections in 8-bit floats, and whether their scales are those of blocks."""


def random_model(shape: str, *, device: torch.device, block_tokens: int = 16, seed: int = 0) -> PagedModel:
    """A model with one of the `SHAPES` in bfloat16 on `device`, with random weights from `seed`. Its outputs are
    meaningless, and never end with an end-of-sequence token.

    Raises ConfigError for an unknown shape.
    """
    module = random_module(shape, device=device, attention="eager", seed=seed)
    if (blocks := _IN_BLOCKS.get(shape)) is not None:
        _round_projections(module.base_model.layers, blocks=blocks)
    parts = parts_of(module.config, dtype="bfloat16", block_tokens=block_tokens)
    return PagedModel(
        module,
        name=shape,
        layout=replace(parts.kv, windows=_windows_of(module.config)),
        state_layout=parts.state,
        max_model_len=module.config.max_position_embeddings,
        eos_token_ids=(),
        fingerprint=f"random-{shape}-{seed}",
    )


def random_layout(shape: str, *, block_tokens: int = 16) -> KVLayout:
    """The layout of the KV of `random_model`, which this does not make."""
    config = _config_of(shape)
    parts = parts_of(config, dtype="bfloat16", block_tokens=block_tokens)
    return replace(parts.kv, windows=_windows_of(config))


def _round_projections(layers: nn.Module, *, blocks: bool) -> None:
    for parent in list(layers.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, Fp8Linear.of(child, blocks=blocks))


def _windows_of(config: Any) -> tuple[int, ...]:
    """See `KVLayout.windows`. The model is not checked, but its forward refuses a layer that attends further."""
    types = getattr(config, "layer_types", None) or ()
    windows = tuple(config.sliding_window if kind == "sliding_attention" else 0 for kind in types)
    return windows if any(windows) else ()


def random_module(
    shape: str, *, device: torch.device, attention: str = "sdpa", seed: int = 0, layers: int | None = None
) -> Any:
    """The same model as transformers builds it, with the given `attention`, and with all its layers or the first ones.
    Raises ConfigError for an unknown shape, and for more layers than it has.
    """
    if shape not in SHAPES:
        raise ConfigError(unknown_name("shape", shape, tuple(SHAPES)))
    config = _config_of(shape)
    if layers is not None:
        if not 1 <= layers <= config.num_hidden_layers:
            raise ConfigError(f"--layers is {layers}: give 1 to {config.num_hidden_layers}, which {shape} has")
        config.num_hidden_layers = layers
    with torch.random.fork_rng(devices=[device] if on_gpu(device) else []), device:
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention).eval()


def random_checkpoint(
    shape: str, directory: Path, *, tokenizer: Path, device: torch.device, seed: int = 0, layers: int | None = None
) -> None:
    """Write a checkpoint with one of the `SHAPES` in bfloat16, with random weights drawn on `device` and the tokenizer
    of another model's directory. `layers`: only so many layers; None: all.

    Every token of its greedy outputs has text, so a streamed answer has one piece per token. Special tokens, parts of
    characters and ids unknown to the tokenizer never have the largest logit. An existing directory with the same
    content is kept. Raises ConfigError for an unknown shape or a directory with other content, and ModelError for an
    unreadable tokenizer.
    """
    holds = {"shape": shape, "seed": seed, "tokenizer": str(tokenizer.resolve())}
    if layers is not None:
        holds["layers"] = layers
    mark = directory / _MARK
    if mark.exists() and json.loads(mark.read_text(encoding="utf-8")) == holds:
        return
    if directory.exists() and any(directory.iterdir()):
        raise ConfigError(
            f"{directory} does not hold random weights of {shape} with the tokenizer of {tokenizer}: name another one"
        )
    in_parts = shape in _IN_BLOCKS or shape.startswith("llama-3.1-70b")
    module = random_module(shape, device=torch.device("meta") if in_parts else device, seed=seed, layers=layers)
    words = Tokenizer.load(str(tokenizer))
    whole = [
        token for token in range(min(words.vocab_size, module.config.vocab_size)) if _is_whole(words.decode([token]))
    ]
    directory.mkdir(parents=True, exist_ok=True)
    if in_parts:
        _save_in_parts(module, directory, whole, device=device, seed=seed, blocks=_IN_BLOCKS.get(shape))
    else:
        _draw_only(module.get_output_embeddings().weight, whole)
        with quiet_transformers():
            module.save_pretrained(directory, max_shard_size="4GB")
    for pattern in _TOKENIZER_FILES:
        for file in tokenizer.glob(pattern):
            shutil.copy(file, directory)
    mark.write_text(json.dumps(holds), encoding="utf-8")
    del module
    gc.collect()  # it refers to itself, so its weights would stay on the device


def _save_in_parts(
    module: Any, directory: Path, token_ids: list[int], *, device: torch.device, seed: int, blocks: bool | None
) -> None:
    """Draw the weights of a module on the meta device one after another, and write them: a large model never is whole
    in memory. Matrices are drawn as transformers draws those of Llama and Qwen.

    token_ids   tokens that greedy outputs may have
    blocks      write projections in 8-bit floats, with scales of blocks (True) or rows (False); None: write none
    """
    needed = sum(weight.numel() * weight.element_size() for weight in module.parameters())
    needed //= 1 if blocks is None else 2
    if (free := shutil.disk_usage(directory).free) < needed:
        raise ConfigError(
            f"the weights take {needed / 1e9:.0f} GB, and {directory} has {free / 1e9:.0f} GB free: set TMPDIR to a "
            "larger disk, or choose a shape with -fp8"
        )
    scale, quantisation = "weight_scale", dict[str, Any](quant_method="fbgemm_fp8")
    if blocks:
        scale, quantisation = "weight_scale_inv", {"quant_method": "fp8", "weight_block_size": [128, 128]}
    generator, files, held, num_bytes = torch.Generator(device).manual_seed(seed), dict[str, str](), {}, 0
    names = [name for name, _ in module.named_parameters()]
    for name in names:
        weight = torch.empty(module.get_parameter(name).shape, dtype=torch.bfloat16, device=device)
        if weight.dim() < 2:
            weight.fill_(1.0)
        else:
            weight.normal_(0.0, module.config.initializer_range, generator=generator)
        if name == "lm_head.weight":
            _draw_only(weight, token_ids)
        if blocks is not None and name.endswith("_proj.weight"):
            linear = nn.Linear(1, 1, bias=False)
            linear.weight = nn.Parameter(weight, requires_grad=False)
            rounded = Fp8Linear.of(linear, blocks=blocks)
            held[name] = rounded.weight.cpu()
            held[f"{name.removesuffix('weight')}{scale}"] = (rounded.scale if blocks else rounded.scale[:, None]).cpu()
        else:
            held[name] = weight.cpu()
        num_bytes += held[name].nbytes
        if num_bytes > _FILE_BYTES or name == names[-1]:
            file = f"model-part-{len(set(files.values()))}.safetensors"
            save_file(held, directory / file, metadata={"format": "pt"})
            files |= dict.fromkeys(held, file)
            held, num_bytes = {}, 0
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}), encoding="utf-8")
    if blocks is not None:
        module.config.quantization_config = quantisation
    module.config.save_pretrained(directory)


def _is_whole(text: str) -> bool:
    return bool(text) and "\ufffd" not in text


def _draw_only(weight: torch.Tensor, token_ids: list[int]) -> None:
    """Replace the weight rows of all other tokens by rows of these tokens, divided by two. The logit of another token
    is then half of a logit of these tokens, so it is never the largest.

    Rows of zeros would have the same effect, but a GPU multiplies zeros faster than other numbers.
    """
    allowed = torch.tensor(token_ids, device=weight.device)
    others = torch.ones(weight.shape[0], dtype=torch.bool, device=weight.device)
    others[allowed] = False
    count = int(others.sum())
    with torch.no_grad():
        weight[others] = weight[allowed[torch.arange(count, device=weight.device) % len(allowed)]] / 2
