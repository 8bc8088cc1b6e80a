"""Listening, draining, signals, options."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from proof.fake_backend import FakeBackend, Script
from sidestream.errors import ConfigError
from sidestream.server import RunningServer, ServerOptions, bind, serve
from sidestream.server.listen import bind_shared

from .serving import ASK_LONG, HI, LONG, WAIT_S, Served, head, read_to_end, request, send, serving, warned


def _begin_stream(served: Served) -> Any:
    """A streamed chat that has begun and that the script holds."""
    stream = served.openai.chat.completions.create(model="fake", messages=HI, stream=True)
    served.backend.wait_until(lambda fake: len(fake.held) == 1)
    return stream


def test_stop_lets_running_requests_finish_and_refuses_new_ones() -> None:
    with serving(FakeBackend(Script(hold_after=2)), drain_s=WAIT_S) as served:
        with _begin_stream(served) as stream:
            served.running.stop()
            _wait_until_refused(served)
            served.backend.release()
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Hello, world"
        assert served.drained.get(timeout=WAIT_S) is True


def test_a_request_that_outlasts_the_drain_is_aborted_with_a_reply() -> None:
    with serving(FakeBackend(Script(hold_after=2)), drain_s=0) as served:
        with served.http.stream(
            "POST", "/v1/chat/completions", json={"model": "fake", "messages": HI, "stream": True}
        ) as reply:
            served.backend.wait_until(lambda fake: len(fake.held) == 1)
            served.running.stop()
            events = reply.read().decode().split("\n\n")
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "engine_stopped"
        assert served.drained.get(timeout=WAIT_S) is False
        assert served.backend.aborted == served.backend.held


@pytest.fixture(params=["Python's own", "Python 3.12's"])
def wait_closed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How a closed listener is waited for: since Python 3.12 until its last connection ended, before not at all."""

    async def until_the_last_connection_ended(server: Any) -> None:
        if server._waiters is not None and server._active_count:
            server._waiters.append(server._loop.create_future())
            await server._waiters[-1]

    if request.param != "Python's own":
        monkeypatch.setattr(asyncio.Server, "wait_closed", until_the_last_connection_ended)


@pytest.mark.usefixtures("wait_closed")
def test_the_second_stop_ends_a_running_stream() -> None:
    """Its client does not read: it can neither be told the end nor be waited for. Half of it is more than any buffer
    takes.
    """
    script = replace(LONG, token_bytes=len(LONG.text) // 2)
    with serving(FakeBackend(script), drain_s=3600) as served, send(served, ASK_LONG, "/v1/completions") as connection:
        assert connection.recv(12) == b"HTTP/1.1 200"
        served.running.stop()
        served.running.stop()
        assert served.drained.get(timeout=WAIT_S) is False
        assert served.backend.aborted + served.backend.finished == served.backend.names, (
            "nobody goes on; one whose last piece was made has ended"
        )
        assert b"[DONE]" not in read_to_end(connection)


@pytest.mark.usefixtures("wait_closed")
def test_the_first_stop_lets_a_running_stream_finish() -> None:
    with serving(FakeBackend(LONG), drain_s=3600) as served, send(served, ASK_LONG, "/v1/completions") as connection:
        assert connection.recv(12) == b"HTTP/1.1 200"
        served.running.stop()
        _wait_until_refused(served)
        assert b"[DONE]" in read_to_end(connection)
        assert served.drained.get(timeout=WAIT_S) is True


@pytest.mark.usefixtures("wait_closed")
def test_the_second_stop_ends_the_server_at_once() -> None:
    with serving(FakeBackend(Script(hold_after=2)), drain_s=3600) as served:
        with _begin_stream(served), served.connect() as half:
            half.sendall(head(9) + b"{")
            served.running.stop()
            served.running.stop()
            assert served.drained.get(timeout=WAIT_S) is False
        assert served.backend.aborted == served.backend.held


def test_a_server_without_requests_stops_at_once() -> None:
    with serving(drain_s=3600) as served:
        served.running.stop()
        assert served.drained.get(timeout=WAIT_S) is True


_CHILD = """
import sys
from sidestream.server import RunningServer, ServerOptions, bind, serve
from sidestream.server.listen import bind_shared
from proof.fake_backend import FakeBackend, Script
backend = FakeBackend(Script(hold_after=2))
options = ServerOptions(port=0, drain_s=float(sys.argv[1]))
drained = serve(backend, options, on_ready=lambda running: print(running.url, flush=True))
print(drained, backend.aborted == backend.names, flush=True)
"""


@pytest.mark.parametrize(
    ("signals", "drain_s"), [((signal.SIGTERM,), 0), ((signal.SIGINT,), 0), ((signal.SIGTERM, signal.SIGINT), 3600)]
)
def test_signals_abort_running_requests_and_return_to_the_caller(
    signals: tuple[signal.Signals, ...], drain_s: float
) -> None:
    with subprocess.Popen([sys.executable, "-c", _CHILD, str(drain_s)], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            host, port = child.stdout.readline().strip().removeprefix("http://").split(":")
            with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
                connection.sendall(request({"model": "fake", "messages": HI, "stream": True}))
                assert connection.recv(12) == b"HTTP/1.1 200"
                for number in signals:
                    os.kill(child.pid, number)
                assert child.communicate(timeout=WAIT_S)[0] == "False True\n"
            assert child.returncode == 0
        finally:
            child.kill()


def test_asyncio_sends_small_replies_at_once() -> None:
    for listener in bind_shared(bind(ServerOptions(port=0)), 2):
        with listener:  # asyncio sets TCP_NODELAY for this protocol only; without it, a reply may wait 40 ms
            assert listener.proto == socket.IPPROTO_TCP


def test_a_bound_address_refuses_connections_until_the_server_listens() -> None:
    with bind(ServerOptions(port=0)) as bound:
        address = bound.getsockname()
        with pytest.raises(ConnectionRefusedError), socket.create_connection(address, WAIT_S):
            pass
        with pytest.raises(
            ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{address[1]}: another program listens there"
        ):
            bind(ServerOptions(port=address[1]))

        urls: list[str] = []

        def stop(running: RunningServer) -> None:
            urls.append(running.url)
            running.stop()

        assert serve(FakeBackend(), ServerOptions(), listener=bound, on_ready=stop)
        assert urls == [f"http://127.0.0.1:{address[1]}"]


def test_a_port_can_be_reused_as_soon_as_its_server_has_ended() -> None:
    """Connections that the server closed hold the port for a minute, for others than servers."""
    with serving() as served:
        assert served.chat().status_code == 200
        port = int(served.running.url.rpartition(":")[2])
        served.running.stop()
        assert served.drained.get(timeout=WAIT_S)
        bind(ServerOptions(port=port)).close()


def test_binding_a_port_without_permission_raises_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def bind_as_a_user(self: socket.socket, address: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", bind_as_a_user)
    with pytest.raises(
        ConfigError,
        match=r"cannot listen on 127\.0\.0\.1:80: this user may not use that port: choose a port of 1024 or more",
    ):
        bind(ServerOptions(port=80))


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1"):
        serve(FakeBackend(), ServerOptions(host=host, port=0))


def test_listening_on_all_addresses_without_a_key_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with serving(host="0.0.0.0"):
        pass
    assert any("without an API key" in record.getMessage() for record in caplog.records)
    caplog.clear()
    with serving(host="0.0.0.0", api_key="k"), serving():
        pass
    assert not warned(caplog)


@pytest.mark.parametrize(
    "options",
    [
        {"port": 70000},
        {"port": -1},
        {"port": True},
        {"host": ""},
        {"api_key": ""},
        {"admin_key": ""},
        {"admin_key": "same", "api_key": "same"},
        {"api_key": "a b"},
        {"api_key": "é"},
        {"served_model_name": ""},
        {"max_body_bytes": 0},
        {"max_choices": 0},
        {"drain_s": -1},
        {"drain_s": float("nan")},
        {"body_timeout_s": float("inf")},
        {"head_timeout_s": 0},
        {"head_timeout_s": -1},
        {"max_connections": 0},
        {"max_connections_per_address": 0},
        {"allowed_origins": ("http://localhost:3000/",)},
        {"allowed_origins": ("localhost",)},
        {"allowed_origins": ("HTTP://LOCALHOST",)},
        {"retry_after_s": -1},
    ],
    ids=str,
)
def test_an_error_about_a_bad_option_names_it(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        ServerOptions(**options)


def _wait_until_refused(served: Served) -> None:
    """Until the listener is closed; every try that still succeeds is a wait of a round trip."""
    for _ in range(100_000):
        try:
            served.connect().close()
        except (ConnectionRefusedError, ConnectionResetError):
            return
    raise AssertionError("the server still accepts")
