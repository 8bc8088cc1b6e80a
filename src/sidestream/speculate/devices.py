"""Which tensors kernels of ours can take."""

from __future__ import annotations

from torch import Tensor


def has_kernels(tensor: Tensor) -> bool:
    """Whether they run where the tensor is: on a GPU. Elsewhere torch computes the same, and triton need not be
    installed.
    """
    return tensor.is_cuda
