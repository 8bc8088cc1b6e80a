"""Facts about the machine that do not depend on what runs on it: its processor and its memory."""

from __future__ import annotations

import contextlib
import platform
import re
from pathlib import Path


def cpu_name() -> str:
    """The processor's name, as its maker calls it where the system tells."""
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def instruction_set() -> str:
    """The vector instructions that torch's own kernels use here, such as `AVX2` or `AVX512`; the environment may ask
    for fewer than there are.
    """
    import torch

    return torch.backends.cpu.get_cpu_capability()


def memory_bytes() -> tuple[int | None, int | None]:
    """Total and available bytes, of the machine or of the container where that is less."""
    with contextlib.suppress(OSError, KeyError):
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
        total, available = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
        with contextlib.suppress(OSError, ValueError):
            limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8"))
            used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="utf-8"))
            total, available = min(total, limit), min(available, max(0, limit - used))
        return total, available
    return None, None
