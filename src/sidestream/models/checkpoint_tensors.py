"""The tensors of a checkpoint, read from the headers of its weight files, and checks that refuse unusable checkpoints.

Called while a model loads, before its weights are read. This file does not compare the tensors with transformers'
module; `loader` does. Error messages say "its" for the model, because `loader.naming_model` puts the model's name in
front.
"""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sidestream.errors import ModelError

# Every other dtype (I8, F8_E4M3, F4, …) is quantised: its values are useless without a scheme and scales.
_FLOATS = {"F64", "F32", "F16", "BF16"}
# Buffers that the model computes itself, counters of training, and heads for speculative decoding (MTP) as Qwen, MiMo,
# Ernie and others name them.
_BUFFERS = r"rotary_emb\.(inv_freq|cos_cached|sin_cached)|position_ids|num_batches_tracked"
_UNUSED = re.compile(rf"(^|\.)({_BUFFERS})$|(^|\.)mtp\w*\.")
_CAUSAL_MASK = re.compile(r"\.attn(ention)?\.(bias|masked_bias)$")
# DeepSeek and GLM store a head for speculative decoding as an additional layer. Only such a layer has this matrix.
_HEAD_LAYER = re.compile(r"^(.*\.layers\.\d+\.)eh_proj\.weight$")
# One memory page. It is enough for nearly every matrix, because already the first values are not all zeros.
_PROBE_BYTES = 1 << 12
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a weight file: its values are `num_bytes` from byte `start` on."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def tensors_of(path: Path, header: Mapping[str, Any], *, data_start: int) -> Iterator[StoredTensor]:
    """The tensors of one safetensors file, given its header; `data_start` is the first byte after the header."""
    for name, entry in header.items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            yield StoredTensor(name, path, entry["dtype"], tuple(entry["shape"]), data_start + first, last - first)


def joined(tensors: Iterator[StoredTensor]) -> dict[str, StoredTensor]:
    """Tensors by name. Raises ModelError when two files hold a tensor of the same name, because it is unclear which
    tensor is the right one.
    """
    by_name: dict[str, StoredTensor] = {}
    for tensor in tensors:
        other = by_name.setdefault(tensor.name, tensor)
        if other is not tensor:
            raise ModelError(
                f"both {other.path.name} and {tensor.path.name} hold {tensor.name}: "
                "the files belong to different checkpoints, fetch all of them again"
            )
    return by_name


def unused_names(stored: Mapping[str, StoredTensor], names: set[str]) -> set[str]:
    """The subset of `names` that a forward pass does not use: recomputed buffers, causal masks, heads for speculative
    decoding.
    """
    heads = tuple(found[1] for name in stored if (found := _HEAD_LAYER.match(name)))
    return {
        name for name in names if _UNUSED.search(name) or name.startswith(heads) or _is_causal_mask(stored.get(name))
    }


def _is_causal_mask(tensor: StoredTensor | None) -> bool:
    """Whether the tensor is a causal mask or its fill value. GPT-2 and its successors store these as `attn.bias`, `[1,
    1, positions, positions]`, and as the scalar `attn.masked_bias`. A real bias has neither of these shapes.
    """
    return tensor is not None and _CAUSAL_MASK.search(tensor.name) is not None and len(tensor.shape) in (0, 4)


def check_tensors(stored: Mapping[str, StoredTensor], *, quantised: Collection[str] = ()) -> None:
    """Raise ModelError for a used tensor that is quantised and not among `quantised`, or for a matrix of zeros.

    Reads one page of each matrix, and more only while all values are zero.
    """
    used = stored.keys() - unused_names(stored, set(stored))
    for name in sorted(used - set(quantised)):
        if stored[name].dtype not in _FLOATS:
            raise ModelError(
                "its weights are quantised, without a scheme that Sidestream implements "
                f"({name} in {stored[name].path.name} is {stored[name].dtype}): "
                "take the model in bfloat16, float16 or float32"
            )
    for path in sorted({stored[name].path for name in used}):
        matrices = [stored[name] for name in used if stored[name].path == path and _is_matrix(stored[name])]
        with path.open("rb", buffering=0) as file:
            for matrix in sorted(matrices, key=lambda tensor: tensor.start):
                if _is_zero(file, matrix):
                    raise ModelError(
                        f"{matrix.name} in {path} is all zeros: the file was not written completely, fetch it again"
                    )


def _is_matrix(tensor: StoredTensor) -> bool:
    """Whether the tensor is a matrix, so that it is damaged if all elements are zero. Vectors may be all zeros, for
    example a bias, or the weight of a norm that adds one to its weight.

    The biases of a layer's experts are stacked to two dimensions, so the name is checked, too.
    """
    return sum(size > 1 for size in tensor.shape) >= 2 and not tensor.name.endswith("bias")


def _is_zero(file: io.RawIOBase, tensor: StoredTensor) -> bool:
    left, size = tensor.num_bytes, _PROBE_BYTES
    file.seek(tensor.start)
    while left and (values := file.read(min(size, left))):
        if values.count(0) != len(values):
            return False
        left, size = left - len(values), _CHUNK_BYTES
    return tensor.num_bytes > 0
