"""Engines, a cache process and a store are killed at random moments: a short run of `python -m proof crash`."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from proof.store_servers import ValkeyServer

# The crash test forks, so it needs a process without other threads. Arguments: kills, kills of a round, and a rule to
# remove.
RUN = """
import contextlib, json, sys
from proof.crash import campaign, crash
from proof.mutations import applied, find
campaign.KILLS_OF_A_ROUND = int(sys.argv[2])
with applied(find(sys.argv[3])) if sys.argv[3:] else contextlib.nullcontext():
    report = crash(kills=int(sys.argv[1]), seed=1, first=True)
print(json.dumps([report.kills, report.findings, report.tokens, report.texts, report.damaged, report.verified]))
"""
NEEDS_STORE = pytest.mark.skipif(ValkeyServer.why_none() is not None, reason=str(ValkeyServer.why_none()))


def crashed(*arguments: object) -> list[Any]:
    command = [sys.executable, "-c", RUN, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


@NEEDS_STORE
def test_killed_engines_leave_no_wrong_block_and_no_lease() -> None:
    kills, findings, tokens, texts, damaged, verified = crashed(14, 7)
    assert texts == []
    assert not any(findings.values())
    assert sum(kills.values()) == 14
    assert tokens["host"] + tokens["disk"] + tokens["redis"] > 0
    assert damaged > 0  # in the second round
    assert verified > 20


@pytest.mark.slow  # up to 900 kills with each of these rules removed
@NEEDS_STORE
@pytest.mark.parametrize(
    ("rule", "kinds"),
    [
        ("record-is-published-after-its-payload", {"unverified"}),
        ("every-bit-is-verified", {"wrong_tokens", "unpublished"}),
        ("shared-slot-is-leased-while-it-is-read", {"wrong_tokens", "unpublished"}),
        ("slot-has-one-writer-and-no-reader", {"unverified"}),
        ("leases-end-with-the-process", {"stale_lease"}),
    ],
)
def test_a_missing_rule_is_noticed_by_killing_processes(rule: str, kinds: set[str]) -> None:
    _, findings, _, texts, _, _ = crashed(900, 8, rule)  # ends after the first round with a finding
    assert kinds & {kind for kind, count in findings.items() if count}, texts
