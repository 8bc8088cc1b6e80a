"""Host memory that the GPU copies from and to by itself: anonymous pages, touched and pinned in the background (P7).

The first chunk is pinned before the constructor returns. After that, several threads touch the pages, front to back,
while one thread pins the chunks whose pages exist.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import mmap
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch

from sidestream.device.base import Memory
from sidestream.errors import ConfigError, DeviceError

log = logging.getLogger(__name__)

# Memory up to this size is ready when the constructor returns; of larger memory, the first chunk is.
READY_AT_ONCE_BYTES = 64 << 20
FIRST_CHUNK_BYTES = 256 << 20
CHUNK_BYTES = 1 << 30
_PAGE_BYTES = 4096
# What one thread touches at a time: large enough that the call costs nothing, small enough that `close` need not wait
# long.
_TOUCH_BYTES = 32 << 20
# Clearing pages is bound by a core, then by the memory: 16 threads were no faster than 8
# (bench/results/host-tier-h200.json).
_MAX_TOUCHERS = 8
# Touching yields the cores to the engine's threads, which start up at the same time.
_TOUCH_NICE = 10
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
    """Where one pinned chunk ends and the next begins, and the end: whole items and whole pages, but for the end
    itself.
    """
    if num_bytes <= READY_AT_ONCE_BYTES:
        return [num_bytes]
    unit, borders, start, chunk = math.lcm(item_bytes, _PAGE_BYTES), [], 0, FIRST_CHUNK_BYTES
    while start < num_bytes:
        start = min(num_bytes, start + max(unit, chunk // unit * unit))
        borders.append(start)
        chunk = CHUNK_BYTES
    return borders


def advise(address: int, num_bytes: int, advice: int) -> bool:
    """Tell the kernel about pages; False when it does not want to know. Without the interpreter lock, which
    `mmap.madvise` keeps.
    """
    return bool(_libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), advice) == 0)


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


class Slab:
    """Pages of the host that get pinned from front to back.

    memory        all of it, zeroed
    borders       offsets at which one pinned chunk ends and another begins
    ready_bytes   pinned bytes, from the start on; the bytes behind must not be used yet. Never falls
    mapped_bytes  bytes whose pages exist
    growing       more of the memory will become ready. Read it before `ready_bytes`: once it is False, that is final

    Written by the slab's threads only; read by any thread.
    """

    def __init__(
        self, name: str, num_bytes: int, *, item_bytes: int, pins: Pins, prepare: Callable[[], None] = lambda: None
    ) -> None:
        """Blocks until the first chunk is pinned. `prepare` is called first on the slab's thread.

        Raises ConfigError when the machine has less memory than `num_bytes`, or lets none of it be pinned.
        """
        try:
            # Private: most systems have no huge pages for shared mappings.
            pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"{name} memory of {num_bytes / 2**30:.2f} GiB cannot be allocated on this machine: ask for less"
            ) from error
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
        advise(self._address, num_bytes, _MADV_HUGEPAGE)  # refused: smaller pages, and pinning and copies take longer
        advise(self._address, num_bytes, _MADV_DONTFORK)  # else a fork moves each page that is written to afterwards
        try:
            self._pin(self.borders[:1])
        except DeviceError as error:
            raise ConfigError(
                f"{name} memory: not even the first {self.borders[0] / 2**20:.0f} MiB of {num_bytes / 2**30:.2f} GiB can be pinned ({error}): "
                "raise the limit of locked memory (ulimit -l), or ask for less"
            ) from error
        if len(self.borders) == 1:
            self.growing = False
        else:
            self._thread = threading.Thread(target=self._run, name=f"sidestream-pin-{name}", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop pinning and unpin; the bytes stay. Streams must be done with the memory. Idempotent."""
        self._closing = True
        if self._thread is not None:
            self._thread.join()
        while self._pinned:
            try:
                self._pins.unregister(self._pinned.pop())
            except DeviceError as error:
                log.debug("%s memory: %s", self.memory.name, error)  # a lost device unpins nothing

    def _run(self) -> None:
        name, start_s = self.memory.name, time.perf_counter()
        try:
            self._prepare()
            self._pin(self.borders[1:])
        except Exception as error:
            log.warning(
                "%s memory: %.2f of %.2f GiB are pinned, the rest stays unused (%s): raise the limit of locked memory (ulimit -l), "
                "or make the tier smaller",
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
        """Touch the pages up to the last border with several threads, and pin each chunk as soon as its pages exist."""
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
        """Have the kernel map these pages, and return `stop`. The call drops the interpreter lock."""
        if not self._closing and not advise(self._address + start, stop - start, _MADV_POPULATE_WRITE):
            # An older kernel. The memory holds only zeros as long as it is not ready.
            ctypes.memset(self._address + start, 0, stop - start)
        with self._mapping:
            self.mapped_bytes += stop - start
        return stop


def _yield_cores() -> None:
    """Let every other thread of the machine run before this one. Linux gives each thread a niceness of its own."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _TOUCH_NICE)
