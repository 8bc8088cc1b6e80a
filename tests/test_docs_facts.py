"""Facts of the code that documents state."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import sidestream_kv
from proof.mutations import HAZARDS
from sidestream import types
from sidestream.schedule.scheduler import TierView

DOCS = Path(__file__).resolve().parent.parent / "docs"


def methods_of(protocol: type[Any]) -> set[str]:
    return {name for name, value in vars(protocol).items() if callable(value) and not name.startswith("_")}


def stated(file: str, pattern: str) -> re.Match[str]:
    """Where the document states a fact. Line breaks count as spaces."""
    found = re.search(pattern, " ".join((DOCS / file).read_text(encoding="utf-8").split()))
    assert found is not None, f"docs/{file} does not say {pattern!r} any more: change this test, too"
    return found


def names_in(text: str) -> list[str]:
    return re.findall(r"`(\w+)`", text)


@pytest.mark.parametrize(
    ("file", "pattern", "protocol"),
    [
        (
            "decisions/0010-a-tracer-is-told-and-never-asked.md",
            r"`types.Tracer` is a protocol of (?P<count>\d+) events: (?P<names>[^.]*)\.",
            sidestream_kv.Tracer,
        ),
        (
            "decisions/0001-plans-let-rooms-stay-strangers.md",
            r"protocol of (?P<count>\d+) read-only methods \(`TierView`: (?P<names>[^)]*)\)",
            TierView,
        ),
    ],
)
def test_a_document_names_and_counts_all_methods_of_a_protocol(file: str, pattern: str, protocol: type[Any]) -> None:
    fact = stated(file, pattern)
    named = names_in(fact["names"])
    assert sorted(named) == sorted(methods_of(protocol))
    assert int(fact["count"]) == len(named)


def test_the_decision_on_plans_names_types_that_exist() -> None:
    fact = stated("decisions/0001-plans-let-rooms-stay-strangers.md", r"declared in `types.py`: (?P<names>[^.]*)\.")
    assert all({name} & (vars(types).keys() | vars(sidestream_kv).keys()) for name in names_in(fact["names"]))


@pytest.mark.parametrize("file", ["ordering.md", "glossary.md"])
def test_a_table_of_hazards_has_every_hazard_once(file: str) -> None:
    rows = re.findall(r"^\| (H\d+) \|", (DOCS / file).read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == list(HAZARDS)


def test_the_table_of_hazards_equals_that_of_the_code() -> None:
    text = (DOCS / "ordering.md").read_text(encoding="utf-8")
    assert dict(re.findall(r"^\| (H\d+) \| ([^|]*) \|", text, re.MULTILINE)) == HAZARDS
