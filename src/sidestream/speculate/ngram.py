"""Prompt lookup (n-gram drafts): proposes the tokens that followed an earlier occurrence of the last few tokens.

Needs no model. Works where output repeats input: code, edits, quotes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sidestream.speculate import devices
from sidestream.speculate.proposer import Context, StepTokens


@dataclass(frozen=True, slots=True)
class NgramProposer:
    """Finds the longest suffix of `longest` to `shortest` tokens that occurred before, the latest of equals
    (Saxena 2023).

    Drafts the tokens after that occurrence, and repeats them when they end. Without an occurrence, repeats the last
    token.
    """

    longest: int = 4
    shortest: int = 1
    name: str = "ngram"
    hidden_size: int = 0
    num_layers: int = 0

    def propose(self, context: Context, count: int) -> Tensor:
        """See `Proposer.propose`. Reads `[R, width]` numbers once for each suffix length."""
        if devices.has_kernels(context.history):
            from sidestream.speculate import launch  # Triton, which a CPU does not need

            return launch.look_up(
                context.history, context.rows, context.lengths, count, longest=self.longest, shortest=self.shortest
            )
        history, lengths = context.history[context.rows], context.lengths[:, None]
        width = history.shape[1]
        position = torch.arange(width, device=history.device)
        last = (lengths - 1).clamp(min=0)
        # After n iterations, matched[r, p] is the length, up to n, of the row's suffix that also ends at position p.
        matched = torch.zeros_like(history)
        matches = position < last
        for back in range(self.longest):
            wanted = history.gather(1, (last - back).clamp(min=0))
            matches = matches & (history.roll(back, 1) == wanted) & (position >= back)
            matched += matches
        # One rank for both orders: the longest match first, then the latest.
        rank = torch.where(matched >= self.shortest, matched.to(torch.int64) * width + position, -1)
        best, _ = rank.max(1, keepdim=True)
        found = torch.where(best >= 0, best % width, last - 1)
        positions = found + 1 + torch.arange(count, device=history.device) % (last - found)
        return history.gather(1, positions).to(torch.int64)

    def follow(self, step: StepTokens) -> None:
        """Nothing to do: it keeps no state."""
