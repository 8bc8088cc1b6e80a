"""Launches the kernels of experts on the current stream, without waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, sigmoid
from torch.nn.functional import gelu, relu, silu

_MOST_SORTED = 4096
"""Pairs that the kernel sorts. Its work grows with their square."""
_GROUPED_ROWS = 256
"""From so many pairs an expert on, torch's grouped products are faster."""
_FEW_ROWS = 16  # the fewest that `tl.dot` takes
MOST_SCORES, MOST_LARGEST = 1024, 32
"""Bounds of `largest_of_rows`: scores of a row, and how many of them are asked for."""


class Sorted(NamedTuple):
    """The pairs of a token and one of its experts, sorted by expert; pair `p` is that of token `p // top_k`. If there
    are few pairs, each stays at its place and is a tile of its own, and nothing but `chosen` is written.

    chosen    int64 [P]: the expert of each pair
    order     int32 [P]: the pair at each position
    position  int32 [P]: the position of each pair
    ends      int32 [experts]: number of pairs of each expert and of those before it
    tiles     int32 [P, 3]: expert, first position and end of the pairs of each tile. The last ones of the `_tiling`
              have an expert number that is too large, and those behind it are not written
    """

    chosen: Tensor
    order: Tensor
    position: Tensor
    ends: Tensor
    tiles: Tensor


def _tiling(pairs: int, experts: int) -> tuple[int, int]:
    """Most pairs of a tile, about as many as an expert has, and most tiles."""
    rows = _FEW_ROWS if pairs <= _FEW_ROWS * experts else 32 if pairs <= 32 * experts else 64
    return rows, min(pairs, experts + pairs // rows)


def _few(pairs: int, experts: int) -> bool:
    """Whether so few pairs rarely have an expert in common, so that sorting them takes longer than it saves."""
    return 4 * pairs <= experts


def sort_by_expert(chosen: Tensor, experts: int) -> Sorted:
    """Sort the pairs with the expert numbers `chosen` [P]. P is at least 1."""
    import triton

    from sidestream.ops.expert_kernels import sort_by_expert

    pairs = len(chosen)
    rows, most_tiles = _tiling(pairs, experts)
    if pairs > _MOST_SORTED:
        values, order = chosen.sort(stable=True)
        numbers = torch.arange(max(pairs, experts), device=chosen.device, dtype=torch.int32)
        position = torch.empty_like(order, dtype=torch.int32)
        position[order] = numbers[:pairs]
        ends = torch.searchsorted(values, numbers[:experts].to(values.dtype), right=True, out_int32=True)
        starts = torch.cat((ends.new_zeros(1), ends))
        last_tile = (-(-ends.diff(prepend=ends.new_zeros(1)) // rows)).cumsum(0, dtype=torch.int32)
        tile = numbers[:most_tiles]
        expert = torch.searchsorted(last_tile, tile, right=True, out_int32=True)
        own = expert.clamp(max=experts - 1)
        first = starts[own] + (tile - torch.cat((last_tile.new_zeros(1), last_tile))[own]) * rows
        stop = torch.minimum(first + rows, ends[own])
        tiles = torch.empty(pairs, 3, dtype=torch.int32, device=chosen.device)
        tiles[:most_tiles] = torch.stack((expert, first, stop), 1)
        return Sorted(chosen, order.int(), position, ends, tiles)
    empty = chosen.new_empty
    result = Sorted(chosen, *(empty(size, dtype=torch.int32) for size in (pairs, pairs, experts, (pairs, 3))))
    if _few(pairs, experts):
        return result
    part = 32
    grid: Any = sort_by_expert[(triton.cdiv(pairs, part),)]
    grid(
        *result, pairs, most_tiles,
        EXPERTS=experts, PADDED=triton.next_power_of_2(experts), ROWS=rows, PART=part, CHUNK=256, num_warps=4,
    )  # fmt: skip
    return result


GATES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda gate, up: silu(gate) * up,
    "gelu": lambda gate, up: gelu(gate, approximate="tanh") * up,
    "clamped": lambda gate, up: gate.clamp(max=7) * sigmoid(gate.clamp(max=7) * 1.702) * (up.clamp(-7, 7) + 1),
    "relu2": lambda gate, _: relu(gate).square(),
}
"""Activations that `multiply_by_expert` applies. All but `relu2` have two inputs, a gate and a factor."""


def _activate(products: Tensor, gate: str, alternate: bool) -> Tensor:
    import triton

    from sidestream.ops.expert_kernels import activate

    rows, width = products.shape
    width //= _inputs_of(gate)
    result, lanes = products.new_empty(rows, width), 1024
    grid: Any = activate[(rows, triton.cdiv(width, lanes))]
    offset = 0 if gate == "relu2" else 1 if alternate else width
    grid(products, result, width, 2 if alternate else 1, offset, GATE=gate, LANES=lanes, num_warps=4)
    return result


def _inputs_of(gate: str) -> int:
    return 1 if gate in ("", "relu2") else 2


def multiply_by_expert(
    states: Tensor, weight: Tensor, bias: Tensor | None, shared: Tensor | None, by: Sorted, divisor: int,
    gate: str = "", alternate: bool = False,
) -> Tensor:  # fmt: skip
    """`[P, outputs]`: the product of each sorted pair's states with the weight `[experts, inputs, outputs]` of its
    expert, plus the bias `[experts, outputs]`. The states of pair `p` are row `p // divisor` of `states`; divisor 0:
    `states` are in sorted order.

    shared      weight of an expert that all tokens have, with strides as those of one in `weight`: there are T rows
                more, behind those of the pairs, and if the divisor is 0, so have `states`
    gate        the activation of the products, which may halve the number of outputs: see `GATES`
    alternate   gates and factors alternate in the outputs; else all gates come first
    """
    import triton

    from sidestream.ops.expert_kernels import multiply_by_expert

    pairs, (experts, inputs, outputs) = len(by.order), weight.shape
    if weight.dtype == torch.bfloat16 and pairs >= _GROUPED_ROWS * experts:
        own = states[by.order // divisor] if divisor else states[:pairs]
        product = torch._grouped_mm(own, weight, offs=by.ends)
        product = product if bias is None else product + bias[by.chosen[by.order]]
        if shared is not None:
            product = torch.cat((product, (states if divisor else states[pairs:]) @ shared))
        return _activate(product, gate, alternate) if gate else product
    tokens = 0 if shared is None else len(states) if divisor else len(states) - pairs
    result = states.new_empty(pairs + tokens, outputs // _inputs_of(gate))
    rows, most_tiles = _tiling(pairs, experts)
    per_program, chunk, stages = (64, 128, 3) if rows == _FEW_ROWS else (128, 64, 4)
    few = _few(pairs, experts)
    grid: Any = multiply_by_expert[(triton.cdiv(outputs, per_program), most_tiles + triton.cdiv(tokens, rows))]
    grid(
        states, weight, weight if bias is None else bias, weight if shared is None else shared, by.order,
        by.chosen if few else by.tiles, result, pairs, tokens, most_tiles, divisor or 1, inputs, outputs,
        states.stride(0), weight.stride(0), weight.stride(2), weight.stride(1),
        EXPERTS=experts, SORTED=not few, GATHER=divisor > 0, BIAS=bias is not None, GATE=gate, ALTERNATE=alternate,
        ROWS=rows, OUTPUTS=per_program, INPUTS=chunk, PRECISION="ieee", num_warps=4, num_stages=stages,
    )  # fmt: skip
    return result


def add_by_token(products: Tensor, weights: Tensor, by: Sorted, added: Tensor | None) -> Tensor:
    """`[T, outputs]`: for each token, the sum of its products, in sorted order, times their `weights` [T, top_k], plus
    its product behind those of the pairs, if there are more products. If `added` is given, plus that, in its shape.
    """
    import triton

    from sidestream.ops.expert_kernels import add_by_token

    (tokens, top_k), width, pairs = weights.shape, products.shape[1], len(by.order)
    added = None if added is None else added.contiguous()
    result = products.new_empty(tokens, width) if added is None else torch.empty_like(added)
    lanes = 512
    grid: Any = add_by_token[(tokens, triton.cdiv(width, lanes))]
    grid(
        products, weights, by.position, result if added is None else added, result, pairs, width, weights.stride(0),
        SORTED=not _few(pairs, len(by.ends)), SHARED=len(products) > pairs, ADDED=added is not None, TOP=top_k,
        LANES=lanes, num_warps=2,
    )  # fmt: skip
    return result


def largest_of_rows(
    scores: Tensor, count: int, score: str = "", correction: Tensor | None = None, normalised: bool = False,
    scale: float = 1.0, dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `torch.topk(scores, count)`, of the last dimension; of equal scores, the first ones.

    score        "softmax" or "sigmoid": of these functions of `scores`
    correction   float32 [experts], added for the order only
    normalised   the values are divided by their sum
    scale        factor of the values
    dtype        of the values; None: as `scores`
    """
    import triton

    from sidestream.ops.expert_kernels import largest_of_rows

    width = scores.shape[-1]
    rows = scores.reshape(-1, width)
    values = scores.new_empty(*scores.shape[:-1], count, dtype=dtype)
    indices = torch.empty_like(values, dtype=torch.int64)
    grid: Any = largest_of_rows[(len(rows),)]
    grid(
        rows, rows if correction is None else correction, values, indices, width, rows.stride(0), scale,
        COUNT=count, WIDTH=triton.next_power_of_2(width), PLACES=triton.next_power_of_2(count), SCORE=score,
        CORRECTED=correction is not None, NORMALISED=normalised, num_warps=1 if width <= 256 else 4,
    )  # fmt: skip
    return values, indices
