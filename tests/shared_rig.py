"""A cache process in a thread, and pools over its memory. Each pool has a descriptor of its own, so that two pools of
one process exclude each other as those of two processes do.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.kv.pool import Lease
from sidestream_kv.offload.cache_process import CacheProcess
from sidestream_kv.offload.tiers.shared_memory import SharedMemory, content_of
from sidestream_kv.offload.tiers.shared_pool import SharedPool
from sidestream_kv.types import Key

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_tokens=4, dtype="float32")
NUM_SLOTS = 4
PATIENCE_S = 10.0


def key(number: int) -> Key:
    return number.to_bytes(16, "little")


def keys(*numbers: int) -> list[Key]:
    return [key(number) for number in numbers]


def wait_until(happened: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < until, "it never happened"
        time.sleep(0.001)


@contextlib.contextmanager
def running(path: Path, *, host_bytes: int = 1 << 20) -> Iterator[CacheProcess]:
    """A cache process at `path`."""
    process = CacheProcess(path, host_bytes=host_bytes)
    thread = threading.Thread(target=process.run)
    thread.start()
    try:
        yield process
    finally:
        process.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


class Engine:
    """An engine's pool."""

    def __init__(
        self, path: Path, *, fingerprint: str = "rig", slots: int = NUM_SLOTS, ready: int | None = None
    ) -> None:
        self.memory = SharedMemory.open(
            path, layout=LAYOUT, fingerprint=fingerprint, num_bytes=slots * LAYOUT.block_bytes
        )
        self.pool = SharedPool(self.memory, ready=self.memory.num_slots if ready is None else ready)
        self._blocks = np.frombuffer(self.memory.pages, np.uint8).reshape(self.memory.num_slots, -1)

    def write(self, *numbers: int) -> Lease:
        """Write blocks, as many as there are slots for, and hold them."""
        lease = self.pool.take_some(len(numbers))
        for slot, number in zip(lease.ids, numbers, strict=False):
            self._blocks[slot] = number
        self.pool.publish_all(lease.ids, keys(*numbers)[: len(lease.ids)])
        return lease

    def store(self, *numbers: int) -> list[int]:
        """Write blocks as `write` does. Returns their slots."""
        lease = self.write(*numbers)
        lease.release()
        return lease.ids

    def found(self, *numbers: int) -> list[int]:
        """Those of the blocks that can be leased; each of them must have its own bytes."""
        self.pool.refresh()
        found = []
        for number in numbers:
            lease = self.pool.lease(keys(number))
            for slot in lease.ids:
                assert set(self._blocks[slot].tolist()) == {number}
                found.append(number)
            lease.release()
        return found

    def close(self) -> None:
        self.pool.check()
        assert self.pool.num_used == 0
        self.pool.close()


def engines_of(path: Path) -> Sequence[int]:
    """The processes that use the first memory of a cache process."""
    pids: list[int] = content_of(path)["memories"][0]["engines"]
    return pids
