"""Resolves a device name from the user. Called before a model is loaded, so that a wrong name fails at once."""

from __future__ import annotations

import importlib.util
import logging

import torch

from sidestream.errors import ConfigError

log = logging.getLogger(__name__)


def torch_device(name: str) -> torch.device:
    """The torch device for `"cpu"`, `"cuda"` or `"auto"`, which is cuda where a GPU is usable.

    Raises ConfigError that names the missing part if `"cuda"` is unusable.
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
    """Why a GPU is unusable, and the remedy; None if it is usable."""
    from sidestream.device.cuda.device import open_driver

    try:
        open_driver()
    except ConfigError as missing:
        return str(missing)
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed, and kernels on the GPU need it: install the triton that torch names"
    return None
