"""Measures how far KV in 8 bits is from KV on the device. Some stores copy their first block a second time, plain, to a
buffer in host memory. When the store has ended, both forms are compared. Called on the offload worker's thread only.

So the figure is that of this model and of its own texts, and includes everything that a store does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch

from sidestream_kv.device.base import CopyBatch
from sidestream_kv.device.eight_bit import unpack
from sidestream_kv.kv.eight_bit import EightBitLayout
from sidestream_kv.offload.loads import TransferContext
from sidestream_kv.offload.pacing import layers_batch
from sidestream_kv.offload.tiers.stack import BlockMemory
from sidestream_kv.types import Access

logger = logging.getLogger(__name__)

# Number of stores that are measured. Comparing a block of 2 MiB takes about 10 ms.
_STORES = 8


class ErrorProbe:
    """The measurements of one engine, whose tiers have this `layout`."""

    def __init__(self, context: TransferContext, layout: EightBitLayout) -> None:
        self._context = context
        self._layout = layout
        self._buffer = BlockMemory(context.device.allocate_host("plain block", layout.plain.block_bytes), layout.plain)
        self._left, self._busy = _STORES, False
        self._largest: dict[str, float] = {}

    def copies(self, block_id: int) -> Iterator[CopyBatch]:
        """The copy of a block to the buffer, for a store that is to be measured. Call `compare` when the copy has
        ended; no other store is measured until then.
        """
        if self._left and not self._busy:  # rule: buffer-belongs-to-one-store
            self._busy = True
            yield layers_batch(self._context.memory, [block_id], self._buffer, [0], range(self._layout.num_layers))

    def compare(self, slot: int, *, good: bool) -> None:
        """A store to be measured has ended, and `slot` has its first block. `good`: whether it has succeeded."""
        self._busy = False
        if not good:
            return
        self._left -= 1
        if (tracer := self._context.device.tracer) is not None:
            tracer.host_touched(lambda: self._accesses(slot), "compare")
        errors = self._errors(self._context.tiers.host.slot(slot))
        if not self._largest:
            self._log(errors)
        for part, error in errors.items():
            self._largest[part] = max(error, self._largest.get(part, 0.0))
            self._context.log.kv_error(part, self._largest[part])

    def _errors(self, slot: memoryview) -> dict[str, float]:
        """The relative error of keys and of values: for each layer, the norm of the difference over the norm of the
        plain numbers; the mean of the layers.
        """
        plain = self._layout.plain
        packed = torch.frombuffer(slot, dtype=torch.uint8)[: plain.num_layers * self._layout.layer_bytes]
        here, there = (
            data.view(getattr(torch, plain.dtype)).view(plain.num_layers, plain.vectors, -1).float()
            for data in (self._buffer.memory.data, unpack(packed, self._layout.packed))
        )
        errors = ((there - here).norm(dim=2) / here.norm(dim=2)).nanmean(dim=0)
        names: Sequence[str] = ("latents",) if plain.latent_dim else ("keys", "values")
        return dict(zip(names, errors.tolist(), strict=True))

    def _log(self, errors: dict[str, float]) -> None:
        plain, packed = (layout.block_bytes / layout.block_tokens for layout in (self._layout.plain, self._layout))
        logger.info(
            "tiers hold KV in 8 bits: %.0f bytes a token, not %.0f; relative error of the first stored block: %s",
            packed,
            plain,
            ", ".join(f"{part} {error:.2%}" for part, error in errors.items()),
        )

    def _accesses(self, slot: int) -> list[Access]:
        return [
            *self._context.host_memory.accesses([slot], write=False),
            *self._buffer.accesses([0], write=False),
        ]
