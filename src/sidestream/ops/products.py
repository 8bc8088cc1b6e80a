"""Launches own matrix products on the current stream, without waits."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from sidestream_kv.device.kinds import on_gpu


class _Tile(NamedTuple):
    """Shape of a program, for up to `most` rows."""

    most: int | None
    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


# All tiles multiply by the same instruction on a GPU: 64 rows and 4 warps or multiples of both, the least that Hopper's
# takes. A program adds 16 inputs a time, in one accumulator. So the tile changes no bit, and may depend on the rows.
_HALF = (_Tile(64, 64, 32, 64, 4, 6), _Tile(256, 128, 64, 64, 8, 4), _Tile(None, 128, 128, 64, 8, 4))
_FLOAT = (_Tile(None, 32, 32, 32, 4, 2),)
_GROUP = 8


def multiply(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`[rows, outputs]`: the product of `states` [rows, inputs] with `weight` [outputs, inputs], plus `bias`
    [outputs], all of one dtype. The bits of a row depend on that row, the weight and the bias alone.
    """
    import triton

    from sidestream.ops.product_kernels import multiply

    (rows, inputs), outputs = states.shape, len(weight)
    result = states.new_empty(rows, outputs)
    if not rows:
        return result
    states, weight = (part if part.stride(1) == 1 else part.contiguous() for part in (states, weight))
    tiles = _FLOAT if states.dtype == torch.float32 else _HALF
    tile = next(tile for tile in tiles if tile.most is None or rows <= tile.most)
    grid: Any = multiply[(triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs),)]
    grid(
        states, weight, weight if bias is None else bias, result, rows, outputs, inputs, states.stride(0),
        weight.stride(0),
        BIAS=bias is not None, WHOLE=inputs % tile.inputs == 0, ROWS=tile.rows, OUTPUTS=tile.outputs,
        INPUTS=tile.inputs, GROUP=_GROUP, PRECISION="ieee", num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return result


class _RowTile(NamedTuple):
    """Shape of a program for one row, for weights with at least `least` inputs."""

    least: int
    outputs: int
    inputs: int
    stages: int


_ROW = (_RowTile(8192, 8, 1024, 2), _RowTile(0, 4, 2048, 1))


def multiply_few(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As `torch.nn.functional.linear` of `states` [rows, inputs]. One row is multiplied by a kernel that reads the
    weight faster than cuBLAS, and begins to read it before the previous kernel has ended (docs/decisions/0077).
    """
    if len(states) != 1 or weight.stride(1) != 1:
        return linear(states, weight, bias)
    import triton

    from sidestream.ops.product_kernels import multiply_row

    outputs, inputs = weight.shape
    tile = next(tile for tile in _ROW if inputs >= tile.least)
    chunk = min(tile.inputs, triton.next_power_of_2(inputs))
    result, overlap = states.new_empty(1, outputs), starts_early(states.device)
    grid: Any = multiply_row[(triton.cdiv(outputs, tile.outputs),)]
    grid(
        states if states.stride(1) == 1 else states.contiguous(), weight, weight if bias is None else bias, result,
        outputs, weight.stride(0),
        BIAS=bias is not None, WHOLE=inputs % chunk == 0 and outputs % tile.outputs == 0, INPUTS=inputs,
        OUTPUTS=tile.outputs, CHUNK=chunk, STAGES=tile.stages, OVERLAP=overlap, num_warps=4,
        **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip
    return result


@functools.cache
def starts_early(device: torch.device) -> bool:
    """Whether kernels of this device may start before the previous one has ended: Hopper and later GPUs."""
    return on_gpu(device) and torch.cuda.get_device_capability(device) >= (9, 0)
