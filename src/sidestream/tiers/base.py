"""What a tier that outlives the process offers: an index for the engine thread, and reads and writes for stream
threads.

engine thread        grant = tier.index.reserve(key)                       lease = tier.index.pin(keys[:
                     tier.index.lookup(keys)])
tier's stream        tier.write(grant, block)                              tier.read(entry, slot)   for entry in
                     lease.entries
engine thread,       tier.index.publish(grant), or abandon if it raised    tier.index.forget(entry) if it raised
behind the fence                                                           lease.release()
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from sidestream.tiers.index import Entry, ReadLease, TierIndex, TierStats, WriteGrant

__all__ = ["Block", "Entry", "PersistentTier", "ReadLease", "TierIndex", "TierStats", "WriteGrant"]

Block = memoryview | npt.NDArray[np.uint8]
"""One block's bytes, `layout.block_bytes` of them, contiguous, in host memory. Page-aligned ones may be moved faster.
"""


class PersistentTier(Protocol):
    """Blocks under content keys, on a medium slower than host memory.

    `index` belongs to the engine thread and never does I/O. `read` and `write` block on I/O: they are called on the
    tier's stream threads, any number at once, and never look at the index; what they may touch they were handed as a
    grant or a pinned entry. An entry is complete or absent to every reader, in this process and in the next.
    """

    @property
    def index(self) -> TierIndex:
        """Which blocks the tier holds. Engine thread only."""
        ...

    def write(self, grant: WriteGrant, payload: Block) -> None:
        """Delete the grant's victim and store `payload` as its entry. Blocks on I/O.

        Raises TierFull (the medium has no room) or TierError; then no part of the entry is left.
        """
        ...

    def read(self, entry: Entry, out: Block) -> None:
        """Fill `out` with a pinned entry's block, verified. Blocks on I/O.

        Raises TierCorrupt (missing or damaged: deleted) or TierError; then the contents of `out` are undefined.
        """
        ...

    def close(self) -> None:
        """Finish what is deferred and let go of the medium; after the last read and write returned. Idempotent."""
        ...
