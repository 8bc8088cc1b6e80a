"""Taking a rule out, and putting it back."""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest

from proof.mutations import Change, Mutation, applied, find
from proof.mutations.marks import Mark, find_marks
from proof.mutations.operators import Become, Delete, Operator, Value
from sidestream.errors import InvariantError
from sidestream_kv.kv.pool import FencedPool, Lease, PrefixIndex

SOURCE = """\
from contextlib import contextmanager


class Base:
    def name(self):
        return "base"


class Room(Base):
    @property
    def size(self):
        return 1  # rule: size

    @staticmethod
    def pair(first, second=2):
        return first, second  # rule: pair

    @classmethod
    def made(cls):
        return cls.__name__  # rule: made

    @contextmanager
    def entered(self):
        yield "in"  # rule: entered

    def name(self):
        found = super().name()
        return found + "!"  # rule: name

    def __hidden(self):
        return "hidden"

    def seen(self):
        return self.__hidden()  # rule: seen


async def later():
    return 1  # rule: later
"""


def mutation(at: str, operator: Operator, *also: Change) -> Mutation:
    return Mutation(name="tried", hazard="H1", at=at, change=operator, consequence="something", also=also)


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModuleType, Mapping[str, Mark]]]:
    """A module with marks, and the marks."""
    package = tmp_path / "marked_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "room.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("marked_package.room"), find_marks(package, "marked_package")
    for name in ("marked_package", "marked_package.room"):
        monkeypatch.delitem(importlib.sys.modules, name)  # type: ignore[attr-defined]


def test_a_mutation_is_applied_inside_its_context_only_also_for_older_objects() -> None:
    pool = FencedPool("blocks", 2)
    bound = pool.take(1).release
    with applied(mutation("release-keeps-its-fences", Delete())):
        bound()
        assert pool.num_used == 1
    pool.take(1).release()
    assert pool.num_used == 1


def test_the_code_is_back_after_an_error() -> None:
    before = PrefixIndex.clear.__code__
    with pytest.raises(ZeroDivisionError), applied(find("reset-removes-keys")):
        assert PrefixIndex.clear.__code__ is not before
        1 / 0  # noqa: B018
    assert PrefixIndex.clear.__code__ is before


def test_two_mutations_of_one_function_at_once_are_refused_and_the_first_stays() -> None:
    first, second = find("release-adds-to-earlier-fences"), find("last-release-frees")
    before = FencedPool._release.__code__
    with applied(first):
        during = FencedPool._release.__code__
        with pytest.raises(InvariantError, match="is changed already: end the other mutation first"), applied(second):
            pass
        assert FencedPool._release.__code__ is during
    assert FencedPool._release.__code__ is before
    with applied(second):
        pass


def test_a_mutation_with_one_change_that_does_not_fit_is_not_applied() -> None:
    before = Lease.release.__code__
    broken = mutation("release-keeps-its-fences", Delete(), Change("no-such-mark", Delete()))
    with pytest.raises(InvariantError, match="`# rule: no-such-mark`"), applied(broken):
        pass
    assert Lease.release.__code__ is before


def test_an_error_in_changed_code_points_at_the_line_of_the_original() -> None:
    lines, first = inspect.getsourcelines(FencedPool.take)
    at = next(number for number, line in enumerate(lines) if "pending = merge_fences" in line)
    with applied(mutation("take-passes-the-fences-on", Become("pass\npass\nraise ZeroDivisionError"))):
        pool = FencedPool("blocks", 1)
        pool._fences[0] = (None,)  # type: ignore[assignment]
        with pytest.raises(ZeroDivisionError) as caught:
            pool.take(1)
    assert traceback.extract_tb(caught.tb)[-1].lineno == first + at


def test_functions_of_every_kind_can_be_changed(room: tuple[ModuleType, Mapping[str, Mark]]) -> None:
    module, marks = room
    one = module.Room()
    with applied(mutation("size", Value("2")), marks):
        assert one.size == 2
    with applied(mutation("pair", Value("second, first")), marks):
        assert one.pair(1) == module.Room.pair(1) == (2, 1)
    with applied(mutation("made", Value("cls")), marks):
        assert module.Room.made() is module.Room
    with applied(mutation("entered", Become("yield 'changed'")), marks), one.entered() as inside:
        assert inside == "changed"
    with applied(mutation("later", Value("2")), marks), pytest.raises(StopIteration, match="2"):
        module.later().send(None)


def test_super_and_private_names_mean_the_same_in_changed_code(room: tuple[ModuleType, Mapping[str, Mark]]) -> None:
    module, marks = room
    with applied(mutation("name", Value("found + '?'")), marks):
        assert module.Room().name() == "base?"
    with applied(mutation("seen", Value("self.__hidden().upper()")), marks):
        assert module.Room().seen() == "HIDDEN"
