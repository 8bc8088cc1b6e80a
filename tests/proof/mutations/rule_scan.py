"""Compares the sites that look like a rule with the tables of mutations."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from proof.mutations import EQUIVALENT, EXEMPT, MUTATIONS, Mutation, changed_trees, product_marks
from proof.mutations.marks import own_lines
from proof.mutations.sites import Site


def without_a_mutation(sites: Iterable[Site]) -> list[Site]:
    """The sites outside the statements that mutations change."""
    return [site for site in sites if (site.path, site.line) not in all_changed_lines()]


@functools.cache
def all_changed_lines() -> set[tuple[Path, int]]:
    """The lines that some mutation changes."""
    mutations = (*MUTATIONS, *(equivalent.mutation for equivalent in EQUIVALENT))
    return set[tuple[Path, int]]().union(*map(changed_lines, mutations))


def changed_lines(mutation: Mutation) -> set[tuple[Path, int]]:
    """The lines of the statements that a mutation marks, without those of statements in them, and of all statements
    that it removes.
    """
    marks = [product_marks()[change.mark] for change in mutation.changes]
    left = {
        _place(node) for _, tree in changed_trees(mutation) for node in ast.walk(tree) if isinstance(node, ast.stmt)
    }
    return {
        (mark.path, line)
        for mark in marks
        for node in ast.walk(mark.function)
        if isinstance(node, ast.stmt) and (node is mark.statement or _place(node) not in left)
        for line in own_lines(node)
    }


def uncovered(sites: Iterable[Site]) -> list[Site]:
    """The sites that no row of any table names."""
    exempt = Counter((row.function, name) for row in EXEMPT for name in row.sites)
    missing = []
    for site in without_a_mutation(sites):
        if exempt[site.function, site.name]:
            exempt[site.function, site.name] -= 1
        else:
            missing.append(site)
    return missing


def _place(statement: ast.stmt) -> tuple[int, int]:
    return statement.lineno, statement.col_offset
