"""The attention backends of this package. A new backend needs its own file and one line in `BACKENDS`."""

from __future__ import annotations

import torch

from sidestream.attention.interface import AttentionBackend
from sidestream.attention.paged import TorchAttention
from sidestream.attention.triton.backend import TritonAttention
from sidestream.errors import ConfigError

BACKENDS: tuple[type[AttentionBackend], ...] = (
    TritonAttention,
    TorchAttention,
)
"""In order of preference: an engine uses the first backend that supports its device."""


def select_backend(device: torch.device) -> type[AttentionBackend]:
    """The backend for a device; called when an engine is built. Raises ConfigError when none supports it."""
    for backend in BACKENDS:
        if backend.supports(device):
            return backend
    names = ", ".join(backend.__name__ for backend in BACKENDS)
    raise ConfigError(f"no attention backend supports {device} (there are {names}): give another device")
