"""Ends the work for a request when its client leaves or the server stops, without a task that waits for either. Event
loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from starlette.types import Scope

from sidestream.errors import EngineStopped
from sidestream.server.errors import ClientGone

_CONNECTION = "sidestream.connection"


class Signal:
    """Happens once, and then calls everything that was to hear of it."""

    def __init__(self) -> None:
        self._happened = False
        self._listeners: dict[Callable[[], None], None] = {}

    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._happened

    def set(self) -> None:
        """Make it happen. Idempotent."""
        self._happened = True
        listeners, self._listeners = self._listeners, {}
        for listener in listeners:
            listener()

    def add(self, listener: Callable[[], None]) -> None:
        """Have `listener` called when it happens; at once if it has."""
        if self._happened:
            listener()
        else:
            self._listeners[listener] = None

    def discard(self, listener: Callable[[], None]) -> None:
        """Do not call `listener` any more."""
        self._listeners.pop(listener, None)


def say_who_leaves(scope: Scope, gone: Signal) -> None:
    """Put into a request's scope the signal that its client is gone."""
    scope[_CONNECTION] = gone


class Interruption:
    """An asynchronous context: what is awaited inside is cancelled when the client leaves (ClientGone) or the server
    stops (EngineStopped).

    The request's body must have been read.
    """

    def __init__(self, scope: Scope, stopping: Signal) -> None:
        self._gone: Signal = scope.get(_CONNECTION) or Signal()  # another server's connections do not tell
        self._stopping = stopping
        self._reason: Exception | None = None

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self._gone.add(self._leave)
        self._stopping.add(self._stop)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gone.discard(self._leave)
        self._stopping.discard(self._stop)
        if self._reason is not None and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise self._reason from None

    def _leave(self) -> None:
        self._interrupt(ClientGone())

    def _stop(self) -> None:
        self._interrupt(EngineStopped("the server is shutting down: try again later"))

    def _interrupt(self, reason: Exception) -> None:
        if self._reason is None:
            self._reason = reason
            self._task.cancel()
