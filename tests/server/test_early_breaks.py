"""Prompts that break at the same early place each time are logged once and counted."""

import logging
from collections import Counter
from typing import Any

import pytest

from proof.fake_backend import FakeBackend, FakeTokenizer
from sidestream.server.early_breaks import WARN_AT, EarlyBreaks

from .serving import serving

REST = tuple(b" You are a helpful assistant. " + bytes(range(32, 127)) * 4)
START = tuple(b"system: Today is ")


class Watched:
    def __init__(self, *, shows_text: bool = False) -> None:
        self.counts: Counter[str] = Counter()
        self.breaks = EarlyBreaks(
            count=lambda name, value: self.counts.update({name: int(value)}),
            tokenizer=FakeTokenizer(),
            shows_text=shows_text,
        )

    def ask(self, changing: str, *, start: tuple[int, ...] = START, cached: int = 16, salt: str = "") -> None:
        self.breaks.add((*start, *changing.encode(), *REST), salt, cached)


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "sidestream.server"]


def test_a_counter_in_a_system_prompt_is_logged_once_and_then_counted(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    for number in range(WARN_AT + 5):
        watched.ask(f"12:{number:02}:{number * 7 % 60:02}")
        assert len(warned(caplog)) == (number >= WARN_AT)
    (line,) = warned(caplog)
    assert f"at token {len(START) + 4}" in line
    assert "'" not in line
    assert watched.counts["early_prefix_breaks_total"] == 5


def test_the_text_is_logged_only_if_texts_may_be_shown(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(shows_text=True)
    for number in range(WARN_AT + 1):
        watched.ask(f"[{number}]")
    (line,) = warned(caplog)
    assert f"'{WARN_AT - 1}', then '{WARN_AT}'" in line


def test_two_places_are_logged_each(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    for number in range(2 * WARN_AT):
        watched.ask(f"[{number}]")
        watched.ask(f"[{number}]", start=tuple(b"another system prompt, number "))
    assert len(warned(caplog)) == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"cached": 200},  # more was reused than the shared start: the prompt has a nearer relative
        {"salt": "own"},
    ],
)
def test_prompts_that_reuse_more_or_have_own_salts_do_not_count(
    caplog: pytest.LogCaptureFixture, fields: dict[str, Any]
) -> None:
    watched = Watched()
    for number in range(2 * WARN_AT):
        more = {"salt": f"own {number}"} if "salt" in fields else fields
        watched.ask(f"[{number}]", **more)
    assert warned(caplog) == []


def test_prompts_of_another_salt_are_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    for number in range(2 * WARN_AT):
        watched.ask(f"[{number}]", salt="a")
        for _ in range(16):
            watched.ask("[b]", salt="b")
    assert warned(caplog) == []


def test_prompts_with_other_texts_behind_the_difference_do_not_count(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    for number in range(2 * WARN_AT):
        rest = bytes((number * 31 + at * at * (number + 3)) % 250 for at in range(400))
        watched.breaks.add((*START, *rest), "", 16)
    assert warned(caplog) == []


def test_a_date_that_changes_once_in_many_prompts_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    for day in range(2 * WARN_AT):
        watched.ask(f"day {day}")
        watched.ask(f"day {day}", cached=400)
    assert warned(caplog) == []


def test_a_server_logs_early_breaks_and_counts_them(caplog: pytest.LogCaptureFixture) -> None:
    backend = FakeBackend()
    with serving(backend) as served, caplog.at_level(logging.WARNING):
        for number in range(WARN_AT + 1):
            served.text(prompt=f"the time is {number} now: " + "some instructions; " * 20)
    assert sum("differ each time at token 12" in line for line in warned(caplog)) == 1
    assert backend.metrics.value("early_prefix_breaks_total") == 1
