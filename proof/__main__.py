"""`python -m proof torture`, in a checkout of the repository."""

from __future__ import annotations

import typer

from proof.commands.torture import torture
from sidestream.cli.declare import Command
from sidestream.cli.errors import Commands
from sidestream.cli.options import Debug

app = typer.Typer(
    cls=Commands,
    help="Run the engine in many orders of execution; plant known faults and count the runs until each is found.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _global_options(debug: Debug = False) -> None:
    """Declare the global option, which `Commands` reads."""


app.command(cls=Command)(torture)

if __name__ == "__main__":
    app(prog_name="python -m proof")
