"""Changes of checkpoints, and what a load refuses of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from sidestream.errors import ModelError
from sidestream.models import load_model

Tensors = dict[str, Tensor]


def refused(call: Callable[[], object]) -> str:
    """The message of the ModelError that a call raises."""
    with pytest.raises(ModelError) as caught:
        call()
    return str(caught.value)


def refusal(directory: Path | str, **options: Any) -> str:
    """Why a load refuses the checkpoint."""
    return refused(lambda: load_model(str(directory), block_tokens=4, **options))


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **changes}))


def edit_weights(directory: Path, change: Callable[[Tensors], object]) -> None:
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def shard(directory: Path, files: int = 2, *, repeat: str = "") -> None:
    """The same weights in several files, of which each holds the tensor `repeat`."""
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map = {}
    for index in range(files):
        file = f"model-{index + 1:05}-of-{files:05}.safetensors"
        part = {name: weights[name] for at, name in enumerate(sorted(weights)) if at % files == index or name == repeat}
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def edit_index(directory: Path, keep: Callable[[str, str], bool]) -> None:
    """Leave only those entries (tensor, file) in the index of a sharded checkpoint."""
    index = directory / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    edit_json(index, weight_map={name: file for name, file in weight_map.items() if keep(name, file)})
