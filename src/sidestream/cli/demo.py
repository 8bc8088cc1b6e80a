"""`sidestream demo`: a conversation whose KV cache outlives the device pool and the process, with the same answer each time."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from sidestream.cli.visits import Stay, Visit, visit, visit_in_fresh_process, warm_up

DEMO_MODEL = "smollm2-135m-instruct"
_QUESTION = "Why does the narrator go to sea?"
_MAX_TOKENS = 48
# What others ask meanwhile: enough different text to push the conversation out of the pool.
_OTHERS = ("Write a story about a lighthouse.", "Explain how bread is made.", "Describe a city at night.")


def demo(
    model: Annotated[str, typer.Argument(help="Directory, hub id, or a name of `sidestream models`.")] = DEMO_MODEL,
    out: Annotated[Path, typer.Option(help="Directory for the timelines and the stored KV; emptied first.")] = Path("runs/demo"),
) -> None:
    """Ask about a long text, leave, come back from host memory, restart, come back from disk: equal tokens, a fraction of the wait."""
    from sidestream.cli.progress import ProgressBars
    from sidestream.models.catalog import resolve

    console = Console()
    with ProgressBars() as bars:
        path = resolve(model, progress=bars)
    disk = out / "kv"
    if disk.exists():
        shutil.rmtree(disk)
    out.mkdir(parents=True, exist_ok=True)
    timelines = out / "timeline-first.json", out / "timeline-second.json"
    options = {"kv_memory": "96MiB", "offload": {"host": "1GiB", "disk": str(disk), "disk_capacity": "2GiB"}}
    with console.status("first process: asking about the text, cold"):
        visits, prompt = _first_process(Stay(path, options, str(timelines[0])))
    with console.status("second process: a fresh one, the same disk"):
        visits += visit_in_fresh_process(Stay(path, options, str(timelines[1])), [prompt], max_tokens=_MAX_TOKENS)
    _show(visits, console)
    console.print(f"\n[dim]{_QUESTION}[/]\n{visits[0].text.strip()} …\n")
    console.print(f"What each stream did when: [bold]{timelines[0]}[/] and [bold]{timelines[1]}[/] (open them at ui.perfetto.dev)")
    console.print(f"Serve it yourself: [bold]sidestream serve --offload-host 1GiB --offload-disk {disk}[/]")
    if len({seen.tokens for seen in visits}) > 1:
        console.print("[red]the answers differ: this is a bug[/]")
        raise typer.Exit(1)
    if not (visits[1].host and visits[2].disk and not visits[1].device):
        console.print("[red]the KV did not come from where it should have: this is a bug[/]")
        raise typer.Exit(1)


def _first_process(stay: Stay) -> tuple[list[Visit], list[int]]:
    """Ask cold, let others fill the pool, ask again."""
    from sidestream.text import sample_text

    with stay.open() as llm:
        warm_up(llm)
        prompt = llm.tokenizer.chat([{"role": "user", "content": f"{sample_text()}\n\n{_QUESTION}"}])
        cold = visit(llm, prompt, max_tokens=_MAX_TOKENS)
        llm.flush()
        words = sample_text().split()
        for number, other in enumerate(_OTHERS):
            part = " ".join(reversed(words[number * 450 : (number + 1) * 450 + 450]))
            visit(llm, llm.tokenizer.chat([{"role": "user", "content": f"{other} {part}"}]), max_tokens=4)
        return [cold, visit(llm, prompt, max_tokens=_MAX_TOKENS)], prompt


def _show(visits: list[Visit], console: Console) -> None:
    cold = visits[0]
    table = Table(title=f"the same question about a text of {cold.prompt_tokens} tokens")
    for heading in ("", "prefix came from", "tokens reused", "TTFT", "speed-up", "identical"):
        table.add_column(heading, justify="right" if heading in ("tokens reused", "TTFT", "speed-up") else "left")
    names = ("first visit", "came back after others filled the pool", "came back in a new process")
    for name, seen in zip(names, visits, strict=True):
        identical = "" if seen is cold else "yes" if seen.tokens == cold.tokens else "[red]no[/]"
        ttft, speed_up = f"{seen.ttft_s * 1e3:,.0f} ms", f"{cold.ttft_s / seen.ttft_s:.0f} x"
        table.add_row(name, seen.source, str(seen.reused), ttft, "" if seen is cold else speed_up, identical)
    console.print(table)
