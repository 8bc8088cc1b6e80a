"""Chunked prefill: where a prompt is cut into chunks. Pure arithmetic.

Results repeat to the bit only if shapes repeat, so the same tokens are always cut at the same places, whatever a cache
supplied. A prompt of `known` tokens is cut at multiples of `chunk_tokens`, and once more at the last block border
before its end, so that its tail is a chunk of its own. A run that finds everything up to that border in a tier computes
the same tail as the run that computed all of it: equal shapes, equal bits, equal tokens. A run that finds only a part
continues from there with a first chunk that may be shorter: equal up to rounding (docs/identity.md).

On a GPU a separate tail costs one more pass over all weights, so there it is off by default.
"""

from __future__ import annotations


def reusable_tokens(known: int, block_tokens: int) -> int:
    """Tokens that a cache may supply: whole blocks, but never the last token, whose logits are needed."""
    return (known - 1) // block_tokens * block_tokens


def chunk_stop(start: int, known: int, *, chunk_tokens: int, block_tokens: int, tail_apart: bool = True) -> int:
    """End of the chunk that begins at `start < known`; `tail_apart`: the tail is a chunk of its own."""
    tail = reusable_tokens(known, block_tokens)
    border = (start // chunk_tokens + 1) * chunk_tokens
    if not tail_apart:
        return min(border, known)
    return min(border, tail) if start < tail else known
