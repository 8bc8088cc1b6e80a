"""Runs one call on the backend: all its prompts at once, for as long as the client is there and the server may go on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.types import Receive

from sidestream.errors import EngineStopped, InvariantError
from sidestream.server.backend import Backend
from sidestream.server.errors import ClientGone
from sidestream.server.fields import Call
from sidestream.types import Delta

T = TypeVar("T")
Emit = Callable[[int, Delta], Awaitable[None]]


class GenerationFailed(Exception):
    """The engine gave up on this request; the message is for the log."""


async def generate_all(backend: Backend, call: Call, name: str, emit: Emit) -> None:
    """Await `emit(choice, delta)` for every delta of every prompt until all samples have finished.

    Cancelling it, or a failure of one prompt or of `emit`, aborts all of them. Raises the first failure.
    """

    async def one(number: int, prompt: tuple[int, ...], request_name: str) -> None:
        running = set(range(call.params.n))
        running_deltas = backend.generate(
            prompt, call.params, priority=call.priority, request_name=request_name, cache_salt=call.cache_salt
        )
        async with aclosing(running_deltas) as deltas:
            async for delta in deltas:
                _raise_if_failed(delta)
                await emit(number * call.params.n + delta.index, delta)
                if delta.finish_reason is not None:
                    running.discard(delta.index)
        if running:
            raise InvariantError(f"{request_name} ended before its samples {sorted(running)} did")

    names = [name] if len(call.prompts) == 1 else [f"{name}.{number}" for number in range(len(call.prompts))]
    try:
        async with asyncio.TaskGroup() as group:
            for number, prompt in enumerate(call.prompts):
                group.create_task(one(number, prompt, names[number]))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


def _raise_if_failed(delta: Delta) -> None:
    if delta.finish_reason == "error":
        raise GenerationFailed(delta.error or "the engine gave no reason")
    if delta.finish_reason == "abort":
        raise EngineStopped("the server stopped this request before it was complete: try again later")


async def while_connected(work: Coroutine[Any, Any, T], receive: Receive, stopping: asyncio.Event) -> T:
    """The result of `work`. When the client leaves or the server stops first, cancels it and waits for its end.

    Raises ClientGone or EngineStopped then. The request's body must have been read, so that `receive` tells nothing but the leave.
    """
    worker = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnect(receive))
    stopped = asyncio.create_task(stopping.wait())
    tasks: tuple[asyncio.Task[Any], ...] = (worker, gone, stopped)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        if gone.done():
            raise ClientGone
        raise EngineStopped("the server is shutting down: try again later")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
