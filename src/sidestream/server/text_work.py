"""Runs the work on request bodies (JSON, chat template, tokenising) off the event loop, bounded in number, time and
memory.

An API process forks text processes for this work, before it starts threads. A checkpoint's template may hang inside one
call of C code, where a thread cannot be interrupted but a process can be killed. JSON and tokenising take many times
the body's bytes, and a long-lived process would not give this memory back. A text process is killed when it takes too
long, and ends after a long body.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import pickle
import resource
import signal
import traceback
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

from sidestream.errors import EngineStopped, InvariantError, QueueFull, RequestRejected, SidestreamError
from sidestream.server.errors import ApiError

log = logging.getLogger("sidestream.server")

SHORT_BODY_BYTES = 64 << 10
"""Longer bodies wait for each other, and not before shorter ones."""

_SHORT_WORKERS, _LONG_WORKERS = 2, 1

_CONNECTION_CLOSED, _NEW_PROCESS = 0, 3  # exit statuses of a text process

Handle = Callable[[str, bytes | bytearray], Any]
"""The work on a body of this kind of request. The result can be pickled. Raises ApiError or SidestreamError."""


@dataclass(frozen=True, slots=True)
class ProcessBounds:
    """Bounds of one body's work in a text process: seconds of processor time, and bytes of memory in addition to those
    of the process at its start.
    """

    cpu_s: float
    memory_bytes: int

    @classmethod
    def for_context(cls, max_model_len: int) -> ProcessBounds:
        """Bounds that are large enough for every body that fits a model: a million tokens take half a minute on a slow
        core, and tokenising takes 150 bytes for each byte of text.
        """
        return cls(10 + max_model_len * 60e-6, (512 << 20) + max_model_len * 2048)


class TextWork:
    """Two queues of bodies, for short and for long ones, each with its own workers. Used on one event loop.

    room   returns the number of requests that the engine may still take from this front end
    """

    def __init__(self, handle: Handle, *, room: Callable[[], int], bounds: ProcessBounds | None = None) -> None:
        """bounds   fork text processes, with these bounds; None: work on threads of this process, without them"""
        self._room = room
        self._waiting = 0
        self._processes: list[_TextProcess] = []
        self._short = self._lane(handle, _SHORT_WORKERS, bounds)
        self._long = self._lane(handle, _LONG_WORKERS, bounds)

    async def run(self, kind: str, body: bytearray) -> Any:
        """The result of the work on one body. A cancelled call leaves the queue.

        Raises the error of the work; QueueFull: too many bodies wait; RequestRejected: the work exceeded its bounds.
        """
        if self._waiting >= self._room():
            raise QueueFull(
                f"{self._waiting} requests wait to be tokenised, and the queue has no room for more: "
                "try again later, or raise max_waiting"
            )
        lane = self._short if len(body) <= SHORT_BODY_BYTES else self._long
        held = [body]  # the queue drops a cancelled entry late, so the body is taken out of it
        self._waiting += 1
        try:
            return await asyncio.wrap_future(lane.submit(kind, held))
        finally:
            self._waiting -= 1
            held.clear()

    def close(self) -> None:
        """End the text processes, and the threads when their current work ends. Idempotent."""
        for lane in (self._short, self._long):
            lane.threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _lane(self, handle: Handle, workers: int, bounds: ProcessBounds | None) -> _Lane:
        handles: list[Handle] = [handle] * workers
        if bounds is not None:
            processes = [_TextProcess(handle, bounds) for _ in range(workers)]
            self._processes += processes
            handles = [process.call for process in processes]
        return _Lane(handles)


class _Lane:
    """Threads that take bodies from one queue; each has a handle of its own."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self.threads = ThreadPoolExecutor(len(handles), thread_name_prefix="sidestream-text")
        self._idle: SimpleQueue[Handle] = SimpleQueue()
        for handle in handles:
            self._idle.put(handle)

    def submit(self, kind: str, held: list[bytearray]) -> Any:
        return self.threads.submit(self._run, kind, held)

    def _run(self, kind: str, held: list[bytearray]) -> Any:
        try:
            body = held.pop()
        except IndexError:  # cancelled
            return None
        handle = self._idle.get()
        try:
            return handle(kind, body)
        finally:
            self._idle.put(handle)


class _TextProcess:
    """A forked process that works on bodies, and its parent (also forked), which replaces it when it ends.

    Both are copies of this process from before its threads started, and share one connection to it.
    """

    def __init__(self, handle: Handle, bounds: ProcessBounds) -> None:
        self._connection, theirs = Pipe()
        self._bounds = bounds
        with warnings.catch_warnings():  # Python warns of threads; the one that watches the supervisor holds no lock
            warnings.simplefilter("ignore", DeprecationWarning)
            self._parent = os.fork()
        if self._parent == 0:
            try:
                _keep_one_running(theirs, handle, bounds)
            finally:
                os._exit(1)
        theirs.close()

    def call(self, kind: str, body: bytes | bytearray) -> Any:
        """Work on one body. One thread at a time may call it."""
        try:
            while self._connection.poll():  # the report of a process that was killed while it was idle
                self._connection.recv_bytes()
            self._connection.send_bytes(kind.encode())
            self._connection.send_bytes(body)
            done, value = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as failure:
            raise EngineStopped("the process that tokenises has ended: try again later") from failure
        if done:
            return value
        if isinstance(value, Exception):
            try:
                raise value
            finally:
                del value  # else this frame and the error's traceback would keep each other, and the body, in memory
        log.warning("a text process was killed (%s) by a request of %d bytes", value, len(body))
        raise RequestRejected(
            f"this request took more than {self._bounds.cpu_s:.0f} s of processor time or "
            f"{self._bounds.memory_bytes >> 20} MiB to be laid out and tokenised: shorten it; if short ones fail too, "
            "the model's chat template is at fault"
        )

    def close(self) -> None:
        """End both processes: an idle text process ends with the connection, another one at its bound of time."""
        self._connection.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._parent, signal.SIGKILL)
            os.waitpid(self._parent, 0)


def _keep_one_running(connection: Connection, handle: Handle, bounds: ProcessBounds) -> None:
    """Fork text processes one after another, until the connection is closed. In the parent's process."""
    _close_other_files(connection.fileno())
    faulthandler.disable()
    logging.disable()  # the thread that writes the log does not exist in a forked process
    gc.freeze()  # a collection would copy pages that all processes share
    while True:
        worker = os.fork()
        if worker == 0:
            try:
                _work(connection, handle, bounds)
            finally:
                os._exit(_CONNECTION_CLOSED)
        _, status = os.waitpid(worker, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == _CONNECTION_CLOSED:
            os._exit(0)
        if code != _NEW_PROCESS:
            connection.send_bytes(pickle.dumps((False, signal.Signals(-code).name if code < 0 else f"status {code}")))


def _work(connection: Connection, handle: Handle, bounds: ProcessBounds) -> None:
    """Work on bodies until the connection is closed. In the text process. The kernel kills it after `cpu_s`, also
    inside a call of C code.
    """
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _limit_memory(bounds.memory_bytes)
    while True:
        try:
            kind, body = connection.recv_bytes().decode(), connection.recv_bytes()
        except (EOFError, OSError):
            return
        signal.setitimer(signal.ITIMER_PROF, bounds.cpu_s)
        reply = _reply(handle, kind, body)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(reply)
        if len(body) > SHORT_BODY_BYTES:  # returns the memory that it took to the system
            os._exit(_NEW_PROCESS)


def _reply(handle: Handle, kind: str, body: bytes) -> bytes:
    try:
        return pickle.dumps((True, handle(kind, body)))
    except (ApiError, SidestreamError) as error:
        return pickle.dumps((False, error))
    except MemoryError:
        return pickle.dumps((False, "out of memory"))
    except Exception:
        return pickle.dumps((False, InvariantError(f"a text process failed: {traceback.format_exc()}")))


def _limit_memory(more_bytes: int) -> None:
    with contextlib.suppress(OSError, ValueError):  # a system without /proc, or a lower limit is set already
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _close_other_files(kept: int) -> None:
    """Close all files but standard ones and `kept`: the supervisor and the engine notice the end of the API process by
    the end of its sockets.
    """
    os.closerange(3, kept)
    os.closerange(kept + 1, 1 << 20)
