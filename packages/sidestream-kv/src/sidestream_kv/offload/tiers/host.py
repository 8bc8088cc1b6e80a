"""The host tier: host memory for KV blocks that the device can copy from and to. A slot is the memory of one block, and
a pool tracks the slots, like the pool of device blocks.

This module has slots and bytes, but copies nothing. The offload worker's thread owns the pool; the engine thread only
looks keys up in it. Only the holder of a slot's lease (the right to use the slot) writes the slot's bytes.
"""

from __future__ import annotations

from sidestream_kv.device.base import Memory
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.kv.pool import FencedPool
from sidestream_kv.types import Tracer


class HostTier:
    """`num_slots` blocks in one allocation of host memory.

    memory        `num_slots * layout.block_bytes` bytes, from `Device.allocate_host`
    ready_bytes   number of bytes at the start of the memory that can be used already; `grow` raises it. None: all bytes
    """

    def __init__(
        self, memory: Memory, layout: KVLayout, *, ready_bytes: int | None = None, tracer: Tracer | None = None
    ) -> None:
        self.layout = layout
        self.memory = memory
        self.num_slots = memory.num_bytes // layout.block_bytes
        self.pool = FencedPool(
            "host slots",
            (memory.num_bytes if ready_bytes is None else ready_bytes) // layout.block_bytes,
            tracer=tracer,
        )
        if tracer is not None:
            tracer.backed(self.pool.name, memory.name, layout.block_bytes)

    def grow(self, ready_bytes: int) -> bool:
        """Use the first `ready_bytes` of the memory from now on. Returns whether this adds slots."""
        ready = ready_bytes // self.layout.block_bytes
        if ready <= self.pool.size:
            return False
        self.pool.grow(ready)
        return True

    @property
    def ready_bytes(self) -> int:
        """Bytes of the slots that can be used already. Any thread may read it."""
        return self.pool.size * self.layout.block_bytes

    def slot(self, index: int) -> memoryview:
        """The bytes of one slot, writable. Valid while the caller holds a lease of the slot."""
        start, stop = self.layout.span(index)
        return self.memory.data[start:stop].numpy().data
