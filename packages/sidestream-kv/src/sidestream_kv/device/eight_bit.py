"""Packs vectors of KV into 8 bits, and unpacks them: the arithmetic, in torch. Called inside work of a stream, on the
stream's thread; on a GPU, `cuda/kernels.py` computes the same.

A vector's scale is its largest absolute value / 127, so packing what was unpacked gives the same bytes again: a block
that is loaded and stored again does not change further. A vector with an element that is not finite is unpacked as NaN.
"""

from __future__ import annotations

import torch

from sidestream_kv.types import Vectors

LARGEST = 127
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def pack(plain: torch.Tensor, vectors: Vectors) -> torch.Tensor:
    """The packed form of plain vectors. Both are uint8 `[n]`, contiguous."""
    numbers = plain.view(getattr(torch, vectors.dtype)).view(-1, vectors.elements).float()
    scales = (numbers.abs().amax(1, keepdim=True) / LARGEST).clamp_min_(SMALLEST_SCALE)
    packed = torch.empty(len(numbers), vectors.packed_bytes, dtype=torch.uint8)
    packed.view(torch.int8)[:, : vectors.elements] = (numbers / scales).add_(0.5).floor_()
    packed[:, vectors.elements :] = scales.view(torch.uint8)
    return packed.view(-1)


def unpack(packed: torch.Tensor, vectors: Vectors) -> torch.Tensor:
    """The plain form of packed vectors. Both are uint8 `[n]`, contiguous."""
    rows = packed.view(-1, vectors.packed_bytes)
    scales = rows[:, vectors.elements :].contiguous().view(torch.float32)
    numbers = rows[:, : vectors.elements].view(torch.int8).float().mul_(scales)
    return numbers.to(getattr(torch, vectors.dtype)).view(-1).view(torch.uint8)
