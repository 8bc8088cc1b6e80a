"""Rules that no schedule has to detect: the claims of their rows are checked, and a wrong claim is reported. All rows:
`python -m proof torture --excuses`.
"""

from __future__ import annotations

import pytest

from proof.mutations import EQUIVALENT, Equivalent, find
from proof.torture import excuses
from proof.torture.excuses import check_excuse, check_excuses
from sidestream.errors import ConfigError

pytestmark = pytest.mark.slow


def test_a_sample_of_the_rows_is_right() -> None:
    report = check_excuses(["unused-lease-keeps-fences"], schedules=4)
    assert [(row.name, row.wrong) for row in report.rows] == [("unused-lease-keeps-fences", "")]
    assert report.schedules == 4


@pytest.mark.parametrize(
    ("with_rule", "without", "output", "wrong"),
    [
        (("passed",), ("failed",), "1 failed", ""),
        (("passed", "passed"), ("passed", "failed"), "1 failed", ""),
        (("passed",), (), "", ""),  # it hangs
        (("passed",), ("passed",), "1 passed", "kv/test_keys.py::test passes without the rule, too"),
        (("skipped",), ("skipped",), "1 skipped", "has the outcome skipped with the rule: it must pass"),
        (("failed",), ("failed",), "1 failed", "has the outcome failed with the rule: it must pass"),
        (("passed",), (), "Segmentation fault", "ended without a result: Segmentation fault"),
        ((), (), "no such test", "did not run: no such test"),
    ],
)
def test_a_row_is_wrong_unless_its_test_passes_with_the_rule_and_fails_without_it(
    with_rule: tuple[str, ...], without: tuple[str, ...], output: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(excuses, "_run_test", lambda row: excuses._Runs(with_rule, without, output))
    row = Equivalent(find("finish-releases"), "made up", noticed_by="kv/test_keys.py::test")
    assert check_excuse(row, schedules=0).wrong.endswith(wrong)
    assert bool(check_excuse(row, schedules=0).wrong) == bool(wrong)


def test_a_row_whose_missing_rule_a_schedule_detects_is_wrong() -> None:
    found = check_excuse(Equivalent(find("release-waits-for-the-transfers"), "made up"), schedules=8)
    assert found.wrong.startswith("checker detects that the rule is missing, after ")


def test_names_and_the_place_of_the_tests_are_checked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="did you mean unused-lease-keeps-fences"):
        check_excuses(["unused-lease-keeps-fence"])
    monkeypatch.setattr(excuses, "_TESTS", excuses._TESTS / "none")
    with pytest.raises(ConfigError, match="check excuses in a checkout of the repository"):
        check_excuses(["unused-lease-keeps-fences"])


def test_a_row_whose_fault_no_schedule_reaches_names_a_test() -> None:
    unreached = [row for row in EQUIVALENT if row.unreached]
    assert unreached
    assert [row.mutation.name for row in unreached if not row.noticed_by] == []


def test_no_reason_says_that_a_fault_is_only_unlikely() -> None:
    vague = ("hardly", "almost", "would have to", "rarely", "unlikely", "seldom")
    assert [row.mutation.name for row in EQUIVALENT if any(word in row.reason for word in vague)] == []
