"""Chunked prefill: where a prompt is cut into chunks. Pure arithmetic.

Outputs are bitwise equal only if the shapes of the chunks are equal. So a prompt is always cut at the same positions,
whether or not a cache supplies some of its tokens. A prompt of `known` tokens is cut at multiples of `chunk_tokens`,
and at the last block border before its end, so that its tail (the tokens after this border) is a separate chunk. If a
cache supplies all tokens up to that border, the same tail is computed as without a cache: equal shapes, equal bits,
equal tokens. If a cache supplies fewer tokens, the first chunk after them may be shorter, and the output is equal up to
rounding (docs/identity.md).

On a GPU the separate tail is off by default, because it costs one more pass over all weights.
"""

from __future__ import annotations


def reusable_tokens(known: int, block_tokens: int) -> int:
    """Number of tokens that a cache may supply: whole blocks, but never the last token: its logits are needed."""
    return (known - 1) // block_tokens * block_tokens


def chunk_stop(start: int, known: int, *, chunk_tokens: int, block_tokens: int, tail_apart: bool = True) -> int:
    """End of the chunk that begins at `start`, which is below `known`. `tail_apart`: whether the tail is a separate
    chunk.
    """
    tail = reusable_tokens(known, block_tokens)
    border = (start // chunk_tokens + 1) * chunk_tokens
    if not tail_apart:
        return min(border, known)
    return min(border, tail) if start < tail else known
