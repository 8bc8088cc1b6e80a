"""Verification: a draft is accepted if it equals the token that the model samples at its position.

Each sample uses the random number of its output position, whether there is a draft or not. So drafts change when a
token comes, but not which token comes: a request has the same tokens without drafts, greedy or sampled. A deterministic
draft is accepted with the probability that the model gives it, as in rejection sampling (Leviathan et al. 2023).
Decision 19 in docs/decisions describes the disadvantage for sampled drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accept_lengths(drafts: Tensor, sampled: Tensor, num_drafts: Tensor) -> Tensor:
    """Accept length of each row: the number of its leading accepted drafts plus one, int64 `[R]`, from 1 to K + 1.

    drafts       int64 `[R, K]`; row r has only the first `num_drafts[r]`
    sampled      int64 `[R, K + 1]`: the model's samples after the row's last token and after each draft

    No host sync.
    """
    index = torch.arange(drafts.shape[1], device=drafts.device)
    accepted = (drafts == sampled[:, :-1]) & (index < num_drafts[:, None])
    return 1 + accepted.to(torch.int64).cumprod(1).sum(1)
