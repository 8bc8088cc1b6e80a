"""Messages between threads of the host, and the bell that a thread sleeps on.

A tracer records messages, because they order the two threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from sidestream.types import Tracer

T = TypeVar("T")


class Channel(Generic[T]):
    """A queue with one sending and one receiving thread; neither ever blocks.

    wake   called by the sender after each message; None: the receiver polls
    """

    def __init__(self, name: str, *, tracer: Tracer | None = None, wake: Callable[[], None] | None = None) -> None:
        self.name = name
        self._tracer = tracer
        self._wake = wake
        self._messages: deque[tuple[int, T]] = deque()
        self._put = 0

    def __len__(self) -> int:
        """Messages in the queue."""
        return len(self._messages)

    def put(self, message: T) -> None:
        """Send a message. The sender must not change it any more."""
        self._put += 1
        if self._tracer is not None:
            self._tracer.sent(self.name, self._put)
        self._messages.append((self._put, message))
        if self._wake is not None:
            self._wake()

    def take(self) -> T | None:
        """The oldest message; None when there is none."""
        if not self._messages:
            return None  # safe without a lock: only this thread takes messages
        number, message = self._messages.popleft()
        if self._tracer is not None:
            self._tracer.received(self.name, number)
        return message


class Bell:
    """One thread sleeps on it until any thread rings. Several rings before the sleeper wakes up count as one."""

    __slots__ = ("_quiet",)

    def __init__(self) -> None:
        # Locked while no ring is pending. Not a SimpleQueue: its `get` with a timeout of microseconds sometimes blocks
        # forever.
        self._quiet = threading.Lock()
        self._quiet.acquire()

    def ring(self) -> None:
        """Wake the sleeping thread, or end its next sleep at once. Never blocks."""
        try:  # noqa: SIM105 - contextlib.suppress is slower, and the engine thread calls this
            self._quiet.release()
        except RuntimeError:
            pass  # a ring is pending already

    @property
    def rung(self) -> bool:
        """Whether a ring is pending."""
        return not self._quiet.locked()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until a ring is pending, and take it; False after `timeout_s` (not negative)."""
        return self._quiet.acquire(timeout=-1 if timeout_s is None else timeout_s)


class Mark:
    """A growing number, written by one thread and read by another: progress messages of which only the last matters."""

    def __init__(self, name: str, *, tracer: Tracer | None = None, wake: Callable[[], None] = lambda: None) -> None:
        """`wake` is called by the writer after each increase."""
        self.name = name
        self._tracer = tracer
        self._wake = wake
        self._raised = self._read = 0

    def raise_to(self, number: int) -> None:
        """Set the number, if it is higher."""
        if number > self._raised:
            if self._tracer is not None:
                self._tracer.sent(self.name, number)
            self._raised = number
            self._wake()

    def read(self) -> int:
        """The number."""
        number = self._raised
        if number != self._read:
            self._read = number
            if self._tracer is not None:
                self._tracer.received(self.name, number)
        return number
