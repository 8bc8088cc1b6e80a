"""Describes copies of KV blocks between two memories with the same layout, as byte ranges. Does not copy anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sidestream.device.base import CopyBatch, Memory
from sidestream.kv.layout import KVLayout
from sidestream.types import Access


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """A memory that holds KV blocks, on the device or on the host. It is one allocation, or one allocation per layer
    (striped).
    """

    memory: Memory
    layout: KVLayout

    def accesses(self, block_ids: Sequence[int], *, write: bool) -> list[Access]:
        """The byte ranges of whole blocks, for a tracer, which checks them for races."""
        return [Access(self.memory.name, *self.layout.span(block_id), write) for block_id in block_ids]


def layers_batch(
    source: BlockMemory, source_ids: Sequence[int], target: BlockMemory, target_ids: Sequence[int], layers: range
) -> CopyBatch:
    """A copy of some layers of each block: from `source_ids[i]` to the same layers of `target_ids[i]`."""
    layout = source.layout
    skipped = layers.start * layout.layer_bytes
    return CopyBatch(
        source.memory,
        target.memory,
        np.array(source_ids, np.int64) * layout.block_bytes + skipped,
        np.array(target_ids, np.int64) * layout.block_bytes + skipped,
        len(layers) * layout.layer_bytes,
    )
