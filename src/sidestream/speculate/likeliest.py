"""The likeliest token: what a head drafts, and what a row at temperature 0 draws."""

from __future__ import annotations

import torch
from torch import Tensor

from sidestream.speculate import devices


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of logits `[R, vocab_size]`: the ids of the largest, int64 `[R]`, the lowest of equals; and whether they are
    numbers, bool `[R]`.

    Not a number: a row with NaN or +inf, or with nothing but -inf; its id is 0. Enqueues on the current stream and
    reads nothing back.
    """
    if devices.has_kernels(logits):
        from sidestream.speculate import launch  # Triton, which a CPU does not need

        return launch.likeliest(logits)
    finite = logits.amax(-1).isfinite()
    return torch.where(finite, logits.argmax(-1), 0), finite
