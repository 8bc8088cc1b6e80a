"""Processor and memory of this machine."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import re
import sys
import time
from enum import IntEnum
from pathlib import Path

from sidestream_kv.errors import ConfigError

_IMPORTED_S = time.monotonic()
# Size of a huge page.
_STEP_BYTES = 2 << 20


class Advice(IntEnum):
    """What Linux is asked to do with pages. POPULATE_WRITE, since Linux 5.14, maps them and changes no byte."""

    DONTNEED = 4
    DONTFORK = 10
    HUGEPAGE = 14
    POPULATE_WRITE = 23


def process_age_s() -> float:
    """Seconds since this process started, so imports count. Without /proc: since this module was imported."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        after_name = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        started_s = int(after_name[19]) / os.sysconf("SC_CLK_TCK")  # starttime, the 22nd field
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    return time.monotonic() - _IMPORTED_S


def cpu_name() -> str:
    """The processor's model name, or its architecture if the system does not report the name."""
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def instruction_set() -> str:
    """Vector instructions that torch's kernels use, such as `AVX2` or `AVX512`; an environment variable may limit
    them.
    """
    import torch

    return torch.backends.cpu.get_cpu_capability()


def memory_bytes() -> tuple[int | None, int | None]:
    """Total and available bytes: the bytes of the machine or of the container, whichever are fewer."""
    with contextlib.suppress(OSError, KeyError):
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
        total, available = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
        with contextlib.suppress(OSError, ValueError):
            limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8"))
            used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="utf-8"))
            total, available = min(total, limit), min(available, max(0, limit - used))
        return total, available
    return None, None


def available_bytes() -> int | None:
    """Bytes that the system can allocate without swapping; None if it does not report them."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def check_fits(name: str, num_bytes: int, *, promised: int) -> None:
    """Raise ConfigError if the system cannot allocate so much beside `promised`, the bytes of earlier allocations whose
    pages do not exist yet.
    """
    if (available := available_bytes()) is not None and num_bytes > available - promised:
        raise ConfigError(
            f"{name} memory of {num_bytes / 2**30:.2f} GiB does not fit: "
            f"this machine has {(available - promised) / 2**30:.2f} GiB available; ask for less"
        )


def private_pages(name: str, num_bytes: int) -> mmap.mmap:
    """Anonymous memory of this process. Raises ConfigError if the system refuses it.

    The mapping is private, because Linux gives huge pages to shared mappings only if the administrator enables that.
    With huge pages, a load takes 0.8 times as long.
    """
    try:
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{name} memory of {num_bytes / 2**30:.2f} GiB cannot be allocated on this machine: ask for less"
        ) from error


def advise(address: int, num_bytes: int, advice: Advice) -> bool:
    """Call `madvise`; False if the system has no such call or refuses it. Releases the GIL, which `mmap.madvise` does
    not.
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), int(advice)) == 0)


def map_pages(address: int, num_bytes: int) -> bool:
    """Make the pages exist, as huge pages where that was advised; False if the kernel is too old. Changes no byte.

    Goes on in small steps: while the kernel maps pages, each other thread that needs memory waits, and 32 MiB take 4 to
    250 ms.
    """
    steps = range(address, address + num_bytes, _STEP_BYTES)
    return all(advise(at, min(_STEP_BYTES, address + num_bytes - at), Advice.POPULATE_WRITE) for at in steps)
