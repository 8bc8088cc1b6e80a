"""Projections whose weights stay in 8-bit floats on the GPU. Their inputs are rounded to 8-bit floats as well, each
token with scales of its own, so a token's result does not depend on the other tokens of a batch.

Measured on an H200, all products of Qwen3-8B's 36 layers, weights from memory: torch's product with one scale for
everything takes 2.4 ms for 1 to 32 rows, with a scale for each row of the weight 3.6 ms, bfloat16 4.0 ms. So scales of
rows and tokens are multiplied into the result of the first. Scales of blocks cannot be: that product takes 3.3 to 3.8
ms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from sidestream.errors import InvariantError
from sidestream.models.divided import Division
from sidestream.models.latent import READ_BY_ATTENTION
from sidestream.models.quantised import QuantisedTensor, scaled
from sidestream_kv.device.kinds import on_gpu, on_host

FP8 = torch.float8_e4m3fn
_MOST = 448.0  # the largest value of FP8
ONE_BLOCK = 128
"""Rows, and columns, of a block: the only size that torch's product supports."""
_MULTIPLE = 16  # of rows and of columns, in torch's product
# Values of torch's ScalingType and SwizzleType.
_BY_BLOCK_OF_TOKEN, _BY_BLOCK, _NOT_SWIZZLED = 4, 5, 0


def is_faster(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `Fp8Linear` runs on a device, and faster than a product in `dtype`."""
    return on_gpu(device) and dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (9, 0)


def kept_eight_bits(state_dict: Mapping[str, Any] | None, device: torch.device, dtype: torch.dtype) -> Kept | None:
    """The weights of a quantised checkpoint that stay in 8-bit floats; None: none do."""
    return None if state_dict is None or not is_faster(device, dtype) else Kept(state_dict, dtype)


class Kept:
    """Quantised weights of a checkpoint that stay in 8-bit floats.

    While transformers builds the module, such a weight is one number in the shape of the weight, which takes no memory.
    `restore` then replaces the projections that have it.
    """

    def __init__(self, state_dict: Mapping[str, Any], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._read: dict[int, Callable[[], tuple[Tensor, Tensor]]] = {}
        self._numbers: list[Tensor] = []
        self.units: dict[str, int] = {}
        """By the names of the kept weights: rows and columns that cannot be torn apart."""
        self.state_dict = {name: self._stand_in(name, tensor) for name, tensor in state_dict.items()}
        """The state dict for transformers."""

    def _stand_in(self, name: str, tensor: Any) -> Any:
        # Experts are stacked, and embeddings are looked up: these are not projections. Latent attention reads a weight.
        if not isinstance(tensor, QuantisedTensor) or not name.endswith("_proj.weight") or ".experts." in name:
            return tensor
        if name.endswith(f"{READ_BY_ATTENTION}.weight"):
            return tensor
        found = tensor.eight_bits()
        if found is None or not can_keep(tensor.shape, found[0]):
            return tensor
        number = torch.zeros((), dtype=self._dtype)
        self._numbers.append(number)
        self._read[number.data_ptr()] = found[1]
        self.units[name] = ONE_BLOCK if _is_blocks(tensor.shape, found[0]) else _MULTIPLE
        return number.expand(tensor.shape)

    def restore(self, module: nn.Module) -> None:
        """Replace the projections of a module that was built from `state_dict`, on the host."""
        for parent in list(module.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear and (read := self._read.pop(child.weight.data_ptr(), None)) is not None:
                    setattr(parent, name, Fp8Linear(*read(), child.bias))
        if self._read:
            raise InvariantError(f"{len(self._read)} weights in 8-bit floats have no projection in the module")


def can_keep(weight_shape: Sequence[int], scale_shape: Sequence[int]) -> bool:
    """Whether `Fp8Linear` supports a weight `[out, in]` with scales of this shape."""
    if len(weight_shape) != 2 or any(size % _MULTIPLE for size in weight_shape):
        return False
    rows = (weight_shape[0],)
    return tuple(scale_shape) in ((), (1,), rows, (*rows, 1)) or _is_blocks(weight_shape, scale_shape)


def _is_blocks(weight_shape: Sequence[int], scale_shape: Sequence[int]) -> bool:
    """Whether these are scales of whole blocks."""
    blocks = tuple(size // ONE_BLOCK for size in weight_shape)
    return tuple(scale_shape) == blocks and not any(size % ONE_BLOCK for size in weight_shape)


class Fp8Linear(nn.Module):
    """A Linear with a weight in 8-bit floats.

    weight   `[out, in]`, FP8
    scale    float32 `[out]`, or `[out / 128, in / 128]` for blocks: a value of the weight times its scale is the value
             that is meant
    """

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        """`scale` may also be one number for the whole weight, or `[out, 1]`."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        if scale.numel() == 1:
            scale = scale.reshape(1).expand(self.out_features)
        elif scale.shape == (self.out_features, 1):
            scale = scale[:, 0]
        self.weight: Tensor
        self.scale: Tensor
        self.one: Tensor
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale.float().contiguous())
        self.register_buffer("one", torch.ones((), device=weight.device))
        self.bias = bias

    @classmethod
    def of(cls, plain: nn.Linear, *, blocks: bool = False) -> Fp8Linear:
        """A Linear with the weight of `plain`, rounded: with a scale for each row, or for each block."""
        weight = plain.weight.detach().float()
        size = (ONE_BLOCK, ONE_BLOCK) if blocks else (1, weight.shape[1])
        cut = weight.view(weight.shape[0] // size[0], size[0], weight.shape[1] // size[1], size[1])
        scale = cut.abs().amax((1, 3)).clamp(min=1e-12) / _MOST
        values = (cut / scale[:, None, :, None]).view(weight.shape).to(FP8)
        return cls(values, scale, plain.bias)

    def forward(self, states: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`, in the dtype of `states`."""
        flat = states.reshape(-1, self.in_features)
        product = _by_rows if self.scale.dim() == 1 else _by_blocks
        result = product(flat, self.weight, self.scale, self.one)
        if self.bias is not None:
            result = result + self.bias
        return result.view(*states.shape[:-1], self.out_features)

    def keep_only(self, division: Division, device: torch.device) -> None:
        """Reduce the weight to a rank's rows or columns, on `device`. Blocks must not be torn apart."""
        self.weight = division.of(self.weight).to(device)
        if self.scale.dim() == 2:
            ranges = tuple((first // ONE_BLOCK, count // ONE_BLOCK) for first, count in division.ranges)
            division = Division(division.dim, division.whole // ONE_BLOCK, ranges)
        self.scale = (division.of(self.scale) if division.dim == 0 or self.scale.dim() == 2 else self.scale).to(device)
        self.out_features, self.in_features = self.weight.shape

    def values(self) -> Tensor:
        """The weight that is meant, float32."""
        return scaled(self.weight, self.scale, (1, 1) if self.scale.dim() == 1 else (ONE_BLOCK, ONE_BLOCK))


def _rounded(states: Tensor, scale: Tensor) -> Tensor:
    return (states.float() / scale).clamp(-_MOST, _MOST).to(FP8)


def _by_rows(states: Tensor, weight: Tensor, scale: Tensor, one: Tensor) -> Tensor:
    token_scale = states.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / _MOST
    product = torch._scaled_mm(
        _rounded(states, token_scale), weight.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return (product.float() * (token_scale * scale)).to(states.dtype)


def _by_blocks(states: Tensor, weight: Tensor, scale: Tensor, one: Tensor) -> Tensor:
    # The product needs a multiple of 8 tokens.
    count = len(states)
    states = pad(states, (0, 0, 0, -count % 8))
    cut = states.float().view(len(states), -1, ONE_BLOCK)
    # The product needs the tokens' scales side by side, with these strides also for a single token: `contiguous` would
    # leave that one as it is.
    by_block = (cut.abs().amax(-1).clamp(min=1e-12) / _MOST).t().clone(memory_format=torch.contiguous_format)
    token_scale = by_block.t()
    if on_host(states.device):  # which has no such product: for the check of a model before it is divided
        rounded = _rounded(cut, token_scale[..., None]).float() * token_scale[..., None]
        values = linear(rounded.view(states.shape), scaled(weight, scale, (ONE_BLOCK, ONE_BLOCK)))
        return values[:count].to(states.dtype)
    # torch's own wrapper, `scaled_mm`, cannot be compiled in torch 2.11.
    product: Tensor = torch.ops.aten._scaled_mm_v2(
        _rounded(cut, token_scale[..., None]).view(states.shape), weight.t(),
        [token_scale], [_BY_BLOCK_OF_TOKEN], [_NOT_SWIZZLED], [scale.t()], [_BY_BLOCK], [_NOT_SWIZZLED],
        None, torch.bfloat16,
    )  # fmt: skip
    return product[:count].to(states.dtype)


class Fp8Part(nn.Module):
    """A projection whose weight is a range of rows of a larger one, which several projections share: see
    `joined.JoinedPart`.
    """

    def __init__(self, whole: Fp8Linear, first: int, stop: int) -> None:
        super().__init__()
        self.whole = whole
        self._range = slice(first, stop)

    def forward(self, states: Tensor) -> Tensor:
        """`[..., in]` to `[..., stop - first]`."""
        result: Tensor = self.whole(states)[..., self._range]
        return result


def joined_fp8(parts: Sequence[Fp8Linear]) -> list[Fp8Part] | None:
    """The same projections of one input, as parts of one weight; None: their scales or biases do not fit together."""
    kinds = {(part.in_features, part.scale.dim(), part.bias is None) for part in parts}
    if len(kinds) != 1:
        return None
    biases = [part.bias for part in parts if part.bias is not None]
    whole = Fp8Linear(
        torch.cat([part.weight for part in parts]),
        torch.cat([part.scale for part in parts]),
        nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None,
    )
    stops = torch.tensor([part.out_features for part in parts]).cumsum(0).tolist()
    return [Fp8Part(whole, stop - part.out_features, stop) for part, stop in zip(parts, stops, strict=True)]
