"""A failing schedule survives its file, and a file that holds something else is refused with what is wrong in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proof.torture import Replay, draw_workload, load_replay
from sidestream.errors import ConfigError
from sidestream.version import VERSION

TURNS = {3: "compute", 11: "host", 40: "store"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    Replay(draw_workload(7), TURNS, "finish-releases", "balance", "3 of 9 blocks are still in use").save(
        tmp_path / "s.json"
    )
    return tmp_path / "s.json"


def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    values = json.loads(path.read_text(encoding="utf-8"))
    edit(values)
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_replay(path)
    return str(caught.value)


def test_every_workload_survives_its_file(tmp_path: Path) -> None:
    for seed in range(40):
        saved = Replay(draw_workload(seed), TURNS, None, "tokens", "they part at output 2 — …")
        saved.save(tmp_path / "s.json")
        assert load_replay(tmp_path / "s.json") == saved


def test_a_mutation_survives_by_name(path: Path) -> None:
    assert load_replay(path).mutation == "finish-releases"


def test_another_version_is_refused_with_both(path: Path) -> None:
    said = refusal(change(path, lambda values: values.update(version="0.0.9")))
    assert "written by version 0.0.9" in said
    assert VERSION in said
    assert "run it with that version" in said


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "7", "{}", '{"kind": "something else"}', '{"bench": "torture", "figures": []}']
)
def test_a_file_without_a_schedule_is_refused_with_the_remedy(content: str, path: Path) -> None:
    path.write_text(content, encoding="utf-8")
    said = refusal(path)
    assert str(path) in said
    assert "give a file that `python -m proof torture` wrote" in said


def test_a_file_that_is_no_text_is_refused(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00")
    assert "give a file that `python -m proof torture` wrote" in refusal(path)


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "none.json")
    assert "directory" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("edit", "part"),
    [
        (lambda v: v.pop("turns"), "turns"),
        (lambda v: v.pop("workload"), "workload"),
        (lambda v: v.pop("mutation"), "mutation"),
        (lambda v: v.update(turns=[[-1, "host"]]), "[-1, 'host']"),
        (lambda v: v.update(turns=[[1, 2]]), "[1, 2]"),
        (lambda v: v.update(turns=[[1]]), "damaged"),
        (lambda v: v.update(turns=7), "damaged"),
        (lambda v: v.update(workload=[]), "workload cannot be read"),
        (lambda v: v["workload"].update(blocks=1), "has 1 blocks, its largest request takes"),
        (lambda v: v["workload"].update(blocks="many"), "blocks"),
        (lambda v: v["workload"].update(colour="red"), "colour"),
        (lambda v: v["workload"].pop("requests"), "requests"),
        (lambda v: v["workload"]["requests"][0].update(prompt=[]), "a prompt is []"),
        (lambda v: v["workload"]["requests"][0].update(prompt=[1000]), "a prompt is [1000]"),
        (lambda v: v["workload"].update(events=[{"at": 1, "kind": "flood"}]), "flood"),
        (lambda v: v["workload"].update(faults=[{"operation": "load", "kind": "nan", "first": 0}]), "no load is nan"),
        (lambda v: v.update(mutation="finish-release"), "finish-releases"),
    ],
)
def test_an_error_names_the_damaged_part_of_a_schedule_file(
    edit: Callable[[dict[str, Any]], object], part: str, path: Path
) -> None:
    said = refusal(change(path, edit))
    assert f"schedule {path} is damaged" in said
    assert part in said


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be written: .*: give a file that you may write"):
        Replay(draw_workload(0), {}, None, "tokens", "").save(tmp_path / "missing" / "s.json")
