"""Queue of messages from other threads to the engine thread, in order of arrival."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from sidestream_kv.device.channel import Bell

Message = Callable[[], None]


class Inbox:
    """A queue of calls. Any thread puts messages in; only the engine thread takes them, and sleeps on `bell` when it
    has nothing to do.

    A message marked `anytime` may also run while the engine thread waits for a step in flight. Other messages run only
    between two steps. No message overtakes an earlier one.
    """

    def __init__(self) -> None:
        self.bell = Bell()
        self._messages: deque[tuple[Message, bool]] = deque()

    def put(self, message: Message, *, anytime: bool = False) -> None:
        """Queue a message for the engine thread, and wake the thread if it sleeps. Never blocks."""
        self._messages.append((message, anytime))
        self.bell.ring()

    def take(self, *, anytime: bool = False) -> Message | None:
        """The oldest message. None if there is none or, with `anytime`, if the oldest message is not marked
        `anytime`.
        """
        messages = self._messages
        if not messages or (anytime and not messages[0][1]):
            return None  # no other thread takes messages, so the result of this check stays valid until the pop below
        return messages.popleft()[0]

    @property
    def is_empty(self) -> bool:
        """Whether there is no message."""
        return not self._messages
