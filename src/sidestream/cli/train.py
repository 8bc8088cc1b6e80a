"""`sidestream models train-mtp`: trains a draft head (MTP) for a model by distillation, on the model's own answers and
on texts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console

from sidestream.cli.declare import Option, option
from sidestream.cli.loading import prepare_model
from sidestream.cli.options import DEMO_MODEL, Model
from sidestream.cli.progress import Steps
from sidestream.errors import ConfigError
from sidestream_kv.config import unknown_name
from sidestream_kv.device.kinds import CPU, CUDA

if TYPE_CHECKING:
    from torch import Tensor

    from sidestream.models.distil import Lesson

_PROMPT_SHARE = 0.5  # largest share of a training sequence that a task's prompt may fill
_MAX_RUNNING = {CPU: 8, CUDA: 256}  # requests that run at once while the model answers tasks
_TEMPERATURES = (0.5, 1.0, 0.7)  # of the third and later answers to one task
_SAVE_EVERY = 200  # steps
# Options that the model's answers depend on. The trained head depends on all options.
_ANSWER_OPTIONS = ("model", "weights", "length", "answers", "seed", "texts")


def train_mtp(
    model: Model = DEMO_MODEL,
    out: Annotated[
        Path,
        option(
            "--out",
            short=("-o",),
            metavar="FILE",
            help="File of the trained head; files to resume the run are stored in the same directory.",
        ),
    ] = Path("head.safetensors"),
    steps: Annotated[int, Option("Training steps.")] = 3000,
    batch: Annotated[int, Option("Sequences per batch.")] = 16,
    length: Annotated[int, Option("Tokens per sequence.")] = 512,
    drafts: Annotated[int, Option("Consecutive tokens that the head learns to draft.")] = 4,
    answers: Annotated[int, Option("Tokens of the model's own answers to train on.")] = 3_000_000,
    text: Annotated[
        list[Path] | None, Option("Text file to train on, in UTF-8; may be given several times.", "FILE")
    ] = None,
    learning_rate: Annotated[float, Option("Peak learning rate.", "R")] = 1e-3,
    seed: Annotated[int, Option("Random seed; equal seeds give equal heads on one machine.")] = 0,
    device: Annotated[str, Option("cpu, cuda, or auto.", "DEVICE")] = "auto",
) -> None:
    """Train a draft head for a model (speculative decoding) on the model's own answers to tasks, and on texts.

    For the demo model this takes some minutes on a GPU; on a CPU, choose fewer steps and answers. The training data
    (.tokens) stay in the head's directory; the training state (.training) stays there until the head is ready. A new
    run with the same options resumes from these files. A run with other options ends with an error.
    """
    from sidestream.models.catalog import resolve
    from sidestream.models.distil import Lesson
    from sidestream.models.loader import weights_digest
    from sidestream_kv.device.choice import torch_device

    lesson = Lesson(steps, batch, drafts, learning_rate=learning_rate, seed=seed)
    if length < 2 * drafts:
        raise ConfigError(f"--length is {length}: for {drafts} drafts, a sequence needs {2 * drafts} tokens; give more")
    if answers < 0:
        raise ConfigError(f"--answers is {answers}: it must be 0 or more")
    texts = [_read(path) for path in text or ()]
    _check_out(out)
    if device not in ("auto", *_MAX_RUNNING):
        raise ConfigError(unknown_name("device", device, ("auto", *_MAX_RUNNING)))
    kind = torch_device(device).type
    prepare_model(model)
    record = {
        "model": model,
        "weights": weights_digest(resolve(model)),
        "steps": steps,
        "batch": batch,
        "length": length,
        "drafts": drafts,
        "answers": answers,
        "learning_rate": learning_rate,
        "seed": seed,
        "texts": [hashlib.sha256(one.encode()).hexdigest()[:16] for one in texts],
    }
    answered = _load_answers(out.with_suffix(".tokens"), record)
    saved = _load_training(out.with_suffix(".training"), record)
    console = Console(stderr=True)
    with Steps(console, keep=True) as progress:
        run = _Run(out, record, texts, kind, progress, console)
        _train(run, _training_data(run, answered), lesson, saved)
    console.print(f"{out} is ready: sidestream serve {model} --speculative mtp --draft-head {out}", highlight=False)


@dataclass(frozen=True, slots=True)
class _Run:
    """The inputs of one run of the command.

    out      the head's file
    record   the options of the run, as JSON values
    kind     the device: "cpu" or "cuda"
    """

    out: Path
    record: Mapping[str, Any]
    texts: Sequence[str]
    kind: str
    progress: Steps
    console: Console


def _check_out(out: Path) -> None:
    if out.suffix != ".safetensors":
        raise ConfigError(f"--out is {out}: give a file with the ending .safetensors")
    directory = out.absolute().parent
    if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"--out is {out}: {directory} is not a writable directory; give another path")
    if out.exists():
        raise ConfigError(f"--out {out} exists already: give another name, or delete it")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--text {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text {path} is no UTF-8: {error}") from error


# ---------------------------------------------------------------------- files of an earlier run


def _check_same(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ConfigError if the file `path` was made with other options. The message gives both values."""
    for name, value in now.items():
        if before.get(name) != value:
            raise ConfigError(
                f"{path} was made with {name} {before.get(name)}, but now it is {value}: "
                "give the same value to resume, give another --out, or delete the file"
            )


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{path} cannot be read ({error or type(error).__name__}): delete it, and its content is computed again"
    )


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """Context manager: yields a temporary file, which replaces `path` at the end of the block. If the process is killed
    during the block, the old file remains.
    """
    partial = path.with_name(path.name + ".partial")
    yield partial
    partial.replace(path)


# ---------------------------------------------------------------------- training data


@dataclass(slots=True)
class _Answers:
    """The training data so far.

    stream        token ids: first the texts, then the tasks, each with the model's answer
    num_tasks     number of tasks that the model has answered
    num_tokens    number of tokens in the model's answers
    """

    stream: list[int]
    num_tasks: int = 0
    num_tokens: int = 0


def _load_answers(path: Path, record: Mapping[str, Any]) -> _Answers | None:
    """The answers that an earlier run saved in `path`; None: no such file. Raises ConfigError if that run had other
    options.
    """
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            options = json.loads(metadata["of"])
            answers = _Answers(file.get_tensor("stream").tolist(), int(metadata["asked"]), int(metadata["done"]))
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise _unreadable(path, error) from error
    _check_same(path, options, {name: record[name] for name in _ANSWER_OPTIONS})
    return answers


def _training_data(run: _Run, answers: _Answers | None) -> Tensor:
    """The training data as sequences of equal length, int32 `[N, length]`.

    Generating answers is slow, so they are saved after each batch of tasks.
    """
    import torch
    from safetensors.torch import save_file

    def save(answers: _Answers) -> None:
        metadata = {
            "of": json.dumps({name: run.record[name] for name in _ANSWER_OPTIONS}),
            "asked": str(answers.num_tasks),
            "done": str(answers.num_tokens),
        }
        with _replaced(run.out.with_suffix(".tokens")) as partial:
            save_file({"stream": torch.tensor(answers.stream, dtype=torch.int32)}, partial, metadata)

    if answers is None or answers.num_tokens < run.record["answers"]:
        answers = _answer_tasks(run, answers, save)
    length = run.record["length"]
    count = len(answers.stream) // length
    return torch.tensor(answers.stream[: count * length], dtype=torch.int32).view(count, length)


def _answer_tasks(run: _Run, answers: _Answers | None, save: Callable[[_Answers], None]) -> _Answers:
    """Let the model answer tasks until there are enough answer tokens. Calls `save` after each batch of tasks."""
    from sidestream.config import SamplingParams
    from sidestream.llm import LLM
    from sidestream.text import sample_tasks, sample_text

    record, tasks, max_running = run.record, sample_tasks(), _MAX_RUNNING[run.kind]
    length, wanted = record["length"], record["answers"]
    with LLM(
        record["model"],
        device=run.kind,
        max_running=max_running,
        kv_memory="4GiB" if run.kind == CUDA else "512MiB",
        max_model_len=length,
        generation_config="none",  # sample from the model's own distribution, at the temperatures below
        on_stage=run.progress.update,
    ) as llm:
        if answers is None:
            texts = (sample_text(), *run.texts)
            answers = _Answers([token for text in texts for token in llm.tokenizer.encode(text)])
            save(answers)
        else:
            run.console.print(f"resuming after {answers.num_tokens:,} tokens of the model's answers", highlight=False)
        end = llm.tokenizer.eos_ids[:1]
        while answers.num_tokens < wanted:
            run.progress.update("tokens of the model's answers to tasks", min(answers.num_tokens, wanted), wanted)
            numbers = range(answers.num_tasks, answers.num_tasks + 4 * max_running)
            chats = [[{"role": "user", "content": tasks[number % len(tasks)]}] for number in numbers]
            prompts = [llm.tokenizer.chat(chat)[: int(length * _PROMPT_SHARE)] for chat in chats]
            params = [
                SamplingParams(
                    temperature=_temperature(*divmod(number, len(tasks))),
                    max_tokens=length // 2,
                    seed=record["seed"] + number,
                )
                for number in numbers
            ]
            try:
                outputs = llm.generate(prompts, params)
            except KeyboardInterrupt:
                run.console.print(
                    f"interrupted: {answers.num_tokens:,} tokens are saved, the same command resumes from there",
                    highlight=False,
                )
                raise
            for prompt, output in zip(prompts, outputs, strict=True):
                answers.stream += (*prompt, *output.token_ids, *end)
                answers.num_tokens += len(output.token_ids)
            answers.num_tasks = numbers.stop
            save(answers)
    return answers


def _temperature(time: int, task: int) -> float:
    """Sampling temperature of answer number `time` to task number `task`. Only one of a task's first two answers is
    greedy, because two greedy answers would be equal.
    """
    if time < 2:
        return 0.0 if (time + task) % 2 == 0 else 1.0
    return _TEMPERATURES[time % len(_TEMPERATURES)]


# ---------------------------------------------------------------------- training


def _load_training(path: Path, record: Mapping[str, Any]) -> dict[str, Any] | None:
    """The training state that an earlier run saved in `path`; None: no such file. Raises ConfigError if that run had
    other options.
    """
    import torch

    if not path.exists():
        return None
    try:
        saved: dict[str, Any] = torch.load(path, map_location=CPU, weights_only=True)
        options = json.loads(saved["of"])
    except Exception as error:  # torch raises many types for a damaged file
        raise _unreadable(path, error) from error
    _check_same(path, options, record)
    return saved


def _train(run: _Run, tokens: Tensor, lesson: Lesson, saved: dict[str, Any] | None) -> None:
    """Train the head and write it to `run.out`. `saved`: training state to continue from; None: start from step 0."""
    import torch

    from sidestream.models.catalog import resolve
    from sidestream.models.distil import Distillation, load_teacher
    from sidestream.models.mtp import MtpHead, write_head

    run.progress.update("reading the weights of the teacher")
    teacher = load_teacher(resolve(run.record["model"]), device=torch.device(run.kind))
    torch.manual_seed(lesson.seed)
    head = MtpHead(teacher, feeds_normed=False).float()
    training = Distillation(teacher, head, tokens, lesson)
    state_file, loss = run.out.with_suffix(".training"), 0.0
    if saved is not None:
        training.restore(saved)
        loss = saved["loss"]
        run.console.print(f"resuming after step {training.done} of {lesson.steps}", highlight=False)

    def report(note: str) -> None:
        done = f"step {training.done} of {lesson.steps}, {note}"
        run.progress.update("teaching", training.done, lesson.steps, note=done)

    def save() -> None:
        with _replaced(state_file) as partial:
            torch.save({**training.state(), "loss": loss, "of": json.dumps(run.record)}, partial)

    report("beginning")
    with _interrupts(lambda: report("interrupted, finishing this step")) as interrupted:
        while training.done < lesson.steps and not interrupted.is_set():
            loss = training.step()
            report(f"{loss:.3f} nats a token")
            if training.done % _SAVE_EVERY == 0:
                save()
        if interrupted.is_set():
            save()
            run.console.print(
                f"interrupted after step {training.done} of {lesson.steps}: the same command resumes from there",
                highlight=False,
            )
            raise KeyboardInterrupt
        record = {name: json.dumps(value) for name, value in run.record.items()} | {
            "weights": run.record["weights"],
            "loss": f"{loss:.4f}",
            "tokens": str(tokens.numel()),
            "trained_on": run.kind,
        }
        write_head(head.to(torch.bfloat16), run.out, record=record)
        state_file.unlink(missing_ok=True)


@contextlib.contextmanager
def _interrupts(on_first: Callable[[], object]) -> Iterator[threading.Event]:
    """Context manager: yields an event that the first Ctrl-C sets. So the current training step can end, because a run
    can resume only between steps. A second Ctrl-C raises KeyboardInterrupt.
    """
    interrupted, before = threading.Event(), signal.getsignal(signal.SIGINT)

    def note(*_: object) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, before)
        on_first()

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
