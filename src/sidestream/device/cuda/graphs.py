"""Captured graphs, and events that their replays wait for: the same names as on the simulated device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sidestream.device.cuda.driver import Event
from sidestream.types import Accesses

if TYPE_CHECKING:
    from sidestream.device.cuda.stream import CudaFence, CudaStream


class CudaEvent:
    """It stands for the last position at which it was recorded, and for nothing before the first."""

    def __init__(self, name: str, event: Event) -> None:
        """`event` was made to be external: a wait for it inside a graph is a node."""
        self.name = name
        self.event = event
        self.fence: CudaFence | None = None

    def record(self, stream: CudaStream) -> CudaFence:
        """From now on, whoever waits for this event waits for what `stream` was given so far. Replays that were
        enqueued wait, too.
        """
        fence = stream.submit(lambda: self.event.record(stream.external), label=f"record {self.name}")
        self.fence = fence
        return fence


@dataclass(frozen=True, slots=True, eq=False)
class CudaGraph:
    """Work that was captured, to be replayed as it was: the same memory, and no wait of the host's.

    graph           torch's
    accesses        what the captured work declared
    waits           events that a replay waits for
    ignored_waits   waits for fences while it was captured, which are no part of it
    executable      the driver's; None: of a torch that does not tell it
    """

    graph: Any
    accesses: Sequence[Accesses]
    waits: Sequence[CudaEvent]
    ignored_waits: int
    executable: int | None = None


@dataclass(slots=True, eq=False)
class Capture:
    """What is being captured on a stream. Written by the thread that captures."""

    accesses: list[Accesses]
    waits: list[CudaEvent]
    ignored_waits: int = 0
