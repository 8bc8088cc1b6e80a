"""Finds waits, leases, checks and publications by their names in the source of the rooms whose rules are mutated. Runs
nothing of it.

The scan finds too much rather than too little: a row in EXEMPT gives the reason why a site is no rule.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from proof.mutations.marks import below_package, functions_of, modules_in

ROOMS = (
    "kv",
    "schedule",
    "offload",
    "runner",
    "engine",
    "client",
    "device",
    "attention",
    "speculate",
    "models",
    "connectors",
)
LEFT_OUT = ("client/process.py", "engine/loading.py", "models/catalog.py")
"""They start and end a process, load an engine, download models. No schedule runs them."""

CALLS = re.compile(
    # waits, their fences, and the order of work
    "wait|wait_for|wait_host|poll|done|join|launched|gates|commit|_commit|callback|"
    # leases and owners
    "_deliver|send_rest|_drop|drop_pending|requeue|take|share|extend|release|_release|pin|reserve|begin|"
    "drop|flock|rename|replace|"
    "is_ready|retire|failed|publish|add|abandon|forget|forget_all|clear|remove|rekey|_retire|_unpin|"
    "_end|_forget|_?ended|_is_current|deliver_outputs|end_sample|_close"
)
"""Functions whose call is a wait, a lease or its end, or makes something findable or not."""

FLAGS = re.compile(
    "failure|epoch|_?generation|finite|void|written|pins|retired|last_fence|shares|keys_version|state|begun|"
    "stepped|paused|has_begun|"
    "avoid_tiers|avoid_disk|is_cached|_open|_references|_fences|abandoned|loading|reported|taken_in|submitted"
)
"""Attributes that say which results are valid and which requests go on: where they are set, and where a decision
depends on them.
"""

ARGUMENTS = re.compile("after|gates|fingerprint|salt")
"""Arguments that carry fences, and the parts of a key."""

_QUESTIONS = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Return)


@dataclass(frozen=True, slots=True)
class Site:
    """Something that looks like a rule. Lines from 1, columns in characters from 0.

    function   the outermost function around it, below its class
    """

    path: Path
    function: str
    line: int
    column: int
    name: str
    text: str

    def __str__(self) -> str:
        return (
            f"{self.path.parent.name}/{self.path.name}:{self.line}: `{self.name}` in {self.function}, in `{self.text}`"
        )


def sites_of(path: Path, text: str) -> list[Site]:
    """All sites in the functions of a module, in the order of the text."""
    lines = text.splitlines()
    found = {
        (line, at, name, function)
        for function, definition in functions_of(ast.parse(text).body)
        for node in ast.walk(definition)
        if isinstance(node, ast.FunctionDef) and node.name != "__init__"  # a new object protects from nothing yet
        for statement in node.body
        for line, at, name in _named(statement, asked=False)
    }
    return [
        Site(path, function, line, len(lines[line - 1].encode()[:at].decode()), name, lines[line - 1].strip())
        for line, at, name, function in sorted(found)
    ]


@functools.cache
def all_sites() -> list[Site]:
    """The sites of all rooms. Read once per process."""
    return [
        site
        for room in ROOMS
        for path in modules_in(room)
        if not below_package(path).as_posix().startswith(LEFT_OUT)
        for site in sites_of(path, path.read_text(encoding="utf-8"))
    ]


def _named(node: ast.AST, *, asked: bool) -> Iterator[tuple[int, int, str]]:
    """Line, column in bytes and name of each site in this node and below. `asked`: a decision depends on the node."""
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
