"""Runs the batches of a `BatchStore`, one after the other, through the server's application, behind all other requests.

Of all API processes of a server, the one that locks the directory runs the batches; when it ends, in whatever way,
another one goes on. A batch that was begun goes on with the requests that have no answer. Used on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from sidestream.client.front_end import FrontEnd
from sidestream.errors import ConfigError, SidestreamError
from sidestream.server.api_keys import MOST_PRIORITY, ApiKey
from sidestream.server.batch_files import Answers, Batch, Request, keys_of
from sidestream.server.batch_store import ACTIVE, MOST_REQUESTS, BatchStore, Json, lines_of
from sidestream.server.middleware import INTERNAL_GRANT
from sidestream.server.rate_limits import Grant

log = logging.getLogger("sidestream.server")

_LOOK_S = 1.0
"""Interval at which new and cancelled batches are noticed, and counts are written."""
_AGAIN_S = 30.0  # after a failure of the file system
_PAUSE_S = 1.0  # before a refused request is sent again
_BUSY = (429, 503)
_MOST_AT_ONCE = 64


class BatchRunner:
    """Runs batches from `start` to `stop`.

    app         the server's application
    key_named   the key of the file of keys with this name; None: there is none
    """

    def __init__(
        self, store: BatchStore, backend: FrontEnd, app: ASGIApp, key_named: Callable[[str], ApiKey | None]
    ) -> None:
        self._store, self._backend, self._app, self._key_named = store, backend, app, key_named
        self._task: asyncio.Task[None] | None = None
        self._idle_since_s = 0.0  # last change of the directory when no batch was left to run

    def start(self) -> None:
        """Begin, in a task of the running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        """Abort the requests that run. They have no answer, so a later start sends them again."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        file = os.open(self._store.directory / "runner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while True:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                await asyncio.sleep(_LOOK_S)
            while True:
                await asyncio.sleep(await self._run_oldest())
        finally:
            os.close(file)

    async def _run_oldest(self) -> float:
        """Run the oldest batch that has not ended. Returns the seconds until there may be another one."""
        batch: Json | None = None
        try:
            changed_s = (self._store.directory / "batches").stat().st_mtime
            if changed_s == self._idle_since_s:
                return _LOOK_S
            found = await asyncio.to_thread(self._store.all, "batches")
            batch = next((one for one in reversed(found) if one["status"] in ACTIVE), None)
            if batch is None:
                # not at once: a change in the same tick of the file system's clock has the same time
                self._idle_since_s = changed_s if time.time() > changed_s + _LOOK_S else 0.0
                return _LOOK_S
            await self._run_one(batch)
            return 0
        except (OSError, SidestreamError) as fault:
            log.error("batch %s waits %g s: %s", batch and batch["id"], _AGAIN_S, fault)
            return _AGAIN_S

    async def _run_one(self, batch: Json) -> None:
        name, store = batch["id"], self._store
        source, path = store.path("files", batch["input_file_id"]), store.path("batches", name, ".answers")
        try:
            keys = await asyncio.to_thread(keys_of, source)
            if len(keys) > MOST_REQUESTS:
                raise ConfigError(f"the file has {len(keys)} requests: give at most {MOST_REQUESTS}")
            if (key := self._key_of(batch["owner"])) is None:
                raise ConfigError(f"the key {batch['owner']!r} does not exist any more")
        except ConfigError as fault:
            message = str(fault).replace(str(source), "the file")
            batch["errors"] = {"object": "list", "data": [{"code": "invalid_file", "message": message}]}
            await self._save(batch, "failed")
            return
        batch["request_counts"]["total"] = len(keys)
        with Answers(path) as answers:
            await asyncio.to_thread(answers.remove_answered, keys)
            if batch["status"] != "in_progress":
                await self._save(batch, "in_progress")
            ending = await self._ask(batch, Batch(source, keys, answers), key)
            answers.sync()
        if ending != "failed":
            await self._save(batch, "finalizing")
        await asyncio.to_thread(_split, store, batch)
        await self._save(batch, ending)
        path.unlink(missing_ok=True)

    def _key_of(self, owner: str) -> ApiKey | None:
        """The rights of the batch's requests: the salt of their owner, and the last place in the queue."""
        key = ApiKey("-", key="-") if not owner else self._key_named(owner)
        changes = {"priority": MOST_PRIORITY, "most_urgent_priority": None, "deadline_s": None}
        return key and msgspec.structs.replace(key, **changes)

    async def _ask(self, batch: Json, asked: Batch, key: ApiKey) -> str:
        """Ask until the batch ends; the status with which it does."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await self._app({**scope, INTERNAL_GRANT: Grant(None, key, free=True)}, receive, send)

        requests = asked.requests()

        async def work() -> None:
            for request in requests:  # the workers share it
                await self._answer(client, batch["endpoint"], request, asked.answers)

        at_once = max(1, min(_MOST_AT_ONCE, self._backend.room // 4))
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://batch", timeout=None
        ) as client:
            workers = {asyncio.create_task(work()) for _ in range(at_once)}
            try:
                while True:
                    ended, left = await asyncio.wait(workers, timeout=_LOOK_S, return_when=asyncio.FIRST_EXCEPTION)
                    for worker in ended:
                        worker.result()  # raises its failure
                    counts = {"completed": asked.answers.count - asked.answers.faults, "failed": asked.answers.faults}
                    batch["request_counts"] |= counts
                    if not left:
                        return "completed"
                    await self._save(batch, "in_progress")
                    if ending := await asyncio.to_thread(self._early_end, batch):
                        return ending
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    def _early_end(self, batch: Json) -> str | None:
        if self._store.is_cancelled(batch["id"]):
            return "cancelled"
        if time.time() > batch["expires_at"]:
            return "expired"
        if self._store.size() > self._store.most_bytes:
            message = f"the answers fill max_batch_directory_bytes, {self._store.most_bytes}"
            batch["errors"] = {"object": "list", "data": [{"code": "batch_directory_full", "message": message}]}
            return "failed"
        return None

    async def _answer(self, client: httpx.AsyncClient, endpoint: str, request: Request, answers: Answers) -> None:
        error = request.fault()
        if error is None and request.url != endpoint:
            error = "invalid_url", f"url is {request.url!r:.100}, the batch is for {endpoint}"
        if error is not None:
            answers.append(request.custom_id, error=error)
            return
        while True:
            headers = {"Content-Type": "application/json"}
            reply = await client.post(request.url, content=bytes(request.body), headers=headers)
            if reply.status_code not in _BUSY:  # of an engine or a queue that takes requests later
                answers.append_reply(request.custom_id, reply)
                return
            await asyncio.sleep(_PAUSE_S)

    async def _save(self, batch: Json, status: str) -> None:
        """Write the object with this status, and the time at which it began."""
        if batch["status"] != status:
            log.info("batch %s: %s", batch["id"], status)
            batch |= {"status": status, f"{status}_at": int(time.time())}
        await asyncio.to_thread(self._store.put, "batches", batch)


def _split(store: BatchStore, batch: Json) -> None:
    """Make the files of answers and errors. Their ids follow from the batch's, so a second try replaces them."""
    digits = batch["id"].removeprefix("batch_")
    names = {"output_file_id": f"file-0{digits[1:]}", "error_file_id": f"file-1{digits[1:]}"}
    counts = dict.fromkeys(names, 0)
    with contextlib.ExitStack() as stack:
        files = {field: stack.enter_context(store.path("files", name).open("wb")) for field, name in names.items()}
        for line in lines_of(store.path("batches", batch["id"], ".answers")):
            response = json.loads(line)["response"]
            field = "output_file_id" if response and response["status_code"] < 400 else "error_file_id"
            files[field].write(line)
            counts[field] += 1
    batch["request_counts"] |= {"completed": counts["output_file_id"], "failed": counts["error_file_id"]}
    for field, name in names.items():
        if counts[field]:
            filename = f"{batch['id']}_{field.removesuffix('_file_id')}.jsonl"
            batch[field] = store.add_file(name, filename, "batch_output", batch["owner"])["id"]
        else:
            Path(store.path("files", name)).unlink()
