"""The figures of the source: what `make figures` prints."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import house

    yield house
    del sys.modules["house"]


def test_modules_that_import_each_other_are_found(house, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        Path("a.py"): "def f():\n    import sidestream.b\n",
        Path("b.py"): "from sidestream import c\n",
        Path(
            "c.py"
        ): "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import sidestream.d\nimport sidestream.a\n",
        Path("d.py"): "import sidestream.c\n",
    }
    monkeypatch.setattr(house, "sources", lambda: texts)
    assert house.import_circles() == [("sidestream.a", "sidestream.b", "sidestream.c")]


def test_no_more_modules_import_each_other(house) -> None:
    rooms = {".".join(name.split(".")[:3]) for group in house.import_circles() for name in group}
    assert rooms <= {"sidestream.attention.triton", "sidestream.device.cuda", "sidestream.speculate"} | {
        f"sidestream.speculate.{name}" for name in ("argmax", "launch", "ngram")
    }


def test_a_request_is_traced_from_http_to_disk_and_back(house, tmp_path: Path) -> None:
    files = house.files_of_a_request(tmp_path)
    assert {"server/app.py", "engine/loop.py", "attention/paged.py", "offload/tiers/disk.py"} <= set(files)
    assert not [name for name in files if name.startswith(("testing/", "cli/"))]
