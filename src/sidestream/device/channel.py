"""Messages from one thread of the host to another, and what such a thread sleeps on. The tracer is told of messages,
because they order what the two threads do.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from sidestream.types import Tracer

T = TypeVar("T")


class Channel(Generic[T]):
    """A queue with one thread at each end; neither ever blocks.

    wake   called after each message was put, by the thread that put it; None: nobody need be woken
    """

    def __init__(self, name: str, *, tracer: Tracer | None = None, wake: Callable[[], None] | None = None) -> None:
        self.name = name
        self._tracer = tracer
        self._wake = wake
        self._messages: deque[tuple[int, T]] = deque()
        self._put = 0

    def __len__(self) -> int:
        """Messages that were put and not taken."""
        return len(self._messages)

    def put(self, message: T) -> None:
        """Hand a message over, for good: the sender must not change it any more."""
        self._put += 1
        if self._tracer is not None:
            self._tracer.sent(self.name, self._put)
        self._messages.append((self._put, message))
        if self._wake is not None:
            self._wake()

    def take(self) -> T | None:
        """The oldest message; None when there is none."""
        if not self._messages:
            return None  # nobody else takes any
        number, message = self._messages.popleft()
        if self._tracer is not None:
            self._tracer.received(self.name, number)
        return message


class Bell:
    """What one thread sleeps on until another rings. Any thread rings, one listens; rung twice before it is heard is
    rung once.
    """

    __slots__ = ("_quiet",)

    def __init__(self) -> None:
        # Locked while nobody has rung. Not a SimpleQueue: whose `get` with a timeout of microseconds now and then
        # blocks for ever.
        self._quiet = threading.Lock()
        self._quiet.acquire()

    def ring(self) -> None:
        """Wake who listens, or have it not fall asleep the next time. Never blocks."""
        try:  # noqa: SIM105 - contextlib.suppress takes longer, and this is the engine thread's time
            self._quiet.release()
        except RuntimeError:
            pass  # somebody else has just done so

    @property
    def rung(self) -> bool:
        """Whether somebody has rung and nobody has heard it."""
        return not self._quiet.locked()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until somebody has rung since it was last heard, and hear it; False when `timeout_s`, not negative,
        passed first.
        """
        return self._quiet.acquire(timeout=-1 if timeout_s is None else timeout_s)


class Mark:
    """A number that only grows, written by one thread and read by another: of many messages that say "so far" only the
    last matters.
    """

    def __init__(self, name: str, *, tracer: Tracer | None = None, wake: Callable[[], None] = lambda: None) -> None:
        """`wake` is called after the number was raised, by the thread that raised it."""
        self.name = name
        self._tracer = tracer
        self._wake = wake
        self._raised = self._read = 0

    def raise_to(self, number: int) -> None:
        """Say that it is so far."""
        if number > self._raised:
            if self._tracer is not None:
                self._tracer.sent(self.name, number)
            self._raised = number
            self._wake()

    def read(self) -> int:
        """How far it is."""
        number = self._raised
        if number != self._read:
            self._read = number
            if self._tracer is not None:
                self._tracer.received(self.name, number)
        return number
