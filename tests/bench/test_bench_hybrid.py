"""The benchmark of models with recurrent state compares answers from all tiers, with or without drafts."""

from __future__ import annotations

import json

import pytest
from command_runner import Run

pytestmark = pytest.mark.slow


def test_answers_are_compared_from_every_tier_with_and_without_drafts(run: Run) -> None:
    done = run("hybrid", "lfm2", "--prompts", "3", "--turns", "2", "--system-tokens", "100", "--json")
    assert done.exit_code == 1, done.stderr  # a bound is missed: two turns of so few tokens reuse less
    figures = {figure["name"]: figure["value"] for figure in json.loads(done.stdout)["figures"]}
    assert figures["hybrid_cases"] == 3 * 8
    assert figures["hybrid_differences"] == figures["state_bytes_error"] == 0
    assert min(figures[f"hybrid_found_{where}"] for where in ("device", "host", "disk")) > 0


def test_a_family_that_is_not_hybrid_is_refused_by_name(run: Run) -> None:
    done = run("hybrid", "llama")
    assert done.exit_code == 2 and "family" in done.stderr and "llama" in done.stderr
