"""`sidestream demo`: asks the same question three times: without cached KV (cold), with KV from host memory, and with
KV from disk after a restart.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from sidestream.cli.declare import Option
from sidestream.cli.options import DEMO_MODEL
from sidestream.cli.progress import Steps
from sidestream.cli.prompt_runs import ChildEngine, PromptRun

_QUESTION = "Why does the narrator go to sea?"
_MAX_TOKENS = 48
# Prompts of other conversations, with enough text to evict the first conversation from the device pool.
_OTHERS = (
    "Write a story about a lighthouse.",
    "Explain how bread is made.",
    "Describe a city at night.",
    "Plan a garden.",
)


def demo(
    model: Annotated[str, typer.Argument(help="Directory, hub id, or a name of `sidestream models`.")] = DEMO_MODEL,
    out: Annotated[Path, Option("Directory for timelines and stored KV; earlier KV in it is deleted.", "DIR")] = Path(
        "runs/demo"
    ),
) -> None:
    """Ask the same question three times: without cached KV, with KV from host memory, and from disk after a restart.

    The three answers are equal. With cached KV, the first token comes sooner.
    """
    from sidestream.models import kv_token_bytes
    from sidestream.models.catalog import resolve

    console = Console()
    with Steps(keep=True) as steps:
        path = resolve(model, progress=steps)
    disk = out / "kv"
    if disk.exists():
        shutil.rmtree(disk)
    out.mkdir(parents=True, exist_ok=True)
    timelines = out / "timeline-first.json", out / "timeline-second.json"
    prompt, others = _prompts(path)
    # The pool holds little more than one conversation, so the other conversations evict it.
    kv_memory = len(prompt) * 5 // 4 * kv_token_bytes(path)
    options = {"kv_memory": kv_memory, "offload": {"host": "1GiB", "disk": str(disk), "disk_capacity": "2GiB"}}
    with Steps() as steps:
        runs = _run_visits(path, options, prompt, others, timelines, steps)
    _show(runs, console)
    console.print(f"\n[dim]{_QUESTION}[/]\n{runs[0].text.strip()} …\n")
    console.print(
        f"Timelines of all streams: [bold]{timelines[0]}[/] and [bold]{timelines[1]}[/] (open them at ui.perfetto.dev)"
    )
    console.print(f"Serve it yourself: [bold]{_program()} serve --offload-host 1GiB --offload-disk {disk}[/]")
    if len({run.tokens for run in runs}) > 1:
        console.print("[red]the answers differ: this is a bug[/]")
        raise typer.Exit(1)
    # The first blocks may still be on the device, because every prompt begins with the text of the chat template.
    if runs[1].host < 0.9 * runs[1].reused or runs[2].disk < 0.9 * runs[2].reused or not runs[2].reused:
        console.print("[red]the KV came from the wrong tier: this is a bug[/]")
        raise typer.Exit(1)


def _run_visits(
    path: str,
    options: dict[str, Any],
    prompt: list[int],
    others: list[list[int]],
    timelines: tuple[Path, Path],
    steps: Steps,
) -> list[PromptRun]:
    """Run the prompt three times: without cached KV, after `others` have filled the pool, and in a second process."""
    runs: list[PromptRun] = []

    def run(engine: ChildEngine, visit: str) -> None:
        steps.update(f"{visit}: asking about a text of {len(prompt)} tokens")
        runs.extend(engine.generate([prompt], max_tokens=_MAX_TOKENS).runs)

    steps.update("first process: loading the model")
    with ChildEngine(path, options, timeline=str(timelines[0])) as engine:
        run(engine, "first visit, cold")
        for number, other in enumerate(others):
            steps.update("other prompts fill the pool", number, len(others))
            engine.generate([other], max_tokens=4)
        run(engine, "second visit, from host memory")
        steps.update("first process: storing KV and closing")
    steps.update("second process: loading the model")
    with ChildEngine(path, options, timeline=str(timelines[1])) as engine:
        run(engine, "third visit, from disk")
        steps.update("second process: closing")
    return runs


def _prompts(path: str) -> tuple[list[int], list[list[int]]]:
    """Token ids of the question about the text, and of the other conversations."""
    from sidestream.text import sample_text
    from sidestream.tokenizer import Tokenizer

    tokenizer, text = Tokenizer.load(path), sample_text()
    question = tokenizer.chat([{"role": "user", "content": f"{text}\n\n{_QUESTION}"}])
    words = text.split()
    parts = [" ".join(reversed(words[number * 450 : number * 450 + 900])) for number in range(len(_OTHERS))]
    return question, [
        tokenizer.chat([{"role": "user", "content": f"{other} {part}"}])
        for other, part in zip(_OTHERS, parts, strict=True)
    ]


def _show(runs: list[PromptRun], console: Console) -> None:
    cold = runs[0]
    table = Table(title=f"the same question about a text of {cold.prompt_tokens} tokens")
    for heading in ("", "prefix from", "reused tokens", "TTFT", "speed-up", "identical"):
        table.add_column(heading, justify="right" if heading in ("reused tokens", "TTFT", "speed-up") else "left")
    names = ("first visit", "after others filled the pool", "in a new process")
    for name, run in zip(names, runs, strict=True):
        identical = "" if run is cold else "yes" if run.tokens == cold.tokens else "[red]no[/]"
        ttft, speed_up = f"{run.ttft_s * 1e3:,.0f} ms", f"{cold.ttft_s / run.ttft_s:.0f} x"
        table.add_row(name, run.source, str(run.reused), ttft, "" if run is cold else speed_up, identical)
    console.print(table)


def _program() -> str:
    """The command that starts this program, for the user to copy: its name if the shell finds the program by name, else
    the path that the user typed.
    """
    typed = sys.argv[0]
    if Path(typed).name != "sidestream":
        return "python -m sidestream"
    return "sidestream" if shutil.which("sidestream") == shutil.which(typed) else typed
