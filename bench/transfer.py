"""Bandwidth of KV stores and loads, divided by the bandwidth of the link (PCIe), which is measured with one large
pinned copy. Also measures the bandwidth of simpler methods of copying.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from statistics import median

import numpy as np

from bench.gpu import QWEN3_8B_BLOCK, Link, open_device
from proof.report import Figure, at_least
from proof.rig import Rig
from sidestream_kv.device.base import CopyBatch
from sidestream_kv.device.kinds import CUDA
from sidestream_kv.offload.pacing import layers_batch
from sidestream_kv.types import Key

# Number of consecutive submissions, each of all blocks. With only one submission, its latency would count as transfer
# time.
_IN_A_ROW = 4
_BASELINE_LIMIT = 2048
"""Maximum number of segments that the slow baselines copy. Their bandwidth does not depend on this number."""


@dataclass(slots=True)
class _Rates:
    """Bytes per second by name, one value per round."""

    values: dict[str, list[float]]

    def note(self, name: str, num_bytes: int, seconds: float) -> None:
        self.values.setdefault(name, []).append(num_bytes / seconds)

    def over(self, name: str, base: str) -> float:
        """Median over the rounds of the ratio `name` / `base`."""
        return median(a / b for a, b in zip(self.values[name], self.values[base], strict=True))


def measure(*, device: str, mib: int, rounds: int, on_progress: Callable[[str], None]) -> list[Figure]:
    """The figures. Each round first measures the link, then the transfers and the baselines."""
    rates = _Rates({})
    for layered in (False, True):
        used = open_device(device)
        layout = QWEN3_8B_BLOCK
        count = (mib << 20) // layout.block_bytes
        with closing(
            Rig(used, layout, num_blocks=2 * count, num_slots=(2 * _IN_A_ROW + 1) * count, layered=layered)
        ) as rig:
            link = Link(used, count * layout.block_bytes, in_a_row=_IN_A_ROW)
            suffix = "_64k" if layered else ""  # one tensor per layer: segments of 64 KiB
            for number in range(rounds + 1):
                on_progress(f"{'a tensor for each layer' if layered else 'one tensor'}, round {number} of {rounds}")
                kept = rates if number else _Rates({})  # the first round warms up
                _round(rig, link, kept, count, suffix)
                if number and device == CUDA:
                    _baselines(rig, kept, count, suffix)
    figures = [
        Figure("store_over_link", rates.over("store", "link_to_host"), "ratio", at_least(0.97)),
        Figure("load_over_link", rates.over("load", "link_to_device"), "ratio", at_least(0.97)),
        Figure("two_way_over_link", rates.over("two_way", "link_two_way"), "ratio", at_least(0.95)),
        Figure("store_64k_over_link", rates.over("store_64k", "link_to_host_64k"), "ratio", at_least(0.90)),
        Figure("load_64k_over_link", rates.over("load_64k", "link_to_device_64k"), "ratio", at_least(0.90)),
    ]
    figures += [
        Figure(f"{name}_over_link", rates.over(name, f"link_{way}"), "ratio")
        for name, way in (("store_alone", "to_host"), ("load_alone", "to_device"))
    ]
    for name in sorted(rates.values):
        figures.append(Figure(f"{name}_gb_s", median(rates.values[name]) / 1e9, "GB/s"))
    return figures


def _round(rig: Rig, link: Link, rates: _Rates, count: int, suffix: str) -> None:
    num_bytes = _IN_A_ROW * count * rig.layout.block_bytes
    for name, seconds in link.seconds().items():
        rates.note(f"link_{name}{suffix}", (2 if name == "two_way" else 1) * num_bytes, seconds)
    store_blocks, load_blocks = rig.blocks.take(count), rig.blocks.take(count)
    keys = [rig.new_keys(count) for _ in range(_IN_A_ROW)]

    def store(keys: list[list[Key]]) -> None:
        for some in keys:
            rig.store(some, store_blocks.ids)

    def load() -> None:
        for some in keys:
            rig.load(some, load_blocks)

    def both() -> None:
        for some, more in zip(keys, [rig.new_keys(count) for _ in range(_IN_A_ROW)], strict=True):
            rig.store(more, store_blocks.ids)
            rig.load(some, load_blocks)

    rates.note(f"store{suffix}", num_bytes, _timed(rig, lambda: store(keys)))
    rates.note(f"load{suffix}", num_bytes, _timed(rig, load))
    rates.note(f"two_way{suffix}", 2 * num_bytes, _timed(rig, both))
    one = [rig.new_keys(count)]
    rates.note(f"store_alone{suffix}", num_bytes // _IN_A_ROW, _timed(rig, lambda: store(one)))
    rates.note(f"load_alone{suffix}", num_bytes // _IN_A_ROW, _timed(rig, lambda: rig.load(one[0], load_blocks)))
    store_blocks.release()
    load_blocks.release()


def _timed(rig: Rig, order: Callable[[], object]) -> float:
    start = time.perf_counter()
    order()
    rig.settle()
    return time.perf_counter() - start


def _baselines(rig: Rig, rates: _Rates, count: int, suffix: str) -> None:
    """Measure simpler methods of copying, on one stream and without pacing: one call for each segment, one call for all
    segments, and a kernel.
    """
    from sidestream_kv.device.cuda import CudaStream

    ids = np.random.default_rng(0).permutation(2 * count)[:count].tolist()
    host = rig.host_memory
    stream = rig.device.stream(f"baseline{suffix} {time.perf_counter_ns()}")
    assert isinstance(stream, CudaStream)
    for name, source, target in (("store", rig.memory, host), ("load", host, rig.memory)):
        batch = layers_batch(source, ids, target, ids, range(rig.layout.num_layers))
        short = batch.part(0, _BASELINE_LIMIT * len(ids) // len(batch.pieces()[2]) or 1)
        ways: dict[str, tuple[CopyBatch, Callable[[CopyBatch], None]]] = {
            "call_each": (short, lambda batch: stream.copy_as(batch, "call each")),
            "unpaced": (batch, stream.copy),
            "kernel_2": (batch, lambda batch: stream.copy_as(batch, "kernel", programs=2)),
            "kernel_8": (batch, lambda batch: stream.copy_as(batch, "kernel", programs=8)),
        }
        for way, (what, copy) in ways.items():
            start = time.perf_counter()
            fence = stream.submit(lambda what=what, copy=copy: copy(what))  # type: ignore[misc]
            rig.device.wait_host(fence, reason="benchmark")
            if fence.failure is not None:
                raise fence.failure
            rates.note(f"{name}_{way}{suffix}", what.num_bytes, time.perf_counter() - start)
