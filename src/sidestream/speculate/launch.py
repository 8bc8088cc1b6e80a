"""Launches of `kernels`. Enqueues on the current stream without a host sync, so it can be captured. Needs Triton."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sidestream.speculate import kernels


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See `sidestream.speculate.argmax.argmax`."""
    rows, width = logits.shape
    parts = -(-width // kernels.LANES.value)
    maxima = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    indices = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    finite = torch.empty(rows, dtype=torch.bool, device=logits.device)
    first: Any = kernels.argmax_of_parts[(rows, parts)]
    first(logits, maxima, indices, width, logits.stride(0), parts, num_warps=8)
    second: Any = kernels.argmax_of_maxima[(rows,)]
    second(maxima, indices, tokens, finite.view(torch.uint8), parts, num_warps=1)
    return tokens, finite


def look_up(history: Tensor, rows: Tensor, lengths: Tensor, count: int, *, longest: int, shortest: int) -> Tensor:
    """See `NgramProposer.propose`."""
    drafts = torch.empty(len(rows), count, dtype=torch.int64, device=history.device)
    grid: Any = kernels.look_up[(len(rows),)]
    grid(history, rows, lengths, drafts, history.shape[1], history.stride(0), longest, shortest, count, num_warps=4)
    return drafts
