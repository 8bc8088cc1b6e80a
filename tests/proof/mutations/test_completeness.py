"""Nothing in the rooms looks like a rule without standing in one of the tables."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from rule_scan import uncovered, without_a_mutation

from proof.mutations import EQUIVALENT, EXEMPT, MUTATIONS
from proof.mutations.marks import below_package
from proof.mutations.sites import ROOMS, all_sites, sites_of


def test_every_wait_lease_check_and_publication_has_a_mutation_or_a_reason() -> None:
    missing = uncovered(all_sites())
    assert not missing, "add a mutation, or a row to EXEMPT, for:\n" + "\n".join(map(str, missing))


def test_every_room_has_sites() -> None:
    with_sites = {below_package(site.path).parts[0] for site in all_sites()}
    assert with_sites == set(ROOMS) - {"speculate"}  # proposers only compute


def test_every_exempt_row_is_needed() -> None:
    left = Counter((site.function, site.name) for site in without_a_mutation(all_sites()))
    for row in EXEMPT:
        assert row.reason
        for name in row.sites:
            left[row.function, name] -= 1
            assert left[row.function, name] >= 0, (
                f"{row.function} has fewer `{name}` without a mutation than EXEMPT says: delete the row, or its entry"
            )


def test_a_rule_that_an_exempt_row_refers_to_exists() -> None:
    known = {mutation.name for mutation in (*MUTATIONS, *(equivalent.mutation for equivalent in EQUIVALENT))}
    texts = [*(row.reason for row in EXEMPT), *(row.reason for row in EQUIVALENT)]
    named = {name for text in texts for name in re.findall(r"see ([a-z]+(?:-[a-z]+)+)", text)}
    assert named
    assert named <= known


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("self._stream.wait(fence)", ["wait"]),
        ("wait_host(fence)", ["wait_host"]),
        ("if not ticket.fence.poll(): pass", ["poll"]),
        ("lease.release(after=(fence,))", ["release", "after="]),
        ("pool.publish(block, key)", ["publish"]),
        ("if request.epoch != row.epoch: pass", ["epoch", "epoch"]),
        ("kept = [t for t in tickets if t.generation == 3]", ["generation"]),
        ("request.shares = False", ["shares"]),
        ("self._references[item] -= 1", ["_references"]),
        ("good = result is None or result.finite", ["finite"]),
        ("BlockKeys(fingerprint=name)", ["fingerprint="]),
        ("epoch = request.epoch", []),
        ("', '.join(names)", []),
        ("raise ValueError(request.epoch == 1)", []),
        ("total = len(self._blocks)", []),
    ],
)
def test_the_scan_finds_sites_that_look_like_a_rule(line: str, found: list[str]) -> None:
    text = f"class Room:\n    def method(self):\n        {line}\n"
    assert [site.name for site in sites_of(Path("room.py"), text)] == found


def test_a_new_wait_without_a_row_is_reported_with_its_place() -> None:
    (path,) = {site.path for site in all_sites() if site.path.name == "executor.py"}
    text = path.read_text(encoding="utf-8") + "\n\ndef new(stream, fence):\n    stream.wait(fence)\n"
    (missing,) = uncovered(sites_of(path, text))
    line = len(text.splitlines())
    assert str(missing) == f"runner/executor.py:{line}: `wait` in new, in `stream.wait(fence)`"
