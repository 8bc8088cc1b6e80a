"""What a mutation does to the statement that is marked with its rule: changes of the syntax tree, so that neither
layout nor names of local variables matter.

An operator is given a `Place` in a copy of the function and changes it. It raises `DoesNotFit` where the statement has
not exactly one node that it could mean. Operators that take a name (`naming`, `call`) look for functions, attributes,
keywords and texts of that name in the statement; of a compound statement they look at the header only.
"""

from __future__ import annotations

import ast
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast


class DoesNotFit(Exception):
    """The marked statement is not of the kind that the operator changes."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a node hangs in the tree: field of its parent, and the index if the field is a list."""

    parent: ast.AST
    field: str
    index: int | None
    node: ast.AST

    def put(self, node: ast.AST) -> None:
        """Put another node in its place."""
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node


@dataclass(frozen=True, slots=True)
class Place:
    """A marked statement in a copy of its function.

    other   the same function's place of another mark, by name; raises DoesNotFit for a mark of another function
    """

    function: ast.AST
    statement: ast.stmt
    other: Callable[[str], Place]

    @property
    def body(self) -> list[ast.stmt]:
        """The block that the statement stands in."""
        for node in ast.walk(self.function):
            for _, value in ast.iter_fields(node):
                if isinstance(value, list) and any(entry is self.statement for entry in value):
                    return cast("list[ast.stmt]", value)
        raise DoesNotFit("the statement was removed by an earlier change of the same mutation")

    @property
    def index(self) -> int:
        """Position of the statement in `body`."""
        return next(index for index, entry in enumerate(self.body) if entry is self.statement)

    def replace(self, stop: int, statements: list[ast.stmt]) -> None:
        """Put other statements in place of those from this one to index `stop`, exclusive."""
        body, first = self.body, self.index
        if len(body) == stop - first and not statements:
            statements = [ast.Pass()]
        for statement in statements:
            if not hasattr(statement, "lineno"):
                ast.copy_location(statement, self.statement)
        body[first:stop] = statements

    def slots(self) -> Iterator[Slot]:
        """Everything below the statement that is no statement, outermost first."""
        return _below(self.statement)

    def only(self, wanted: Callable[[Slot], bool], what: str) -> Slot:
        """The one slot that is wanted. Raises DoesNotFit, which says `what` it was, for none and for several."""
        found = [slot for slot in self.slots() if wanted(slot)]
        if len(found) != 1:
            raise DoesNotFit(f"the statement has {len(found)} of {what}, not one")
        return found[0]

    def call(self, name: str) -> ast.Call:
        """The only call of a function or method of that name."""
        return cast("ast.Call", self.only(lambda slot: _called(slot.node) == name, f"calls of {name}").node)


class Operator(ABC):
    """A change of a marked statement."""

    __slots__ = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks of further statements that it refers to."""
        return ()

    def apply(self, place: Place) -> None:
        """Change the tree. Raises DoesNotFit."""
        self._change(place)

    @abstractmethod
    def _change(self, place: Place) -> None: ...


@dataclass(frozen=True, slots=True)
class Delete(Operator):
    """Delete the statement, and those after it up to this number."""

    statements: int = 1

    def _change(self, place: Place) -> None:
        stop = place.index + self.statements
        if stop > len(place.body):
            raise DoesNotFit(
                f"{self.statements} statements are to be deleted, and {len(place.body) - place.index} are left"
            )
        place.replace(stop, [])


@dataclass(frozen=True, slots=True)
class Become(Operator):
    """Other code in place of the statement."""

    source: str

    def _change(self, place: Place) -> None:
        place.replace(place.index + 1, _statements(self.source))


@dataclass(frozen=True, slots=True)
class Append(Operator):
    """More code after the statement."""

    source: str

    def _change(self, place: Place) -> None:
        place.replace(place.index + 1, [place.statement, *_statements(self.source)])


@dataclass(frozen=True, slots=True)
class Swap(Operator):
    """Run the next statement first."""

    def _change(self, place: Place) -> None:
        body, index = place.body, place.index
        if index + 1 == len(body):
            raise DoesNotFit("no statement follows that it could be swapped with")
        body[index], body[index + 1] = body[index + 1], body[index]


@dataclass(frozen=True, slots=True)
class MoveAfter(Operator):
    """Run the statement after another marked one of the same function, in the other one's block."""

    mark: str

    @property
    def marks(self) -> tuple[str, ...]:
        """The statement that comes first."""
        return (self.mark,)

    def _change(self, place: Place) -> None:
        target = place.other(self.mark)
        statement = place.statement
        if any(node is target.statement for node in ast.walk(statement)):
            raise DoesNotFit(f"{self.mark} stands inside the statement that is to go after it")
        place.replace(place.index + 1, [])
        target.body.insert(target.index + 1, statement)


@dataclass(frozen=True, slots=True)
class Always(Operator):
    """The condition holds. Of an `if` or `while` that is its test; else the only conditional expression or condition of
    a comprehension.
    """

    value: bool = True

    def _change(self, place: Place) -> None:
        _condition(place).put(ast.Constant(self.value))


@dataclass(frozen=True, slots=True)
class Never(Operator):
    """The condition does not hold."""

    def _change(self, place: Place) -> None:
        Always(False).apply(place)


@dataclass(frozen=True, slots=True)
class Once(Operator):
    """A `while` becomes an `if`."""

    def _change(self, place: Place) -> None:
        loop = place.statement
        if not isinstance(loop, ast.While):
            raise DoesNotFit("the statement is no `while`")
        place.replace(place.index + 1, [ast.If(loop.test, loop.body, loop.orelse)])


@dataclass(frozen=True, slots=True)
class DropOperand(Operator):
    """Drop an operand of an `and`, `or`, `+` or `-`, or an element of a list, tuple or dict.

    which   the name in it, in a dict its key; of nested expressions the innermost one is meant. Or its position in the
            statement's outermost expression with operands
    """

    which: str | int

    def _change(self, place: Place) -> None:
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
    """Such an operand becomes another expression."""

    which: str | int
    value: str

    def _change(self, place: Place) -> None:
        operand, value = _operand(place, self.which), _expression(self.value)
        if isinstance(operand.parent, ast.Dict):
            operand.parent.values[cast("int", operand.index)] = value
        else:
            operand.put(value)


@dataclass(frozen=True, slots=True)
class SetArgument(Operator):
    """An argument of the only call of this name becomes another expression. `which`: its position or its keyword."""

    call: str
    which: int | str
    value: str

    def _change(self, place: Place) -> None:
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
    """The only call of this name lacks a keyword argument."""

    call: str
    keyword: str

    def _change(self, place: Place) -> None:
        call = place.call(self.call)
        call.keywords.remove(_keyword(call, self.keyword, self.call))


@dataclass(frozen=True, slots=True)
class CallInstead(Operator):
    """The only call of this name calls another function or method."""

    call: str
    other: str

    def _change(self, place: Place) -> None:
        function = place.call(self.call).func
        if isinstance(function, ast.Attribute):
            function.attr = self.other
        else:
            cast("ast.Name", function).id = self.other


@dataclass(frozen=True, slots=True)
class Unwrap(Operator):
    """One argument of the only call of this name stands in place of the call."""

    call: str
    position: int = 0

    def _change(self, place: Place) -> None:
        call = place.call(self.call)
        if self.position >= len(call.args):
            raise DoesNotFit(f"{self.call} has {len(call.args)} arguments by position, and {self.position} is meant")
        _slot_of(place, call).put(call.args[self.position])


@dataclass(frozen=True, slots=True)
class Value(Operator):
    """The value that the statement assigns, returns, loops over or tests becomes another expression."""

    value: str

    def _change(self, place: Place) -> None:
        for field in ("value", "iter", "test"):
            if getattr(place.statement, field, None) is not None:
                setattr(place.statement, field, _expression(self.value))
                return
        raise DoesNotFit("the statement has no value")


@dataclass(frozen=True, slots=True)
class Compare(Operator):
    """The only comparison, or the only one with this name in it, uses another operator."""

    operator: str
    naming: str = ""

    def _change(self, place: Place) -> None:
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
    """`del table[key]` becomes `table.pop(key, None)`: what is gone already may go again."""

    def _change(self, place: Place) -> None:
        match place.statement:
            case ast.Delete(targets=[ast.Subscript(value=table, slice=key)]):
                call = ast.Call(ast.Attribute(table, "pop", ast.Load()), [key, ast.Constant(None)], [])
                place.replace(place.index + 1, [ast.Expr(call)])
            case _:
                raise DoesNotFit("the statement is no `del table[key]`")


@dataclass(frozen=True, slots=True)
class Rewrite(Operator):
    """A piece of the statement's source, as `ast.unparse` writes it, becomes another one: for what no other operator
    says.
    """

    old: str
    new: str

    def _change(self, place: Place) -> None:
        header = _header(place.statement)
        text = ast.unparse(header)
        if (count := text.count(self.old)) != 1:
            raise DoesNotFit(f"{self.old!r} occurs {count} times in {text!r}, not once")
        (changed,) = _statements(text.replace(self.old, self.new))
        if header is not place.statement:
            for name in ("body", "orelse"):
                setattr(changed, name, getattr(place.statement, name))
        place.replace(place.index + 1, [changed])


def _header(statement: ast.stmt) -> ast.stmt:
    """The statement with nothing in it, if it is a compound one."""
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
    """Remove line numbers: new code gets those of the statement whose place it takes."""
    for node in ast.walk(tree):
        for attribute in ("lineno", "end_lineno", "col_offset", "end_col_offset"):
            if hasattr(node, attribute):
                delattr(node, attribute)
