"""Runs all prompts of one API call concurrently on the backend."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from sidestream.errors import EngineStopped, InvariantError
from sidestream.server.backend import Backend
from sidestream.server.fields import Call
from sidestream.types import Delta

Emit = Callable[[int, Delta], Awaitable[None]]


class GenerationFailed(Exception):
    """The engine failed this request. The message goes to the log, not to the client."""


async def generate_all(backend: Backend, call: Call, name: str, emit: Emit) -> None:
    """Await `emit(choice, delta)` for each delta of all prompts, until all samples have finished.

    A cancellation, or a failure of one prompt or of `emit`, aborts all prompts. Raises the first failure.
    """

    async def run(number: int, prompt: tuple[int, ...], request_name: str) -> None:
        running = set(range(call.params.n))
        running_deltas = backend.generate(
            prompt,
            call.params,
            priority=call.priority,
            request_name=request_name,
            cache_salt=call.cache_salt,
            continues=call.continues,
        )
        async with aclosing(running_deltas) as deltas:
            async for delta in deltas:
                _raise_if_failed(delta)
                await emit(number * call.params.n + delta.index, delta)
                if delta.finish_reason is not None:
                    running.discard(delta.index)
        if running:
            raise InvariantError(f"{request_name} ended before its samples {sorted(running)} did")

    if len(call.prompts) == 1:  # the usual case, without an extra task
        await run(0, call.prompts[0], name)
        return
    try:
        async with asyncio.TaskGroup() as group:
            for number, prompt in enumerate(call.prompts):
                group.create_task(run(number, prompt, f"{name}.{number}"))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


def _raise_if_failed(delta: Delta) -> None:
    if delta.finish_reason == "error":
        raise GenerationFailed(delta.error or "the engine gave no reason")
    if delta.finish_reason == "abort":
        raise EngineStopped("the server stopped this request before it was complete: try again later")
