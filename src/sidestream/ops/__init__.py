"""Device operations of a step outside the model: preparing inputs, sampling, and verifying drafts. The interface `Ops`
has two implementations: torch for a CPU, and Triton kernels for a GPU. They take only tensors; they do not use the
model runner, requests or streams.
"""

from sidestream.ops.interface import Ops
from sidestream.ops.torch_ops import TorchOps

__all__ = ["Ops", "TorchOps"]
