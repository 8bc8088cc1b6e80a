"""A progress bar on the terminal for what takes minutes. The only place that draws one; the rooms below only report."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class ProgressBars:
    """One bar per stage of preparing a model, on standard error; a spinner while nobody knows how long it takes.

    A `sidestream.models.catalog.Progress`, to be used in a `with`; nothing is drawn where the output is no terminal.
    """

    def __init__(self, console: Console | None = None) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=console or Console(stderr=True))
        self._task: TaskID | None = None

    def __enter__(self) -> ProgressBars:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
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
