from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sidestream.cli.app import app
from sidestream.testing.tiny_models import tiny_model_dir

Run = Callable[..., Any]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose answers are long enough to be interrupted, given `--ignore-eos`."""
    return tiny_model_dir("llama", tmp_path_factory.mktemp("tiny"), seed=1, max_position_embeddings=1 << 15)


@pytest.fixture(autouse=True)
def interrupts_reach_children() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored, and so would start every child of a test run in the
    background.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in this process: `run("generate", model, stdin="...")`."""
    monkeypatch.delenv("SIDESTREAM_DEBUG", raising=False)
    monkeypatch.delenv("SIDESTREAM_API_KEY", raising=False)
    monkeypatch.setenv("COLUMNS", "200")  # no message is wrapped

    def invoke(*arguments: object, stdin: str | bytes | None = None) -> Any:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin, prog_name="sidestream")

    return invoke
