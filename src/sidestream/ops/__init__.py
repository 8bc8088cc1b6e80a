"""The device operations of a step besides the model. One interface has two implementations: torch for a CPU, and Triton
kernels for a GPU. They take only tensors, and know nothing about the runner, requests or streams.
"""

from sidestream.ops.interface import Ops
from sidestream.ops.torch_ops import TorchOps

__all__ = ["Ops", "TorchOps"]
