"""What a flight needs of a model, and the batches that it is run on besides the flight's own."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from sidestream.attention.paged import AttentionBatch, PagedBatch
from sidestream.attention.triton import DeviceBatch, Partials
from sidestream.attention.triton.batch import ungated
from sidestream.kv.layout import KVLayout


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

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, logit_rows: torch.Tensor) -> torch.Tensor:
        """Float32 logits `[R, vocab_size]` at the packed positions `logit_rows`; on the compute stream."""
        ...

    def forward_with_hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, logit_rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, and what the last layer left at each packed token: `[T, hidden_size]`. Called where a proposer reads it."""
        ...


def one_token_each(
    kv: Tensor, tables: Tensor, positions: Tensor, is_nobody: Tensor, block_tokens: int, partials: Partials | None
) -> AttentionBatch:
    """Rows with one token each, which wait for nothing: tables `[n, blocks]`, positions int64 `[n]`; rows of nobody, bool `[n]`, write nothing.

    `partials` None: attention by torch, which knows no rows of nobody.
    """
    count = len(positions)
    slots = tables.to(torch.int64).gather(1, (positions // block_tokens)[:, None]).squeeze(1) * block_tokens + positions % block_tokens
    if partials is None:
        return PagedBatch(
            kv=kv,
            slots=slots,
            block_tables=tables.to(torch.int64),
            query_starts=tuple(range(count + 1)),
            kv_lens=tuple((positions + 1).tolist()),
            num_decode=count,
            before_layer=ungated,
        )
    return DeviceBatch(
        kv=kv,
        slots=torch.where(is_nobody, -1, slots),
        block_tables=tables,
        query_starts=torch.arange(count + 1, device=positions.device),
        kv_lens=torch.where(is_nobody, 0, positions + 1),
        split_rows=count,
        partials=partials,
        before_layer=ungated,
    )
