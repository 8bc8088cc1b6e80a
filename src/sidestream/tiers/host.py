"""The host tier: slots of host memory that the device can copy from and to, with the same ledger as the device's blocks.

Knows slots and bytes, not who copies them. The ledger is touched by the engine thread only; the bytes by whoever holds a lease.
"""

from __future__ import annotations

from sidestream.device.base import Memory
from sidestream.kv.layout import KVLayout
from sidestream.kv.pool import FencedPool
from sidestream.types import Witness


class HostTier:
    """`num_slots` blocks in one slab of host memory.

    memory   `num_slots * layout.block_bytes` bytes, from `Device.allocate_host`
    """

    def __init__(self, memory: Memory, layout: KVLayout, *, witness: Witness | None = None) -> None:
        self.layout = layout
        self.memory = memory
        self.pool = FencedPool("host slots", memory.num_bytes // layout.block_bytes, witness=witness)
        if witness is not None:
            witness.backed(self.pool.name, memory.name, layout.block_bytes)

    def slot(self, index: int) -> memoryview:
        """The bytes of one slot, writable; valid while the caller's lease holds it."""
        start, stop = self.layout.span(index)
        return self.memory.data[start:stop].numpy().data
