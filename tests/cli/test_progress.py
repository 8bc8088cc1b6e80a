from __future__ import annotations

import io

from rich.console import Console

from sidestream.cli.progress import ProgressBars
from sidestream.models.catalog import Progress


def test_every_stage_gets_a_bar_that_reaches_its_end() -> None:
    output = io.StringIO()
    with ProgressBars(Console(file=output, force_terminal=True, width=100)) as bars:
        progress: Progress = bars
        progress.begin("downloading a model", 2_000_000)
        progress.reached(2_000_000)
        progress.begin("waiting for another process", None)
    drawn = output.getvalue()
    assert "downloading a model" in drawn
    assert "2.0/2.0 MB" in drawn
    assert "waiting for another process" in drawn
