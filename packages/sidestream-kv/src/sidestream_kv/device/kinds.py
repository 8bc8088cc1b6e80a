"""The names of the kinds of devices. Only this package and `config.py` contain these names as text. Does not import
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CPU = "cpu"
"""A device whose tensors are in host memory."""
CUDA = "cuda"
"""A device whose tensors are on an NVIDIA GPU."""
SIM = "sim"
"""The simulated device for tests, whose tensors are in host memory."""


def on_host(device: torch.device) -> bool:
    """Whether tensors of the device are in host memory, so that the host reads them without waiting for a GPU."""
    return device.type == CPU


def on_gpu(device: torch.device) -> bool:
    """Whether tensors of the device are on an NVIDIA GPU."""
    return device.type == CUDA
