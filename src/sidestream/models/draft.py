"""The KV of a draft model. It lies at the end of the served model's blocks and moves with them, so a block always has
the KV of both models (hazard H15 in docs/glossary.md).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import xxhash

from sidestream.attention.interface import KVShape
from sidestream.errors import ModelError

if TYPE_CHECKING:
    from sidestream.models.adapter import PagedModel


def attach_draft(model: PagedModel, draft: PagedModel, *, max_model_len: int, num_tokens: int) -> int:
    """Extend the served model's blocks by the draft model's KV, and its fingerprint by the draft model's fingerprint.
    Returns the number of layers that were added to a block.

    max_model_len   tokens of the longest request
    num_tokens      size of the tokenizer's vocabulary

    Raises ModelError if the draft model keeps recurrent state or does not fit: block_tokens and dtype must be equal,
    and its context and vocabulary large enough.
    """
    layout, own = model.layout, draft.layout
    if draft.state_layout is not None:
        raise ModelError(
            f"the draft model {draft.name} keeps recurrent state, which a draft model cannot: choose a draft model in "
            "which all layers are attention"
        )
    if own.dtype != layout.dtype or own.block_tokens != layout.block_tokens:
        raise ModelError(
            f"the draft model {draft.name} has KV in {own.dtype} and blocks of {own.block_tokens} tokens, "
            f"{model.name} in {layout.dtype} and of {layout.block_tokens}: "
            "load both with the same dtype and block_tokens"
        )
    if draft.max_model_len < max_model_len:
        raise ModelError(
            f"the draft model {draft.name} supports {draft.max_model_len} tokens, a request may have "
            f"{max_model_len}: lower max_model_len, or choose another draft model"
        )
    if draft.vocab_size < num_tokens:
        raise ModelError(
            f"the draft model {draft.name} has a vocabulary of {draft.vocab_size} tokens, the tokenizer {num_tokens}: "
            "choose a draft model with all tokens of the tokenizer"
        )
    shape = shape_of(draft)
    layer = layout.layer_bytes // layout.value_bytes
    width = own.num_kv_heads * own.head_dim
    extra = -(-shape.values(own.block_tokens) // layer)
    while (layout.num_layers + extra) * layer % width:  # `attention/paged.py` needs such a block size
        extra += 1
    model.layout = replace(layout, num_layers=layout.num_layers + extra)
    model.fingerprint = xxhash.xxh3_128(f"{model.fingerprint} drafted by {draft.fingerprint}".encode()).hexdigest()
    return extra


def shape_of(draft: PagedModel) -> KVShape:
    """Shape of the draft model's KV in a block."""
    own = draft.layout
    return KVShape(own.num_layers, own.num_kv_heads, own.head_dim, draft.num_heads, own.latent_dim)
