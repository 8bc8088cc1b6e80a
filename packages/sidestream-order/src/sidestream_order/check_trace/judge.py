"""Translates the streams, waits, copies and storages of a PyTorch program into events of the order checker.

The recorder reports named streams, byte ranges of storages, and marks (positions on a stream, such as a recorded
event). Each storage is a memory of its own, so findings do not depend on the addresses that the allocator chose in this
run. Freed storages follow the rule of PyTorch's caching allocator. The next allocation on the stream of a freed storage
may get its bytes. If `record_stream` named other streams, the bytes are reused only after the work that these streams
had at the deletion.

Work is reported as if it ran in the order of its submission. The checker compares accesses by happens-before, so this
choice does not hide races. Called from any thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from sidestream_kv.types import Access
from sidestream_order.checker import Checker
from sidestream_order.findings import Finding
from sidestream_order.shadow import calling_site, read_site

# The caching allocator takes requests up to 1 MiB and larger requests from different segments.
_SMALL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Mark:
    """A position on a stream, such as an event records. Implements `Fence` for the checker.

    captured   True: the mark belongs to a captured CUDA graph, and each replay passes it
    """

    stream: str
    tick: int
    captured: bool = False

    @property
    def failure(self) -> BaseException | None:
        """Always None: failures of real work are not recorded."""
        return None

    def poll(self) -> bool:
        """Always True: the judge reports work in an order in which all earlier work is done."""
        return True


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a storage, for the report.

    text   size, device, dtype, shape and source line
    """

    name: str
    num_bytes: int
    text: str


@dataclass(slots=True)
class _Storage:
    """A storage that is not deleted yet.

    stream    the stream on which it was allocated
    users     streams with work that accesses it
    recorded  streams that `record_stream` named
    pooled    whether the caching allocator reuses its bytes; False for host memory and private pools
    """

    name: str
    num_bytes: int
    stream: str
    pooled: bool
    users: set[str] = field(default_factory=set)
    recorded: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Graph:
    """A captured CUDA graph.

    origin   the stream on which the capture began. At a replay, its work runs on the stream of the replay
    streams  streams whose work is captured
    steps    the actions of a replay. Each receives a function from captured stream to actual stream, and the marks of
             the replay
    end      mark after the last replay, because replays of one graph do not overlap
    """

    name: str
    origin: str
    streams: set[str]
    steps: list[Callable[[Callable[[str], str], dict[Mark, Mark]], None]] = field(default_factory=list)
    end: Mark | None = None


class Event:
    """The state of a CUDA event: the mark of its last record.

    external   True: in a capture, its record and waits become nodes of the graph, which take effect at each replay
    """

    def __init__(self, *, external: bool = False) -> None:
        self.external = external
        self.mark: Mark | None = None


class Judge:
    """Receives the events of one program, and keeps the checker's findings."""

    def __init__(self, *, max_findings: int = 10_000) -> None:
        self._checker = Checker(max_findings=max_findings)
        self._lock = threading.RLock()
        self._inside = False
        self._ticks: dict[str, int] = {}
        self._storages: dict[str, _Storage] = {}
        self._freed_inside: deque[str] = deque()
        self._reusable: dict[str, list[tuple[int, Mark]]] = {}
        self._in_graphs: set[str] = set()  # storages that graph replays still access after their deletion
        self._graphs = 0
        self._capture: Graph | None = None
        self.origins: dict[str, Origin] = {}
        self.num_works = 0

    @property
    def findings(self) -> Sequence[Finding]:
        """The findings so far."""
        return self._checker.findings

    @property
    def streams(self) -> Sequence[str]:
        """Names of the program's streams that had work or marks."""
        return [name for name in self._ticks if "/" not in name]

    # ------------------------------------------------------------------ streams and events

    def submitted(self, stream: str, accesses: Sequence[Access], label: str) -> None:
        """Report that the host enqueued work. In a capture, each replay enqueues the work."""
        with self._exclusive():
            if (graph := self._capturing(stream)) is not None:
                text = f"{label}, captured at {read_site(calling_site())}"
                self._in_graphs.update(access.memory for access in accesses)

                def submit(at: Callable[[str], str], _: dict[Mark, Mark]) -> None:
                    self._submit(at(stream), accesses, text)

                graph.steps.append(submit)
            else:
                self._submit(stream, accesses, label)

    def mark(self, stream: str) -> Mark:
        """A mark after all current work and waits of the stream."""
        with self._exclusive():
            if (graph := self._capturing(stream)) is None:
                return self._mark(stream)
            here = Mark(f"{graph.name}/{stream}", len(graph.steps) + 1, captured=True)
            graph.steps.append(lambda at, marks: marks.__setitem__(here, self._mark(at(stream))))
            return here

    def waited(self, stream: str, mark: Mark | None) -> None:
        """Let later work of the stream wait for the mark. No effect if the mark is None or on the same stream. A stream
        that waits for a mark of a capture joins the capture.
        """
        with self._exclusive():
            if mark is None:
                return
            if mark.captured:
                if (graph := self._capture) is not None:
                    graph.streams.add(stream)
                    graph.steps.append(lambda at, marks: self._wait(at(stream), marks[mark]))
                return
            if self._capturing(stream) is None:  # CUDA itself raises an error otherwise
                self._wait(stream, mark)

    def recorded(self, event: Event, stream: str) -> None:
        """Report that the event was recorded on the stream."""
        with self._exclusive():
            if event.external and (graph := self._capturing(stream)) is not None:
                graph.steps.append(lambda at, _: setattr(event, "mark", self._mark(at(stream))))
            else:
                event.mark = self.mark(stream)

    def waited_event(self, event: Event, stream: str) -> None:
        """Let later work of the stream wait for the event's last record. No effect if the event was never recorded."""
        with self._exclusive():
            if event.external and (graph := self._capturing(stream)) is not None:

                def wait(at: Callable[[str], str], _: dict[Mark, Mark]) -> None:
                    if event.mark is not None:
                        self._wait(at(stream), event.mark)

                graph.steps.append(wait)
            else:
                self.waited(stream, event.mark)

    def host_saw(self, mark: Mark | None) -> None:
        """Report that the host knows that all work before the mark is done."""
        with self._exclusive():
            if mark is not None and not mark.captured:
                self._checker.observed(mark)

    def synchronized(self) -> None:
        """Report that the host waited for all work of all streams."""
        with self._exclusive():
            for stream in [name for name in self._ticks if not name.startswith("reuse/")]:
                self._checker.observed(self._mark(stream))

    def host_touched(self, accesses: Sequence[Access], label: str) -> None:
        """Report an access by the host, which happens now."""
        with self._exclusive():
            if accesses:
                self._checker.host_touched(lambda: accesses, label)

    # ------------------------------------------------------------------ storages

    def made(self, name: str, num_bytes: int, stream: str, text: str, *, pooled: bool = True) -> None:
        """Report that a storage was allocated on the stream. It may reuse freed bytes of the same stream. Its bytes
        count as written, because the judge does not look for reads of uninitialised memory.

        pooled   True: the caching allocator reuses its bytes after the deletion
        """
        with self._exclusive():
            captured = self._capturing(stream) is not None
            if pooled and not captured:
                self._reuse(stream, num_bytes)
            self._storages[name] = _Storage(name, num_bytes, stream, pooled and not captured)
            self.origins[name] = Origin(name, num_bytes, f"{num_bytes} bytes {text}, {read_site(calling_site())}")
            self._checker.backed(name, name, max(num_bytes, 1))
            self._checker.took(name, [0], [])
            self._checker.host_touched(lambda: [Access(name, 0, max(num_bytes, 1), write=True)], "allocation")

    def recorded_stream(self, name: str, stream: str) -> None:
        """Report `Tensor.record_stream`: at the deletion, the allocator waits for the stream's work."""
        with self._exclusive():
            if name in self._storages:
                self._storages[name].recorded.add(stream)

    def freed(self, name: str) -> None:
        """Report that the last tensor of a storage was deleted. The garbage collector may call this at any time."""
        with self._lock:
            if self._inside:  # the garbage collector ran while this thread holds the lock
                self._freed_inside.append(name)
                return
            with self._exclusive():
                self._free(name)

    # ------------------------------------------------------------------ CUDA graphs

    def capturing(self, stream: str) -> bool:
        """Whether work of the stream is captured now."""
        with self._exclusive():
            return self._capturing(stream) is not None

    def capture_began(self, stream: str) -> None:
        """Begin a capture of the work of the stream, and of streams that wait for it."""
        with self._exclusive():
            self._graphs += 1
            self._capture = Graph(f"graph{self._graphs}", stream, {stream})

    def capture_ended(self) -> Graph | None:
        """End a capture. Returns the graph; None if the begin of the capture was not recorded."""
        with self._exclusive():
            graph, self._capture = self._capture, None
            return graph

    def replayed(self, graph: Graph, stream: str) -> None:
        """Report a replay: the graph's work is enqueued on the stream, after the graph's last replay. The graph ends
        with the work of its origin stream, because CUDA refuses a capture in which the origin has not waited for the
        other streams.
        """
        with self._exclusive():
            if graph.end is not None:
                self._wait(stream, graph.end)

            def at(captured: str) -> str:
                return stream if captured == graph.origin else f"{graph.name}/{captured}"

            marks: dict[Mark, Mark] = {}
            for step in graph.steps:
                step(at, marks)
            graph.end = self._mark(stream)

    # ------------------------------------------------------------------ private

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the lock. Nested use is allowed; the outermost exit also reports storages that the garbage collector
        deleted in between.
        """
        with self._lock:
            outermost, self._inside = not self._inside, True
            try:
                yield
                while outermost and self._freed_inside:
                    self._free(self._freed_inside.popleft())
            finally:
                self._inside = not outermost

    def _capturing(self, stream: str) -> Graph | None:
        return self._capture if self._capture is not None and stream in self._capture.streams else None

    def _submit(self, stream: str, accesses: Sequence[Access], label: str) -> Mark:
        """Report work to the checker as if it ran immediately."""
        mark = Mark(stream, self._ticks.get(stream, 0) + 1)
        self._ticks[stream] = mark.tick
        for access in accesses:
            if (storage := self._storages.get(access.memory)) is not None:
                storage.users.add(stream)
        self.num_works += bool(accesses)
        self._checker.submitted(mark, lambda: accesses, label)
        self._checker.started(mark)
        self._checker.finished(mark)
        return mark

    def _mark(self, stream: str) -> Mark:
        return self._submit(stream, (), "event")

    def _wait(self, stream: str, mark: Mark) -> None:
        if mark.stream != stream:
            self._checker.waited(stream, mark)

    def _free(self, name: str) -> None:
        storage = self._storages.pop(name, None)
        if storage is None or not storage.pooled:
            return
        own = Mark(storage.stream, self._ticks.get(storage.stream, 0))
        after = [own, *(self._mark(stream) for stream in sorted(storage.recorded))]
        if storage.users <= storage.recorded | {storage.stream}:
            self._checker.released(name, [0], after)
            self._forget(name)
            return
        # The next fitting allocation on the storage's stream reuses the bytes. Until then, the stream may still wait
        # for work of other streams that uses them.
        reuse = Mark(f"reuse/{name}", 1)
        self._checker.submitted(reuse, lambda: (), f"next allocation on {storage.stream}")
        self._checker.released(name, [0], [*after, reuse])
        self._reusable.setdefault(storage.stream, []).append((storage.num_bytes, reuse))

    def _reuse(self, stream: str, num_bytes: int) -> None:
        """Let an allocation on the stream reuse the bytes of all freed storages that are large enough."""
        waiting = self._reusable.get(stream)
        if not waiting:
            return
        fitting = [
            (size, reuse)
            for size, reuse in waiting
            if size >= num_bytes and (size <= _SMALL_BYTES) == (num_bytes <= _SMALL_BYTES)
        ]
        if not fitting:
            return
        self._reusable[stream] = [one for one in waiting if one not in fitting]
        here = self._mark(stream)
        for _, reuse in fitting:
            self._checker.waited(reuse.stream, here)
            self._checker.started(reuse)
            self._checker.finished(reuse)
            self._forget(reuse.stream.partition("/")[2])

    def _forget(self, name: str) -> None:
        """Delete the records of a deleted storage, so that the records of a long program do not grow."""
        if name not in self._in_graphs:
            self._checker.forget(name)
            if not any(finding.memory == name for finding in self.findings):
                del self.origins[name]
