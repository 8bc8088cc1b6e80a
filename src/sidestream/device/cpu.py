"""The CPU as a device: a stream is a thread with a FIFO, a fence is a position in it, and asynchrony is real.

Copies on one stream really run beside a forward pass on another, because torch and numpy release the interpreter lock
inside their kernels.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from sidestream.device.base import CopyBatch, Memory, Rest
from sidestream.device.channel import Bell
from sidestream.device.host import HostFence, HostStream, TurnTaker
from sidestream.errors import ConfigError, InvariantError
from sidestream.metrics import Metrics, Timeline
from sidestream.types import Fence, Tracer

# Linux 5.14; Python has no name for it yet.
_MADV_POPULATE_WRITE = 23
_TOUCH_BYTES = 32 << 20
_OMP_PAUSE_HARD = 2


class CpuDevice:
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
        self.tracer = tracer
        self._compute_threads = compute_threads or torch.get_num_threads()
        self._timeline = timeline
        self._metrics = metrics
        self._streams: dict[str, HostStream] = {}
        self._threads: list[TurnTaker] = []
        self._waits: Counter[str] = Counter()
        self._touchers: list[threading.Thread] = []
        self._touching = threading.Lock()
        self._untouched = 0
        self._closing = False

    def stream(self, name: str) -> HostStream:
        """A new stream. `"compute"` runs its kernels on all compute threads, every other one on a single thread."""
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
        """On a CPU, every stream is a thread of the host."""
        return self.stream(name)

    def thread(self, name: str, turn: Callable[[], Rest]) -> TurnTaker:
        """A thread that takes turns; whatever passes a fence wakes it. See `Device.thread`."""
        thread = TurnTaker(name, turn, clock=self.now, tracer=self.tracer)
        self._threads.append(thread)
        return thread

    def _passed(self) -> None:
        for thread in self._threads:
            thread.wake_for_fences()

    def prepare(self, batch: CopyBatch) -> CopyBatch:
        """As it is."""
        return batch

    def allocate(self, name: str, num_bytes: int) -> Memory:
        """Zeroed memory, page-aligned; its pages are touched in the background while the engine serves (P7)."""
        available = _available_bytes()
        if available is not None:
            available -= self._untouched  # of earlier allocations, whose pages may not be mapped yet
        if available is not None and num_bytes > available:
            raise ConfigError(
                f"{name} memory of {num_bytes / 2**30:.2f} GiB does not fit: this machine has {available / 2**30:.2f} GiB available; ask for less"
            )
        try:
            # Private, because Linux gives huge pages to shared memory only where the administrator says so: a load
            # takes 0.8 times as long in them.
            pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"{name} memory of {num_bytes / 2**30:.2f} GiB cannot be allocated on this machine: ask for less"
            ) from error
        with self._touching:
            self._untouched += num_bytes
        toucher = threading.Thread(
            target=self._touch, args=(pages, num_bytes), name=f"sidestream-touch-{name}", daemon=True
        )
        toucher.start()
        self._touchers.append(toucher)
        return Memory(name, (torch.frombuffer(pages, dtype=torch.uint8),))

    def allocate_host(self, name: str, num_bytes: int, *, item_bytes: int = 1) -> Memory:
        """On a CPU, host memory is what `allocate` gives."""
        return self.allocate(name, num_bytes)

    def mapped(self, memory: Memory) -> torch.Tensor:
        """The memory itself. See `Device.mapped`."""
        return memory.data

    def ready_bytes(self, memory: Memory) -> int:
        """All of it: a page that was not touched yet costs time, and nothing else."""
        return memory.num_bytes

    def grows(self, memory: Memory) -> bool:
        """Never: all of it is ready."""
        return False

    def _touch(self, pages: mmap.mmap, num_bytes: int) -> None:
        """Have the kernel map the pages, huge ones where it may, so that no copy pays for a page fault. Changes no
        byte.
        """
        try:
            pages.madvise(mmap.MADV_HUGEPAGE)
            for start in range(0, num_bytes, _TOUCH_BYTES):
                if self._closing:
                    return
                size = min(_TOUCH_BYTES, num_bytes - start)
                pages.madvise(_MADV_POPULATE_WRITE, start, size)
                with self._touching:
                    self._untouched -= size
        except (OSError, ValueError, AttributeError):
            return  # another system, or an older kernel: pages are mapped when first written

    def wait_host(self, fence: Fence, *, reason: str, timeout_s: float | None = None, bell: Bell | None = None) -> bool:
        """Block this thread until `fence` is done, or somebody rang; counted under `reason` unless it was done
        already.
        """
        if fence.poll():
            return True
        if not isinstance(fence, HostFence):
            raise InvariantError(f"cannot wait for {fence!r}: it is not of this device")
        self._waits[reason] += 1
        if self._metrics is not None:
            self._metrics.inc("host_waits_total", 1, reason)
        if self.tracer is not None:
            self.tracer.stalled(reason)
        fence.block(timeout_s, bell)
        return fence.poll()

    def host_waits(self) -> dict[str, int]:
        """How often a thread waited for a fence that was not done yet, by reason."""
        return dict(self._waits)

    def now(self) -> float:
        """Seconds of the system's monotonic clock."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Hold this thread up."""
        time.sleep(seconds)

    def rest(self) -> None:
        """Have the allocator return what a large step left behind: tens of MiB that it keeps otherwise. Takes
        milliseconds.
        """
        with contextlib.suppress(OSError, AttributeError):  # only the GNU library has it, and only it needs it
            ctypes.CDLL("libc.so.6").malloc_trim(0)

    def close(self) -> None:
        """Run what was submitted, then end all streams and threads. Idempotent."""
        self._closing = True
        for thread in self._threads:
            thread.close()
        for stream in self._streams.values():
            stream.close()
        for toucher in self._touchers:
            toucher.join()


def _available_bytes() -> int | None:
    """Memory that may be taken without swapping; None where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _end_own_openmp_team() -> None:
    """Let go of the OpenMP threads that belong to the calling thread, which has loaded a model with them.

    While a process has more of them than cores, libgomp's threads stop spinning between two kernels and sleep, and each
    of the hundreds of small kernels of a decode step pays for waking them: a step of SmolLM2-135M took 50 ms instead of
    30 ms on two cores. A thread that needs its team again gets a new one.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libgomp.so.1").omp_pause_resource_all(_OMP_PAUSE_HARD)
