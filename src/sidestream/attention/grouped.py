"""A batch of a model whose layers with a sliding window have blocks of their own: each layer uses the batch of its
group.

On the thread that runs the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch

from sidestream.attention.interface import Attending, AttentionBackend, AttentionBatch, BatchRows, KVShape
from sidestream.attention.rotary import Rotation


class GroupedBatch:
    """See `AttentionBatch`.

    blocks   the batch over the blocks of the layers without a window
    pages    the batch over each part of the pages
    places   for each of the model's layers, its part of the pages (-1: none), and its index there
    """

    def __init__(
        self, blocks: AttentionBatch, pages: Sequence[AttentionBatch], places: Sequence[tuple[int, int]]
    ) -> None:
        self.blocks = blocks
        self.pages = pages
        self.places = places

    @property
    def slot_mapping(self) -> torch.Tensor:
        return self.blocks.slot_mapping

    def of_layer(self, layer: int) -> tuple[AttentionBatch, int]:
        """The batch of the layer's group, and the layer's index there."""
        part, index = self.places[layer]
        return (self.blocks if part < 0 else self.pages[part]), index

    def layer(self, index: int) -> torch.Tensor:
        batch, index = self.of_layer(index)
        return batch.layer(index)

    def part(self, begin: int, stop: int) -> GroupedBatch:
        """See `PagedBatch.part`; of batches that have it."""
        parts: list[Any] = [self.blocks, *self.pages]
        blocks, *pages = (batch.part(begin, stop) for batch in parts)
        return GroupedBatch(blocks, pages, self.places)

    def with_kv_shape(self, shape: KVShape) -> AttentionBatch:
        return self.blocks.with_kv_shape(shape)

    def write(self, key: torch.Tensor, value: torch.Tensor, layer: int, rotary: Rotation | None = None) -> None:
        batch, index = self.of_layer(layer)
        batch.write(key, value, index, rotary)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, **how: Unpack[Attending]
    ) -> torch.Tensor:
        batch, index = self.of_layer(layer)
        return batch.attend(query, key, value, index, **how)


def grouped_batch(
    backend: AttentionBackend,
    kv: torch.Tensor,
    rows: BatchRows,
    tables: torch.Tensor,
    *,
    pages_of: Callable[[torch.Tensor], torch.Tensor],
    positions: torch.Tensor,
    places: Sequence[tuple[int, int]],
    before_layer: Callable[[int], None],
) -> GroupedBatch:
    """The batch of one step over the pool `kv`.

    rows           the rows, with the tables of the blocks
    tables         integers [B, max_blocks, parts]: blocks of the pages of each row
    pages_of       returns integers [T, parts]: the page of each packed token, whose number int64 [T] it gets
    positions      int64 [T]: positions of the packed tokens
    before_layer   is called with i before layer i of the blocks is used, and with layers + part * layers + i before
                   layer i of a part of the pages is, for the number of layers in a block
    """
    layers, block_tokens = kv.shape[1], kv.shape[3]
    parts = tables.shape[2]
    ids = pages_of((positions // block_tokens).clamp(max=tables.shape[1] - 1)).to(torch.int64)
    slots = torch.where((rows.slot_mapping < 0)[:, None], -1, ids * block_tokens + (positions % block_tokens)[:, None])
    by_part = tables.permute(2, 0, 1).contiguous().to(backend.table_dtype)
    mappings = slots.t().contiguous()

    def pages(part: int) -> AttentionBatch:
        first = layers * (1 + part)
        return backend.batch(
            kv,
            replace(rows, slot_mapping=mappings[part], block_tables=by_part[part]),
            lambda index: before_layer(first + index),
        )

    return GroupedBatch(backend.batch(kv, rows, before_layer), [pages(part) for part in range(parts)], places)
