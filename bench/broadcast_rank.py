"""The processes to which `broadcast.py` sends plans, and the parts of its transports that both sides use."""

from __future__ import annotations

import json
import mmap
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import torch

from sidestream.errors import ProcessFailed
from sidestream.ranks.follower import Follower
from sidestream.ranks.link import RankConnection
from sidestream.ranks.messages import Step, StepDecoder, ToRank
from sidestream.runner.executor import Executor, LaunchedStep
from sidestream.types import BatchPlan
from sidestream_kv.device.group import Group, open_group
from sidestream_kv.device.kinds import CPU

TIMEOUT_S = 120.0
STEP_BYTE, END_BYTE = b"\1", b"\0"
"""The bytes of the transport `byte`."""
_RING_HEAD, _RING_SLOTS, _RING_SLOT = 4096, 16, 1 << 16


class Ring:
    """A ring buffer in shared memory, with one writer. Its head holds counts: the number of messages written, and for
    each reader the number of messages read. The slots hold the messages.
    """

    def __init__(self, path: Path, readers: int) -> None:
        size = _RING_HEAD + _RING_SLOTS * _RING_SLOT
        with path.open("a+b") as file:
            file.truncate(size)
            self._bytes = memoryview(mmap.mmap(file.fileno(), size))
        self._counts = self._bytes[:_RING_HEAD].cast("q")
        self._readers = readers
        self._done = 0

    def put(self, message: bytes) -> None:
        """Write a message. Spins while no slot is free. Raises ProcessFailed if no slot becomes free in time."""
        ends_s = time.monotonic() + TIMEOUT_S
        while min(self._counts[1 : 1 + self._readers]) <= self._done - _RING_SLOTS:
            if time.monotonic() > ends_s:
                raise ProcessFailed(f"a rank has read nothing from the ring for {TIMEOUT_S:g} s")
            os.sched_yield()
        start = _RING_HEAD + self._done % _RING_SLOTS * _RING_SLOT
        self._bytes[start : start + 8] = len(message).to_bytes(8, "little")
        self._bytes[start + 8 : start + 8 + len(message)] = message
        self._done += 1
        self._counts[0] = self._done

    def take(self, reader: int) -> bytes:
        """The next message. Spins until the message arrives."""
        while self._counts[0] == self._done:
            os.sched_yield()
        start = _RING_HEAD + self._done % _RING_SLOTS * _RING_SLOT
        length = int.from_bytes(self._bytes[start : start + 8], "little")
        message = bytes(self._bytes[start + 8 : start + 8 + length])
        self._done += 1
        self._counts[1 + reader] = self._done
        return message


def send_by_group(group: Group, message: bytes) -> None:
    """Called by rank 0: send a message by two broadcasts, its length and its bytes."""
    group.broadcast(torch.tensor([len(message)]))
    group.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8))


def take_by_group(group: Group) -> bytes:
    """Called by the other ranks: the next message of rank 0. Blocks."""
    length = torch.zeros(1, dtype=torch.int64)
    group.broadcast(length)
    message = torch.empty(int(length), dtype=torch.uint8)
    group.broadcast(message)
    return message.numpy().tobytes()


def join_group(directory: str | Path, rank: int, size: int) -> Group:
    """Join the Gloo group of the ranks. `directory`: holds the group's rendezvous file. Returns when all ranks have
    joined.
    """
    return open_group(Path(directory), rank=rank, size=size, device=torch.device(CPU), timeout_s=TIMEOUT_S)


class _Notes:
    """Measurements of one transport in this process: the arrival time of each step, and the CPU time."""

    def __init__(self) -> None:
        self._received_ns: list[int] = []
        self._marks = [self._mark()]

    def step(self) -> None:
        """Record that a step has been decoded."""
        self._received_ns.append(time.monotonic_ns())
        if len(self._received_ns) == 1:
            self._marks.append(self._mark())

    def plain(self) -> dict[str, Any]:
        """The measurements as JSON values. Called after the last step."""
        self._marks.append(self._mark())
        idle, busy = (
            (after[1] - before[1]) / (after[0] - before[0])
            for before, after in zip(self._marks, self._marks[1:], strict=False)
        )
        return {"received_ns": self._received_ns, "idle_cpu": idle, "busy_cpu": busy}

    def _mark(self) -> tuple[int, int]:
        return time.monotonic_ns(), time.process_time_ns()


class _Later:
    """A fence that is done after `seconds`."""

    stream, tick, failure = "compute", 0, None

    def __init__(self, seconds: float) -> None:
        self._done_s = time.monotonic() + seconds

    def poll(self) -> bool:
        """Whether the fence is done."""
        return time.monotonic() >= self._done_s


class NoExecutor:
    """An executor whose steps do nothing and are done after `step_s`. It calls `launched` for each step."""

    def __init__(self, step_s: float, launched: Callable[[], None] = lambda: None) -> None:
        self._step_s = step_s
        self._launched = launched

    def launch(self, batch: BatchPlan, *, after: object, gates: object) -> LaunchedStep:
        self._launched()
        entry = SimpleNamespace(lease=SimpleNamespace(release=lambda after: None))  # nothing reads results
        return LaunchedStep(batch, _Later(self._step_s), cast(Any, entry), False, (), 0.0, cast(Any, None))


def main(descriptor: int) -> None:
    """Receive the steps of each transport in turn, and write the measurements to a file in the ranks' directory."""
    connection = socket.socket(fileno=descriptor)
    link = RankConnection(connection)
    begin = link.wait_for_begin()
    if begin is None:
        return
    group = join_group(begin.directory, begin.rank, begin.size)
    ring = Ring(Path(begin.directory, "ring"), begin.size - 1)
    notes = {"socket": _by_socket(link, begin.config["step_s"])}
    notes["ring"] = _by_bytes(lambda: ring.take(begin.rank - 1))
    notes["gloo"] = _by_bytes(lambda: take_by_group(group))
    notes["byte"] = _by_byte(connection)
    Path(begin.directory, f"notes-{begin.rank}").write_text(json.dumps(notes), encoding="utf-8")
    os._exit(0)  # the group's threads may wait for ranks that have ended


def _by_socket(link: RankConnection, step_s: float) -> dict[str, Any]:
    notes, unused = _Notes(), cast(Any, None)
    follower = Follower(
        device=unused,
        executor=cast(Executor, NoExecutor(step_s, notes.step)),
        memory=unused,
        tiers=None,
        take=link.take,
        report=link.report,
    )
    link.run(follower)
    return notes.plain()


def _by_bytes(take: Callable[[], bytes]) -> dict[str, Any]:
    decode, decoder, notes = msgspec.msgpack.Decoder(ToRank).decode, StepDecoder(), _Notes()
    while isinstance(message := decode(take()), Step):
        decoder.decode(message)
        notes.step()
    return notes.plain()


def _by_byte(connection: socket.socket) -> dict[str, Any]:
    notes = _Notes()
    while connection.recv(1) == STEP_BYTE:
        notes.step()
    return notes.plain()
