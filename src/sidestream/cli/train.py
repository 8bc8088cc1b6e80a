"""`sidestream train-mtp`: a head for a model, taught by the model itself on what it says and on texts."""

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

from sidestream.cli.declare import number, option, whole
from sidestream.cli.loading import prepare_model
from sidestream.cli.options import DEMO_MODEL, Model
from sidestream.cli.progress import Steps
from sidestream.config import unknown_name
from sidestream.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

# What a prompt may take of a sequence, requests that run at once while the model answers, and temperatures: the first
# two answers to a task are its likeliest and a drawn one, those after that are drawn.
_PROMPT_SHARE = 0.5
_AT_ONCE = {"cpu": 8, "cuda": 256}
_DRAWN_AT = (0.5, 1.0, 0.7)
_SAVE_EVERY = 200
# What answers depend on; a head depends on all that its record says.
_OF_ANSWERS = ("model", "weights", "length", "answers", "seed", "texts")


def train_mtp(
    model: Model = DEMO_MODEL,
    out: Annotated[
        Path,
        option("--out", "-o", metavar="FILE", help="Where the head goes; beside it, what a later run goes on from."),
    ] = Path("head.safetensors"),
    steps: Annotated[int, option("--steps", metavar="N", help="Batches to learn from.", parse=whole)] = 3000,
    batch: Annotated[int, option("--batch", metavar="N", help="Sequences in a batch.", parse=whole)] = 16,
    length: Annotated[int, option("--length", metavar="N", help="Tokens of a sequence.", parse=whole)] = 512,
    drafts: Annotated[
        int, option("--drafts", metavar="N", help="Tokens that it learns to draft one after another.", parse=whole)
    ] = 4,
    answers: Annotated[
        int, option("--answers", metavar="N", help="Tokens that the model writes itself, to learn from.", parse=whole)
    ] = 3_000_000,
    text: Annotated[
        list[Path] | None,
        option("--text", metavar="FILE", help="A text to learn from too, in UTF-8; may be given several times."),
    ] = None,
    learning_rate: Annotated[
        float, option("--learning-rate", metavar="R", help="At its highest.", parse=number)
    ] = 1e-3,
    seed: Annotated[
        int, option("--seed", metavar="N", help="Same seed, same head, on the same machine.", parse=whole)
    ] = 0,
    device: Annotated[str, option("--device", metavar="DEVICE", help="cpu, cuda, or auto.")] = "auto",
) -> None:
    """Train a head that drafts for a model (speculative decoding), by the model's own answers to tasks and by texts.

    The demo model takes some minutes on a GPU; on a CPU choose fewer steps and answers. Beside the head lie what it
    learns from (.tokens, kept) and, until it is ready, what it has learnt (.training): a run that ended early goes on
    from there when it is started again with the same options, and with others it is refused.
    """
    from sidestream.device.choice import torch_device
    from sidestream.models.catalog import resolve
    from sidestream.models.distil import Lesson
    from sidestream.models.loader import weights_digest

    lesson = Lesson(steps, batch, drafts, learning_rate=learning_rate, seed=seed)
    if length < 2 * drafts:
        raise ConfigError(f"--length is {length}: a sequence needs {2 * drafts} tokens for {drafts} drafts; give more")
    if answers < 0:
        raise ConfigError(f"--answers is {answers}: it must be 0 or more")
    texts = [_read(path) for path in text or ()]
    _check_out(out)
    if device not in ("auto", *_AT_ONCE):
        raise ConfigError(unknown_name("device", device, ("auto", *_AT_ONCE)))
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
    written, taught = (
        _kept_answers(out.with_suffix(".tokens"), record),
        _kept_training(out.with_suffix(".training"), record),
    )
    console = Console(stderr=True)
    with Steps(console, keep=True) as progress:
        tokens = _tokens(written, out, record, texts, kind, progress, console)
        _teach(taught, out, record, tokens, lesson, kind, progress, console)
    console.print(f"{out} is ready: sidestream serve {model} --speculative mtp --draft-head {out}", highlight=False)


def _check_out(out: Path) -> None:
    if out.suffix != ".safetensors":
        raise ConfigError(f"--out is {out}: give a file with the ending .safetensors")
    directory = out.absolute().parent
    if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"--out is {out}: {directory} is no directory that you may write to; give another path")
    if out.exists():
        raise ConfigError(f"--out {out} is there already: give another name, or delete it")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--text {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text {path} is no UTF-8: {error}") from error


# ---------------------------------------------------------------------- what an earlier run left


def _check_same(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ConfigError, with both values, if what `path` holds was made with other options."""
    for name, value in now.items():
        if before.get(name) != value:
            raise ConfigError(
                f"{path} was made with {name} {before.get(name)}, now it is {value}: give the same to go on, another --out, or delete it"
            )


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{path} cannot be read ({error or type(error).__name__}): delete it, what it held is then made anew"
    )


@contextlib.contextmanager
def _whole_or_not(path: Path) -> Iterator[Path]:
    """What to write in place of `path`, which has it at the end of the block: whoever is killed meanwhile leaves what
    was there.
    """
    partial = path.with_name(path.name + ".partial")
    yield partial
    partial.replace(path)


# ---------------------------------------------------------------------- what is learnt from


@dataclass(slots=True)
class _Answers:
    """What is learnt from, as far as it is there.

    stream   the texts, and the model's answers to tasks with these, one after another
    asked    tasks that it holds answers to
    done     tokens of these answers
    """

    stream: list[int]
    asked: int = 0
    done: int = 0


def _kept_answers(path: Path, record: Mapping[str, Any]) -> _Answers | None:
    """What an earlier run wrote. Raises ConfigError if that was with other options."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            described = json.loads(metadata["of"])
            written = _Answers(file.get_tensor("stream").tolist(), int(metadata["asked"]), int(metadata["done"]))
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise _unreadable(path, error) from error
    _check_same(path, described, {name: record[name] for name in _OF_ANSWERS})
    return written


def _tokens(
    written: _Answers | None,
    out: Path,
    record: Mapping[str, Any],
    texts: Sequence[str],
    kind: str,
    progress: Steps,
    console: Console,
) -> Tensor:
    """Sequences of one length, int32 `[N, length]`: kept beside the head as they are made, because the model's answers
    take a while.
    """
    import torch
    from safetensors.torch import save_file

    def keep(written: _Answers) -> None:
        facts = {
            "of": json.dumps({name: record[name] for name in _OF_ANSWERS}),
            "asked": str(written.asked),
            "done": str(written.done),
        }
        with _whole_or_not(out.with_suffix(".tokens")) as partial:
            save_file({"stream": torch.tensor(written.stream, dtype=torch.int32)}, partial, facts)

    if written is None or written.done < record["answers"]:
        written = _answered(written, texts, record, kind, progress, console, keep)
    length = record["length"]
    count = len(written.stream) // length
    return torch.tensor(written.stream[: count * length], dtype=torch.int32).view(count, length)


def _answered(
    written: _Answers | None,
    texts: Sequence[str],
    record: Mapping[str, Any],
    kind: str,
    progress: Steps,
    console: Console,
    keep: Callable[[_Answers], None],
) -> _Answers:
    """The texts and the model's answers to tasks, behind what is there of them; to `keep` after each batch of tasks."""
    from sidestream.config import SamplingParams
    from sidestream.llm import LLM
    from sidestream.text import sample_tasks, sample_text

    length, wanted, tasks = record["length"], record["answers"], sample_tasks()
    memory = "4GiB" if kind == "cuda" else "512MiB"
    with LLM(
        record["model"],
        device=kind,
        max_running=_AT_ONCE[kind],
        kv_memory=memory,
        max_model_len=length,
        generation_config="none",  # the model's own distribution, at the temperatures chosen here
        tell=progress.tell,
    ) as llm:
        if written is None:
            written = _Answers([token for one in (sample_text(), *texts) for token in llm.tokenizer.encode(one)])
            keep(written)
        else:
            console.print(f"goes on behind the {written.done:,} tokens that the model has written", highlight=False)
        end = llm.tokenizer.eos_ids[:1]
        while written.done < wanted:
            progress.tell("the model answers tasks, in tokens", min(written.done, wanted), wanted)
            numbers = range(written.asked, written.asked + 4 * _AT_ONCE[kind])
            prompts = [
                llm.tokenizer.chat([{"role": "user", "content": tasks[number % len(tasks)]}])[
                    : int(length * _PROMPT_SHARE)
                ]
                for number in numbers
            ]
            params = [
                SamplingParams(
                    temperature=_temperature(*divmod(number, len(tasks))),
                    max_tokens=length // 2,
                    seed=record["seed"] + number,
                )
                for number in numbers
            ]
            try:
                answers = llm.generate(prompts, params)
            except KeyboardInterrupt:
                console.print(
                    f"interrupted: {written.done:,} tokens are kept, the same command goes on from there",
                    highlight=False,
                )
                raise
            for prompt, answer in zip(prompts, answers, strict=True):
                written.stream += (*prompt, *answer.token_ids, *end)
                written.done += len(answer.token_ids)
            written.asked = numbers.stop
            keep(written)
    return written


def _temperature(time: int, task: int) -> float:
    """At which a task is answered the first, second, … time: once by the likeliest tokens, which would be the same
    again.
    """
    if time < 2:
        return 0.0 if (time + task) % 2 == 0 else 1.0
    return _DRAWN_AT[time % len(_DRAWN_AT)]


# ---------------------------------------------------------------------- learning


def _kept_training(path: Path, record: Mapping[str, Any]) -> dict[str, Any] | None:
    """What an earlier run learnt. Raises ConfigError if that was with other options."""
    import torch

    if not path.exists():
        return None
    try:
        taught: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        described = json.loads(taught["of"])
    except Exception as error:  # torch raises anything of a file that is not whole
        raise _unreadable(path, error) from error
    _check_same(path, described, record)
    return taught


def _teach(
    taught: dict[str, Any] | None,
    out: Path,
    record: Mapping[str, Any],
    tokens: Tensor,
    lesson: Any,
    kind: str,
    progress: Steps,
    console: Console,
) -> None:
    import torch

    from sidestream.models.catalog import resolve
    from sidestream.models.distil import Distillation, load_teacher
    from sidestream.models.mtp import MtpHead, write_head

    progress.tell("reading the weights of the teacher")
    teacher = load_teacher(resolve(record["model"]), device=torch.device(kind))
    torch.manual_seed(lesson.seed)
    head = MtpHead(teacher, feeds_normed=False).float()
    school = Distillation(teacher, head, tokens, lesson)
    saved, loss = out.with_suffix(".training"), 0.0
    if taught is not None:
        school.restore(taught)
        loss = taught["loss"]
        console.print(f"goes on after step {school.done} of {lesson.steps}", highlight=False)

    def told(what: str) -> None:
        progress.tell("teaching", school.done, lesson.steps, note=f"step {school.done} of {lesson.steps}, {what}")

    told("beginning")

    def save() -> None:
        with _whole_or_not(saved) as partial:
            torch.save({**school.state(), "loss": loss, "of": json.dumps(record)}, partial)

    with _interrupts(lambda: told("interrupted, this step ends first")) as interrupted:
        while school.done < lesson.steps and not interrupted.is_set():
            loss = school.step()
            told(f"{loss:.3f} nats a token")
            if school.done % _SAVE_EVERY == 0:
                save()
        if interrupted.is_set():
            save()
            console.print(
                f"interrupted after step {school.done} of {lesson.steps}: the same command goes on from there",
                highlight=False,
            )
            raise KeyboardInterrupt
        facts = {name: json.dumps(value) for name, value in record.items()} | {"weights": record["weights"]}
        write_head(
            head.to(torch.bfloat16),
            out,
            record={**facts, "loss": f"{loss:.4f}", "tokens": str(tokens.numel()), "trained_on": kind},
        )
        saved.unlink(missing_ok=True)


@contextlib.contextmanager
def _interrupts(tell: Callable[[], object]) -> Iterator[threading.Event]:
    """Set by Ctrl-C, which raises nothing at first: half a step could not be gone on from. A second one ends the block
    at once.
    """
    interrupted, before = threading.Event(), signal.getsignal(signal.SIGINT)

    def note(*_: object) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, before)
        tell()

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
