"""The GPU as a device: owned streams, pooled events, pinned host memory. One per engine; used from the engine's thread
and from the mover's.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch

from sidestream.device.base import CopyBatch, Memory, Rest
from sidestream.device.channel import Bell
from sidestream.device.cpu import _available_bytes
from sidestream.device.cuda.copies import Grid, Place, locate, plan
from sidestream.device.cuda.driver import Driver, Event, Table, load_library, named
from sidestream.device.cuda.forecast import Forecast
from sidestream.device.cuda.graphs import CudaEvent
from sidestream.device.cuda.history import History
from sidestream.device.cuda.pinned import Slab
from sidestream.device.cuda.stream import CudaFence, CudaStream
from sidestream.device.host import HostFence, HostStream, TurnTaker
from sidestream.errors import ConfigError, DeviceError, DeviceLost, InvariantError
from sidestream.metrics import Metrics, Timeline
from sidestream.types import Fence, Tracer

log = logging.getLogger(__name__)

# Nobody announces a fence of a GPU: a thread that rests for some looks this often. Not by blocking in the driver: while
# one thread spins there, another one's wait ends up to milliseconds late.
_POLL_S = 50e-6
# A wait of the host asks again and again for so long from when the end may be there, which is how much later it often
# is.
_SPIN_S = 1e-3
# So long before that it begins: sleep ends late, and the interpreter lock must be had by then.
_AHEAD_S = 1e-3
# It looks so often all the same: what waited for a load may take far less time when it need not.
_NAP_S = 500e-6
# Segments that a kernel's copy takes in one launch, and how many launches may be on their way before the copy engine
# takes over.
_TABLE_SEGMENTS = 4096
_TABLES = 16


class CudaDevice:
    """One GPU.

    lost   what ended it; None while it works. Then every fence that is not done raises DeviceLost, and so does every
           submission
    """

    kind = "cuda"
    # What a load's last piece is cut into: a step that waits for it ends so many layers behind it, and copies of less
    # are slower than the link.
    segment_bytes = 9 << 16

    def __init__(
        self,
        *,
        index: int = 0,
        timeline: Timeline | None = None,
        metrics: Metrics | None = None,
        tracer: Tracer | None = None,
        driver: Driver | None = None,
    ) -> None:
        """Raises ConfigError when there is no GPU that can be used. `driver`: instead of the machine's own."""
        self.tracer = tracer
        self.history = None if tracer is None else History(tracer)
        self.timeline = timeline
        self.lost: str | None = None
        self.driver = driver or open_driver(index)
        self.torch_device = self.driver.torch_device
        self._metrics = metrics
        self._names: set[str] = set()
        self._streams: list[CudaStream] = []
        self._workers: list[HostStream] = []
        self._threads: list[TurnTaker] = []
        self._events: list[Event] = []
        self._places: dict[Memory, Place] = {}
        self._slabs: dict[Memory, Slab] = {}
        self._waits: Counter[str] = Counter()
        self._forecasts: dict[str, Forecast] = {}  # by stream; of the thread that waits for its work
        self._rung: tuple[CudaFence, tuple[str, float]] | None = (
            None  # what that thread waited for when a bell was rung
        )
        self._lock = threading.Lock()
        self._closed = False
        tables = self.allocate_host("segments of copies by kernels", _TABLES * _TABLE_SEGMENTS * 3 * 8)
        self._tables: list[Table] = list(tables.data.view(torch.int64).numpy().reshape(_TABLES, -1))

    # ------------------------------------------------------------------ streams and threads

    def stream(self, name: str) -> CudaStream:
        """A new stream. Kernels of `"compute"` go before those of all others."""
        self._claim(name)
        self._check_alive()
        high = name == "compute"
        handle = self.driver.make_stream(high=high)

        def give_back(stream: CudaStream) -> None:
            if self.lost is None:
                self.driver.keep_stream(stream.handle, high=high)
                if stream.side_handle is not None:
                    self.driver.keep_stream(stream.side_handle, high=False)

        stream = CudaStream(name, handle, self, give_back)
        self._streams.append(stream)
        return stream

    def worker(self, name: str) -> HostStream:
        """A thread for work of the host. See `Device.worker`."""
        self._claim(name)
        worker = HostStream(name, threads=1, timeline=self.timeline, tracer=self.tracer, on_pass=self._passed)
        self._workers.append(worker)
        return worker

    def thread(self, name: str, turn: Callable[[], Rest]) -> TurnTaker:
        """A thread that takes turns. While it rests for fences it looks at them every 50 us. See `Device.thread`."""
        prepare = self.driver.prepare_thread
        thread = TurnTaker(name, turn, clock=self.now, poll_s=_POLL_S, prepare=prepare, tracer=self.tracer)
        self._threads.append(thread)
        return thread

    def event(self, name: str) -> CudaEvent:
        """A new event for graphs, never recorded."""
        return CudaEvent(name, self.driver.event(external=True))

    # ------------------------------------------------------------------ memory

    def prepare(self, batch: CopyBatch) -> CopyBatch:
        """With all its addresses, if it goes by the copy engine. See `Device.prepare`."""
        if batch.source.pageable or batch.target.pageable or not len(batch.source_starts):
            return batch
        source, target = self.place(batch.source), self.place(batch.target)
        calls = plan(batch, source, target, max_pitch=self.driver.max_pitch, merged=False)
        if isinstance(calls, Grid):
            return replace(batch, prepared=calls)
        if calls.by_kernel:
            return batch
        pieces = calls.table.shape[1] // len(batch.source_starts)
        rows = self.driver.rows(calls.table, from_device=source.on_device, to_device=target.on_device, pieces=pieces)
        return replace(batch, prepared=rows)

    def allocate(self, name: str, num_bytes: int) -> Memory:
        """Device memory, not set to anything. Raises ConfigError when it does not fit, OutOfDeviceMemory when the
        driver thinks so later.
        """
        self._check_alive()
        free, total = self.free_memory()
        if num_bytes > free:
            raise ConfigError(
                f"{name} memory of {num_bytes / 2**30:.2f} GiB does not fit: {free / 2**30:.2f} of the GPU's {total / 2**30:.2f} GiB are free; "
                "ask for less, or end what else uses the GPU"
            )
        return Memory(name, (self.driver.allocate(num_bytes),))

    def allocate_host(self, name: str, num_bytes: int, *, item_bytes: int = 1) -> Memory:
        """Zeroed host memory, its first 256 MiB pinned, the rest to come. See `Device.allocate_host`.

        Raises ConfigError when the machine has not so much left, or lets none of it be pinned.
        """
        available = _available_bytes()
        if available is not None:
            available -= sum(
                slab.memory.num_bytes - slab.mapped_bytes for slab in self._slabs.values()
            )  # given out, and not taken yet
        if available is not None and num_bytes > available:
            raise ConfigError(
                f"{name} memory of {num_bytes / 2**30:.2f} GiB does not fit: this machine has {available / 2**30:.2f} GiB available; ask for less"
            )
        slab = Slab(name, num_bytes, item_bytes=item_bytes, pins=self.driver, prepare=self.driver.prepare_thread)
        self._slabs[slab.memory] = slab
        return slab.memory

    def mapped(self, memory: Memory) -> torch.Tensor:
        """Host memory, as a tensor on the GPU. See `Device.mapped`."""
        return self.driver.mapped(memory.data[: self.ready_bytes(memory)])

    def ready_bytes(self, memory: Memory) -> int:
        """How much of it is pinned. Device memory, and what others made, is ready."""
        slab = self._slabs.get(memory)
        return memory.num_bytes if slab is None else slab.ready_bytes

    def grows(self, memory: Memory) -> bool:
        """Whether more of it will be pinned."""
        slab = self._slabs.get(memory)
        return slab is not None and slab.growing

    def free_memory(self) -> tuple[int, int]:
        """Bytes of device memory that are free, and all there are."""
        return self.driver.free_memory()

    # ------------------------------------------------------------------ waits

    def wait_host(self, fence: Fence, *, reason: str, timeout_s: float | None = None, bell: Bell | None = None) -> bool:
        """Block this thread until `fence` is done; counted under `reason` unless it was done already. Raises
        DeviceLost.

        A bell is heard while the thread would sleep: until shortly before work of that label can have ended. A short
        step, and a `timeout_s`, have no such time.
        """
        rung, self._rung = self._rung, None
        if fence.poll():
            if rung is not None and rung[0] is fence:  # it ended while what rang was seen to
                self._forecasts[fence.stream].ended(*rung[1], time.perf_counter())
            return True
        if not isinstance(fence, CudaFence | HostFence):
            raise InvariantError(f"cannot wait for {fence!r}: it is not of this device")
        self._waits[reason] += 1
        if self._metrics is not None:
            self._metrics.inc("host_waits_total", 1, reason)
        if self.tracer is not None:
            self.tracer.stalled(reason)
        if isinstance(fence, CudaFence) and timeout_s is None and (launched := fence.owner.launched(fence)) is not None:
            forecast = self._forecasts.setdefault(fence.stream, Forecast())
            if not self._wait_for(fence, forecast.soonest_end_s(*launched), bell):
                self._rung = fence, launched
                return False
            forecast.ended(*launched, time.perf_counter())
        else:
            fence.block(timeout_s)
        return fence.poll()

    def _wait_for(self, fence: CudaFence, soonest_s: float | None, bell: Bell | None) -> bool:
        """Sleep until shortly before it may end, then ask again and again, then block; False when somebody rang while
        it slept.

        Who asks has the interpreter lock. Who blocks gets it back when those who took it meanwhile let it go: up to
        some 0.2 ms too late.
        """
        now_s = time.perf_counter()
        due_s = now_s if soonest_s is None else max(now_s, soonest_s)
        while not fence.poll():
            if now_s > due_s + _SPIN_S:
                fence.block(None)
                return True
            left_s = min(due_s - _AHEAD_S - now_s, _NAP_S)  # it may be wrong
            if left_s > 0:
                if bell is None:
                    time.sleep(left_s)
                elif bell.wait(left_s):
                    return False
            now_s = time.perf_counter()
        return True

    def host_waits(self) -> dict[str, int]:
        """How often a thread waited for a fence that was not done yet, by reason."""
        return dict(self._waits)

    def now(self) -> float:
        """Seconds of the system's monotonic clock."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Hold this thread up."""
        time.sleep(seconds)

    # ------------------------------------------------------------------ life

    def warm_up(self) -> None:
        """Launch each kernel of the device once, in each of its variants: a first launch stalls while anything runs
        (P3). Blocks.
        """
        from sidestream.device.cuda import kernels

        stream = self.stream("warm-up")
        target, source = self.allocate_host("warm-up", 64), self.driver.allocate(64)
        there, here = target.data.data_ptr(), source.data_ptr()

        def launch() -> None:
            for size, wide in ((8, True), (1, False)):
                kernels.deliver(there, here, size)
                table = self.take_table()
                assert table is not None, "nothing else uses tables while the device warms up"
                table[:3] = there, here, size
                kernels.copy_segments(table.ctypes.data, 1, wide=wide)
                given.append(table)

        given: list[Table] = []
        fence = stream.submit(launch, label="warm up")
        fence.block(None)
        for table in given:
            self.give_table(table)
        stream.close()
        self._slabs.pop(target).close()
        if fence.failure is not None:
            raise fence.failure

    def rest(self) -> None:
        """Nothing: what torch keeps for the next step is not the system's to use, and giving it back would hold up the
        device.
        """

    def close(self) -> None:
        """Run what was submitted, then end streams and threads and let go of pinned memory. Idempotent. Of a lost
        device only what still can.
        """
        if self._closed:
            return
        self._closed = True
        for thread in self._threads:
            thread.close()
        for worker in self._workers:
            worker.close()
        with contextlib.suppress(DeviceLost):
            for stream in self._streams:
                stream.drain()
        for stream in self._streams:
            stream.close()
        for slab in self._slabs.values():
            slab.close()

    # ------------------------------------------------------------------ what streams need

    def take_event(self) -> Event:
        """An event that nobody uses."""
        try:
            return self._events.pop()
        except IndexError:
            return self.driver.event()

    def give_event(self, event: Event) -> None:
        """It was passed, and nobody uses it any more."""
        self._events.append(event)

    def take_table(self) -> Table | None:
        """Mapped memory for the segments of a kernel's copy; None when all is in use."""
        try:
            return self._tables.pop()
        except IndexError:
            return None

    def give_table(self, table: Table) -> None:
        """The kernel has read it."""
        self._tables.append(table)

    def place(self, memory: Memory) -> Place:
        """Where the memory is; remembered, and the memory with it."""
        place = self._places.get(memory)
        if place is None:
            slab = self._slabs.get(memory)
            place = self._places[memory] = locate(memory, () if slab is None else slab.borders[:-1])
        return place

    def lose(self, error: BaseException) -> None:
        """Nothing on the device can be believed any more. The first error says why."""
        with self._lock:
            if self.lost is not None:
                return
            why = named(error)
            self.lost = str(why) if isinstance(why, DeviceLost) else f"the GPU is lost: {why}; restart the process"
        log.error("%s", self.lost)

    def _claim(self, name: str) -> None:
        """Names are never used again: a tracer tells streams apart by them."""
        with self._lock:
            if self._closed:
                raise InvariantError(f"the device is closed: stream {name} cannot be made")
            if name in self._names:
                raise InvariantError(f"stream {name} exists already")
            self._names.add(name)

    def _check_alive(self) -> None:
        if self.lost is not None:
            raise DeviceLost(self.lost)

    def _passed(self) -> None:
        for thread in self._threads:
            thread.wake_for_fences()


def open_driver(index: int = 0) -> Driver:
    """The machine's driver. Raises ConfigError with what is missing."""
    library = load_library()
    if torch.version.cuda is None:
        raise ConfigError(
            f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch, or use the cpu device"
        )
    try:
        if not torch.cuda.is_available():
            raise ConfigError(
                f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU it can use: look at nvidia-smi and the driver's version"
            )
        torch.cuda.init()  # type: ignore[no-untyped-call]
        return Driver(library, index=index)
    except (RuntimeError, DeviceError) as error:
        raise ConfigError(f"the GPU cannot be used: {error}; look at nvidia-smi and the driver's version") from error
