"""Lets a layer of Mamba 1 continue from a state: transformers' scan of such layers always begins with a state of zeros.

A state is linear in the one before, so the outputs from any state are those from zeros, plus what the first state
contributes to each token. The scan is replaced in the layer's own forward, and transformers' module stays as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu, softplus

_SCAN = "mamba_selective_scan"


class ContinuedScan:
    """The scan of one layer."""

    def __init__(self, scan: Callable[..., Any]) -> None:
        self._scan = scan
        self._firsts: Iterator[torch.Tensor] = iter(())

    def continue_from(self, state: torch.Tensor | None) -> None:
        """The state to begin the next scan with, `[rows, channels, state size]`, or the next scans, `[rows, scans,
        channels, state size]`: Zamba has one for each head. None: zeros.
        """
        self._firsts = iter(() if state is None else state.unbind(1) if state.ndim == 4 else (state,))

    def __call__(
        self,
        inputs: torch.Tensor,
        steps: torch.Tensor,
        decays: torch.Tensor,
        keys: torch.Tensor,
        queries: torch.Tensor,
        *,
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **others: Any,
    ) -> Any:
        """As transformers' function, whose arguments are hidden_states, dt, A, B, C and the named ones. Without
        `return_last_state`, the scan begins with zeros.
        """
        how = {"z": z, "delta_bias": delta_bias, "delta_softplus": delta_softplus}
        found = self._scan(inputs, steps, decays, keys, queries, **how, return_last_state=return_last_state, **others)
        first = next(self._firsts, None)
        if first is None or not return_last_state:
            return found
        outputs, last = found
        steps = steps if delta_bias is None else steps + delta_bias.to(steps.dtype)[..., None]
        steps = softplus(steps) if delta_softplus else steps
        left = torch.exp(decays[None, :, None] * steps.float().cumsum(-1)[..., None]) * first[:, :, None]
        added = torch.einsum("rctn,rnt->rct", left, queries.float())
        added = added if z is None else added * silu(z)
        return outputs + added.to(outputs.dtype), last + left[:, :, -1]


def continued(part: nn.Module) -> tuple[Callable[..., torch.Tensor], ContinuedScan | None]:
    """The forward of a layer, and its scan; None: the layer is not of Mamba 1, and its forward is its own."""
    written: Any = inspect.unwrap(type(part).forward)
    if _SCAN not in written.__code__.co_names:
        return part.forward, None
    names = written.__globals__
    scan = ContinuedScan(names[_SCAN])
    forward: Any = FunctionType(written.__code__, {**names, _SCAN: scan}, written.__name__, written.__defaults__)
    forward.__kwdefaults__ = written.__kwdefaults__
    return forward.__get__(part), scan
