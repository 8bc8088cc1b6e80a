"""What the demo says to type next is what its reader can type."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sidestream.cli.demo import _program


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "sidestream"
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return program


def test_the_name_alone_where_the_shell_finds_this_very_program(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(installed)])
    assert _program() == "sidestream"


def test_the_path_that_was_typed_where_the_shell_finds_none_or_another(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "venv" / "sidestream"
    mine.parent.mkdir()
    mine.touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(mine)])
    assert _program() == str(mine)
    installed.unlink()
    assert _program() == str(mine)


def test_the_module_where_it_was_started_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/sidestream/__main__.py"])
    assert _program() == "python -m sidestream"
