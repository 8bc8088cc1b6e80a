"""Tables in README and docs are what bench/results and the code say."""

import sys

import pytest

from bench import campaigns, mutants, tables


def test_tables_are_generated_from_the_committed_results_and_the_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tables", "--check"])
    assert tables.main() == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    "marker",
    [
        "<!-- figures: engine,h200 -->\n<!-- end -->",  # no name of a file
        "<!-- figures: engine-h200 -->\n",
        "<!-- bounds:engine-h200 -->\n<!-- end -->",
        "<!-- compared: engine-h200 -->\n<!-- end -->",
        "<!-- selected\nengine-h200\n-->\n<!-- end -->",
        "<!-- mutants: auto-mutants -->\n",
        "<!-- campaigns -->\n",
        "<!-- races -->\nwords\n",
    ],
)
def test_a_marker_that_matches_no_table_is_reported(marker: str) -> None:
    named = "<!-- figures: decode-llama-3.2-1b-h200 -->\n<!-- end -->\n"
    assert "decode_b1_over_floor" in tables.rewritten(named)
    with pytest.raises(ValueError, match="2 markers of tables, of which 1 name files"):
        tables.rewritten(named + marker)


def test_single_figures_are_selected_by_name_with_words_of_their_own() -> None:
    marker = "<!-- selected\nengine-h200 {}: a step: its time over its floor\n-->\n<!-- end -->\n"
    row = tables.rewritten(marker.format("decode_b32_over_floor")).splitlines()[-2]
    assert row.startswith("| a step: its time over its floor | ")
    assert row.endswith(" | NVIDIA H200 |")
    with pytest.raises(KeyError, match="decode_b33"):
        tables.rewritten(marker.format("decode_b33"))


def test_two_tables_of_selected_figures_keep_the_words_between_them() -> None:
    marker = "<!-- selected\nengine-h200 decode_b32_over_floor: a step\n-->\n<!-- end -->\n"
    assert "\nwords\n" in tables.rewritten(f"{marker}words\n{marker}")


def test_each_compared_file_has_a_column() -> None:
    names = ["ranks-qwen3-8b-h100-x2", "ranks-qwen3-32b-h100-x2"]
    lines = tables.table(names, bounded=True, compared=True).splitlines()
    assert lines[0] == f"| figure | `{names[0]}` | `{names[1]}` | unit | bound |"
    assert lines[2] == "| `tp2_over_tp1_decode_b1` | 0.6605 **no** | 0.5628 | ratio | at most 0.62 |"


def test_results_of_campaigns_are_added_if_their_workloads_differ() -> None:

    def report(seed: int, schedules: int) -> dict[str, object]:
        figures = {"schedules": schedules, "findings": 0, "schedules_per_minute": 750.4}
        return {
            "command": f"python -m proof torture --minutes 8.2 --seed {seed} --workers 2 --json",
            "environment": {"cpu": "a CPU", "cores": 2, "date": "2026-11-27"}
            | ({"python_loop_ms": 14.6} if seed == 105 else {}),
            "figures": [{"name": name, "value": value} for name, value in figures.items()],
        }

    assert campaigns.campaign_table([report(105, 8), report(100, 9)]).splitlines()[2:] == [
        "| 100 | 8.2 | 2 | 9 | 0 | 750 | a CPU, 2 cores, 2026-11-27 |",
        "| 105 | 8.2 | 2 | 8 | 0 | 750 | a CPU, 2 cores (Python loop 15 ms), 2026-11-27 |",
        "| all | | | 17 | 0 | | |",
    ]
    with pytest.raises(ValueError, match="seed 104 ran workloads of the one before, which end at 105"):
        campaigns.campaign_table([report(104, 8), report(100, 9)])


def test_the_table_of_automatic_mutants_has_those_that_nothing_detected() -> None:
    rows = [
        {"name": "auto:kv.pool:f:delete:0", "by": "schedules", "finding": "checker", "schedules": 1},
        {"name": "auto:kv.pool:f:compare:0", "by": "reason", "finding": "a reason", "schedules": 40, "change": "a → b"},
        {"name": "auto:kv.pool:f:logic:0", "by": None, "finding": None, "schedules": 40, "change": "a | b → a"},
    ]
    table = mutants.mutant_table({"mutants": rows})
    assert table.splitlines()[2:] == [
        "| `kv.pool:f:compare:0` | `a → b` | a reason |",
        "| `kv.pool:f:logic:0` | `a \\| b → a` | **open** |",
    ]
