"""Measures for how long the process at the other end of a connection has not answered."""

from __future__ import annotations

import time
from collections.abc import Callable

from sidestream.config import WATCHDOG_OPTION

PULSE_S = 1.0
"""Least time between two Pings."""


class Pulse:
    """Sends a `Ping`, which the other process answers with a `Ping`, and measures the wait for the answer. Has no
    thread and no timer. One thread uses it.

    send_ping   function that sends a `Ping`
    """

    def __init__(self, send_ping: Callable[[], None]) -> None:
        self._send_ping = send_ping
        self._unheard_since_s: float | None = None  # None: every Ping was answered
        self._next_s = 0.0

    def ask(self) -> None:
        """Send a `Ping`, unless an answer is due, or `PULSE_S` have not passed since the last one."""
        now_s = time.monotonic()
        if self._unheard_since_s is None and now_s >= self._next_s:
            self._unheard_since_s, self._next_s = now_s, now_s + PULSE_S
            self._send_ping()

    def is_silent(self, timeout_s: float, read: Callable[[], None] = lambda: None) -> bool:
        """Whether nothing has come for `timeout_s` although an answer is due. Calls `read`, which reads what has come,
        before it returns True: this process itself may have been stopped.
        """
        if self._unheard_s <= timeout_s:
            return False
        read()
        return self._unheard_s > timeout_s

    def heard(self) -> None:
        """Something has come, which may have been sent before the `Ping` arrived."""
        if self._unheard_since_s is not None:
            self._unheard_since_s = time.monotonic()

    def answered(self) -> None:
        """The answer has come."""
        self._unheard_since_s = None

    @property
    def _unheard_s(self) -> float:
        return 0.0 if self._unheard_since_s is None else time.monotonic() - self._unheard_since_s


def silence(timeout_s: float) -> str:
    """The reason why an engine counts as stalled if its process does not answer."""
    return f"the engine's process has not answered for more than {timeout_s:g} s ({WATCHDOG_OPTION})"
