"""The simulated device, for tests: streams, events, graphs and memory as on CUDA, but a policy decides the order of
work.

Every order that the fences (positions on streams), events and streams allow happens with some seed. Only one actor (the
host, a stream or a thread) runs at a time. The work of a stream runs when the policy picks the stream. Other actors may
run after a copy has moved its bytes and before the copy's fence is done. Fresh memory is filled with poison, a fixed
byte, so that tests notice a read of unwritten memory. Time is virtual, so waits take no real time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from mmap import mmap

import torch

from sidestream_kv.device.base import CopyBatch, Memory, WakeUp
from sidestream_kv.device.channel import Bell
from sidestream_kv.errors import DeviceLost, InvariantError
from sidestream_kv.metrics import Timeline
from sidestream_kv.types import Accesses, Fence, Tracer
from sidestream_order.sim.allocator import SimAllocator
from sidestream_order.sim.policies import HOST, Policy
from sidestream_order.sim.stream import Guard, SimEvent, SimFence, SimStream
from sidestream_order.sim.thread import SimThread
from sidestream_order.sim.turns import Turns
from sidestream_order.sim.views import view_accesses

POISON = 0xA5


class SimDevice:
    """A device whose policy decides the order of work. One thread, "the host", makes, uses and closes the device.

    turns     the scheduler of actors, with the virtual time
    pin_s     virtual seconds until all items of the next host memories are ready, one after another. 0: all items are
              ready at once
    guard     verifies the accesses that work declares; None: no verification
    records   last record of each event
    sticky    whether work that raises an exception loses the device, as an illegal access of a kernel does on CUDA:
              all unfinished work fails without running, and submissions raise DeviceLost
    lost      the error of a lost device
    num_done  number of pieces of work that are done
    """

    kind = "sim"
    torch_device = torch.device("cpu")
    segment_bytes = 64 << 10

    def __init__(
        self,
        policy: Policy,
        *,
        tracer: Tracer | None = None,
        timeline: Timeline | None = None,
        guard: Guard | None = None,
    ) -> None:
        self.turns = Turns(policy)
        self.tracer = tracer
        self.guard = guard
        self.timeline = timeline
        self.closed = False
        self.pin_s = 0.0
        self.sticky = False
        self.lost: DeviceLost | None = None
        self.num_done = 0
        self._default: SimStream | None = None
        # Start time, duration and item size of each host memory that becomes ready item by item.
        self._pinned_from: dict[str, tuple[float, float, int]] = {}
        self.records: Mapping[SimEvent, SimFence | None] = {}
        self._streams: dict[str, SimStream] = {}
        self._threads: list[SimThread] = []
        self._memories: dict[str, Memory] = {}
        self._waits: Counter[str] = Counter()
        # Byte ranges to poison when their fences are done.
        self._dying: list[tuple[tuple[SimFence, ...], Memory, int, int]] = []

    def stream(self, name: str, *, blocking: bool = False, on_host: bool = False) -> SimStream:
        """A new stream. `blocking`: it is ordered with the default stream (see `default_stream`), like a stream of
        `cudaStreamCreate`; the streams of torch and of the engine are not. `on_host`: see `worker`.
        """
        if name in self._streams or name == HOST:
            raise InvariantError(f"stream {name} exists already")
        if self.closed:
            raise InvariantError(f"the device is closed: stream {name} cannot be made")
        stream = self._streams[name] = SimStream(self, name, blocking=blocking, on_host=on_host)
        return stream

    def default_stream(self) -> SimStream:
        """CUDA's legacy default stream. Its work waits for all earlier work of the blocking streams, and their later
        work waits for it. Other streams take no notice of it.
        """
        if self._default is None:
            self._default = self.stream("default")
        return self._default

    def implied_by(self, stream: SimStream) -> list[SimFence]:
        """The fences that new work of this stream waits for without a call of the program."""
        if self._default is None:
            return []
        if stream is self._default:
            others = [other for other in self._streams.values() if other.blocking]
        else:
            others = [self._default] if stream.blocking else []
        return [other.last for other in others if other.last is not None]

    def failed(self, error: Exception, label: str) -> None:
        """Work has raised an exception. See `sticky`. Misuse of this interface is no error of a kernel."""
        if self.sticky and self.lost is None and not isinstance(error, InvariantError):
            self.lost = DeviceLost(f"`{label}` has failed, and all later work fails with it: {error}")
            self.lost.__cause__ = error

    def worker(self, name: str) -> SimStream:
        """A new stream, whose work may sleep in virtual time. It stands for a host thread: its work goes on when the
        device is lost.
        """
        return self.stream(name, on_host=True)

    def thread(self, name: str, turn: Callable[[], WakeUp]) -> SimThread:
        thread = SimThread(self, name, turn)
        self._threads.append(thread)
        return thread

    def prepare(self, batch: CopyBatch) -> CopyBatch:
        """The batch unchanged."""
        return batch

    def allocate(self, name: str, num_bytes: int) -> Memory:
        """Device memory, filled with poison."""
        return self._add(Memory(name, (self._poisoned(name, num_bytes),)))

    def allocator(self, name: str, num_bytes: int) -> SimAllocator:
        """A caching allocator as torch has it, over new device memory."""
        return SimAllocator(self.allocate(name, num_bytes))

    def allocate_host(self, name: str, num_bytes: int, *, item_bytes: int = 1) -> Memory:
        """Host memory, filled with poison. With `pin_s`, only its first item is ready at once."""
        if self.pin_s and num_bytes > item_bytes:
            self._pinned_from[name] = self.now(), self.pin_s, item_bytes
        return self.allocate(name, num_bytes)

    def adopt_host(self, name: str, pages: mmap, *, item_bytes: int = 1) -> Memory:
        """The pages as they are."""
        return self._add(Memory(name, (torch.frombuffer(pages, dtype=torch.uint8),)))

    def mapped(self, memory: Memory) -> torch.Tensor:
        """The memory itself. See `Device.mapped`."""
        return memory.data

    def ready_bytes(self, memory: Memory) -> int:
        """All bytes; with `pin_s`, the items that are ready at the current virtual time."""
        if memory.name not in self._pinned_from:
            return memory.num_bytes
        start_s, pin_s, item_bytes = self._pinned_from[memory.name]
        items = int(memory.num_bytes // item_bytes * (self.now() - start_s) / pin_s)
        return min(max(1, items) * item_bytes, memory.num_bytes)

    def grows(self, memory: Memory) -> bool:
        """Whether some bytes are not ready yet."""
        return self.ready_bytes(memory) < memory.num_bytes

    def check_ready(self, batch: CopyBatch) -> None:
        """Raise InvariantError for a copy of host memory that is not ready. On a GPU, such a copy would block
        or fail.
        """
        for memory, starts in ((batch.source, batch.source_starts), (batch.target, batch.target_starts)):
            if memory.name in self._pinned_from and len(starts) and int(starts.max()) >= self.ready_bytes(memory):
                raise InvariantError(
                    f"a copy of {memory.name} begins at byte {int(starts.max())}, but only the first "
                    f"{self.ready_bytes(memory)} bytes are pinned: copy only ready bytes"
                )

    def allocate_pageable(self, name: str, num_bytes: int) -> Memory:
        """Pageable host memory. A copy from or to it stalls the host; tests treat this as an error."""
        return self._add(Memory(name, (self._poisoned(name, num_bytes),), pageable=True))

    def wait_host(self, fence: Fence, *, reason: str, timeout_s: float | None = None, bell: Bell | None = None) -> bool:
        """See `Device.wait_host`. Raises Deadlock if the fence can never be done."""
        if not isinstance(fence, SimFence) or fence.device is not self:
            raise InvariantError(f"cannot wait for {fence!r}: it is not of this device")
        if self.turns.watch is not None and (fence.done or timeout_s is not None or bell is not None):
            self.turns.watch.polled(fence.stream, fence.tick, done=fence.done)
        if not fence.done:
            self.stall(reason)
            wake_s = None if timeout_s is None else self.turns.now_s + timeout_s
            self.turns.block(
                lambda: fence.done or (bell is not None and bell.rung), lambda: fence.stream, wake_s=wake_s
            )
            if bell is not None and not fence.done:
                bell.wait(0)  # clear the bell, if it was rung
            if self.turns.watch is not None and (timeout_s is not None or bell is not None):
                self.turns.watch.polled(fence.stream, fence.tick, done=fence.done)
        if fence.done and self.tracer is not None:
            self.tracer.observed(fence)
        return fence.done

    def host_waits(self) -> dict[str, int]:
        return dict(self._waits)

    def stall(self, reason: str) -> None:
        """Count a stall of the host."""
        self._waits[reason] += 1
        if self.tracer is not None:
            self.tracer.stalled(reason)

    def now(self) -> float:
        """Virtual seconds."""
        return self.turns.now_s

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass. Work calls it to simulate a slow operation."""
        self.turns.sleep(seconds)

    def trim_memory(self) -> None:
        """Does nothing: this device has no free memory to return."""

    def event(self, name: str) -> SimEvent:
        return SimEvent(self, name)

    def accesses(self, *, reads: Sequence[torch.Tensor] = (), writes: Sequence[torch.Tensor] = ()) -> Accesses:
        """The accesses of work that reads and writes these tensors: views of this device's memories, of any dtype and
        strides.

        Raises InvariantError for a tensor that is not such a view.
        """
        found = view_accesses(self._memories.values(), reads=reads, writes=writes)
        return lambda: found

    def host_touched(
        self, *, reads: Sequence[torch.Tensor] = (), writes: Sequence[torch.Tensor] = (), label: str = ""
    ) -> None:
        """Declare that the calling host thread itself reads and writes these tensors now. See `Tracer.host_touched`."""
        if self.tracer is not None:
            self.tracer.host_touched(self.accesses(reads=reads, writes=writes), label)

    def poison(self, memory: str, start: int, stop: int, after: Sequence[Fence]) -> None:
        """Overwrite bytes that are no longer used, when the fences `after` of their last uses are done. Does nothing if
        the device has no memory of this name, because the name is then that of a tier.
        """
        if memory not in self._memories:
            return
        pending = tuple(fence for fence in after if isinstance(fence, SimFence) and not fence.done)
        if pending:
            self._dying.append((pending, self._memories[memory], start, stop))
        else:
            self._poison(self._memories[memory], start, stop)

    def passed(self) -> None:
        """Called when a fence is done, before any other actor runs: poison the bytes that have waited for the fence."""
        self.num_done += 1
        if not self._dying:
            return
        left = []
        for pending, memory, start, stop in self._dying:
            if all(fence.done for fence in pending):
                self._poison(memory, start, stop)
            else:
                left.append((pending, memory, start, stop))
        self._dying = left

    def close(self) -> None:
        """See `Device.close`. Raises Deadlock when some work can never run."""
        if not self.closed:
            for thread in self._threads:
                thread.close()
            self.turns.block(lambda: all(stream.idle for stream in self._streams.values()), self._unfinished)
        self.kill()

    def kill(self) -> None:
        """End at once, without running pending work. Idempotent."""
        self.closed = True
        self.turns.end()

    def _unfinished(self) -> str | None:
        return next((stream.name for stream in self._streams.values() if not stream.idle), None)

    def _poisoned(self, name: str, num_bytes: int) -> torch.Tensor:
        if name in self._memories:
            raise InvariantError(f"memory {name} exists already")
        if self.guard is None:
            return torch.full((num_bytes,), POISON, dtype=torch.uint8)
        return torch.from_numpy(self.guard.allocate(name, num_bytes))

    def _poison(self, memory: Memory, start: int, stop: int) -> None:
        if self.turns.watch is not None:
            self.turns.watch.poisoned(memory.name, start, stop)
        if self.guard is None:
            memory.data.numpy()[start:stop] = POISON
        else:
            self.guard.poison(memory.name, start, stop)

    def _add(self, memory: Memory) -> Memory:
        self._memories[memory.name] = memory
        if self.tracer is not None:
            self.tracer.allocated(memory.name, memory.num_bytes)
        return memory
