"""What a step needs of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from sidestream.attention.interface import AttentionBatch
from sidestream.kv.layout import KVLayout

Left = Callable[[torch.Tensor], None]


class ForwardModel(Protocol):
    """What the executor needs of a model."""

    @property
    def layout(self) -> KVLayout:
        """Where its KV lies."""
        ...

    @property
    def vocab_size(self) -> int:
        """Width of its logits."""
        ...

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """Logits `[R, vocab_size]` at the packed positions `logit_rows`; on the compute stream."""
        ...

    def forward_with_hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        logit_rows: torch.Tensor,
        *,
        left: Left,
    ) -> torch.Tensor:
        """The same; `left` is told what the last layer left at each packed token, `[T, hidden_size]`, before the logits
        are made of it. Called where a proposer reads it.
        """
        ...
