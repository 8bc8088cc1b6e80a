"""The tables themselves: each row fits the code, is named once, and asks for what workloads have."""

from __future__ import annotations

import ast
import builtins
import dis
import re
from pathlib import Path
from types import CodeType
from typing import get_args

import pytest

from proof.miniatures import MINIATURES
from proof.mutations import (
    ELSEWHERE,
    EQUIVALENT,
    HAZARDS,
    MUTATIONS,
    Change,
    Feature,
    Mutation,
    applied,
    changed_functions,
    changed_trees,
    check_marks,
    find,
    product_marks,
)
from proof.mutations.operators import Always, Delete
from proof.torture import FEATURES, draw_workload
from sidestream.errors import ConfigError

TESTS = Path(__file__).resolve().parents[2]
ALL = (*MUTATIONS, *(equivalent.mutation for equivalent in EQUIVALENT))


def test_each_mutation_changes_its_functions_in_place_and_puts_them_back() -> None:
    for mutation in ALL:
        changed = changed_functions(mutation)
        functions = [function for function, _ in changed]
        before = [function.__code__ for function in functions]
        with applied(mutation):
            assert all(new.__code__ != old for new, old in zip(functions, before, strict=True)), mutation.name
        assert all(new.__code__ is old for new, old in zip(functions, before, strict=True)), mutation.name
        for function, code in changed:
            assert (code.co_filename, code.co_name) == (function.__code__.co_filename, function.__code__.co_name)
            lines, own = lines_of(code), lines_of(function.__code__)
            assert lines <= own | set(range(min(lines), max(lines) + 1)), mutation.name
            # A name that does not exist would end each workload, whatever the rule protects.
            assert global_names(code) <= function.__globals__.keys() | vars(builtins).keys(), mutation.name


def global_names(code: CodeType) -> set[str]:
    own = {found.argval for found in dis.get_instructions(code) if found.opname == "LOAD_GLOBAL"}
    return own.union(*(global_names(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def lines_of(code: CodeType) -> set[int]:
    return {line for _, _, line in code.co_lines() if line is not None}


def test_no_mutation_or_miniature_shares_a_name() -> None:
    names = [mutation.name for mutation in ALL] + [miniature.name for miniature in MINIATURES]
    assert len(set(names)) == len(names)


def test_no_two_mutations_do_the_same() -> None:
    done: dict[str, str] = {}
    for mutation in ALL:
        trees = "\n".join(ast.dump(tree) for _, tree in changed_trees(mutation))
        assert trees not in done, f"{mutation.name} and {done[trees]} make the same code"
        done[trees] = mutation.name


def test_every_mark_has_a_mutation_and_every_mutation_its_marks() -> None:
    check_marks(ALL, product_marks())


def test_each_mutation_has_a_hazard_and_a_consequence() -> None:
    assert not [found.name for found in ALL if found.hazard not in HAZARDS]
    assert not [found.name for found in ALL if not found.consequence or found.consequence.endswith(".")]


def test_hazards_have_their_stable_numbers() -> None:
    of_one_process, between_processes = range(1, 27), (32, 34, 35)
    assert list(HAZARDS) == [f"H{number}" for number in (*of_one_process, *between_processes)]


def test_each_hazard_has_a_mutation_or_a_reason_why_not() -> None:
    mutated = {mutation.hazard for mutation in MUTATIONS}
    assert mutated | set(ELSEWHERE) == set(HAZARDS)
    assert not mutated & set(ELSEWHERE), "a stale row in ELSEWHERE"


def test_a_hazard_without_a_mutation_has_a_miniature() -> None:
    assert set(ELSEWHERE) <= {miniature.hazard for miniature in MINIATURES}


def test_every_feature_that_a_mutation_may_need_is_known_to_workloads() -> None:
    assert set(get_args(Feature)) == set(FEATURES)


def test_the_features_that_a_mutation_needs_are_drawn_together_soon() -> None:
    drawn = [draw_workload(seed).features for seed in range(400)]
    assert not [found.name for found in MUTATIONS if not any(found.needs <= features for features in drawn)]


def test_every_feature_is_needed_by_a_mutation() -> None:
    assert set(FEATURES) == set().union(*(mutation.needs for mutation in ALL))


def test_each_equivalent_has_a_reason_and_the_test_that_it_names_exists() -> None:
    names: dict[str, set[str]] = {}
    for equivalent in EQUIVALENT:
        assert equivalent.reason, equivalent.mutation.name
        if equivalent.noticed_by:
            file, name = equivalent.noticed_by.split("::")
            if file not in names:
                text = (TESTS / file).read_text(encoding="utf-8")
                # State machines give a name to their test case.
                names[file] = set(re.findall(r"^\s*(?:def |class |(?=\w+ = ))(\w+)", text, re.MULTILINE))
            assert name in names[file], equivalent.noticed_by


def test_a_known_name_is_found_and_an_unknown_one_is_an_error_with_the_nearest_name() -> None:
    assert all(find(mutation.name) is mutation for mutation in ALL)
    with pytest.raises(ConfigError, match="did you mean store-waits-for-step"):
        find("store-wait-for-step")


def test_changes_of_one_mutation_come_in_their_order() -> None:
    first, second = Change("a", Always()), Change("b", Delete())
    assert Mutation(name="a", hazard="H1", change=Always(), consequence="i", also=(second,)).changes == (first, second)
    assert Mutation(name="n", hazard="H1", at="a", change=Always(), consequence="i").changes == (first,)
