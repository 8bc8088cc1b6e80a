"""Host memory that the GPU copies from and to by itself: anonymous pages, touched and pinned chunk by chunk behind the engine's back (P7).

The first chunk is there before anybody gets the memory; a thread does the others, front to back.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch

from sidestream.device.base import Memory
from sidestream.errors import ConfigError, DeviceError

log = logging.getLogger(__name__)

# Memory up to so much is ready when it is given out; of larger memory the first chunk is.
READY_AT_ONCE_BYTES = 64 << 20
FIRST_CHUNK_BYTES = 256 << 20
CHUNK_BYTES = 1 << 30
_PAGE_BYTES = 4096
_TOUCH_BYTES = 32 << 20
_TOUCHERS = 4
# Linux 5.14; Python has no name for it yet.
_MADV_POPULATE_WRITE = 23
_MADV_HUGEPAGE = 14
_MADV_DONTFORK = 10


class Pins(Protocol):
    """Who pins pages: the driver."""

    def register(self, address: int, num_bytes: int) -> None:
        """Pin. Raises DeviceError."""
        ...

    def unregister(self, address: int) -> None:
        """Let go. Raises DeviceError."""
        ...


def chunk_borders(num_bytes: int, item_bytes: int) -> list[int]:
    """Where one pinned chunk ends and the next begins, and the end: whole items and whole pages, but for the end itself."""
    if num_bytes <= READY_AT_ONCE_BYTES:
        return [num_bytes]
    unit, borders, start, chunk = math.lcm(item_bytes, _PAGE_BYTES), [], 0, FIRST_CHUNK_BYTES
    while start < num_bytes:
        start = min(num_bytes, start + max(unit, chunk // unit * unit))
        borders.append(start)
        chunk = CHUNK_BYTES
    return borders


def advise(address: int, num_bytes: int, advice: int) -> bool:
    """Tell the kernel about pages; False when it does not want to know. Without the interpreter lock, which `mmap.madvise` keeps."""
    return bool(_libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), advice) == 0)


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


class Slab:
    """Pages of the host that get pinned from front to back.

    memory        all of it, zeroed
    borders       offsets at which one pinned chunk ends and another begins
    ready_bytes   from the start on that are pinned; what lies behind is nobody's yet. Written by the slab's thread, never falls
    mapped_bytes  from the start on whose pages exist
    """

    def __init__(self, name: str, num_bytes: int, *, item_bytes: int, pins: Pins, prepare: Callable[[], None] = lambda: None) -> None:
        """Blocks until the first chunk is pinned. `prepare` is called first on the slab's thread.

        Raises ConfigError when there is not so much memory, or none that may be pinned.
        """
        try:
            # Not shared, as it would be else: most systems have no huge pages for that.
            pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(f"{name} memory of {num_bytes / 2**30:.2f} GiB cannot be allocated on this machine: ask for less") from error
        self.memory = Memory(name, (torch.frombuffer(pages, dtype=torch.uint8),))
        self.borders = chunk_borders(num_bytes, item_bytes)
        self.ready_bytes = 0
        self.mapped_bytes = 0
        self._pins = pins
        self._prepare = prepare
        self._address = self.memory.data.data_ptr()
        self._pinned: list[int] = []
        self._closing = False
        self._thread: threading.Thread | None = None
        advise(self._address, num_bytes, _MADV_HUGEPAGE)  # refused: smaller pages, and pinning and copies take longer
        advise(self._address, num_bytes, _MADV_DONTFORK)  # else, after a fork, a page that is written to moves away from what the GPU reads
        try:
            self._pin(self.borders[0])
        except DeviceError as error:
            raise ConfigError(
                f"{name} memory: not even the first {self.borders[0] / 2**20:.0f} MiB of {num_bytes / 2**30:.2f} GiB can be pinned ({error}): "
                "raise the limit of locked memory (ulimit -l), or ask for less"
            ) from error
        if len(self.borders) > 1:
            self._thread = threading.Thread(target=self._run, name=f"sidestream-pin-{name}", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop pinning and let go of what was pinned; the bytes stay. Streams must be done with it. Idempotent."""
        self._closing = True
        if self._thread is not None:
            self._thread.join()
        while self._pinned:
            try:
                self._pins.unregister(self._pinned.pop())
            except DeviceError as error:
                log.debug("%s memory: %s", self.memory.name, error)  # of a lost device, nothing can be let go

    def _run(self) -> None:
        try:
            self._prepare()
            for stop in self.borders[1:]:
                if not self._pin(stop):
                    return
        except Exception as error:
            log.warning(
                "%s memory: %.2f of %.2f GiB are pinned, the rest stays unused (%s): raise the limit of locked memory (ulimit -l), or make the tier smaller",
                self.memory.name,
                self.ready_bytes / 2**30,
                self.memory.num_bytes / 2**30,
                error,
            )

    def _pin(self, stop: int) -> bool:
        """Touch and pin what lies between what is ready and `stop`; False when it was told to end."""
        start = self.ready_bytes
        if not self._touch(start, stop):
            return False
        self._pins.register(self._address + start, stop - start)
        self._pinned.append(self._address + start)
        self.ready_bytes = stop
        return True

    def _touch(self, start: int, stop: int) -> bool:
        """Have the kernel map the pages, by several threads: most of it is clearing them, which one core does at 2 GB/s."""

        def touch(at: int) -> None:
            address, size = self._address + at, min(_TOUCH_BYTES, stop - at)
            if not self._closing and not advise(address, size, _MADV_POPULATE_WRITE):
                ctypes.memset(address, 0, size)  # an older kernel: what is not ready is nobody's yet, and zero

        pieces = range(start, stop, _TOUCH_BYTES)
        if len(pieces) == 1:
            touch(start)
        else:
            with ThreadPoolExecutor(_TOUCHERS, thread_name_prefix="sidestream-touch") as touchers:
                list(touchers.map(touch, pieces))
        if self._closing:
            return False
        self.mapped_bytes = stop
        return True
