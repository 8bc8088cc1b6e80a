"""How far drafts were right: a draft is accepted if it is the very token that the model draws in its place.

Every draw takes the random number that belongs to its place among the row's outputs, whether or not anything was
drafted there (`execute/sample.py`). So drafts decide how soon a token comes, never which one: greedy or sampled, a
row's tokens are those that it would have without drafts. A draft that is certain is accepted as often as rejection
sampling would (Leviathan et al. 2023), with the probability that the model gives it; docs/decisions/0019 says what is
given up for drafts that are drawn themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accept_lengths(drafts: Tensor, drawn: Tensor, num_drafts: Tensor) -> Tensor:
    """Tokens that each row goes on by: its leading drafts that were drawn, and the token drawn behind them. int64
    `[R]`, 1 to K + 1.

    drafts int64 `[R, K]`, of which row r has the first `num_drafts[r]` · drawn int64 `[R, K + 1]`: what was drawn
    behind the row's own last token and behind each draft. Reads nothing back.
    """
    place = torch.arange(drafts.shape[1], device=drafts.device)
    right = (drafts == drawn[:, :-1]) & (place < num_drafts[:, None])
    return 1 + right.to(torch.int64).cumprod(1).sum(1)
