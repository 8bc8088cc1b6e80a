"""README and docs: links lead somewhere, and files, methods and tests that they name exist.

`make docs` checks the site's own links.
"""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    ROOT / "src" / "sidestream",
    ROOT / "packages" / "sidestream-kv" / "src" / "sidestream_kv",
    ROOT / "packages" / "sidestream-order" / "src" / "sidestream_order",
)
LABORATORY = (ROOT / "proof", ROOT / "bench")
PAGES = [path for pattern in ("*.md", "docs/**/*.md", "bench/**/*.md") for path in sorted(ROOT.glob(pattern))]
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"[\w./-]+/[\w.-]*\.(?:py|md|txt|json)")
_MEMBER = re.compile(r"([A-Z]\w*[a-z]\w*)\.(\w+)(?:\(.*\))?")
_CLASS = re.compile(r"^class (\w+)(?:\((\w+)\))?", re.MULTILINE)
_FOREIGN = {"AutoConfig", "AutoModelForCausalLM", "CUDAGraph"}  # classes of transformers and torch
_TEST = re.compile(r"test_\w+")


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Anchors that GitHub gives to a page's headings."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in _HEADING.findall(prose(page))}


def test_every_link_points_to_an_existing_file_and_heading() -> None:
    broken = []
    for page, link in [(found, link) for found in PAGES for link in _LINK.findall(prose(found))]:
        if link.startswith(("https://", "http://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append((page.name, link))
    assert not broken


def test_every_file_that_a_page_names_exists() -> None:
    homes = (ROOT, ROOT / "src", ROOT / "docs", *PACKAGES)
    pages = [prose(page) for page in PAGES if page.name != "CHANGELOG.md"]
    named = {code for text in pages for code in _CODE.findall(text) if _PATH.fullmatch(code)}
    assert not {path for path in named if not any((home / path).exists() for home in homes)}


def test_every_test_that_a_page_names_exists() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    exist = {path.stem for path in sources}
    for source in sources.values():
        exist.update(re.findall(r"def (test_\w+)", source))
    named = {code.removesuffix(".py") for page in PAGES for code in _CODE.findall(prose(page))}
    assert not {name for name in named if _TEST.fullmatch(name)} - exist


def test_every_member_of_a_class_that_a_page_names_exists() -> None:
    sources = [path.read_text(encoding="utf-8") for package in PACKAGES + LABORATORY for path in package.rglob("*.py")]
    codes = {code for page in PAGES for code in _CODE.findall(prose(page))}
    named = {found.groups() for code in codes if (found := _MEMBER.fullmatch(code)) and found[1] not in _FOREIGN}
    assert len(named) > 20

    homes: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for source in sources:
        for owner, base in _CLASS.findall(source):
            homes[owner].append((base, source))

    def exists(owner: str, member: str) -> bool:
        return any(
            re.search(rf"\b{member}\b", source) or (base and exists(base, member)) for base, source in homes[owner]
        )

    assert not {f"{owner}.{member}" for owner, member in named if not exists(owner, member)}


def test_prose_has_lines_of_120_columns_at_most_and_no_marks_of_a_conflict() -> None:
    lines = [(page.name, line) for page in PAGES if page.name != "tiers.md" for line in page.read_text().splitlines()]
    assert not [found for found in lines if len(found[1]) > 120 and not found[1].startswith(("|", "diff --git "))]
    assert not [found for found in lines if found[1].startswith(("<<<<<<< ", ">>>>>>> "))]


def test_no_decision_is_longer_than_a_page() -> None:
    decisions = [page for page in PAGES if page.parent.name == "decisions"]
    assert decisions and not [page.name for page in decisions if len(page.read_text().splitlines()) > 60]


def test_the_order_of_rooms_is_the_one_that_is_checked() -> None:
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = [re.split(r" [|:] ", layer) for layer in contract["contracts"][0]["layers"]]
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = page.partition("## Who may import whom")[2].split("```")[1]
    assert [re.split(r"\s+[|·]\s+", line) for line in block.strip().splitlines()] == layers


@pytest.mark.parametrize(("page", "heading"), [("docs/architecture.md", "## Rooms"), ("README.md", "## The map")])
def test_maps_list_exactly_the_existing_rooms(page: str, heading: str) -> None:
    inside = [path for package in PACKAGES for path in package.iterdir()]
    rooms = {path.stem for path in inside if path.suffix == ".py" or (path / "__init__.py").exists()}
    table = (ROOT / page).read_text(encoding="utf-8").partition(heading)[2].partition("\n## ")[0]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {code.removesuffix("/").removesuffix(".py") for cell in first_cells for code in _CODE.findall(cell)}
    assert named == rooms - {"__init__", "__main__"}


@pytest.mark.parametrize(
    ("heading", "module"),
    [("## Processes", "client/messages.py"), ("## Threads that are not streams", "offload/tickets.py")],
)
def test_a_table_of_messages_names_messages(heading: str, module: str) -> None:
    (page,) = [page for package in PACKAGES if (page := package / module).exists()]
    source = page.read_text(encoding="utf-8")
    section = (ROOT / "docs" / "streams.md").read_text(encoding="utf-8").partition(heading)[2].partition("\n## ")[0]
    table = section.partition("| message |")[2].partition("\n\n")[0]
    named = {code for line in table.splitlines()[2:] for code in _CODE.findall(line.split("|")[1])}
    assert len(named) > 3
    assert named <= set(re.findall(r"^class (\w+)", source, re.MULTILINE))
