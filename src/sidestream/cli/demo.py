"""`sidestream demo`: a conversation whose KV cache outlives the device pool and the process, with the same answer each
time.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from sidestream.cli.declare import option
from sidestream.cli.options import DEMO_MODEL
from sidestream.cli.progress import Steps
from sidestream.cli.visits import Engine, Visit

_QUESTION = "Why does the narrator go to sea?"
_MAX_TOKENS = 48
# What others ask meanwhile: enough different text to push the conversation out of the pool.
_OTHERS = (
    "Write a story about a lighthouse.",
    "Explain how bread is made.",
    "Describe a city at night.",
    "Plan a garden.",
)


def demo(
    model: Annotated[str, typer.Argument(help="Directory, hub id, or a name of `sidestream models`.")] = DEMO_MODEL,
    out: Annotated[
        Path, option("--out", metavar="DIR", help="Directory for the timelines and the stored KV; emptied first.")
    ] = Path("runs/demo"),
) -> None:
    """Ask about a long text, leave, come back from host memory, restart, come back from disk: equal tokens, a fraction
    of the wait.
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
    # The pool holds the conversation and a bit more, so that it is gone when the others have been answered.
    kv_memory = len(prompt) * 5 // 4 * kv_token_bytes(path)
    options = {"kv_memory": kv_memory, "offload": {"host": "1GiB", "disk": str(disk), "disk_capacity": "2GiB"}}
    with Steps() as steps:
        visits = _visits(path, options, prompt, others, timelines, steps)
    _show(visits, console)
    console.print(f"\n[dim]{_QUESTION}[/]\n{visits[0].text.strip()} …\n")
    console.print(
        f"What each stream did when: [bold]{timelines[0]}[/] and [bold]{timelines[1]}[/] (open them at ui.perfetto.dev)"
    )
    console.print(f"Serve it yourself: [bold]{_program()} serve --offload-host 1GiB --offload-disk {disk}[/]")
    if len({seen.tokens for seen in visits}) > 1:
        console.print("[red]the answers differ: this is a bug[/]")
        raise typer.Exit(1)
    # The first blocks may be on the device: every chat begins with the template's own words.
    if visits[1].host < 0.9 * visits[1].reused or visits[2].disk < 0.9 * visits[2].reused or not visits[2].reused:
        console.print("[red]the KV did not come from where it should have: this is a bug[/]")
        raise typer.Exit(1)


def _visits(
    path: str,
    options: dict[str, Any],
    prompt: list[int],
    others: list[list[int]],
    timelines: tuple[Path, Path],
    steps: Steps,
) -> list[Visit]:
    """The same question three times: cold, after `others` have filled the pool, and in a second process."""
    visits: list[Visit] = []

    def ask(engine: Engine, visit: str) -> None:
        steps.tell(f"{visit}: asking about a text of {len(prompt)} tokens")
        visits.extend(engine.ask([prompt], max_tokens=_MAX_TOKENS).visits)

    steps.tell("first process: loading the model")
    with Engine(path, options, timeline=str(timelines[0])) as engine:
        ask(engine, "first visit, cold")
        for number, other in enumerate(others):
            steps.tell("others ask, and fill the pool", number, len(others))
            engine.ask([other], max_tokens=4)
        ask(engine, "second visit, from host memory")
        steps.tell("first process: storing and closing")
    steps.tell("second process: loading the model")
    with Engine(path, options, timeline=str(timelines[1])) as engine:
        ask(engine, "third visit, from disk")
        steps.tell("second process: closing")
    return visits


def _prompts(path: str) -> tuple[list[int], list[list[int]]]:
    """The question about the text, and what others ask meanwhile: more text than the pool holds beside it."""
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


def _show(visits: list[Visit], console: Console) -> None:
    cold = visits[0]
    table = Table(title=f"the same question about a text of {cold.prompt_tokens} tokens")
    for heading in ("", "prefix from", "reused tokens", "TTFT", "speed-up", "identical"):
        table.add_column(heading, justify="right" if heading in ("reused tokens", "TTFT", "speed-up") else "left")
    names = ("first visit", "after others filled the pool", "in a new process")
    for name, seen in zip(names, visits, strict=True):
        identical = "" if seen is cold else "yes" if seen.tokens == cold.tokens else "[red]no[/]"
        ttft, speed_up = f"{seen.ttft_s * 1e3:,.0f} ms", f"{cold.ttft_s / seen.ttft_s:.0f} x"
        table.add_row(name, seen.source, str(seen.reused), ttft, "" if seen is cold else speed_up, identical)
    console.print(table)


def _program() -> str:
    """What to type for this very program: its name where the shell finds it, else the path that was typed."""
    typed = sys.argv[0]
    if Path(typed).name != "sidestream":
        return "python -m sidestream"
    return "sidestream" if shutil.which("sidestream") == shutil.which(typed) else typed
