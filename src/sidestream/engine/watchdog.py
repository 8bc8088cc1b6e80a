"""Notices an engine thread that hangs, for example in a driver. Knows nothing of steps."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from sidestream.config import WATCHDOG_OPTION
from sidestream.types import Health

logger = logging.getLogger(__name__)


class Watchdog:
    """Measures the turn of the engine thread that has not ended. The engine thread calls `watch` and `pause`, any
    thread calls `judge`.

    timeout_s  seconds after which a turn counts as hanging
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._began_s: float | None = None
        self._stalled = False  # as logged

    def watch(self) -> None:
        """A turn begins."""
        self._began_s = self._clock()

    def pause(self) -> None:
        """The turn has ended, and the next one has not begun."""
        self._began_s = None

    def judge(self, health: Health) -> Health:
        """`health`, but `stalled` while an engine that should serve hangs. Logs each change. Never blocks."""
        began_s = self._began_s
        stalled = health.status == "ok" and began_s is not None and self._clock() - began_s > self._timeout_s
        detail = f"the engine thread has not finished a step for more than {self._timeout_s:g} s ({WATCHDOG_OPTION})"
        if stalled != self._stalled:
            self._stalled = stalled
            if stalled:
                logger.critical("%s: SIGUSR1 to process %d prints where its threads hang", detail, os.getpid())
            elif health.status == "ok":
                logger.warning("the engine thread goes on")
        return Health("stalled", detail) if stalled else health
