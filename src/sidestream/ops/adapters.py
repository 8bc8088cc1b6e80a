"""Launches the kernel of LoRA adapters on the current stream, without waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

NARROW = 16
"""Number of outputs of which each projection must have a multiple."""
_FEW_TOKENS = 32
_MANY_OUTPUTS = 8192


def launch_add_adapters(product: Tensor, mask: Tensor, up: Tensor, result: Tensor, ends: Sequence[int]) -> None:
    """See `sidestream.models.joined.add_adapters`; all tensors have two dimensions, and `result` is written."""
    import triton

    from sidestream.ops.adapter_kernels import add_adapters

    (count, width), (outputs, columns) = product.shape, up.shape
    tokens = _FEW_TOKENS if count <= _FEW_TOKENS else 64
    wide = 32 if tokens == _FEW_TOKENS and outputs <= _MANY_OUTPUTS else 64
    size = next(size for size in (wide, 32, NARROW) if all(end % size == 0 for end in ends))
    grid: Any = add_adapters[(outputs // size, triton.cdiv(count, tokens))]
    grid(
        product, mask, up, result, count, outputs, width, *(*ends[:-1], outputs, outputs)[:2],
        COLUMNS=columns, CHUNK=max(16, min(128, triton.next_power_of_2(columns))), TOKENS=tokens, OUTPUTS=size,
        PRECISION="ieee", num_warps=4,
    )  # fmt: skip
