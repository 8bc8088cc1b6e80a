"""The programs of `examples/` run as they stand, and show what they say."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from sidestream.testing.tiny_models import tiny_model_dir

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_the_offloaders_race_is_found_in_every_schedule_and_gone_with_the_wait(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runpy.run_path(str(EXAMPLES / "two_stream_offloader.py"), run_name="__main__")
    without, race, fixed = capsys.readouterr().out.splitlines()
    assert without.startswith("without the wait: the checker objects to 100 of 100 schedules")
    assert not without.endswith((" after 0", " after 100")), (
        "some orders are right by luck: that is why output alone does not tell"
    )
    assert (
        "`forward 2`" in race
        and "`copy 0`" in race
        and race.count("two_stream_offloader.py") == 2
        and "nothing orders" in race
    )
    assert fixed == "with the wait: the checker objects to 0 of 100 schedules, the host's bytes are wrong after 0"


def test_conversations_on_one_event_loop_are_all_answered(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["async_chat.py", str(tiny_model_dir("llama", tmp_path, seed=1))])
    runpy.run_path(str(EXAMPLES / "async_chat.py"), run_name="__main__")
    defaults, *answers = capsys.readouterr().out.splitlines()
    assert defaults == "sampling defaults: temperature 1, no filters, no penalties"
    assert sorted(answer[: answer.index("?")] for answer in answers) == [
        "How deep do whales dive",
        "Why do whales sing",
    ]
