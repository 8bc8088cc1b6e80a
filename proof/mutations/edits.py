"""The standard changes of automatic mutants: each removes or weakens something in one statement.

delete      delete a call, or an assignment to an attribute or an element
raise       delete a `raise` below a condition
return      return before the first statement of the function that orders work, if the function returns None
negate      negate a condition
compare     `<` ↔ `<=`, `>` ↔ `>=`
logic       `and` ↔ `or`
operand     drop an operand of `and` or `or`
extreme     `min` ↔ `max`, `any` ↔ `all`
constant    a whole number, plus one
element     drop an element of a list or tuple that is an argument, an operand, or has a variable length
argument    drop an argument that carries fences or a part of a key
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from proof.mutations.operators import Operator, Place, Slot, header_of
from proof.mutations.sites import ARGUMENTS

Change = Callable[[Slot], None]
"""Changes one expression in place, in a copy of its tree."""


@dataclass(frozen=True, slots=True)
class Edit(Operator):
    """One change of one statement.

    name     name in the table above
    number   position of the changed expression in `Place.slots`, and `change` its change; None: the statement itself
             is deleted, or for "return", preceded by a return
    """

    name: str
    number: int = 0
    change: Change | None = None

    def apply(self, place: Place) -> None:
        if self.change is not None:
            self.change(list(place.slots())[self.number])
        elif self.name == "return":
            place.replace(place.index + 1, [ast.Return(), place.statement])
        else:
            place.replace(place.index + 1, [])

    def after(self, statement: ast.stmt) -> str:
        """Source of the changed statement."""
        if self.change is None:
            return "return" if self.name == "return" else "pass"
        header = copy.deepcopy(header_of(statement))
        self.change(list(Place.alone(header).slots())[self.number])
        return header_text(header)


def header_text(statement: ast.stmt) -> str:
    """Source of a statement, without nested statements."""
    return ast.unparse(header_of(statement)).removesuffix("\n    pass")


def edits_of(statement: ast.stmt) -> Iterator[Edit]:
    """All changes of a statement, except those that also depend on its place: "raise" and "return"."""
    if _is_deletable(statement):
        yield Edit("delete")
    for number, slot in enumerate(Place.alone(statement).slots()):
        for name, change in _changes_of(slot):
            yield Edit(name, number, change)


def _is_deletable(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Delete():
            return True
        case ast.AugAssign(target=target) | ast.Assign(targets=[target]):
            return isinstance(target, ast.Attribute | ast.Subscript)
    return False


_WEAKER: tuple[tuple[type[ast.cmpop], type[ast.cmpop]], ...] = (
    (ast.Lt, ast.LtE),
    (ast.LtE, ast.Lt),
    (ast.Gt, ast.GtE),
    (ast.GtE, ast.Gt),
)
_OPPOSITE = (("min", "max"), ("max", "min"), ("any", "all"), ("all", "any"))


def _changes_of(slot: Slot) -> Iterator[tuple[str, Change]]:
    if _is_condition(slot):
        yield "negate", _negate
    match slot.node:
        case ast.Compare(ops=ops):
            for index, found in enumerate(ops):
                for old, new in _WEAKER:
                    if isinstance(found, old):
                        yield "compare", _Set("ops", index, new())
        case ast.BoolOp(op=found, values=values):
            yield "logic", _Set("op", None, ast.And() if isinstance(found, ast.Or) else ast.Or())
            for index in range(len(values)):
                yield "operand", _Drop("values", index)
        case ast.Call(func=ast.Name(id=name)) if name in dict(_OPPOSITE):
            yield "extreme", _Set("func", None, ast.Name(dict(_OPPOSITE)[name], ast.Load()))
        case ast.Constant(value=value) if type(value) is int and slot.field != "annotation":
            yield "constant", _Set("value", None, value + 1)
        case ast.Tuple(elts=elements, ctx=ast.Load()) | ast.List(elts=elements, ctx=ast.Load()):
            if _has_any_length(slot, elements):
                for index in range(len(elements)):
                    yield "element", _Drop("elts", index)
    if isinstance(slot.node, ast.Call):
        for index, keyword in enumerate(slot.node.keywords):
            if keyword.arg is not None and ARGUMENTS.fullmatch(keyword.arg):
                yield "argument", _Drop("keywords", index)


def _is_condition(slot: Slot) -> bool:
    """Whether a decision depends on the expression itself."""
    return slot.field in ("test", "ifs") and isinstance(slot.parent, ast.If | ast.While | ast.IfExp | ast.comprehension)


def _has_any_length(slot: Slot, elements: list[ast.expr]) -> bool:
    """Whether the list or tuple is no record with a fixed number of fields, as far as its place shows."""
    if any(isinstance(element, ast.Starred) for element in elements):
        return True
    match slot.parent, slot.field:
        case (ast.Call(), "args") | (ast.keyword(), "value") | (ast.BinOp(), _):
            return True
    return isinstance(slot.node, ast.List)


def _negate(slot: Slot) -> None:
    match slot.node:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            slot.put(operand)
        case node:
            assert isinstance(node, ast.expr)
            slot.put(ast.UnaryOp(ast.Not(), node))


@dataclass(frozen=True, slots=True)
class _Set:
    """Set a field of the expression, or an entry of a field that is a list."""

    field: str
    index: int | None
    value: Any

    def __call__(self, slot: Slot) -> None:
        Slot(slot.node, self.field, self.index, slot.node).put(self.value)


@dataclass(frozen=True, slots=True)
class _Drop:
    """Drop an entry of a field that is a list; `and` and `or` with one operand left become this operand."""

    field: str
    index: int

    def __call__(self, slot: Slot) -> None:
        entries = getattr(slot.node, self.field)
        del entries[self.index]
        if isinstance(slot.node, ast.BoolOp) and len(entries) == 1:
            slot.put(entries[0])
