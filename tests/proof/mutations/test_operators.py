"""Each operator on a marked statement: the code that it makes, and the statements that it does not fit."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest

from proof.mutations import Change, Mutation, changed_trees
from proof.mutations.marks import marks_in
from proof.mutations.operators import (
    Always,
    Append,
    Become,
    CallInstead,
    Compare,
    Delete,
    DropArgument,
    DropOperand,
    MoveAfter,
    Never,
    Once,
    Operator,
    PopInstead,
    Rewrite,
    SetArgument,
    SetOperand,
    Swap,
    Unwrap,
    Value,
)
from sidestream.errors import InvariantError


def changed(body: str, operator: Operator, *also: Change) -> str:
    """The body of a function with a statement that is marked `it`, changed."""
    text = "def f(self):\n" + textwrap.indent(body, "    ")
    marks = {mark.name: mark for mark in marks_in(text, Path("room.py"), "room")}
    mutation = Mutation(name="it", hazard="H1", change=operator, consequence="something", also=also)
    ((_, tree),) = changed_trees(mutation, marks)
    compile(ast.Module([tree], []), "room.py", "exec")
    return "\n".join(map(ast.unparse, tree.body))


@pytest.mark.parametrize(
    ("body", "operator", "expected"),
    [
        ("a()  # rule: it\nb()", Delete(), "b()"),
        ("a()  # rule: it\nb()\nc()", Delete(2), "c()"),
        ("if a:\n    b()  # rule: it", Delete(), "if a:\n    pass"),
        ("if a:  # rule: it\n    b()\nc()", Delete(), "c()"),
        ("for a in b:\n    break  # rule: it", Become("continue"), "for a in b:\n    continue"),
        ("a()  # rule: it\nb()", Append("if a:\n    c()"), "a()\nif a:\n    c()\nb()"),
        ("a()  # rule: it\nb()\nc()", Swap(), "b()\na()\nc()"),
        (
            "a()  # rule: it\nfor b in c:  # rule: other\n    b()\nd()",
            MoveAfter("other"),
            "for b in c:\n    b()\na()\nd()",
        ),
        ("if a or b.poll():  # rule: it\n    c()\nelse:\n    d()", Always(), "if True:\n    c()\nelse:\n    d()"),
        ("while a and not b:  # rule: it\n    c(1 if a else 2)", Never(), "while False:\n    c(1 if a else 2)"),
        ("x = a if b else c  # rule: it", Never(), "x = a if False else c"),
        ("x = [a for a in b if a.poll()]  # rule: it", Always(), "x = [a for a in b if True]"),
        ("while a():  # rule: it\n    b()", Once(), "if a():\n    b()"),
        ("if a and b.poll() and c:  # rule: it\n    d()", DropOperand("poll"), "if a and c:\n    d()"),
        ("return a or self.b == c  # rule: it", DropOperand("b"), "return a"),
        ("return a or (b and self.c)  # rule: it", DropOperand("c"), "return a or b"),
        ("return a - sum(b.n for b in c)  # rule: it", DropOperand("n"), "return a"),
        ("x = g(a + b[c + d])  # rule: it", DropOperand(0), "x = g(b[c + d])"),
        ("x = (*a.after, *b.uses)  # rule: it", DropOperand("uses"), "x = (*a.after,)"),
        ("x = {'a': b, 'c': d}  # rule: it", DropOperand("a"), "x = {'c': d}"),
        (
            "if a in self.told and b:  # rule: it\n    c()",
            SetOperand("told", "self.told"),
            "if self.told and b:\n    c()",
        ),
        ("x = {'a': b, 'c': d}  # rule: it", SetOperand("a", "e"), "x = {'a': e, 'c': d}"),
        ("self.a.release(b, tuple(c))  # rule: it", SetArgument("release", 1, "()"), "self.a.release(b, ())"),
        ("f(a, after=b)  # rule: it", SetArgument("f", "after", "()"), "f(a, after=())"),
        ("f(a, after=b)  # rule: it", DropArgument("f", "after"), "f(a)"),
        ("a.pop(b, None)  # rule: it", CallInstead("pop", "get"), "a.get(b, None)"),
        ("x = max(a, b)  # rule: it", CallInstead("max", "min"), "x = min(a, b)"),
        ("x = torch.where(a, b, c)  # rule: it", Unwrap("where", 2), "x = c"),
        ("for a in reversed(b):  # rule: it\n    c()", Unwrap("reversed"), "for a in b:\n    c()"),
        ("x: int = a(b)  # rule: it", Value("()"), "x: int = ()"),
        ("return a  # rule: it", Value("0"), "return 0"),
        ("if a(b):  # rule: it\n    c()", Value("b"), "if b:\n    c()"),
        ("for a in b():  # rule: it\n    c()", Value("()"), "for a in ():\n    c()"),
        ("return a.tick < b  # rule: it", Compare(">"), "return a.tick > b"),
        ("return a.tick < b or c == d  # rule: it", Compare(">=", "tick"), "return a.tick >= b or c == d"),
        ("del self.a[b.c]  # rule: it", PopInstead(), "self.a.pop(b.c, None)"),
        ("x = a . b( 1 )  # rule: it", Rewrite("a.b(1)", "c"), "x = c"),
        ("if a . b:  # rule: it\n    c()\nelse:\n    d()", Rewrite("a.b", "e"), "if e:\n    c()\nelse:\n    d()"),
    ],
    ids=lambda value: str(value) if isinstance(value, Operator) else "",
)
def test_an_operator_changes_the_marked_statement(body: str, operator: Operator, expected: str) -> None:
    assert changed(body, operator) == expected


@pytest.mark.parametrize(
    ("body", "operator", "message"),
    [
        ("a()  # rule: it", Delete(2), "2 statements are to be deleted, and 1 are left"),
        ("a()  # rule: it", Swap(), "no statement follows"),
        ("a()  # rule: it", MoveAfter("other"), "no mark other stands in the same function"),
        ("if a:  # rule: it\n    b()  # rule: other", MoveAfter("other"), "other stands inside the statement"),
        ("a()  # rule: it", Always(), "0 of conditions"),
        ("x = a if b else c if d else e  # rule: it", Never(), "2 of conditions"),
        ("if a:  # rule: it\n    b()", Once(), "no `while`"),
        ("x = a and b  # rule: it", DropOperand("poll"), "0 operands 'poll'"),
        ("x = a.poll() and b.poll()  # rule: it", DropOperand("poll"), "2 operands 'poll'"),
        ("if a:  # rule: it\n    b(c and d)", DropOperand("d"), "0 operands 'd'"),
        ("x = a and b  # rule: it", DropOperand(2), "0 operands 2"),
        ("x = a and b  # rule: it", SetOperand("poll", "c"), "0 operands 'poll'"),
        ("f(a)  # rule: it", SetArgument("g", 0, "()"), "0 of calls of g"),
        ("f(a, f(b))  # rule: it", SetArgument("f", 0, "()"), "2 of calls of f"),
        ("f(a)  # rule: it", SetArgument("f", 1, "()"), "f has 1 arguments by position, and 1 is meant"),
        ("f(a)  # rule: it", SetArgument("f", "after", "()"), "f is called without after="),
        ("f(a)  # rule: it", DropArgument("f", "after"), "f is called without after="),
        ("f(a)  # rule: it", CallInstead("g", "h"), "0 of calls of g"),
        ("f(a)  # rule: it", Unwrap("f", 1), "f has 1 arguments by position, and 1 is meant"),
        ("pass  # rule: it", Value("()"), "no value"),
        ("return a < b == c  # rule: it", Compare("!="), "a chain"),
        ("return (a < b) + (c < d)  # rule: it", Compare("!="), "2 of comparisons"),
        ("del a  # rule: it", PopInstead(), "no `del table"),
        ("f(a)  # rule: it", Rewrite("b", "c"), "'b' occurs 0 times in 'f(a)', not once"),
    ],
    ids=lambda value: str(value) if isinstance(value, Operator) else "",
)
def test_an_operator_that_does_not_fit_raises_with_the_reason(body: str, operator: Operator, message: str) -> None:
    with pytest.raises(InvariantError, match="does not fit the mark it") as caught:
        changed(body, operator)
    assert message in str(caught.value)


def test_changes_of_one_function_are_made_in_their_order() -> None:
    body = "a()  # rule: it\nif b and c:  # rule: other\n    d()"
    assert changed(body, Delete(), Change("other", DropOperand("c"))) == "if b:\n    d()"


def test_a_change_of_a_missing_statement_is_refused() -> None:
    with pytest.raises(InvariantError, match="was removed by an earlier change of the same mutation"):
        changed("if a:  # rule: it\n    b()  # rule: other", Delete(), Change("other", Become("c()")))


def test_new_code_has_the_line_of_its_place() -> None:
    text = "def f():\n    a()\n    b(1)  # rule: it\n"
    marks = {mark.name: mark for mark in marks_in(text, Path("room.py"), "room")}
    for operator in (Become("if c:\n    d(e)"), SetArgument("b", 0, "c + d"), Rewrite("b(1)", "c(2)")):
        mutation = Mutation(name="it", hazard="H1", change=operator, consequence="something")
        ((_, tree),) = changed_trees(mutation, marks)
        lines = {node.lineno for node in ast.walk(tree.body[1]) if hasattr(node, "lineno")}
        assert lines == {3}
