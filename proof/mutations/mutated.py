"""A pytest plugin that runs tests with an automatic mutant, until one of them fails.

    python -m pytest -p proof.mutations.mutated --mutant NAME --outcomes FILE tests/file.py

A test that fails with the mutant is run again without it: if it fails then, too, the mutant is not the reason. The
plugin appends a line of JSON to FILE when a test begins, and when the mutant is detected. Called by
`proof.torture.mutants`, in a process of its own: a test that hangs ends the process.
"""

from __future__ import annotations

import faulthandler
import json
from pathlib import Path

import hypothesis
import pytest
from _pytest.runner import runtestprotocol

from proof.mutations.automatic import find_mutant

HANG_S = 60.0


def pytest_addoption(parser: pytest.Parser) -> None:
    """See pytest's hook of this name."""
    parser.addoption("--mutant", required=True, help="name of the automatic mutant")
    parser.addoption("--outcomes", required=True, type=Path, help="file for lines of JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Let the first failure of a test that Hypothesis draws be enough."""
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutants", database=None, phases=phases)
    hypothesis.settings.load_profile("mutants")


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test with the mutant; if it fails, also without it, with new fixtures."""
    _append(item, "began")
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    try:
        with find_mutant(item.config.getoption("--mutant")).applied():
            reports = runtestprotocol(item, nextitem=nextitem, log=False)
            if failed := any(report.failed for report in reports):
                item.session._setupstate.teardown_exact(None)
        if failed and _passes(item):
            _append(item, "detected")
            item.session.shouldstop = "the mutant is detected"
    finally:
        faulthandler.cancel_dump_traceback_later()
    _append(item, "ended")
    return True


def _passes(item: pytest.Item) -> bool:
    """Whether the test passes without the mutant."""
    if isinstance(item, pytest.Function):
        item._initrequest()  # forget the values of fixtures
    return not any(report.failed for report in runtestprotocol(item, nextitem=None, log=False))


def _append(item: pytest.Item, event: str) -> None:
    with item.config.getoption("--outcomes").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"test": item.nodeid, "event": event}) + "\n")
