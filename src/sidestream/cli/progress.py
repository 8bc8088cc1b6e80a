"""Progress of long commands: bars in a terminal; elsewhere lines (`progress.py`), by default one every ten
seconds, and none for a step shorter than two seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from sidestream.processes.progress import START_EVERY_S, Lines, Reported


class Steps(Reported):
    """The progress of the steps of one command. A context manager, used by one thread.

    console   shows bars if it is a terminal, else lines; default: standard error
    say       function that gets the lines instead of the console, for example a logger's method
    keep      keep the bars of finished steps; False: show one bar and remove it at the end
    title     prefix of each step's name
    starting  the command starts an engine: with lines, there is no silence over two seconds
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        say: Callable[[str], None] | None = None,
        keep: bool = False,
        title: str = "",
        starting: bool = False,
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
            self._lines = Lines(say, first_after_s=0.0, every_s=START_EVERY_S)
        elif console.is_terminal:
            self._bars = Progress(*columns, console=console, transient=not keep)
        else:

            def print_line(line: str) -> None:
                console.print(line, markup=False, highlight=False, soft_wrap=True)

            self._lines = (
                Lines(print_line, first_after_s=0.0, every_s=START_EVERY_S, quiet_s=START_EVERY_S)
                if starting
                else Lines(print_line)
            )
        self._keep = keep
        self._title = title
        self._drawn = ""

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        elif self._lines is not None:
            self._lines.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bars is not None:
            self._bars.stop()
        elif self._lines is not None:
            self._lines.__exit__(*exc_info)

    def show(self, step: str, done: float, total: float, amount: str) -> None:
        """Show the current step as a bar or as lines."""
        described = self._title + step
        if self._lines is not None:
            self._lines.show(described, done, total, amount)
        elif self._bars is not None:
            if step != self._drawn or self._task is None:
                if self._task is not None:
                    self._bars.stop_task(self._task) if self._keep else self._bars.remove_task(self._task)
                self._task = self._bars.add_task(described, total=total or None, amount=amount)
            self._bars.update(self._task, completed=done, amount=amount)
        self._drawn = step
