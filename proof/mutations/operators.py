"""The changes that mutations make to the statements marked with their rules. They change the syntax tree, so neither
the layout nor the names of local variables matter.

An operator gets a `Place` in a copy of the function, and changes it. It raises `DoesNotFit` unless exactly one node of
the statement matches. Operators that take a name (`naming`, `call`) look in the statement for functions, attributes,
keywords and strings with this name; in a compound statement, they look only at the header.
"""

from __future__ import annotations

import ast
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast


class DoesNotFit(Exception):
    """The operator cannot change the marked statement, because the statement is of another kind."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The position of a node in the tree: the field of its parent, and the index if the field is a list."""

    parent: ast.AST
    field: str
    index: int | None
    node: ast.AST

    def put(self, node: ast.AST) -> None:
        """Put another node at this position."""
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node


@dataclass(frozen=True, slots=True)
class Place:
    """A marked statement in a copy of its function.

    other   function that returns the place of another mark in the same function, by name; raises DoesNotFit if the mark
            is in another function
    """

    function: ast.AST
    statement: ast.stmt
    other: Callable[[str], Place]

    @property
    def body(self) -> list[ast.stmt]:
        """The list of statements that contains the statement."""
        for node in ast.walk(self.function):
            for _, value in ast.iter_fields(node):
                if isinstance(value, list) and any(entry is self.statement for entry in value):
                    return cast("list[ast.stmt]", value)
        raise DoesNotFit("the statement was removed by an earlier change of the same mutation")

    @property
    def index(self) -> int:
        """Position of the statement in `body`."""
        return next(index for index, entry in enumerate(self.body) if entry is self.statement)

    @classmethod
    def alone(cls, statement: ast.stmt) -> Place:
        """The place of a statement outside of any function."""
        return cls(ast.Module([statement], []), statement, _no_other)

    def replace(self, stop: int, statements: list[ast.stmt]) -> None:
        """Replace the statements from this one to index `stop`, exclusive, by other statements."""
        body, first = self.body, self.index
        if len(body) == stop - first and not statements:
            statements = [ast.Pass()]
        for statement in statements:
            if not hasattr(statement, "lineno"):
                ast.copy_location(statement, self.statement)
        body[first:stop] = statements

    def slots(self) -> Iterator[Slot]:
        """All nodes below the statement that are not statements, outermost first."""
        return _below(self.statement)

    def only(self, wanted: Callable[[Slot], bool], what: str) -> Slot:
        """The only slot that is wanted. If there is none or more than one, raises DoesNotFit, which describes them as
        `what`.
        """
        found = [slot for slot in self.slots() if wanted(slot)]
        if len(found) != 1:
            raise DoesNotFit(f"the statement has {len(found)} of {what}, not one")
        return found[0]

    def call(self, name: str) -> ast.Call:
        """The only call of a function or method with this name."""
        return cast("ast.Call", self.only(lambda slot: _called(slot.node) == name, f"calls of {name}").node)


class Operator(ABC):
    """A change of a marked statement."""

    __slots__ = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks of other statements that the operator refers to."""
        return ()

    @abstractmethod
    def apply(self, place: Place) -> None:
        """Change the tree. Raises DoesNotFit."""


@dataclass(frozen=True, slots=True)
class Delete(Operator):
    """Delete this number of statements, beginning with the marked one."""

    statements: int = 1

    def apply(self, place: Place) -> None:
        stop = place.index + self.statements
        if stop > len(place.body):
            raise DoesNotFit(
                f"{self.statements} statements are to be deleted, and {len(place.body) - place.index} are left"
            )
        place.replace(stop, [])


@dataclass(frozen=True, slots=True)
class Become(Operator):
    """Replace the statement by other code."""

    source: str

    def apply(self, place: Place) -> None:
        place.replace(place.index + 1, _statements(self.source))


@dataclass(frozen=True, slots=True)
class Append(Operator):
    """Add code after the statement."""

    source: str

    def apply(self, place: Place) -> None:
        place.replace(place.index + 1, [place.statement, *_statements(self.source)])


@dataclass(frozen=True, slots=True)
class Swap(Operator):
    """Run the next statement first."""

    def apply(self, place: Place) -> None:
        body, index = place.body, place.index
        if index + 1 == len(body):
            raise DoesNotFit("no statement follows that it could be swapped with")
        body[index], body[index + 1] = body[index + 1], body[index]


@dataclass(frozen=True, slots=True)
class MoveAfter(Operator):
    """Move the statement behind another marked statement of the same function."""

    mark: str

    @property
    def marks(self) -> tuple[str, ...]:
        """The mark of the other statement."""
        return (self.mark,)

    def apply(self, place: Place) -> None:
        target = place.other(self.mark)
        statement = place.statement
        if any(node is target.statement for node in ast.walk(statement)):
            raise DoesNotFit(f"{self.mark} stands inside the statement that is to go after it")
        place.replace(place.index + 1, [])
        target.body.insert(target.index + 1, statement)


@dataclass(frozen=True, slots=True)
class Always(Operator):
    """Make a condition always true: the test of an `if` or `while`, else the only conditional expression or condition
    of a comprehension in the statement.
    """

    value: bool = True

    def apply(self, place: Place) -> None:
        _condition(place).put(ast.Constant(self.value))


@dataclass(frozen=True, slots=True)
class Never(Operator):
    """Make a condition always false."""

    def apply(self, place: Place) -> None:
        Always(False).apply(place)


@dataclass(frozen=True, slots=True)
class Once(Operator):
    """Turn a `while` into an `if`."""

    def apply(self, place: Place) -> None:
        loop = place.statement
        if not isinstance(loop, ast.While):
            raise DoesNotFit("the statement is no `while`")
        place.replace(place.index + 1, [ast.If(loop.test, loop.body, loop.orelse)])


@dataclass(frozen=True, slots=True)
class DropOperand(Operator):
    """Drop an operand of an `and`, `or`, `+` or `-`, or an element of a list, tuple or dict.

    which   a name in the operand (for a dict, its key); if several nested expressions match, the innermost is meant. Or
            the operand's position in the statement's outermost expression with operands
    """

    which: str | int

    def apply(self, place: Place) -> None:
        operand = _operand(place, self.which)
        parent: Any = operand.parent
        if isinstance(parent, ast.BinOp):
            _slot_of(place, parent).put(parent.left if operand.field == "right" else parent.right)
            return
        index = cast("int", operand.index)
        del getattr(parent, operand.field)[index]
        if isinstance(parent, ast.Dict):
            del parent.values[index]
        elif isinstance(parent, ast.BoolOp) and len(parent.values) == 1:
            _slot_of(place, parent).put(parent.values[0])


@dataclass(frozen=True, slots=True)
class SetOperand(Operator):
    """Replace an operand (see DropOperand) by another expression."""

    which: str | int
    value: str

    def apply(self, place: Place) -> None:
        operand, value = _operand(place, self.which), _expression(self.value)
        if isinstance(operand.parent, ast.Dict):
            operand.parent.values[cast("int", operand.index)] = value
        else:
            operand.put(value)


@dataclass(frozen=True, slots=True)
class SetArgument(Operator):
    """Replace an argument of the only call of this name. `which` is the argument's position or keyword."""

    call: str
    which: int | str
    value: str

    def apply(self, place: Place) -> None:
        call = place.call(self.call)
        value = _expression(self.value)
        if isinstance(self.which, int):
            if self.which >= len(call.args):
                raise DoesNotFit(f"{self.call} has {len(call.args)} arguments by position, and {self.which} is meant")
            call.args[self.which] = value
        else:
            _keyword(call, self.which, self.call).value = value


@dataclass(frozen=True, slots=True)
class DropArgument(Operator):
    """Drop a keyword argument of the only call of this name."""

    call: str
    keyword: str

    def apply(self, place: Place) -> None:
        call = place.call(self.call)
        call.keywords.remove(_keyword(call, self.keyword, self.call))


@dataclass(frozen=True, slots=True)
class CallInstead(Operator):
    """Let the only call of this name call another function or method."""

    call: str
    other: str

    def apply(self, place: Place) -> None:
        function = place.call(self.call).func
        if isinstance(function, ast.Attribute):
            function.attr = self.other
        else:
            cast("ast.Name", function).id = self.other


@dataclass(frozen=True, slots=True)
class Unwrap(Operator):
    """Replace the only call of this name by one of its arguments."""

    call: str
    position: int = 0

    def apply(self, place: Place) -> None:
        call = place.call(self.call)
        if self.position >= len(call.args):
            raise DoesNotFit(f"{self.call} has {len(call.args)} arguments by position, and {self.position} is meant")
        _slot_of(place, call).put(call.args[self.position])


@dataclass(frozen=True, slots=True)
class Value(Operator):
    """Replace the value that the statement assigns, returns, loops over or tests."""

    value: str

    def apply(self, place: Place) -> None:
        for field in ("value", "iter", "test"):
            if getattr(place.statement, field, None) is not None:
                setattr(place.statement, field, _expression(self.value))
                return
        raise DoesNotFit("the statement has no value")


@dataclass(frozen=True, slots=True)
class Compare(Operator):
    """Change the operator of the only comparison, or of the only comparison that contains this name."""

    operator: str
    naming: str = ""

    def apply(self, place: Place) -> None:
        slot = place.only(
            lambda slot: isinstance(slot.node, ast.Compare) and (not self.naming or _mentions(slot.node, self.naming)),
            f"comparisons{self.naming and ' with ' + self.naming}",
        )
        compare = cast("ast.Compare", slot.node)
        if len(compare.ops) != 1:
            raise DoesNotFit("the comparison is a chain")
        compare.ops = cast("ast.Compare", _expression(f"a {self.operator} b")).ops


@dataclass(frozen=True, slots=True)
class PopInstead(Operator):
    """Turn `del table[key]` into `table.pop(key, None)`, which accepts a missing key."""

    def apply(self, place: Place) -> None:
        match place.statement:
            case ast.Delete(targets=[ast.Subscript(value=table, slice=key)]):
                call = ast.Call(ast.Attribute(table, "pop", ast.Load()), [key, ast.Constant(None)], [])
                place.replace(place.index + 1, [ast.Expr(call)])
            case _:
                raise DoesNotFit("the statement is no `del table[key]`")


@dataclass(frozen=True, slots=True)
class Rewrite(Operator):
    """Replace a piece of the statement's source, as `ast.unparse` writes it. For changes that no other operator can
    make.
    """

    old: str
    new: str

    def apply(self, place: Place) -> None:
        header = header_of(place.statement)
        text = ast.unparse(header)
        if (count := text.count(self.old)) != 1:
            raise DoesNotFit(f"{self.old!r} occurs {count} times in {text!r}, not once")
        (changed,) = _statements(text.replace(self.old, self.new))
        if header is not place.statement:
            for name in ("body", "orelse"):
                setattr(changed, name, getattr(place.statement, name))
        place.replace(place.index + 1, [changed])


def _no_other(mark: str) -> Place:
    raise DoesNotFit(f"no mark {mark} stands in the same function")


def header_of(statement: ast.stmt) -> ast.stmt:
    """The statement; a compound statement without its body."""
    if not hasattr(statement, "body"):
        return statement
    header: Any = copy.copy(statement)
    header.body, header.orelse = [ast.Pass()], []
    return cast("ast.stmt", header)


def _below(node: ast.AST) -> Iterator[Slot]:
    for field, value in ast.iter_fields(node):
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.stmt):
                yield Slot(node, field, index, child)
                yield from _below(child)


def _is_operand(slot: Slot) -> bool:
    match slot.parent, slot.field:
        case (ast.BoolOp(), "values") | (ast.Tuple() | ast.List() | ast.Set(), "elts") | (ast.Dict(), "keys"):
            return True
        case (ast.BinOp(op=ast.Add()), "left" | "right") | (ast.BinOp(op=ast.Sub()), "right"):
            return True
    return False


def _operand(place: Place, which: str | int) -> Slot:
    operands = [slot for slot in place.slots() if _is_operand(slot)]
    if isinstance(which, int):
        operands = [slot for slot in operands if slot.parent is operands[0].parent][which:][:1]
    else:
        named = [slot for slot in operands if _mentions(slot.node, which)]
        operands = [slot for slot in named if not any(_is_below(other.node, slot.node) for other in named)]
    if len(operands) != 1:
        raise DoesNotFit(f"the statement has {len(operands)} operands {which!r}, not one")
    return operands[0]


def _is_below(node: ast.AST, other: ast.AST) -> bool:
    return node is not other and any(found is node for found in ast.walk(other))


def _slot_of(place: Place, node: ast.AST) -> Slot:
    return next(slot for slot in place.slots() if slot.node is node)


def _condition(place: Place) -> Slot:
    statement = place.statement
    if isinstance(statement, ast.If | ast.While):
        return Slot(statement, "test", None, statement.test)
    return place.only(
        lambda slot: (
            (slot.field == "test" and isinstance(slot.parent, ast.IfExp))
            or (slot.field == "ifs" and isinstance(slot.parent, ast.comprehension))
        ),
        "conditions",
    )


def _called(node: ast.AST) -> str | None:
    match node:
        case ast.Call(func=ast.Attribute(attr=name)) | ast.Call(func=ast.Name(id=name)):
            return name
    return None


def _keyword(call: ast.Call, keyword: str, name: str) -> ast.keyword:
    for found in call.keywords:
        if found.arg == keyword:
            return found
    raise DoesNotFit(f"{name} is called without {keyword}=")


def _mentions(node: ast.AST, name: str) -> bool:
    for below in ast.walk(node):
        match below:
            case ast.Attribute(attr=found) | ast.Name(id=found) | ast.keyword(arg=found) | ast.Constant(value=found):
                if found == name:
                    return True
    return False


def _statements(source: str) -> list[ast.stmt]:
    tree = ast.parse(source)
    _take_locations(tree)
    return tree.body


def _expression(source: str) -> ast.expr:
    tree = ast.parse(source, mode="eval")
    _take_locations(tree)
    return tree.body


def _take_locations(tree: ast.AST) -> None:
    """Remove line numbers, because new code gets the line numbers of the statement that it replaces."""
    for node in ast.walk(tree):
        for attribute in ("lineno", "end_lineno", "col_offset", "end_col_offset"):
            if hasattr(node, attribute):
                delattr(node, attribute)
