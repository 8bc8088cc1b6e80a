"""Drafts tokens with a smaller model, one after another. The draft model computes its own KV for every token that the
served model computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sidestream.models.draft import shape_of
from sidestream.speculate.proposer import Context, StepTokens

if TYPE_CHECKING:
    from sidestream.models.adapter import PagedModel


class DraftModelProposer:
    """Drafts the tokens with the largest logits of `model`.

    num_layers   number of layers of the block pool for the draft model's KV, from `attach_draft`
    vocab_size   vocabulary size of the served model; all drafts are below it
    shape        shape of the draft model's KV
    """

    name = "draft"
    hidden_size = 0

    def __init__(self, model: PagedModel, *, num_layers: int, vocab_size: int) -> None:
        self.model = model
        self.num_layers = num_layers
        self.shape = shape_of(model)
        self._common_vocab = min(vocab_size, model.vocab_size)

    def propose(self, context: Context, count: int) -> Tensor:
        positions = context.lengths - 1
        tokens = context.tokens
        every_row = torch.arange(len(tokens), device=tokens.device)
        drafts = []
        for _ in range(count):
            batch = context.attend(positions).with_kv_shape(self.shape)
            # All rows get `count` drafts, so a row near the maximum length would exceed the positions of the model.
            clamped = positions.clamp(max=self.model.max_model_len - 1)
            logits = self.model.forward(self._in_vocab(tokens), clamped, batch, every_row)
            (tokens, _), positions = context.ops.argmax(logits[:, : self._common_vocab]), positions + 1
            drafts.append(tokens)
        return torch.stack(drafts, dim=1)

    def follow(self, step: StepTokens) -> None:
        no_logits = torch.empty(0, dtype=torch.int64, device=step.tokens.device)
        self.model.forward(self._in_vocab(step.tokens), step.positions, step.batch.with_kv_shape(self.shape), no_logits)

    def _in_vocab(self, tokens: Tensor) -> Tensor:
        """Clamp token ids to the draft model's vocabulary, because the served model's vocabulary may be larger."""
        return tokens.clamp(max=self.model.vocab_size - 1)
