"""LongRoPE and dynamic NTK scaling with one set of frequencies for all lengths.

transformers switches to the long factors once any sequence of a batch is longer than the model's original training
length, and dynamic scaling changes with the longest sequence. So a sequence's KV would depend on the other rows of its
batch, and change while the sequence grows. Called while a model loads.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def fix_longrope(module: nn.Module, *, long: bool) -> None:
    """Make every longrope embedding use the long factors, or the short ones, at all lengths; in place."""
    for part in module.modules():
        if getattr(part, "rope_type", None) == "longrope":
            rope: Any = part
            past_the_switch = rope.config.rope_parameters["original_max_position_embeddings"] + 1
            _fix(rope, past_the_switch if long else None)


def fix_dynamic_rope(module: nn.Module, length: int) -> None:
    """Make every dynamic embedding use the frequencies of sequences of `length` tokens at all lengths; in place."""
    for part in module.modules():
        if getattr(part, "rope_type", None) == "dynamic":
            _fix(part, length)


def _fix(rotary: Any, length: int | None) -> None:
    frequencies, _ = ROPE_INIT_FUNCTIONS[rotary.rope_type](rotary.config, rotary.inv_freq.device, seq_len=length)
    rotary.register_buffer("inv_freq", frequencies, persistent=False)
    rotary.register_buffer("original_inv_freq", frequencies.clone(), persistent=False)
    rotary.rope_type = "default"  # with this type, frequencies do not depend on the length
