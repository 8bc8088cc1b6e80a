"""Prompt lookup: what followed the last few tokens when they came before. Costs no model, and much is repeated in code,
edits and quotes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sidestream.speculate import devices
from sidestream.speculate.proposer import Context, Shown


@dataclass(frozen=True, slots=True)
class NgramProposer:
    """Looks for the longest run of the last `longest` to `shortest` tokens that came before, the latest of equals
    (Saxena 2023).

    Drafts what followed it, and goes round where that ends. Where nothing came before, the last token is drafted again.
    """

    longest: int = 4
    shortest: int = 1
    name: str = "ngram"
    hidden_size: int = 0
    num_layers: int = 0

    def propose(self, context: Context, count: int) -> Tensor:
        """See `Proposer.propose`. Reads `[R, width]` numbers once for each length of a run."""
        if devices.has_kernels(context.history):
            from sidestream.speculate import launch  # Triton, which a CPU does not need

            return launch.look_up(
                context.history, context.rows, context.lengths, count, longest=self.longest, shortest=self.shortest
            )
        history, lengths = context.history[context.rows], context.lengths[:, None]
        width = history.shape[1]
        place = torch.arange(width, device=history.device)
        last = (lengths - 1).clamp(min=0)
        # After step n, `run` says of each place how many tokens up to it are those that the row ends with, n at most.
        run = torch.zeros_like(history)
        going_on = place < last
        for back in range(self.longest):
            wanted = history.gather(1, (last - back).clamp(min=0))
            going_on = going_on & (history.roll(back, 1) == wanted) & (place >= back)
            run += going_on
        # The longest run, then the latest: one number says both.
        rank = torch.where(run >= self.shortest, run.to(torch.int64) * width + place, -1)
        best, _ = rank.max(1, keepdim=True)
        found = torch.where(best >= 0, best % width, last - 1)
        places = found + 1 + torch.arange(count, device=history.device) % (last - found)
        return history.gather(1, places).to(torch.int64)

    def follow(self, shown: Shown) -> None:
        """It keeps nothing."""
