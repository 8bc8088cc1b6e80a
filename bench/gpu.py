"""Shared by the transfer benchmarks: opening the device, the block layout of Qwen3-8B, and the bandwidth of the link
(PCIe) between host and device.
"""

from __future__ import annotations

import time

import torch

from sidestream.errors import ConfigError
from sidestream_kv.config import unknown_name
from sidestream_kv.device.base import Device, Memory
from sidestream_kv.device.kinds import CPU, CUDA
from sidestream_kv.kv.layout import KVLayout

QWEN3_8B_BLOCK = KVLayout(num_layers=36, num_kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16")
"""A block of 2.25 MiB, 64 KiB for each layer."""


def open_device(kind: str) -> Device:
    """Open and warm up a device of this kind. Raises ConfigError if this machine has none."""
    if kind == CPU:
        from sidestream_kv.device.cpu import CpuDevice

        return CpuDevice(compute_threads=1)
    if kind != CUDA:
        raise ConfigError(unknown_name("device", kind, (CPU, CUDA)))
    from sidestream_kv.device.cuda import CudaDevice

    device = CudaDevice()
    device.warm_up()
    return device


class Link:
    """Measures the full bandwidth of the link between pinned host memory and the device, with large copies: in each
    direction, and in both directions at once.
    """

    def __init__(self, device: Device, num_bytes: int, *, in_a_row: int = 1) -> None:
        """`in_a_row`: number of copies of `num_bytes` in each direction, one after another."""
        self._in_a_row = in_a_row
        on_gpu = device.kind == CUDA
        self._device = device
        self._host = [torch.ones(num_bytes, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
        self._there = [torch.ones(num_bytes, dtype=torch.uint8, device=device.torch_device) for _ in range(2)]
        self._streams = [device.stream("link to host"), device.stream("link to device")]

    def seconds(self) -> dict[str, float]:
        """Seconds of the copies `"to_host"`, `"to_device"` and `"two_way"` (both at once), by the host's clock."""
        return {"to_host": self._run(0), "to_device": self._run(1), "two_way": self._run(0, 1)}

    def _run(self, *ways: int) -> float:
        start = time.perf_counter()
        fences = [
            self._streams[way].submit(lambda way=way: self._copy(way))  # type: ignore[misc]
            for _ in range(self._in_a_row)
            for way in ways
        ]
        for fence in fences:
            self._device.wait_host(fence, reason="benchmark")
        return time.perf_counter() - start

    def _copy(self, way: int) -> None:
        target, source = (self._host[0], self._there[0]) if way == 0 else (self._there[1], self._host[1])
        target.copy_(source, non_blocking=True)


def stamp(device: Device, memory: Memory, start: int) -> None:
    """Enqueue a write of the device's clock, in ns, to host memory at `start`. Call inside a stream's work."""
    if device.kind == CUDA:
        from sidestream_kv.device.cuda.kernels import stamp as stamp_there

        stamp_there(memory.data.data_ptr() + start)
    else:
        memory.data[start : start + 8].view(torch.int64)[0] = time.perf_counter_ns()
