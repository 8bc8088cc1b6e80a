"""Parts of a model that are divided over ranks: which rows and columns a rank has, and the modules that join the
results of all ranks. `shard.py` puts them into a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sidestream_kv.device.group import Group

Segments = tuple[tuple[int, int], ...]
"""A dimension of a tensor as segments, one behind the other: the size of each, and the number of equal pieces (heads,
groups, or single features) that it has.
"""


@dataclass(frozen=True, slots=True)
class Division:
    """A rank's part of one dimension.

    dim     the dimension
    whole   its size on one rank
    ranges  first index and number of each range that the rank has
    """

    dim: int
    whole: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Size of the dimension on the rank."""
        return sum(count for _, count in self.ranges)

    def of(self, whole: Tensor) -> Tensor:
        """The rank's part, as a new tensor."""
        return torch.cat([whole.detach().narrow(self.dim, first, count) for first, count in self.ranges], self.dim)


@dataclass(frozen=True, slots=True)
class Split:
    """One rank of several, whose parts of tensors are put on a device."""

    rank: int
    size: int
    device: torch.device

    def division(self, dim: int, segments: Segments) -> Division:
        """This rank's part of a dimension. If there are fewer pieces than ranks, ranks side by side have the same
        piece.
        """
        ranges, start = [], 0
        for size, pieces in segments:
            piece, own = size // pieces, max(pieces // self.size, 1)
            ranges.append((start + self.rank * pieces // self.size * piece, own * piece))
            start += size
        return Division(dim, start, tuple(ranges))

    def part(self, whole: Tensor, division: Division) -> nn.Parameter:
        """This rank's part of a weight, on the device. It is a copy, so the whole weight can be released."""
        return nn.Parameter(division.of(whole).to(self.device), requires_grad=False)


class Reduced(nn.Module):
    """A projection whose columns are divided; the products of all ranks are summed.

    columns   this rank's range of a whole input; None: the input is only this rank's part
    """

    def __init__(self, linear: Any, bias: nn.Parameter | None, group: Group, columns: slice | None) -> None:
        super().__init__()
        self.linear, self.bias = linear, bias
        self._group, self._columns = group, columns

    def forward(self, states: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        product: Tensor = self.linear(states if self._columns is None else states[..., self._columns])
        all_reduce(self._group, product)
        return product if self.bias is None else product + self.bias


class Gathered(nn.Module):
    """A projection whose rows are divided; the outputs of all ranks are gathered.

    rows   this rank's range of rows
    tied   the embedding, if this weight is a view of its weight; in a tuple, so that torch does not see a submodule
    """

    def __init__(self, linear: Any, group: Group, rows: slice, tied: nn.Module | None) -> None:
        super().__init__()
        self.linear = linear
        self.rows = rows
        self.tied: tuple[Any, ...] = () if tied is None else (tied,)
        self._group = group

    def forward(self, states: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]` of all ranks."""
        gathered: Tensor = all_gather(self._group, self.linear(states))
        return gathered


class GatheredNorm(nn.Module):
    """A norm over features that are divided: the whole norm, of the features of all ranks, on each rank."""

    def __init__(self, norm: nn.Module, group: Group) -> None:
        super().__init__()
        self.norm = norm
        self._group = group

    def forward(self, states: Tensor, gate: Tensor) -> Tensor:
        """`[..., features]` of states and of their gate to `[..., features]`, all of this rank."""
        size = states.shape[-1]
        both = torch.cat([states, gate.reshape(states.shape).to(states.dtype)], dim=-1)
        ranks = all_gather(self._group, both).unflatten(-1, (self._group.size, 2, size))
        whole: Tensor = self.norm(*(part.flatten(-2) for part in ranks.unbind(-2)))
        return whole.narrow(-1, self._group.rank * size, size)


def sum_output(group: Group, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """A forward hook that sums the outputs of all ranks."""
    output = output.contiguous()
    all_reduce(group, output)
    return output


# Excluded from compilation: the compiler does not know that all ranks must make these calls together.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def all_reduce(group: Group, values: Tensor) -> None:
    """See `Group.all_reduce`."""
    group.all_reduce(values)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def all_gather(group: Group, values: Tensor) -> Tensor:
    """See `Group.all_gather`."""
    return group.all_gather(values)
