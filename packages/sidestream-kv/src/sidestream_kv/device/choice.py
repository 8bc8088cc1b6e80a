"""Turns the device name from the user into a torch device. Called before a model is loaded, so that a wrong name fails
at once.
"""

from __future__ import annotations

import importlib.util
import logging

import torch

from sidestream_kv.errors import ConfigError

log = logging.getLogger(__name__)


def torch_device(name: str) -> torch.device:
    """The torch device for `"cpu"`, `"cuda"` or `"auto"`. `"auto"` is the GPU if one can be used, else the CPU.

    Raises ConfigError if `"cuda"` cannot be used; the error names the missing part.
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
    """The reason why no GPU can be used, with a remedy; None if a GPU can be used."""
    from sidestream_kv.device.cuda.device import open_driver

    try:
        open_driver()
    except ConfigError as missing:
        return str(missing)
    if importlib.util.find_spec("triton") is None:
        return (
            "triton is not installed, and kernels on the GPU need it: install the version of triton that torch requires"
        )
    return None
