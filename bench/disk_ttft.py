"""TTFT of a prompt whose KV is on disk, divided by the time to read that KV with nothing else (the floor). The model
has random weights.

floor   the time in which as many threads as the disk tier has read the same number of bytes, in pieces of a block, with
        direct I/O where the file system allows it; plus one decode step. If the link to the device is slower than the
        disk, its time instead
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import closing
from mmap import mmap
from pathlib import Path
from statistics import median

import numpy as np

from bench.engine import _FULL, _TINY, ModelRig
from bench.tier import raw_s
from proof.report import Figure
from sidestream.errors import SidestreamError
from sidestream_kv.config import OffloadConfig
from sidestream_kv.device.kinds import CUDA
from sidestream_kv.offload.tiers.disk import DiskTier


def measure(
    *, device: str, shape: str, directory: Path, rounds: int, on_progress: Callable[[str], None]
) -> list[Figure]:
    """Measure with a tier in a new directory below `directory`, which is removed. Raises SidestreamError if the KV did
    not come from the disk.
    """
    sizes = _FULL if device == CUDA else _TINY
    length = sizes.from_host[0][0]
    with tempfile.TemporaryDirectory(prefix=".sidestream-ttft-", dir=directory) as scratch:
        offload = OffloadConfig(host=sizes.host, disk=Path(scratch) / "tier", disk_capacity=sizes.host)
        with closing(ModelRig(device, shape, sizes, on_progress, offload=offload)) as rig:
            return _figures(rig, length, Path(scratch) / "raw", rounds, on_progress)


def _figures(
    rig: ModelRig, length: int, scratch: Path, rounds: int, on_progress: Callable[[str], None]
) -> list[Figure]:
    tiers = rig.parts.tiers
    assert tiers is not None
    count = length // rig.layout.block_tokens
    memory = np.frombuffer(mmap(-1, count * rig.layout.block_bytes), np.uint8).reshape(count, rig.layout.block_bytes)
    memory[:] = 1
    tier = tiers.persistent["disk"]
    assert isinstance(tier, DiskTier)
    threads = tier.streams
    step_s = median(rig.steps(1, length, 64)[0])
    link_s = memory.nbytes / rig.bytes_a_second_to_device()
    cold, host, disk, raw = list[float](), list[float](), list[float](), list[float]()
    for number in range(rounds):
        on_progress(f"first token, {length} tokens from the disk, round {number + 1} of {rounds}")
        prompt = rig.prompt(length + 1)
        cold.append(rig.ask(prompt, 1).wait().ttft_s)
        host.append(rig.ask_from_host(prompt).ttft_s)
        rig.forget_device()
        rig.engine.call(tiers.host.pool.forget_all)
        answer = rig.ask(prompt, 1).wait()
        if answer.cached.disk != length:
            raise SidestreamError(
                f"{answer.cached.disk} of {length} tokens came from the disk: the figures would be meaningless"
            )
        disk.append(answer.ttft_s)
        raw.append(raw_s(scratch, memory, count, threads.writers, threads.readers)[1])
    floor = median(max(each, link_s) for each in raw) + step_s
    return [
        Figure("disk_ttft_over_floor", median(disk) / floor, "ratio"),
        Figure(f"ttft_disk_ms_{length}", 1e3 * median(disk), "ms"),
        Figure(f"ttft_host_ms_{length}", 1e3 * median(host), "ms"),
        Figure(f"ttft_cold_ms_{length}", 1e3 * median(cold), "ms"),
        Figure("disk_read_gb_s", memory.nbytes / median(raw) / 1e9, "GB/s"),
        Figure("link_to_device_gb_s", memory.nbytes / link_s / 1e9, "GB/s"),
        Figure("one_step_ms", 1e3 * step_s, "ms"),
    ]
