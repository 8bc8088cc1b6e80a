"""`sidestream train-mtp`: a head for a model, taught by the model itself on what it says and on texts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sidestream.cli.loading import prepare_model
from sidestream.cli.options import DEMO_MODEL, Model
from sidestream.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

# What a prompt may take of a sequence, requests that run at once while the model answers, and temperatures: the first two answers to a task are
# its likeliest and a drawn one, those after that are drawn.
_PROMPT_SHARE = 0.5
_AT_ONCE = {"cpu": 8, "cuda": 256}
_DRAWN_AT = (0.5, 1.0, 0.7)
_SAVE_EVERY = 200


def train_mtp(
    model: Model = DEMO_MODEL,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="Where the head goes; beside it, what a later run goes on from.")
    ] = Path("head.safetensors"),
    steps: Annotated[int, typer.Option(metavar="N", help="Batches to learn from.")] = 3000,
    batch: Annotated[int, typer.Option(metavar="N", help="Sequences in a batch.")] = 16,
    length: Annotated[int, typer.Option(metavar="N", help="Tokens of a sequence.")] = 512,
    drafts: Annotated[int, typer.Option(metavar="N", help="Tokens that it learns to draft one after another.")] = 4,
    answers: Annotated[int, typer.Option(metavar="N", help="Tokens that the model writes itself, to learn from.")] = 3_000_000,
    text: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="A text to learn from too, in UTF-8; may be given several times.")
    ] = None,
    learning_rate: Annotated[float, typer.Option(metavar="R", help="At its highest.")] = 1e-3,
    seed: Annotated[int, typer.Option(metavar="N", help="Same seed, same head, on the same machine.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
) -> None:
    """Train a head that drafts for a model (speculative decoding), by the model's own answers to tasks and by texts.

    The demo model takes some minutes on a GPU; on a CPU choose fewer steps and answers. Beside the head lie what it learns from (.tokens, kept)
    and, until it is ready, what it has learnt (.training): an interrupted run goes on from there when it is started again with the same options.
    """
    from sidestream.device.choice import torch_device
    from sidestream.models.distil import Lesson

    lesson = Lesson(steps, batch, drafts, learning_rate=learning_rate, seed=seed)
    if length < 2 * drafts:
        raise ConfigError(f"--length is {length}: a sequence needs {2 * drafts} tokens for {drafts} drafts; give more")
    if answers < 0:
        raise ConfigError(f"--answers is {answers}: it must be 0 or more")
    texts = [_read(path) for path in text or ()]
    if out.suffix != ".safetensors" or not out.resolve().parent.is_dir():
        raise ConfigError(f"--out is {out}: give a file in a directory that exists, with the ending .safetensors")
    kind = torch_device(device).type
    prepare_model(model)
    record = {
        "model": model,
        "steps": steps,
        "batch": batch,
        "length": length,
        "drafts": drafts,
        "answers": answers,
        "learning_rate": learning_rate,
        "seed": seed,
        "texts": [hashlib.sha256(one.encode()).hexdigest()[:16] for one in texts],
    }
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bars:
        tokens = _tokens(model, out, record, texts, kind, bars)
        _teach(model, out, record, tokens, lesson, kind, bars, console)
    console.print(f"{out} is ready: sidestream serve {model} --speculative mtp --draft-head {out}", highlight=False)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--text {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text {path} is no UTF-8: {error}") from error


# ---------------------------------------------------------------------- what is learnt from


def _tokens(model: str, out: Path, record: dict[str, Any], texts: Sequence[str], kind: str, bars: Progress) -> Tensor:
    """Sequences of one length, int32 `[N, length]`: kept beside the head, because the model's answers take a while."""
    import torch
    from safetensors.torch import load_file, save_file

    path = out.with_suffix(".tokens")
    described = json.dumps({name: record[name] for name in ("model", "length", "answers", "seed", "texts")})
    if path.exists():
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("of") == described:
                return load_file(path)["tokens"]
    stream: list[int] = []
    for one in _written(model, texts, record, kind, bars):
        stream.extend(one)
    length = record["length"]
    count = len(stream) // length
    tokens = torch.tensor(stream[: count * length], dtype=torch.int32).view(count, length)
    partial = path.with_name(path.name + ".partial")
    save_file({"tokens": tokens}, partial, {"of": described})
    partial.replace(path)
    return tokens


def _written(model: str, texts: Sequence[str], record: dict[str, Any], kind: str, bars: Progress) -> Iterator[Sequence[int]]:
    """The texts, and the model's answers to tasks, one after another."""
    from sidestream.config import SamplingParams
    from sidestream.llm import LLM
    from sidestream.text import sample_tasks, sample_text

    length, wanted = record["length"], record["answers"]
    with LLM(model, device=kind, max_running=_AT_ONCE[kind], kv_memory="4GiB" if kind == "cuda" else "512MiB", max_model_len=length) as llm:
        for one in (sample_text(), *texts):
            yield llm.tokenizer.encode(one)
        end = llm.tokenizer.eos_ids[:1]
        tasks = sample_tasks()
        bar = bars.add_task("the model answers tasks", total=wanted)
        done = number = 0
        while done < wanted:
            some = [tasks[(number + at) % len(tasks)] for at in range(4 * _AT_ONCE[kind])]
            prompts = [llm.tokenizer.chat([{"role": "user", "content": task}])[: int(length * _PROMPT_SHARE)] for task in some]
            params = [
                SamplingParams(
                    temperature=_temperature(*divmod(number + at, len(tasks))), max_tokens=length // 2, seed=record["seed"] + number + at
                )
                for at in range(len(some))
            ]
            number += len(some)
            for prompt, answer in zip(prompts, llm.generate(prompts, params), strict=True):
                said = (*prompt, *answer.token_ids, *end)
                done += len(answer.token_ids)
                yield said
            bars.update(bar, completed=min(done, wanted))
            if not bars.console.is_terminal:
                bars.console.print(f"the model has written {done:,} of {wanted:,} tokens", highlight=False)


def _temperature(time: int, task: int) -> float:
    """At which a task is answered the first, second, … time: once by the likeliest tokens, which would be the same again."""
    if time < 2:
        return 0.0 if (time + task) % 2 == 0 else 1.0
    return _DRAWN_AT[time % len(_DRAWN_AT)]


# ---------------------------------------------------------------------- learning


def _teach(model: str, out: Path, record: dict[str, Any], tokens: Tensor, lesson: Any, kind: str, bars: Progress, console: Console) -> None:
    import torch

    from sidestream.models.catalog import resolve
    from sidestream.models.distil import Distillation, load_teacher
    from sidestream.models.mtp import MtpHead, write_head

    teacher = load_teacher(str(resolve(model)), device=torch.device(kind))
    torch.manual_seed(lesson.seed)
    head = MtpHead(teacher, feeds_normed=False).float()
    school = Distillation(teacher, head, tokens, lesson)
    saved, described = out.with_suffix(".training"), json.dumps(record)
    if saved.exists():
        state = torch.load(saved, map_location=kind, weights_only=True)
        if state.pop("of") == described:
            school.restore(state)
    bar = bars.add_task("teaching", total=lesson.steps, completed=school.done)

    def save() -> None:
        partial = saved.with_name(saved.name + ".partial")
        torch.save({**school.state(), "of": described}, partial)
        partial.replace(saved)

    loss = 0.0
    try:
        while school.done < lesson.steps:
            loss = school.step()
            bars.update(bar, completed=school.done, description=f"teaching, {loss:.3f} nats a token")
            if school.done % _SAVE_EVERY == 0:
                save()
                if not console.is_terminal:  # there is no bar
                    console.print(f"step {school.done} of {lesson.steps}: {loss:.3f} nats a token", highlight=False)
    except KeyboardInterrupt:
        save()
        console.print(f"interrupted after step {school.done} of {lesson.steps}: the same command goes on from there", highlight=False)
        raise
    facts = {name: json.dumps(value) for name, value in record.items()}
    write_head(head.to(torch.bfloat16), out, record={**facts, "loss": f"{loss:.4f}", "tokens": str(tokens.numel()), "trained_on": kind})
    saved.unlink(missing_ok=True)
