"""`python -m proof torture` and `python -m proof crash`, in a checkout of the repository."""

from __future__ import annotations

import typer

from proof.commands.crash import crash
from proof.commands.torture import torture
from sidestream.cli.declare import Command, named
from sidestream.cli.errors import Commands
from sidestream.cli.options import Debug

app = typer.Typer(
    cls=Commands,
    help="Run the engine in many orders of execution, and kill it at random moments; plant known faults.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _global_options(debug: Debug = False) -> None:
    """Declare the global option, which `Commands` reads."""


app.command(cls=Command)(named(torture))
app.command(cls=Command)(named(crash))

if __name__ == "__main__":
    app(prog_name="python -m proof")
