"""Distributes jobs over worker processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol, TypeVar

from sidestream.errors import InvariantError

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")

_PATIENCE_S = 5.0
_CORE = 36  # of the fields of /proc/PID/stat behind the name: the core that the thread ran on last


class Job(Protocol[T_co]):
    """A callable that may run in any process. The job and its result must be picklable."""

    def run(self) -> T_co:
        """Run the job."""
        ...


def spread(jobs: Iterable[Job[T]], *, workers: int) -> Iterator[T]:
    """Run the jobs and yield their results as they arrive. With one worker, jobs run in this process, in order. An
    exception of a job is raised here.

    Closing the iterator ends the processes after their current job, or after a few seconds. Workers ignore an interrupt
    from the terminal.
    """
    if workers == 1:
        for job in jobs:
            yield _run(job)
        return
    context = multiprocessing.get_context("spawn")  # not forked: torch's threads do not survive a fork
    waiting, pipes, processes = iter(jobs), list[Connection](), list[BaseProcess]()
    try:
        with _deaf():
            for _ in range(workers):
                ours, theirs = context.Pipe()
                process: BaseProcess = context.Process(target=serve_jobs, args=(theirs,), daemon=True)
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
        busy = [pipe for pipe in pipes if _give(pipe, waiting)]
        while busy:
            for pipe in wait(busy):
                assert isinstance(pipe, Connection)
                try:
                    result, error = pipe.recv()
                except EOFError:
                    raise InvariantError("a worker process ended by itself: run with one worker to see why") from None
                if not _give(pipe, waiting):
                    busy.remove(pipe)
                if error is not None:
                    raise error
                yield result
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(timeout=_PATIENCE_S)
            if process.is_alive():
                process.terminate()
                process.join()


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Processes started in this context ignore interrupts. Inside the context, this process ignores interrupts, too."""
    # Only the main thread can set handlers, and only the main thread receives interrupts.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _give(pipe: Connection, jobs: Iterator[Job[T]]) -> bool:
    """Send the next job. Returns False if no job is left."""
    job = next(jobs, None)
    if job is not None:
        pipe.send(job)
    return job is not None


def _run(job: Job[T]) -> T:
    """Run the job, on Linux on the core that this thread runs on now. In a schedule one thread runs at a time, and
    passing the turn to another thread takes several times as long if that runs on another core.
    """
    if sys.platform != "linux":
        return job.run()
    allowed = os.sched_getaffinity(0)
    core = int(Path("/proc/thread-self/stat").read_text().rpartition(")")[2].split()[_CORE])
    os.sched_setaffinity(0, {core} & allowed or allowed)  # of this thread, and of those that it starts
    try:
        return job.run()
    finally:
        os.sched_setaffinity(0, allowed)


def serve_jobs(pipe: Connection) -> None:
    """Main loop of a process that runs jobs: receive a job, send its result or error, until the other end is closed."""
    try:
        while True:
            job: Job[object] = pipe.recv()
            try:
                answer: tuple[object, Exception | None] = (_run(job), None)
            except Exception as error:
                answer = (None, error)
            pipe.send(answer)
    except (EOFError, OSError):
        return
