"""The CPU as a device: a stream is a thread with a FIFO, a fence is a position in it, and asynchrony is real.

Torch and numpy release the interpreter lock inside their kernels, so a copy on one stream really runs beside a forward pass on
another. Submission is a queue append: it never blocks, however much is pending.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch

from sidestream.device.base import CopyBatch, Memory, no_accesses
from sidestream.errors import ConfigError, InvariantError
from sidestream.metrics import Metrics, Timeline
from sidestream.types import Accesses, Fence, Witness

# A wait shorter than this is not worth a span of its own on the timeline.
_VISIBLE_WAIT_NS = 50_000
# Linux 5.14; Python has no name for it yet.
_MADV_POPULATE_WRITE = 23
_TOUCH_BYTES = 32 << 20
_OMP_PAUSE_HARD = 2


class CpuFence:
    """A position on one stream; done once the stream's thread has passed it."""

    __slots__ = ("_failure", "_stream", "_tick")

    def __init__(self, stream: CpuStream, tick: int) -> None:
        self._stream = stream
        self._tick = tick
        self._failure: BaseException | None = None

    @property
    def stream(self) -> str:
        """Name of the stream."""
        return self._stream.name

    @property
    def tick(self) -> int:
        """Position on the stream."""
        return self._tick

    def poll(self) -> bool:
        """Whether the stream has passed this position. Never blocks."""
        return self._stream.has_passed(self)

    @property
    def failure(self) -> BaseException | None:
        """What the work raised, once done."""
        return self._failure

    def fail(self, error: BaseException) -> None:
        """Keep what the work raised, without its frames' variables. Called by the stream's thread before the fence completes."""
        traceback.clear_frames(error.__traceback__)
        self._failure = error

    def is_of(self, stream: CpuStream) -> bool:
        """Whether it was recorded on `stream`; two devices may use the same name."""
        return self._stream is stream

    def block(self, timeout_s: float | None) -> bool:
        """Block the calling thread until done; False when `timeout_s` passed first."""
        return self._stream.block_until(self._tick, timeout_s)

    def __repr__(self) -> str:
        return f"fence({self.stream}:{self.tick}{' done' if self.poll() else ''})"


@dataclass(frozen=True, slots=True)
class _Work:
    run: Callable[[], None]
    fence: CpuFence
    label: str


@dataclass(frozen=True, slots=True)
class _Wait:
    fence: CpuFence


class CpuStream:
    """One thread that runs what is submitted, in order."""

    def __init__(self, name: str, *, threads: int, timeline: Timeline | None, witness: Witness | None) -> None:
        self.name = name
        self.done_tick = 0
        self._threads = threads
        self._timeline = timeline
        self._witness = witness
        self._queue: SimpleQueue[_Work | _Wait | None] = SimpleQueue()
        self._submit_lock = threading.Lock()
        self._next_tick = 1
        self._closed = False
        self._passed = threading.Condition()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"sidestream-{name}", daemon=True)
        self._start()

    def submit(self, work: Callable[[], None], accesses: Accesses = no_accesses, *, label: str = "") -> Fence:
        """Enqueue `work`; returns at once. See `Stream.submit`."""
        with self._submit_lock:
            if self._closed:
                raise InvariantError(f"stream {self.name} is closed: {label or 'work'} cannot be submitted")
            fence = CpuFence(self, self._next_tick)
            self._next_tick += 1
            if self._witness is not None:
                self._witness.submitted(fence, accesses, label)
            self._queue.put(_Work(work, fence, label))
        return fence

    def wait(self, fence: Fence) -> None:
        """Order later work behind `fence`. See `Stream.wait`."""
        if not isinstance(fence, CpuFence):
            raise InvariantError(f"stream {self.name} cannot wait for {fence!r}: it is not of this device")
        if fence.is_of(self):
            return  # a FIFO is behind its own past already
        if threading.current_thread() is self._thread:
            self._wait_here(fence)
        elif not fence.poll():
            with self._submit_lock:
                self._queue.put(_Wait(fence))

    def touch(self, accesses: Accesses) -> None:
        """Declare from inside work what it touches from here on. See `Stream.touch`."""
        if self._witness is not None:
            self._witness.touched(self.name, accesses)

    def copy(self, batch: CopyBatch) -> None:
        """Copy the segments, on the calling thread. See `Stream.copy`."""
        for source, target in batch.runs():
            target.copy_(source)

    def has_passed(self, fence: CpuFence) -> bool:
        """Whether `fence`, of this stream, is done: then whoever asks has seen it."""
        if self.done_tick < fence.tick:
            return False
        if self._witness is not None:
            self._witness.observed(fence)
        return True

    def block_until(self, tick: int, timeout_s: float | None) -> bool:
        """Block the calling thread until `tick` has been passed; False when `timeout_s` passed first."""
        if self.done_tick >= tick:
            return True
        with self._passed:
            return self._passed.wait_for(lambda: self.done_tick >= tick, timeout_s)

    def close(self) -> None:
        """Run what was submitted, then end the thread. Idempotent."""
        with self._submit_lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()

    def _start(self) -> None:
        """Start the thread with its own number of torch threads: copies stay on one core, the forward pass gets them all.

        Torch keeps the number by thread, but a thread that never asked takes the last one set by any thread: so the stream's
        thread asks before it sets, and the caller's number is set again afterwards, for threads still to come.
        """
        caller_threads = torch.get_num_threads()
        self._thread.start()
        self._ready.wait()
        torch.set_num_threads(caller_threads)

    def _run(self) -> None:
        torch.get_num_threads()
        torch.set_num_threads(self._threads)
        self._ready.set()
        while (item := self._queue.get()) is not None:
            if isinstance(item, _Wait):
                self._wait_here(item.fence)
                continue
            if self._witness is not None:
                self._witness.started(item.fence)
            start_ns = time.perf_counter_ns()
            try:
                item.run()
            except BaseException as error:
                item.fence.fail(error)
            if self._timeline is not None:
                self._timeline.record(self.name, item.label or "work", start_ns, time.perf_counter_ns())
            if self._witness is not None:
                self._witness.finished(item.fence)
            tick = item.fence.tick
            del item  # what the work held (tensors, leases) is gone before anybody learns that it is done (H24)
            with self._passed:
                self.done_tick = tick
                self._passed.notify_all()

    def _wait_here(self, fence: CpuFence) -> None:
        start_ns = time.perf_counter_ns()
        fence.block(None)
        stop_ns = time.perf_counter_ns()
        if self._witness is not None:
            self._witness.waited(self.name, fence)
        if self._timeline is not None and stop_ns - start_ns > _VISIBLE_WAIT_NS:
            self._timeline.record(self.name, f"wait for {fence.stream}", start_ns, stop_ns)


class CpuDevice:
    """Streams as threads, memory as torch tensors. One per engine."""

    kind = "cpu"

    def __init__(
        self,
        *,
        compute_threads: int | None = None,
        timeline: Timeline | None = None,
        metrics: Metrics | None = None,
        witness: Witness | None = None,
    ) -> None:
        self.witness = witness
        self._compute_threads = compute_threads or torch.get_num_threads()
        self._timeline = timeline
        self._metrics = metrics
        self._streams: dict[str, CpuStream] = {}
        self._waits: Counter[str] = Counter()
        self._touchers: list[threading.Thread] = []
        self._touching = threading.Lock()
        self._untouched = 0
        self._closing = False

    def stream(self, name: str) -> CpuStream:
        """A new stream. `"compute"` runs its kernels on all compute threads, every other one on a single thread."""
        if name in self._streams:
            raise InvariantError(f"stream {name} exists already")
        threads = self._compute_threads if name == "compute" else 1
        if threads > 1:
            _end_own_openmp_team()
        stream = self._streams[name] = CpuStream(name, threads=threads, timeline=self._timeline, witness=self.witness)
        return stream

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
            pages = mmap.mmap(-1, num_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(f"{name} memory of {num_bytes / 2**30:.2f} GiB cannot be allocated on this machine: ask for less") from error
        with self._touching:
            self._untouched += num_bytes
        toucher = threading.Thread(target=self._touch, args=(pages, num_bytes), name=f"sidestream-touch-{name}", daemon=True)
        toucher.start()
        self._touchers.append(toucher)
        return Memory(name, torch.frombuffer(pages, dtype=torch.uint8))

    def allocate_host(self, name: str, num_bytes: int) -> Memory:
        """On a CPU, host memory is what `allocate` gives."""
        return self.allocate(name, num_bytes)

    def _touch(self, pages: mmap.mmap, num_bytes: int) -> None:
        """Have the kernel map the pages, huge ones where it may, so that no copy pays for a page fault. Changes no byte."""
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

    def wait_host(self, fence: Fence, *, reason: str, timeout_s: float | None = None) -> bool:
        """Block this thread until `fence` is done; counted under `reason` unless it was done already."""
        if fence.poll():
            return True
        if not isinstance(fence, CpuFence):
            raise InvariantError(f"cannot wait for {fence!r}: it is not of this device")
        self._waits[reason] += 1
        if self._metrics is not None:
            self._metrics.inc("host_waits_total", 1, reason)
        if self.witness is not None:
            self.witness.stalled(reason)
        fence.block(timeout_s)
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
        """Have the allocator return what a large flight left behind: tens of MiB that it keeps otherwise. Takes milliseconds."""
        with contextlib.suppress(OSError, AttributeError):  # only the GNU library has it, and only it needs it
            ctypes.CDLL("libc.so.6").malloc_trim(0)

    def close(self) -> None:
        """Run what was submitted, then end all streams. Idempotent."""
        self._closing = True
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

    While a process has more of them than cores, libgomp's threads stop spinning between two kernels and sleep, and each of the
    hundreds of small kernels of a decode step pays for waking them: a step of SmolLM2-135M took 50 ms instead of 30 ms on two
    cores. A thread that needs its team again gets a new one.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libgomp.so.1").omp_pause_resource_all(_OMP_PAUSE_HARD)
