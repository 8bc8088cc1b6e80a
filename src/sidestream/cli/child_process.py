"""A new Python process that answers requests as JSON lines, for measurements that need a separate process.

There are two reasons for a separate process: two OpenMP runtimes in one process slow each other down (see
`device/cpu.py`), and only a second process can show that KV survives the end of the first process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any, Self

from sidestream.errors import SidestreamError

Answer = Callable[[dict[str, Any]], Any]
Close = Callable[[], None]


class ChildProcess:
    """Runs `python -m module`, which calls `answer_requests`. A context manager."""

    def __init__(self, module: str, setup: dict[str, Any]) -> None:
        """Start the process and send it `setup`. Raises SidestreamError when the process ends before it is ready."""
        self._stderr = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )
        try:
            self.request(setup)
        except BaseException:
            self.close()
            raise

    def request(self, message: dict[str, Any]) -> Any:
        """Send one line and wait for the answer. Raises SidestreamError when the process ends without answering."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self._process.wait()
            self._stderr.seek(0)
            last = self._stderr.read().strip().splitlines()[-1:] or ["no message"]
            raise SidestreamError(f"a fresh process ended with code {self._process.returncode}: {last[0]}")
        return json.loads(answer)

    def close(self) -> None:
        """Close the process's input, which ends it, and wait for its exit. Idempotent."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._stderr.close()

    def kill(self) -> None:
        """End the process at once, as `kill -9` does."""
        self._process.kill()
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def answer_requests(set_up: Callable[[dict[str, Any]], tuple[Answer, Close]]) -> None:
    """The child's main loop. `set_up` takes the first message, and returns two functions: the first answers each later
    message, the second cleans up.
    """
    out = sys.stdout
    sys.stdout = sys.stderr  # output that libraries print must not mix with the answers
    answer, close = set_up(json.loads(sys.stdin.readline()))
    try:
        print(json.dumps("ready"), file=out, flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(json.loads(line))), file=out, flush=True)
    finally:
        close()
