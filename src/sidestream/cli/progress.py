"""How far a model's preparation and an engine's start are: bars on the terminal, or lines in a log. The rooms below only report."""

from __future__ import annotations

import logging
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class ProgressBars:
    """One bar per stage of preparing a model, on standard error; a spinner while nobody knows how long it takes.

    A `sidestream.models.catalog.Progress`, to be used in a `with`; nothing is drawn where the output is no terminal.
    """

    def __init__(self, console: Console | None = None) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
        console = console or Console(stderr=True)
        self._bars = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task: TaskID | None = None

    def __enter__(self) -> ProgressBars:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._bars.disable:  # rich 13 ends what it never drew with an empty line
            self._bars.stop()

    def begin(self, stage: str, total_bytes: int | None) -> None:
        """End the bar of the stage before, and start one for this."""
        if self._task is not None:
            self._bars.stop_task(self._task)
        self._task = self._bars.add_task(stage, total=total_bytes)

    def reached(self, done_bytes: int) -> None:
        """Draw the current stage's bar up to `done_bytes`."""
        if self._task is not None:
            self._bars.update(self._task, completed=done_bytes)


class StartBar:
    """One line for the start of an engine: what it is at, and a bar where it is known how much of that there is. To be used in a `with`.

    Gone once the engine is there; nothing is drawn where the output is no terminal.
    """

    def __init__(self, model: str, console: Console, *, shown: bool = True) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal))
        self._model = model
        self._task = self._bars.add_task(f"loading {model}", total=None)

    def __enter__(self) -> StartBar:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._bars.disable:  # rich 13 ends what it never drew with an empty line
            self._bars.stop()

    def tell(self, what: str, done: int, total: int) -> None:
        """See `LLM`."""
        self._bars.update(self._task, description=f"loading {self._model}: {what}", completed=done)
        self._bars.tasks[0].total = total or None  # which `update` would leave as it was


class LoggedStart:
    """The same for a log: a line for each thing, and for each quarter of one that is counted."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said: tuple[str, int] | None = None

    def tell(self, what: str, done: int, total: int) -> None:
        """See `LLM`."""
        now = what, 4 * done // total if total else 0
        if now != self._said:
            self._said = now
            self._log.info("%s%s", what, f": {done} of {total}" if total else "")
