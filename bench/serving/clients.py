"""Processes that send requests to a server over keep-alive connections, and record the arrival time of each received
piece.

During a run, the clients only store the received bytes and parse them later, because common HTTP clients need more time
to parse a chunk than the server needs to send it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Self
from urllib.parse import urlsplit

from bench.serving.answers import Answer, answer_of
from bench.serving.reply import Reply
from bench.serving.workload import NEARLY, Workload
from sidestream.errors import SidestreamError

_PATIENCE_S = 300.0
_ALONE = 32  # number of clients that one client process can run without becoming the bottleneck


@dataclass(frozen=True, slots=True)
class Target:
    """A running server and the name of its model."""

    host: str
    port: int
    model: str

    @classmethod
    def at(cls, url: str, model: str) -> Target:
        """The target at `url`. Raises SidestreamError unless `url` is a plain http URL."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise SidestreamError(f"{url!r} is no http URL: give a URL such as http://127.0.0.1:8000")
        return cls(parts.hostname, parts.port or 80, model)

    def request(self, fields: dict[str, Any]) -> bytes:
        """The bytes of a POST request to /v1/completions."""
        body = json.dumps({"model": self.model, **fields}, separators=(",", ":")).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def completion(self, prompt: Sequence[int], output_tokens: int, **more: Any) -> bytes:
        """The bytes of a request for a streamed, greedy completion of `output_tokens` tokens."""
        return self.request(
            {
                "prompt": list(prompt),
                "max_tokens": output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                **more,
            }
        )


class Clients:
    """The client processes: as many as `most` clients need, so that the processes are not the bottleneck. A context
    manager.
    """

    def __init__(self, target: Target, *, most: int) -> None:
        count = 1 if most <= _ALONE else max(1, min(most // _ALONE, len(os.sched_getaffinity(0)) // 4))
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve_jobs, args=(theirs, target), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(
        self,
        load: Workload,
        *,
        on_begun: Callable[[], None] = lambda: None,
        on_nearly: Callable[[], None] = lambda: None,
    ) -> tuple[Answer, ...]:
        """Run all clients and wait for all answers. Raises SidestreamError if an answer is invalid.

        on_begun    called when every client's first answer has begun, if the workload is watched
        on_nearly   called when the first answer has nearly ended, if the workload is watched
        """
        count = len(self._pipes)
        busy = [pipe for number, pipe in enumerate(self._pipes) if number < load.clients]
        for number, pipe in enumerate(busy):
            pipe.send((load, range(number, load.clients, count)))
        for pipe in busy:
            self._receive(pipe, "ready")
        start_ns = time.perf_counter_ns()
        for pipe in busy:
            pipe.send(start_ns)
        answers: list[Answer] = []
        begun, nearly, waiting = 0, False, set(busy)
        while waiting:
            for told in wait(list(waiting)):
                assert isinstance(told, Connection)
                kind, value = self._receive(told)
                if kind == "begun":
                    begun += 1
                    if begun == len(busy):
                        on_begun()
                elif kind == "nearly" and not nearly:
                    nearly = True
                    on_nearly()
                elif kind == "answers":
                    answers += value
                    waiting.discard(told)
        return tuple(answers)

    def _receive(self, pipe: Connection, expected: str | None = None) -> tuple[str, Any]:
        try:
            kind, value = pipe.recv()
        except EOFError:
            raise SidestreamError("a client process of the benchmark died") from None
        if kind == "failed":
            raise SidestreamError(value)
        assert expected in (None, kind)
        return kind, value

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.terminate()
            process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def allow_open_files() -> None:
    """Raise the limit of open files: each connection needs an open file, and the usual limit of a shell is 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _serve_jobs(pipe: Connection, target: Target) -> None:
    """Main function of a client process: runs one job after another until the pipe is closed."""
    allow_open_files()
    while True:
        try:
            load, clients = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("answers", asyncio.run(_answers(pipe, target, load, clients))))
        except (SidestreamError, OSError) as error:
            pipe.send(("failed", str(error)))
        except EOFError:
            return


async def _answers(pipe: Connection, target: Target, load: Workload, clients: Sequence[int]) -> list[Answer]:
    return await _Run(pipe, target, load, clients).answers()


class _Run:
    """One run of this process's clients, from their connections to their last answers. Runs on one event loop."""

    def __init__(self, pipe: Connection, target: Target, load: Workload, clients: Sequence[int]) -> None:
        self._pipe = pipe
        self._target = target
        self.load = load
        self.nearly_at = int(load.output_tokens * NEARLY)
        self._ended = asyncio.get_running_loop().create_future()
        self._clients = [_Client(self, number) for number in clients]
        self._left = self._silent = len(self._clients)
        self._nearly = False
        self.num_arrivals = 0

    async def answers(self) -> list[Answer]:
        """Connect all clients (with Poisson arrivals, each when it is due), wait until all processes are ready, and run
        the requests.
        """
        loop = asyncio.get_running_loop()
        for client in self._clients:
            client.prepare(self._target)
            if self.load.rate is None:
                await client.connect(self._target)
        arrivals_s = self.load.arrivals_s()
        arrivals: list[asyncio.Task[None]] = []  # the loop itself keeps no reference to a task
        gc.collect()
        gc.disable()
        try:
            self._pipe.send(("ready", None))
            start_ns = self._pipe.recv()
            for client in self._clients:
                if self.load.rate is None:
                    client.ask()
                else:
                    due_ns = start_ns + int(1e9 * arrivals_s[client.number])
                    arrivals.append(loop.create_task(client.arrive(self._target, due_ns)))
            await self._all_ended()
        finally:
            gc.enable()
            for arrival in arrivals:
                arrival.cancel()
            for client in self._clients:
                client.close()
        return [answer for client in self._clients for answer in client.answers()]

    async def _all_ended(self) -> None:
        before = -1
        while not self._ended.done():
            if before == self.num_arrivals:
                raise SidestreamError(
                    f"the server sent nothing for {_PATIENCE_S:g} s, and {self._left} clients wait for their answers"
                )
            before = self.num_arrivals
            await asyncio.wait((self._ended,), timeout=_PATIENCE_S)
        self._ended.result()

    def begun(self) -> None:
        """Called when a client's first answer has begun."""
        self._silent -= 1
        if not self._silent:
            self._pipe.send(("begun", None))

    def nearly(self) -> None:
        """Called when an answer has nearly ended."""
        if not self._nearly:
            self._nearly = True
            self._pipe.send(("nearly", None))

    def ended(self) -> None:
        """Called when a client has received all its answers."""
        self._left -= 1
        if not self._left and not self._ended.done():
            self._ended.set_result(None)

    def failed(self, error: SidestreamError) -> None:
        """Called when a client cannot continue: the run has failed."""
        if not self._ended.done():
            self._ended.set_exception(error)


class _Client(asyncio.Protocol):
    """One connection: sends a request, records the reply's bytes, and sends the next request when the reply is
    complete.
    """

    def __init__(self, run: _Run, number: int) -> None:
        self._run = run
        self.number = number
        self._requests: list[bytes] = []
        self._sent: list[int] = []
        self._replies: list[Reply] = []
        self._pieces = 0  # pieces of the current reply; counted only if the workload is watched
        self._has_all = False
        self._transport: asyncio.Transport | None = None

    def prepare(self, target: Target) -> None:
        """Encode all requests, before the run begins."""
        load = self._run.load
        prompts = (load.prompt(self.number, number) for number in range(load.rounds))
        self._requests = [target.completion(prompt, load.output_tokens) for prompt in prompts]

    async def connect(self, target: Target) -> None:
        """Open the connection."""
        await asyncio.get_running_loop().create_connection(lambda: self, target.host, target.port)

    async def arrive(self, target: Target, due_ns: int) -> None:
        """Connect and send the request at `due_ns`. An idle connection would be closed by the server meanwhile."""
        await asyncio.sleep((due_ns - time.perf_counter_ns()) / 1e9)
        try:
            await self.connect(target)
        except OSError as error:
            self._run.failed(SidestreamError(f"the server accepts no connection: {error}"))
        else:
            self.ask(due_ns)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def ask(self, due_ns: int | None = None) -> None:
        """Send the next request. Its times count from `due_ns`, so that a late client does not hide a late answer."""
        assert self._transport is not None
        self._pieces = 0
        self._replies.append(Reply())
        self._sent.append(time.perf_counter_ns() if due_ns is None else due_ns)
        self._transport.write(self._requests[len(self._sent) - 1])

    def data_received(self, data: bytes) -> None:
        """Record the bytes with their arrival time."""
        now_ns = time.perf_counter_ns()
        run = self._run
        run.num_arrivals += 1
        try:
            complete = self._replies[-1].take(data, now_ns)
        except SidestreamError as error:
            run.failed(error)
            return
        if run.load.watched:
            self._watch(data, complete)
        if complete:
            reply = self._replies[-1]
            if reply.status != 200:
                run.failed(
                    SidestreamError(f"the server answered a request with status {reply.status}: {reply.body()[:500]!r}")
                )
            elif len(self._replies) < len(self._requests):
                self.ask()
            else:
                self._has_all = True
                run.ended()

    def _watch(self, data: bytes, complete: bool) -> None:
        before = self._pieces
        self._pieces += data.count(b"data:")
        if not before and self._pieces and len(self._replies) == 1:
            self._run.begun()
        if complete or self._pieces >= self._run.nearly_at:
            self._run.nearly()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the run if the client has not received all its answers. A server may close an idle connection, but not
        during a reply.
        """
        if self._has_all:
            return
        self._run.failed(
            SidestreamError(f"the server closed a connection before the answer was complete ({exc or 'end of file'})")
        )

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.abort()

    def answers(self) -> list[Answer]:
        """Parse the replies. Raises SidestreamError for an invalid reply."""
        tokens = self._run.load.output_tokens
        return [
            answer_of(reply, client=self.number, number=number, sent_ns=sent_ns, tokens=tokens)
            for number, (reply, sent_ns) in enumerate(zip(self._replies, self._sent, strict=True))
        ]
