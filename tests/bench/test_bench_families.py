"""`bench families`: the outcome of a kind, and the kinds that the documentation names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench import families

ROOT = Path(__file__).resolve().parents[2]


def test_a_kind_that_is_served_is_compared() -> None:
    found = families._try_kind("qwen3", lambda text: None)
    assert found.outcome == "identical" and 0 < found.logprob_error < 1e-4


def test_log_probabilities_beyond_the_bound_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = families._served_answers

    def shifted(directory: Path) -> list[tuple[list[int], list[float]]]:
        return [(tokens, [one + 2e-4 for one in logprobs]) for tokens, logprobs in answers(directory)]

    monkeypatch.setattr(families, "_served_answers", shifted)
    assert families._try_kind("qwen3", lambda text: None).outcome == "wrong"


def test_other_tokens_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = families._served_answers

    def shifted(directory: Path) -> list[tuple[list[int], list[float]]]:
        return [([tokens[0] ^ 1, *tokens[1:]], logprobs) for tokens, logprobs in answers(directory)]

    monkeypatch.setattr(families, "_served_answers", shifted)
    assert "inf" in families._try_kind("qwen3", lambda text: None).reason


@pytest.mark.parametrize(("message", "outcome"), [("it is odd", "unclear"), ("llama is odd", "refused")])
def test_a_refusal_must_name_what_is_refused(message: str, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise families.ModelError(message)

    monkeypatch.setattr(families, "check_servable", refuse)
    assert families._try_kind("llama", lambda text: None).outcome == outcome


def test_the_documentation_names_the_kinds_that_were_identical() -> None:
    rows = json.loads((ROOT / "bench" / "results" / "families" / "kinds.json").read_text(encoding="utf-8"))
    (row,) = re.findall(r"^\| served \((\d+)\) \| (.*) \|$", (ROOT / "docs" / "models.md").read_text("utf-8"), re.M)
    named = [re.sub(r" [¹²³⁴⁵⁶⁷ ]+$| \(.*\)$", "", one) for one in row[1].split(", ")]
    assert named == [one["kind"] for one in rows if one["outcome"] == "identical"]
    assert int(row[0]) == len(named)
