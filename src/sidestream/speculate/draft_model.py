"""A smaller model drafts, token by token, and keeps up with every token that is computed."""

from __future__ import annotations

import torch
from torch import Tensor

from sidestream.models.adapter import PagedModel
from sidestream.models.draft import shape_of
from sidestream.speculate.likeliest import likeliest
from sidestream.speculate.proposer import Context, Shown


class DraftModelProposer:
    """Drafts the tokens that `model` holds for likeliest.

    num_layers   what `attach_draft` returned: layers of the pool that hold its KV
    vocab_size   of the model that is served: no token is drafted that it does not have
    shape        of its KV
    """

    name = "draft"
    hidden_size = 0

    def __init__(self, model: PagedModel, *, num_layers: int, vocab_size: int) -> None:
        self.model = model
        self.num_layers = num_layers
        self.shape = shape_of(model)
        self._common = min(vocab_size, model.vocab_size)

    def propose(self, context: Context, count: int) -> Tensor:
        """See `Proposer.propose`."""
        positions = context.lengths - 1
        tokens = context.tokens
        every = torch.arange(len(tokens), device=tokens.device)
        drafts = []
        for _ in range(count):
            batch = context.attend(positions).over(self.shape)
            # A row may have fewer drafts than another, and its end be that of what the model has positions for.
            reached = positions.clamp(max=self.model.max_model_len - 1)
            logits = self.model.forward(self._known(tokens), reached, batch, every)
            (tokens, _), positions = likeliest(logits[:, : self._common]), positions + 1
            drafts.append(tokens)
        return torch.stack(drafts, dim=1)

    def follow(self, shown: Shown) -> None:
        """See `Proposer.follow`."""
        nowhere = torch.empty(0, dtype=torch.int64, device=shown.tokens.device)
        self.model.forward(self._known(shown.tokens), shown.positions, shown.batch.over(self.shape), nowhere)

    def _known(self, tokens: Tensor) -> Tensor:
        """Ids that it can look up: a prompt may hold some that only the other model's wider vocabulary has."""
        return tokens.clamp(max=self.model.vocab_size - 1)
