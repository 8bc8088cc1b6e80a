"""Drafts tokens with a multi-token-prediction head of the model, one after another: each drafted token is an input of
the next one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sidestream.models.mtp import MtpHead
from sidestream.speculate.proposer import Context, StepTokens


class MtpProposer:
    """Drafts the tokens with the largest logits of the head, which is attached to the model."""

    name = "mtp"
    num_layers = 1

    def __init__(self, head: MtpHead) -> None:
        self.head = head
        self.hidden_size = head.hidden_size

    def propose(self, context: Context, count: int) -> Tensor:
        positions = context.lengths - 1
        tokens, before = context.tokens, context.hidden
        drafts = []
        for _ in range(count):
            hidden, before = self.head.step(tokens, before, positions, context.attend(positions))
            (tokens, _), positions = context.ops.argmax(self.head.logits(hidden)), positions + 1
            drafts.append(tokens)
        return torch.stack(drafts, dim=1)

    def follow(self, step: StepTokens) -> None:
        assert step.before is not None, "a head needs the model's hidden states"
        self.head.write_kv(step.tokens, step.before, step.positions, step.batch)
