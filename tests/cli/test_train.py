"""A head is taught by one command, which may end at any moment: started again, it goes on, and ends with the
same head.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_runner import Run
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

from proof.tiny_models import tiny_model_dir
from sidestream import LLM
from sidestream.cli.app import app
from sidestream.models.distil import Distillation, load_teacher
from sidestream.models.loader import weights_digest
from sidestream.models.mtp import load_head

pytestmark = pytest.mark.slow

STEPS, BATCHES = 8, 3
"""What the lesson below takes: steps, and batches of tasks until so many tokens are written."""
TRAIN = ("models", "train-mtp")
LESSON = ("--steps", STEPS, "--batch", 2, "--length", 32, "--drafts", 2, "--answers", 1400, "--device", "cpu")


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The head of a run that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole") / "head.safetensors"
    result = CliRunner().invoke(app, [str(argument) for argument in (*TRAIN, tiny, "--out", out, *LESSON)])
    assert result.exit_code == 0, result.output
    return out


class Interrupted:
    """Counts batches of tasks and steps, and interrupts the command in the middle of one as Ctrl-C does, once or
    several times.

    seeds   of the tasks that were answered
    """

    def __init__(self) -> None:
        self.batches = self.steps = 0
        self.in_batch = self.in_step = 0
        self.seeds: list[int | None] = []
        self.times = 1

    def press(self) -> None:
        for _ in range(self.times):
            signal.raise_signal(signal.SIGINT)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interrupted]:
    found = Interrupted()
    generate, step, learn = LLM.generate, Distillation.step, torch.optim.AdamW.step

    def counted_generate(self: LLM, prompts: Any, params: Any) -> Any:
        found.batches += 1
        outputs = generate(self, prompts, params)
        if found.batches == found.in_batch:
            found.press()
        found.seeds += [one.seed for one in params]
        return outputs

    def counted_step(self: Distillation) -> float:
        found.steps += 1
        return step(self)

    def interrupted_learn(self: Any, *closure: Any) -> Any:
        learnt = learn(self, *closure)
        if found.steps == found.in_step:
            found.press()
        return learnt

    monkeypatch.setattr(LLM, "generate", counted_generate)
    monkeypatch.setattr(Distillation, "step", counted_step)
    monkeypatch.setattr(torch.optim.AdamW, "step", interrupted_learn)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
    yield found
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def same(one: Path, other: Path) -> bool:
    """Whether two files hold the same tensors, bit by bit."""
    ours, theirs = load_file(one), load_file(other)
    return ours.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


# ---------------------------------------------------------------------- a whole run


def test_a_head_records_the_run_that_made_it(tiny: Path, whole: Path) -> None:
    head = load_head(load_teacher(str(tiny), device=torch.device("cpu")), whole)
    assert head.hidden_size == 64
    with safe_open(whole, framework="pt") as file:
        record = file.metadata()
    assert record["weights"] == weights_digest(str(tiny))
    asked = {"steps": STEPS, "batch": 2, "length": 32, "drafts": 2, "answers": 1400, "learning_rate": 1e-3, "seed": 0}
    asked["model"] = str(tiny)
    assert {name: json.loads(record[name]) for name in asked} == asked
    assert json.loads(record["texts"]) == []
    assert record["trained_on"] == "cpu"
    assert float(record["loss"]) > 0
    assert int(record["tokens"]) > 1400
    assert sorted(path.name for path in whole.parent.iterdir()) == ["head.safetensors", "head.tokens"]


def test_equal_seeds_give_equal_heads_and_others_do_not(run: Run, tiny: Path, whole: Path, tmp_path: Path) -> None:
    for name, seed in (("same", 0), ("other", 1)):
        assert run(*TRAIN, tiny, "--out", tmp_path / f"{name}.safetensors", "--seed", seed, *LESSON).exit_code == 0
    assert same(tmp_path / "same.safetensors", whole)
    assert same(tmp_path / "same.tokens", whole.with_suffix(".tokens"))
    assert not same(tmp_path / "other.safetensors", whole)
    assert not same(tmp_path / "other.tokens", whole.with_suffix(".tokens"))


def test_a_head_can_be_trained_on_a_text(run: Run, tiny: Path, whole: Path, tmp_path: Path) -> None:
    (tmp_path / "whale.txt").write_text("There she blows! " * 100, encoding="utf-8")
    result = run(*TRAIN, tiny, "--out", tmp_path / "head.safetensors", "--text", tmp_path / "whale.txt", *LESSON)
    assert result.exit_code == 0
    with safe_open(tmp_path / "head.safetensors", framework="pt") as more, safe_open(whole, framework="pt") as less:
        assert abs(int(more.metadata()["tokens"]) - int(less.metadata()["tokens"]) - 1700) < 32
        assert len(json.loads(more.metadata()["texts"])) == 1


# ---------------------------------------------------------------------- wrong input


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "0"], "steps is 0: it must be 1 or more"),
        (["--batch", "0"], "batch is 0: it must be 1 or more"),
        (["--drafts", "0"], "drafts is 0: it must be 1 or more"),
        (["--drafts", "17"], "drafts is 17: at most 16 tokens are verified at once; lower it"),
        (["--learning-rate", "0"], "--learning-rate is 0: it must be more than 0"),
        (["--learning-rate", "inf"], "--learning-rate is inf: it must be more than 0, and finite"),
        (["--learning-rate", "nan"], "--learning-rate is nan: it must be more than 0, and finite"),
        (["--seed", str(1 << 62)], f"seed is {1 << 62}: it must be in [0, 4294967295]"),
        (["--length", "7"], "--length is 7: for 4 drafts, a sequence needs 8 tokens; give more"),
        (["--answers", "-1"], "--answers is -1: it must be 0 or more"),
        (["--text", "no-such-text"], "--text no-such-text cannot be read: No such file or directory"),
        (
            ["--out", "no-such-directory/head.safetensors"],
            "no-such-directory is not a writable directory; give another path",
        ),
        (["--out", "head.bin"], "--out is head.bin: give a file with the ending .safetensors"),
        (["--device", "tpu"], "no device tpu; did you mean cpu?"),
    ],
)
def test_a_value_out_of_bounds_is_refused_before_loading(run: Run, arguments: list[str], said: str) -> None:
    result = run(*TRAIN, "no-such-model", *arguments)
    assert result.exit_code == 2
    assert result.output.startswith("error: ")
    assert said in result.output
    assert result.output.count("\n") == 1


def test_a_directory_without_write_access_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    result = run(*TRAIN, "no-such-model", "--out", tmp_path / "head.safetensors")
    assert f"{tmp_path} is not a writable directory" in result.output


def test_a_text_that_is_no_utf_8_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    assert (
        f"--text {tmp_path / 'latin'} is no UTF-8" in run(*TRAIN, "no-such-model", "--text", tmp_path / "latin").output
    )


def test_an_existing_head_is_not_overwritten(run: Run, tiny: Path, whole: Path) -> None:
    before = whole.read_bytes()
    result = run(*TRAIN, tiny, "--out", whole, *LESSON)
    assert result.exit_code == 2
    assert f"--out {whole} exists already: give another name, or delete it" in result.output
    assert whole.read_bytes() == before


@pytest.mark.parametrize(
    ("model", "said"),
    [("smollm2-135m-instuct", "did you mean smollm2-135m-instruct?"), ("/no/such/dir", "there is no such directory")],
)
def test_an_error_about_a_missing_model_names_it(run: Run, model: str, said: str, tmp_path: Path) -> None:
    result = run(*TRAIN, model, "--out", tmp_path / "head.safetensors", *LESSON)
    assert result.exit_code == 2
    assert said in result.output
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------- interrupted, and started again


def test_an_interrupt_keeps_the_answers(run: Run, tiny: Path, whole: Path, tmp_path: Path, work: Interrupted) -> None:
    command = (*TRAIN, tiny, "--out", tmp_path / "head.safetensors", *LESSON)
    work.in_batch = 2
    first = run(*command)
    assert first.exit_code == 130
    assert "the same command resumes from there" in first.output
    work.batches = work.in_batch = 0
    second = run(*command)
    assert second.exit_code == 0
    assert work.batches == BATCHES - 1  # the first was kept
    assert work.seeds == list(range(len(work.seeds)))  # no task was left out, none was answered twice
    assert same(tmp_path / "head.tokens", whole.with_suffix(".tokens"))
    assert same(tmp_path / "head.safetensors", whole)


@pytest.mark.parametrize(("times", "kept"), [(1, 3), (2, 0)], ids=["the step ends first", "a second one does not wait"])
def test_an_interrupt_during_a_step_changes_no_result(
    run: Run, tiny: Path, whole: Path, tmp_path: Path, work: Interrupted, times: int, kept: int
) -> None:
    command = (*TRAIN, tiny, "--out", tmp_path / "head.safetensors", *LESSON)
    work.in_step, work.times = 3, times
    first = run(*command)
    assert first.exit_code == 130
    assert ("interrupted after step 3 of 8: the same command resumes from there" in first.output) == bool(kept)
    assert not (tmp_path / "head.safetensors").exists()
    work.batches = work.steps = work.in_step = 0
    second = run(*command)
    assert second.exit_code == 0
    assert ("resuming after step 3" in second.output) == bool(kept)
    assert (work.batches, work.steps) == (0, STEPS - kept)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head.safetensors", "head.tokens"]
    assert same(tmp_path / "head.safetensors", whole)


def test_an_interrupt_during_the_last_step_changes_no_result(
    run: Run, tiny: Path, whole: Path, tmp_path: Path, work: Interrupted
) -> None:
    command = (*TRAIN, tiny, "--out", tmp_path / "head.safetensors", *LESSON)
    work.in_step = STEPS
    assert run(*command).exit_code == 130
    work.steps = work.in_step = 0
    assert run(*command).exit_code == 0
    assert work.steps == 0
    with safe_open(tmp_path / "head.safetensors", framework="pt") as ours, safe_open(whole, framework="pt") as theirs:
        assert ours.metadata() == theirs.metadata()  # the loss too
    assert same(tmp_path / "head.safetensors", whole)


_KILLED = """
import os, signal, sys
from sidestream.cli import app, train
from sidestream.llm import LLM
from sidestream.models.distil import Distillation
kind, name, last = {"answers": (LLM, "generate", 1), "steps": (Distillation, "step", 5)}[sys.argv.pop(1)]
method, calls, train._SAVE_EVERY = getattr(kind, name), [], 2
def killed(*arguments):
    if len(calls) == last:
        os.kill(os.getpid(), signal.SIGKILL)
    calls.append(arguments)
    return method(*arguments)
setattr(kind, name, killed)
app.app()
"""


@pytest.mark.parametrize(("during", "batches", "steps"), [("answers", BATCHES - 1, STEPS), ("steps", 0, STEPS - 4)])
def test_a_process_that_dies_leaves_its_saved_work(
    run: Run, tiny: Path, whole: Path, tmp_path: Path, work: Interrupted, during: str, batches: int, steps: int
) -> None:
    command = [str(argument) for argument in (*TRAIN, tiny, "--out", tmp_path / "head.safetensors", *LESSON)]
    died = subprocess.run([sys.executable, "-c", _KILLED, during, *command], capture_output=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    for name in ("head.tokens", "head.training"):  # as if it had died while it wrote them
        (tmp_path / f"{name}.partial").write_bytes(b"torn")
    assert run(*command).exit_code == 0
    assert (work.batches, work.steps) == (batches, steps)
    assert same(tmp_path / "head.safetensors", whole)


# ---------------------------------------------------------------------- what an earlier run left


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--answers", "900", "head.tokens was made with answers 1400, but now it is 900"),
        ("--length", "40", "head.tokens was made with length 32, but now it is 40"),
        ("--seed", "5", "head.tokens was made with seed 0, but now it is 5"),
        ("--steps", "9", "head.training was made with steps 8, but now it is 9"),
        ("--learning-rate", "0.1", "head.training was made with --learning-rate 0.001, but now it is 0.1"),
    ],
)
def test_saved_work_of_other_options_is_neither_used_nor_deleted(
    run: Run, interrupted: Path, tiny: Path, work: Interrupted, option: str, value: str, said: str
) -> None:
    before = {path: path.read_bytes() for path in interrupted.iterdir()}
    result = run(*TRAIN, tiny, "--out", interrupted / "head.safetensors", *LESSON, option, value)
    assert result.exit_code == 2
    assert said in result.output
    assert "give the same value to resume, give another --out, or delete the file" in result.output
    assert (work.batches, work.steps) == (0, 0)
    assert {path: path.read_bytes() for path in interrupted.iterdir()} == before


@pytest.fixture(scope="module")
def interrupted(tiny: Path, whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which a run was interrupted within its lesson."""
    directory = tmp_path_factory.mktemp("interrupted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Distillation, "step", _interrupt)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        arguments = (*TRAIN, tiny, "--out", directory / "head.safetensors", *LESSON)
        assert CliRunner().invoke(app, [str(argument) for argument in arguments]).exit_code == 130
        signal.signal(signal.SIGINT, before)
    return directory


def _interrupt(school: Distillation) -> float:
    school.done += 1
    signal.raise_signal(signal.SIGINT)
    return 0.5


def test_answers_serve_lessons_of_other_steps(
    run: Run, tiny: Path, whole: Path, tmp_path: Path, work: Interrupted
) -> None:
    (tmp_path / "head.tokens").write_bytes(whole.with_suffix(".tokens").read_bytes())
    assert run(*TRAIN, tiny, "--out", tmp_path / "head.safetensors", *LESSON, "--steps", 2).exit_code == 0
    assert (work.batches, work.steps) == (0, 2)


def test_answers_of_other_weights_there_are_refused(run: Run, whole: Path, tmp_path: Path, work: Interrupted) -> None:
    model = tiny_model_dir("llama", tmp_path / "model", seed=1)
    command = (*TRAIN, model, "--out", tmp_path / "head.safetensors", *LESSON)
    work.in_batch = 2
    assert run(*command).exit_code == 130
    tiny_model_dir("llama", model, seed=2)
    result = run(*command)
    assert result.exit_code == 2
    assert "head.tokens was made with weights " in result.output


@pytest.mark.parametrize("name", ["head.tokens", "head.training"])
def test_an_error_about_a_truncated_file_names_it_and_a_remedy(
    run: Run, interrupted: Path, tiny: Path, tmp_path: Path, name: str
) -> None:
    for path in interrupted.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    whole = (tmp_path / name).read_bytes()
    for data in (whole[:-1], whole[: len(whole) // 2], b"", b"something else"):
        (tmp_path / name).write_bytes(data)
        result = run(*TRAIN, tiny, "--out", tmp_path / "head.safetensors", *LESSON)
        assert result.exit_code == 2
        assert f"{tmp_path / name} cannot be read" in result.output
        assert "delete it, and its content is computed again" in result.output
        assert (tmp_path / name).read_bytes() == data
