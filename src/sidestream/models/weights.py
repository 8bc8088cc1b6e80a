"""Reads and checks weight files, makes fingerprints of weights, and packs weights in oneDNN's order.

Called while a model loads, on the loading thread.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from torch import nn

from sidestream.checkpoint_files import INDEX, check_regular, read_json
from sidestream.errors import ModelError
from sidestream.models.checkpoint_tensors import StoredTensor, check_tensors, joined, tensors_of
from sidestream.models.directory import WEIGHTS, check_weights_exist
from sidestream.models.gguf_file import gguf_in, read_gguf
from sidestream.models.latent import READ_BY_ATTENTION
from sidestream.models.quantised import quantisation_of
from sidestream_kv.device.kinds import on_host
from sidestream_kv.kv.layout import DTYPE_BYTES

_SHARD = re.compile(r"-of-(\d+)\.safetensors$")

_MAX_HEADER_BYTES = 100_000_000  # the bound of the safetensors library
_STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Config fields that do not change the result of a forward pass, or that the hash covers in another way.
_NOT_IDENTITY = {"_name_or_path", "architectures", "dtype", "torch_dtype", "id2label", "label2id", "use_cache"}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The weights of a directory.

    tensors      the stored tensors, by the names that the model has for them
    state_dict   lazy tensors for transformers' `from_pretrained`; None: transformers reads the files by itself
    """

    tensors: Mapping[str, StoredTensor]
    state_dict: Mapping[str, Any] | None = None


def check_files(directory: Path, quantisation: Mapping[str, Any] | None = None) -> Checkpoint:
    """The weights of a model's directory. Reads the headers, and one page of each matrix.

    quantisation   the config's `quantization_config`; None: the weights are not quantised

    Raises ModelError with the file's name if a file is missing, truncated or not a safetensors file, and with the
    tensor's name if a tensor cannot be served (`check_tensors`).
    """
    check_weights_exist(directory)
    if (gguf := gguf_in(directory)) is not None:
        tensors = (file := read_gguf(gguf)).stored()
        check_tensors(tensors, quantised=tensors)
        return Checkpoint(tensors, file.state_dict())
    files = _weight_files(directory)
    stored = joined(tensor for path in files for tensor in _check_file(path))
    _refuse_unlisted_shards(directory, {path.name for path in files})
    if (quantised := quantisation_of(quantisation, stored)) is None:
        check_tensors(stored)
        return Checkpoint(stored)
    tensors = quantised.logical(stored)
    check_tensors(tensors, quantised=quantised.weights.keys())
    return Checkpoint(tensors, quantised.state_dict(stored))


def stored_dtype_and_bytes(directory: Path, quantisation: Mapping[str, Any] | None = None) -> tuple[str, int]:
    """The first floating-point dtype in the first weight file of `directory`, and the total bytes of all weights. Reads
    only headers. Returns `("float32", 0)` without weight files. Raises ModelError for a damaged file.

    quantisation   the config's `quantization_config`: the bytes are then those of the weights in that dtype

    A GGUF file counts as bfloat16: it does not tell the dtype of the model that it was made from.
    """
    if (gguf := gguf_in(directory)) is not None:
        return "bfloat16", read_gguf(gguf).num_bytes(packed=False, value_bytes=DTYPE_BYTES["bfloat16"])
    tensors = [tensor for path in _weight_files(directory) if path.exists() for tensor in _check_file(path)]
    floating = (
        _STORED[tensor.dtype] for tensor in sorted(tensors, key=lambda t: (t.path, t.name)) if tensor.dtype in _STORED
    )
    dtype = next(floating, "float32")
    num_bytes = sum(tensor.num_bytes for tensor in tensors)
    if (quantised := quantisation_of(quantisation, {tensor.name: tensor for tensor in tensors})) is not None:
        num_bytes -= sum(tensor.num_bytes for tensor in tensors if tensor.name in quantised.parts)
        num_bytes += DTYPE_BYTES[dtype] * sum(math.prod(weight.shape) for weight in quantised.weights.values())
    return dtype, num_bytes


def _weight_files(directory: Path) -> list[Path]:
    names = {WEIGHTS}
    if not (directory / WEIGHTS).exists() and (directory / INDEX).exists():
        weight_map = read_json(directory / INDEX).get("weight_map")
        if not weight_map:
            raise ModelError(f"{directory / INDEX} lists no weights: fetch it again")
        names = set(weight_map.values())
    return [directory / name for name in sorted(names)]


def _refuse_unlisted_shards(directory: Path, listed: set[str]) -> None:
    """Refuse shards of the listed set that the index does not list, because transformers would ignore them. Other files
    are allowed.
    """
    for total in {found[1] for name in listed if (found := _SHARD.search(name))}:
        others = {path.name for path in directory.glob(f"model-*-of-{total}.safetensors")} - listed
        if others:
            raise ModelError(
                f"{directory / INDEX} does not list {min(others)}, a shard of the same set: fetch the index again"
            )


def _check_file(path: Path) -> list[StoredTensor]:
    try:
        size = check_regular(path)
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
            header = json.loads(file.read(min(header_bytes, _MAX_HEADER_BYTES)))
        tensors = list(tensors_of(path, header, data_start=8 + header_bytes))
        expected = max((tensor.start + tensor.num_bytes for tensor in tensors), default=8 + header_bytes)
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}: fetch the weights, in safetensors format") from None
    except PermissionError:
        raise ModelError(
            f"{path} is not readable for this user: make it readable (chmod +r), or run as its owner"
        ) from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror or error}): check the file and its disk") from error
    except (ValueError, AttributeError, KeyError, TypeError, IndexError, RecursionError):
        raise ModelError(f"{path} is no readable safetensors file: fetch it again") from None
    if size != expected:
        raise ModelError(
            f"{path} has {size} bytes, but its header requires {expected}: it is incomplete; fetch it again"
        )
    return tensors


def check_finite(module: nn.Module) -> None:
    """Raise ModelError, with the weight's name, for a weight that holds NaN or an infinite value."""
    for name, weight in module.named_parameters():
        if weight.sum(dtype=torch.float32).isfinite():  # one pass, without a copy
            continue
        wrong = weight.numel() - int(weight.isfinite().sum())
        if wrong:
            cause = (
                "float16 holds values up to 65504: choose the dtype bfloat16 or float32"
                if weight.dtype == torch.float16 and not weight.isnan().any()
                else "the file is damaged, or the training diverged: fetch the weights again"
            )
            raise ModelError(f"its weight {name} holds {wrong} values of NaN or infinity ({weight.dtype}): {cause}")


def fingerprint_of(module: Any, *, variant: str = "") -> str:
    """A hash, 128 bits in hex, of everything that determines the module's KV: definition, config, dtypes and all loaded
    weights.

    variant   name of a change of the module that is not visible in config and weights

    The hash covers the loaded weights, not the files: the files' names, their dates and the split of weights over files
    do not matter. xxh3 runs at about memory bandwidth. It detects accidental differences, but not forgeries.
    """
    config = {name: value for name, value in module.config.to_dict().items() if name not in _NOT_IDENTITY}
    # The config contains transformers' version, because a newer version may change the definition of the model.
    facts = {"class": type(module).__name__, "config": config}
    digest = xxhash.xxh3_128(json.dumps(facts, sort_keys=True, default=_listed).encode() + variant.encode())
    hashed: set[tuple[int, torch.Size]] = set()
    for name, tensor in sorted(module.state_dict().items()):
        if (tensor.data_ptr(), tensor.shape) not in hashed:
            hashed.add((tensor.data_ptr(), tensor.shape))
            _hash(digest, name, tensor)
    return digest.hexdigest()


# Number of rows from each end that are hashed, for each tensor and each of its dimensions except the last.
_SAMPLED_ROWS = 4


def digest_of_files(directory: Path) -> str:
    """A hash, 128 bits in hex, of the stored weights. The hash does not depend on how weights are split over files, nor
    on the dtype in which they are loaded.

    Reads only the first and last rows of each tensor: training changes nearly all rows, and reading all of a large
    model would take minutes. The files must have passed `check_files`.
    """
    if (gguf := gguf_in(directory)) is not None:
        return read_gguf(gguf).digest(_SAMPLED_ROWS)
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
    """A JSON value for a value that `json` does not support. Sets are sorted, because their order differs between
    processes.
    """
    return sorted(value, key=repr) if isinstance(value, (set, frozenset)) else str(value)


class PackedLinear(nn.Module):
    """A Linear with its weight in the packed order of oneDNN's matrix product."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _PACKED_ROWS)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(states, self._packed, self.bias, "none", [], "")
        return product


# Names of Linears whose weight is read by their parents: latent attention, and LongCat's router.
READ_BY_OTHERS = (READ_BY_ATTENTION, "classifier")
# Number of rows for which the packed order is optimised; other numbers also work.
_PACKED_ROWS = 8


def pack_linears(module: nn.Module) -> None:
    """Reorder the weights of every plain bfloat16 Linear in place, except those that other modules read; other dtypes
    stay unchanged.

    Without this, oneDNN reorders a bfloat16 weight in every call: a step of SmolLM2-135M then takes 1.2 times as long
    on two cores, with batch sizes 1 and 8. In float32, MKL's own order is faster.
    """
    if not (torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return
    with torch.no_grad():
        for parent in list(module.modules()):
            for name, child in list(parent.named_children()):
                if (
                    type(child) is nn.Linear
                    and name not in READ_BY_OTHERS
                    and child.weight.dtype == torch.bfloat16
                    and on_host(child.weight.device)
                ):
                    setattr(parent, name, PackedLinear(child))
