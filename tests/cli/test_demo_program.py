"""The demo says what it is at, and what it says to type next is what its reader can type."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from sidestream.cli import demo
from sidestream.cli.demo import _program
from sidestream.cli.progress import Steps
from sidestream.cli.prompt_runs import PromptRuns


def test_the_demo_prints_the_program_name_that_a_user_can_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, mine = tmp_path / "sidestream", tmp_path / "venv" / "sidestream"
    mine.parent.mkdir()
    for program in (found, mine):
        program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    def named(argument: object) -> str:
        monkeypatch.setattr(sys, "argv", [str(argument)])
        return _program()

    assert named(found) == "sidestream"  # the shell finds this very program
    assert named(mine) == str(mine)  # it finds another one
    found.unlink()
    assert named(mine) == str(mine)  # it finds none
    assert named("/somewhere/sidestream/__main__.py") == "python -m sidestream"


def test_the_demo_reports_every_step_before_running_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    class Engine:
        def __init__(self, *given: Any, **options: Any) -> None:
            happened.append("<engine starts>")

        def __enter__(self) -> Engine:
            return self

        def __exit__(self, *reason: object) -> None:
            happened.append("<engine closes>")

        def generate(self, prompts: list[list[int]], *, max_tokens: int) -> PromptRuns:
            happened.append("<generates>")
            return PromptRuns(runs=(), steps=0, seconds=0, transfer_waits=0, stored_bytes=0)

    monkeypatch.setattr(demo, "ChildEngine", Engine)
    with Steps(say=happened.append) as steps:
        demo._run_visits("a model", {}, [1, 2, 3], [[4], [5]], (tmp_path, tmp_path), steps)
    assert happened == [
        "first process: loading the model",
        "<engine starts>",
        "first visit, cold: asking about a text of 3 tokens",
        "<generates>",
        "other prompts fill the pool: 0 of 2",
        "<generates>",
        "<generates>",
        "second visit, from host memory: asking about a text of 3 tokens",
        "<generates>",
        "first process: storing KV and closing",
        "<engine closes>",
        "second process: loading the model",
        "<engine starts>",
        "third visit, from disk: asking about a text of 3 tokens",
        "<generates>",
        "second process: closing",
        "<engine closes>",
    ]
