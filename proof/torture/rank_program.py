"""Delays and failing copies on the devices of all ranks, and the program of the ranks other than 0, for the torture
test of ranks. The program runs `sidestream.engine.worker_main` with such a device and, if asked, without some rules.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import cast

import msgspec

from proof.mutations import applied, find
from proof.rig import busy
from proof.torture.traffic import Habits, Meddler, draw_delay
from sidestream.engine import worker_main
from sidestream.ranks.leader import COMPUTE
from sidestream.ranks.worker_pool import RankProgram
from sidestream_kv.device.base import Device, Stream, no_accesses
from sidestream_kv.device.cpu import CpuDevice
from sidestream_kv.device.cuda import CudaDevice
from sidestream_kv.types import Accesses, Fence

_VARIABLE = "SIDESTREAM_TORTURE_RANKS"
_SEEDS = 1000
# The warm-up captures graphs with this label. A delay must not become part of a graph.
_CAPTURE = "capture"


@dataclass(frozen=True, slots=True)
class Meddling:
    """The behaviour of the devices of all ranks.

    seed           each rank draws its own delays from it
    segment_bytes  see `Device.segment_bytes`
    delay          of steps, stores, and reads and writes of the disk, see `Habits.delay`
    load_delay     of loads
    faults         share of slices of copies that fail
    without        names of rules that the ranks other than 0 do not have
    """

    seed: int
    segment_bytes: int
    delay: tuple[float, float, float]
    load_delay: tuple[float, float, float]
    faults: float
    without: tuple[str, ...] = ()

    def program(self) -> RankProgram:
        """The program of the other ranks."""
        return RankProgram(__name__, {_VARIABLE: msgspec.json.encode(self).decode()})


def meddle(rank: int, device: Device, meddling: Meddling) -> Meddler:
    """Delay the work of a device, and let copies fail. Call it before the device has streams."""
    assert isinstance(device, CpuDevice | CudaDevice)
    rng = random.Random(meddling.seed * _SEEDS + rank)
    device.segment_bytes = meddling.segment_bytes
    habits = Habits(longest=0, delay=meddling.delay, load_delay=meddling.load_delay, faults=meddling.faults)
    meddler = Meddler(device, habits, seed=rng.getrandbits(32))
    stream, worker = cast(Callable[[str], Stream], device.stream), cast(Callable[[str], Stream], device.worker)

    def make_stream(name: str) -> Stream:
        made = stream(name)
        if name == COMPUTE:
            _hold_up(made, lambda seconds: busy(device, seconds), rng, meddling.delay)
        return made

    def make_worker(name: str) -> Stream:
        made = worker(name)
        _hold_up(made, time.sleep, rng, meddling.delay)  # on every device, a worker is a host thread
        return made

    device.stream, device.worker = make_stream, make_worker  # type: ignore[method-assign, assignment]
    return meddler


def _hold_up(
    stream: Stream, wait: Callable[[float], None], rng: random.Random, delay: tuple[float, float, float]
) -> None:
    submit = stream.submit

    def late(work: Callable[[], None], accesses: Accesses = no_accesses, *, label: str = "") -> Fence:
        seconds = 0.0 if label == _CAPTURE else draw_delay(rng, delay)

        def delayed() -> None:
            wait(seconds)
            work()

        return submit(delayed if seconds else work, accesses, label=label)

    stream.submit = late  # type: ignore[method-assign]


def main(descriptor: int) -> None:
    """Run a rank. See `worker_main.main`."""
    meddling = msgspec.json.decode(os.environ[_VARIABLE], type=Meddling)

    def on_device(rank: int, device: Device) -> None:
        meddle(rank, device, meddling)

    with ExitStack() as undo:
        for name in meddling.without:
            undo.enter_context(applied(find(name)))
        worker_main.main(descriptor, on_device=on_device)
