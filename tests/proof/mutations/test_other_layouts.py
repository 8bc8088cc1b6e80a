"""Neither the layout of the product's code nor the names of its local variables matter to a mutation."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Callable

import pytest

from proof.mutations import EQUIVALENT, MUTATIONS, Mutation, changed_trees, find, product_marks
from proof.mutations.marks import Mark, marks_in

pytestmark = pytest.mark.slow

ALL = (*MUTATIONS, *(equivalent.mutation for equivalent in EQUIVALENT))
_RENAMED = "_by_another_name"


@pytest.mark.parametrize("columns", [60, 320])
def test_every_mutation_does_the_same_in_code_of_another_layout(columns: int) -> None:
    marks = marks_of(functools.partial(laid_out, columns=columns))
    for mutation in ALL:
        assert dumps(mutation, marks) == here(mutation.name), mutation.name


def test_every_mutation_does_the_same_when_local_variables_are_renamed() -> None:
    marks = marks_of(with_locals_renamed)
    for mutation in ALL:
        assert dumps(mutation, marks).replace(_RENAMED, "") == here(mutation.name), mutation.name


@functools.cache
def here(name: str) -> str:
    """What a mutation makes of the code as it is."""
    return dumps(find(name), product_marks())


def marks_of(change: Callable[[str], str]) -> dict[str, Mark]:
    """The product's marks in changed text."""
    texts = {(mark.path, mark.module): mark.path.read_text(encoding="utf-8") for mark in product_marks().values()}
    changed = {key: change(text) for key, text in texts.items()}
    assert sum(changed[key] != text for key, text in texts.items()) > len(texts) // 2
    return {mark.name: mark for (path, module), text in changed.items() for mark in marks_in(text, path, module)}


def dumps(mutation: Mutation, marks: dict[str, Mark]) -> str:
    return "\n".join(ast.dump(tree) for _, tree in sorted(changed_trees(mutation, marks), key=lambda item: item[0]))


def laid_out(text: str, columns: int) -> str:
    command = [sys.executable, "-m", "ruff", "format", "--isolated", f"--line-length={columns}", "-"]
    config = ["--config", "format.skip-magic-trailing-comma=true"]
    done = subprocess.run([*command, *config], input=text, capture_output=True, text=True, check=True)
    return done.stdout


def with_locals_renamed(text: str) -> str:
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    places = {
        (node.lineno - 1, node.end_col_offset or 0): node.id.encode()
        for function in ast.walk(ast.parse(text))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for names in [_assigned(function)]
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and node.id in names
    }
    for (line, stop), name in sorted(places.items(), reverse=True):
        if lines[line][:stop].endswith(name):  # before Python 3.12, names in f-strings have no place
            lines[line] = lines[line][:stop] + _RENAMED.encode() + lines[line][stop:]
    return b"".join(lines).decode()


def _assigned(function: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
