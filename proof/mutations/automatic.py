"""Mutants that are made from the syntax tree, without a table: small changes of all statements that order work.

A statement orders work if it has a rule's mark; every wait, lease, check and publication has one, or a row in `EXEMPT`.
`mutants` gives each of these statements all changes of `edits`. A mutant is a `Mutation` of one statement, so
`mechanism.applied` applies it, with the mutant's own marks. Only reads the text of modules; does not import them.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from proof.mutations.edits import Edit, edits_of, header_text
from proof.mutations.marks import (
    Function,
    Mark,
    below_package,
    functions_of,
    marks_in,
    modules_in,
    own_lines,
    package_of,
)
from proof.mutations.mechanism import applied
from proof.mutations.sites import LEFT_OUT
from proof.mutations.tables import Mutation
from sidestream.errors import ConfigError
from sidestream_kv.config import unknown_name

PREFIX = "auto:"
PLACES = (
    "kv",
    "schedule",
    "offload",
    "runner",
    "engine",
    "ranks",
    "device/base.py",
    "device/channel.py",
    "device/group.py",
)
"""Folders and modules of the package whose ordering code is mutated: all that schedules run, except the simulator."""


@dataclass(frozen=True, slots=True, eq=False)
class Mutant:
    """One automatic mutation.

    name         `auto:MODULE:FUNCTION:OPERATOR:ORDINAL`; the ordinal counts the operator's mutants in the function
    before       source of the statement, without nested statements, and `after` of what replaces it
    fingerprint  of the function and the change, without comments and lines: equal fingerprints are equal code
    mark         the changed statement
    """

    name: str
    before: str
    after: str
    fingerprint: str
    mark: Mark
    mutation: Mutation

    @property
    def change(self) -> str:
        """One line that shows the change."""
        return f"{self.before} → {self.after}"

    @property
    def lines(self) -> range:
        """The lines of the statement; a schedule that runs none of them cannot detect the mutant."""
        return own_lines(self.mark.statement)

    def applied(self) -> AbstractContextManager[None]:
        """Run the body with the mutant: see `mechanism.applied`."""
        return applied(self.mutation, {self.mark.name: self.mark})


@functools.cache
def mutants() -> Mapping[str, Mutant]:
    """All mutants by name, in the order of the source. Read once per process."""
    return {name: mutant for path in modules() for name, mutant in _mutants_of_module(path).items()}


def modules() -> list[Path]:
    """The modules that are mutated."""
    paths = (path for place in PLACES for path in modules_in(place))
    return [path for path in paths if not below_package(path).as_posix().startswith(LEFT_OUT)]


def find_mutant(name: str) -> Mutant:
    """The mutant with this name. Raises ConfigError, which names the nearest known name."""
    for path in modules():  # the others need not be read
        if name.startswith(f"{PREFIX}{_short(path)}:") and name in (found := _mutants_of_module(path)):
            return found[name]
    raise ConfigError(unknown_name("automatic mutant", name, mutants()))


@functools.cache
def _mutants_of_module(path: Path) -> Mapping[str, Mutant]:
    return {mutant.name: mutant for mutant in mutants_in(path, path.read_text(encoding="utf-8"))}


def mutants_in(path: Path, text: str) -> Iterator[Mutant]:
    """The mutants of one module's text, in source order. No two change a statement into the same one."""
    module = f"{package_of(path).name}.{_short(path)}"
    lines = {line for mark in marks_in(text, path, module) for line in own_lines(mark.statement)}
    for qualname, function in functions_of(ast.parse(text).body):
        if not _is_setter(function):
            yield from _mutants_of(path, module, qualname, function, lines)


def _short(path: Path) -> str:
    """The module's name below the package."""
    return ".".join(below_package(path).with_suffix("").parts).removesuffix(".__init__")


def _mutants_of(path: Path, module: str, qualname: str, function: Function, lines: set[int]) -> Iterator[Mutant]:
    original, seen, ordinals = ast.dump(function), set[str](), Counter[str]()
    for number, statement, edit in _edits(function, lines):
        after = edit.after(statement)
        fingerprint = hashlib.sha256(f"{original} {number} {after}".encode()).hexdigest()[:16]
        if fingerprint in seen or after == header_text(statement):
            continue
        seen.add(fingerprint)
        name = f"{PREFIX}{_short(path)}:{qualname}:{edit.name}:{ordinals[edit.name]}"
        mark = Mark(name, path, statement.lineno, module, qualname, function, statement)
        mutation = Mutation(name=name, hazard="", change=edit, consequence="")
        ordinals[edit.name] += 1
        yield Mutant(name, header_text(statement), after, fingerprint, mark, mutation)


def _edits(function: Function, lines: set[int]) -> Iterator[tuple[int, ast.stmt, Edit]]:
    """The possible changes of those of the function's statements that order work, by line, with statement numbers."""
    has_returned = False
    statements = [node for node in ast.walk(function) if isinstance(node, ast.stmt) and node is not function]
    statements.sort(key=lambda statement: (statement.lineno, statement.col_offset))
    for number, statement in enumerate(statements):
        if lines.isdisjoint(own_lines(statement)) or isinstance(statement, ast.Raise | Function | ast.ClassDef):
            continue
        if _returns_nothing(function) and not has_returned:
            has_returned = True
            yield number, statement, Edit("return")
        for edit in edits_of(statement):
            yield number, statement, edit
        if isinstance(statement, ast.If):
            for raised in statement.body:
                if isinstance(raised, ast.Raise):
                    yield statements.index(raised), raised, Edit("raise")


def _returns_nothing(function: Function) -> bool:
    return isinstance(function.returns, ast.Constant) and function.returns.value is None


def _is_setter(function: Function) -> bool:
    return any(
        isinstance(decorator, ast.Attribute) and decorator.attr == "setter" for decorator in function.decorator_list
    )
