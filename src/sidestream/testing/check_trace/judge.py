"""Judges the streams, waits, copies and storages of a PyTorch program with the ordering checker.

Knows no tensors and no torch: the recorder reports named streams, byte ranges of storages, and marks. Each storage is a
memory of its own, so the judgement does not depend on the addresses that the allocator chose in this run. The rule for
freed storages is that of PyTorch's caching allocator: the next allocation on the stream of a freed storage may get its
bytes, as soon as the streams that `record_stream` named have done the work that they had at the deletion.

Works are reported in the order in which the host submitted them. That order is possible on the device, and the checker
compares accesses by happens-before, not by the order in which they ran. Called from any thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from sidestream.testing.checker import Checker
from sidestream.testing.findings import Finding
from sidestream.testing.shadow import calling_site, read_site
from sidestream.types import Access

# Sizes at which the caching allocator separates its blocks: requests up to 1 MiB come from other segments than larger.
_SMALL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Mark:
    """A position on a stream, as an event records it. A `Fence` of the checker.

    captured   the mark belongs to the capture of a CUDA graph, and is passed at each replay
    """

    stream: str
    tick: int
    captured: bool = False

    @property
    def failure(self) -> BaseException | None:
        """Work of a real program does not report failures."""
        return None

    def poll(self) -> bool:
        """The judge tells the checker about work in a possible order, in which all earlier work is done."""
        return True


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a storage comes from, for the report.

    text   size, device, dtype, shape and source line
    """

    name: str
    num_bytes: int
    text: str


@dataclass(slots=True)
class _Storage:
    """A storage that is alive.

    stream    the stream on which it was allocated
    users     streams with work that accesses it
    recorded  streams that `record_stream` named
    pooled    whether the caching allocator gets it back when it is deleted; not so for host memory and private pools
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

    origin   the stream of the capture; at a replay, its work runs on the stream of the replay
    streams  streams whose work is captured
    steps    what a replay does, given the stream that stands for a captured stream, and the marks of this replay
    end      mark of the last replay: replays of one graph do not overlap
    """

    name: str
    origin: str
    streams: set[str]
    steps: list[Callable[[Callable[[str], str], dict[Mark, Mark]], None]] = field(default_factory=list)
    end: Mark | None = None


class Event:
    """The position that a CUDA event holds: it is replaced when the event is recorded again.

    external   in a capture, recording it and waiting for it are nodes of the graph, which act at each replay
    """

    def __init__(self, *, external: bool = False) -> None:
        self.external = external
        self.mark: Mark | None = None


class Judge:
    """Gets the events of one program, and keeps the checker's findings about it."""

    def __init__(self, *, max_findings: int = 10_000) -> None:
        self._checker = Checker(max_findings=max_findings)
        self._lock = threading.RLock()
        self._inside = False
        self._ticks: dict[str, int] = {}
        self._storages: dict[str, _Storage] = {}
        self._freed_inside: deque[str] = deque()
        self._reusable: dict[str, list[tuple[int, Mark]]] = {}
        self._in_graphs: set[str] = set()  # storages that replays access, even after their deletion
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
        """Streams with work or marks; those of graphs and of the allocator's reuse are not counted."""
        return [name for name in self._ticks if "/" not in name]

    # ------------------------------------------------------------------ streams and events

    def submitted(self, stream: str, accesses: Sequence[Access], label: str) -> None:
        """The host enqueued work. In a capture, each replay enqueues it."""
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
        """The position after all work and waits that the stream has now."""
        with self._exclusive():
            if (graph := self._capturing(stream)) is None:
                return self._mark(stream)
            here = Mark(f"{graph.name}/{stream}", len(graph.steps) + 1, captured=True)
            graph.steps.append(lambda at, marks: marks.__setitem__(here, self._mark(at(stream))))
            return here

    def waited(self, stream: str, mark: Mark | None) -> None:
        """Later work of the stream waits for the mark; None, or a mark of the stream itself: no effect. A stream that
        waits for a mark of the capture takes part in it.
        """
        with self._exclusive():
            if mark is None:
                return
            if mark.captured:
                if (graph := self._capture) is not None:
                    graph.streams.add(stream)
                    graph.steps.append(lambda at, marks: self._wait(at(stream), marks[mark]))
                return
            if self._capturing(stream) is None:  # CUDA refuses the other case
                self._wait(stream, mark)

    def recorded(self, event: Event, stream: str) -> None:
        """The event was recorded on the stream."""
        with self._exclusive():
            if event.external and (graph := self._capturing(stream)) is not None:
                graph.steps.append(lambda at, _: setattr(event, "mark", self._mark(at(stream))))
            else:
                event.mark = self.mark(stream)

    def waited_event(self, event: Event, stream: str) -> None:
        """Later work of the stream waits for the event's last record; no effect if it was never recorded."""
        with self._exclusive():
            if event.external and (graph := self._capturing(stream)) is not None:

                def wait(at: Callable[[str], str], _: dict[Mark, Mark]) -> None:
                    if event.mark is not None:
                        self._wait(at(stream), event.mark)

                graph.steps.append(wait)
            else:
                self.waited(stream, event.mark)

    def host_saw(self, mark: Mark | None) -> None:
        """The host knows that everything before the mark is done."""
        with self._exclusive():
            if mark is not None and not mark.captured:
                self._checker.observed(mark)

    def synchronized(self) -> None:
        """The host waited for all work of all streams."""
        with self._exclusive():
            for stream in [name for name in self._ticks if not name.startswith("reuse/")]:
                self._checker.observed(self._mark(stream))

    def host_touched(self, accesses: Sequence[Access], label: str) -> None:
        """The host itself accesses memory now."""
        with self._exclusive():
            if accesses:
                self._checker.host_touched(lambda: accesses, label)

    # ------------------------------------------------------------------ storages

    def made(self, name: str, num_bytes: int, stream: str, text: str, *, pooled: bool = True) -> None:
        """A storage was allocated on the stream. Freed bytes of the same stream that fit may be used for it. What it
        contains is not known, but reading it is not a race: the judge does not look for reads of uninitialised memory.

        pooled   the caching allocator gets it back when it is deleted
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
        """`Tensor.record_stream`: at the deletion, the allocator waits for the stream's work."""
        with self._exclusive():
            if name in self._storages:
                self._storages[name].recorded.add(stream)

    def freed(self, name: str) -> None:
        """The last tensor of a storage was deleted. May be called by the garbage collector at any moment."""
        with self._lock:
            if self._inside:  # collected while this thread is inside the judge
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
        """Work of the stream, and of streams that wait for it, is captured from now on."""
        with self._exclusive():
            self._graphs += 1
            self._capture = Graph(f"graph{self._graphs}", stream, {stream})

    def capture_ended(self) -> Graph | None:
        """The captured graph; None if no capture was seen to begin."""
        with self._exclusive():
            graph, self._capture = self._capture, None
            return graph

    def replayed(self, graph: Graph, stream: str) -> None:
        """The graph's work was enqueued on the stream, ordered by the waits of the capture, behind its last replay.

        CUDA refuses a capture in which the origin has not waited for the other streams, so its end is the graph's end.
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
        """Hold the lock. The outermost caller of a thread also reports storages that were collected meanwhile."""
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
        """Tell the checker about work, in a possible order: at once."""
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
        # Whether this is too early depends on the waits of the storage's stream until its next allocation that fits.
        reuse = Mark(f"reuse/{name}", 1)
        self._checker.submitted(reuse, lambda: (), f"next allocation on {storage.stream}")
        self._checker.released(name, [0], [*after, reuse])
        self._reusable.setdefault(storage.stream, []).append((storage.num_bytes, reuse))

    def _reuse(self, stream: str, num_bytes: int) -> None:
        """An allocation on the stream may get the bytes of any freed storage that is large enough."""
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
        """Drop the records of a deleted storage, so that a long program needs no more memory than a short one."""
        if name not in self._in_graphs:
            self._checker.forget(name)
            if not any(finding.memory == name for finding in self.findings):
                del self.origins[name]
