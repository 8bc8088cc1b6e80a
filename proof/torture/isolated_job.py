"""Runs jobs one by one in a child process, which is replaced when a job hangs or ends the process."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import resource
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

from proof.torture.workers import Job, serve_jobs

T = TypeVar("T")

HANG_STATUS = 1
"""Exit status of a process that `watched` ended."""

_PATIENCE_S = 0.5
# Of address space, beyond that at the start: a loop without an end must not take the memory of the machine.
_MEMORY_BYTES = 4 << 30


class ProcessEnded(Exception):
    """The child process ended before its job. `status`: negative for a signal."""

    def __init__(self, status: int | None) -> None:
        super().__init__(f"the process ended with status {status}")
        self.status = status


class Apart:
    """A child process, started by the first job."""

    def __init__(self, *, limit_memory: bool = True) -> None:
        """`limit_memory`: False for jobs that use a GPU, whose driver reserves far more addresses than memory."""
        self._limit_memory = limit_memory
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def run(self, job: Job[T]) -> T:
        """Run the job and return its result. An exception of the job is raised here; ProcessEnded if the process ended
        before the job did.
        """
        if self._pipe is None:
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send(job)
            result, error = self._pipe.recv()
        except (EOFError, OSError):
            process = self._process
            self.stop()
            raise ProcessEnded(None if process is None else process.exitcode) from None
        if error is not None:
            raise error
        answer: T = result
        return answer

    def stop(self) -> None:
        """End the process. Idempotent; the next job starts another one."""
        process, pipe = self._process, self._pipe
        self._process = self._pipe = None
        if pipe is not None:
            pipe.close()
        if process is not None:
            process.join(timeout=_PATIENCE_S)
            if process.is_alive():
                process.kill()
                process.join()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # not forked: torch's threads do not survive a fork
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._limit_memory), daemon=True)
        self._process.start()
        theirs.close()


@contextlib.contextmanager
def watched(seconds: float) -> Iterator[None]:
    """End this process with HANG_STATUS if the body takes longer, even if it holds the interpreter's lock."""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def _serve(pipe: Connection, limit_memory: bool) -> None:
    """Run jobs; the owner handles interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if limit_memory:
        _limit_memory()
    serve_jobs(pipe)


def _limit_memory() -> None:
    """Limit the memory that this process may take from now on."""
    now = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + _MEMORY_BYTES, now + _MEMORY_BYTES))
