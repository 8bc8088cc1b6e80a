"""Messages from one thread of the host to another. The witness is told, because they order what the two threads do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from sidestream.types import Witness

T = TypeVar("T")


class Channel(Generic[T]):
    """A queue with one thread at each end; neither ever blocks.

    wake   called after each message was put, by the thread that put it; None: nobody need be woken
    """

    def __init__(self, name: str, *, witness: Witness | None = None, wake: Callable[[], None] | None = None) -> None:
        self.name = name
        self._witness = witness
        self._wake = wake
        self._messages: deque[tuple[int, T]] = deque()
        self._put = 0

    def __len__(self) -> int:
        """Messages that were put and not taken."""
        return len(self._messages)

    def put(self, message: T) -> None:
        """Hand a message over, for good: the sender must not change it any more."""
        self._put += 1
        if self._witness is not None:
            self._witness.sent(self.name, self._put)
        self._messages.append((self._put, message))
        if self._wake is not None:
            self._wake()

    def take(self) -> T | None:
        """The oldest message; None when there is none."""
        if not self._messages:
            return None  # nobody else takes any
        number, message = self._messages.popleft()
        if self._witness is not None:
            self._witness.received(self.name, number)
        return message


class Mark:
    """A number that only grows, written by one thread and read by another: of many messages that say "so far" only the last matters."""

    def __init__(self, name: str, *, witness: Witness | None = None, wake: Callable[[], None] = lambda: None) -> None:
        """`wake` is called after the number was raised, by the thread that raised it."""
        self.name = name
        self._witness = witness
        self._wake = wake
        self._raised = self._read = 0

    def raise_to(self, number: int) -> None:
        """Say that it is so far."""
        if number > self._raised:
            if self._witness is not None:
                self._witness.sent(self.name, number)
            self._raised = number
            self._wake()

    def read(self) -> int:
        """How far it is."""
        number = self._raised
        if number != self._read:
            self._read = number
            if self._witness is not None:
                self._witness.received(self.name, number)
        return number
