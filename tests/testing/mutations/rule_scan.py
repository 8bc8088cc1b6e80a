"""Finds what looks like a wait, a lease, a check or a publish order in the source of the rooms whose rules are mutated.
Runs nothing of it.

By name only, so it finds too much rather than too little: what is no rule has a row in EXEMPT that says why.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import sidestream
from sidestream.testing.mutations import EQUIVALENT, EXEMPT, MUTATIONS, Edit, Exempt, source_of

PACKAGE = Path(sidestream.__file__).parent
ROOMS = ("kv", "schedule", "offload", "runner", "engine", "client")
LEFT_OUT = ("client/process.py",)
"""Starts and ends a process: nothing there orders messages, and no schedule runs it."""

CALLS = re.compile(
    # waits, what they wait for, and what comes before what
    "wait|wait_host|poll|done|join|launched|gates|commit|_commit|callback|"
    # leases and owners
    "_deliver|send_rest|_drop|take|share|extend|release|_release|pin|reserve|begin|drop|flock|rename|replace|"
    "is_ready|retire|failed|publish|add|abandon|forget|forget_all|clear|remove|rekey|_retire|_unpin|_end|_forget|_?ended|_is_current|deliver_outputs|end_sample|_close"
)
"""Functions whose call is a wait, a lease or its end, or makes something findable or not."""

FLAGS = re.compile(
    "failure|epoch|_?generation|finite|void|written|pins|retired|last_fence|shares|keys_version|state|begun|stepped|admits_new|"
    "avoid_tiers|avoid_disk|is_cached|_open|_references|_fences|abandoned|loading|told|reported|taken_in|submitted"
)
"""Attributes that say what may be believed and who may go on: where they are set, and where a decision depends on them.
"""

ARGUMENTS = re.compile("after|gates|fingerprint|salt")
"""Arguments that say what is waited for, and what a key names."""

_QUESTIONS = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Return)


@dataclass(frozen=True, slots=True)
class Site:
    """Something that looks like a rule. Lines from 1, columns in characters from 0."""

    path: Path
    line: int
    column: int
    what: str
    text: str

    def __str__(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}:{self.line}: `{self.what}` in `{self.text}`"


@dataclass(frozen=True, slots=True)
class Span:
    """Where a snippet of one of the tables lies."""

    path: Path
    start: tuple[int, int]
    stop: tuple[int, int]

    def holds(self, site: Site) -> bool:
        return self.path == site.path and self.start <= (site.line, site.column) < self.stop


def sites_of(path: Path, text: str) -> list[Site]:
    """All sites in the functions of a module, in the order of the text."""
    lines = text.splitlines()
    found: set[tuple[int, int, str]] = set()
    for function in ast.walk(ast.parse(text)):
        if (
            isinstance(function, ast.FunctionDef) and function.name != "__init__"
        ):  # what begins to exist protects from nothing yet
            for statement in function.body:
                found.update(_named(statement, asked=False))
    return [
        Site(path, line, len(lines[line - 1].encode()[:at].decode()), what, lines[line - 1].strip())
        for line, at, what in sorted(found)
    ]


def all_sites() -> list[Site]:
    """The sites of all rooms."""
    return [
        site
        for room in ROOMS
        for path in sorted((PACKAGE / room).rglob("*.py"))
        if path.relative_to(PACKAGE).as_posix() not in LEFT_OUT
        for site in sites_of(path, path.read_text(encoding="utf-8"))
    ]


def span_of(row: Edit | Exempt) -> Span:
    """Where its snippet lies. Raises InvariantError unless it occurs exactly once."""
    source, snippet = source_of(row.target), row.old if isinstance(row, Edit) else row.snippet
    start = source.find(snippet)
    return Span(Path(source.path), source.position(start), source.position(start + len(snippet)))


def mutated_spans() -> list[Span]:
    """What some mutation changes."""
    mutations = (*MUTATIONS, *(equivalent.mutation for equivalent in EQUIVALENT))
    return [span_of(edit) for mutation in mutations for edit in mutation.edits]


def uncovered(sites: Iterable[Site]) -> list[Site]:
    """Those that no row of any table names."""
    spans = [*mutated_spans(), *map(span_of, EXEMPT)]
    return [site for site in sites if not any(span.holds(site) for span in spans)]


def _named(node: ast.AST, *, asked: bool) -> Iterator[tuple[int, int, str]]:
    """Line, column in bytes and name of what looks like a rule in this node and below. `asked`: a decision depends on
    the node.
    """
    match node:
        case ast.Raise():
            return  # a message
        case ast.Call(func=ast.Attribute(value=ast.Constant())):
            pass  # a method of a text
        case ast.Call(func=ast.Attribute(attr=name) as function) if CALLS.fullmatch(name):
            yield *_end_of(function), name
        case ast.Call(func=ast.Name(id=name) as function) if CALLS.fullmatch(name):
            yield *_end_of(function), name
        case ast.Attribute(attr=name) if asked and FLAGS.fullmatch(name):
            yield *_end_of(node), name
        case ast.keyword(arg=str(name)) if ARGUMENTS.fullmatch(name):
            yield node.lineno, node.col_offset, f"{name}="
    for field, below in ast.iter_fields(node):
        decides = asked or isinstance(node, _QUESTIONS) or field in ("test", "ifs", "target", "targets")
        for child in below if isinstance(below, list) else [below]:
            if isinstance(child, ast.AST):
                yield from _named(child, asked=decides and not isinstance(child, ast.stmt))


def _end_of(node: ast.Attribute | ast.Name) -> tuple[int, int]:
    """Where the last name of a chain begins."""
    name = node.attr if isinstance(node, ast.Attribute) else node.id
    return node.end_lineno or node.lineno, (node.end_col_offset or 0) - len(name.encode())
