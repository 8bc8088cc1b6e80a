"""The CPU as a device: each stream is a thread (see `host`), and memory consists of anonymous pages."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Callable

import torch

from sidestream_kv.device.base import CopyBatch, GraphEvent, Memory, WakeUp
from sidestream_kv.device.channel import Bell
from sidestream_kv.device.host import HostFence, HostSide, HostStream, TurnTaker
from sidestream_kv.device.machine import Advice, advise, check_fits, map_pages, private_pages
from sidestream_kv.errors import InvariantError
from sidestream_kv.metrics import Metrics, Timeline
from sidestream_kv.types import Fence, Tracer

_TOUCH_BYTES = 32 << 20
_OMP_PAUSE_HARD = 2


class CpuDevice(HostSide):
    """Streams as threads, memory as torch tensors. One per engine."""

    kind = "cpu"
    torch_device = torch.device("cpu")
    segment_bytes = 64 << 10

    def __init__(
        self,
        *,
        compute_threads: int | None = None,
        timeline: Timeline | None = None,
        metrics: Metrics | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        super().__init__(metrics=metrics, tracer=tracer)
        self._compute_threads = compute_threads or torch.get_num_threads()
        self._timeline = timeline
        self._streams: dict[str, HostStream] = {}
        self._touchers: list[threading.Thread] = []
        self._touching = threading.Lock()
        self._untouched = 0
        self._closing = False

    def stream(self, name: str) -> HostStream:
        """A new stream. The stream `"compute"` runs its kernels on all compute threads, any other stream on one
        thread.
        """
        if name in self._streams:
            raise InvariantError(f"stream {name} exists already")
        threads = self._compute_threads if name == "compute" else 1
        if threads > 1:
            _end_own_openmp_team()
        stream = self._streams[name] = HostStream(
            name, threads=threads, timeline=self._timeline, tracer=self.tracer, on_pass=self._passed
        )
        return stream

    def worker(self, name: str) -> HostStream:
        """A new stream. On a CPU, every stream is a host thread."""
        return self.stream(name)

    def thread(self, name: str, turn: Callable[[], WakeUp]) -> TurnTaker:
        """See `Device.thread`. If its last turn has returned fences, the thread is woken whenever a fence of the
        device becomes done.
        """
        thread = TurnTaker(name, turn, clock=self.now, tracer=self.tracer)
        self._threads.append(thread)
        return thread

    def event(self, name: str) -> GraphEvent:
        """Raises InvariantError: a CPU has no events. See `Device.event`."""
        raise InvariantError(f"event {name} cannot be made: a CPU has no events")

    def prepare(self, batch: CopyBatch) -> CopyBatch:
        """The batch unchanged."""
        return batch

    def allocate(self, name: str, num_bytes: int) -> Memory:
        """Zeroed, page-aligned memory whose pages exist. A thread that maps them later would take a core from the first
        request, which then took twice as long.
        """
        memory = self._new(name, num_bytes)
        self._touch(memory.data)
        return memory

    def allocate_host(self, name: str, num_bytes: int, *, item_bytes: int = 1) -> Memory:
        """Zeroed, page-aligned memory. Returns at once: a background thread maps the pages."""
        memory = self._new(name, num_bytes)
        toucher = threading.Thread(
            target=self._touch, args=(memory.data,), name=f"sidestream-touch-{name}", daemon=True
        )
        toucher.start()
        self._touchers.append(toucher)
        return memory

    def _new(self, name: str, num_bytes: int) -> Memory:
        check_fits(name, num_bytes, promised=self._untouched)
        data = torch.frombuffer(private_pages(name, num_bytes), dtype=torch.uint8)
        with self._touching:
            self._untouched += num_bytes
        if self.tracer is not None:
            self.tracer.allocated(name, num_bytes)
        return Memory(name, (data,))

    def adopt_host(self, name: str, pages: mmap.mmap, *, item_bytes: int = 1) -> Memory:
        """See `Device.adopt_host`. Maps no page before its first use. Most pages exist already, and a thread that maps
        them takes a core from the first requests: the first one took twice as long.
        """
        data = torch.frombuffer(pages, dtype=torch.uint8)
        advise(data.data_ptr(), data.numel(), Advice.HUGEPAGE)  # without huge pages, copies are slower
        if self.tracer is not None:
            self.tracer.allocated(name, len(pages))
        return Memory(name, (data,))

    def mapped(self, memory: Memory) -> torch.Tensor:
        """The memory itself. See `Device.mapped`."""
        return memory.data

    def ready_bytes(self, memory: Memory) -> int:
        """All bytes. Pages that are not mapped yet can be copied, too, but this is slower."""
        return memory.num_bytes

    def grows(self, memory: Memory) -> bool:
        """False: all bytes are ready."""
        return False

    def _touch(self, data: torch.Tensor) -> None:
        """Map the pages, as huge pages if possible, so that copies have no page faults. Does not change any byte. With
        an older kernel, pages are mapped at their first write.
        """
        address, num_bytes = data.data_ptr(), data.numel()
        advise(address, num_bytes, Advice.HUGEPAGE)
        for start in range(0, num_bytes, _TOUCH_BYTES):
            size = min(_TOUCH_BYTES, num_bytes - start)
            if self._closing or not map_pages(address + start, size):
                return
            with self._touching:
                self._untouched -= size

    def wait_host(self, fence: Fence, *, reason: str, timeout_s: float | None = None, bell: Bell | None = None) -> bool:
        if fence.poll():  # rule: done-fence-needs-no-wait
            return True
        if not isinstance(fence, HostFence):
            raise InvariantError(f"cannot wait for {fence!r}: it is not of this device")
        self._count_wait(reason)
        fence.block(timeout_s, bell)
        return fence.poll()  # rule: wait-that-ends-early-says-so

    def trim_memory(self) -> None:
        """Return the C allocator's free memory to the system, tens of MiB after a large step. Takes milliseconds."""
        with contextlib.suppress(OSError, AttributeError):  # only glibc has this function, and only glibc needs it
            ctypes.CDLL("libc.so.6").malloc_trim(0)

    def close(self) -> None:
        self._closing = True
        for thread in self._threads:
            thread.close()
        for stream in self._streams.values():
            stream.close()
        for toucher in self._touchers:
            toucher.join()  # rule: memory-is-touched-before-the-device-is-closed


def _end_own_openmp_team() -> None:
    """End the OpenMP threads that the calling thread has used to load a model.

    If a process has more OpenMP threads than cores, libgomp's threads sleep between kernels instead of spinning, and
    every small kernel of a decode step must wake them: a step of SmolLM2-135M took 50 ms instead of 30 ms on two cores.
    If the calling thread needs OpenMP threads again, it gets new ones.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libgomp.so.1").omp_pause_resource_all(_OMP_PAUSE_HARD)
