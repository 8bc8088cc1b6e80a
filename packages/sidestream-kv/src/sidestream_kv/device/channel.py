"""Messages between host threads, and the bell that wakes a sleeping thread.

In tests, a tracer records messages, because a message orders the work of its two threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from sidestream_kv.types import Tracer

T = TypeVar("T")


class Channel(Generic[T]):
    """A queue from one sending thread to one receiving thread. Neither thread ever blocks.

    wake   function that the sender calls after each message; None: the receiver polls
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
        """Send a message. The sender must not change the message afterwards."""
        self._put += 1
        if self._tracer is not None:
            self._tracer.sent(self.name, self._put)
        self._messages.append((self._put, message))
        if self._wake is not None:
            self._wake()

    def take(self) -> T | None:
        """Remove and return the oldest message; None if there is no message."""
        if not self._messages:
            return None  # safe without a lock: only this thread takes messages
        number, message = self._messages.popleft()
        if self._tracer is not None:
            self._tracer.received(self.name, number)
        return message


class Bell:
    """Wakes one thread: the thread sleeps on the bell until any other thread rings it. Several rings count as one if
    the thread has not woken up in between.
    """

    __slots__ = ("_quiet",)

    def __init__(self) -> None:
        # Locked while no ring is pending. A SimpleQueue cannot replace this lock: its `get` with a timeout of
        # microseconds sometimes blocks forever.
        self._quiet = threading.Lock()
        self._quiet.acquire()

    def ring(self) -> None:
        """Wake the sleeping thread, or end its next sleep at once. Never blocks."""
        try:  # noqa: SIM105 - contextlib.suppress is slower, and the engine thread calls this
            self._quiet.release()  # rule: ring-wakes-the-sleeper
        except RuntimeError:
            pass  # a ring is pending already

    @property
    def rung(self) -> bool:
        """Whether a ring is pending."""
        return not self._quiet.locked()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until a ring is pending, and take the ring; False after `timeout_s`, which must not be negative."""
        return self._quiet.acquire(timeout=-1 if timeout_s is None else timeout_s)


class Mark:
    """A number that only grows. One thread writes it, and another thread reads it. It replaces progress messages where
    only the last message matters.
    """

    def __init__(self, name: str, *, tracer: Tracer | None = None, wake: Callable[[], None] = lambda: None) -> None:
        """The writer calls `wake` after each increase."""
        self.name = name
        self._tracer = tracer
        self._wake = wake
        self._raised = self._read = 0

    def raise_to(self, number: int) -> None:
        """Set the number, if `number` is higher."""
        if number > self._raised:
            if self._tracer is not None:
                self._tracer.sent(self.name, number)
            self._raised = number
            self._wake()

    def read(self) -> int:
        """The current number."""
        number = self._raised
        if number != self._read:
            self._read = number
            if self._tracer is not None:
                self._tracer.received(self.name, number)
        return number
