"""Removes one rule from the running code, and restores the code. The product contains no hooks for this.

A mutation names marked statements (`marks`) and their changes (`operators`). While it is applied, each marked function
runs code compiled from its changed syntax tree, with the file name and line numbers of the original. The function
object stays the same, so the change also reaches importers, bound methods and decorators.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType
from typing import Any

from proof.mutations.marks import Function, Mark, product_marks
from proof.mutations.operators import DoesNotFit, Operator, Place
from proof.mutations.tables import Mutation
from sidestream.errors import InvariantError

# Functions that are changed now. A second mutation of the same function would be compiled from the original source, and
# would undo the first.
_changed_now: set[FunctionType] = set()


@contextmanager
def applied(mutation: Mutation, marks: Mapping[str, Mark] | None = None) -> Iterator[None]:
    """Run the body without the mutation's rule; then restore the original code, also after an error.

    Changes functions for the whole process: no other thread may be running one of them at the start or the end. Raises
    InvariantError, and changes nothing, if the mutation does not fit the code or if one of its functions is changed
    already.

    marks   marks by name; None: the marks of the product
    """
    changes = [(function, function.__code__, code) for function, code in changed_functions(mutation, marks)]
    with ExitStack() as undo:
        for function, original, code in changes:
            undo.callback(_changed_now.discard, function)
            undo.callback(setattr, function, "__code__", original)
            _changed_now.add(function)
            function.__code__ = code
        yield


def changed_functions(
    mutation: Mutation, marks: Mapping[str, Mark] | None = None
) -> list[tuple[FunctionType, CodeType]]:
    """The functions that a mutation changes, each with its changed code. Changes nothing."""
    return [
        _compiled(_function_of(module, qualname), tree) for (module, qualname), tree in changed_trees(mutation, marks)
    ]


def changed_trees(
    mutation: Mutation, marks: Mapping[str, Mark] | None = None
) -> list[tuple[tuple[str, str], Function]]:
    """The functions that a mutation changes, as module and qualified name, each with its changed syntax tree. Does not
    import the modules.
    """
    marks = product_marks() if marks is None else marks
    by_function: dict[tuple[str, str], list[tuple[Mark, Operator]]] = {}
    for change in mutation.changes:
        mark = _mark_of(mutation, change.mark, marks)
        by_function.setdefault((mark.module, mark.qualname), []).append((mark, change.operator))
    return [(name, _changed_tree(mutation.name, changes, marks)) for name, changes in by_function.items()]


def check_marks(mutations: Iterable[Mutation], marks: Mapping[str, Mark]) -> None:
    """Raises InvariantError for a mark without a mutation, and for a mutation without a mark."""
    used = {
        _mark_of(mutation, name, marks).name
        for mutation in mutations
        for change in mutation.changes
        for name in (change.mark, *change.operator.marks)
    }
    for mark in marks.values():
        if mark.name not in used:
            raise InvariantError(f"no mutation uses the mark {mark}: add one to its room's table, or delete the mark")


def _mark_of(mutation: Mutation, name: str, marks: Mapping[str, Mark]) -> Mark:
    if name not in marks:
        raise InvariantError(f"mutation {mutation.name} has no place: mark its statement with `# rule: {name}`")
    return marks[name]


def _changed_tree(name: str, changes: Sequence[tuple[Mark, Operator]], marks: Mapping[str, Mark]) -> Function:
    """A copy of the marked function with the changes applied."""
    original = changes[0][0].function
    copies: dict[int, Any] = {}
    function: Function = _copied(original, copies)

    def place_of(mark: str) -> Place:
        other = marks.get(mark)
        if other is None or other.function is not original:
            raise DoesNotFit(f"no mark {mark} stands in the same function")
        return Place(function, copies[id(other.statement)], place_of)

    for mark, operator in changes:
        try:
            operator.apply(place_of(mark.name))
        except DoesNotFit as error:
            raise InvariantError(f"mutation {name}: {operator} does not fit the mark {mark}: {error}") from None
    return ast.fix_missing_locations(function)


def _copied(node: Any, copies: dict[int, Any]) -> Any:
    """A deep copy of a syntax tree, much faster than `deepcopy`. `copies`: each copy, by the id of its original."""
    if isinstance(node, list):
        return [_copied(child, copies) for child in node]
    if not isinstance(node, ast.AST):
        return node
    made = copies[id(node)] = type(node).__new__(type(node))
    for name, value in vars(node).items():
        setattr(made, name, _copied(value, copies))
    return made


def _function_of(module: str, qualname: str) -> FunctionType:
    """The function with this name, without its decorators; for a property, its getter. Imports the module."""
    found: Any = importlib.import_module(module)
    for name in qualname.split("."):
        found = vars(found)[name]
    if isinstance(found, staticmethod | classmethod):
        found = found.__func__
    if isinstance(found, property):
        found = found.fget
    function = inspect.unwrap(found)
    if not isinstance(function, FunctionType):
        raise InvariantError(f"{module}:{qualname} is no function of Python: move its mark")
    if function in _changed_now:
        raise InvariantError(f"{module}:{qualname} is changed already: end the other mutation first")
    return function


def _compiled(function: FunctionType, tree: Function) -> tuple[FunctionType, CodeType]:
    """A function and the code of its changed tree, compiled inside classes of the same names, so that `super` and
    private names work.
    """
    tree.decorator_list = []  # the original's decorators stay in place
    body: list[ast.stmt] = [tree]
    *classes, _ = function.__qualname__.split(".")
    for name in reversed(classes):
        (around,) = ast.parse(f"class {name}: pass").body
        assert isinstance(around, ast.ClassDef)
        around.body = body
        body = [around]
    original = function.__code__
    if "__class__" in original.co_freevars:  # a mutation may have removed the only `super()`
        tree.body += ast.parse("if False:\n    __class__").body
    flags = original.co_flags & annotations.compiler_flag
    code: CodeType = compile(ast.Module(body, []), original.co_filename, "exec", flags=flags, dont_inherit=True)
    for name in (*classes, original.co_name):
        code = next(const for const in code.co_consts if isinstance(const, CodeType) and const.co_name == name)
    return function, code
