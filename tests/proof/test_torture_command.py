"""`python -m proof torture`: what it refuses, prints and saves, and how it ends."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pytest
from command_runner import Run

from proof import torture
from proof.commands.failures import FailingSchedules
from proof.mutations import Equivalent, applied, find
from proof.report import command_line
from proof.torture import Failure, Report, Workload, campaign, draw_workload, excuses, load_replay, run_one
from proof.torture.replay import Replay
from sidestream.engine import Engine
from sidestream.errors import ConfigError

pytestmark = pytest.mark.slow

WAIT_S = 600.0  # ends a test that hangs; no claim about speed
RULE = "release-waits-for-the-transfers"
RACE = "load-waits-for-the-last-use"


def figures(stdout: str) -> dict[str, float]:
    return {figure["name"]: figure["value"] for figure in json.loads(stdout)["figures"]}


def test_a_result_names_the_command_that_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", find_spec("proof.__main__"))
    monkeypatch.setattr(sys, "argv", ["__main__.py", "torture", "--save", "a b"])
    assert command_line() == "python -m proof torture --save 'a b'"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--schedules", "0"), "schedules is 0: give a whole number from 1"),
        (("--schedules", "-3"), "schedules is -3: give a whole number from 1"),
        (("--minutes", "0"), "minutes is 0: give a positive number"),
        (("--minutes", "nan"), "minutes is nan: give a positive number"),
        (("--minutes", "1", "--schedules", "5"), "--schedules and --minutes are both given: give only one of them"),
        (("--workers", "0"), "workers is 0: give a whole number from 1"),
        (("--policy", "lat"), "policy is 'lat': give random, late, early, starve:STREAM or pct:DEPTH"),
        (("--policy", "pct:0"), "policy is 'pct:0'"),
        (("finish-releases",), "finish-releases is given without --mutations or --excuses: give one of them, or leave"),
        (("--excuses", "finish-releases"), "finish-releases"),
        (("--excuses", "--schedules", "-1"), "schedules is -1: give a whole number from 0"),
        (("--excuses", "--mutations"), "--excuses does not work with --mutations: leave one of them out"),
        (("--mutations", "finish-release"), "finish-releases"),
        (("--mutations", "--policy", "late"), "--policy is given, and --mutations uses all policies and workloads"),
        (("--mutations", "--with", "states"), "--with is given, and --mutations uses all policies and workloads"),
        (("--excuses", "--first"), "--excuses does not work with --first: leave one of them out"),
        (("--auto-mutants", "--with", "states"), "--auto-mutants does not work with --with: leave one of them out"),
        (("--replay", "none.json", "--first"), "leave --first out"),
        (("--with", "state"), "no feature state; did you mean states?"),
        (("--with", "states", "--with", "self_check"), "no workload has self_check and states: the self-check refuses"),
        (("--replay", "none.json"), "none.json cannot be read: No such file or directory"),
        (("--replay", "none.json", "--seed", "0"), "--replay takes everything from its file: leave --seed out"),
        (("--replay", "none.json", "--workers", "2", "--policy", "late"), "leave --policy out"),
        (("--replay", "none.json", "finish-releases"), "leave finish-releases out"),
        (("--auto-mutants", "--only", "kv.pol:*"), "no automatic mutant matches 'kv.pol:*'"),
        (("--auto-mutants", "--minutes", "1"), "--auto-mutants does not work with --minutes: leave one of them out"),
        (("--auto-mutants", "--schedules", "0"), "schedules is 0: give a whole number from 1"),
        (("--auto-mutants", "finish-releases"), "finish-releases is given with --auto-mutants: write --only"),
        (("--only", "kv.pool:*"), "--only is given without --auto-mutants: give both, or leave it out"),
    ],
)
def test_invalid_options_are_refused_before_any_run(
    options: tuple[str, ...], message: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("torture", *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_unknown_options_are_refused(run: Run) -> None:
    result = run("torture", "--schedule", "5")
    assert result.exit_code == 2
    assert "--schedules" in result.stderr


def test_a_save_directory_that_cannot_be_created_is_refused_before_any_run(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run("torture", "--schedules", "8", "--save", tmp_path / "file" / "below")
    assert result.exit_code == 2
    assert "--save" in result.stderr
    assert "give another directory" in result.stderr
    assert "schedules" not in result.stdout


def test_a_clean_campaign_ends_with_0_and_its_figures(run: Run, tmp_path: Path) -> None:
    result = run("torture", "--schedules", "16", "--seed", "4", "--json", "--save", tmp_path)
    assert result.exit_code == 0
    told = figures(result.stdout)
    assert told["schedules"] == 16
    assert told["findings"] == 0
    assert told["schedules_per_minute"] > 0
    assert not list(tmp_path.iterdir())


def test_minutes_bound_the_number_of_schedules(run: Run, tmp_path: Path) -> None:
    result = run("torture", "--minutes", "0.001", "--json", "--save", tmp_path)
    assert result.exit_code == 0
    assert figures(result.stdout)["schedules"] == 2  # whatever was begun is finished: the schedules of one workload


def test_only_the_named_policies_are_used(run: Run, tmp_path: Path) -> None:
    late, both = (
        figures(run("torture", "--schedules", "8", *options, "--json", "--save", tmp_path).stdout)[
            "decisions_per_schedule"
        ]
        for options in (("--policy", "late"), ("--policy", "late", "--policy", "pct:2"))
    )
    assert late != both


def test_a_finding_ends_with_1_and_is_shown_saved_and_replayed(run: Run, tmp_path: Path) -> None:
    with applied(find(RACE)):
        result = run(
            "torture", "--schedules", "4", "--seed", "93", "--policy", "starve:compute", "--json", "--save", tmp_path
        )
    assert result.exit_code == 1
    assert figures(result.stdout)["findings"] > 0
    for part in (" A  ", " B  ", "checker: race: "):
        assert part in result.stderr
    assert len(list(tmp_path.iterdir())) == figures(result.stdout)["findings"]  # the shown one is no longer there twice
    shown = re.search(r"python -m proof torture --replay (\S+)", result.stderr)
    assert shown is not None
    saved = Path(shown[1])
    missing = re.search(r"missing: compute:\d+ ──▶ load-\d+:", result.stderr)
    assert missing is not None

    with applied(find(RACE)):
        replayed = run("torture", "--replay", saved)
    assert replayed.exit_code == 1
    assert missing[0] in replayed.stdout
    fixed = run("torture", "--replay", saved)
    assert fixed.exit_code == 0
    assert "the schedule no longer fails; it failed with: checker: race: " in fixed.stdout


def test_option_first_ends_the_campaign_at_its_first_finding(run: Run, tmp_path: Path) -> None:
    with applied(find(RACE)):
        result = run(*FAILS, "--first", "--json", "--save", tmp_path)
    assert result.exit_code == 1
    told = figures(result.stdout)
    assert (told["schedules"], told["findings"]) == (3, 1)
    assert "bound missed: findings is 1 schedules, and must be at most 0" in result.stderr


def test_only_workloads_with_the_named_features_are_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workloads = list[Workload]()

    def noted(seed: int) -> Workload:
        workloads.append(draw_workload(seed))
        return workloads[-1]

    monkeypatch.setattr(campaign, "draw_workload", noted)
    result = run(
        "torture", "--schedules", "4", "--with", "states", "--with", "speculative", "--json", "--save", tmp_path
    )
    assert result.exit_code == 0
    assert len(workloads) == 2
    assert all({"states", "speculative"} <= workload.features for workload in workloads)


@pytest.mark.parametrize(
    ("schedules", "options", "status"), [(2000, (), 1), (500, (), 0), (2000, ("--policy", "late"), 0)]
)
def test_a_slow_campaign_of_all_policies_misses_its_bound_and_ends_with_1(
    schedules: int, options: tuple[str, ...], status: int, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torture, "torture", lambda **_: Report(schedules=schedules, seconds=3600.0))
    result = run("torture", *options, "--json", "--save", tmp_path)
    assert result.exit_code == status
    assert ("bound missed: schedules_per_minute is 33.3333 schedules/min/core" in result.stderr) == bool(status)
    assert json.loads(result.stdout)["environment"]["python_loop_ms"] > 0


FAILS = ("torture", "--schedules", "4", "--seed", "93", "--policy", "starve:compute")


def interrupted(*_: object, **__: object) -> NoReturn:
    raise KeyboardInterrupt


def test_an_interrupt_during_shrinking_keeps_the_schedule_and_figures(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torture, "shrink", interrupted)
    monkeypatch.setattr(torture, "hunt", lambda *_, **__: pytest.fail("the hunt began after the interrupt"))
    with applied(find(RACE)):
        result = run(*FAILS, "--mutations", "--json", "--save", tmp_path)
        assert result.exit_code == 1
        count = figures(result.stdout)["findings"]
        saved = sorted(tmp_path.iterdir())
        assert len(saved) == count > 1
        assert "policy starve:compute, seed 746: not shrunk" in result.stderr
        assert f"python -m proof torture --replay {saved[0]}" in result.stderr
        assert run("torture", "--replay", saved[0]).exit_code == 1
    assert run("torture", "--replay", saved[0]).exit_code == 0


def test_an_interrupt_while_the_schedule_of_a_mutation_is_shrunk_ends_with_130(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torture, "shrink", interrupted)
    result = run("torture", "--mutations", RULE, "--json", "--save", tmp_path)
    assert result.exit_code == 130
    assert figures(result.stdout)["mutations_killed"] == 1
    assert [path.name for path in tmp_path.iterdir()] == [f"{RULE}-as-it-ran.json"]


def test_a_failure_that_does_not_fail_again_is_shown_with_the_figures(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails_once(*_: object, **__: object) -> NoReturn:
        raise ConfigError("does not fail again")

    monkeypatch.setattr(torture, "shrink", fails_once)
    with applied(find(RACE)):
        result = run(*FAILS, "--save", tmp_path)
    assert result.exit_code == 1
    for part in ("does not fail again", "not shrunk", "checker: race: ", "python -m proof torture --replay "):
        assert part in result.stderr
    assert "findings" in result.stdout


def test_a_failure_is_on_disk_before_the_campaign_ends(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> NoReturn:
        raise SystemExit(137)

    monkeypatch.setattr(FailingSchedules, "show", killed)
    monkeypatch.setattr(campaign, "_REPORT_EVERY_S", math.inf)
    with applied(find(RACE)):
        assert run(*FAILS, "--save", tmp_path).exit_code == 137
    assert list(tmp_path.glob("*-as-it-ran.json"))


def failure_without(rule: str) -> Failure:
    workload, policy = draw_workload(53), "starve:compute"
    with applied(find(rule)):
        failure = Failure(workload, policy, 424, run_one(workload, policy, 424))
    assert failure.outcome.findings
    return failure


def test_a_failure_that_cannot_be_saved_is_printed_and_the_campaign_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failure, directory = failure_without(RACE), tmp_path / "gone"
    failing = FailingSchedules(directory)
    failing.keep([failure])
    assert "cannot be written: No such file or directory" in " ".join(capsys.readouterr().err.split())
    failing.keep([failure])
    assert capsys.readouterr().err == ""  # said once
    directory.mkdir()
    for policy in ("starve:compute", "starve:rank1/compute"):
        failing.keep([dataclasses.replace(failure, policy=policy)])
    assert [load_replay(path).workload for path in directory.iterdir()] == [failure.workload] * 2


def test_a_shrunk_schedule_that_cannot_be_written_is_shown_and_the_long_one_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = failure_without(RACE)
    name = f"{failure.workload.seed}-starve-compute-424"
    (tmp_path / f"{name}.json").mkdir()
    with applied(find(RACE)):
        assert not FailingSchedules(tmp_path).show([failure], 1)
    said = capsys.readouterr().err
    for part in ("cannot be written", "shrunk in", f"--replay {tmp_path / name}-as-it-ran.json"):
        assert part in said


def test_an_unknown_rule_is_refused_with_a_few_of_the_known_ones(run: Run) -> None:
    refused = run("torture", "no-such-rule-at-all", "--mutations")
    assert refused.exit_code == 2
    assert re.search(r"no mutation no-such-rule-at-all; known: .+ and \d+ more", refused.stderr)
    assert len(refused.stderr) < 3000


def test_a_named_mutation_is_shown_and_its_replay_applies_it(run: Run, tmp_path: Path) -> None:
    result = run("torture", "--mutations", RULE, "--json", "--save", tmp_path)
    assert result.exit_code == 0
    assert figures(result.stdout) == {
        "mutations_total": 1,
        "mutations_killed": 1,
        "schedules_to_kill_p50": 1,
        "schedules_to_kill_p95": 1,
        "schedules_to_kill_max": 1,
    }
    [row] = json.loads(result.stdout)["mutations"]
    assert row == {
        "name": RULE,
        "hazard": find(RULE).hazard,
        "miniature": False,
        "killed_after": 1,
        "oracle": "checker",
    }
    assert f"│ {RULE}" in result.stderr
    replayed = run("torture", "--replay", tmp_path / f"{RULE}.json", "--json")
    assert replayed.exit_code == 1
    assert figures(replayed.stdout)["findings"] == 1
    assert f"without {RULE}" in replayed.stderr


def test_excuses_that_are_asked_for_by_name_are_checked_and_a_wrong_one_ends_with_1(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "doomed-entries-are-deleted"  # its row names no test, so no process is started
    result = run("torture", "--excuses", name, "--schedules", "4", "--json")
    assert result.exit_code == 0
    assert figures(result.stdout) == {
        "excuses_checked": 1,
        "excuses_wrong": 0,
        "excuses_with_a_test": 0,
        "schedules": 4,
    }
    assert json.loads(result.stdout)["excuses"] == [{"name": name, "noticed_by": "", "wrong": ""}]
    monkeypatch.setattr(excuses, "EQUIVALENT", (Equivalent(find(RULE), "made up"),))
    result = run("torture", "--excuses", "--json")
    assert result.exit_code == 1
    assert figures(result.stdout)["excuses_wrong"] == 1
    assert "checker detects that the rule is missing" in " ".join(result.stderr.split())


def test_names_in_brackets_are_printed_without_markup(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "[red]s[bold].json"
    Replay(draw_workload(0), {}, None, "tokens", "[blue]").save(path)
    result = run("torture", "--replay", path)
    assert result.exit_code == 0
    assert str(path) in result.stdout
    assert "tokens: [blue]" in result.stdout


def test_an_interrupt_ends_with_130_or_with_1_after_findings(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, step = [0], Engine.step

    def interrupted(self: Engine) -> bool:
        steps[0] += 1
        if steps[0] == 1000:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)
    result = run("torture", "--json", "--save", tmp_path)
    assert result.exit_code == 130
    assert 0 < figures(result.stdout)["schedules"] < 100
    steps[0] = 0
    with applied(find(RULE)):
        assert run("torture", "--json", "--save", tmp_path).exit_code == 1
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("sidestream-sim")]


def test_an_interrupt_ends_with_130_and_what_was_done_and_leaves_no_process(tmp_path: Path) -> None:
    code = f"""
import os, signal
from proof.torture import campaign

spread = campaign.spread

def interrupted(jobs, *, workers):
    for number, result in enumerate(spread(jobs, workers=workers)):
        yield result
        if number == 2:
            os.killpg(os.getpgrp(), signal.SIGINT)  # as a terminal does: to all of them

if __name__ == "__main__":
    campaign.spread = interrupted
    from proof.__main__ import app
    app(["torture", "--minutes", "60", "--workers", "2", "--json", "--save", {str(tmp_path)!r}])
"""
    (tmp_path / "program.py").write_text(code, encoding="utf-8")
    command = [sys.executable, str(tmp_path / "program.py")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        try:
            out, err = child.communicate(timeout=WAIT_S)  # until nobody holds its pipes any more: it and its workers
        finally:
            child.kill()
    assert child.returncode == 130
    assert figures(out)["schedules"] >= 6
    assert "Traceback" not in err
