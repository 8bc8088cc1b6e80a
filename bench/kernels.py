"""The kernels of a decode step and of a prefill, by the time that they take: where to look before anything is changed.
Only on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from proof.report import Figure
from sidestream.errors import ConfigError
from sidestream_kv.device.kinds import CUDA

_LONGEST = 15


class Kernel(NamedTuple):
    """A kernel's calls in a profile, and the microseconds of all of them together."""

    name: str
    calls: int
    us: float


def longest(case: str, kernels: Sequence[Kernel], times: int) -> list[Figure]:
    """A figure for each of the kernels that take longest, and one for all others, divided by `times`."""
    ordered = sorted(kernels, key=lambda kernel: -kernel.us)
    rest = ordered[_LONGEST:]
    ordered[_LONGEST:] = [Kernel("others", sum(each.calls for each in rest), sum(each.us for each in rest))]
    return [
        Figure(f"{case}: {kernel.name[:90]}", kernel.us / times, f"us, {kernel.calls / times:.1f} calls")
        for kernel in ordered
    ]


def activities(kind: str) -> list[torch.profiler.ProfilerActivity]:
    """What the profiler records. Raises ConfigError for a device of another kind than a GPU."""
    if kind != CUDA:
        raise ConfigError(f"the part kernels needs a GPU, and this is the device {kind}: leave it out")
    return [torch.profiler.ProfilerActivity.CUDA]


def kernels_of(profile: torch.profiler.profile) -> list[Kernel]:
    """The kernels of a profile that has ended, each once."""
    return [Kernel(each.key, each.count, each.self_device_time_total) for each in profile.key_averages()]
