"""Automatic mutants: their changes, their names, and the tables about them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from proof.mutations.automatic import PLACES, Mutant, find_mutant, mutants, mutants_in
from proof.mutations.marks import PACKAGES, below_package
from proof.mutations.mechanism import changed_functions
from proof.mutations.mutant_tables import EQUIVALENT_MUTANTS, TESTS, paths_of
from sidestream.errors import ConfigError
from sidestream_kv.kv.pool import FencedPool, Lease

TESTS_FOLDER = Path(__file__).parents[2]


def made(body: str, returns: str = "int") -> dict[str, str]:
    """Operator and ordinal → the changed statement, for the function `Room.f` with this body."""
    lines = "\n".join("        " + line for line in body.splitlines())
    text = f"class Room:\n    def f(self, a, b) -> {returns}:\n{lines}\n"
    return {mutant.name.removeprefix("auto:kv.room:Room.f:"): mutant.after for mutant in in_room(text)}


def in_room(text: str) -> list[Mutant]:
    return list(mutants_in(PACKAGES[1] / "kv" / "room.py", text))


@pytest.mark.parametrize(
    ("body", "returns", "expected"),
    [
        ("self.stream.wait(a)  # rule: it", "int", {"delete:0": "pass"}),
        ("self.used -= 1  # rule: it", "int", {"delete:0": "pass", "constant:0": "self.used -= 2"}),
        ("del self.keys[a]  # rule: it", "int", {"delete:0": "pass"}),
        ("x = a  # rule: it", "int", {}),
        ("x = a\ny = b  # rule: it", "None", {"return:0": "return"}),
        ("if a:  # rule: it\n    raise KeyError(1)", "int", {"negate:0": "if not a:", "raise:0": "pass"}),
        ("while not a:  # rule: it\n    b()", "int", {"negate:0": "while a:"}),
        ("return [x for x in a if x.poll()]  # rule: it", "int", {"negate:0": "return [x for x in a if not x.poll()]"}),
        ("return a <= b  # rule: it", "int", {"compare:0": "return a < b"}),
        (
            "return a and b  # rule: it",
            "int",
            {"logic:0": "return a or b", "operand:0": "return b", "operand:1": "return a"},
        ),
        ("return max(a, b)  # rule: it", "int", {"extreme:0": "return min(a, b)"}),
        ("return a[1:]  # rule: it", "int", {"constant:0": "return a[2:]"}),
        ("x = (*a, b)  # rule: it", "int", {"element:0": "x = (b,)", "element:1": "x = (*a,)"}),
        ("x, y = a, b  # rule: it", "int", {}),
        ("x = self.run(b, after=a)  # rule: it", "int", {"argument:0": "x = self.run(b)"}),
    ],
)
def test_an_operator_changes_a_marked_statement(body: str, returns: str, expected: dict[str, str]) -> None:
    assert made(body, returns) == expected


def test_comments_and_statements_without_a_mark_make_no_mutants() -> None:
    assert made('"""Takes 1 block."""\na.wait(b)  # a comment, and no rule\nif a < 1:\n    return 2') == {}


def test_names_and_fingerprints_do_not_depend_on_comments_and_lines() -> None:
    text = "class Room:\n    def f(self, a):\n        if a < 1:  # rule: it\n            a.wait(1)  # rule: other\n"
    moved = "import os\n\n# A comment.\n" + text.replace("a.wait(1)", "# Another one.\n            a.wait(\n1)")
    first, second = in_room(text), in_room(moved)
    assert [(one.name, one.fingerprint, one.change) for one in first] == [
        (one.name, one.fingerprint, one.change) for one in second
    ]
    assert len(first) == 5


def test_two_changes_of_a_statement_into_the_same_one_are_one_mutant() -> None:
    doubled = "class Room:\n    def f(self, a):\n        return a and a  # rule: it\n"
    assert [mutant.after for mutant in in_room(doubled)] == ["return a or a", "return a"]


def test_every_mutant_of_the_product_has_its_own_name_and_code() -> None:
    found = mutants()
    assert len(found) >= 300
    assert {name.split(":")[3] for name in found} == {
        *("delete", "raise", "return", "negate", "compare", "logic"),
        *("operand", "extreme", "constant", "element", "argument"),
    }
    for name, mutant in found.items():
        assert re.fullmatch(r"auto:[\w.]+:[\w.]+:[a-z]+:\d+", name)
        assert mutant.before != mutant.after
    places = {below_package(mutant.mark.path).parts[0] for mutant in found.values()}
    assert places == {Path(place).parts[0] for place in PLACES}


def test_every_mutant_of_the_product_compiles() -> None:
    for mutant in mutants().values():
        ((function, code),) = changed_functions(mutant.mutation, {mutant.mark.name: mutant.mark})
        assert code.co_freevars == function.__code__.co_freevars
        assert code != function.__code__


def test_a_mutant_is_applied_inside_its_context_only() -> None:
    before = Lease.release.__code__
    mutant = find_mutant("auto:kv.pool:Lease.release:delete:0")
    assert mutant.change == "self.pool._release(self.ids, tuple(after)) → pass"
    with mutant.applied():
        pool = FencedPool("blocks", 1)
        pool.take(1).release()
        assert pool.num_used == 1
    assert Lease.release.__code__ is before


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=re.escape("auto:kv.pool:Lease.release:delete:0")):
        find_mutant("auto:kv.pool:Lease.releas:delete:0")


def test_the_table_of_equivalent_mutants_names_mutants_that_exist_with_their_changes() -> None:
    names = [row.name for row in EQUIVALENT_MUTANTS]
    assert len(set(names)) == len(names)
    for row in EQUIVALENT_MUTANTS:
        assert find_mutant(row.name).change == row.change, f"{row.name} is another mutant now: check its reason"
        assert row.reason


def test_the_tests_of_every_mutant_exist() -> None:
    assert all(map(paths_of, {mutant.mark.module: mutant for mutant in mutants().values()}.values()))
    for _, paths in TESTS:
        for path in paths:
            assert (TESTS_FOLDER / path).exists(), path
