"""Rank 0's device and executor, whose work is repeated on every rank.

The scheduler, the pools and the offload worker work with one device. A copy or a step is sent to the other ranks before
rank 0's caller gets its fence: if a message refers to a fence, its receiver has the work of that fence already. A fence
of the device is done when all ranks have passed it (`JointFence`). Each device waits only for fences of its own rank.
No device and no host waits for another rank, except in the collectives of the forward pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from typing import Any, Protocol, cast

from sidestream import errors
from sidestream.errors import DeviceError, DeviceLost, InvariantError, SidestreamError
from sidestream.ranks.fences import FenceName, JointFence, Progress, local_fence, local_gates, names_of
from sidestream.ranks.messages import (
    AdapterPut,
    AdapterRead,
    Copy,
    End,
    Failed,
    Passed,
    Ready,
    StepEncoder,
    TierRead,
    TierWrite,
    ToLeader,
)
from sidestream.ranks.messages import ToRank as Message
from sidestream.runner.executor import Executor, LaunchedStep
from sidestream.types import BatchPlan
from sidestream_kv.device.base import CopyBatch, Device, HostThread, Memory, Stream, WakeUp, no_accesses
from sidestream_kv.device.channel import Bell
from sidestream_kv.offload.tier_io import LocalWork, TierWork
from sidestream_kv.types import HOST, Accesses, Fence, LayerGates

COMPUTE = "compute"
"""The stream of steps."""
ADAPTER_READS, ADAPTER_PUTS = "adapter reads", "adapter puts"
"""Names of the work that loads LoRA adapters. Puts run on the stream of steps, with numbers of their own."""


KNOWN_S = 0.5
"""How long a step's failure waits for news of a lost rank, which would be its reason."""


class Transport(Protocol):
    """Brings messages to all other ranks, in order."""

    def send(self, message: Message) -> None:
        """Send a message to every other rank. Never blocks. One call at a time."""
        ...

    def close(self) -> None:
        """Wait until every other rank has ended: by itself after the message `End`, or killed. Idempotent."""
        ...

    def kill(self) -> None:
        """End every other rank at once: rank 0 has lost one of them. Never blocks. Idempotent."""
        ...


class Ranks:
    """Rank 0's handle of the other ranks.

    size   number of ranks, with rank 0
    """

    def __init__(self, size: int, transport: Transport, *, progress: Progress) -> None:
        self.size = size
        self.progress = progress
        self._transport = transport
        self._sending = threading.Lock()
        self._known = threading.Event()  # set when a rank is lost
        self._reported = threading.Event()  # set by each report of finished work, and when a rank is lost
        self._closed = False
        self._threads: list[_JointThread] = []
        self._ready: dict[int, Ready] = {}  # by rank
        self._adapters = 0  # number of adapters that the ranks were told to read
        self._puts = 0
        self._on_loss: Callable[[DeviceLost], None] = lambda error: None

    def send(self, message: Message) -> None:
        """Send a message to all other ranks. Any thread."""
        with self._sending:
            self._transport.send(message)  # rule: message-is-sent

    def read_adapter(self, path: str, digest: str) -> FenceName:
        """Let the other ranks read a LoRA adapter, whose digest on rank 0 is given. Returns the name of this work. One
        call at a time, on any thread.
        """
        self._adapters += 1
        self.send(AdapterRead(self._adapters, path, digest))
        return ADAPTER_READS, self._adapters

    def put_adapter(self, slot: int, local: Fence) -> Fence:
        """Let the other ranks put the adapter that they read last into a slot, as rank 0 does; `local`: rank 0's fence.
        Returns the fence of all ranks. Engine thread only.
        """
        self._puts += 1
        self.send(AdapterPut(self._puts, slot))
        return JointFence(local, (ADAPTER_PUTS, self._puts), self.progress)

    def check_step(self, failure: BaseException | None) -> None:
        """Raise the error that ends the engine if a step failed on rank 0, or if a rank was lost. `failure`: that of
        the step, which has ended on rank 0. Call it before the results of a step are used: when a rank is lost, steps
        end without an error and with wrong results, because their collectives are aborted.

        After a failure, waits for a moment: a collective may fail before the loss of the rank is known.
        """
        if failure is not None:
            self.wait_for_loss()
        if (lost := self.progress.lost) is not None:  # rule: step-with-a-lost-rank-is-not-committed
            raise lost
        if failure is not None:
            raise DeviceLost(f"a step failed on rank 0, and the other ranks wait for it: {failure}")

    def wait_for_loss(self) -> None:
        """Block until a rank is lost, at most for `KNOWN_S`."""
        self._known.wait(KNOWN_S)

    def wait_for(self, fence: Fence) -> None:
        """Block until every rank has reported work that rank 0 has done already. The other ranks do it at the same
        time, so this waits for their reports only. Raises DeviceLost if a rank is lost.
        """
        while True:
            self._reported.clear()
            if fence.poll():
                return
            self._reported.wait()

    def close(self) -> None:
        """End rank 0's threads, let the other ranks finish all work that was sent, and end them. Blocks. Idempotent."""
        for joint in self._threads:  # The threads end first: none may send a copy after `End`.
            if joint.thread is not None:
                joint.thread.close()
        if not self._closed:
            self._closed = True
            self.send(End())
        self._transport.close()

    def on_loss(self, end: Callable[[DeviceLost], None]) -> None:
        """Call `end` with the reason when a rank is lost, on any thread."""
        self._on_loss = end

    # ------------------------------------------------------------------ the thread that reads reports

    def take_in(self, rank: int, message: ToLeader) -> None:
        """Apply a message of `rank`."""
        match message:
            case Passed(names):
                self.progress.raise_to(rank, names)
                self._reported.set()
                self._wake()
            case Failed(stream, number, kind, text):
                if stream == COMPUTE:
                    self.lose(DeviceLost(f"a step failed on rank {rank}: {text}"))
                else:
                    self.progress.fail((stream, number), error_named(kind, f"on rank {rank}: {text}"))
            case Ready():
                self._ready[rank] = message
                self._wake()
            case _:  # `Beat`: the rank is alive, and nothing else
                pass

    def lose(self, error: DeviceLost) -> None:
        """End all waits for the other ranks: a rank has ended, or its step has failed. Any thread."""
        self.progress.lose(error)  # before `kill`, which ends the steps that wait for other ranks
        self._known.set()
        self._reported.set()
        self._transport.kill()  # the ranks that still run would wait forever in a collective, and rank 0 with them
        self._wake()
        self._on_loss(error)

    def _wake(self) -> None:
        for thread in self._threads:
            thread.wake_for_fences()

    # ------------------------------------------------------------------ for the joint device

    def add_thread(self, thread: _JointThread) -> None:
        """Wake `thread` when a rank reports something that the thread may wait for."""
        self._threads.append(thread)

    def ready_bytes(self, least: int) -> int:
        """Bytes of host memory that every other rank can use. A rank that has not reported counts as `least` bytes."""
        # rule: unreported-rank-has-the-least-memory
        return min(self._ready[rank].num_bytes if rank in self._ready else least for rank in range(1, self.size))

    @property
    def grows(self) -> bool:
        """Whether another rank's host memory is not ready yet."""
        return not all(rank in self._ready and self._ready[rank].final for rank in range(1, self.size))


def error_named(kind: str, text: str) -> SidestreamError:
    """An error of the class `kind` in `sidestream.errors`; DeviceError if there is no such class."""
    error = getattr(errors, kind, None)
    return error(text) if isinstance(error, type) and issubclass(error, SidestreamError) else DeviceError(text)


class JointStream:
    """A stream of rank 0. Its copies, and its reads and writes of tiers, run on every rank, on the stream of the same
    name.
    """

    def __init__(self, stream: Stream, ranks: Ranks) -> None:
        self.name = stream.name
        self._stream = stream
        self._ranks = ranks
        self._number = 0
        self._after: list[FenceName] = []  # fences that the next work waits for on the other ranks

    def wait(self, fence: Fence) -> None:
        self._stream.wait(local_fence(fence))
        self._after += names_of([fence])  # rule: copy-waits-on-every-rank

    def submit_copy(self, batch: CopyBatch, first: int, stop: int, *, label: str = "") -> JointFence:
        local = self._stream.submit_copy(batch, first, stop, label=label)
        sources, targets = (
            starts[first:stop].astype("<i8").tobytes() for starts in (batch.source_starts, batch.target_starts)
        )
        return self._sent(
            local,
            lambda number, after: Copy(
                self.name, number, label, batch.target.name == HOST, sources, targets, batch.size, after
            ),
        )

    def submit(self, work: Callable[[], None], accesses: Accesses = no_accesses, *, label: str = "") -> Fence:
        """Submit a read or a write of a block of a persistent tier, or work for this rank only. Raises InvariantError
        for other work.
        """
        if isinstance(work, LocalWork):
            return self._stream.submit(work, accesses, label=label)
        if not isinstance(work, TierWork) or len(work.blocks) > 1:
            raise InvariantError(f"stream {self.name}: other ranks cannot run {label or 'work'} of rank 0")
        (block,) = work.blocks
        local, entry = self._stream.submit(work, accesses, label=label), block.entry
        if block.grant is None:
            return self._sent(
                local,
                lambda number, after: TierRead(
                    self.name, number, work.tier, block.slot, entry.key, entry.serial, after
                ),
            )
        victim = None if block.victim is None else (block.victim.key, block.victim.serial)
        return self._sent(
            local,
            lambda number, after: TierWrite(self.name, number, work.tier, block.slot, entry.key, entry.serial, victim),
        )

    def _sent(self, local: Fence, message: Callable[[int, tuple[FenceName, ...]], Message]) -> JointFence:
        """Send a message to the other ranks. Returns the fence of all ranks."""
        self._number += 1
        self._ranks.send(message(self._number, tuple(self._after)))
        self._after.clear()
        return JointFence(local, (self.name, self._number), self._ranks.progress)

    def __getattr__(self, name: str) -> Any:
        """All other attributes are those of rank 0's own stream."""
        return getattr(self._stream, name)


class _JointThread:
    """A thread of rank 0 whose next turn may wait for fences of all ranks. See `HostThread`."""

    def __init__(self, turn: Callable[[], WakeUp], clock: Callable[[], float]) -> None:
        self._turn = turn
        self._clock = clock
        self._waits_for_fences = False
        self.thread: HostThread | None = None

    def turn(self) -> WakeUp:
        """The thread's turn. Rank 0's device wakes the thread when rank 0's part of a fence is done; a report wakes it
        for the parts of other ranks.
        """
        # Set before the turn polls fences, so that a report during the turn causes another turn.
        self._waits_for_fences = True
        wake_up = self._turn()
        self._waits_for_fences = bool(wake_up.fences)
        waiting = []
        for fence in wake_up.fences:
            if not (local := local_fence(fence)).poll():
                waiting.append(local)
            elif fence.poll():  # rule: fence-that-was-done-meanwhile-causes-a-turn
                return WakeUp((), self._clock())
        return WakeUp(tuple(waiting), wake_up.until_s)

    def wake_for_fences(self) -> None:
        """Take another turn if the last turn asked to be woken by fences."""
        if self._waits_for_fences and self.thread is not None:
            self.thread.wake()


class _JointDevice:
    """Rank 0's device, whose copies run on all ranks. See `joint_device`."""

    def __init__(self, device: Device, ranks: Ranks) -> None:
        self._device = device
        self._ranks = ranks
        self._item_bytes: dict[str, int] = {}

    def stream(self, name: str) -> JointStream:
        return JointStream(self._device.stream(name), self._ranks)

    def worker(self, name: str) -> JointStream:
        return JointStream(self._device.worker(name), self._ranks)

    def thread(self, name: str, turn: Callable[[], WakeUp]) -> HostThread:
        joint = _JointThread(turn, self._device.now)
        joint.thread = self._device.thread(name, joint.turn)
        self._ranks.add_thread(joint)
        return joint.thread

    def allocate_host(self, name: str, num_bytes: int, *, item_bytes: int = 1) -> Memory:
        self._item_bytes[name] = item_bytes
        return self._device.allocate_host(name, num_bytes, item_bytes=item_bytes)

    def ready_bytes(self, memory: Memory) -> int:
        """The number of bytes that every rank can use. See `Device.ready_bytes`."""
        return min(self._device.ready_bytes(memory), self._ranks.ready_bytes(self._item_bytes[memory.name]))

    def grows(self, memory: Memory) -> bool:
        others = self._ranks.grows  # Read before `ready_bytes`: if it is False, the bytes of the other ranks are final.
        return self._device.grows(memory) or others

    def wait_host(self, fence: Fence, *, reason: str, timeout_s: float | None = None, bell: Bell | None = None) -> bool:
        """Wait for rank 0's own part of a fence. See `Device.wait_host`."""
        return self._device.wait_host(local_fence(fence), reason=reason, timeout_s=timeout_s, bell=bell)

    def close(self) -> None:
        """End the other ranks after all their work, then rank 0's own device. See `Device.close`."""
        with contextlib.ExitStack() as ends:
            ends.callback(self._device.close)
            ends.callback(self._ranks.close)  # rule: other-ranks-end-before-the-device

    def __getattr__(self, name: str) -> Any:
        """All other attributes are those of rank 0's own device."""
        return getattr(self._device, name)


def joint_device(device: Device, ranks: Ranks) -> Device:
    """A device whose streams copy on every rank, for the offload worker; `device` is rank 0's own.

    The fences of its streams are done when all ranks have passed them. Of host memory, only as many
    bytes count as ready as are ready on every rank.
    """
    return cast(Device, _JointDevice(device, ranks))


def local_device(device: Device) -> Device:
    """Rank 0's own device of a joint device; any other device itself."""
    return device._device if isinstance(device, _JointDevice) else device


class _JointExecutor:
    """Launches each step on all ranks. See `joint_executor`."""

    def __init__(self, executor: Executor, ranks: Ranks) -> None:
        self._executor = executor
        self._ranks = ranks
        self._encoder = StepEncoder()

    def launch(self, batch: BatchPlan, *, after: tuple[Fence, ...], gates: LayerGates) -> LaunchedStep:
        """See `Executor.launch`. The other ranks receive the step first, so that no rank waits long in a collective."""
        message = self._encoder.encode(batch, after, gates)
        self._ranks.send(message)  # rule: step-is-sent-to-every-rank
        step = self._executor.launch(batch, after=tuple(map(local_fence, after)), gates=local_gates(gates))
        joint = JointFence(step.fence, (COMPUTE, message.number), self._ranks.progress)
        return dataclasses.replace(step, on_all_ranks=joint)  # rule: blocks-are-used-until-every-rank-has-passed

    def __getattr__(self, name: str) -> Any:
        """All other attributes are those of rank 0's own executor."""
        return getattr(self._executor, name)


def joint_executor(executor: Executor, ranks: Ranks) -> Executor:
    """An executor whose steps run on every rank; `executor` is rank 0's own, on its own device."""
    return cast(Executor, _JointExecutor(executor, ranks))


def local_executor(executor: Executor) -> Executor:
    """Rank 0's own executor of a joint executor; any other executor itself."""
    return executor._executor if isinstance(executor, _JointExecutor) else executor
