"""Reads quantised checkpoints: finds the tensors that make up each quantised weight, and computes the weight's values.

Transformers' own quantizers are not used, because most of them need a package of their own, and some fetch kernels from
the hub while they load. Here a quantised weight becomes a lazy tensor of a state dict, with the name and shape that the
model's definition expects, and its values are computed when transformers reads it: no dependency, and one definition of
each format. Error messages say "its" for the model, because `loader.naming_model` puts the model's name in front.

A group is a run of inputs that share a scale. A weight is `[out, in]`; experts may be stacked, `[experts, out, in]`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from sidestream.errors import ModelError
from sidestream.models.checkpoint_tensors import StoredTensor

Parts = Mapping[str, Tensor]
"""The tensors of one quantised weight, by the ends of their names."""

# Scales of activations and of an 8-bit KV cache. Activations and KV are not quantised here, which is more exact.
_NOT_NEEDED = re.compile(r"\.(input_scale|activation_scale|[qkv]_scale|input_zero_point|input_global_scale)$")


@dataclass(frozen=True, slots=True)
class Format:
    """How one weight is stored.

    main      end of the name of the tensor with the quantised values
    dtypes    stored dtypes of that tensor. If its name is that of a plain weight, these tell the two apart
    scales    ends of the names of further tensors. Those in `optional` may be missing
    result    end of the weight's name in the model
    weight_only  whether the inputs of products must not be rounded, too
    values    computes the weight, float32, from its parts
    shape     the weight's shape, from the shapes of the parts
    """

    main: str
    dtypes: frozenset[str]
    scales: tuple[str, ...]
    values: Callable[[Parts], Tensor]
    shape: Callable[[Mapping[str, tuple[int, ...]]], tuple[int, ...]]
    optional: tuple[str, ...] = ()
    result: str = ".weight"
    weight_only: bool = False


class QuantisedTensor:
    """A quantised weight. Like a slice of safetensors, it is read with `tensor[...]`.

    stored  the tensor with the quantised values
    shape   shape of the weight
    """

    def __init__(self, name: str, how: Format, parts: Mapping[str, StoredTensor]) -> None:
        self.name = name
        self.stored = parts[how.main]
        self._how, self._parts = how, parts
        self.shape = how.shape({end: part.shape for end, part in parts.items()})

    def __getitem__(self, everything: object) -> Tensor:
        """The whole weight, float32."""
        return self._how.values({end: _read(part) for end, part in self._parts.items()})

    def eight_bits(self) -> tuple[tuple[int, ...], Callable[[], tuple[Tensor, Tensor]]] | None:
        """If the weight is stored as 8-bit floats with scales, and inputs may be rounded as well: the shape of the
        scales, and a function that reads the weight and the scales.
        """
        scale = self._how.scales[0]
        if self._how.main != ".weight" or self.stored.dtype != "F8_E4M3" or self._how.weight_only:
            return None
        weight, scales = self.stored, self._parts[scale]
        return scales.shape, lambda: (_read(weight), _read(scales))


class Quantisation:
    """The quantised weights of one checkpoint, by the names that the model has for them.

    method      name of the quantisation in the model's config
    weights     the quantised weights
    parts       names of all stored tensors that belong to them, or that are not needed
    """

    def __init__(self, method: str, formats: Iterable[Format], stored: Mapping[str, StoredTensor]) -> None:
        """Raises ModelError for a tensor without its scales."""
        self.method = method
        self.weights: dict[str, QuantisedTensor] = {}
        self.parts = {name for name in stored if _NOT_NEEDED.search(name)}
        for how in formats:
            for name in stored:
                if name.endswith(how.main) and stored[name].dtype in how.dtypes:
                    self._add(how, name.removesuffix(how.main), stored)
        if not self.weights:
            raise ModelError(
                f"its config.json declares weights quantised by {method}, but its files hold none: "
                "fetch weights and config.json of the same model"
            )

    def _add(self, how: Format, base: str, stored: Mapping[str, StoredTensor]) -> None:
        parts = {end: stored[base + end] for end in (how.main, *how.scales, *how.optional) if base + end in stored}
        if missing := [base + end for end in how.scales if end not in parts]:
            raise ModelError(
                f"its weight {base + how.main} is quantised ({self.method}), but its files lack {missing[0]}: "
                "fetch all weight files again"
            )
        self.weights[base + how.result] = QuantisedTensor(base + how.result, how, parts)
        self.parts.update(part.name for part in parts.values())

    def logical(self, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """The checkpoint's tensors by the model's names. A quantised weight is represented by its quantised values."""
        plain = {name: tensor for name, tensor in stored.items() if name not in self.parts}
        return plain | {name: weight.stored for name, weight in self.weights.items()}

    def state_dict(self, stored: Mapping[str, StoredTensor]) -> dict[str, Any]:
        """Lazy tensors by the model's names: `_Plain` and `QuantisedTensor`."""
        plain = {name: _Plain(tensor) for name, tensor in stored.items() if name not in self.parts}
        return {**plain, **self.weights}


class _Plain:
    """A tensor that is not quantised, read with `tensor[...]`."""

    def __init__(self, stored: StoredTensor) -> None:
        self._stored = stored

    def __getitem__(self, everything: object) -> Tensor:
        return _read(self._stored)


def quantisation_of(config: Mapping[str, Any] | None, stored: Mapping[str, StoredTensor]) -> Quantisation | None:
    """The quantisation that a model's config declares (its `quantization_config`), applied to its stored tensors; None:
    it declares none. Raises ModelError for a method or format that is not supported.
    """
    return None if config is None else Quantisation(str(config.get("quant_method")), formats_of(config), stored)


def formats_of(config: Mapping[str, Any]) -> tuple[Format, ...]:
    """The formats of a config's quantisation. Raises ModelError for a method or format that is not supported."""
    method = str(config.get("quant_method"))
    if method == "compressed-tensors":
        return _compressed_formats(config)
    if method == "fp8":
        rows, columns = config.get("weight_block_size") or (1, 1)
        return (_eight_bits(".weight_scale_inv", (int(rows), int(columns))),)
    if method == "bitsandbytes":
        kind = str(config.get("bnb_4bit_quant_type", "fp4"))
        return (_float4_of_bitsandbytes(kind) if config.get("load_in_4bit") else _BITSANDBYTES_8,)
    if method == "gptq":
        bits, plus_one = int(config.get("bits", 4)), config.get("checkpoint_format", "gptq") == "gptq"
        _check_bits(method, bits, (2, 4, 8))
        return (_gptq(bits, zero_plus=int(plus_one)),)
    if method == "awq":
        bits, version = int(config.get("bits", config.get("w_bit", 4))), str(config.get("version", "gemm")).lower()
        _check_bits(method, bits, (4,))
        if version != "gemm":
            raise ModelError(f"its weights are in AWQ's layout {version}: only gemm is supported")
        return (_AWQ,)
    if method == "modelopt":
        algorithm = str(config.get("quant_algo"))
        if algorithm in _MODELOPT:
            return _MODELOPT[algorithm]
        raise ModelError(f"its weights are quantised by modelopt's {algorithm}: supported are {', '.join(_MODELOPT)}")
    if method in _METHODS:
        return _METHODS[method]
    supported = ", ".join(sorted((*_METHODS, "awq", "bitsandbytes", "compressed-tensors", "fp8", "gptq", "modelopt")))
    raise ModelError(f"its weights are quantised by {method}: supported are {supported}")


def _check_bits(method: str, bits: int, known: tuple[int, ...]) -> None:
    if bits not in known:
        raise ModelError(
            f"its weights have {bits} bits ({method}): supported are {' and '.join(str(count) for count in known)}"
        )


def _compressed_formats(config: Mapping[str, Any]) -> tuple[Format, ...]:
    formats: list[Format] = []
    for group in (config.get("config_groups") or {}).values():
        name = group.get("format") or config.get("format")
        how = group.get("weights") or {}
        bits, kind = int(how.get("num_bits") or 0), how.get("type")
        if name == "pack-quantized" and kind == "int":
            _check_bits("compressed-tensors", bits, (2, 4, 8))
            formats.append(_packed_integers(bits))
        elif name in ("float-quantized", "int-quantized", "naive-quantized") and bits == 8:
            formats.append(_EIGHT_BITS if group.get("input_activations") else _EIGHT_BITS_WEIGHT_ONLY)
        elif name == "nvfp4-pack-quantized":
            formats.append(_NVFP4_COMPRESSED)
        elif name == "mxfp4-pack-quantized":
            formats.append(_MXFP4_COMPRESSED)
        else:
            raise ModelError(
                f"its weights are in compressed-tensors' format {name} ({bits} bits, {kind}): supported are "
                "float-quantized, int-quantized, pack-quantized, nvfp4-pack-quantized and mxfp4-pack-quantized"
            )
    return tuple(dict.fromkeys(formats))


def _read(tensor: StoredTensor) -> Tensor:
    with safe_open(tensor.path, framework="pt") as file:
        read: Tensor = file.get_tensor(tensor.name)
    return read


# ------------------------------------------------------------------ eight bits a value, with scales


def scaled(values: Tensor, scale: Tensor, block: tuple[int, int] = (1, 1)) -> Tensor:
    """`values` `[..., out, in]` times a scale for all of them, for each row, or for each block of `block` rows and
    columns, in float32. The last block of a row or column may be smaller.
    """
    values, scale = values.float(), scale.float()
    if scale.numel() == 1:
        return values * scale.reshape(())
    if scale.dim() < values.dim():
        scale = scale[..., None]
    for dim, size in ((-2, block[0]), (-1, block[1])):
        if scale.shape[dim] != 1:
            scale = scale.repeat_interleave(size, dim=dim).narrow(dim, 0, values.shape[dim])
    return values * scale


def _eight_bits(scale: str, block: tuple[int, int] = (1, 1), *, weight_only: bool = False) -> Format:
    return Format(
        main=".weight",
        dtypes=frozenset({"F8_E4M3", "F8_E5M2", "I8"}),
        scales=(scale,),
        optional=(".weight_zero_point",),
        values=lambda parts: scaled(_less_zero_point(parts), parts[scale], block),
        shape=lambda shapes: shapes[".weight"],
        weight_only=weight_only,
    )


def _less_zero_point(parts: Parts) -> Tensor:
    zero = parts.get(".weight_zero_point")
    return parts[".weight"].float() - (0 if zero is None else zero.float())


_EIGHT_BITS = _eight_bits(".weight_scale")
_EIGHT_BITS_WEIGHT_ONLY = _eight_bits(".weight_scale", weight_only=True)
_BITSANDBYTES_8 = Format(
    main=".weight",
    dtypes=frozenset({"I8"}),
    scales=(".SCB",),
    optional=(".weight_format",),
    values=lambda parts: parts[".weight"].float() * (parts[".SCB"].float()[:, None] / 127),
    shape=lambda shapes: shapes[".weight"],
)


# ------------------------------------------------------------------ four bits a value, floating point

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def from_nibbles(packed: Tensor, table: Tensor, *, high_first: bool = False) -> Tensor:
    """The values of `table` for each half of each byte of `packed`: `[..., n]` to `[..., 2 * n]`."""
    halves = (packed & 15, packed >> 4)
    indices = torch.stack(halves[::-1] if high_first else halves, dim=-1).flatten(-2)
    return table[indices.int()]


def _float4(packed: Tensor, scale: Tensor) -> Tensor:
    """Four-bit floats `[..., out, in / 2]`, each group of `in / groups` times its scale `[..., out, groups]`."""
    values = from_nibbles(packed.view(torch.uint8), torch.tensor(_E2M1))
    groups = values.view(*scale.shape, -1)
    return (groups * scale[..., None]).flatten(-2)


def _power(exponents: Tensor) -> Tensor:
    """Scales that are powers of two, from their biased exponents (E8M0)."""
    return torch.exp2(exponents.view(torch.uint8).float() - 127)


def _doubled(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-1], 2 * shape[-1])


def _float4_format(main: str, values: Callable[[Parts], Tensor], *scales: str) -> Format:
    return Format(main, frozenset({"U8", "I8"}), scales, values, lambda shapes: _doubled(shapes[main]))


_NVFP4_COMPRESSED = _float4_format(
    ".weight_packed",
    lambda parts: _float4(
        parts[".weight_packed"], parts[".weight_scale"].float() / parts[".weight_global_scale"].float()
    ),
    ".weight_scale",
    ".weight_global_scale",
)
_NVFP4_MODELOPT = _float4_format(
    ".weight",
    lambda parts: _float4(parts[".weight"], parts[".weight_scale"].float() * parts[".weight_scale_2"].float()),
    ".weight_scale",
    ".weight_scale_2",
)
_MXFP4_COMPRESSED = _float4_format(
    ".weight_packed",
    lambda parts: _float4(parts[".weight_packed"], _power(parts[".weight_scale"])),
    ".weight_scale",
)
# gpt-oss: blocks [experts, out, groups, bytes]. The model's own matrices of experts are [experts, in, out].
_MXFP4 = Format(
    main="_blocks",
    dtypes=frozenset({"U8"}),
    scales=("_scales",),
    values=lambda parts: _float4(parts["_blocks"].flatten(-2), _power(parts["_scales"])).transpose(-2, -1),
    shape=lambda shapes: (shapes["_blocks"][0], 2 * shapes["_blocks"][2] * shapes["_blocks"][3], shapes["_blocks"][1]),
    result="",
)


def _float4_of_bitsandbytes(kind: str) -> Format:
    """bitsandbytes' four-bit floats, `nf4` or `fp4`: a table of 16 values, a scale for each group, and these scales
    perhaps in eight bits. A JSON text has the shape and the sizes of groups.
    """
    text = f".weight.quant_state.bitsandbytes__{kind}"

    def values(parts: Parts) -> Tensor:
        state = json.loads(bytes(parts[text].tolist()))
        scale = parts[".weight.absmax"].float()
        if (nested := parts.get(".weight.nested_absmax")) is not None:
            groups = parts[".weight.nested_quant_map"].float()[parts[".weight.absmax"].int()]
            per_group = nested.float().repeat_interleave(int(state["nested_blocksize"]))[: groups.numel()]
            scale = groups * per_group + float(state["nested_offset"])
        flat = from_nibbles(parts[".weight"].flatten(), parts[".weight.quant_map"].float(), high_first=True)
        shape = torch.Size(state["shape"])
        scales = scale.repeat_interleave(int(state["blocksize"]))
        return (flat[: shape.numel()] * scales[: shape.numel()]).view(shape)

    return Format(
        main=".weight",
        dtypes=frozenset({"U8"}),
        scales=(".weight.absmax", ".weight.quant_map", text),
        optional=(".weight.nested_absmax", ".weight.nested_quant_map"),
        values=values,
        shape=lambda shapes: (2 * shapes[".weight"][0], 1),  # the text, which is read later, has the true shape
    )


# ------------------------------------------------------------------ packed integers with scales and zero points


def unpacked(packed: Tensor, bits: int, *, dim: int) -> Tensor:
    """The unsigned integers of `bits` bits in 32-bit words, lowest bits first, along dimension `dim`."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    words = packed.movedim(dim, -1)[..., None]
    return ((words >> shifts) & ((1 << bits) - 1)).flatten(-2).movedim(-1, dim)


def _gptq(bits: int, *, zero_plus: int) -> Format:
    """GPTQ's: words hold inputs one below the other, `[in / words, out]`; the group of each input is given. The first
    version of the format stores each zero point less one.
    """

    def values(parts: Parts) -> Tensor:
        integers = unpacked(parts[".qweight"], bits, dim=0)
        scales, zeros = parts[".scales"].float(), unpacked(parts[".qzeros"], bits, dim=1) + zero_plus
        rows = len(integers)
        group = parts[".g_idx"].int() if ".g_idx" in parts else torch.arange(rows) // (rows // len(scales))
        return ((integers - zeros[group]) * scales[group]).t()

    return Format(
        main=".qweight",
        dtypes=frozenset({"I32"}),
        scales=(".qzeros", ".scales"),
        optional=(".g_idx",),
        values=values,
        shape=lambda shapes: (shapes[".qweight"][1], shapes[".qweight"][0] * 32 // bits),
    )


# Place of each output among the eight of a word.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def _awq_integers(packed: Tensor) -> Tensor:
    return unpacked(packed, 4, dim=1).view(len(packed), -1, 8)[..., list(_AWQ_ORDER)].flatten(1)


def _awq_values(parts: Parts) -> Tensor:
    """AWQ's: words hold outputs side by side, `[in, out / 8]`, in an order of their own."""
    integers, zeros = _awq_integers(parts[".qweight"]), _awq_integers(parts[".qzeros"])
    size = len(integers) // len(zeros)
    scales = parts[".scales"].float()
    return ((integers - zeros.repeat_interleave(size, dim=0)) * scales.repeat_interleave(size, dim=0)).t()


_AWQ = Format(
    main=".qweight",
    dtypes=frozenset({"I32"}),
    scales=(".qzeros", ".scales"),
    values=_awq_values,
    shape=lambda shapes: (shapes[".qweight"][1] * 8, shapes[".qweight"][0]),
)


def _packed_integers(bits: int) -> Format:
    """compressed-tensors': words hold inputs side by side, `[out, in / words]`, as numbers above the smallest one."""

    def values(parts: Parts) -> Tensor:
        rows, columns = parts[".weight_shape"].tolist()
        integers = unpacked(parts[".weight_packed"], bits, dim=1)[:, :columns] - (1 << bits - 1)
        scales = parts[".weight_scale"].float()
        zero = parts.get(".weight_zero_point")
        zeros = torch.zeros_like(scales)
        if zero is not None:
            zeros = (unpacked(zero, bits, dim=0)[:rows] - (1 << bits - 1)).float()
        size = -(-columns // scales.shape[1])
        group = parts[".weight_g_idx"].int() if ".weight_g_idx" in parts else torch.arange(columns) // size
        return (integers - zeros[:, group]) * scales[:, group]

    return Format(
        main=".weight_packed",
        dtypes=frozenset({"I32"}),
        scales=(".weight_scale", ".weight_shape"),
        optional=(".weight_zero_point", ".weight_g_idx"),
        values=values,
        shape=lambda shapes: (shapes[".weight_packed"][0], shapes[".weight_packed"][1] * 32 // bits),
    )


_METHODS: Mapping[str, tuple[Format, ...]] = {
    "fbgemm_fp8": (_EIGHT_BITS,),
    "mxfp4": (_MXFP4,),
}
_MODELOPT = {"FP8": (_EIGHT_BITS,), "NVFP4": (_NVFP4_MODELOPT,)}
