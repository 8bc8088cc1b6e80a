"""A head of the model drafts, feeding itself: token by token, a layer each."""

from __future__ import annotations

import torch
from torch import Tensor

from sidestream.models.mtp import MtpHead
from sidestream.speculate.likeliest import likeliest
from sidestream.speculate.proposer import Context, Shown


class MtpProposer:
    """Drafts the likeliest tokens by a head that was attached to the model."""

    name = "mtp"
    num_layers = 1

    def __init__(self, head: MtpHead) -> None:
        self.head = head
        self.hidden_size = head.hidden_size

    def propose(self, context: Context, count: int) -> Tensor:
        """See `Proposer.propose`."""
        positions = context.lengths - 1
        tokens, before = context.tokens, context.hidden
        drafts = []
        for _ in range(count):
            predicts, before = self.head.step(tokens, before, positions, context.attend(positions))
            (tokens, _), positions = likeliest(self.head.logits(predicts)), positions + 1
            drafts.append(tokens)
        return torch.stack(drafts, dim=1)

    def follow(self, shown: Shown) -> None:
        """See `Proposer.follow`."""
        assert shown.before is not None, "a head is shown hidden states"
        self.head.keep_up(shown.tokens, shown.before, shown.positions, shown.batch)
