"""The tree of commands. Neither this module nor its imports import torch: `sidestream --help` must be fast."""

from __future__ import annotations

from typing import Annotated

import typer

from sidestream.cli.bench import app as bench_app
from sidestream.cli.bench.check_trace import PASSED_ON, check_trace
from sidestream.cli.bench.torture import torture
from sidestream.cli.chat import chat
from sidestream.cli.declare import Command, flag
from sidestream.cli.demo import demo
from sidestream.cli.doctor import doctor
from sidestream.cli.errors import Commands
from sidestream.cli.generate import generate
from sidestream.cli.models import app as models_app
from sidestream.cli.serve import serve
from sidestream.cli.train import train_mtp

app = typer.Typer(
    cls=Commands,
    help="Run language models whose KV cache is kept on the device, in host memory and on disk.",
    epilog="Start with: sidestream doctor, then sidestream chat",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from sidestream import __version__

        typer.echo(f"sidestream {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    debug: Annotated[bool, flag("--debug", envvar="SIDESTREAM_DEBUG", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, flag("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Declare the global options. `Commands` reads `debug`, and `_print_version` handles `version`."""


app.command(cls=Command)(serve)
app.command(cls=Command)(chat)
app.command(cls=Command)(generate)
app.add_typer(models_app, name="models")
app.command(cls=Command)(doctor)

app.add_typer(bench_app, name="bench")
app.command(cls=Command)(demo)
app.command(cls=Command)(torture)
app.command("check-trace", cls=Command, context_settings=PASSED_ON)(check_trace)
app.command("train-mtp", cls=Command)(train_mtp)
