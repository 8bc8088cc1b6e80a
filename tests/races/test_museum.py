"""Other engines' published races (examples/races): each is found within 300 schedules, and its fix is clean in 300."""

from __future__ import annotations

import re
import runpy
from functools import partial
from pathlib import Path

import pytest

from bench import races
from sidestream_order.exhaust import exhaust
from sidestream_order.explore import SCHEDULES, replay

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted((ROOT / "examples" / "races").glob("*.py"))
EACH = pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)


def test_the_museum_has_the_races_that_it_was_made_for() -> None:
    names = {path.stem for path in PROGRAMS}
    assert len(names) >= 12
    assert names >= {
        *("sglang_33970", "sglang_18803", "sglang_35748", "sglang_26380", "mini_sglang_142"),
        *("vllm_53919", "vllm_53084", "vllm_52234", "vllm_39306", "lmcache_5004"),
    }


@EACH
def test_the_script_shows_the_race_within_300_schedules_and_no_finding_with_the_fix(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(str(path), run_name="__main__")
    published, fixed = capsys.readouterr().out.split("\nfixed: ")
    found = re.match(r"published: found by schedule (\d+), shrunk", published)
    assert found is not None and int(found[1]) <= SCHEDULES == 300
    assert "\nchecker: " in published and f"{path.name}:" in published, "the finding names lines of the program"
    assert fixed.strip() == "no finding in 300 schedules"


@EACH
def test_the_published_program_also_has_wrong_results(path: Path) -> None:
    published = partial(runpy.run_path(str(path))["program"], fixed=False)
    assert any("assertion" in replay(published, "random", seed, trace=False).oracles for seed in range(50))


@EACH
def test_no_order_of_a_fixed_program_has_a_finding(path: Path) -> None:
    done = exhaust(partial(runpy.run_path(str(path))["program"], fixed=True), limit=1000)
    assert (done.problem, done.complete) == (None, True)


def test_every_program_fits_on_a_page_and_names_its_thread_and_fix() -> None:
    assert not [path.name for path in PROGRAMS if len(path.read_text(encoding="utf-8").splitlines()) > 60]
    programs = races.races()
    assert [race.path for race in programs] == PROGRAMS
    for race in programs:
        assert race.title.endswith("."), race.path.name
        assert race.path.stem.rpartition("_")[2] in race.thread, race.path.name
        assert re.search(r"\((merged|open when read|closed when read)\)", race.parts["Thread"]), race.path.name


def test_a_docstring_without_a_thread_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made_up_1.py").write_text('"""A race.\n\nSimplified: all.\nFix: none.\n"""\n', encoding="utf-8")
    monkeypatch.setattr(races, "RACES", tmp_path)
    with pytest.raises(ValueError, match="give Thread with an address"):
        races.races()
