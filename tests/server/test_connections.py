"""Limits of connections, and log lines about connections that were ended. Real sockets on the loopback interface."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import queue
import resource
import socket
from collections.abc import Iterator

import openai
import pytest

from proof.fake_backend import FakeBackend, Script
from sidestream.errors import ConfigError
from sidestream.server import ServerOptions, bind, connections
from sidestream_kv.metrics import Metrics

from .serving import WAIT_S, head, read_to_end, serving

HALF_HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Half: "
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
def warnings() -> Iterator[queue.Queue[str]]:
    """Every warning that is logged while the test runs, as it comes."""
    heard: queue.Queue[str] = queue.Queue()

    class Hearing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.put(record.getMessage())

    handler = Hearing(logging.WARNING)
    logging.getLogger().addHandler(handler)
    yield heard
    logging.getLogger().removeHandler(handler)


def read_reply(connection: socket.socket) -> bytes:
    """One reply with its body, of a connection that stays open."""
    received = b""
    while not received.endswith(b"}"):
        piece = connection.recv(1 << 16)
        assert piece, received
        received += piece
    return received


def trickle(connection: socket.socket, piece: bytes) -> bytes:
    """Send a byte twenty times a second until the server ends the connection; what it said."""
    received = b""
    connection.settimeout(0.05)
    for _ in range(int(WAIT_S * 20)):
        try:
            connection.sendall(piece)
            said = connection.recv(1 << 16)
        except TimeoutError:
            continue
        except OSError:
            return received
        if not said:
            return received
        received += said
    raise AssertionError("the server holds the connection although bytes only trickle in")


def error_of(reply: bytes) -> dict[str, str]:
    answered, _, body = reply.partition(b"\r\n\r\n")
    assert b"connection: close" in answered.lower()
    error: dict[str, str] = json.loads(body)["error"]
    return error


def test_half_a_request_head_is_refused_after_the_head_timeout() -> None:
    with serving(head_timeout_s=0.2) as served, served.connect() as half:
        half.sendall(HALF_HEAD)
        reply = read_to_end(half)
        assert reply.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert error_of(reply)["message"] == "the request head did not arrive within 0.2 s: send it faster"
        assert served.refused("head_timeout") == 1


def test_a_head_sent_byte_by_byte_gets_no_more_than_the_head_timeout() -> None:
    with serving(head_timeout_s=0.3) as served, served.connect() as slow:
        slow.sendall(HALF_HEAD)
        assert trickle(slow, b"x").startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    "first", [b"", HEALTH + b"GET /he"], ids=["in the next packet", "in the packet of the request before"]
)
def test_the_head_timeout_applies_to_later_requests_of_a_connection(first: bytes) -> None:
    with serving(head_timeout_s=0.3) as served, served.connect() as kept:
        kept.sendall(first or HEALTH)
        assert read_reply(kept).startswith(b"HTTP/1.1 200")
        assert trickle(kept, b"x").startswith(b"HTTP/1.1 408")
        assert served.refused("head_timeout") == 1


def test_the_head_timeout_applies_to_the_rest_of_a_body_answered_early() -> None:
    with serving(head_timeout_s=0.3) as served, served.connect() as slow:
        slow.sendall(head(99999, kind="text/plain"))
        assert read_reply(slow).startswith(b"HTTP/1.1 415")
        assert trickle(slow, b"x") == b""
        assert served.refused("head_timeout") == 1


def test_an_unused_connection_is_closed_without_reply_or_log(warnings: queue.Queue[str]) -> None:
    with serving(head_timeout_s=0.2) as served, served.connect() as idle:
        assert read_to_end(idle) == b""
        assert served.refused("head_timeout") == 0
    assert warnings.empty()


def test_a_request_that_takes_longer_than_the_head_timeout_is_answered() -> None:
    with serving(FakeBackend(Script(hold_after=1)), head_timeout_s=0.1) as served:
        stream = served.openai.completions.create(model="fake", prompt="hi", stream=True)
        with served.connect() as idle:
            assert read_to_end(idle) == b""  # the head timeout of a later connection has passed
        served.backend.wait_until(lambda backend: bool(backend.held))
        served.backend.release()
        assert "".join(chunk.choices[0].text for chunk in stream) == "Hello, world"


def test_many_unfinished_heads_delay_no_request_and_log_one_line(warnings: queue.Queue[str]) -> None:
    with serving(head_timeout_s=0.5) as served, contextlib.ExitStack() as opened:
        halves = [opened.enter_context(served.connect()) for _ in range(50)]
        peers = ["{}:{}".format(*half.getsockname()) for half in halves]
        for half in halves:
            half.sendall(HALF_HEAD)
        assert served.chat().status_code == 200
        for half in halves:
            assert read_to_end(half).startswith(b"HTTP/1.1 408")
        assert served.refused("head_timeout") == 50
    why = ": the rest of its request did not arrive within 0.5 s"
    assert warnings.get(timeout=WAIT_S) in [f"cut the connection of {peer}{why}" for peer in peers]
    assert warnings.empty()


def test_suppressed_log_lines_are_counted_after_their_period(
    warnings: queue.Queue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_LOG_PERIOD_S", 0.01)

    async def report() -> None:
        guard = connections.ConnectionLimits(ServerOptions(max_connections=64), Metrics().inc, lambda: (200, {}))
        for number in range(3):
            guard.report("malformed", f"peer {number}")
        guard.report("limit", "peer 3")
        while warnings.qsize() < 3:
            await asyncio.sleep(0)
        guard.report("malformed", "peer 4")

    asyncio.run(asyncio.wait_for(report(), WAIT_S))
    why = "it sent no valid HTTP/1.1 request"
    assert [warnings.get() for _ in range(4)] == [
        f"cut the connection of peer 0: {why}",
        "cut the connection of peer 3: 64 connections are open (max_connections)",
        f"cut 2 more connections within 0.01 s: {why}",
        f"cut the connection of peer 4: {why}",
    ]


@pytest.mark.parametrize("line", [b"GET /health", b"GET /llm/health", b"GET /livez", b"POST /ping", b"GET /ping?x"])
def test_a_health_check_is_answered_while_unfinished_heads_use_all_connections(line: bytes) -> None:
    with serving(max_connections=2, root_path="/llm") as served, contextlib.ExitStack() as opened:
        for _ in range(2):
            opened.enter_context(served.connect()).sendall(HALF_HEAD)
        with served.connect() as refused_one:  # once it is refused, the server has accepted the others
            refused_one.sendall(HEALTH.replace(b"health", b"v1/models"))
            assert read_to_end(refused_one).startswith(b"HTTP/1.1 503 ")
        for _ in range(3):
            with served.connect() as check:
                check.sendall(line[:9])
                check.sendall(line[9:] + b" HTTP/1.1\r\nHost: x\r\n\r\n")
                reply = read_to_end(check)
                assert reply.startswith(b"HTTP/1.1 200 ") and b'"status":"ok"' in reply
        assert served.backend.metrics.snapshot().values["connections_refused_total"] == {("limit",): 1}


def test_a_connection_beyond_the_limit_is_refused_until_another_ends(warnings: queue.Queue[str]) -> None:
    with serving(max_connections=2) as served, served.connect() as one, served.connect() as two:
        for connection in (one, two):
            connection.sendall(HEALTH)
            assert read_reply(connection).startswith(b"HTTP/1.1 200")
        with pytest.raises(openai.InternalServerError, match="this server holds 2 connections already") as failure:
            served.openai.models.list()
        assert (failure.value.status_code, failure.value.code) == (503, "too_many_connections")
        assert failure.value.response.headers["retry-after"] == "1"
        assert served.refused("limit") == 1
        assert "cut the connection of 127.0.0.1:" in (line := warnings.get(timeout=WAIT_S))
        assert line.endswith(": 2 connections are open (max_connections)")
        one.sendall(HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        read_to_end(one)
        with served.connect() as another:
            another.sendall(HEALTH)
            assert read_reply(another).startswith(b"HTTP/1.1 200")


def test_the_limit_per_address_does_not_affect_other_addresses() -> None:
    with serving(max_connections_per_address=1) as served, served.connect() as held:
        held.sendall(HEALTH)
        assert read_reply(held).startswith(b"HTTP/1.1 200")
        with served.connect() as second:
            second.sendall(HEALTH.replace(b"health", b"version"))
            reply = read_to_end(second)
        assert reply.startswith(b"HTTP/1.1 503 ")
        assert error_of(reply)["message"].startswith(
            "127.0.0.1 holds 1 connections already, as many as one address may"
        )
        assert served.refused("address_limit") == 1
        with socket.create_connection(held.getpeername(), WAIT_S, source_address=("127.0.0.2", 0)) as other:
            other.sendall(HEALTH)
            assert read_reply(other).startswith(b"HTTP/1.1 200")


def test_the_number_of_refused_connections_still_open_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_LINGER_S", 3600.0)
    monkeypatch.setattr(connections, "_MOST_LINGERING", 2)
    with serving(max_connections=1) as served, contextlib.ExitStack() as opened:
        held = opened.enter_context(served.connect())
        held.sendall(HEALTH)
        assert read_reply(held).startswith(b"HTTP/1.1 200")
        silent = [opened.enter_context(served.connect()) for _ in range(3)]
        assert read_to_end(silent[2]) == b""
        for connection in silent[:2]:
            connection.sendall(HEALTH.replace(b"health", b"version"))
            assert read_to_end(connection).startswith(b"HTTP/1.1 503")


def test_invalid_http_is_refused_and_logged_with_its_peer(warnings: queue.Queue[str]) -> None:
    with serving() as served:
        for number in range(20):
            with served.connect() as wrong:
                wrong.sendall(b"\x16\x03\x01 a TLS handshake\r\n\r\n")
                reply = read_to_end(wrong)
                assert reply.startswith(b"HTTP/1.1 400 Bad Request\r\n")
                assert "no valid HTTP/1.1 request" in error_of(reply)["message"]
                if not number:
                    line = "cut the connection of {}:{}: it sent no valid HTTP/1.1 request".format(*wrong.getsockname())
        assert served.refused("malformed") == 20
        assert warnings.get(timeout=WAIT_S) == line
    assert warnings.empty()


def test_a_too_long_request_head_is_refused() -> None:
    with serving() as served, served.connect() as endless:
        endless.sendall(HALF_HEAD + b"x" * (1 << 17))
        assert read_to_end(endless)[:12] in (b"HTTP/1.1 400", b"")  # nothing: it was reset with unread bytes
        assert served.refused("malformed") == 1


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
def test_an_upgrade_header_is_ignored_and_no_library_is_suggested(protocol: str, warnings: queue.Queue[str]) -> None:
    upgrade = {"connection": "Upgrade", "upgrade": protocol, "sec-websocket-version": "13", "sec-websocket-key": "x"}
    with serving() as served:
        assert served.http.get("/v1/models", headers=upgrade).status_code == 200
        assert served.http.get("/ws", headers=upgrade).status_code == 404
    assert warnings.empty()


def test_max_connections_above_the_open_file_limit_is_refused_before_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    with pytest.raises(
        ConfigError,
        match=r"max_connections is 800, but this process may open 1024 files.*give 768 or less.*ulimit -n 1056",
    ):
        bind(ServerOptions(port=0, max_connections=800))
    assert connections.connection_limit(ServerOptions()) == 768
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert connections.connection_limit(ServerOptions()) == 2048
