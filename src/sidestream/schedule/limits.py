"""Limits of the scheduler: sizes of one step, fairness between requests, and where a prompt is cut into chunks. Pure
arithmetic.

Outputs are bitwise equal only if the shapes of the chunks are equal. So a prompt is always cut at the same positions,
whether or not a cache supplies some of its tokens. A prompt of `known` tokens is cut at multiples of `chunk_tokens`,
and at the last block border before its end, so that its tail (the tokens after this border) is a separate chunk. If a
cache supplies all tokens up to that border, the same tail is computed as without a cache: equal shapes, equal bits,
equal tokens. If a cache supplies fewer tokens, the first chunk after them may be shorter, and the output is equal up to
rounding (docs/identity.md).

On a GPU the separate tail is off by default, because it costs one more pass over all weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from sidestream_kv.kv.layout import blocks_before_window

# Prompt tokens that a step may compute whatever the target of the gap: with fewer, a step takes nearly as long.
_LEAST_PREFILL = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that all parts of the scheduler share.

    token_budget    largest number of tokens in one step, without drafts
    tail_apart      compute the tail of a prompt as a separate chunk, see `chunk_stop`
    target_gap_s    largest time between two tokens of a request that prefill in the same steps should cause; None: no
                    bound. Works only without `tail_apart`, because it cuts chunks
    aging_steps     number of steps without a request after which its priority improves by one
    max_promotions  how often one request may wait for the disk; then it recomputes its blocks
    max_probes      largest number of waiting requests that one step considers for admission
    state_interval  number of blocks between two checkpoints (kept recurrent states) in a prompt; 0: none at intervals
    window          tokens of the model's largest sliding window; 0: no layer has one
    """

    block_tokens: int
    chunk_tokens: int
    token_budget: int
    prefix_cache: bool = True
    tail_apart: bool = True
    target_gap_s: float | None = None
    aging_steps: int = 256
    max_promotions: int = 2
    max_probes: int = 64
    state_interval: int = 0
    window: int = 0

    def num_blocks(self, num_tokens: int) -> int:
        """Number of blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_tokens)

    def prefill_budget(self, num_decoding: int, prefill_rate: float | None) -> int:
        """Number of prompt tokens that a step with `num_decoding` decode rows may compute.

        prefill_rate   measured prompt tokens per second; None: unknown
        """
        room = self.token_budget - num_decoding
        if not num_decoding or self.tail_apart or self.target_gap_s is None or prefill_rate is None:
            return room
        return min(room, max(_LEAST_PREFILL, int(prefill_rate * self.target_gap_s)))

    def blocks_before_window(self, num_blocks: int) -> int:
        """Of the first `num_blocks` blocks of a request that computes only the tokens after them, the number of leading
        blocks that it reads only in layers without a sliding window.
        """
        # rule: window-reaches-back-from-the-first-token
        return blocks_before_window(num_blocks * self.block_tokens, self.window, self.block_tokens)


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
