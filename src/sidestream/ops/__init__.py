"""Device operations of a step outside the model: preparing inputs, sampling, and verifying drafts. `Ops` is in torch,
for a CPU; its subclass `TritonOps` has Triton kernels, for a GPU. They take only tensors; they do not use the model
runner, requests or streams.
"""

from __future__ import annotations

from sidestream.ops.torch_ops import Ops

__all__ = ["Ops", "select_ops"]


def select_ops(*, has_kernels: bool) -> Ops:
    """The implementation for an engine's device. Called once, when the engine is built.

    has_kernels   whether the device runs Triton kernels. A CPU does not, and needs no Triton
    """
    if not has_kernels:
        return Ops()
    from sidestream.ops.triton_ops import TritonOps

    return TritonOps()
