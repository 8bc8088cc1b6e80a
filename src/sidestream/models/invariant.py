"""Forward passes in which the bits of a token depend on its own sequence alone (docs/decisions/0074).

On a CPU, a module computes `ROWS` tokens at a time, so that every operation of torch has the same shapes in every pass.
On a GPU, its Linears multiply by a kernel that adds in the same order for every number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from sidestream.attention.interface import Attended

ROWS = 16
"""Tokens that a CPU computes at a time. The products of one token take 1.5 to 2.2 times as long as alone, those of a
prompt twice as long (docs/decisions/0074): fewer rows would be better for the first and worse for the second.
"""


class Divisible(Attended, Protocol):
    """A batch that can be cut into parts."""

    def part(self, begin: int, stop: int) -> Attended:
        """See `PagedBatch.part`."""
        ...


def forward_in_blocks(
    forward: Callable[[Tensor, Tensor, Attended, Tensor], Tensor],
    tokens: Tensor,
    positions: Tensor,
    batch: Attended,
    logit_rows: Tensor,
) -> Tensor:
    """The logits `[R, vocab_size]` of `PagedModel.forward`, from calls of `forward` with `ROWS` tokens, the last one
    padded. A call returns logits of all its tokens, or none. On a CPU.
    """
    everywhere, blocks = torch.arange(ROWS), list[Tensor]()
    for begin in range(0, len(tokens), ROWS):
        stop = min(begin + ROWS, len(tokens))
        wanted = logit_rows[(logit_rows >= begin) & (logit_rows < stop)]
        part, indices = cast(Divisible, batch).part(begin, stop), everywhere if len(wanted) else wanted
        missing = ROWS - (stop - begin)
        ids, at = (nn.functional.pad(states[begin:stop], (0, missing)) for states in (tokens, positions))
        blocks.append(forward(ids, at, part, indices)[wanted - begin])
    order = (logit_rows // ROWS).argsort(stable=True)
    logits = torch.cat(blocks)
    return torch.empty_like(logits).index_copy_(0, order, logits)


class InvariantLinear(nn.Linear):
    """A Linear on a GPU whose result for a row has the same bits for every number of rows."""

    def forward(self, states: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        product: Tensor = invariant_linear(states, self.weight, self.bias)
        return product


def use_invariant_linears(module: Any) -> None:
    """Turn all plain Linears of a module into InvariantLinears, in place."""
    for part in module.modules():
        if type(part) is nn.Linear:
            part.__class__ = InvariantLinear


@torch.library.custom_op("sidestream::invariant_linear", mutates_args=())
def invariant_linear(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As `torch.nn.functional.linear`; see `sidestream.ops.products.multiply`. All products of the mode on a GPU."""
    from sidestream.ops.products import multiply

    product: Tensor = multiply(states.reshape(-1, states.shape[-1]), weight, bias)
    return product.view(*states.shape[:-1], len(weight))


@invariant_linear.register_fake
def _(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return states.new_empty(*states.shape[:-1], weight.shape[0])
