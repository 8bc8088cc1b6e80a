"""A pytest plugin that runs each selected test twice, first with a rule and then without it.

    python -m pytest -p proof.mutations.noticed --rule NAME --outcomes FILE tests/file.py::test

It appends a line of JSON to FILE for each run of a test: whether the rule was in the code, and "passed", "failed" or
"skipped". Called by `proof.torture.excuses`, in a process of its own: a test without its rule may hang.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

from proof.mutations import applied, find


def pytest_addoption(parser: pytest.Parser) -> None:
    """See pytest's hook of this name."""
    parser.addoption("--rule", required=True, help="name of the mutation that removes the rule")
    parser.addoption("--outcomes", required=True, type=Path, help="file for one line of JSON per run of a test")


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test with the rule and without it; fixtures of every scope are set up for each run."""
    for has_rule in (True, False):
        with contextlib.nullcontext() if has_rule else applied(find(item.config.getoption("--rule"))):
            if isinstance(item, pytest.Function):
                item._initrequest()  # forget the values of fixtures
            reports = runtestprotocol(item, nextitem=None, log=False)
        line = json.dumps({"has_rule": has_rule, "outcome": _outcome(reports)})
        with item.config.getoption("--outcomes").open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    return True


def _outcome(reports: Sequence[pytest.TestReport]) -> str:
    """The outcome of a test from the outcomes of its setup, call and teardown."""
    outcomes = {report.outcome for report in reports}
    return next(outcome for outcome in ("failed", "skipped", "passed") if outcome in outcomes)
