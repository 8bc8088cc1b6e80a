"""Reads GGUF files: their tensors, by transformers' names. Quantised bytes stay in the mapped file.

Called while a model loads, on the loading thread. Knows no kernels (`ggml.py`) and no modules (`packed.py`). Config and
tokenizer are those of the directory, because a GGUF file has neither in full. Error messages say "its" for the model,
because `loader.naming_model` puts the model's name in front.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from sidestream.checkpoint_files import check_regular
from sidestream.errors import ModelError
from sidestream.models.checkpoint_tensors import StoredTensor

INSTALL = "pip install 'sidestream[gguf]'"


class Kind(NamedTuple):
    """A way to store values: blocks of `values` numbers in `num_bytes` bytes. `number`: ggml's enum."""

    name: str
    number: int
    values: int
    num_bytes: int


_KINDS = {
    kind.number: kind
    for kind in (
        Kind("F32", 0, 1, 4),
        Kind("F16", 1, 1, 2),
        Kind("BF16", 30, 1, 2),
        Kind("Q4_0", 2, 32, 18),
        Kind("Q4_1", 3, 32, 20),
        Kind("Q5_0", 6, 32, 22),
        Kind("Q5_1", 7, 32, 24),
        Kind("Q8_0", 8, 32, 34),
        Kind("Q2_K", 10, 256, 84),
        Kind("Q3_K", 11, 256, 110),
        Kind("Q4_K", 12, 256, 144),
        Kind("Q5_K", 13, 256, 176),
        Kind("Q6_K", 14, 256, 210),
        Kind("IQ4_NL", 20, 32, 18),
        Kind("IQ4_XS", 23, 256, 136),
        Kind("MXFP4", 39, 32, 17),
    )
}
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
QUANTISED = tuple(kind for kind in _KINDS.values() if kind.name not in _PLAIN)
"""The kinds of quantised values that are supported."""
# Names for errors.
_OTHERS = {
    **{9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S"},
    **{28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4"},
}

# transformers' kinds of each architecture that is supported, and names of tensors in GGUF and in transformers.
MODEL_TYPES = {
    **{"llama": ("llama", "mistral"), "qwen2": ("qwen2",), "qwen3": ("qwen3",)},
    **{"qwen2moe": ("qwen2_moe",), "qwen3moe": ("qwen3_moe",)},
    **{"gemma2": ("gemma2",), "gemma3": ("gemma3_text",), "gpt-oss": ("gpt_oss",)},
}
TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "attn_sinks": "self_attn.sinks",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NORMED_TWICE = {"ffn_norm": "pre_feedforward_layernorm"}
_OWN_NAMES = {"gemma2": _NORMED_TWICE, "gemma3": _NORMED_TWICE, "gpt-oss": {"ffn_gate_inp": "mlp.router"}}
_EXPERTS, _ROUTERS, _SINKS = ".mlp.experts.", (".mlp.gate.weight", ".mlp.router.weight"), ".sinks.weight"
_GATE_OF_ONE = ".mlp.shared_expert_gate.weight"  # a vector in GGUF, and in transformers a matrix of one row
_COMPUTED = "rope_freqs.weight"  # transformers computes it from the config
# Formats of single metadata values, by GGUF's enum.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# Names of the parts of a model that llama-gguf-split has divided.
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MOST_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a file. Like a slice of safetensors, its values are read with `tensor[...]`.

    stored       its place in the file; `shape` is that of the values
    kind         how its values are stored
    interleaved  number of heads whose rows are interleaved: rotary pairs are adjacent in GGUF's Q and K of a Llama, and
                 are the halves of a head in transformers; 0: rows have transformers' order
    added        what the values are more than transformers': 1 in the norms of a Gemma
    transposed   whether transformers has the matrices `[experts, columns, rows]`
    """

    stored: StoredTensor
    kind: Kind
    interleaved: int
    added: int
    transposed: bool

    def __getitem__(self, everything: object) -> Tensor:
        """The values: float32 if they are quantised, else in the stored dtype."""
        data = self.bytes()
        if self.kind.name in _PLAIN:
            values = data.view(_PLAIN[self.kind.name]).view(self.stored.shape)
        else:
            from gguf import GGMLQuantizationType, dequantize

            rows = data.view(-1, self.row_bytes).numpy()
            values = torch.from_numpy(np.asarray(dequantize(rows, GGMLQuantizationType(self.kind.number))))
            values = values.view(self.stored.shape)
        values = values.transpose(1, 2) if self.transposed else values
        return halved(values, self.interleaved, dim=0) if self.interleaved else values - self.added

    @property
    def is_kept(self) -> bool:
        """Whether it can stay as it is: quantised matrices that a module multiplies by or looks up, and all experts."""
        stacked = len(self.stored.shape) == 3
        return stacked or (self.kind in QUANTISED and not self.stored.name.endswith(_ROUTERS))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in transformers."""
        first, *others = self.stored.shape
        return (first, *others[::-1]) if self.transposed else self.stored.shape

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, a run of values along the last dimension."""
        return self.stored.shape[-1] // self.kind.values * self.kind.num_bytes

    def bytes(self) -> Tensor:
        """The stored bytes, uint8: pages of the file, mapped copy-on-write."""
        path, begin, size = self.stored.path, self.stored.start, self.stored.num_bytes
        return torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="c", offset=begin, shape=(size,)))


def halved(values: Tensor, heads: int, *, dim: int) -> Tensor:
    """Reorder rows of Q or K, or their numbers, from GGUF's order to transformers': see `GgufTensor`."""
    shape = values.shape
    pairs = values.reshape(*shape[:dim], heads, shape[dim] // heads // 2, 2, *shape[dim + 1 :])
    return pairs.transpose(dim + 1, dim + 2).reshape(shape)


@dataclass(frozen=True, slots=True)
class GatesAndUps:
    """Two stacks of a layer's experts, which are one parameter in transformers: `[experts, 2 * inner, width]`, or
    transposed with alternating columns, like the biases.
    """

    gates: GgufTensor
    ups: GgufTensor

    def __getitem__(self, everything: object) -> Tensor:
        """The values, as those of `GgufTensor`."""
        pair = [self.gates[...], self.ups[...]]
        return torch.stack(pair, dim=-1).flatten(-2) if self._alternate else torch.cat(pair, dim=1)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in transformers."""
        *others, last = self.gates.shape
        return (*others, 2 * last) if self._alternate else (others[0], 2 * others[1], last)

    @property
    def _alternate(self) -> bool:
        return self.gates.transposed or len(self.gates.shape) == 2


@dataclass(frozen=True, slots=True)
class GgufFile:
    """What a file holds, or all parts of a divided one.

    path           the file, or its first part
    architecture   GGUF's name of it
    tensors        its tensors, by transformers' names, but for experts: see `state_dict`
    """

    path: Path
    architecture: str
    tensors: Mapping[str, GgufTensor]

    def stored(self) -> dict[str, StoredTensor]:
        """Places in the file, by transformers' names. The dtype of a quantised tensor is the name of its kind."""
        return {name: tensor.stored for name, tensor in self.tensors.items()}

    def num_bytes(self, *, packed: bool, value_bytes: int) -> int:
        """Bytes of all weights, with `value_bytes` for each value that is not quantised, or not kept `packed`."""
        return sum(
            tensor.stored.num_bytes if packed and tensor.is_kept else math.prod(tensor.stored.shape) * value_bytes
            for tensor in self.tensors.values()
        )

    def state_dict(self) -> dict[str, GgufTensor | GatesAndUps]:
        """The tensors by the names of transformers' parameters. Raises ModelError for half of a pair."""
        found: dict[str, GgufTensor | GatesAndUps] = {}
        for name, tensor in self.tensors.items():
            layer, _, part = name.partition(_EXPERTS)
            part, _, end = part.partition(".")
            theirs = f"{layer}{_EXPERTS}{{}}{'' if end == 'weight' else '_bias'}"
            if not part:
                found[name.removesuffix(".weight") if name.endswith(_SINKS) else name] = tensor
            elif part == "down_proj":
                found[theirs.format(part)] = tensor
            else:
                pair = [self.tensors.get(f"{layer}{_EXPERTS}{one}_proj.{end}") for one in ("gate", "up")]
                gates, ups = (one or tensor for one in pair)
                if None in pair or gates.shape != ups.shape:
                    raise ModelError(
                        f"{self.path.name} has no pair of gate and up of equal shape for the experts of {layer}: "
                        "fetch it again"
                    )
                found[theirs.format("gate_up_proj")] = GatesAndUps(gates, ups)
        return found

    def kinds(self) -> str:
        """The kinds of its quantised tensors, by the number of their values."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            if tensor.kind in QUANTISED:
                sizes[tensor.kind.name] = sizes.get(tensor.kind.name, 0) + math.prod(tensor.stored.shape)
        return " and ".join(sorted(sizes, key=lambda name: -sizes[name]))

    def digest(self, rows: int) -> str:
        """A hash, 128 bits in hex, of names, kinds and the first and last `rows` rows of all tensors."""
        digest = xxhash.xxh3_128()
        for name, tensor in sorted(self.tensors.items()):
            digest.update(f"{name} {tensor.kind.name} {list(tensor.stored.shape)}\n".encode())
            data = tensor.bytes().view(-1, tensor.row_bytes)
            for part in (data[:rows], data[-rows:]):
                digest.update(part.contiguous().numpy().data)
        return digest.hexdigest()

    def check_fits(self, config: Any) -> None:
        """Raise ModelError unless the file holds a model of this config's kind."""
        if config.model_type not in (served := MODEL_TYPES[self.architecture]):
            raise ModelError(
                f"{self.path.name} holds a model of architecture {self.architecture}, but its config.json is of "
                f"{config.model_type}: take config.json of the model that the file was made from; served are "
                f"{' and '.join(served)}"
            )


def gguf_in(directory: Path) -> Path | None:
    """The GGUF file of a directory without other weights, or the first part of a divided one; None: it has none. Raises
    ModelError for several files.
    """
    if any(directory.glob("model*.safetensors*")):
        return None
    files = sorted(directory.glob("*.gguf"))
    if len({parts_of(path)[0] for path in files}) > 1:
        raise ModelError(
            f"{directory} holds {len(files)} GGUF files, such as {files[0].name} and {files[-1].name}: "
            "keep one file, or all parts of one, in a directory"
        )
    return parts_of(files[0])[0] if files else None


def parts_of(path: Path) -> list[Path]:
    """All parts of the model that the name of a file belongs to: the file itself, unless the name is that of a part."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    name, _, count = match.groups()
    return [path.with_name(f"{name}-{number:05}-of-{count}.gguf") for number in range(1, int(count) + 1)]


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file, and those of all parts if it is the first of several. Raises ModelError with the
    reason for a file that is missing or damaged, or that holds an architecture, a tensor or a kind of values that is
    not supported.
    """
    try:
        stats = []
        for part in parts_of(path):
            path = part
            check_regular(part)
            stats.append((part, part.stat().st_size, part.stat().st_mtime_ns))
        return _read(tuple(stats))
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror or error}): check the file and its disk") from error
    except (struct.error, UnicodeDecodeError, ValueError, KeyError, OverflowError):
        raise ModelError(f"{path} is no readable GGUF file: fetch it again") from None


def check_package() -> None:
    """Raise ModelError unless the package that computes the values of quantised weights is there."""
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"reading a GGUF file needs the package gguf: {INSTALL}")


@functools.lru_cache(maxsize=2)  # a load reads the headers several times, and a vocabulary takes a while
def _read(parts: tuple[tuple[Path, int, int], ...]) -> GgufFile:
    """`parts`: path, size and time of the last change of each."""
    first, tensors = dict[str, Any](), dict[str, GgufTensor]()
    for index, (path, size, _) in enumerate(parts):
        fields, entries, begin = _header(path)
        first = first or fields
        if (index, len(parts)) != (int(fields.get("split.no", 0)), int(fields.get("split.count", 0)) or 1):
            raise ModelError(
                f"{path.name} is a part of a model: keep the names of all parts, NAME-00001-of-00002.gguf and so on"
            )
        architecture = str(first["general.architecture"])
        if architecture not in MODEL_TYPES:
            raise ModelError(
                f"{path.name} holds a model of architecture {architecture}: of GGUF files, those of "
                f"{', '.join(MODEL_TYPES)} are served"
            )
        for name, shape, number, offset in entries:
            if name != _COMPUTED:
                kind = _kind(path, name, number)
                num_bytes = math.prod(shape) // kind.values * kind.num_bytes
                if shape[-1] % kind.values or begin + offset + num_bytes > size:
                    raise ModelError(f"{path} is incomplete at tensor {name}: fetch it again")
                theirs = _renamed(path, name, architecture)
                rows = (1,) if theirs.endswith(_GATE_OF_ONE) and len(shape) == 1 else ()
                heads, added = _heads(architecture, first, name), _added(architecture, name)
                stored = StoredTensor(theirs, path, kind.name, (*rows, *shape), begin + offset, num_bytes)
                transposed = architecture == "gpt-oss" and len(shape) == 3
                tensors[theirs] = GgufTensor(stored, kind, heads, added, transposed)
    return GgufFile(parts[0][0], architecture, tensors)


def _header(path: Path) -> tuple[dict[str, Any], list[tuple[str, tuple[int, ...], int, int]], int]:
    """Metadata, the tensors (name, shape, kind and offset), and where the values begin to which offsets refer."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data)
        if data[:4] != b"GGUF" or cursor.value("I", at=4) not in (2, 3):
            raise ValueError
        num_tensors, num_fields = cursor.value("Q"), cursor.value("Q")
        fields = {cursor.text(): cursor.field(cursor.value("I")) for _ in range(num_fields)}
        entries = [_entry(cursor) for _ in range(num_tensors)]
        alignment = int(fields.get("general.alignment", 32))
        return fields, entries, -(-cursor.at // alignment) * alignment


class _Cursor:
    """A position in a file's header."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = 0

    def value(self, form: str, *, at: int | None = None) -> Any:
        self.at = self.at if at is None else at
        (found,) = struct.unpack_from(f"<{form}", self._data, self.at)
        self.at += struct.calcsize(f"<{form}")
        return found

    def text(self) -> str:
        length = self.value("Q")
        if length > len(self._data) - self.at:
            raise ValueError
        self.at += length
        return self._data[self.at - length : self.at].decode()

    def field(self, number: int) -> Any:
        """A value of metadata; of an array only its length is returned."""
        if number == _STRING:
            return self.text()
        if number != _ARRAY:
            return self.value(_SCALARS[number])
        of, length = self.value("I"), self.value("Q")
        if of == _STRING:
            for _ in range(length):
                self.at += 8 + struct.unpack_from("<Q", self._data, self.at)[0]
        else:
            self.at += length * struct.calcsize(_SCALARS[of])
        return length


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, kind and offset of one tensor."""
    name, dimensions = cursor.text(), cursor.value("I")
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise ValueError
    shape = tuple(cursor.value("Q") for _ in range(dimensions))[::-1]
    return name, shape, cursor.value("I"), cursor.value("Q")


def _kind(path: Path, name: str, number: int) -> Kind:
    if number in _KINDS:
        return _KINDS[number]
    raise ModelError(
        f"{name} in {path.name} is quantised as {_OTHERS.get(number, f'type {number}')}: "
        f"supported are {', '.join(kind.name for kind in _KINDS.values())}"
    )


def _renamed(path: Path, name: str, architecture: str) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in TENSOR_NAMES:
        raise ModelError(f"{path.name} holds a tensor {name}, which a decoder of its kind does not have")
    theirs = (TENSOR_NAMES | _OWN_NAMES.get(architecture, {}))[match[2]]
    return f"{f'model.layers.{match[1]}.' if match[1] else ''}{theirs}.{match[3]}"


def _added(architecture: str, name: str) -> int:
    return int(architecture.startswith("gemma") and name.endswith("norm.weight"))


def _heads(architecture: str, fields: Mapping[str, Any], name: str) -> int:
    if architecture != "llama" or not (found := re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", name)):
        return 0
    heads = int(fields["llama.attention.head_count"])
    return heads if found[1] == "q" else int(fields.get("llama.attention.head_count_kv", heads))
