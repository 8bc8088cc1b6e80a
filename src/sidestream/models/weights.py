"""Weights as files, as an identity, and as the processor likes them.

Called while a model loads, on the loading thread.
"""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from torch import nn

from sidestream.errors import ModelError

_INDEX = "model.safetensors.index.json"
# Facts of a config that leave every number of a forward as it is, or that the hash holds otherwise.
_NOT_IDENTITY = {"_name_or_path", "architectures", "dtype", "torch_dtype", "id2label", "label2id", "use_cache"}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelError that names the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}: give a directory that transformers saved, or fetch the file") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({error}): fetch it again") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} holds a {type(found).__name__}, not a JSON object: fetch it again")
    return found


def check_files(directory: Path) -> None:
    """Raise ModelError that names the file when a weight file is missing, cut off or not a safetensors file. Reads headers only."""
    for path in _weight_files(directory):
        _check_file(path)


def _weight_files(directory: Path) -> list[Path]:
    names = {"model.safetensors"}
    if not (directory / "model.safetensors").exists() and (directory / _INDEX).exists():
        weight_map = read_json(directory / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{directory / _INDEX} lists no weights: fetch it again")
        names = set(weight_map.values())
    return [directory / name for name in sorted(names)]


def _check_file(path: Path) -> None:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
            header = json.loads(file.read(min(header_bytes, size)))
        expected = 8 + header_bytes + max((entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"), default=0)
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}: fetch the weights, in safetensors format") from None
    except (OSError, ValueError, AttributeError, KeyError, TypeError, IndexError):
        raise ModelError(f"{path} is no readable safetensors file: fetch it again") from None
    if size != expected:
        raise ModelError(f"{path} has {size} bytes, its header tells {expected}: it is not complete, fetch it again")


def fingerprint_of(module: Any, *, variant: str = "") -> str:
    """128 bits, in hex, of everything that the module's KV depends on: definition, config, dtypes and every loaded weight.

    variant: what was changed in the module that none of these tells.

    Hashes what was loaded, not the files: names, dates and the way that weights are split over files do not matter. xxh3
    reads memory about as fast as it can be read; it finds differences, not forgeries.
    """
    config = {name: value for name, value in module.config.to_dict().items() if name not in _NOT_IDENTITY}
    # The config holds transformers' version too, for a newer one may define the model anew.
    facts = {"class": type(module).__name__, "config": config}
    digest = xxhash.xxh3_128(json.dumps(facts, sort_keys=True, default=_listed).encode() + variant.encode())
    hashed: set[tuple[int, torch.Size]] = set()
    for name, tensor in sorted(module.state_dict().items()):
        if (tensor.data_ptr(), tensor.shape) not in hashed:
            hashed.add((tensor.data_ptr(), tensor.shape))
            _hash(digest, name, tensor)
    return digest.hexdigest()


# Of each tensor, and of each of its dimensions but the last, from either end.
_SAMPLED_ROWS = 4


def digest_of_files(directory: Path) -> str:
    """128 bits, in hex, of the weights as they are stored: the same over whatever files they are split, and whatever they are loaded as.

    Of each tensor its first and last rows are read: what is trained changes nearly all rows, and a large model would take minutes to be read.
    Of files that `check_files` let pass.
    """
    digest = xxhash.xxh3_128()
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(safe_open(path, framework="pt")) for path in _weight_files(directory)]
        holders = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        for name, holder in sorted(holders.items()):
            whole = holder.get_slice(name)
            shape = whole.get_shape()
            digest.update(f"{name} {whole.get_dtype()} {shape}\n".encode())
            first = tuple(slice(0, _SAMPLED_ROWS) for _ in shape[:-1])
            last = tuple(slice(max(0, size - _SAMPLED_ROWS), size) for size in shape[:-1])
            for rows in (first, last) if shape else ():
                digest.update(whole[(*rows, slice(None))].contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _hash(digest: xxhash.xxh3_128, name: str, tensor: Any) -> None:
    digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
    digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


def _listed(value: object) -> object:
    """JSON of what JSON does not know; a set's own order would differ between processes."""
    return sorted(value, key=repr) if isinstance(value, (set, frozenset)) else str(value)


class _PackedLinear(nn.Module):
    """A Linear whose weight lies in the order in which oneDNN multiplies by it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _PACKED_ROWS)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(states, self._packed, self.bias, "none", [], "")
        return product


# Rows of a batch that the packed order is chosen for; other numbers work as well.
_PACKED_ROWS = 8


def pack_linears(module: nn.Module) -> None:
    """Reorder the weights of every plain bfloat16 Linear in place; those of other dtypes stay as they are.

    oneDNN reorders a bfloat16 weight in every call unless it was done before: without, SmolLM2-135M's step takes 1.2 times as
    long on two cores, at batch 1 and 8. In float32, MKL's own order is faster.
    """
    if not (torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return
    with torch.no_grad():
        for parent in list(module.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear and child.weight.dtype == torch.bfloat16 and child.weight.device.type == "cpu":
                    setattr(parent, name, _PackedLinear(child))
