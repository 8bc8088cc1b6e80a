"""LongRoPE with one set of frequencies for all lengths.

transformers switches to the long factors once any sequence of a batch is longer than the model's original training
length. So a sequence's KV would depend on the other rows of its batch, and change while the sequence grows. Called
while a model loads.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def fix_longrope(module: nn.Module, *, long: bool) -> None:
    """Make every longrope embedding use the long factors, or the short ones, at all lengths; in place."""
    for part in module.modules():
        if getattr(part, "rope_type", None) == "longrope":
            _fix(part, long=long)


def _fix(rotary: Any, *, long: bool) -> None:
    past_the_switch = rotary.config.rope_parameters["original_max_position_embeddings"] + 1
    frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](
        rotary.config, rotary.inv_freq.device, seq_len=past_the_switch if long else None
    )
    rotary.register_buffer("inv_freq", frequencies, persistent=False)
    rotary.register_buffer("original_inv_freq", frequencies.clone(), persistent=False)
    rotary.rope_type = "default"  # with this type, frequencies do not depend on the length
