"""One API process's life, in this process: its engine is a socket that the test holds."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from proof.tiny_models import tiny_model_dir
from sidestream.client.messages import EngineInfo, Welcome
from sidestream.config import NEUTRAL
from sidestream.processes.frames import FrameEncoder
from sidestream.server import ServerOptions, api_process, bind
from sidestream.server.control import DRAINED, READY, STOP, ApiProcessConfig
from sidestream.server.text_work import ProcessBounds
from sidestream.version import VERSION

WAIT_S = 20.0


@dataclass
class Process:
    """An API process on a thread: its supervisor's and its engine's ends of the sockets, its port, and its end."""

    supervisor: socket.socket
    engine: socket.socket
    port: int
    ended: Future[bytes]


@contextmanager
def api_process_of(model: Path) -> Iterator[Process]:
    silence_s = 10 * WAIT_S  # this engine never answers, and must not count as stalled before a test ends
    info = EngineInfo(VERSION, str(model), "tiny", 64, 64, 16, 100, 4, b"\0" * 16, 0, NEUTRAL, silence_s, 1)
    line, supervisor = socket.socketpair()
    connection, engine = socket.socketpair()
    engine.sendall(FrameEncoder().encode(Welcome(info)))
    options = ServerOptions(port=0)
    listener = bind(options)
    config = ApiProcessConfig(options, 30, "%(message)s", "", "")
    with line, supervisor, connection, engine, ThreadPoolExecutor(1) as thread:
        port = listener.getsockname()[1]
        ended = thread.submit(api_process._serve, line, config, connection, listener)
        try:
            supervisor.settimeout(WAIT_S)
            assert supervisor.recv(1) == READY
            yield Process(supervisor, engine, port, ended)
        finally:
            supervisor.sendall(STOP + STOP)  # ends a process that would serve on
            supervisor.shutdown(socket.SHUT_WR)
            for reader in threading.enumerate():
                if reader.name == "sidestream-supervisor":
                    reader.join(WAIT_S)  # it reads from `line`, which is closed next


def test_an_api_process_that_has_lost_its_engine_ends_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_process, "GRACE_S", 0.05)
    settled: list[bool] = []
    monkeypatch.setattr(api_process, "freeze_gc_heap", lambda: settled.append(True))
    with api_process_of(tiny_model_dir("llama", tmp_path, seed=1)) as process:
        assert settled  # before the first request: a full collection would hold up all streams
        process.engine.close()
        assert process.ended.result(WAIT_S) == DRAINED


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ messages }}",
        "{{ '%1000000000d' % 1 }}{{ messages }}",
    ],
    ids=["nested ranges", "one wide number"],
)
def test_a_hanging_chat_template_fails_only_its_own_request(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_process, "freeze_gc_heap", lambda: None)  # this process would stay frozen
    bounds = ProcessBounds(cpu_s=0.5, memory_bytes=256 << 20)
    monkeypatch.setattr(ProcessBounds, "for_context", lambda max_model_len: bounds)
    model = tiny_model_dir("llama", tmp_path, seed=1)
    (model / "chat_template.jinja").write_text(template, encoding="utf-8")
    with (
        api_process_of(model) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{process.port}", timeout=WAIT_S) as client,
    ):
        for _ in range(2):
            reply = client.post(
                "/v1/chat/completions", json={"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
            )
            assert reply.status_code == 400
            assert "the model's chat template" in reply.json()["error"]["message"]
            health = client.get("/health")
            assert health.status_code == 200, health.text
        assert client.post("/tokenize", json={"prompt": "hi"}).json()["count"] > 0
