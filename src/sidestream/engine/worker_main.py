"""The process of a rank other than 0: loads its share of the model, and follows rank 0 until rank 0 ends."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from sidestream.config import EngineConfig
from sidestream.engine.build import build_follower
from sidestream.errors import ProcessFailed, SidestreamError
from sidestream.models.loader import load_for
from sidestream.processes.child import config_of
from sidestream.processes.log_stream import JSON_LAYOUT, start_logging
from sidestream.ranks.link import RankConnection
from sidestream.ranks.messages import Arrived, Begin, Refused, Serving
from sidestream.ranks.worker_pool import COLLECTIVE_S, threads_of_rank
from sidestream.version import VERSION
from sidestream_kv.device.base import Device
from sidestream_kv.device.choice import torch_device
from sidestream_kv.device.cpu import CpuDevice
from sidestream_kv.device.group import open_group
from sidestream_kv.device.kinds import on_gpu
from sidestream_kv.device.thread_limits import refused_threads_named

log = logging.getLogger(__name__)

OnDevice = Callable[[int, Device], None]
"""Called with the rank's number and its open device, which nothing uses yet."""


def leave_as_it_is(rank: int, device: Device) -> None:
    """The default `OnDevice`."""


def main(descriptor: int, *, on_device: OnDevice = leave_as_it_is) -> None:
    """Run a rank. `descriptor`: the socket that is connected to rank 0's process, with which this process ends."""
    link = RankConnection(socket.socket(fileno=descriptor))
    begin = link.wait_for_begin()
    if begin is None:
        sys.exit(1)
    text = f"rank {begin.rank}: %(levelname)s %(name)s %(message)s"
    start_logging(begin.log_level, JSON_LAYOUT if begin.log_json else text)
    try:
        with refused_threads_named():
            follow(begin, link, on_device)
    except BaseException as error:
        log.critical("rank %d of %d failed", begin.rank, begin.size, exc_info=error)
        kind = type(error).__name__ if isinstance(error, SidestreamError) else "ProcessFailed"
        with contextlib.suppress(OSError):
            link.report(Refused(kind, str(error)))
        os._exit(1)  # without cleanup: threads may wait for other ranks in a collective
    os._exit(0)


def follow(begin: Begin, link: RankConnection, on_device: OnDevice = leave_as_it_is) -> None:
    """Join the group, load this rank's share, and carry out rank 0's messages until the last one."""
    if begin.version != VERSION:
        raise ProcessFailed(
            f"rank {begin.rank} runs Sidestream {VERSION}, rank 0 {begin.version}: install one version for all"
        )
    config = config_of(begin.config)
    where = torch_device(config.device)
    link.report(Arrived())
    group = open_group(Path(begin.directory), rank=begin.rank, size=begin.size, device=where, timeout_s=COLLECTIVE_S)
    model = load_for(begin.model, config, device=where, group=group)
    if config.num_loras:
        model.add_adapters(slots=config.num_loras, rank=config.max_lora_rank)
    device = _open_device(config, where)
    on_device(begin.rank, device)
    follower = build_follower(model, config, device=device, group=group, take=link.take, report=link.report)
    link.report(Serving())
    link.run(follower)
    device.close()
    follower.close()
    group.close()


def _open_device(config: EngineConfig, device: torch.device) -> Device:
    if not on_gpu(device):
        return CpuDevice(compute_threads=threads_of_rank(config))
    from sidestream_kv.device.cuda import CudaDevice

    cuda = CudaDevice()
    cuda.warm_up()
    return cuda
