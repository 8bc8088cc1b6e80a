"""Captured CUDA graphs, and the events that their replays wait for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sidestream_kv.device.cuda.driver import Event
from sidestream_kv.device.cuda.fences import CudaFence
from sidestream_kv.types import Accesses


class EventRecorder(Protocol):
    """The part of a stream that `CudaEvent` uses."""

    def record_event(self, event: CudaEvent) -> CudaFence:
        """Record `event` after all work submitted so far."""
        ...


class CudaEvent:
    """See `GraphEvent`."""

    def __init__(self, name: str, event: Event) -> None:
        """`event` must be external, so that a wait for it inside a capture becomes a node of the graph."""
        self.name = name
        self.event = event
        self.fence: CudaFence | None = None

    def record(self, stream: EventRecorder) -> CudaFence:
        """See `GraphEvent.record`. Replays that are enqueued already also wait for this record."""
        self.fence = stream.record_event(self)
        return self.fence


@dataclass(slots=True, eq=False)
class CudaGraph:
    """Captured work.

    graph           torch's graph
    accesses        memory that the captured work has declared to access
    waits           events that each replay waits for
    order           the waits, and the accesses that `Stream.touch` has declared, in order
    executable      the driver's handle of the graph; None: this version of torch does not give it
    """

    graph: Any
    accesses: Sequence[Accesses]
    waits: Sequence[CudaEvent]
    executable: int | None = None
    order: Sequence[CudaEvent | Accesses] = ()
    deleted: bool = False

    def delete(self) -> None:
        if not self.deleted:
            self.deleted = True
            self.graph.reset()


@dataclass(slots=True, eq=False)
class Capture:
    """State of a capture while it runs. Written by the capturing thread."""

    accesses: list[Accesses]
    waits: list[CudaEvent]
    order: list[CudaEvent | Accesses] = field(default_factory=list)
