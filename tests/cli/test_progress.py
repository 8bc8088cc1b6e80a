from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from sidestream.cli.progress import LoggedStart, ProgressBars, StartBar
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


def test_a_start_draws_what_it_is_at_and_a_bar_where_that_is_counted() -> None:
    output = io.StringIO()
    with StartBar("a model", Console(file=output, force_terminal=True, width=140)) as bar:
        bar.tell("reading the weights", 0, 0)
        bar._bars.refresh()
        bar.tell("capturing", 3, 12)
        bar._bars.refresh()
        bar.tell("something else", 0, 0)
        assert bar._bars.tasks[0].total is None
    drawn = output.getvalue()
    assert "loading a model: reading the weights" in drawn
    assert "loading a model: capturing" in drawn
    assert "3/12" in drawn


def test_a_start_that_is_drawn_nowhere_says_nothing() -> None:
    output = io.StringIO()
    for console, shown in ((Console(file=output), True), (Console(file=output, force_terminal=True), False)):
        with StartBar("a model", console, shown=shown) as bar:
            bar.tell("capturing", 3, 12)
    assert output.getvalue() == ""


def test_the_log_of_a_start_has_a_line_for_each_thing_and_each_quarter(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    start = LoggedStart(logging.getLogger("a start"))
    start.tell("reading the weights", 0, 0)
    for done in range(13):
        start.tell("capturing", done, 12)
    start.tell("reading the weights", 0, 0)
    assert [record.message for record in caplog.records] == [
        "reading the weights",
        *(f"capturing: {done} of 12" for done in (0, 3, 6, 9, 12)),
        "reading the weights",
    ]
