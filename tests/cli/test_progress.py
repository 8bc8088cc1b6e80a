"""Long commands show bars in a terminal, and elsewhere a line every ten seconds; starts show one every two seconds."""

from __future__ import annotations

import io
import logging
import threading

import pytest
from rich.console import Console

from sidestream.cli.progress import Steps
from sidestream.models.catalog import Progress
from sidestream.processes import progress as progress_module
from sidestream.processes.progress import START_EVERY_S, Lines, start_lines


class Clock:
    """A command's time, and somebody who looks at it twice a second."""

    def __init__(self, **options: float) -> None:
        self.now_s = 100.0
        self.said: list[str] = []
        self.lines = Lines(self.said.append, clock=lambda: self.now_s, **options)

    def passes(self, seconds: float) -> None:
        for _ in range(int(seconds * 2)):
            self.now_s += 0.5
            self.lines.poll()


def test_a_step_has_a_line_after_two_seconds_and_every_ten_from_there() -> None:
    clock = Clock()
    clock.lines.update("reading the weights")
    clock.passes(24)
    assert clock.said == ["reading the weights (2 s)", "reading the weights (12 s)", "reading the weights (22 s)"]


def test_a_progress_line_shows_the_current_count_of_the_step() -> None:
    clock = Clock()
    for done in range(13):
        clock.lines.update("others ask", done, 12)
        clock.passes(1)
    assert clock.said == ["others ask: 1 of 12 (2 s)", "others ask: 11 of 12 (12 s)"]


def test_steps_that_end_within_two_seconds_leave_no_line() -> None:
    clock = Clock()
    for step in ("downloading", "unpacking", "converting", "checking"):
        clock.lines.update(step)
        clock.passes(1.5)
    assert clock.said == []


def test_many_steps_of_some_seconds_have_one_line_every_ten_seconds() -> None:
    clock = Clock()
    for number in range(10):
        clock.lines.update(f"round {number}")
        clock.passes(4)
    assert clock.said == ["round 0 (2 s)", "round 2 (4 s)", "round 5 (2 s)", "round 7 (4 s)"]


def started(*, quiet_s: float) -> Clock:
    return Clock(first_after_s=0, every_s=START_EVERY_S, quiet_s=quiet_s)


def test_a_start_is_never_silent_for_more_than_two_seconds_and_names_its_step() -> None:
    clock = started(quiet_s=0)
    clock.lines.update("reading the weights")
    clock.passes(4)
    for number, rows in enumerate((1, 2, 4, 8)):  # of short steps, at most one line in 1.5 seconds
        clock.lines.update(f"capturing ({rows} rows)", number, 4)
        clock.passes(0.5)
    clock.passes(3)
    assert clock.said == [
        "reading the weights",
        "reading the weights (2 s)",
        "reading the weights (3 s)",
        "capturing (1 rows): 0 of 4",
        "capturing (4 rows): 2 of 4",
        "capturing (8 rows): 3 of 4 (2 s)",
        "capturing (8 rows): 3 of 4 (3 s)",
    ]


def test_a_start_within_two_seconds_leaves_no_line_where_the_output_is_no_terminal() -> None:
    clock = started(quiet_s=START_EVERY_S)
    clock.lines.update("importing")
    clock.passes(1)
    clock.lines.update("reading the weights")
    assert clock.said == []
    clock.passes(1)
    assert clock.said == ["reading the weights"]


@pytest.mark.parametrize("logs", [True, False])
def test_a_start_in_a_program_prints_to_its_log_or_else_to_standard_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], logs: bool
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(progress_module, "START_EVERY_S", 0.0)
    if not logs:
        monkeypatch.setattr(logging.getLogger("sidestream"), "propagate", False)
    start_lines().update("reading the weights")
    assert [record.message for record in caplog.records] == ["reading the weights"] * logs
    assert capsys.readouterr().err == ("" if logs else "sidestream: reading the weights\n")


def test_a_step_that_reports_nothing_is_shown_where_the_output_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "START_EVERY_S", 0.02)
    monkeypatch.setattr("sidestream.cli.progress.START_EVERY_S", 0.02)
    monkeypatch.setattr(progress_module, "_POLL_S", 0.005)
    said = threading.Event()

    class Output(io.StringIO):
        def write(self, text: str) -> int:
            said.set()
            return super().write(text)

    output = Output()
    with Steps(Console(file=output), starting=True) as steps:
        steps.update("asking")
        assert said.wait(20), "nothing is said"
    assert output.getvalue().startswith("asking")


def test_every_stage_in_bytes_gets_a_bar_that_reaches_its_end() -> None:
    output = io.StringIO()
    with Steps(Console(file=output, force_terminal=True, width=100), keep=True) as steps:
        progress: Progress = steps
        progress.begin("downloading a model", 2_000_000)
        progress.reached(2_000_000)
        progress.begin("waiting for another process", None)
    drawn = output.getvalue()
    assert "downloading a model" in drawn
    assert "2.0/2.0 MB" in drawn
    assert "waiting for another process" in drawn


def test_a_start_draws_one_line_with_its_step_and_a_bar_for_counted_steps() -> None:
    output = io.StringIO()
    with Steps(Console(file=output, force_terminal=True, width=140), title="loading a model: ") as steps:
        assert steps._bars is not None
        for step, done, total in (("reading the weights", 0, 0), ("capturing", 3, 12), ("something else", 0, 0)):
            steps.update(step, done, total)
            steps._bars.refresh()
            assert len(steps._bars.tasks) == 1
        assert steps._bars.tasks[0].total is None
    drawn = output.getvalue()
    assert "loading a model: reading the weights" in drawn
    assert "loading a model: capturing" in drawn
    assert "3 of 12" in drawn


def test_a_short_command_prints_no_progress_without_a_terminal() -> None:
    output = io.StringIO()
    with Steps(Console(file=output)) as steps:
        steps.update("capturing", 3, 12)
        steps.begin("downloading", 100)
        steps.reached(50)
    assert output.getvalue() == ""


def test_steps_that_go_to_a_log_are_not_drawn(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    output = io.StringIO()
    with Steps(Console(file=output, force_terminal=True), say=logging.getLogger("a start").info) as steps:
        steps.update("reading the weights", 0, 0)
        steps.update("capturing", 0, 12)
    assert [record.message for record in caplog.records] == ["reading the weights", "capturing: 0 of 12"]
    assert output.getvalue() == ""
