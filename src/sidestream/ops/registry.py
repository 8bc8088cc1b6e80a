"""The choice of an implementation of the device operations."""

from __future__ import annotations

from sidestream.ops.interface import Ops
from sidestream.ops.torch_ops import TorchOps


def select_ops(*, has_kernels: bool) -> Ops:
    """The implementation for an engine's device; called once, when the engine is built.

    has_kernels   the device runs Triton kernels; a CPU does not, and Triton need not be installed there
    """
    if not has_kernels:
        return TorchOps()
    from sidestream.ops.triton_ops import TritonOps

    return TritonOps()
