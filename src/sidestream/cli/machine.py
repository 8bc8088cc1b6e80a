"""Measures the bandwidth of copies and of the disk, for `sidestream doctor`. Each kind of copy runs for 0.3 s.

The disk is measured through the disk tier itself, with blocks of the demo model's size.
"""

from __future__ import annotations

import os
import tempfile
import time
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING

from sidestream.config import default_block_tokens

if TYPE_CHECKING:
    from sidestream_kv.device.base import CopyBatch, Device
    from sidestream_kv.offload.tiers.disk import DiskTier

_MIB = 1 << 20
_COPY_BYTES = 64 * _MIB
_COPY_S = 0.3
DISK_BYTES = 96 * _MIB


def copy_speeds(kind: str) -> tuple[float, float]:
    """Copy bandwidth in bytes per second, from host memory to the device `kind` and back, one after another.

    The two directions use separate streams, like loads and stores.
    """
    import numpy as np

    from sidestream_kv.device.base import CopyBatch
    from sidestream_kv.device.cpu import CpuDevice
    from sidestream_kv.device.cuda import CudaDevice
    from sidestream_kv.device.kinds import CPU

    device: Device = CpuDevice() if kind == CPU else CudaDevice()
    try:
        host, memory = device.allocate_host("host", _COPY_BYTES), device.allocate("kv", _COPY_BYTES)
        host.data.fill_(1)
        start = np.zeros(1, np.int64)
        load = _copy_speed(device, CopyBatch(host, memory, start, start, _COPY_BYTES))
        return load, _copy_speed(device, CopyBatch(memory, host, start, start, _COPY_BYTES))
    finally:
        device.close()


def _copy_speed(device: Device, batch: CopyBatch) -> float:
    stream = device.stream(f"{batch.source.name} to {batch.target.name}")
    device.wait_host(stream.submit(lambda: stream.copy(batch)), reason="warm up")  # touches the pages
    copies, started_s = 0, time.monotonic()
    while time.monotonic() - started_s < _COPY_S:
        device.wait_host(stream.submit(lambda: stream.copy(batch)), reason="measure")
        copies += 1
    return copies * batch.num_bytes / (time.monotonic() - started_s)


def disk_speeds(directory: Path, dtype: str) -> tuple[dict[str, float], bool]:
    """Bytes per second of the disk tier: `write`, `write_synced` (written and synced to the disk) and `read` (without
    the page cache). Also whether the file system allows direct I/O.
    """
    from sidestream_kv.device.kinds import CPU
    from sidestream_kv.kv.layout import KVLayout
    from sidestream_kv.offload.tiers.disk import DiskTier, entry_bytes

    layout = KVLayout(
        num_layers=30,
        num_kv_heads=3,
        head_dim=64,
        block_tokens=default_block_tokens(CPU, recurrent=False),
        dtype=dtype,
    )  # the demo model's layout
    num_blocks = DISK_BYTES // layout.block_bytes
    with tempfile.TemporaryDirectory(prefix=".sidestream-doctor-", dir=directory) as scratch:
        tier = DiskTier.open(
            scratch, layout=layout, fingerprint="doctor", capacity_bytes=(num_blocks + 1) * entry_bytes(layout)
        )
        try:
            write_s, sync_s, read_s = _time_blocks(tier, Path(scratch), num_blocks, layout.block_bytes)
        finally:
            tier.close()
    moved = num_blocks * layout.block_bytes
    speeds = {"write": moved / write_s, "write_synced": moved / (write_s + sync_s), "read": moved / read_s}
    return speeds, tier.is_direct


def _time_blocks(tier: DiskTier, scratch: Path, num_blocks: int, block_bytes: int) -> tuple[float, float, float]:
    """Seconds to write, to sync and to read the blocks."""
    keys = [index.to_bytes(16, "big") for index in range(num_blocks)]
    payload, out = (memoryview(mmap(-1, block_bytes)) for _ in range(2))  # aligned, for direct I/O
    payload[:] = os.urandom(block_bytes)  # random bytes, because some disks compress data
    grants = [grant for key in keys if (grant := tier.index.reserve(key)) is not None]
    started_s = time.monotonic()
    for grant in grants:
        tier.write(grant, payload)
    written_s = time.monotonic()
    _sync_and_drop_cache(scratch)
    synced_s = time.monotonic()
    for grant in grants:
        tier.index.publish(grant)
    lease = tier.index.pin(keys)
    reading_s = time.monotonic()
    for entry in lease.entries:
        tier.read(entry, out)
    read_s = time.monotonic() - reading_s
    lease.release()
    return written_s - started_s, synced_s - written_s, read_s


def _sync_and_drop_cache(scratch: Path) -> None:
    """Sync every file to the disk and drop it from the page cache, so that reads go to the disk, like the reads of a
    later process.
    """
    for path in scratch.rglob("*-*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
