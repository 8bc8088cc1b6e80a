"""The program of a rank that ends while the ranks start: its memory runs out behind the load of the model; or it leaves
before it joins the others.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
from pathlib import Path

import pytest

from sidestream.errors import OutOfDeviceMemory
from sidestream.ranks.link import RankConnection
from sidestream.ranks.messages import Arrived
from sidestream.ranks.worker_pool import RankProcesses, RankProgram
from sidestream_kv.device.base import Device

_EARLY = "RANK_LEAVES_EARLY"


def program(*, early: bool = False) -> RankProgram:
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    return RankProgram(__name__, {"PYTHONPATH": paths} | ({_EARLY: "1"} if early else {}))


def start_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidestream.engine.loading.RankProcesses", functools.partial(RankProcesses, program=program()))


def run_out(rank: int, device: Device) -> None:
    raise OutOfDeviceMemory(f"out of device memory on rank {rank}; lower the KV memory or the batch")


def main(descriptor: int) -> None:
    if _EARLY in os.environ:
        link = RankConnection(socket.socket(fileno=descriptor))
        link.wait_for_begin()
        link.report(Arrived())
        os._exit(3)
    from sidestream.engine import worker_main  # seconds of imports, of which a rank that leaves early needs none

    worker_main.main(descriptor, on_device=run_out)


def is_rank(pid: int | str) -> bool:
    """Whether a process is a rank that runs: one that has ended and is not reaped yet has no command line."""
    try:
        return "worker_main" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False
