"""Bounds of one step and of fairness between requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that all parts of the scheduler share.

    token_budget    tokens of one step, drafts not counted
    tail_apart      whether the tail of a prompt is a chunk of its own, see `chunk_stop`
    aging_steps     steps of waiting that improve a request's priority by one
    max_promotions  times that a request waits for the disk before it is recomputed
    max_probes      waiting requests that one step considers for admission
    state_interval  blocks between checkpoints of recurrent state inside a prompt; 0: none but at its end
    """

    block_tokens: int
    chunk_tokens: int
    token_budget: int
    prefix_cache: bool = True
    tail_apart: bool = True
    aging_steps: int = 256
    max_promotions: int = 2
    max_probes: int = 64
    state_interval: int = 0

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_tokens)
