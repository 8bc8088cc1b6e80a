"""Device operations of a step outside the model: preparing inputs, sampling, and verifying drafts. The interface `Ops`
has two implementations: torch for a CPU, and Triton kernels for a GPU. They take only tensors; they do not use the
model runner, requests or streams.
"""

from sidestream.ops.interface import Ops
from sidestream.ops.torch_ops import TorchOps

__all__ = ["Ops", "TorchOps", "select_ops"]


def select_ops(*, has_kernels: bool) -> Ops:
    """The implementation for an engine's device. Called once, when the engine is built.

    has_kernels   whether the device runs Triton kernels. A CPU does not, and needs no Triton
    """
    if not has_kernels:
        return TorchOps()
    from sidestream.ops.triton_ops import TritonOps

    return TritonOps()
