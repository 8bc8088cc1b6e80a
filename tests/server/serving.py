"""Real servers over loopback HTTP, around the fake backend; clients that never retry and never wait long."""

from __future__ import annotations

import json
import logging
import queue
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from llguidance import LLMatcher, LLTokenizer

from proof.fake_backend import FakeBackend, Script
from sidestream.config import StructuredOutputs
from sidestream.grammar.compiler import source_of
from sidestream.server import RunningServer, ServerOptions, serve

WAIT_S = 20.0

# beyond what both ends' socket buffers can swallow
LONG = Script("x" * (16 << 20), token_bytes=1 << 18)
HI = [{"role": "user", "content": "hi"}]
ASK_LONG = {"model": "fake", "prompt": "long", "max_tokens": 16 << 20, "stream": True}


@dataclass(frozen=True)
class Served:
    backend: FakeBackend
    running: RunningServer
    thread: threading.Thread
    drained: queue.Queue[bool]
    http: httpx.Client
    openai: openai.OpenAI

    def chat(self, **fields: Any) -> httpx.Response:
        return self.http.post(
            "/v1/chat/completions", json={"model": "fake", "messages": [{"role": "user", "content": "hi"}]} | fields
        )

    def text(self, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"model": "fake", "prompt": "hi"} | fields)

    def post_raw(self, body: bytes, path: str = "/v1/chat/completions") -> httpx.Response:
        return self.http.post(path, content=body, headers={"content-type": "application/json"})

    def connect(self) -> socket.socket:
        """A connection without TLS."""
        connection = socket.socket(socket.AF_INET if self.running.uds is None else socket.AF_UNIX)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)  # else the kernel grows it to many MiB
        connection.settimeout(WAIT_S)
        try:
            connection.connect(self.running.uds or self.address)
        except OSError:
            connection.close()
            raise
        return connection

    def refused(self, reason: str) -> float:
        """How many connections were refused for this reason."""
        return self.backend.metrics.value("connections_refused_total", reason)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.running.url.partition("://")[2].split(":")
        return host, int(port)


@contextmanager
def serving(
    backend: FakeBackend | None = None, *, verify: ssl.SSLContext | None = None, **options: Any
) -> Iterator[Served]:
    """A server in a thread, on a free port or its Unix socket, until the block ends. `verify`: what its clients
    trust.
    """
    backend = backend or FakeBackend()
    chosen = ServerOptions(**({"drain_s": 5.0} | ({} if "uds" in options else {"port": 0}) | options))
    ready: queue.Queue[RunningServer | BaseException] = queue.Queue()
    drained: queue.Queue[bool] = queue.Queue()

    def run() -> None:
        try:
            drained.put(serve(backend, chosen, on_ready=ready.put))
        except BaseException as failure:
            ready.put(failure)
            raise

    thread = threading.Thread(target=run, name="server", daemon=True)
    thread.start()
    running = ready.get(timeout=WAIT_S)
    if isinstance(running, BaseException):
        raise running
    key = chosen.api_key or "none"
    transport = httpx.HTTPTransport(uds=running.uds, verify=verify or True)
    try:
        with (
            httpx.Client(
                base_url=running.url, timeout=WAIT_S, headers={"authorization": f"Bearer {key}"}, transport=transport
            ) as http,
            openai.OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0, timeout=WAIT_S) as client,
        ):
            yield Served(backend, running, thread, drained, http, client)
    finally:
        backend.release()
        running.stop()
        thread.join(WAIT_S)
        if thread.is_alive():
            running.stop()
            thread.join(WAIT_S)
            raise AssertionError("the server did not end by itself")


def head(length: int | None, *, path: str = "/v1/completions", kind: str = "application/json", more: str = "") -> bytes:
    """The head of a request with a body of `length` bytes, or of chunks."""
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\n{more}{size}\r\n\r\n".encode()


def request(fields: dict[str, object], path: str = "/v1/chat/completions") -> bytes:
    body = json.dumps(fields).encode()
    return head(len(body), path=path, more="Connection: close\r\n") + body


def send(served: Served, fields: dict[str, object], path: str = "/v1/chat/completions") -> socket.socket:
    """Send a request on a raw connection, and read nothing."""
    connection = served.connect()
    connection.sendall(request(fields, path))
    return connection


def read_to_end(connection: socket.socket) -> bytes:
    received = bytearray()
    with suppress(ConnectionResetError):
        while piece := connection.recv(1 << 20):
            received += piece
    return bytes(received)


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Messages of warnings and errors, without those of an exporter of traces that another test has left."""
    ours = [record for record in caplog.records if not record.name.startswith("opentelemetry.")]
    return [record.getMessage() for record in ours if record.levelno >= logging.WARNING]


def request_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The log's lines of requests."""
    return [record.getMessage() for record in caplog.records if " status=" in record.getMessage()]


BYTES = LLTokenizer("byte")


def accepts(wanted: StructuredOutputs, text: str) -> bool:
    """Whether the text is a complete answer of this form."""
    matcher, tokens = LLMatcher(BYTES, source_of(wanted)), BYTES.tokenize_str(text)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
