"""The side stream of a CUDA stream runs a part of that stream's work concurrently. In a captured graph, this part
becomes a branch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from sidestream_kv.device.cuda.driver import Driver


class SideStream:
    """A stream of low priority beside a main stream. The driver's stream is made at the first `enqueue`.

    external   torch's object for the main stream
    handle     the driver's handle of the side stream; None: there was no work yet
    active     whether the side stream has work that the main stream does not wait for yet
    """

    def __init__(self, driver: Driver, external: Any) -> None:
        self.handle: int | None = None
        self.active = False
        self._driver = driver
        self._main = external
        self._external: Any = None
        self._current: AbstractContextManager[Any] | None = None

    def enqueue(self, work: Callable[[], None]) -> None:
        """Enqueue `work`. It runs after all work that the main stream has so far."""
        if self._current is None:
            self.handle = self._driver.make_stream(high=False)
            self._external = self._driver.external(self.handle)
            self._current = self._driver.current(self._external)
        fork = self._driver.event()
        fork.record(self._main)
        fork.wait(self._external)  # rule: side-stream-starts-after-the-main-stream
        self.active = True
        with self._current:
            work()

    def join(self) -> None:
        """Make the main stream wait for the side stream's work."""
        if self.active:
            event = self._driver.event()
            event.record(self._external)
            event.wait(self._main)  # rule: main-stream-waits-for-the-side-stream
            self.active = False
