"""The kinds of devices by name. Only this room and `config.py` spell the names. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CPU = "cpu"
"""Tensors in host memory."""
CUDA = "cuda"
"""Tensors on an NVIDIA GPU."""


def on_host(device: torch.device) -> bool:
    """Whether tensors of the device lie in host memory, where the host reads them without waiting for a GPU."""
    return device.type == CPU


def on_gpu(device: torch.device) -> bool:
    """Whether tensors of the device lie on an NVIDIA GPU."""
    return device.type == CUDA
