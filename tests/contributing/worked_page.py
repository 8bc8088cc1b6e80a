"""A page of docs/contributing: a diff that adds something, and a program that uses it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "contributing"
SOURCES = ("src", "packages/sidestream-kv/src", "packages/sidestream-order/src")


@dataclass(frozen=True)
class WorkedPage:
    """The diff and the program of one page."""

    diff: str
    program: str

    @classmethod
    def read(cls, name: str) -> WorkedPage:
        """The page's one diff and its last program."""
        text = (PAGES / name).read_text(encoding="utf-8")
        (diff,) = re.findall(r"^```diff\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        *_, program = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        return cls(diff, program)

    @property
    def files(self) -> list[str]:
        """Paths that the diff touches."""
        return re.findall(r"^\+\+\+ b/(.+)$", self.diff, re.MULTILINE)

    def apply(self, to: Path) -> None:
        """Copy the packages below `to` and apply the diff to the copy."""
        for source in SOURCES:
            shutil.copytree(ROOT / source, to / source, ignore=shutil.ignore_patterns("__pycache__"))
        environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(to.parent)}
        done = subprocess.run(
            ["git", "apply", "--recount", "-"],
            cwd=to,
            env=environment,
            input=self.diff,
            text=True,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, f"the page's diff does not apply any more, make it anew: {done.stderr}"

    def run(self, within: Path, *arguments: str) -> str:
        """What the program prints, run with the packages that `apply` changed. Kernels run in Triton's interpreter."""
        program = within / "program.py"
        program.write_text(self.program, encoding="utf-8")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(within / source) for source in SOURCES),
            "TRITON_INTERPRET": "1",
        }
        done = subprocess.run(
            [sys.executable, str(program), *arguments],
            env=environment,
            text=True,
            capture_output=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout
