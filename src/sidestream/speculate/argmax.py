"""Greedy choice of a token: what a draft head proposes, and a request with temperature 0 samples."""

from __future__ import annotations

import torch
from torch import Tensor

from sidestream.speculate import devices


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids of the largest logits, int64 `[R]`, the lowest id among equals; and whether they are valid, bool `[R]`.

    logits `[R, vocab_size]`. A row with NaN or +inf, or with -inf only, is invalid and gets id 0. Enqueues on the
    current stream without a host sync.
    """
    if devices.has_kernels(logits):
        from sidestream.speculate import launch  # Triton, which a CPU does not need

        return launch.argmax(logits)
    finite = logits.amax(-1).isfinite()
    return torch.where(finite, logits.argmax(-1), 0), finite
