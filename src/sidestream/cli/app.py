"""The tree of commands. Neither this module nor its imports import torch: `sidestream --help` must be fast."""

from __future__ import annotations

from typing import Annotated

import typer

from sidestream.cli.batch import batch
from sidestream.cli.cache import app as cache_app
from sidestream.cli.chat import chat
from sidestream.cli.check_trace import PASSED_ON, check_trace
from sidestream.cli.declare import Command, flag, named
from sidestream.cli.demo import demo
from sidestream.cli.doctor import doctor
from sidestream.cli.errors import Commands
from sidestream.cli.explain import explain
from sidestream.cli.generate import generate
from sidestream.cli.models import app as models_app
from sidestream.cli.options import Debug
from sidestream.cli.serve import serve
from sidestream.cli.top import top
from sidestream.cli.verify import verify
from sidestream.errors import ConfigError

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
    debug: Debug = False,
    version: Annotated[
        bool, flag("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Declare the global options. `Commands` reads `debug`, and `_print_version` handles `version`."""


app.command(cls=Command)(serve)
app.command(cls=Command)(named(top))
app.command(cls=Command)(chat)
app.command(cls=Command)(generate)
app.command(cls=Command)(batch)
app.add_typer(models_app, name="models")
app.add_typer(cache_app, name="cache")
app.command(cls=Command)(named(doctor))
app.command(cls=Command)(named(demo))
app.command(cls=Command)(named(verify))
app.command(cls=Command)(named(explain))
app.command("check-trace", cls=Command, context_settings=PASSED_ON)(named(check_trace))

_MOVED = {
    "bench": "`python -m bench` in a checkout of the repository",
    "torture": "`python -m proof torture` in a checkout of the repository",
    "train-mtp": "`sidestream models train-mtp`",
}


def _moved(context: typer.Context) -> None:
    raise ConfigError(f"`sidestream {context.info_name}` has moved: run {_MOVED[context.info_name or '']}")


for _name in _MOVED:
    app.command(_name, hidden=True, context_settings=PASSED_ON)(_moved)
