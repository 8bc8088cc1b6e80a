"""The program of a rank that ends while the ranks start: its memory runs out behind the load of the model."""

from __future__ import annotations

from sidestream import rank_process
from sidestream.device.base import Device
from sidestream.errors import OutOfDeviceMemory


def run_out(rank: int, device: Device) -> None:
    raise OutOfDeviceMemory(f"out of device memory on rank {rank}; lower the KV memory or the batch")


def main(descriptor: int) -> None:
    rank_process.main(descriptor, on_device=run_out)
