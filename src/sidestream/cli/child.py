"""A fresh process that answers JSON lines: for measurements that need a process of their own.

Two users of OpenMP in one process slow each other down (see `device/cpu.py`), and that KV outlives a process takes two.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from sidestream.errors import SidestreamError


class Child:
    """Runs `python -m module`, which calls `answer_lines`; a context manager."""

    def __init__(self, module: str, order: dict[str, Any]) -> None:
        """Start the process and hand it `order`, which it needs to get ready. Raises SidestreamError when it
        does not.
        """
        self._messages = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._messages,
            text=True,
        )
        try:
            self.ask(order)
        except BaseException:
            self.close()
            raise

    def ask(self, question: dict[str, Any]) -> Any:
        """Send one line and wait for the answer. Raises SidestreamError when the process ended instead."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self._process.wait()
            self._messages.seek(0)
            last = self._messages.read().strip().splitlines()[-1:] or ["no message"]
            raise SidestreamError(f"a fresh process ended with code {self._process.returncode}: {last[0]}")
        return json.loads(answer)

    def close(self) -> None:
        """Let the process end, and wait for it. Idempotent."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._messages.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def answer_lines(ready: Callable[[dict[str, Any]], tuple[Callable[[dict[str, Any]], Any], Callable[[], None]]]) -> None:
    """The child's side: `ready` takes the order and returns what answers a question, and what to do at the end."""
    out = sys.stdout
    sys.stdout = sys.stderr  # whatever a library prints must not stand between the answers
    answer, end = ready(json.loads(sys.stdin.readline()))
    try:
        print(json.dumps("ready"), file=out, flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(json.loads(line))), file=out, flush=True)
    finally:
        end()
