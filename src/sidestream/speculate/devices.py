"""Chooses between Triton kernels and torch."""

from __future__ import annotations

from torch import Tensor


def has_kernels(tensor: Tensor) -> bool:
    """Whether the Triton kernels can take the tensor: it is on a GPU. Elsewhere torch computes the same."""
    return tensor.is_cuda
