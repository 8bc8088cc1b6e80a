"""One NVIDIA GPU as a device: its streams, fences (positions on streams), device memory and pinned host memory. Called
by the engine thread and by the offload worker's thread.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from mmap import mmap

import torch

from sidestream_kv.device.base import CopyBatch, Memory, WakeUp
from sidestream_kv.device.channel import Bell
from sidestream_kv.device.cuda import copies
from sidestream_kv.device.cuda.copies import Grid, MemoryAddresses, plan
from sidestream_kv.device.cuda.driver import Driver, Event, Table, load_library, named
from sidestream_kv.device.cuda.fences import CudaFence
from sidestream_kv.device.cuda.graphs import CudaEvent
from sidestream_kv.device.cuda.history import History
from sidestream_kv.device.cuda.pinned import Slab
from sidestream_kv.device.cuda.stream import CudaStream
from sidestream_kv.device.cuda.wait import FenceWaiter
from sidestream_kv.device.host import HostFence, HostSide, HostStream, TurnTaker
from sidestream_kv.device.machine import check_fits
from sidestream_kv.errors import ConfigError, DeviceError, DeviceLost, InvariantError
from sidestream_kv.metrics import Metrics, Timeline
from sidestream_kv.types import Fence, Tracer, Vectors

log = logging.getLogger(__name__)

# Interval at which a sleeping host thread polls GPU fences. The thread does not block in the driver, because the
# driver would spin, and the wait of another thread could then end milliseconds late.
_POLL_S = 50e-6
# Maximum number of segments (byte ranges) that one kernel copies, and maximum number of unfinished copies by kernels.
# If there are more, the copy engine copies them.
_TABLE_SEGMENTS = 4096
_TABLES = 64


class CudaDevice(HostSide):
    """One GPU.

    lost   message of the error that ended the device; None while the device works. On a lost device, submitting work
           and polling an unfinished fence raise DeviceLost
    """

    kind = "cuda"
    # In batches of 512, copies of 64 to 512 KiB are equally fast, but twice as many take the host twice as long.
    segment_bytes = 128 << 10

    def __init__(
        self,
        *,
        index: int = 0,
        timeline: Timeline | None = None,
        metrics: Metrics | None = None,
        tracer: Tracer | None = None,
        driver: Driver | None = None,
    ) -> None:
        """Raises ConfigError without a usable GPU. In tests, `driver` replaces the machine's own driver."""
        super().__init__(metrics=metrics, tracer=tracer)
        self.history = None if tracer is None else History(tracer)
        self.timeline = timeline
        self.lost: str | None = None
        self.driver = driver or open_driver(index)
        self.torch_device = self.driver.torch_device
        self._names: set[str] = set()
        self._streams: list[CudaStream] = []
        self._adopted: dict[int, CudaStream] = {}  # streams of other libraries, by handle
        self._workers: list[HostStream] = []
        self._events: list[Event] = []
        self._addresses: dict[Memory, MemoryAddresses] = {}
        self._slabs: dict[Memory, Slab] = {}
        self._on_device: list[torch.Tensor] = []
        self._stages: list[torch.Tensor] = []
        self._has_stages = False
        self._waiter = FenceWaiter()
        self._lock = threading.Lock()
        self._closed = False
        tables = self.allocate_host("segments of copies by kernels", _TABLES * _TABLE_SEGMENTS * 3 * 8)
        self._tables: list[Table] = list(tables.data.view(torch.int64).numpy().reshape(_TABLES, -1))

    # ------------------------------------------------------------------ streams and threads

    def stream(self, name: str) -> CudaStream:
        """A new stream. Kernels of the stream `"compute"` have a higher priority than kernels of other streams."""
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

    def current_stream(self) -> CudaStream:
        """The calling thread's current stream of torch, on which any library may launch work: a fence of a submission
        is done when all of this work is done. It stays open when the device is closed.
        """
        handle = torch.cuda.current_stream(self.torch_device).cuda_stream
        stream = self._adopted.get(handle)
        if stream is None:
            self._claim(name := f"torch-{len(self._adopted)}")
            stream = self._adopted[handle] = CudaStream(name, handle, self, lambda _: None)
            self._streams.append(stream)
        return stream

    def worker(self, name: str) -> HostStream:
        self._claim(name)
        worker = HostStream(name, threads=1, timeline=self.timeline, tracer=self.tracer, on_pass=self._passed)
        self._workers.append(worker)
        return worker

    def thread(self, name: str, turn: Callable[[], WakeUp]) -> TurnTaker:
        """See `Device.thread`. While the thread sleeps until a fence is done, it polls the fences every 50 us."""
        prepare = self.driver.prepare_thread
        thread = TurnTaker(name, turn, clock=self.now, poll_s=_POLL_S, prepare=prepare, tracer=self.tracer)
        self._threads.append(thread)
        return thread

    def event(self, name: str) -> CudaEvent:
        return CudaEvent(name, self.driver.event(external=True))

    # ------------------------------------------------------------------ memory

    def prepare(self, batch: CopyBatch) -> CopyBatch:
        """See `Device.prepare`. Resolves all addresses of a batch for the copy engine."""
        if batch.converts or batch.source.pageable or batch.target.pageable or not len(batch.source_starts):
            return batch
        source, target = self.addresses_of(batch.source), self.addresses_of(batch.target)
        calls = plan(batch, source, target, max_pitch=self.driver.max_pitch, merged=False)
        staged = copies.staged(batch, source, target) if self._has_stages else None
        if isinstance(calls, Grid) or staged is not None:
            return replace(batch, prepared=staged or calls)
        if calls.by_kernel:
            return batch
        pieces = calls.table.shape[1] // len(batch.source_starts)
        rows = self.driver.prepare(calls.table, from_device=source.on_device, to_device=target.on_device, pieces=pieces)
        return replace(batch, prepared=rows)

    def allocate(self, name: str, num_bytes: int) -> Memory:
        """Uninitialised memory. Raises ConfigError if too few bytes are free, OutOfDeviceMemory if the driver fails."""
        self._check_alive()
        free, total = self.driver.free_memory(num_bytes)
        if num_bytes > free:
            raise ConfigError(
                f"{name} memory of {num_bytes / 2**30:.2f} GiB does not fit: "
                f"{free / 2**30:.2f} of the GPU's {total / 2**30:.2f} GiB are free; "
                "ask for less, or end other programs that use the GPU"
            )
        data = self.driver.allocate(num_bytes)
        self._on_device.append(data)
        memory = Memory(name, (data,))
        if self.tracer is not None:
            self.tracer.allocated(name, num_bytes)
        return memory

    def allocate_host(self, name: str, num_bytes: int, *, item_bytes: int = 1) -> Memory:
        """See `Device.allocate_host`. The memory is zeroed. Its first 256 MiB are pinned at once, and more in the
        background.

        Raises ConfigError if the machine has too little memory, or if its first part cannot be pinned.
        """
        promised = sum(slab.memory.num_bytes - slab.mapped_bytes for slab in self._slabs.values())
        check_fits(name, num_bytes, promised=promised)
        return self._keep(name, num_bytes, item_bytes)

    def adopt_host(self, name: str, pages: mmap, *, item_bytes: int = 1) -> Memory:
        """See `Device.adopt_host`: the pages are pinned here, as those of `allocate_host` are, and copied directly."""
        return self._keep(name, len(pages), item_bytes, pages)

    def _keep(self, name: str, num_bytes: int, item_bytes: int, pages: mmap | None = None) -> Memory:
        prepare = self.driver.prepare_thread
        slab = Slab(name, num_bytes, item_bytes=item_bytes, pins=self.driver, prepare=prepare, shared=pages)
        self._slabs[slab.memory] = slab
        if self.tracer is not None:
            self.tracer.allocated(name, num_bytes)
        return slab.memory

    def mapped(self, memory: Memory) -> torch.Tensor:
        return self.driver.mapped(memory.data[: self.ready_bytes(memory)])

    def ready_bytes(self, memory: Memory) -> int:
        """Number of pinned bytes. All bytes of device memory, and of memory that was not allocated here, are ready."""
        slab = self._slabs.get(memory)
        return memory.num_bytes if slab is None else slab.ready_bytes

    def grows(self, memory: Memory) -> bool:
        """Whether more bytes will be pinned."""
        slab = self._slabs.get(memory)
        return slab is not None and slab.growing

    # ------------------------------------------------------------------ waits

    def wait_host(self, fence: Fence, *, reason: str, timeout_s: float | None = None, bell: Bell | None = None) -> bool:
        """See `Device.wait_host`. Raises DeviceLost.

        `bell` ends the wait only while the thread sleeps. It has no effect when the work should end soon (see
        `cuda/wait.py`), nor if `timeout_s` is given.
        """
        if self._waiter.is_done(fence):
            return True
        if not isinstance(fence, CudaFence | HostFence):
            raise InvariantError(f"cannot wait for {fence!r}: it is not of this device")
        self._count_wait(reason)
        if isinstance(fence, CudaFence) and timeout_s is None:
            return self._waiter.wait(fence, bell)
        fence.block(timeout_s)
        return fence.poll()

    # ------------------------------------------------------------------ start and end

    def warm_up(self, *, converts: Vectors | None = None) -> None:
        """Launch each variant of the device's kernels once. Otherwise their first launch during serving would wait for
        all running work. Blocks. `converts`: vectors that copies will pack and unpack; None: they will not.
        """
        from sidestream_kv.device.cuda.kernels import convert_segments, copy_segments, deliver

        stream = self.stream("warm-up")
        target, source = self.allocate_host("warm-up", 64), self.driver.allocate(64)
        there, here = target.data.data_ptr(), source.data_ptr()

        def launch() -> None:
            for size, aligned in ((8, True), (1, False)):
                deliver(there, here, size)
                table = self._tables.pop()  # nothing else uses tables while the device warms up
                table[:3] = there, here, size
                copy_segments(table.ctypes.data, 1, aligned=aligned)
                used.append(table)
            if converts is not None:
                for way in product((False, True), repeat=2):
                    convert_segments(there, here, 0, 0, converts, unpacks=way[0], table=way[1])

        used: list[Table] = []
        fence = stream.submit(launch, label="warm up")
        fence.block(None)
        self._tables += used
        stream.close()
        self._slabs.pop(target).close()
        if fence.failure is not None:
            raise fence.failure

    def trim_memory(self) -> None:
        """Does nothing: torch's cached memory is device memory, and freeing it would stall the device."""

    def close(self) -> None:
        """See `Device.close`. Frees all memory, whoever refers to it. On a lost device, closes what can still close."""
        if self._closed:
            return
        self._closed = True
        for thread in self._threads:
            thread.close()
        for worker in self._workers:
            worker.close()
        with contextlib.suppress(DeviceLost):
            for stream in self._streams:
                stream.fences.drain()
        for stream in self._streams:
            stream.close()
        for slab in self._slabs.values():
            slab.close()
        for data in self._on_device:
            if data.is_cuda:
                data.untyped_storage().resize_(0)

    # ------------------------------------------------------------------ used by streams

    def take_event(self) -> Event:
        """An unused event from the pool, or a new event."""
        try:
            return self._events.pop()
        except IndexError:
            return self.driver.event()

    def give_event(self, event: Event) -> None:
        """Return an event to the pool."""
        self._events.append(event)

    def make_stages(self, *, count: int, num_bytes: int) -> None:
        """Let `count` streams copy through buffers of `num_bytes` on the device what is scattered over many
        allocations there (see `copies.Staged`), and what is packed or unpacked. Call it before any work is launched.
        """
        self._stages = [self.driver.allocate(num_bytes) for _ in range(count)]
        self._on_device += self._stages
        self._has_stages = count > 0

    def take_stage(self) -> torch.Tensor | None:
        """A buffer of `make_stages`, for the use of one stream for ever; None if all are in use."""
        return self._stages.pop() if self._stages else None

    def take_table(self) -> Table | None:
        """A segment table for a copy by kernel, in mapped host memory; None if all are in use."""
        try:
            return self._tables.pop()
        except IndexError:
            return None

    def give_table(self, table: Table) -> None:
        """Return a segment table to the pool."""
        self._tables.append(table)

    def addresses_of(self, memory: Memory) -> MemoryAddresses:
        """Addresses of the memory. They are cached, and the cache keeps the memory alive."""
        found = self._addresses.get(memory)
        if found is None:
            slab = self._slabs.get(memory)
            borders = () if slab is None else slab.borders[:-1]
            found = self._addresses[memory] = copies.addresses_of(memory, borders)
        return found

    def lose(self, error: BaseException) -> None:
        """Mark the device as lost, with the message of the first error."""
        with self._lock:
            if self.lost is not None:
                return
            why = named(error)
            self.lost = str(why) if isinstance(why, DeviceLost) else f"the GPU is lost: {why}; restart the process"
        log.error("%s", self.lost)

    def _claim(self, name: str) -> None:
        """Reserve a stream's name. Names are never reused, because a tracer (a recorder of events, in tests) identifies
        streams by their names.
        """
        with self._lock:
            if self._closed:
                raise InvariantError(f"the device is closed: stream {name} cannot be made")
            if name in self._names:
                raise InvariantError(f"stream {name} exists already")
            self._names.add(name)

    def _check_alive(self) -> None:
        if self.lost is not None:
            raise DeviceLost(self.lost)


def open_driver(index: int = 0) -> Driver:
    """The machine's CUDA driver. Raises ConfigError, which names the missing part, if no GPU can be used."""
    library = load_library()
    if torch.version.cuda is None:
        raise ConfigError(
            f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch, or use the cpu device"
        )
    try:
        if not torch.cuda.is_available():
            raise ConfigError(
                f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU it can use: "
                "look at nvidia-smi and the driver's version"
            )
        torch.cuda.init()  # type: ignore[no-untyped-call]
        return Driver(library, index=index)
    except (RuntimeError, DeviceError) as error:
        raise ConfigError(f"the GPU cannot be used: {error}; look at nvidia-smi and the driver's version") from error
