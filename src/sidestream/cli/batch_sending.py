"""Sends the requests of a batch, some at a time, and appends the replies to the file of answers.

The server's application replies in this process, above an engine's process, so each answer is the one that `sidestream
serve` gives; or another server does. Imported when `sidestream batch` runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import httpx

from sidestream.cli.loading import prepare_model, start
from sidestream.cli.options import Watching
from sidestream.cli.progress import Steps
from sidestream.config import EngineConfig
from sidestream.errors import ConfigError, ProcessFailed
from sidestream.server.app import create_app
from sidestream.server.batch_files import Answers, Batch, Request
from sidestream.server.options import ServerOptions

if TYPE_CHECKING:
    from sidestream.async_llm import AsyncLLM  # takes seconds, which `start` shows

AGAIN = "run the same command again for the unanswered requests"
_BUSY = (429, 502, 503, 504)
_PAUSES_S = (1, 2, 4, 8, 16, *[30] * 19)  # before a refused request is sent again: ten minutes together
_HEALTH_EVERY_S = 5.0
_HEALTH_TIMEOUT_S = 60.0


def ask_server(batch: Batch, url: str, api_key: str | None, at_once: int) -> None:
    """Let the server at `url` answer the requests. Raises ConfigError for a wrong URL or key, ProcessFailed if the
    server fails, and SidestreamError if the answers cannot be written.
    """
    try:
        client = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(None, connect=_HEALTH_TIMEOUT_S),  # `_watch` notices a server that hangs
            limits=httpx.Limits(max_connections=None, keepalive_expiry=2.0),  # servers close idle ones after 5 s
        )
        if client.base_url.scheme not in ("http", "https") or not client.base_url.host:
            raise httpx.InvalidURL("no scheme or no host")
        if not 0 < (port := client.base_url.port or 80) < 1 << 16:
            raise httpx.InvalidURL(f"its port is {port}, not 1 to 65535")
    except httpx.InvalidURL as fault:
        raise ConfigError(f"url is {url!r} ({fault}): give one such as http://127.0.0.1:8000") from None
    _ask(client, batch, at_once)


def ask_engine(
    batch: Batch, model: str, name: str | None, config: EngineConfig, watch: Watching, at_once: int | None
) -> None:
    """Start an engine, and let it answer the requests. Raises as `ask_server`, and errors of the start."""
    prepare_model(model)
    llm: AsyncLLM = start("async_llm.AsyncLLM", model, config=config, watch=watch)
    try:
        running = llm.room - config.max_waiting
        wanted = at_once or running + max(4, running // 8)  # a few wait, so that no slot is empty
        app = create_app(llm, options=ServerOptions(served_model_name=name))
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine", timeout=None)
        _ask(client, batch, min(llm.room, wanted))
    finally:
        with Steps() as steps:
            steps.update("storing KV, and closing the engine")
            asyncio.run(llm.close())


def _ask(client: httpx.AsyncClient, batch: Batch, at_once: int) -> None:
    answers, workers = batch.answers, min(at_once, len(batch.keys))
    total, requests = answers.count + len(batch.keys), batch.requests()
    with Steps() as steps:

        def show() -> None:
            faults = f", {answers.faults} errors" if answers.faults else ""
            steps.update("answering", answers.count, total, f"{answers.count} of {total}{faults}")

        async def work() -> None:
            for request in requests:  # the workers share it
                await _answer(client, request, answers)
                show()

        async def run() -> None:
            async with client, asyncio.TaskGroup() as group:  # the first failure ends all tasks
                watcher = group.create_task(_watch(client))
                await asyncio.wait([group.create_task(work()) for _ in range(workers)])
                watcher.cancel()

        show()
        try:
            asyncio.run(run())
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None


async def _answer(client: httpx.AsyncClient, request: Request, answers: Answers) -> None:
    """Append the answer of one request."""
    if (error := request.fault()) is not None:
        answers.append(request.custom_id, error=error)
        return
    reply = await _reply(client, request)
    answers.append_reply(request.custom_id, reply)


async def _reply(client: httpx.AsyncClient, request: Request) -> httpx.Response:
    """The reply to a request, which is sent again if the server is busy, or if the connection is lost."""
    reply, body = None, bytes(request.body)
    for pause_s in _PAUSES_S:
        with contextlib.suppress(httpx.TransportError):
            reply = await client.post(request.url, content=body, headers={"Content-Type": "application/json"})
            if reply.status_code in (401, 403):
                raise ConfigError(f"the server refuses the requests: {reply.text[:300]}; give its key with --api-key")
            if reply.status_code < 500 and reply.status_code not in _BUSY:
                return reply
        await asyncio.sleep(pause_s)
        await _check_health(client)  # the reply of a failed engine is not the request's answer
        if reply is not None and reply.status_code not in _BUSY:
            return reply
    if reply is None:
        raise ProcessFailed(f"{client.base_url} cuts the connections of requests: see its log; then {AGAIN}")
    return reply


async def _watch(client: httpx.AsyncClient) -> None:
    while True:
        await asyncio.sleep(_HEALTH_EVERY_S)
        await _check_health(client)


async def _check_health(client: httpx.AsyncClient) -> None:
    """Raise ProcessFailed unless the server is healthy."""
    try:
        reply = await client.get("/health", timeout=_HEALTH_TIMEOUT_S)
    except httpx.TransportError as fault:
        raise ProcessFailed(f"{client.base_url} does not answer: {fault!r:.300}; {AGAIN}") from fault
    if reply.status_code >= 500:
        raise ProcessFailed(f"the server has failed: {reply.text[:300]}; {AGAIN}")
