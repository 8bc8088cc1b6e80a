"""Projections of the same hidden states that share one weight, so that one matrix product computes all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from sidestream.models.fp8 import Fp8Linear, joined_fp8


class JoinedPart(nn.Module):
    """A projection whose weight is a range of rows of a larger weight, which several projections share.

    In compiled code, each part multiplies by the whole weight, and the compiler keeps only one of these equal products
    (see `sidestream.models.compiled`).
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, first: int, stop: int) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self._first, self._stop = first, stop

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., stop - first]`."""
        if torch.compiler.is_compiling():
            return linear(states, self.weight, self.bias)[..., self._first : self._stop]
        bias = None if self.bias is None else self.bias[self._first : self._stop]
        return linear(states, self.weight[self._first : self._stop], bias)


def join_projections(parent: nn.Module, names: Sequence[str]) -> None:
    """Replace `parent`'s projections with these names by parts of one joined weight, if all of them exist as plain
    layers of the same kind. Their weights move to new memory.
    """
    holders = [_holder(parent, name) for name in names]
    parts = [getattr(holder, name, None) for holder, name in holders]
    eight_bits = [part for part in parts if isinstance(part, Fp8Linear)]
    if len(eight_bits) == len(parts) and (shared := joined_fp8(eight_bits)) is not None:
        for (holder, name), shared_part in zip(holders, shared, strict=True):
            setattr(holder, name, shared_part)
        return
    if not all(type(part) is nn.Linear for part in parts):
        return
    kinds = {(part.in_features, part.weight.dtype, part.bias is None) for part in parts if part is not None}
    if len(kinds) != 1:
        return
    weight = nn.Parameter(torch.cat([part.weight for part in parts if part is not None]), requires_grad=False)
    biases = [part.bias for part in parts if part is not None and part.bias is not None]
    bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
    first = 0
    for (holder, name), part in zip(holders, parts, strict=True):
        assert part is not None
        setattr(holder, name, JoinedPart(weight, bias, first, first + part.out_features))
        first += part.out_features


def _holder(parent: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Module and name under which a projection lies: inside of its adapters, if it has any (`models/lora.py`)."""
    child: Any = getattr(parent, name, None)
    return (child, "base") if hasattr(child, "base") else (parent, name)


def joined_product(states: torch.Tensor, parts: Sequence[Any]) -> torch.Tensor:
    """The outputs of all parts one after another in the last dimension: one product if they share a weight."""
    if all(type(part) is JoinedPart and part.weight is parts[0].weight for part in parts):
        return linear(states, parts[0].weight, parts[0].bias)
    return torch.cat([part(states) for part in parts], dim=-1)
