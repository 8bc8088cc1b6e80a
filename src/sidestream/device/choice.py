"""Which device this machine has for a name that a user gave. Called before anything large is loaded, so that a hopeless
wish ends at once.
"""

from __future__ import annotations

import importlib.util
import logging

import torch

from sidestream.errors import ConfigError

log = logging.getLogger(__name__)


def torch_device(name: str) -> torch.device:
    """Where tensors of the device `"cpu"`, `"cuda"` or `"auto"` live; `"auto"` is cuda where a GPU can be used.

    Raises ConfigError with what is missing when the device that was named cannot be used.
    """
    if name == "cpu":
        return torch.device("cpu")
    missing = why_no_gpu()
    if missing is None:
        return torch.device("cuda", 0)
    if name == "auto":
        if torch.cuda.is_available():
            log.warning("the GPU is not used: %s", missing)
        return torch.device("cpu")
    raise ConfigError(f"device is {name!r}: {missing}")


def why_no_gpu() -> str | None:
    """What keeps a GPU from being used, and what to do about it; None if nothing does."""
    from sidestream.device.cuda.device import open_driver

    try:
        open_driver()
    except ConfigError as missing:
        return str(missing)
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed, and kernels on the GPU need it: install the triton that torch names"
    return None
