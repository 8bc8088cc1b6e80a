"""Figures of the source itself: sizes, import circles, prose, and the files that one request's tokens go through.

`make figures` prints the figures; `tests/test_house.py` compares them with their bounds. Reads the source as text and
syntax trees; only `files_of_a_request` runs the code.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import io
import json
import queue
import re
import sys
import tempfile
import threading
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    ROOT / "src" / "sidestream",
    ROOT / "packages" / "sidestream-kv" / "src" / "sidestream_kv",
    ROOT / "packages" / "sidestream-order" / "src" / "sidestream_order",
)
# Not installed: for tests and measurements.
LABORATORY = (ROOT / "proof", ROOT / "bench")
# Words that stand for a noun which the sentence does not name.
VAGUE = ("what", "nobody", "whoever")


def sources(*, product_only: bool = False) -> dict[Path, str]:
    """Text of the packages' modules, by path: `sidestream/engine/loop.py`."""
    return {
        path.relative_to(package.parent): path.read_text(encoding="utf-8")
        for package in (PACKAGES if product_only else PACKAGES + LABORATORY)
        for path in sorted(package.rglob("*.py"))
    }


def lines_by_part() -> dict[str, int]:
    """Lines of each part: the three packages, the proof kit, the benchmarks, the tests."""
    found = Counter(tests=sum(path.read_text(encoding="utf-8").count("\n") for path in (ROOT / "tests").rglob("*.py")))
    for path, text in sources().items():
        found[path.parts[0]] += text.count("\n")
    return dict(found)


def longest_functions(count: int = 5) -> list[tuple[int, str]]:
    """Lines and names of the longest functions; GPU kernels, which Triton wants in one piece, do not count."""
    return _longest((ast.FunctionDef, ast.AsyncFunctionDef), count)


def longest_classes(count: int = 5) -> list[tuple[int, str]]:
    """Lines and names of the longest classes."""
    return _longest((ast.ClassDef,), count)


def _longest(kinds: tuple[type[ast.AST], ...], count: int) -> list[tuple[int, str]]:
    found = [
        (lines, f"{path.as_posix()}:{name}")
        for path, text in sources().items()
        for kind, lines, name in _outline(text).definitions
        if kind in kinds
    ]
    return sorted(found, reverse=True)[:count]


@dataclass(frozen=True)
class _Outline:
    """Kind, lines and name of the functions and classes of a module but for GPU kernels; for each import, the module
    and the names that are imported from it.
    """

    definitions: tuple[tuple[type[ast.AST], int, str], ...]
    imports: tuple[tuple[str, tuple[str, ...]], ...]


@functools.cache
def _outline(text: str) -> _Outline:
    nodes = [*ast.walk(ast.parse(text))]
    definitions = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef))
    whole = (alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names)
    parts = (node for node in nodes if isinstance(node, ast.ImportFrom) and not node.level)
    return _Outline(
        tuple(
            (type(node), (node.end_lineno or node.lineno) - node.lineno + 1, node.name)
            for node in definitions
            if not any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
        ),
        (
            *((name, ()) for name in whole),
            *((node.module, tuple(alias.name for alias in node.names)) for node in parts if node.module),
        ),
    )


def import_circles() -> list[tuple[str, ...]]:
    """Groups of modules that import each other, directly or not: inside functions and for type checkers as well."""
    texts = {_module_of(path): text for path, text in sources().items()}
    return sorted(_strong_components({name: _imports(text, texts.keys()) for name, text in texts.items()}))


def _module_of(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(text: str, modules: Set[str]) -> set[str]:
    """Those of `modules` that a module with this text imports."""
    found: set[str] = set()
    for module, names in _outline(text).imports:
        # A name is a module of the package, or else something that the package's own module holds.
        inside = {f"{module}.{name}" for name in names}
        found |= inside if inside and inside <= modules else {module, *inside}
    return found & modules


def _strong_components(graph: Mapping[str, set[str]]) -> Iterator[tuple[str, ...]]:
    """Tarjan's strongly connected components with more than one node."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    done: set[str] = set()

    def visit(name: str) -> Iterator[tuple[str, ...]]:
        order[name] = low[name] = len(order)
        stack.append(name)
        for target in sorted(graph[name] - {name}):
            if target not in order:
                yield from visit(target)
                low[name] = min(low[name], low[target])
            elif target not in done:
                low[name] = min(low[name], order[target])
        if low[name] == order[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            done.update(group)
            if len(group) > 1:
                yield tuple(sorted(group))

    for name in graph:
        if name not in order:
            yield from visit(name)


def vague_words_per_thousand() -> float:
    """How many words of comments and docstrings are `VAGUE`, in a thousand."""
    words: Counter[str] = Counter()
    for text in sources().values():
        words.update(re.findall(r"[a-z]+(?:'[a-z]+)?", " ".join(prose(text)).lower()))
    return 1000 * sum(words[word] for word in VAGUE) / words.total()


def prose(text: str) -> Iterator[str]:
    """Comments and docstrings of a module."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# ")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


class FilesRun:
    """Files of the product in which functions were called while it recorded, on threads that began after it did."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._records = False
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._records and event == "call":
            self._seen.add(frame.f_code.co_filename)

    def record(self, *, on: bool) -> None:
        """Begin to record, or stop."""
        self._records = on

    def end(self) -> list[str]:
        """Take the profile function off, and return the files, as in `sources`."""
        sys.setprofile(None)
        threading.setprofile(None)
        return sorted(
            Path(name).relative_to(package.parent).as_posix()
            for name in self._seen
            for package in PACKAGES
            if Path(name).is_relative_to(package)
        )


_FLUSH = "sidestream/engine/operations.py"
"""Only the flushes of `files_of_a_request` itself enter this file."""


def files_of_a_request(directory: Path) -> list[str]:
    """Files that a prompt's tokens go through: over HTTP to the engine, through the model, to host and disk, back from
    there when they are asked again, and out as a stream. A tiny model in one process; the start is not counted.
    """
    import httpx

    from proof.tiny_models import tiny_model_dir
    from sidestream import AsyncLLM, OffloadConfig
    from sidestream.server import RunningServer, ServerOptions, serve
    from sidestream_kv.offload.loads import CostModel

    # Unmeasured, loading counts as faster, however busy this machine is.
    never_measured = mock.patch.object(CostModel, "saw_prefill", lambda *_: None)
    never_measured.start()
    files = FilesRun()
    try:
        model = tiny_model_dir("llama", directory / "model", 1)
        tiers = OffloadConfig(host="64KiB", disk=directory / "kv", disk_capacity="64MiB")
        llm = AsyncLLM(model, engine_process=False, kv_memory="256KiB", max_model_len=256, offload=tiers)
        ready: queue.Queue[RunningServer] = queue.Queue()
        server = threading.Thread(target=serve, args=(llm, ServerOptions(port=0)), kwargs={"on_ready": ready.put})
        server.start()
        running = ready.get(timeout=30)
        try:
            with httpx.Client(base_url=running.url, timeout=30) as client:
                _ask(client, "a" * 100)
                files.record(on=True)
                _ask(client, "b" * 100)
                for text in "cdefghijklmnop":
                    asyncio.run(llm.flush())
                    _ask(client, text * 100)
                asyncio.run(llm.flush())
                cached = _ask(client, "b" * 100)
                files.record(on=False)
        finally:
            running.stop()
            server.join(30)
            asyncio.run(llm.close())
    finally:
        found = files.end()
        never_measured.stop()
    if not cached:
        raise AssertionError("the first prompt did not come back from a tier")
    return [name for name in found if name != _FLUSH]


def _ask(client: Any, prompt: str) -> int:
    """Stream a short answer; how many of the prompt's tokens came from a cache."""
    asked = {
        "model": "model",
        "prompt": prompt,
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with client.stream("POST", "/v1/completions", json=asked) as reply:
        reply.raise_for_status()
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: {")]
    usage = next(found["usage"] for found in map(json.loads, reversed(lines)) if found.get("usage"))
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def main() -> None:
    """Print the figures as JSON."""
    runner = [path for path in sources() if path.parts[1] in ("runner", "execute")]
    with tempfile.TemporaryDirectory() as directory:
        hops = files_of_a_request(Path(directory))
    json.dump(
        {
            "lines_by_part": lines_by_part(),
            "runner_modules": len([path for path in runner if path.name != "__init__.py"]),
            "import_circles": import_circles(),
            "longest_functions": longest_functions(),
            "longest_classes": longest_classes(),
            "vague_words_per_thousand": round(vague_words_per_thousand(), 1),
            "files_of_a_request": len(hops),
            "which_files": hops,
        },
        sys.stdout,
        indent=2,
    )
    print()


if __name__ == "__main__":
    main()
