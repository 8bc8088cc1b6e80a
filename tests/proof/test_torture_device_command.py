"""`python -m proof torture --device`: what it refuses and prints, and how it ends."""

from __future__ import annotations

import json

import pytest
from command_runner import Run

from proof.mutations import applied, find
from proof.torture import hunt_device, torture_device
from proof.torture.hardware import WORLDS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--device", "gpu"), "no device gpu"),
        (("--device", "cpu", "--blocks", "0"), "blocks is 0: give a whole number from 1"),
        (
            ("--device", "cpu", "--workers", "2"),
            "--workers applies only to the simulated device: leave out that option or --device",
        ),
        (
            ("--device", "cpu", "--replay", "none.json"),
            "--replay applies only to the simulated device: leave out that option or --device",
        ),
        (("--device", "cpu", "store-waits-for-step"), "store-waits-for-step is given without --mutations"),
        (("--device", "cpu", "--mutations", "finish-releases"), "no mutation for a device finish-releases"),
        (("--device", "cpu", "--mutations", "--check-order"), "--check-order does not work with --mutations"),
        (("--blocks", "5"), "--blocks is given without --device"),
        (("--check-order",), "--check-order is given without --device"),
        (("--requests", "5"), "--requests is given without --device"),
        (
            ("--device", "cpu", "--requests", "5", "--blocks", "5"),
            "--requests tests a whole engine, --blocks only transfers",
        ),
        (
            ("--device", "cpu", "--requests", "5", "--mutations", "store-waits-for-step"),
            "no mutation for a whole engine on cpu store-waits-for-step",
        ),
        (("--tensor-parallel", "2"), "--tensor-parallel is given without --device"),
        (
            ("--device", "cpu", "--tensor-parallel", "3"),
            "--tensor-parallel is 3: the model of this test has 8 KV heads, which two or more ranks divide among them: "
            "give 2 or 4 or 8",
        ),
        *(
            (("--device", "cpu", "--tensor-parallel", "2", *other), f"--tensor-parallel does not work with {other[0]}")
            for other in (("--mutations",), ("--requests", "5"), ("--check-order",))
        ),
    ],
)
def test_invalid_options_are_refused_before_any_run(options: tuple[str, ...], message: str, run: Run) -> None:
    result = run("torture", *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_figures_say_how_many_blocks_moved_and_that_none_was_wrong(run: Run) -> None:
    result = run("torture", "--device", "cpu", "--blocks", "500", "--check-order", "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    figures = {figure["name"]: figure for figure in report["figures"]}
    assert figures["torture_blocks"]["value"] >= 500
    assert figures["torture_blocks"]["bound"] == "at least 500"
    assert figures["torture_wrong"]["value"] == figures["findings"]["value"] == 0
    assert all(figure["holds"] is not False for figure in report["figures"])


def test_progress_is_reported_before_the_first_round_of_transfers_ends() -> None:
    reports: list[tuple[int, str]] = []
    torture_device("cpu", blocks=200, worlds=WORLDS[:1], tell=lambda done, text: reports.append((done, text)))
    before = [text for done, text in reports if done == 0]
    assert before[0] == f"{WORLDS[0].name}, 0 not compared yet"
    assert len(set(before)) > 2
    with pytest.raises(InterruptedError):
        hunt_device("cpu", tell=interrupt)


def interrupt(done: int, text: str) -> None:
    assert text == f"the unmodified code, {WORLDS[0].name}"
    raise InterruptedError


def test_ranks_in_processes_transfer_blocks_and_answer_right(run: Run) -> None:
    result = run("torture", "--device", "cpu", "--tensor-parallel", "2", "--blocks", "400", "--seed", "1", "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["environment"]["model"] == "model on 2 ranks, cpu"
    figures = {figure["name"]: figure for figure in report["figures"]}
    assert figures["torture_blocks"]["value"] >= 400
    assert figures["torture_blocks"]["bound"] == "at least 400"
    assert figures["torture_wrong_answers"]["value"] == 0
    assert all(figure["holds"] is not False for figure in report["figures"])
    for name in ("blocks_stored", "blocks_loaded", "tokens_found_on_device", "tokens_found_on_host", "tokens"):
        assert figures[name]["value"] > 0, name


def test_wrong_bytes_are_reported_with_exit_status_1(run: Run) -> None:
    with applied(find("copy-drops-only-finished-fences")):
        result = run("torture", "--device", "cpu", "--blocks", "20000", "--json")
    assert result.exit_code == 1
    wrong = next(figure for figure in json.loads(result.stdout)["figures"] if figure["name"] == "torture_wrong")
    assert wrong["value"] > 0
    assert "expected" in result.stderr
    assert "round" in result.stderr


def test_a_removed_rule_is_detected_and_the_table_names_the_oracle(run: Run) -> None:
    result = run("torture", "--device", "cpu", "--mutations", "copy-is-submitted-after-its-fences", "--json")
    assert result.exit_code == 0
    (row,) = json.loads(result.stdout)["mutations"]
    assert row["name"] == "copy-is-submitted-after-its-fences"
    assert row["killed_after"] > 0
    assert "expected" in row["said"]
