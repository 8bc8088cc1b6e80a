"""Measures how long rank 0 needs to send the plan of a decode step to the processes of the other ranks (tensor
parallelism). Four transports are measured, one after another:

    socket   Sidestream's own transport: `SocketTransport` to a `Follower` (the loop of another rank), whose executor
             does nothing
    ring     a ring buffer in shared memory; readers spin on a counter, and yield the core between two reads of it
    gloo     two Gloo broadcasts: the length of the plan, and its bytes
    byte     one byte over the same sockets, to a rank that blocks in `recv`: the part of the operating system, without
             any plan

Each transport is first idle for a while, to measure the CPU time of an idle rank, and then sends steps at a steady
rate. `broadcast_rank.py` is the program of the other ranks.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Self, cast

import msgspec

from bench.broadcast_rank import (
    END_BYTE,
    STEP_BYTE,
    NoExecutor,
    Ring,
    join_group,
    send_by_group,
)
from proof.report import percentile
from sidestream.config import EngineConfig
from sidestream.processes.child import child_command, child_environment, plain
from sidestream.processes.frames import FrameEncoder
from sidestream.ranks.leader import joint_executor
from sidestream.ranks.link import SocketTransport, decoder_of_reports
from sidestream.ranks.messages import Begin, End, StepEncoder
from sidestream.runner.executor import Executor
from sidestream.types import BatchPlan, RowPlan
from sidestream.version import VERSION
from sidestream_kv.types import LayerGates

WAYS = ("socket", "ring", "gloo", "byte")
_ROWS = 32
_BLOCK_TOKENS = 16
_CONTEXT = 1000  # tokens of the first row; each further row has one token more
_WARM_UP = 20  # steps that are not counted
_BUSY_SHARE = 0.9  # share of the time between two steps in which a rank's device is busy


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The results of one transport, at one number of ranks.

    us         for each step: microseconds from before it is encoded until the slowest rank has decoded it
    idle_cpu   CPU seconds per second of a rank without steps; the maximum over the ranks
    cpu        CPU seconds per second of a rank with steps; the maximum over the ranks
    """

    us: list[float]
    idle_cpu: float
    cpu: float

    def percentile_us(self, percent: float) -> float:
        """A percentile of `us`."""
        return percentile(self.us, percent)


@dataclass(slots=True)
class Broadcast:
    """The results at one number of ranks.

    ways              results of each transport, by name
    step_overhead_us  engine-thread time that the other ranks add to a step: launching the step, and polling the fence
                      of the previous step
    """

    ways: dict[str, Arrivals] = field(default_factory=dict)
    step_overhead_us: float = 0.0


def measure_broadcast(size: int, *, steps: int, rate: float, idle_s: float) -> Broadcast:
    """Send `steps` plans to `size - 1` processes with each transport, `rate` plans per second.

    idle_s   seconds without steps before each transport is used
    """
    result = Broadcast()
    with _Ranks(size, rate) as ranks:
        sent = {}
        for way, run in zip(WAYS, (ranks.by_socket, ranks.by_ring, ranks.by_gloo, ranks.by_byte), strict=True):
            time.sleep(idle_s)
            sent[way] = run(steps)
        ranks.end()
        result.step_overhead_us = ranks.step_overhead_us
        for way in WAYS:
            notes = [ranks.notes[rank][way] for rank in range(size - 1)]
            arrived = [max(times) for times in zip(*(note["received_ns"] for note in notes), strict=True)]
            us = [(there - begun) / 1e3 for begun, there in zip(sent[way], arrived, strict=True)]
            result.ways[way] = Arrivals(
                us[min(_WARM_UP, steps // 2) :],
                max(note["idle_cpu"] for note in notes),
                max(note["busy_cpu"] for note in notes),
            )
    return result


def decode_steps() -> Iterator[BatchPlan]:
    """Yield plans of decode steps, without end. In each step, a row grows by a token and, if needed, by a block."""
    blocks = [tuple(range(200 * row, 200 * row + _CONTEXT // _BLOCK_TOKENS + 1)) for row in range(_ROWS)]
    number = 0
    while True:
        rows = []
        for row in range(_ROWS):
            stop = _CONTEXT + row + number
            while len(blocks[row]) * _BLOCK_TOKENS < stop:
                blocks[row] = (*blocks[row], blocks[row][-1] + 1)
            rows.append(RowPlan(row, row, 0, stop - 1, stop, None, blocks[row], True, number))
        yield BatchPlan(tuple(rows))
        number += 1


class _Ranks:
    """Rank 0, and the processes of the other ranks. A context manager."""

    def __init__(self, size: int, rate: float) -> None:
        self.notes: list[dict[str, Any]] = []
        self.step_overhead_us = 0.0
        self._size = size
        self._rate = rate
        self._directory = Path(tempfile.mkdtemp(prefix="sidestream-bench-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Self:
        try:
            for rank in range(1, self._size):
                self._start(rank)
            self._group = join_group(self._directory, 0, self._size)  # returns when all ranks have joined
        except BaseException:
            self.__exit__()
            raise
        decoders = [decoder_of_reports() for _ in self._sockets]
        self._transport = SocketTransport(
            self._sockets, decoders, how_ended=lambda rank: "its process has ended", end=self._kill
        )
        self._transport.start([()] * len(self._sockets), silence_s=float("inf"))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._kill()
        for process in self._processes:
            process.wait()
        for each in self._sockets:
            each.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def by_socket(self, steps: int) -> list[int]:
        """Send steps over the sockets; returns the start time of each step in ns, by the monotonic clock."""
        alone = cast(Executor, NoExecutor(0.0))
        joint, before = joint_executor(alone, self._transport.ranks), None
        alone_ns, joint_ns = list[int](), list[int]()

        def launch(batch: BatchPlan, executor: Executor, taken_ns: list[int]) -> None:
            nonlocal before
            begun_ns = time.monotonic_ns()
            step = executor.launch(batch, after=(), gates=LayerGates(()))
            if before is not None:
                before.last_use.poll()
            taken_ns.append(time.monotonic_ns() - begun_ns)
            before = step

        def send(batch: BatchPlan) -> None:
            launch(batch, joint, joint_ns)

        begun = self._paced(steps, send)
        before = None
        for batch, _ in zip(decode_steps(), range(steps), strict=False):
            launch(batch, alone, alone_ns)
        self._transport.ranks.send(End())
        self.step_overhead_us = (median(joint_ns) - median(alone_ns)) / 1e3
        return begun

    def by_ring(self, steps: int) -> list[int]:
        """Like `by_socket`, but through shared memory."""
        return self._by_bytes(steps, Ring(self._directory / "ring", self._size - 1).put)

    def by_gloo(self, steps: int) -> list[int]:
        """Like `by_socket`, but through Gloo."""
        return self._by_bytes(steps, lambda message: send_by_group(self._group, message))

    def by_byte(self, steps: int) -> list[int]:
        """Like `by_socket`, but send a byte instead of each plan."""

        def send(byte: bytes) -> None:
            for each in self._sockets:
                each.send(byte)

        begun = self._paced(steps, lambda batch: send(STEP_BYTE))
        send(END_BYTE)
        return begun

    def end(self) -> None:
        """Wait until the other ranks have ended, and read the measurements that they wrote."""
        self._transport.close()
        self._group.close()
        for rank in range(1, self._size):
            self.notes.append(json.loads((self._directory / f"notes-{rank}").read_text(encoding="utf-8")))

    def _by_bytes(self, steps: int, put: Callable[[bytes], None]) -> list[int]:
        encoder, encode = StepEncoder(), msgspec.msgpack.Encoder().encode
        begun = self._paced(steps, lambda batch: put(encode(encoder.encode(batch, (), LayerGates(())))))
        put(encode(End()))
        return begun

    def _paced(self, steps: int, send: Callable[[BatchPlan], None]) -> list[int]:
        begun, plans, next_s = [], decode_steps(), time.monotonic()
        for _ in range(steps):
            time.sleep(max(0.0, next_s - time.monotonic()))
            batch = next(plans)  # after the pause, as the engine makes a plan just before it is sent
            next_s = max(next_s + 1 / self._rate, time.monotonic())
            if (lost := self._transport.ranks.progress.lost) is not None:
                raise lost
            begun.append(time.monotonic_ns())
            send(batch)
        return begun

    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        self._sockets.append(ours)
        with theirs:
            self._processes.append(
                subprocess.Popen(
                    child_command("bench.broadcast_rank", theirs.fileno()),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env=child_environment() | {"OMP_NUM_THREADS": "1"},
                )
            )
        config = plain(EngineConfig()) | {"step_s": _BUSY_SHARE / self._rate}
        begin = Begin(VERSION, "", config, rank, self._size, str(self._directory), 0, log_json=False)
        ours.sendall(FrameEncoder().encode(begin))

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
