"""What the world tells the engine thread, in the order in which it was said."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from sidestream.device.channel import Bell

Message = Callable[[], None]


class Inbox:
    """Messages, to be run by the engine thread. Any thread puts; the engine thread takes, and listens to `bell` when it
    has nothing to do.

    anytime   of a message: it may run while a step is awaited and another one is behind that. All may run between two
              steps, and nothing overtakes one that must
    """

    def __init__(self) -> None:
        self.bell = Bell()
        self._messages: deque[tuple[Message, bool]] = deque()

    def put(self, message: Message, *, anytime: bool = False) -> None:
        """Have the engine thread run it, soon if it sleeps. Never blocks."""
        self._messages.append((message, anytime))
        self.bell.ring()

    def take(self, *, anytime: bool = False) -> Message | None:
        """The oldest message; None when there is none, or, asked for one for `anytime`, when that is none."""
        messages = self._messages
        if not messages or (anytime and not messages[0][1]):
            return None  # nobody else takes any
        return messages.popleft()[0]
