"""One API process's life, in this process: its engine is a socket that the test holds."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sidestream.client.messages import EngineInfo, Welcome
from sidestream.config import NEUTRAL
from sidestream.frames import FrameEncoder
from sidestream.server import ServerOptions, api_process, bind
from sidestream.server.control import DRAINED, READY, STOP, ApiProcessConfig
from sidestream.testing.tiny_models import tiny_model_dir
from sidestream.version import VERSION

WAIT_S = 20.0


def test_an_api_process_that_has_lost_its_engine_says_so_for_a_while_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_process, "GRACE_S", 0.05)
    settled: list[bool] = []
    monkeypatch.setattr(api_process, "freeze_gc_heap", lambda: settled.append(True))
    info = EngineInfo(
        VERSION,
        str(tiny_model_dir("llama", tmp_path, seed=1)),
        "tiny",
        64,
        64,
        16,
        100,
        4,
        b"\0" * 16,
        0,
        NEUTRAL,
        9.0,
        1,
    )
    line, supervisor = socket.socketpair()
    connection, engine = socket.socketpair()
    engine.sendall(FrameEncoder().encode(Welcome(info)))
    options = ServerOptions(port=0)
    with line, supervisor, ThreadPoolExecutor(1) as thread:
        ended = thread.submit(
            api_process._serve, line, ApiProcessConfig(options, 30, "%(message)s", ""), connection, bind(options)
        )
        try:
            supervisor.settimeout(WAIT_S)
            assert supervisor.recv(1) == READY
            assert settled  # before the first request: a full collection would hold up all streams
            engine.close()
            assert ended.result(WAIT_S) == DRAINED
        finally:
            supervisor.sendall(STOP + STOP)  # ends a process that would serve on
            supervisor.shutdown(socket.SHUT_WR)
            for reader in threading.enumerate():
                if reader.name == "sidestream-supervisor":
                    reader.join(WAIT_S)  # it reads from `line`, which is closed next
