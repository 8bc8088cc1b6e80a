"""What a long command is at, for people who wait: bars in a terminal, elsewhere a line every ten seconds. The rooms
below only report.

Steps that end within two seconds leave no line. Reports come from the thread that works; a thread of `Steps` looks at
the clock, so that a step which reports nothing until it ends (a forward pass, a child process) is shown all the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

# From when on a step is worth a line, and how often.
_FIRST_AFTER_S = 2.0
_EVERY_S = 10.0
_LOOK_EVERY_S = 0.5


class Lines:
    """Decides when there is a line to say, and says it. Knows no thread: `look` is called often enough by somebody.

    first_after_s   how long a step takes before it is said; 0: each one is said when it begins
    """

    def __init__(
        self,
        say: Callable[[str], None],
        *,
        first_after_s: float = _FIRST_AFTER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say = say
        self._clock = clock
        self._first_after_s = first_after_s
        self._lock = threading.RLock()  # a signal handler may report, too
        self._step: str | None = None
        self._amount = ""
        self._began_s = 0.0
        self._next_s = 0.0

    def at(self, step: str, amount: str) -> None:
        """The command is at `step`, `amount` of it is done."""
        with self._lock:
            self._amount = amount
            if step == self._step:
                return
            self._step, self._began_s = step, self._clock()
            if self._first_after_s == 0:
                self._say_it(self._began_s)

    def look(self) -> None:
        """Say the step if it is time to."""
        with self._lock:
            now_s = self._clock()
            if self._step is not None and now_s >= max(self._began_s + self._first_after_s, self._next_s):
                self._say_it(now_s)

    def _say_it(self, now_s: float) -> None:
        self._next_s = now_s + _EVERY_S
        seconds = now_s - self._began_s
        self._say(f"{self._step}{self._amount and ': '}{self._amount}{f' ({seconds:.0f} s)' if seconds >= 1 else ''}")


class Steps:
    """The steps of one command, one after another; to be used in a `with`. Its methods are called by one thread.

    console   where bars are drawn, if it is a terminal, and lines are printed, if it is not; standard error by default
    say       says lines instead, wherever the output goes: a logger, which has a line when each step begins, too
    keep      bars of steps that have ended stay; else there is one line, gone at the end
    title     before each step's name
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
        self._thread = threading.Thread(target=self._look, name="sidestream-progress", daemon=True)

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        else:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._bars is not None:
            self._bars.stop()
        else:
            self._thread.join()

    def begin(self, stage: str, total_bytes: int | None) -> None:
        """A step that is counted in bytes starts; see `sidestream.models.catalog.Progress`."""
        self._total_bytes = total_bytes
        self._show(stage, 0, total_bytes or 0, _megabytes(0, total_bytes))

    def reached(self, done_bytes: int) -> None:
        """It has come to `done_bytes`."""
        self._show(self._step, done_bytes, self._total_bytes or 0, _megabytes(done_bytes, self._total_bytes))

    def tell(self, step: str, done: float = 0, total: float = 0, note: str | None = None) -> None:
        """The command is at `step`, `done` of `total` of it is done (0 of 0: that is not known); `note` says so in
        other words. See `LLM`.
        """
        amount = note if note is not None else f"{done:g} of {total:g}" if total else ""
        self._show(step, done, total, amount)

    def _show(self, step: str, done: float, total: float, amount: str) -> None:
        described = self._title + step
        if self._lines is not None:
            self._lines.at(described, amount)
        elif self._bars is not None:
            if step != self._step or self._task is None:
                if self._task is not None:
                    self._bars.stop_task(self._task) if self._keep else self._bars.remove_task(self._task)
                self._task = self._bars.add_task(described, total=total or None, amount=amount)
            self._bars.update(self._task, completed=done, amount=amount)
        self._step = step

    def _look(self) -> None:
        assert self._lines is not None
        while not self._ended.wait(_LOOK_EVERY_S):
            self._lines.look()


def _megabytes(done: int, total: int | None) -> str:
    return "" if total is None else f"{done / 1e6:.1f}/{total / 1e6:.1f} MB"
