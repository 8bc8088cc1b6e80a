"""Progress of long commands: bars in a terminal; elsewhere, a line every ten seconds.

A step shorter than two seconds prints no line. The command's thread reports its progress, and a second thread prints
the lines, because some steps (a forward pass, a child process) report nothing until they end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

_FIRST_AFTER_S = 2.0  # from the start of a step to its first line
_EVERY_S = 10.0  # between lines
_POLL_S = 0.5


class Lines:
    """Prints progress as lines. The caller calls `poll` every half second, and `poll` prints a line if it is due.

    first_after_s   seconds from the start of a step to its first line; 0: print a line when a step starts
    """

    def __init__(
        self,
        print_line: Callable[[str], None],
        *,
        first_after_s: float = _FIRST_AFTER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._print_line = print_line
        self._clock = clock
        self._first_after_s = first_after_s
        self._lock = threading.RLock()  # reentrant, because a signal handler may report as well
        self._step: str | None = None
        self._amount = ""
        self._began_s = 0.0
        self._next_s = 0.0

    def set_step(self, step: str, amount: str) -> None:
        """Set the current step and its progress."""
        with self._lock:
            self._amount = amount
            if step == self._step:
                return
            self._step, self._began_s = step, self._clock()
            if self._first_after_s == 0:
                self._print(self._began_s)

    def poll(self) -> None:
        """Print the step if a line is due."""
        with self._lock:
            now_s = self._clock()
            if self._step is not None and now_s >= max(self._began_s + self._first_after_s, self._next_s):
                self._print(now_s)

    def _print(self, now_s: float) -> None:
        self._next_s = now_s + _EVERY_S
        seconds = now_s - self._began_s
        self._print_line(
            f"{self._step}{self._amount and ': '}{self._amount}{f' ({seconds:.0f} s)' if seconds >= 1 else ''}"
        )


class Steps:
    """The progress of the steps of one command. A context manager, used by one thread.

    console   shows bars if it is a terminal, else lines; default: standard error
    say       function that gets the lines instead of the console, for example a logger's method. It also gets a line
              at the start of each step
    keep      keep the bars of finished steps; False: show one bar and remove it at the end
    title     prefix of each step's name
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        say: Callable[[str], None] | None = None,
        keep: bool = False,
        title: str = "",
    ) -> None:
        console = console or Console(stderr=True)
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
        )
        self._bars: Progress | None = None
        self._task: TaskID | None = None
        self._lines: Lines | None = None
        if say is not None:
            self._lines = Lines(say, first_after_s=0.0)
        elif console.is_terminal:
            self._bars = Progress(*columns, console=console, transient=not keep)
        else:
            self._lines = Lines(
                lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True),
                first_after_s=_FIRST_AFTER_S,
            )
        self._keep = keep
        self._title = title
        self._step = ""
        self._total_bytes: int | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="sidestream-progress", daemon=True)

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        else:
            self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        if self._bars is not None:
            self._bars.stop()
        else:
            self._thread.join()

    def begin(self, stage: str, total_bytes: int | None) -> None:
        """Begin a step that is measured in bytes; see `sidestream.models.catalog.Progress`."""
        self._total_bytes = total_bytes
        self._show(stage, 0, total_bytes or 0, _megabytes(0, total_bytes))

    def reached(self, done_bytes: int) -> None:
        """Set the progress of the step started by `begin`."""
        self._show(self._step, done_bytes, self._total_bytes or 0, _megabytes(done_bytes, self._total_bytes))

    def update(self, step: str, done: float = 0, total: float = 0, note: str | None = None) -> None:
        """Set the current step and its progress. A `total` of 0 means that the progress is unknown. `note`: text to
        show instead of the numbers.
        """
        amount = note if note is not None else f"{done:g} of {total:g}" if total else ""
        self._show(step, done, total, amount)

    def _show(self, step: str, done: float, total: float, amount: str) -> None:
        described = self._title + step
        if self._lines is not None:
            self._lines.set_step(described, amount)
        elif self._bars is not None:
            if step != self._step or self._task is None:
                if self._task is not None:
                    self._bars.stop_task(self._task) if self._keep else self._bars.remove_task(self._task)
                self._task = self._bars.add_task(described, total=total or None, amount=amount)
            self._bars.update(self._task, completed=done, amount=amount)
        self._step = step

    def _poll(self) -> None:
        assert self._lines is not None
        while not self._ended.wait(_POLL_S):
            self._lines.poll()


def _megabytes(done: int, total: int | None) -> str:
    return "" if total is None else f"{done / 1e6:.1f}/{total / 1e6:.1f} MB"
