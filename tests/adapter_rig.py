"""LoRA adapters in PEFT's format for tiny checkpoints, and the same as checkpoints with merged weights."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def make_adapter(model: Path, target: Path, seed: int, *, parts: tuple[str, ...] = ATTENTION, **config: Any) -> Path:
    """Write an adapter for the parts with these names. `config`: fields of PEFT's config."""
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "bias": "none", "target_modules": [*parts], **config}
    target.mkdir()
    (target / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    matrices = {}
    for name, weight in load_file(model / "model.safetensors").items():
        part = name.removesuffix(".weight")
        if part.rpartition(".")[2] in parts:
            for letter, shape in (("A", (config["r"], weight.shape[1])), ("B", (weight.shape[0], config["r"]))):
                key = f"base_model.model.{part}.lora_{letter}.weight"
                matrices[key] = torch.randn(*shape, generator=generator) * 0.2
    save_file(matrices, target / "adapter_model.safetensors")
    return target


def merge(model: Path, adapter: Path, target: Path) -> Path:
    """The checkpoint whose weights have the adapter in them."""
    shutil.copytree(model, target)
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    weights, matrices = load_file(target / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for key, down in matrices.items():
        if key.endswith(".lora_A.weight"):
            part = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            weights[f"{part}.weight"] += scale * matrices[key.replace("lora_A", "lora_B")] @ down
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def edit_adapter(adapter: Path, change: Callable[[str, Tensor], Tensor | None]) -> None:
    """Change or omit matrices."""
    file = adapter / "adapter_model.safetensors"
    changed = {name: change(name, tensor) for name, tensor in load_file(file).items()}
    save_file({name: tensor.contiguous() for name, tensor in changed.items() if tensor is not None}, file)
