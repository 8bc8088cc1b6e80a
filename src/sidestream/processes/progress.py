"""Progress of long work as lines of text. `cli/progress.py` draws bars in a terminal.

One thread reports its progress, and a second thread prints the lines, because some steps (an import, a forward pass, a
child process) report nothing until they end.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Self

START_EVERY_S = 1.5
"""Seconds between lines of a start. With the interval of the printing thread, no silence is longer than two seconds."""

_POLL_S = 0.5


class Reported:
    """Takes reports of progress, as `OnStage` and as `sidestream.models.catalog.Progress`, and shows them."""

    _step = ""
    _total_bytes: int | None = None

    def show(self, step: str, done: float, total: float, amount: str) -> None:
        """Show the current step. `amount`: its progress as a text."""
        raise NotImplementedError

    def begin(self, stage: str, total_bytes: int | None) -> None:
        """Begin a step that is measured in bytes."""
        self._step, self._total_bytes = stage, total_bytes
        self.reached(0)

    def reached(self, done_bytes: int) -> None:
        """Set the progress of the step started by `begin`."""
        total = self._total_bytes
        amount = "" if total is None else f"{done_bytes / 1e6:.1f}/{total / 1e6:.1f} MB"
        self.show(self._step, done_bytes, total or 0, amount)

    def update(self, step: str, done: float = 0, total: float = 0, note: str | None = None) -> None:
        """Set the current step and its progress. A `total` of 0 means that the progress is unknown. `note`: text to
        show instead of the numbers.
        """
        self.show(step, done, total, note if note is not None else f"{done:g} of {total:g}" if total else "")


class Lines(Reported):
    """Prints progress as lines. A context manager; its thread calls `poll` every half second.

    first_after_s   seconds from the start of a step to its first line; 0: a line at the start of each step
    every_s         seconds between lines
    quiet_s         seconds from now to the first line of all
    """

    def __init__(
        self,
        print_line: Callable[[str], None],
        *,
        first_after_s: float = 2.0,
        every_s: float = 10.0,
        quiet_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._print_line = print_line
        self._clock = clock
        self._first_after_s = first_after_s
        self._every_s = every_s
        self._lock = threading.RLock()  # reentrant, because a signal handler may report as well
        self._current: str | None = None
        self._amount = ""
        self._began_s = 0.0
        self._next_s = self._quiet_until_s = clock() + quiet_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="sidestream-progress", daemon=True)

    def show(self, step: str, done: float, total: float, amount: str) -> None:
        """Set the current step and its progress; prints a line if one is due."""
        with self._lock:
            self._amount = amount
            if step == self._current:
                return
            before, self._current, self._began_s = self._current, step, self._clock()
            # Sizes in brackets do not make another step: a hundred graphs must not print a hundred lines.
            if self._first_after_s == 0 and (before or "").partition(" (")[0] != step.partition(" (")[0]:
                self._next_s = self._quiet_until_s
            self.poll()

    def poll(self) -> None:
        """Print the step if a line is due."""
        with self._lock:
            now_s = self._clock()
            if self._current is None or now_s < max(self._began_s + self._first_after_s, self._next_s):
                return
            self._next_s = now_s + self._every_s
            seconds = now_s - self._began_s
            self._print_line(
                f"{self._current}{self._amount and ': '}{self._amount}{f' ({seconds:.0f} s)' if seconds >= 1 else ''}"
            )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._ended.wait(_POLL_S):
            self.poll()


def start_lines() -> Lines:
    """Lines for a start in a program: in the log, or on standard error if the program has not set up logging. A start
    of less than two seconds prints nothing.
    """
    return Lines(_say, first_after_s=0.0, every_s=START_EVERY_S, quiet_s=START_EVERY_S)


def _say(line: str) -> None:
    log = logging.getLogger("sidestream")
    if log.hasHandlers():
        log.info(line)
    else:
        print(f"sidestream: {line}", file=sys.stderr, flush=True)
