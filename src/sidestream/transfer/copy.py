"""Copying blocks between two memories of one layout, in as few calls as possible. Runs on whichever stream calls it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from sidestream.kv.layout import KVLayout
from sidestream.types import Access


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """A named memory of blocks: the device's pool or the host's slab.

    data   uint8 `[num_blocks * block_bytes]`
    """

    name: str
    data: torch.Tensor
    layout: KVLayout

    def accesses(self, items: Sequence[int], layers: range, *, write: bool) -> list[Access]:
        """The byte ranges of some layers of some blocks."""
        spans = (self.layout.layer_span(item, layers.start, layers.stop) for item in items)
        return [Access(self.name, start, stop, write) for start, stop in spans]

    def rows(self) -> torch.Tensor:
        """The memory as uint8 `[num_blocks, block_bytes]`."""
        size = self.layout.block_bytes
        count = self.data.numel() // size
        return self.data[: count * size].view(count, size)


def copy_layers(source: BlockMemory, source_ids: Sequence[int], target: BlockMemory, target_ids: Sequence[int], layers: range) -> None:
    """Copy some layers of `source_ids` onto `target_ids`, pair by pair; one call for each run of neighbours in both."""
    size = source.layout.layer_bytes
    span = slice(layers.start * size, layers.stop * size)
    source_rows, target_rows = source.rows(), target.rows()
    for first_source, first_target, count in _runs(source_ids, target_ids):
        target_rows[first_target : first_target + count, span].copy_(source_rows[first_source : first_source + count, span])


def _runs(left: Sequence[int], right: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Maximal runs in which both sequences go up by one: `(left[0], right[0], length)` of each."""
    start = 0
    for index in range(1, len(left) + 1):
        if index == len(left) or left[index] != left[index - 1] + 1 or right[index] != right[index - 1] + 1:
            yield left[start], right[start], index - start
            start = index
