"""The device operations of a step besides the model: one interface, implemented in torch for a CPU and as Triton
kernels for a GPU. Takes tensors only; knows nothing of the runner, requests or streams.
"""

from sidestream.ops.interface import Ops
from sidestream.ops.torch_ops import TorchOps

__all__ = ["Ops", "TorchOps"]
