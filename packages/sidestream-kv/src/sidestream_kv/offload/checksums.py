"""Checksums of a share of the blocks in host memory, for the self-check. Called on the offload worker's thread only.

A chosen block gets its checksum when it becomes findable, and the checksum is compared before each load of the block.
So it covers the time in between: another owner that writes the slot, a copy that ends late, a memory error. It does not
cover the copies themselves. Entries of persistent tiers have checksums of their own.

    slot   host memory for one block
"""

from __future__ import annotations

import logging
import random
import zlib
from collections.abc import Sequence

from sidestream_kv.device.base import Device
from sidestream_kv.metrics import Metrics
from sidestream_kv.offload.copy import BlockMemory
from sidestream_kv.offload.tiers.stack import HostTier
from sidestream_kv.types import Access

logger = logging.getLogger(__name__)

# Number of slots that a log line names.
_SLOTS_TOLD = 8


class Checksums:
    """The checksums of chosen blocks, by host slot.

    share   share of the blocks that get a checksum; 0: none
    """

    def __init__(self, host: HostTier, *, share: float, device: Device, metrics: Metrics) -> None:
        self._host = host
        self._memory = BlockMemory(host.memory, host.layout)
        self._share = share
        self._tracer = device.tracer
        self._clock = device.now
        self._metrics = metrics
        self._random = random.Random("sidestream self-check of blocks")
        self._by_slot: dict[int, int] = {}

    def compute(self, slots: Sequence[int]) -> None:
        """Compute the checksums of the chosen ones among blocks that become findable now. The caller has leases of
        the slots, and the bytes are complete.
        """
        if not self._share:
            return
        for slot in slots:
            self._by_slot.pop(slot, None)
        start_s = self._clock()
        self._by_slot.update((slot, self._checksum(slot)) for slot in slots if self._random.random() < self._share)
        self._spent(start_s)

    def changed(self, slots: Sequence[int]) -> list[int]:
        """Compare the blocks in these slots with their checksums, before a load. Returns the indices in `slots` of the
        blocks that have changed. The caller has leases of the slots.
        """
        known = [index for index, slot in enumerate(slots) if slot in self._by_slot]
        if not known:
            return []
        start_s = self._clock()
        changed = [at for at in known if self._checksum(slots[at]) != self._by_slot[slots[at]]]
        self._spent(start_s)
        self._metrics.inc("self_check_blocks_total", len(known) - len(changed), "match")
        if changed:
            self._metrics.inc("self_check_blocks_total", len(changed), "mismatch")
            logger.error(
                "self-check: %d of %d blocks in host memory changed after they were stored (slots %s): a race or a "
                "memory error, see docs/self-check.md",
                len(changed),
                len(known),
                ", ".join(str(slots[at]) for at in changed[:_SLOTS_TOLD]),
            )
        return changed

    def _checksum(self, slot: int) -> int:
        """The checksum of a slot's bytes. zlib releases the GIL meanwhile."""
        if self._tracer is not None:
            self._tracer.host_touched(lambda: self._accesses(slot), "checksum")
        return zlib.crc32(self._host.slot(slot))

    def _accesses(self, slot: int) -> list[Access]:
        return self._memory.accesses([slot], write=False)

    def _spent(self, since_s: float) -> None:
        self._metrics.inc("self_check_seconds_total", self._clock() - since_s, "checksums")
