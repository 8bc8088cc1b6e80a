"""Slowdown of a decode step and of a large matrix product by concurrent KV transfers: by stores and loads at full rate,
and, for comparison, by a kernel that copies blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.gpu import QWEN3_8B_BLOCK, open_device
from proof.report import Figure, at_most
from proof.rig import Rig
from sidestream_kv.device.base import Device, Stream
from sidestream_kv.device.kinds import CUDA
from sidestream_kv.offload.pacing import layers_batch
from sidestream_kv.types import Fence

_LAYERS, _ROWS = 36, 32
# Input and output widths of the projections of one layer of Qwen3-8B.
_PROJECTIONS = ((4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096))
_MATMUL = 8192


def measure(*, device: str, rounds: int, on_progress: Callable[[str], None]) -> list[Figure]:
    """The figures. Each round measures without transfers (the baseline) and then with each kind of transfers."""
    used = open_device(device)
    blocks = 512 if device == CUDA else 16
    small = device != CUDA
    with closing(Rig(used, QWEN3_8B_BLOCK, num_blocks=3 * blocks, num_slots=3 * blocks)) as rig:
        stream, ratios, steps_ms = used.stream("compute"), dict[str, list[float]](), dict[str, list[float]]()
        rates: list[float] = []
        for name, work, repeats in _works(used, stream, small=small):
            for number in range(rounds):
                beside: dict[str, Callable[[], Any]] = {
                    "alone": _Nothing,
                    "transfer": partial(_Transfers, rig, blocks),
                    "store": partial(_Transfers, rig, blocks, loads=False),
                    "load": partial(_Transfers, rig, blocks, stores=False),
                    **({} if small else {f"kernel_{n}": partial(_Kernel, rig, blocks, n) for n in (1, 2, 8)}),
                }
                base = 0.0
                for how, make in beside.items():
                    on_progress(f"{name} beside {how}, round {number + 1} of {rounds}")
                    with make() as load:
                        seconds = _seconds(used, work, load, repeats)
                        if how == "transfer":
                            rates.append(load.bytes_per_s())
                    base = seconds if how == "alone" else base
                    ratios.setdefault(f"{name}_under_{how}", []).append(seconds / base)
                    steps_ms.setdefault(f"{name}_{how}", []).append(1e3 * seconds)
    bounds = {"decode_under_transfer": at_most(1.05), "matmul_under_transfer": at_most(1.08)}
    figures = [
        Figure(name, median(values), "ratio", bounds.get(name))
        for name, values in ratios.items()
        if not name.endswith("alone")
    ]
    figures += [Figure(f"{name}_ms", median(values), "ms") for name, values in steps_ms.items()]
    return [*figures, Figure("transfer_gb_s", median(rates) / 1e9, "GB/s")]


def _works(device: Device, stream: Stream, *, small: bool) -> list[tuple[str, Callable[[], Fence], int]]:
    """Name, launch function and repetitions of the two kinds of work: a decode step of 32 rows through the weights of
    Qwen3-8B, and matrix products of 8192 x 8192 matrices.
    """
    on, dtype, scale = device.torch_device, torch.bfloat16, 64 if small else 1
    layers = 2 if small else _LAYERS
    weights = [
        [torch.randn(i // scale, o // scale, device=on, dtype=dtype) for i, o in _PROJECTIONS] for _ in range(layers)
    ]
    inputs = {i: torch.randn(_ROWS, i // scale, device=on, dtype=dtype) for i, _ in _PROJECTIONS}
    side = _MATMUL // scale
    left, right = (torch.randn(side, side, device=on, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)
    outs = {o: torch.empty(_ROWS, o // scale, device=on, dtype=dtype) for _, o in _PROJECTIONS}

    def decode() -> None:
        for layer in weights:
            for (i, o), weight in zip(_PROJECTIONS, layer, strict=True):
                torch.mm(inputs[i], weight, out=outs[o])

    def multiply() -> None:
        torch.mm(left, right, out=product)

    if small:
        return [("decode", lambda: stream.submit(decode), 5), ("matmul", lambda: stream.submit(multiply), 5)]
    from sidestream_kv.device.cuda import CudaStream

    assert isinstance(stream, CudaStream)
    device.wait_host(stream.submit(decode), reason="benchmark")  # the first call creates handles and workspaces
    device.wait_host(stream.submit(multiply), reason="benchmark")

    def step() -> None:
        stream.submit(decode)

    graph = stream.capture(step)
    return [("decode", lambda: stream.replay(graph), 60), ("matmul", lambda: stream.submit(multiply), 150)]


def _seconds(device: Device, launch: Callable[[], Fence], load: Any, repeats: int) -> float:
    """Seconds per launch, over `repeats` launches. Each launch precedes the wait for the previous launch."""
    previous = launch()
    device.wait_host(previous, reason="step")
    start = time.perf_counter()
    previous = launch()
    for _ in range(repeats - 1):
        following = launch()
        load.top_up()
        device.wait_host(previous, reason="step")
        previous = following
    device.wait_host(previous, reason="step")
    return (time.perf_counter() - start) / repeats


class _Nothing:
    """No transfers."""

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *reason: object) -> None:
        return None

    def top_up(self) -> None:
        """Do nothing."""


class _Transfers:
    """Stores and loads at full rate: some transfers are always pending."""

    def __init__(self, rig: Rig, count: int, *, stores: bool = True, loads: bool = True) -> None:
        self._rig = rig
        self._kinds = (stores, loads)
        self._half = count // 2
        self._bytes = 0.0
        self._start_s = 0.0
        self._orders: list[Fence] = []

    def __enter__(self) -> _Transfers:
        self._stored, self._there = self._rig.blocks.take(self._half), self._rig.blocks.take(self._half)
        self._keys = self._rig.new_keys(self._half)
        self._rig.store(self._keys, self._stored.ids)
        self._rig.settle()
        self._start_s, self._bytes = time.perf_counter(), self._moved()
        self.top_up()
        time.sleep(0.005)
        return self

    def __exit__(self, *reason: object) -> None:
        self._rig.settle()
        self._stored.release()
        self._there.release()

    def top_up(self) -> None:
        """Submit more transfers when few are pending."""
        rig = self._rig
        rig.poll()
        self._orders = [fence for fence in self._orders if not fence.poll()]
        while len(self._orders) < 2 * sum(self._kinds):
            if self._kinds[0]:
                self._orders.append(rig.store(rig.new_keys(self._half), self._stored.ids))
            if self._kinds[1]:
                self._orders.append(rig.load(self._keys, self._there))

    def bytes_per_s(self) -> float:
        """Bytes per second of both directions together."""
        return (self._moved() - self._bytes) / (time.perf_counter() - self._start_s)

    def _moved(self) -> float:
        return sum(self._rig.metrics.value("transfer_bytes_total", kind) for kind in ("store", "load"))


class _Kernel:
    """Stores by a copy kernel with `programs` programs, repeated until the exit."""

    def __init__(self, rig: Rig, count: int, programs: int) -> None:
        self._rig = rig
        self._programs = programs
        ids = (
            np.random.default_rng(0).permutation(count).tolist()
        )  # in random order, because adjacent blocks would be one segment, which one program copies
        host = rig.host_memory
        self._batch = layers_batch(rig.memory, ids, host, ids, range(rig.layout.num_layers))
        self._stream = rig.device.stream(f"kernel {time.perf_counter_ns()}")
        self._last: list[Fence] = []

    def __enter__(self) -> _Kernel:
        self.top_up()
        time.sleep(0.005)
        return self

    def __exit__(self, *reason: object) -> None:
        for fence in self._last:
            self._rig.device.wait_host(fence, reason="benchmark")

    def top_up(self) -> None:
        """Launch another copy when only one copy is pending."""
        from sidestream_kv.device.cuda import CudaStream

        stream = self._stream
        assert isinstance(stream, CudaStream)
        self._last = [fence for fence in self._last if not fence.poll()]
        while len(self._last) < 2:
            self._last.append(stream.submit(lambda: stream.copy_as(self._batch, "kernel", programs=self._programs)))
