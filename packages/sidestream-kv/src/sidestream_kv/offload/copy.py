"""Describes copies of KV blocks between two memories with the same layout, as byte ranges. Does not copy anything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from sidestream_kv.device.base import CopyBatch, Memory
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.types import Access


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
    source: BlockMemory,
    source_ids: Sequence[int],
    target: BlockMemory,
    target_ids: Sequence[int],
    layers: Sequence[int],
) -> CopyBatch:
    """A copy of some layers of each block: from `source_ids[i]` to the same layers of `target_ids[i]`. `layers` ascend.
    Neighbouring layers are one segment if all runs of neighbours have the same length, else several segments.
    """
    layout = source.layout
    breaks = [0, *(at for at in range(1, len(layers)) if layers[at] != layers[at - 1] + 1), len(layers)]
    size = math.gcd(*(stop - start for start, stop in pairwise(breaks)))
    offsets = np.array(layers[::size], np.int64) * layout.layer_bytes
    starts, targets = (
        (np.array(ids, np.int64)[:, None] * layout.block_bytes + offsets).ravel() for ids in (source_ids, target_ids)
    )
    return CopyBatch(source.memory, target.memory, starts, targets, size * layout.layer_bytes)
