"""Cancels a request's task when its client disconnects or the server stops.

Used on the event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from starlette.types import Scope

from sidestream.errors import EngineStopped
from sidestream.server.errors import ClientGone

_DISCONNECT = "sidestream.disconnect"


class CallbackEvent:
    """An event that calls its callbacks when it is set. It can be set only once."""

    def __init__(self) -> None:
        self._is_set = False
        self._callbacks: dict[Callable[[], None], None] = {}

    def is_set(self) -> bool:
        """Whether `set` was called."""
        return self._is_set

    def set(self) -> None:
        """Call the callbacks. Idempotent."""
        self._is_set = True
        callbacks, self._callbacks = self._callbacks, {}
        for callback in callbacks:
            callback()

    def add(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the event is set; at once if it is set already."""
        if self._is_set:
            callback()
        else:
            self._callbacks[callback] = None

    def discard(self, callback: Callable[[], None]) -> None:
        """Do not call `callback` any more."""
        self._callbacks.pop(callback, None)


def set_disconnect_event(scope: Scope, disconnected: CallbackEvent) -> None:
    """Put the event `disconnected` into a request's scope. The connection sets the event when it ends."""
    scope[_DISCONNECT] = disconnected


class CancelOnDisconnect:
    """An asynchronous context manager that cancels the code inside it when the client disconnects or the server stops.
    It then raises ClientGone or EngineStopped.

    Enter it only after the HTTP request was read completely.
    """

    def __init__(self, scope: Scope, stopping: CallbackEvent) -> None:
        # Under another ASGI server, the scope has no such event, and disconnects are not noticed.
        self._disconnected: CallbackEvent = scope.get(_DISCONNECT) or CallbackEvent()
        self._stopping = stopping
        self._reason: Exception | None = None

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self._disconnected.add(self._on_disconnect)
        self._stopping.add(self._on_stop)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self._disconnected.discard(self._on_disconnect)
        self._stopping.discard(self._on_stop)
        if self._reason is not None and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise self._reason from None

    def _on_disconnect(self) -> None:
        self._cancel(ClientGone())

    def _on_stop(self) -> None:
        self._cancel(EngineStopped("the server is shutting down: try again later"))

    def _cancel(self, reason: Exception) -> None:
        if self._reason is None:
            self._reason = reason
            self._task.cancel()
