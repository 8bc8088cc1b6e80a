"""The bench commands: options in, one report out. The measuring is in the modules beside this one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console

from sidestream.cli.bench.report import Figure, publish
from sidestream.cli.options import DEMO_MODEL

Model = Annotated[str, typer.Argument(help="Directory, hub id, or a name of `sidestream models`.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command("prefix")(prefix)
    app.command("decode")(decode)
    app.command("overhead")(overhead)
    app.command("soak")(soak)


def prefix(
    model: Model = DEMO_MODEL,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the prompts.")] = 2000,
    rounds: Annotated[int, typer.Option(help="Prompts, each asked cold, from host memory and from disk.")] = 5,
    as_json: Json = False,
) -> None:
    """TTFT of a long prompt from host memory, and from disk in a fresh process, over cold."""
    from sidestream.cli.bench.prefix import measure

    _report("prefix", model, as_json, lambda tell: measure(model, prompt_tokens=prompt_tokens, rounds=rounds, tell=tell))


def decode(
    model: Model = DEMO_MODEL,
    output_tokens: Annotated[int, typer.Option(help="Tokens drawn for each request.")] = 96,
    rounds: Annotated[int, typer.Option(help="Repetitions, ours and generate in turn.")] = 5,
    dtype: Annotated[str, typer.Option(help="Data type of both.")] = "auto",
    as_json: Json = False,
) -> None:
    """Tokens a second, alone and with eight at once, over transformers' generate."""
    from sidestream.cli.bench.decode import measure

    _report("decode", model, as_json, lambda tell: measure(model, output_tokens=output_tokens, rounds=rounds, dtype=dtype, tell=tell))


def overhead(
    model: Model = DEMO_MODEL,
    rounds: Annotated[int, typer.Option(help="Repetitions, offload on and off in turn.")] = 9,
    as_json: Json = False,
) -> None:
    """Step time with offload idle and storing over offload off, and host waits for transfers."""
    from sidestream.cli.bench.overhead import measure

    _report("overhead", model, as_json, lambda tell: measure(model, rounds=rounds, tell=tell))


def soak(
    model: Model = DEMO_MODEL,
    requests: Annotated[int, typer.Option(help="Requests in all; memory is compared from number 200 on.")] = 2000,
    as_json: Json = False,
) -> None:
    """Memory growth of the process over many requests."""
    from sidestream.cli.bench.soak import measure

    _report("soak", model, as_json, lambda tell: measure(model, num_requests=requests, tell=tell))


def _report(name: str, model: str, as_json: bool, measure: Callable[[Callable[[str], None]], list[Figure]]) -> None:
    """Run one measurement under a status line on stderr; exit with 1 when a bound does not hold."""
    status = Console(stderr=True)
    with status.status(f"bench {name}") as line:
        figures = measure(lambda text: line.update(f"bench {name}: {text}"))
    if not publish(name, model, figures, as_json=as_json, console=Console()):
        raise typer.Exit(1)
