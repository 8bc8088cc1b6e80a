"""Clients that read their reply slowly or not at all. Real sockets with small buffers; the reply is longer than any
buffer.
"""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from proof.fake_backend import FakeBackend, Script
from sidestream.config import SamplingParams
from sidestream.server import connections
from sidestream.types import CachedTokens, Delta

from .serving import ASK_LONG, LONG, WAIT_S, Served, send, serving, warned

IDLE = threading.Event()
"""Waits of a slow client; nothing sets it."""


class Endless(FakeBackend):
    """Streams to the prompt "long" for ever, and counts how much it made."""

    made = 0

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, **named: Any
    ) -> AsyncGenerator[Delta, None]:
        if self.tokenizer.decode(prompt_ids) != "long":
            async for delta in super().generate(prompt_ids, params, **named):
                yield delta
            return
        try:
            while True:
                self.made += 1 << 16
                yield Delta(0, "x" * (1 << 16), (1,), (), None, 4, CachedTokens())
                await asyncio.sleep(0)
        finally:
            with self._changed:
                self.aborted.append(named["request_name"])
                self._changed.notify_all()


def _ask(served: Served, **fields: Any) -> socket.socket:
    return send(served, ASK_LONG | fields, "/v1/completions")


def test_a_client_that_stops_reading_is_disconnected_and_slows_no_other(caplog: pytest.LogCaptureFixture) -> None:
    backend = Endless()
    with serving(backend, stall_timeout_s=0.5) as served, _ask(served) as first, _ask(served) as second:
        assert first.recv(12) == second.recv(12) == b"HTTP/1.1 200"
        assert served.text(prompt="short").json()["choices"][0]["text"] == "Hello, world"
        backend.wait_until(lambda fake: len(fake.aborted) == 2)
        assert backend.made < 64 << 20  # what two pairs of socket buffers hold, and no more
    assert served.refused("stall_timeout") == 2
    (line,) = warned(caplog)
    assert re.fullmatch(
        r"cut the connection of 127\.0\.0\.1:\d+: it took no byte of its reply for 0\.5 s \(stall_timeout\)", line
    )


def test_a_client_that_stops_reading_a_unix_socket_is_disconnected(tmp_path: Path) -> None:
    backend = Endless()
    with serving(backend, uds=str(tmp_path / "s"), stall_timeout_s=0.3) as served, _ask(served):
        backend.wait_until(lambda fake: len(fake.aborted) == 1)
    assert served.refused("stall_timeout") == 1


def test_a_client_that_stops_reading_a_whole_reply_is_disconnected() -> None:
    with serving(FakeBackend(LONG), stall_timeout_s=0.3) as served, _ask(served, stream=False) as slow:
        assert slow.recv(12) == b"HTTP/1.1 200"
        _wait_for(served, 1)


def test_a_stalled_client_is_disconnected_even_without_a_transport_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below its high-water mark a transport does not ask for a pause; here it never does."""
    monkeypatch.setattr(connections._LimitedProtocol, "pause_writing", H11Protocol.pause_writing)
    with serving(FakeBackend(LONG), stall_timeout_s=0.3) as served, _ask(served, stream=False) as slow:
        assert slow.recv(12) == b"HTTP/1.1 200"
        _wait_for(served, 1)


def test_a_client_that_reads_slowly_gets_its_whole_reply() -> None:
    """Slower than the stall timeout in all, but never idle for so long."""
    with serving(FakeBackend(LONG), stall_timeout_s=0.4) as served, _ask(served) as slow:
        received, size = b"", 0
        while piece := slow.recv(1 << 17):
            received = received[-100:] + piece
            size += len(piece)
            slow.settimeout(WAIT_S)
            IDLE.wait(0.01)
        assert b"[DONE]" in received
        assert size > len(LONG.text)
    assert served.refused("stall_timeout") == 0


def test_a_request_that_computes_longer_than_the_stall_timeout_is_answered() -> None:
    with serving(FakeBackend(Script(hold_after=2)), stall_timeout_s=0.1) as served:
        stream = served.openai.completions.create(model="fake", prompt="hi", stream=True)
        served.backend.wait_until(lambda fake: len(fake.held) == 1)
        IDLE.wait(0.3)
        served.backend.release()
        assert "".join(chunk.choices[0].text for chunk in stream) == "Hello, world"
    assert served.refused("stall_timeout") == 0


def _wait_for(served: Served, count: int) -> None:
    for _ in range(int(WAIT_S * 100)):
        if served.refused("stall_timeout") == count:
            return
        IDLE.wait(0.01)
    raise AssertionError("it is not cut")
