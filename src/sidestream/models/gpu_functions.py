"""Keeps GPU kernels of other packages away from tensors that are not on a GPU.

Layers with recurrent state in transformers call functions for which packages have kernels: flash-linear-attention
(fla), causal-conv1d and mamba-ssm. If such a package is installed, transformers calls its kernels for all tensors. For
tensors of the meta device, on which layouts are determined, these kernels read address 0, and after that the process
cannot use the GPU any more. For tensors on a CPU, they raise an error.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn

_MADE_IN = "transformers.integrations.hub_kernels"  # the module that chooses between a package and the reference


def keep_kernels_on_gpu(module_class: type) -> None:
    """Let the functions in the transformers module that defines `module_class` use transformers' own code, in torch
    operations, if no argument is on a GPU. Changes the module for the whole process.
    """
    names = vars(sys.modules[module_class.__module__])
    for name, value in tuple(names.items()):
        function = _chooser(value)
        if function is not None:
            names[name] = _by_device(function, value)


def _chooser(value: object) -> FunctionType | None:
    """The function of transformers that chooses between a package and the reference, if `value` calls one."""
    if isinstance(value, nn.Module):  # if the package `kernels` is installed, such functions are modules
        value = inspect.getclosurevars(type(value).forward).nonlocals.get("func")
    if isinstance(value, FunctionType) and value.__globals__.get("__name__") == _MADE_IN:
        return value if hasattr(value, "__wrapped__") else None
    return None


def _by_device(function: FunctionType, on_gpu: Callable[..., Any]) -> Callable[..., Any]:
    reference: Callable[..., Any] = function.__wrapped__  # type: ignore[attr-defined]

    @functools.wraps(reference)
    def call(*args: Any, **named: Any) -> Any:
        for value in (*args, *named.values()):
            if isinstance(value, torch.Tensor) and value.is_cuda:
                return on_gpu(*args, **named)
        return reference(*args, **named)

    return call
