"""A fake GPU made of lists, in place of `Driver`: streams keep their work until the test runs it."""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sidestream.errors import DeviceError
from sidestream_kv.device.cuda.driver import PreparedTable, named

PATIENCE_S = 10.0


class Mark:
    """What one record of an event put into a stream."""

    passed = False


@dataclass(frozen=True)
class Wait:
    mark: Mark


class GpuStream:
    """What torch calls a stream."""

    def __init__(self, gpu: FakeGpu, handle: int) -> None:
        self.gpu, self.handle = gpu, handle


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self.mark: Mark | None = None
        self.queries = 0
        self.blocked = threading.Event()
        self.let_go = threading.Event()

    def record(self, stream: GpuStream) -> None:
        self._gpu.check()
        self.mark = Mark()
        self._gpu.queues[stream.handle].append(self.mark)

    def wait(self, stream: GpuStream) -> None:
        self._gpu.check()
        assert self.mark is not None
        self._gpu.queues[stream.handle].append(Wait(self.mark))

    def query(self) -> bool:
        self._gpu.check()
        self.queries += 1
        return self.mark is None or self.mark.passed

    def synchronize(self) -> None:
        self._gpu.check()
        if self._gpu.hold_waiters:
            self.blocked.set()
            assert self.let_go.wait(PATIENCE_S)
        else:
            self._gpu.run()
        self._gpu.check()


class FakeGpu:
    """`broken` is raised by every call once it is set; after `pins` chunks no more can be pinned. `cached_bytes` of the
    memory are free only for those who say that they want more than the rest.
    """

    def __init__(
        self,
        *,
        has_batch: bool = True,
        max_pitch: int = 2**31 - 1,
        memory_bytes: int = 1 << 40,
        pins: int | None = None,
    ) -> None:
        self.torch_device = torch.device("cpu")
        self.has_batch, self.max_pitch, self.memory_bytes = has_batch, max_pitch, memory_bytes
        self.cached_bytes = 0
        self.queues: dict[int, deque[Callable[[], None] | Mark | Wait]] = {}
        self.events: list[FakeEvent] = []
        self.made: list[tuple[int, bool]] = []
        self.kept: list[tuple[int, bool]] = []
        self.pinned: dict[int, int] = {}
        self.pins_left = pins
        self.broken: BaseException | None = None
        self.hold_waiters = False
        self.calls: list[str] = []

    # what a driver has

    def check(self) -> None:
        """What torch's calls do."""
        if self.broken is not None:
            raise self.broken

    def check_named(self) -> None:
        """What the driver's calls do."""
        if self.broken is not None:
            raise named(self.broken)

    def bind(self) -> None: ...

    def prepare_thread(self) -> None: ...

    def make_stream(self, *, high: bool) -> int:
        self.check_named()
        if spare := next((kept for kept in self.kept if kept[1] == high), None):
            self.kept.remove(spare)
            return spare[0]
        handle = 100 + len(self.queues)
        self.queues[handle] = deque()
        self.made.append((handle, high))
        return handle

    def keep_stream(self, handle: int, *, high: bool) -> None:
        self.check_named()
        self.kept.append((handle, high))

    def external(self, handle: int) -> GpuStream:
        return GpuStream(self, handle)

    def current(self, external: GpuStream) -> Any:
        return contextlib.nullcontext()

    def event(self, *, external: bool = False) -> FakeEvent:
        event = FakeEvent(self)
        self.events.append(event)
        return event

    def free_memory(self, wanted: int) -> tuple[int, int]:
        self.check()
        if self.memory_bytes - self.cached_bytes < wanted:
            self.cached_bytes = 0
        return self.memory_bytes - self.cached_bytes, self.memory_bytes

    def allocate(self, num_bytes: int) -> torch.Tensor:
        self.check_named()
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def register(self, address: int, num_bytes: int) -> None:
        self.check_named()
        if self.pins_left is not None:
            if not self.pins_left:
                raise DeviceError("cuMemHostRegister_v2 failed: CUDA_ERROR_OUT_OF_MEMORY (2), out of memory")
            self.pins_left -= 1
        self.pinned[address] = num_bytes

    def unregister(self, address: int) -> None:
        self.check_named()
        del self.pinned[address]

    def copy_batch(self, table: Any, stream: int, *, from_device: bool, to_device: bool) -> None:
        self.calls.append(f"batch of {table.shape[1]}")
        self._move(table, stream)

    def prepare(self, table: Any, *, from_device: bool, to_device: bool, pieces: int = 1) -> PreparedTable:
        return PreparedTable(table, 0, 0, 0, pieces)

    def copy_prepared(self, prepared: PreparedTable, first: int, count: int, stream: int) -> None:
        part = prepared.table[:, first * prepared.pieces : (first + count) * prepared.pieces]
        if not self.has_batch:
            self.copy_each(part, stream)
            return
        self.calls.append(f"batch of {part.shape[1]}")
        self._move(part, stream)

    def copy_each(self, table: Any, stream: int) -> None:
        self.calls.append(f"{table.shape[1]} one by one")
        self._move(table, stream)

    def copy_grid(
        self,
        targets: list[int],
        sources: list[int],
        stream: int,
        *,
        from_device: bool,
        to_device: bool,
        target_pitch: int,
        source_pitch: int,
        width: int,
        height: int,
    ) -> None:
        self.calls.append(f"{len(targets)} grids of {height} x {width}")
        for target, source in zip(targets, sources, strict=True):
            for row in range(height):
                self._move(np.array([[target + row * target_pitch], [source + row * source_pitch], [width]]), stream)

    def _move(self, table: Any, stream: int) -> None:
        self.check_named()
        for target, source, size in np.array(table).T.tolist():
            self.queues[stream].append(lambda t=target, s=source, n=size: ctypes.memmove(t, s, n) and None)

    # what drives it

    def launch(self, stream: Any, work: Callable[[], None]) -> None:
        """Queue work on one of our streams, like a kernel."""
        self.queues[stream.handle].append(work)

    def step(self, handle: int) -> bool:
        """Do the next thing on a stream; False when it may not."""
        queue = self.queues[handle]
        if not queue:
            return False
        head = queue[0]
        if isinstance(head, Wait):
            if not head.mark.passed:
                return False
        elif isinstance(head, Mark):
            head.passed = True
        else:
            head()
        queue.popleft()
        return True

    def run(self, stream: Any = None, *, rng: random.Random | None = None) -> None:
        """Go on until nothing may, on all streams or on one."""
        handles = list(self.queues) if stream is None else [stream.handle]
        while handles:
            if rng is not None:
                rng.shuffle(handles)
            progress = [self.step(handle) for handle in handles]
            if not any(progress):
                return
