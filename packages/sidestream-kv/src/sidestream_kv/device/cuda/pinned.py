"""Pinned host memory. Pinning takes 0.035 s per GiB, so most pages are touched and pinned in the background.

The constructor pins the first chunk. After that, several threads touch the pages from front to back, so that the pages
exist, and one thread pins each chunk when all its pages exist.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from mmap import mmap
from typing import Protocol

import torch

from sidestream_kv.device.base import Memory
from sidestream_kv.device.machine import Advice, advise, map_pages, private_pages
from sidestream_kv.errors import ConfigError, DeviceError

log = logging.getLogger(__name__)

# Memory of up to READY_AT_ONCE_BYTES is pinned when the constructor returns. Of larger memory, the first chunk is
# pinned.
READY_AT_ONCE_BYTES = 64 << 20
FIRST_CHUNK_BYTES = 256 << 20
CHUNK_BYTES = 1 << 30
_PAGE_BYTES = 4096
# Bytes that a thread touches in one call: enough to hide the cost of the call, but few, so that `close` is fast.
_TOUCH_BYTES = 32 << 20
# Number of touching threads. 16 threads are not faster, because memory bandwidth is the limit
# (bench/results/host-tier-h200.json).
_MAX_TOUCHERS = 8
# Niceness of touching threads, so that the engine's threads, which start at the same time, run first.
_TOUCH_NICE = 10


class Pins(Protocol):
    """The part of the driver that pins pages."""

    def register(self, address: int, num_bytes: int) -> None:
        """Pin the pages. Raises DeviceError."""
        ...

    def unregister(self, address: int) -> None:
        """Unpin the pages that were pinned at `address`. Raises DeviceError."""
        ...


def chunk_borders(num_bytes: int, item_bytes: int) -> list[int]:
    """End offset of each pinned chunk. Each offset except the last is a multiple of `item_bytes` and of the
    page size.
    """
    if num_bytes <= READY_AT_ONCE_BYTES:
        return [num_bytes]
    unit, borders, start, chunk = math.lcm(item_bytes, _PAGE_BYTES), [], 0, FIRST_CHUNK_BYTES
    while start < num_bytes:
        start = min(num_bytes, start + max(unit, chunk // unit * unit))
        borders.append(start)
        chunk = CHUNK_BYTES
    return borders


class Slab:
    """Host memory that is pinned from front to back.

    memory        all bytes, zeroed
    borders       end offset of each pinned chunk
    ready_bytes   number of pinned bytes at the start; later bytes must not be used yet. Never decreases
    mapped_bytes  number of bytes whose pages exist
    growing       whether `ready_bytes` will still increase. Read it before `ready_bytes`: after False, that number is
                  final

    Only the slab's threads write these attributes; any thread may read them.
    """

    def __init__(
        self,
        name: str,
        num_bytes: int,
        *,
        item_bytes: int,
        pins: Pins,
        prepare: Callable[[], None] = lambda: None,
        shared: mmap | None = None,
    ) -> None:
        """Blocks until the first chunk is pinned. The slab's background thread first calls `prepare`. `shared`: pages
        of other processes, too, to use instead of new ones; none of their bytes is changed.

        Raises ConfigError if the machine has less than `num_bytes` of memory, or if the first chunk cannot be pinned.
        """
        pages = private_pages(name, num_bytes) if shared is None else shared
        self._zeroes = shared is None
        self.memory = Memory(name, (torch.frombuffer(pages, dtype=torch.uint8),))
        self.borders = chunk_borders(num_bytes, item_bytes)
        self.ready_bytes = 0
        self.mapped_bytes = 0
        self.growing = True
        self._pins = pins
        self._prepare = prepare
        self._address = self.memory.data.data_ptr()
        self._mapping = threading.Lock()  # guards mapped_bytes
        self._pinned: list[int] = []
        self._closing = False
        self._thread: threading.Thread | None = None
        advise(self._address, num_bytes, Advice.HUGEPAGE)  # if the kernel refuses, pinning and copies are slower
        advise(self._address, num_bytes, Advice.DONTFORK)  # otherwise the first write after a fork would move the page
        try:
            self._pin(self.borders[:1])
        except DeviceError as error:
            raise ConfigError(
                f"{name} memory: not even the first {self.borders[0] / 2**20:.0f} MiB of {num_bytes / 2**30:.2f} GiB "
                f"can be pinned ({error}): raise the limit of locked memory (ulimit -l), or ask for less"
            ) from error
        if len(self.borders) == 1:
            self.growing = False
        else:
            self._thread = threading.Thread(target=self._run, name=f"sidestream-pin-{name}", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop pinning, unpin the memory, and give its pages back to the system: it can still be read, as zeros. No
        stream may use it any more. Idempotent.
        """
        self._closing = True
        if self._thread is not None:
            self._thread.join()  # rule: memory-is-unpinned-after-its-pinning
        while self._pinned:
            try:
                self._pins.unregister(self._pinned.pop())
            except DeviceError as error:
                log.debug("%s memory: %s", self.memory.name, error)  # unpinning fails on a lost device
        advise(self._address, self.memory.num_bytes, Advice.DONTNEED)

    def _run(self) -> None:
        name, start_s = self.memory.name, time.perf_counter()
        try:
            self._prepare()
            self._pin(self.borders[1:])
        except Exception as error:
            log.warning(
                "%s memory: %.2f of %.2f GiB are pinned, the rest stays unused (%s): "
                "raise the limit of locked memory (ulimit -l), or make the tier smaller",
                name,
                self.ready_bytes / 2**30,
                self.memory.num_bytes / 2**30,
                error,
            )
        else:
            if not self._closing:
                seconds = time.perf_counter() - start_s
                log.info(
                    "%s memory: all %.2f GiB are pinned after %.1f s", name, self.memory.num_bytes / 2**30, seconds
                )
        finally:
            self.growing = False

    def _pin(self, borders: list[int]) -> None:
        """Touch the pages up to the last border with several threads, and pin each chunk when its pages exist."""
        start = self.ready_bytes
        pieces = range(start, borders[-1], _TOUCH_BYTES)
        threads = min(len(pieces), _MAX_TOUCHERS, len(os.sched_getaffinity(0)))
        touchers = ThreadPoolExecutor(threads, thread_name_prefix="sidestream-touch", initializer=_yield_cores)
        try:
            stops = touchers.map(lambda at: self._touch(at, min(at + _TOUCH_BYTES, borders[-1])), pieces)
            touched = start
            for border in borders:
                while touched < border:
                    touched = next(stops)
                if self._closing:
                    return
                self._pins.register(self._address + self.ready_bytes, border - self.ready_bytes)
                self._pinned.append(self._address + self.ready_bytes)
                self.ready_bytes = border
        finally:
            touchers.shutdown(cancel_futures=True)

    def _touch(self, start: int, stop: int) -> int:
        """Map these pages, and return `stop`. Releases the GIL."""
        exists = self._closing or map_pages(self._address + start, stop - start)
        if not exists and self._zeroes:  # rule: pages-of-others-are-not-zeroed
            # The kernel is older. Writing zeros instead is safe, because bytes that are not ready hold zeros.
            ctypes.memset(self._address + start, 0, stop - start)
        with self._mapping:
            self.mapped_bytes += stop - start
        return stop


def _yield_cores() -> None:
    """Lower the priority of the calling thread; on Linux, niceness is per thread."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _TOUCH_NICE)
