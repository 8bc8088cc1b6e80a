"""Temporary directories are removed by their process or, if it was killed, by the next one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sidestream.ranks.owned_directory import OwnedDirectory

OWNER = """
from sidestream.ranks.owned_directory import OwnedDirectory
print(OwnedDirectory("sidestream-ranks-").path, flush=True)
input()
"""


def test_a_directory_goes_at_the_next_start_once_its_owner_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    foreign, kept = tmp_path / "sidestream-ranks-link", tmp_path / "elsewhere"
    kept.mkdir()
    foreign.symlink_to(kept)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": {**os.environ, "TMPDIR": str(tmp_path)}}
    with subprocess.Popen([sys.executable, "-c", OWNER], text=True, **pipes) as owner:  # type: ignore[call-overload]
        try:
            theirs = Path(owner.stdout.readline().strip())
            (theirs / "meeting").touch()
            first = OwnedDirectory("sidestream-ranks-")
            assert theirs.exists()
            owner.kill()
            owner.wait()
            second = OwnedDirectory("sidestream-ranks-")
        finally:
            owner.kill()
    assert sorted(tmp_path.iterdir()) == sorted([first.path, second.path, foreign, kept])
    for one in (first, second, second):
        one.remove()
    assert sorted(tmp_path.iterdir()) == sorted([foreign, kept])
