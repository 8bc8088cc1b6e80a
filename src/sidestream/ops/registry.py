"""The choice of an implementation of the device operations."""

from __future__ import annotations

from sidestream.ops.interface import Ops
from sidestream.ops.torch_ops import TorchOps


def select_ops(*, has_kernels: bool) -> Ops:
    """The implementation for an engine's device. Called once, when the engine is built.

    has_kernels   whether the device runs Triton kernels. A CPU does not, and needs no Triton
    """
    if not has_kernels:
        return TorchOps()
    from sidestream.ops.triton_ops import TritonOps

    return TritonOps()
