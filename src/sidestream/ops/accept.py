"""Verification: a draft is accepted if it equals the token that the model samples at its position.

Each sample uses the random number of its output position, whether there is a draft or not. So drafts change how early a
token is sampled, but not which token: a request gets the same tokens as without drafts, greedy or sampled. A
deterministic draft is accepted with the probability that the model gives it, as in rejection sampling (Leviathan et al.
2023). docs/decisions/0019-drafts-decide-when-and-never-which.md describes the disadvantage for sampled drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accept_lengths(drafts: Tensor, sampled: Tensor, num_drafts: Tensor) -> Tensor:
    """Accept length of each row: the number of its leading accepted drafts plus one, int64 `[R]`, from 1 to K + 1.

    drafts       int64 `[R, K]`; row r has `num_drafts[r]` drafts, and the other values of the row are ignored
    sampled      int64 `[R, K + 1]`: the tokens that the model samples after the row's last token and after each draft

    No host sync.
    """
    index = torch.arange(drafts.shape[1], device=drafts.device)
    accepted = (drafts == sampled[:, :-1]) & (index < num_drafts[:, None])
    return 1 + accepted.to(torch.int64).cumprod(1).sum(1)
