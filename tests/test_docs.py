"""README and docs: links lead somewhere, and files, methods and tests that they name exist.

`make docs` checks the site's own links.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [path for pattern in ("*.md", "docs/**/*.md") for path in sorted(ROOT.glob(pattern))]
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"[\w./-]+/[\w.-]*\.(?:py|md|txt|json)")
_MEMBER = re.compile(r"([A-Z]\w*[a-z]\w*)\.(\w+)(?:\(.*\))?")
_CLASS = r"^class {}\b(?:\((\w+)\))?"
_FOREIGN = {"AutoConfig", "AutoModelForCausalLM", "CUDAGraph"}  # classes of transformers and torch
_TEST = re.compile(r"test_\w+")


def each_page(pages: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Anchors that GitHub gives to a page's headings."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in _HEADING.findall(prose(page))}


@each_page(PAGES)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    broken = []
    for link in _LINK.findall(prose(page)):
        if link.startswith(("https://", "http://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@each_page([page for page in PAGES if page.name != "CHANGELOG.md"])
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    homes = (ROOT, ROOT / "src", ROOT / "src" / "sidestream", ROOT / "docs")
    named = {code for code in _CODE.findall(prose(page)) if _PATH.fullmatch(code)}
    assert not {path for path in named if not any((home / path).exists() for home in homes)}


def test_every_test_that_a_page_names_exists() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    exist = {path.stem for path in sources}
    for source in sources.values():
        exist.update(re.findall(r"def (test_\w+)", source))
    named = {code.removesuffix(".py") for page in PAGES for code in _CODE.findall(prose(page))}
    assert not {name for name in named if _TEST.fullmatch(name)} - exist


def test_every_member_of_a_class_that_a_page_names_exists() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    codes = {code for page in PAGES for code in _CODE.findall(prose(page))}
    named = {found.groups() for code in codes if (found := _MEMBER.fullmatch(code)) and found[1] not in _FOREIGN}
    assert len(named) > 20

    def exists(owner: str, member: str) -> bool:
        homes = [(found, source) for source in sources if (found := re.search(_CLASS.format(owner), source, re.M))]
        return any(
            re.search(rf"\b{member}\b", source) or (found[1] and exists(found[1], member)) for found, source in homes
        )

    assert not {f"{owner}.{member}" for owner, member in named if not exists(owner, member)}


@each_page([page for page in PAGES if page.name != "tiers.md"])
def test_prose_has_lines_of_120_columns_at_most(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if len(line) > 120 and not line.startswith("|")]


@each_page([page for page in PAGES if page.parent.name == "decisions"])
def test_no_decision_is_longer_than_a_page(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 60
