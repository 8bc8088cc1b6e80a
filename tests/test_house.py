"""The figures of the source: what `make figures` prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import house

ROOT = Path(__file__).resolve().parent.parent


def test_modules_that_import_each_other_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        Path("sidestream/__init__.py"): "from sidestream.a import f\n",
        Path("sidestream/a.py"): "def f():\n    import sidestream.b\n",
        Path("sidestream/b.py"): "from sidestream import c\n",
        Path("sidestream/c.py"): "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import sidestream.a\n",
        Path("sidestream/d.py"): "import sidestream.c\n",
    }
    monkeypatch.setattr(house, "sources", lambda: texts)
    assert house.import_circles() == [("sidestream.a", "sidestream.b", "sidestream.c")]


def test_a_module_and_its_package_that_import_each_other_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        Path("sidestream/__init__.py"): "from sidestream.a import f\n",
        Path("sidestream/a.py"): "from sidestream import b, VERSION\n",
        Path("sidestream/b.py"): "",
    }
    monkeypatch.setattr(house, "sources", lambda: texts)
    assert house.import_circles() == [("sidestream", "sidestream.a")]


def test_no_modules_import_each_other() -> None:
    assert house.import_circles() == []


def test_functions_outside_kernels_have_at_most_80_lines() -> None:
    assert not [function for function in house.longest_functions() if function[0] > 80]


def test_classes_have_at_most_300_lines() -> None:
    assert not [found for found in house.longest_classes() if found[0] > 300]


@pytest.mark.parametrize(("lines", "kind"), [(80, "function"), (300, "class")])
def test_the_longest_function_and_class_are_found(lines: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head, body, longest = {
        "function": ("def f():\n", "    a = 1\n", house.longest_functions),
        "class": ("class F:\n", "    a = 1\n", house.longest_classes),
    }[kind]
    kernel = "@triton.jit\ndef k():\n" + "    a = 1\n" * 400
    monkeypatch.setattr(house, "sources", lambda: {Path("sidestream/a.py"): kernel + head + body * lines})
    assert longest(1) == [(lines + 1, "sidestream/a.py:" + ("f" if kind == "function" else "F"))]


# Lines of today, rounded up. A part that must grow first says what it makes unnecessary; a part that shrank gets a
# lower bound.
LINES = {
    "sidestream_kv": 18_520,
    "sidestream_order": 6_050,
    "sidestream": 52_920,
    "proof": 21_090,
    "bench": 11_160,
    "tests": 72_410,
}


def test_no_part_has_more_lines_than_its_budget() -> None:
    lines = house.lines_by_part()
    assert lines.keys() == LINES.keys()
    assert not {part: found for part, found in lines.items() if found > LINES[part]}


def test_names_of_tests_have_at_most_80_characters() -> None:
    pages = (ROOT / "tests").rglob("*.py")
    names = [name for page in pages for name in re.findall(r"def (test_\w+)", page.read_text(encoding="utf-8"))]
    assert len(names) > 2_000
    assert not [name for name in names if len(name) > 80]


@pytest.fixture(scope="module")
def files_of_a_request(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return house.files_of_a_request(tmp_path_factory.mktemp("request"))


def test_a_request_is_traced_from_http_to_disk_and_back(files_of_a_request: list[str]) -> None:
    wanted = {"sidestream/server/completions.py", "sidestream/engine/loop.py", "sidestream_kv/offload/tiers/disk.py"}
    assert wanted <= set(files_of_a_request)
    assert not [name for name in files_of_a_request if name.startswith("sidestream/cli/")]


def test_a_request_goes_through_at_most_55_files(files_of_a_request: list[str]) -> None:
    assert len(files_of_a_request) <= 55, files_of_a_request
