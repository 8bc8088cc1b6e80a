"""Marks in the product's source: where they are found, and which of them are errors."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from proof.mutations import Mutation, changed_trees, check_marks
from proof.mutations.marks import find_marks, marks_in
from proof.mutations.operators import Never, Operator
from sidestream.errors import InvariantError

SOURCE = """\
class Pool:
    def release(self, ids, *, after=()):
        if not ids:  # rule: nothing-is-released-for-nothing
            return
        # rule: release-keeps-its-fences, release-is-counted
        self.keep(
            ids,
            after=after,
        )
        for one in ids:
            self.free(one)
        return ids  # rule: ids-come-back  # noqa: RET504
"""


def marked(text: str = SOURCE) -> dict[str, str]:
    """First line of the marked statement, by name."""
    lines = text.splitlines()
    return {
        mark.name: lines[mark.statement.lineno - 1].strip() for mark in marks_in(text, Path("pool.py"), "room.pool")
    }


def mutation(name: str, operator: Operator) -> Mutation:
    return Mutation(name=name, hazard="H1", change=operator, consequence="something")


def test_a_mark_belongs_to_the_statement_on_its_line_or_below_it() -> None:
    assert marked() == {
        "nothing-is-released-for-nothing": "if not ids:  # rule: nothing-is-released-for-nothing",
        "release-keeps-its-fences": "self.keep(",
        "release-is-counted": "self.keep(",
        "ids-come-back": "return ids  # rule: ids-come-back  # noqa: RET504",
    }


@pytest.mark.parametrize("line", ["self.keep(", "    ids,", "    after=after,", ")"])
def test_a_mark_may_stand_on_any_line_of_its_statement(line: str) -> None:
    text = SOURCE.replace(f"        {line}\n", f"        {line}  # rule: moved\n")
    assert marked(text)["moved"] == "self.keep(" + ("  # rule: moved" if line == "self.keep(" else "")


def test_a_mark_inside_an_expression_belongs_to_the_statement_around_it() -> None:
    text = SOURCE.replace("            after=after,\n", "            # rule: inside\n            after=after,\n")
    assert marked(text)["inside"] == "self.keep("


def test_a_mark_knows_its_module_and_its_outermost_function() -> None:
    text = "def outer():\n    def inner():\n        return 1  # rule: one\n    return inner\n"
    (mark,) = marks_in(text, Path("room/pool.py"), "room.pool")
    assert (mark.module, mark.qualname, str(mark)) == ("room.pool", "outer", "one (room.pool:3)")


def test_a_string_that_looks_like_a_mark_is_no_mark() -> None:
    assert marked('def f():\n    return "# rule: no-comment"\n') == {}


@pytest.mark.parametrize(
    "text",
    [
        "first = 1  # rule: outside-a-function\n",
        "def f():\n    if f:\n        pass\n    else:  # rule: on-an-else\n        pass\n",
        "def f():  # rule: on-a-function\n    pass\n",
        "def f():\n    pass\n# rule: after-the-end\n",
    ],
)
def test_a_mark_that_belongs_to_no_statement_of_a_function_is_an_error(text: str) -> None:
    with pytest.raises(InvariantError, match=r"at room.pool:\d marks no statement of a function: move it to one"):
        marked(text)


@pytest.mark.parametrize("names", ["", "Upper", "two words", "one,", "one_two"])
def test_a_malformed_mark_is_an_error(names: str) -> None:
    with pytest.raises(InvariantError, match=r"at room.pool:2: write `# rule: name` or `# rule: name, other-name`"):
        marked(f"def f():\n    return 1  # rule: {names}\n")


def test_marks_of_a_package_are_those_of_all_its_modules_but_the_folders_left_out(tmp_path: Path) -> None:
    for folder in ("room", "kit"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text(f"def f():\n    return 1  # rule: of-the-{folder}\n")
    found = find_marks(tmp_path, "package", but=("kit",))
    assert {name: mark.module for name, mark in found.items()} == {"of-the-room": "package.room"}


def test_a_duplicate_mark_is_an_error(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / f"{name}.py").write_text("def f():\n    return 1  # rule: one\n")
    with pytest.raises(
        InvariantError, match=r"one \(package.second:2\) stands twice, first at one \(package.first:2\): rename one"
    ):
        find_marks(tmp_path, "package")


def test_a_mark_without_a_mutation_is_an_error() -> None:
    marks = {mark.name: mark for mark in marks_in(SOURCE, Path("pool.py"), "room.pool")}
    del marks["nothing-is-released-for-nothing"], marks["release-is-counted"], marks["ids-come-back"]
    with pytest.raises(
        InvariantError, match=r"no mutation uses the mark release-keeps-its-fences \(room.pool:5\): add"
    ):
        check_marks([], marks)
    check_marks([mutation("release-keeps-its-fences", Never())], marks)


def test_a_mutation_without_its_mark_is_an_error() -> None:
    lost = mutation("lost", Never())
    message = "mutation lost has no place: mark its statement with `# rule: lost`"
    with pytest.raises(InvariantError, match=message):
        check_marks([lost], {})
    with pytest.raises(InvariantError, match=message):
        changed_trees(lost, {})


def test_an_operator_that_does_not_fit_its_statement_is_an_error() -> None:
    marks = {mark.name: mark for mark in marks_in(SOURCE, Path("pool.py"), "room.pool")}
    with pytest.raises(
        InvariantError,
        match=r"mutation ids-come-back: Never\(\) does not fit the mark ids-come-back \(room.pool:12\): .* has 0",
    ):
        changed_trees(mutation("ids-come-back", Never()), marks)


def test_a_changed_tree_is_a_copy() -> None:
    marks = {mark.name: mark for mark in marks_in(SOURCE, Path("pool.py"), "room.pool")}
    before = ast.dump(marks["nothing-is-released-for-nothing"].function)
    (((module, name), tree),) = changed_trees(mutation("nothing-is-released-for-nothing", Never()), marks)
    assert (module, name) == ("room.pool", "Pool.release")
    assert ast.dump(tree) != before == ast.dump(marks["nothing-is-released-for-nothing"].function)
