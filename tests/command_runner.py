"""Runs commands in the test's process, and servers in processes of their own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from typer.testing import CliRunner

from proof.tiny_models import tiny_model_dir

Run = Callable[..., Any]
WAIT_S = 150.0


def runner(app: typer.Typer, program: str) -> Callable[..., Run]:
    """The fixture `run`: `run("generate", model, stdin="...")` runs a command of `app`."""

    @pytest.fixture
    def run(monkeypatch: pytest.MonkeyPatch) -> Run:
        monkeypatch.delenv("SIDESTREAM_DEBUG", raising=False)
        monkeypatch.delenv("SIDESTREAM_API_KEY", raising=False)
        monkeypatch.setenv("COLUMNS", "200")  # no message is wrapped

        def invoke(*arguments: object, stdin: str | bytes | None = None) -> Any:
            return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin, prog_name=program)

        return invoke

    return run


@pytest.fixture(autouse=True)
def interrupts_reach_children() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored, nohup with SIGHUP ignored: children would inherit it."""
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGHUP, hangup)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose answers are long enough to be interrupted, given `--ignore-eos`."""
    return tiny_model_dir("llama", tmp_path_factory.mktemp("tiny"), seed=1, max_position_embeddings=1 << 15)


@contextlib.contextmanager
def serving(model: Path, *options: object) -> Iterator[tuple[subprocess.Popen[str], httpx.Client, list[str]]]:
    """The process, a client of it, and the lines that it printed when it was ready."""
    program = [sys.executable, *["-m", "sidestream", "serve"]]
    command = [*program, model, *["--port", "0", "--kv-memory", "32MiB", "--threads", "1"], *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([str(part) for part in command], **pipes, text=True, env=environment) as child:  # type: ignore[call-overload]
        try:
            assert child.stdout is not None
            lines = [child.stdout.readline().rstrip("\n") for _ in range(3)]
            url = re.search(r"http://\S+", lines[0])
            assert url is not None, child.stderr.read()
            with httpx.Client(base_url=url[0], timeout=WAIT_S) as client:
                yield child, client, lines
        finally:
            child.kill()
