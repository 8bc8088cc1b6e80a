"""Projections of the same hidden states that share one weight, so that one matrix product computes all of them. With
LoRA adapters, the same product also multiplies by their `down` matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from sidestream.models.fp8 import Fp8Linear, joined_fp8
from sidestream.models.invariant import InvariantLinear, invariant_linear
from sidestream.models.lora import AdaptedLinear, ColumnMask
from sidestream.ops.adapters import NARROW, launch_add_adapters

_MOST_PROJECTIONS = 3

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
# The product of each class of layers that can be joined.
_MULTIPLY: dict[type, Multiply] = {nn.Linear: linear, InvariantLinear: invariant_linear}


class JoinedPart(nn.Module):
    """A projection whose weight is a range of rows of a larger weight, which several projections share.

    In compiled code, each part multiplies by the whole weight, and the compiler keeps only one of these equal products
    (see `sidestream.models.compiled`).
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, first: int, stop: int, multiply: Multiply = linear
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.multiply = multiply
        self._first, self._stop = first, stop

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., stop - first]`."""
        if torch.compiler.is_compiling():
            return self.multiply(states, self.weight, self.bias)[..., self._first : self._stop]
        bias = None if self.bias is None else self.bias[self._first : self._stop]
        return self.multiply(states, self.weight[self._first : self._stop], bias)


def join_projections(parent: nn.Module, names: Sequence[str]) -> None:
    """Replace `parent`'s projections with these names by parts of one joined weight, if all of them exist as plain
    layers of the same kind. Their weights move to new memory.
    """
    adapted = [getattr(parent, name, None) for name in names]
    if all(isinstance(part, AdaptedLinear) for part in adapted):
        join_adapted(adapted)
        return
    holders = [_holder(parent, name) for name in names]
    parts = [getattr(holder, name, None) for holder, name in holders]
    eight_bits = [part for part in parts if isinstance(part, Fp8Linear)]
    if len(eight_bits) == len(parts) and (shared := joined_fp8(eight_bits)) is not None:
        for (holder, name), shared_part in zip(holders, shared, strict=True):
            setattr(holder, name, shared_part)
        return
    if not all(type(part) in _MULTIPLY for part in parts):
        return
    kinds = {(type(part), part.in_features, part.weight.dtype, part.bias is None) for part in parts if part is not None}
    if len(kinds) != 1:
        return
    weight = nn.Parameter(torch.cat([part.weight for part in parts if part is not None]), requires_grad=False)
    biases = [part.bias for part in parts if part is not None and part.bias is not None]
    bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
    first, multiply = 0, _MULTIPLY[type(parts[0])]
    for (holder, name), part in zip(holders, parts, strict=True):
        assert part is not None
        setattr(holder, name, JoinedPart(weight, bias, first, first + part.out_features, multiply))
        first += part.out_features


class AdaptedJoin(nn.Module):
    """One to three projections of the same hidden states, and their adapters: one matrix product, and one kernel.

    weight  `[outputs + projections * columns, in_features]`: the projections, then all their `down`
    up      `[outputs, columns]`
    ends    numbers of outputs up to the end of each projection
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, up: torch.Tensor, ends: Sequence[int], mask: ColumnMask
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.up: torch.Tensor
        self.register_buffer("up", up)
        self._ends = [*ends]
        self._mask = mask

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """`[..., T, in_features]` to `[..., T, outputs]`, for a pass that has a mask."""
        assert self._mask.value is not None
        outputs: torch.Tensor = add_adapters(
            linear(states, self.weight, self.bias), self._mask.value, self.up, self._ends
        )
        return outputs


def join_adapted(parts: Sequence[Any]) -> None:
    """Let compiled code compute these projections of the same hidden states, and their adapters, by one `AdaptedJoin`,
    if all of them are plain layers of the same kind that no other call has joined. Their matrices move to new memory.
    """
    bases = [part.base for part in parts]
    if len(parts) > _MOST_PROJECTIONS or not all(type(base) is nn.Linear for base in bases):
        return
    if (
        len(
            {
                (base.in_features, base.weight.dtype, part.down.dtype, base.bias is None)
                for base, part in zip(bases, parts, strict=True)
            }
        )
        != 1
    ):
        return
    matrices = [base.weight for base in bases] + [part.down for part in parts]
    weight = nn.Parameter(torch.cat(matrices), requires_grad=False)
    up, ends, bias = torch.cat([part.up for part in parts]), [*accumulate(base.out_features for base in bases)], None
    if bases[0].bias is not None:
        padding = weight.new_zeros(len(weight) - len(up))
        bias = nn.Parameter(torch.cat([*(base.bias for base in bases), padding]), requires_grad=False)
    joined = AdaptedJoin(weight, bias, up, ends, parts[0].mask)
    downs = weight.data[len(up) :].chunk(len(parts))
    for part, down, (first, stop) in zip(parts, downs, pairwise([0, *ends]), strict=True):
        part.join(JoinedPart(weight, bias, first, stop), joined, down, up[first:stop], first)


@torch.library.custom_op("sidestream::add_adapters", mutates_args=())
def add_adapters(product: torch.Tensor, mask: torch.Tensor, up: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """The outputs of joined projections with their adapters, `[..., T, outputs]`.

    product  `[..., T, outputs + projections * columns]`: the outputs, then the products with each projection's `down`
    mask     `[T, columns]`: which columns count for each token
    up       `[outputs, columns]`
    ends     numbers of outputs up to the end of each of one to three projections
    """
    outputs = len(up)
    if product.is_cuda and all(end % NARROW == 0 for end in ends):
        result = product.new_empty(*product.shape[:-1], outputs)
        launch_add_adapters(product.view(-1, product.shape[-1]), mask, up, result.view(-1, outputs), ends)
        return result
    kept = [small * mask for small in product[..., outputs:].chunk(len(ends), -1)]
    added = [linear(small, up[first:stop]) for small, (first, stop) in zip(kept, pairwise([0, *ends]), strict=True)]
    return product[..., :outputs] + torch.cat(added, -1)


@add_adapters.register_fake
def _(product: torch.Tensor, mask: torch.Tensor, up: torch.Tensor, ends: list[int]) -> torch.Tensor:
    return product.new_empty(*product.shape[:-1], len(up))


def _holder(parent: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Module and name under which a projection lies: inside of its adapters, if it has any (`models/lora.py`)."""
    child: Any = getattr(parent, name, None)
    return (child, "base") if hasattr(child, "base") else (parent, name)


def joined_product(states: torch.Tensor, parts: Sequence[Any]) -> torch.Tensor:
    """The outputs of all parts one after another in the last dimension: one product if they share a weight."""
    if all(type(part) is JoinedPart and part.weight is parts[0].weight for part in parts):
        product: torch.Tensor = parts[0].multiply(states, parts[0].weight, parts[0].bias)
        return product
    return torch.cat([part(states) for part in parts], dim=-1)
